//! The text of the store's functions and statements, as it goes to the server.
//!
//! A `.sql` file holds the functions of one verb and, after a line `-- name: …` and up to the next
//! empty line, the statements that call them. `leasehold.` stands for the schema. What the rules
//! decide is not typed there a second time: `rule.LEAD`, `limit.KEY_BYTES`, `state.READY`,
//! `count.LIVE` and the like are replaced with the numbers of this crate.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use super::inspect::STATES;
use super::settle::OUTCOMES;
use super::tally::Count;
use crate::error::Verb;
use crate::fence::Scope;
use crate::history::Cause;
use crate::job::{JobOptions, Namespace};
use crate::retry::RetryPolicy;
use crate::settings::RunSettings;
use crate::terms::LeaseTerms;
use crate::{limits, rules};

/// In the order in which they are made: a view needs the functions that it calls.
const FILES: [&str; 16] = [
    include_str!("session.sql"),
    include_str!("ends.sql"),
    include_str!("place.sql"),
    include_str!("enqueue.sql"),
    include_str!("claim.sql"),
    include_str!("renew.sql"),
    include_str!("settle.sql"),
    include_str!("checkpoint.sql"),
    include_str!("reap.sql"),
    include_str!("prune.sql"),
    include_str!("listen.sql"),
    include_str!("control.sql"),
    include_str!("remove.sql"),
    include_str!("inspect.sql"),
    include_str!("views.sql"),
    include_str!("public.sql"),
];

/// Plans that depend neither on arguments nor on statistics: those were taken when the queue was
/// empty.
const PLANS: &str = "SET plan_cache_mode = force_generic_plan SET enable_seqscan = off \
    SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off";

/// What makes a record of a job, in the order in which `record.rs` reads it.
const COLUMNS: &str = "j.id, j.kind, j.version, j.enqueued_at, j.run_at, j.line, j.failures, j.expiries, \
    j.max_expiries, j.declined_since, j.checkpoint_seq, j.checkpoint_token, j.unique_key, j.exclusive_key, \
    j.options, j.headers, j.history, j.payload, j.checkpoint, j.result";

static NAMED: LazyLock<HashMap<&str, &str>> = LazyLock::new(named);
static WORDS: LazyLock<Vec<(String, String)>> = LazyLock::new(words);

/// Text of ours with another schema in the place of `leasehold`, and numbers in the place of their
/// names.
pub(super) fn in_schema(sql: &str, schema: &str) -> String {
    let mut text = String::with_capacity(sql.len());
    let mut rest = sql;
    while let Some(at) = rest.find('.') {
        let (before, after) = rest.split_at(at);
        let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let start = before.rfind(word).map_or(0, |at| at + 1);
        let name = &before[start..];
        let till = after[1..].find(word).map_or(after.len(), |at| at + 1);
        let whole = &rest[start..at + till];
        if name == "leasehold" {
            // Writing to a `String` does not fail.
            let _ = write!(text, "{}\"{schema}\".", &before[..start]);
            rest = &after[1..];
        } else if let Ok(at) = WORDS.binary_search_by(|(word, _)| word.as_str().cmp(whole)) {
            text.push_str(&before[..start]);
            text.push_str(&WORDS[at].1.replace("SCHEMA", schema));
            rest = &after[till..];
        } else {
            text.push_str(before);
            text.push('.');
            rest = &after[1..];
        }
    }
    text.push_str(rest);
    text
}

/// All functions and views.
pub(super) fn functions(schema: &str) -> String {
    let mut text = String::new();
    for file in FILES {
        for part in file
            .split("\n\n")
            .filter(|part| !part.starts_with("-- name: "))
        {
            text.push_str(part.trim_end());
            text.push_str("\n\n");
        }
    }
    in_schema(&text, schema)
}

fn named() -> HashMap<&'static str, &'static str> {
    let parts = FILES.iter().flat_map(|file| file.split("\n\n"));
    let parts = parts.filter_map(|part| part.strip_prefix("-- name: ")?.split_once('\n'));
    parts
        .map(|(name, sql)| (name.trim(), sql.trim().trim_end_matches(';')))
        .collect()
}

