//! The statements, by name. Each file of them holds the statements of one verb.

use std::collections::HashMap;
use std::sync::LazyLock;

use rusqlite::{CachedStatement, Connection};

use crate::store::statements::named;

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

/// More than there are statements: none is ever prepared twice by one connection.
pub(super) const CACHED: usize = 128;

/// The prepared statement of that name.
pub(super) fn statement<'c>(
    db: &'c Connection,
    name: &'static str,
) -> rusqlite::Result<CachedStatement<'c>> {
    // A name that is not there prepares as nothing, and fails where it is first used.
    db.prepare_cached(STATEMENTS.get(name).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_statement_prepares_and_none_scans_a_table_of_jobs() {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(include_str!("schema.sql")).unwrap();
        assert!(STATEMENTS.len() < CACHED);
        for (name, sql) in STATEMENTS.iter() {
            db.prepare(sql).unwrap_or_else(|e| panic!("{name}: {e}"));
            let mut plan = db.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
            let nulls = vec![rusqlite::types::Null; plan.parameter_count()];
            let steps = plan
                .query_map(rusqlite::params_from_iter(nulls), |row| {
                    row.get::<_, String>("detail")
                })
                .unwrap();
            for step in steps.map(Result::unwrap) {
                for table in ["ready", "aside", "records", "notes", "unique", "lanes"] {
                    let scan = step.starts_with(&format!("SCAN leasehold_{table}"));
                    assert!(!scan, "{name}: {step}");
                }
                // Sorted: the queues, the live grants. Never a line, nor what waits to be deleted.
                let small = *name == "queue_ids" || name.starts_with("grants_");
                assert!(small || !step.contains("TEMP B-TREE"), "{name}: {step}");
            }
        }
    }
}
