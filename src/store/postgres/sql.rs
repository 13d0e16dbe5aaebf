//! The statements, by name. Each file of them holds the statements of one verb.
//!
//! They are sent unnamed, with the types of their arguments: one round trip each, several in one
//! where they do not depend on each other, and nothing that is left behind in the session. That is
//! what a pooler in transaction mode needs; planning them anew costs less than a tenth of a call.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::store::sql::statements::named;

const FILES: [&str; 10] = [
    include_str!("session.sql"),
    include_str!("enqueue.sql"),
    include_str!("claim.sql"),
    include_str!("renew.sql"),
    include_str!("settle.sql"),
    include_str!("checkpoint.sql"),
    include_str!("reap.sql"),
    include_str!("control.sql"),
    include_str!("inspect.sql"),
    include_str!("prune.sql"),
];

static STATEMENTS: LazyLock<HashMap<&str, &str>> = LazyLock::new(|| named(&FILES));

/// Text of ours with another schema in the place of `leasehold`.
pub(super) fn in_schema(sql: &str, schema: &str) -> String {
    sql.replace("leasehold.", &format!("\"{schema}\"."))
}

/// The statements of one schema.
#[derive(Debug)]
pub(super) struct Statements(HashMap<&'static str, String>);

impl Statements {
    pub(super) fn new(schema: &str) -> Self {
        let statements = STATEMENTS.iter();
        Self(
            statements
                .map(|(name, sql)| (*name, in_schema(sql, schema)))
                .collect(),
        )
    }

    /// A name that is not there is empty text, and fails where it is first used.
    pub(super) fn get(&self, name: &'static str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }
}