fn words() -> Vec<(String, String)> {
    let mut words: Vec<(String, String)> = Vec::new();
    let mut add = |word: &str, value: String| words.push((word.to_owned(), value));
    for (name, value) in rules::constants() {
        add(&format!("rule.{name}"), value.to_string());
    }
    add("rule.CALL_BYTES", limits::CALL_BYTES.to_string());
    let usual = JobOptions::default();
    add("rule.MAX_EXPIRIES", usual.max_expiries.to_string());
    add("rule.PRIORITY", usual.priority.to_string());
    for (name, value) in [
        ("NAME_BYTES", limits::NAME_BYTES as u64),
        ("KEY_BYTES", limits::KEY_BYTES as u64),
        ("PAYLOAD_BYTES", limits::PAYLOAD_BYTES as u64),
        ("CHECKPOINT_BYTES", limits::CHECKPOINT_BYTES as u64),
        ("HEADERS", limits::HEADERS as u64),
        ("HEADER_BYTES", limits::HEADER_BYTES as u64),
        ("OWNER_BYTES", limits::OWNER_BYTES as u64),
        ("CALL_ITEMS", limits::CALL_ITEMS as u64),
        ("GRANT_LEASES", limits::GRANT_LEASES as u64),
        ("PRIORITY_MAX", limits::PRIORITY_MAX.into()),
        ("EXPIRIES_MIN", limits::EXPIRIES_MIN.into()),
        ("TERM_MIN", limits::TERM_MIN.as_nanos() as u64),
        ("DURATION_MAX", limits::DURATION_MAX.as_nanos() as u64),
        ("AUDIT_TOKENS", limits::AUDIT_TOKENS as u64),
        ("SCOPE_BYTES", Scope::BYTES as u64),
    ] {
        add(&format!("limit.{name}"), value.to_string());
    }
    for (code, (name, _)) in STATES.iter().enumerate() {
        add(&format!("state.{name}"), code.to_string());
    }
    for (name, code) in OUTCOMES {
        add(&format!("outcome.{name}"), code.to_string());
    }
    for verb in [
        Verb::Enqueue,
        Verb::Claim,
        Verb::Settle,
        Verb::Checkpoint,
        Verb::Reap,
        Verb::Control,
        Verb::Prune,
    ] {
        let name = verb.as_str().to_ascii_uppercase();
        add(&format!("verb.{name}"), verb.code().to_string());
    }
    for (name, count) in Count::NAMES {
        // Arrays of the server begin with 1.
        add(&format!("count.{name}"), (count as usize + 1).to_string());
    }
    add("count.COLUMNS", super::tally::COLUMNS.to_string());
    for cause in [Cause::Deadline, Cause::Stalled, Cause::Lifetime] {
        let name = cause.as_str().to_ascii_uppercase();
        add(&format!("why.{name}"), format!("'{}'", cause.why()));
    }
    add("name.NAMESPACE", format!("'{}'", Namespace::default()));
    let policy = RetryPolicy::default();
    add("retry.BASE", policy.base.as_nanos().to_string());
    add("retry.CAP", policy.cap.as_nanos().to_string());
    add("retry.FACTOR", policy.factor.to_string());
    let most = RunSettings::DEFAULT_MAX_FAILURES;
    add("retry.MAX_FAILURES", most.to_string());
    let lifetime = LeaseTerms::MEDIUM.max_lifetime;
    add("terms.MAX_LIFETIME", lifetime.as_nanos().to_string());
    add("job.COLUMNS", COLUMNS.to_owned());
    add("settings.PLANS", PLANS.to_owned());
    add("channel.PREFIX", "'leasehold_SCHEMA_'".to_owned());
    words.sort_unstable();
    words
}

/// The statements of one schema.
#[derive(Debug)]
pub(super) struct Statements(HashMap<&'static str, String>);

impl Statements {
    pub(super) fn new(schema: &str) -> Self {
        let statements = NAMED.iter();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_numbers_and_the_schema_is_ours() {
        let text = "leasehold.job j WHERE j.state = state.READY AND counts[count.LIVE] = h.LIVE + rule.LEAD";
        let made = in_schema(text, "mine");
        let lead = rules::issue::Issuer::LEAD;
        let expected = format!("\"mine\".job j WHERE j.state = 2 AND counts[19] = h.LIVE + {lead}");
        assert_eq!(made, expected);
        assert_eq!(in_schema("a.b.", "mine"), "a.b.");
    }

    #[test]
    fn no_name_of_a_number_is_left() {
        let text = functions("mine");
        for kind in [
            "rule.",
            "limit.",
            "state.",
            "count.",
            "outcome.",
            "verb.",
            "settings.",
            "channel.",
            "why.",
        ] {
            for (at, _) in text.match_indices(kind) {
                let left = text[..at]
                    .ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.');
                let next = text[at + kind.len()..].chars().next();
                let upper = next.is_some_and(|c| c.is_ascii_uppercase());
                assert!(left || !upper, "{}", &text[at..(at + 40).min(text.len())]);
            }
        }
        assert!(
            !text.contains("-- name:"),
            "a statement among the functions"
        );
        assert!(!text.contains("leasehold."));
    }
}
