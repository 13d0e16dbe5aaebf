//! Statements by name, from files that hold those of one verb.

use std::collections::HashMap;

/// A statement starts at a line `-- name: …` and goes on to the next.
pub(crate) fn named(files: &[&'static str]) -> HashMap<&'static str, &'static str> {
    let parts = files
        .iter()
        .flat_map(|file| file.split("-- name: ").skip(1));
    parts
        .filter_map(|part| part.split_once('\n'))
        .map(|(name, sql)| (name.trim(), sql.trim()))
        .collect()
}
