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

/// Makes the tables.
async fn migrated(url: &str) {
    let url = format!("{url}?migrate=true");
    PostgresStore::open(&url).await.unwrap();
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

    fn advice(&self, check: &str) -> String {
        let found = self.findings.iter().find(|found| found["check"] == check);
        found.map_or_else(String::new, |found| found["advice"].to_string())
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
    assert!(empty.advice("schema").contains("leasehold migrate"));
    // Looking leaves nothing behind.
    let stats = leasehold(&["stats", "--url", &server.url()]);
    assert_eq!(stats.status.code(), Some(3), "{stats:?}");
    let told = String::from_utf8(stats.stderr).unwrap();
    assert!(told.contains("leasehold migrate"), "{told}");
    let db = server.client().await;
    let made = "SELECT count(*) FROM pg_namespace WHERE nspname = 'leasehold'";
    assert_eq!(db.query_one(made, &[]).await.unwrap().get::<_, i64>(0), 0);
    migrated(&server.url()).await;
    let report = Report::of(&server.url());
    assert_eq!(report.code, Some(0), "{:?}", report.findings);
    for check in [
        "version",
        "schema",
        "durability",
        "vacuum",
        "transactions",
        "enqueuers",
        "writable",
        "statements",
        "tokens",
        "ledger",
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
    migrated(&server.url()).await;
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
    let rights = Report::of(&of("half")).found("rights");
    for missing in [
        "INSERT, UPDATE, DELETE of job;",
        "INSERT of audit;",
        "sequence place",
    ] {
        assert!(rights.contains(missing), "{rights}");
    }
    let settings = "CREATE ROLE mute LOGIN SUPERUSER; CREATE ROLE hasty LOGIN SUPERUSER;
                    ALTER ROLE mute SET default_transaction_read_only = on;
                    ALTER ROLE hasty SET statement_timeout = '20ms'";
    db.batch_execute(settings).await.unwrap();
    assert_eq!(Report::of(&of("mute")).level("writable"), "risk");
    let report = Report::of(&of("hasty"));
    assert_eq!(report.level("statements"), "risk");
    assert!(report.found("statements").contains("20 ms"));

    for (known, code) in [("postgres@", 3), ("/postgres", 1)] {
        let unknown = known.replace("postgres", "nowhere");
        let url = server.url();
        let (before, after) = url.rsplit_once(known).unwrap();
        let wrong = leasehold(&["doctor", &format!("{before}{unknown}{after}")]);
        assert_eq!(wrong.status.code(), Some(code), "{wrong:?}");
        let complaint = String::from_utf8(wrong.stderr).unwrap();
        assert!(
            complaint.contains("\"nowhere\" does not exist"),
            "{complaint}"
        );
    }
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
        "SELECT count(*) FROM leasehold.job",
        "SELECT count(*) FROM leasehold.grants",
    ] {
        let row = db.query_one(left, &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), 0, "{left}");
    }
}

/// The schema of another version, and a transaction that has put a job into a queue and stays open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn another_version_and_an_open_transaction_are_named() {
    let server = Server::start(&["fsync=off"]);
    migrated(&server.url()).await;
    let db = server.client().await;
    for (version, oldest, level) in [
        (9, 1, "note"),
        (9, 9, "risk"),
        (0, 0, "risk"),
        (1, 1, "fine"),
    ] {
        let set = format!("UPDATE leasehold.meta SET version = {version}, oldest = {oldest}");
        db.batch_execute(&set).await.unwrap();
        let report = Report::of(&server.url());
        assert_eq!(
            report.level("schema"),
            level,
            "{version} from {oldest}: {:?}",
            report.findings
        );
    }
    db.batch_execute("UPDATE leasehold.meta SET code = 'another'")
        .await
        .unwrap();
    assert_eq!(Report::of(&server.url()).level("schema"), "note");

    // The first one makes the queue.
    let enqueue = "SELECT leasehold.enqueue('mail', 'work', '1')";
    db.batch_execute(enqueue).await.unwrap();
    let mut slow = server.client().await;
    let open = slow.transaction().await.unwrap();
    open.batch_execute(enqueue).await.unwrap();
    let report = Report::of(&server.url());
    assert_eq!(report.level("enqueuers"), "fine", "it has just begun");
    tokio::time::sleep(Duration::from_secs(31)).await;
    let report = Report::of(&server.url());
    assert_eq!(report.level("enqueuers"), "risk", "{:?}", report.findings);
    let told = report.found("enqueuers");
    assert!(
        told.contains("leasehold/mail") && told.contains("role postgres"),
        "{told}"
    );
    open.commit().await.unwrap();
    assert_eq!(Report::of(&server.url()).level("enqueuers"), "fine");
}

/// Whatever keeps vacuum from its work has a name, in whichever database it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn the_oldest_transaction_is_named() {
    let server = Server::start(&["fsync=off"]);
    migrated(&server.url()).await;
    let db = server.client().await;
    db.batch_execute("CREATE DATABASE reports").await.unwrap();
    let mut config = server.config();
    config.dbname("reports").application_name("nightly sums");
    let (mut elsewhere, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    assert!(
        !Report::of(&server.url())
            .found("transactions")
            .contains("nightly sums")
    );
    let open = elsewhere.transaction().await.unwrap();
    let pid = open
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap();
    let pid: i32 = pid.get(0);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let told = Report::of(&server.url()).found("transactions");
    for part in [
        &*format!("process {pid} of role"),
        "reports",
        "nightly sums",
        "idle in transaction",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let age = told
        .split("open for ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    assert!(age.unwrap().parse::<u64>().unwrap() >= 2, "{told}");
    open.commit().await.unwrap();
    assert!(
        !Report::of(&server.url())
            .found("transactions")
            .contains("nightly sums")
    );
}
