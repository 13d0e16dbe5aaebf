//! `leasehold doctor` and `leasehold bench` on servers with good and bad settings.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use leasehold::store::PostgresStore;
use serde_json::Value;

use leasehold_support::postgres::Server;

fn leasehold(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .args(args)
        .env_remove("LEASEHOLD_URL")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

struct Report {
    code: Option<i32>,
    findings: Vec<Value>,
}

impl Report {
    fn of(url: &str) -> Self {
        let output = leasehold(&["doctor", url, "--json"]);
        let code = output.status.code();
        let complaint = String::from_utf8(output.stderr).unwrap();
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {complaint}"));
        assert_eq!(report["healthy"], code == Some(0));
        let findings = report["findings"].as_array().unwrap().clone();
        Self { code, findings }
    }

    fn level(&self, check: &str) -> &str {
        let found = self.findings.iter().find(|found| found["check"] == check);
        found.map_or("missing", |found| found["level"].as_str().unwrap())
    }

    fn found(&self, check: &str) -> String {
        let found = self.findings.iter().find(|found| found["check"] == check);
        found.map_or_else(String::new, |found| found["found"].to_string())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_good_server_is_in_order_and_a_standby_is_not() {
    let server = Server::start(&["wal_level=replica"]);
    let empty = Report::of(&server.url());
    assert_eq!((empty.code, empty.level("schema")), (Some(0), "note"));
    PostgresStore::open(&server.url()).await.unwrap();
    let report = Report::of(&server.url());
    assert_eq!(report.code, Some(0), "{:?}", report.findings);
    for check in [
        "version",
        "schema",
        "durability",
        "vacuum",
        "transactions",
        "clock",
        "encryption",
        "connections",
        "rights",
    ] {
        assert_eq!(report.level(check), "fine", "{:?}", report.findings);
    }
    assert_eq!(report.level("replication"), "note");

    let standby = server.standby();
    let report = Report::of(&standby.url());
    assert_eq!(
        (report.code, report.level("replication")),
        (Some(1), "risk")
    );
    // The primary hears of it when it is connected.
    let db = server.client().await;
    let connected = "SELECT count(*) FROM pg_stat_replication";
    while db.query_one(connected, &[]).await.unwrap().get::<_, i64>(0) == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let report = Report::of(&server.url());
    assert!(report.found("replication").contains("asynchronous"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_at_risk_is_named() {
    let server = Server::start(&["fsync=off", "autovacuum=off", "max_connections=10"]);
    let db = server.client().await;
    PostgresStore::open(&server.url()).await.unwrap();
    let report = Report::of(&server.url());
    assert_eq!(report.code, Some(1));
    assert_eq!(report.level("durability"), "risk");
    assert!(report.found("durability").contains("fsync"));
    assert_eq!(report.level("vacuum"), "risk");

    let roles = "CREATE ROLE weak LOGIN; ALTER ROLE weak SET synchronous_commit = off;
                 CREATE ROLE half LOGIN; GRANT USAGE ON SCHEMA leasehold TO half;
                 GRANT SELECT ON ALL TABLES IN SCHEMA leasehold TO half";
    db.batch_execute(roles).await.unwrap();
    let of = |role: &str| server.url().replace("postgres@", &format!("{role}@"));
    let report = Report::of(&of("weak"));
    assert!(report.found("durability").contains("synchronous_commit"));
    assert!(report.found("rights").contains("USAGE"));
    let report = Report::of(&of("half"));
    assert!(
        report.found("rights").contains("ready"),
        "{:?}",
        report.findings
    );

    let wrong = leasehold(&["doctor", &server.url().replace("/postgres", "/nowhere")]);
    assert_eq!(wrong.status.code(), Some(1), "{wrong:?}");
    let complaint = String::from_utf8(wrong.stderr).unwrap();
    assert!(
        complaint.contains("\"nowhere\" does not exist"),
        "{complaint}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_server_is_measured_and_left_as_it_was() {
    let server = Server::start(&["fsync=off"]);
    let output = leasehold(&["bench", &server.url(), "--jobs", "3000", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["store"], &report["lost"]),
        (&"postgres".into(), &0.into())
    );
    assert!(report["raw_drain_per_s"].as_u64().unwrap() > 0);
    let db = server.client().await;
    for left in [
        "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'raw%'",
        "SELECT count(*) FROM leasehold.ready",
        "SELECT count(*) FROM leasehold.aside",
        "SELECT count(*) FROM leasehold.grants",
    ] {
        let row = db.query_one(left, &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), 0, "{left}");
    }
}
