//! Programs in other languages, in their own transactions, by the functions of the schema.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use leasehold::Client;
use leasehold::inspect;
use leasehold::job::QueueName;

use crate::postgres::server::shared;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a program of `examples/clients`, and looks at what it left behind.
async fn run(mut command: Command, queue: &str, lines: &[&str]) {
    let client = Client::open(&shared().url()).await.unwrap();
    // Creates the tables.
    drop(client.worker());
    client.store().open_session().await.unwrap();
    command
        .env("DATABASE_URL", shared().url())
        .stdin(Stdio::null());
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout);
    let wrote = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{wrote}");
    let always = [
        "paid: order 2, attempt 3, asked the bank",
        "refused: complete LH001",
        "refused: fail LH001",
        "refused: checkpoint LH001",
    ];
    for line in always.iter().chain(lines) {
        assert!(
            said.lines().any(|found| found == *line),
            "no {line:?}:\n{said}{wrote}"
        );
    }
    let queues = inspect::queues(&**client.store()).await.unwrap();
    let queue = QueueName::new(queue).unwrap();
    let ledger = queues
        .iter()
        .find(|status| status.queue == queue)
        .unwrap()
        .ledger;
    let ends = (
        ledger.enqueued,
        ledger.granted,
        ledger.expired(),
        ledger.completed,
    );
    assert_eq!(ends, (1, 3, 1, 1), "{ledger:?}");
    assert_eq!(ledger.retried, 1, "{ledger:?}");
    assert_eq!(
        ledger.fenced, 0,
        "its transaction is rolled back, and the count with it"
    );
    assert!(ledger.balances(), "{ledger:?}");
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn in_sql() {
    let mut psql = Command::new("psql");
    psql.arg(shared().url());
    let mut script = tempfile::NamedTempFile::new().unwrap();
    let text = include_str!("../../../examples/clients/worker.sql");
    script.write_all(text.as_bytes()).unwrap();
    psql.arg("-f").arg(script.path());
    let lines = ["failed: scheduled, attempt 2", "paid: 2 true"];
    run(psql, "psql", &lines).await;
}

#[tokio::test]
#[ignore = "needs postgresql and python3-psycopg: ./tests/run"]
async fn in_python() {
    // The system's, to which its packages belong.
    let systems = PathBuf::from("/usr/bin/python3");
    let program = if systems.exists() {
        systems
    } else {
        "python3".into()
    };
    let mut python = Command::new(program);
    python.arg(root().join("examples/clients/worker.py"));
    let lines = ["failed: scheduled, attempt 2", "orders: [(2, True)]"];
    run(python, "python", &lines).await;
}

#[tokio::test]
#[ignore = "needs postgresql, node and its package pg: ./tests/run"]
async fn in_javascript() {
    let mut node = Command::new("node");
    node.env("NODE_PATH", root().join("target/clients/node_modules"));
    node.arg(root().join("examples/clients/worker.js"));
    let lines = [
        "failed: scheduled, attempt 2",
        r#"orders: [{"id":2,"paid":true}]"#,
    ];
    run(node, "node", &lines).await;
}
