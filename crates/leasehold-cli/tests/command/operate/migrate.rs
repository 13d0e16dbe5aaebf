//! `leasehold migrate`: for PostgreSQL only.

use crate::operate::postgres_server::Server;
use crate::operate::world::{leasehold, refused, sqlite, stderr};

#[test]
fn the_statements_are_printed_without_a_server() {
    let show = ["migrate", "--show-sql", "--schema", "jobs"];
    let output = leasehold(&show).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("CREATE TABLE") && text.contains("jobs"),
        "{text}"
    );
}

#[test]
fn another_store_or_a_dead_server_is_one_line() {
    sqlite().refused(
        &["migrate"],
        2,
        "url: only PostgreSQL has tables to migrate",
    );
    refused(leasehold(&["migrate"]), 2, "LEASEHOLD_URL");
    let mut dead = leasehold(&["migrate"]);
    dead.args(["--url", "postgres://ann:hunter2@127.0.0.1:1/app"]);
    refused(dead, 3, "postgres");
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn a_new_database_gets_its_tables_and_keeps_them() {
    let server = Server::start(&["fsync=off"]);
    for _ in 0..2 {
        let mut migrate = leasehold(&["migrate"]);
        let output = migrate.args(["--url", &server.url()]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(output.stdout.starts_with(b"the schema is up to date"));
    }
    let mut queues = leasehold(&["queues", "ls", "--output", "ndjson"]);
    let output = queues.args(["--url", &server.url()]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}
