//! `leasehold doctor` on servers with good and bad settings.

use std::process::{Command, Stdio};

use leasehold::NewJob;
use leasehold::job::{Kind, Namespace, QueueName};
use leasehold::store::acl_rule;
use serde_json::Value;

use leasehold_support::redis::{Cluster, RDB_ONLY, SentinelSet, Standalone, until};

const GOOD: &[&str] = &["appendonly yes", "appendfsync always", "maxmemory 200mb"];

struct Report {
    code: Option<i32>,
    findings: Vec<Value>,
    complaint: String,
}

fn doctor(url: &str) -> Report {
    doctor_with(url, &[])
}

fn doctor_with(url: &str, more: &[&str]) -> Report {
    let output = Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .args(["doctor", url, "--json"])
        .args(more)
        .env_remove("LEASEHOLD_URL")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let code = output.status.code();
    let findings = match serde_json::from_slice::<Value>(&output.stdout) {
        Ok(report) => {
            assert_eq!(report["healthy"], code == Some(0));
            report["findings"].as_array().unwrap().clone()
        }
        Err(_) => Vec::new(),
    };
    let complaint = String::from_utf8(output.stderr).unwrap();
    Report {
        code,
        findings,
        complaint,
    }
}

impl Report {
    fn level(&self, check: &str) -> &str {
        let found = self
            .findings
            .iter()
            .find(|finding| finding["check"] == check);
        found.map_or("missing", |finding| finding["level"].as_str().unwrap())
    }

    fn text(&self, check: &str) -> String {
        let found = self
            .findings
            .iter()
            .find(|finding| finding["check"] == check);
        found.map_or_else(String::new, Value::to_string)
    }
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_server_with_good_settings_is_fine() {
    let one = Standalone::start(GOOD);
    let report = doctor(one.url());
    assert_eq!(report.code, Some(0), "{:?}", report.findings);
    for check in [
        "version",
        "persistence",
        "eviction",
        "memory",
        "clock",
        "rights",
    ] {
        assert_eq!(report.level(check), "fine", "{}", report.text(check));
    }
    assert_eq!(
        report.level("replication"),
        "note",
        "{}",
        report.text("replication")
    );
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn each_bad_setting_is_named_with_its_remedy() {
    let nothing: &[&str] = &[];
    for (lines, check, says) in [
        (nothing, "persistence", "loses every job"),
        (RDB_ONLY, "persistence", "since the last snapshot"),
        (
            &["appendonly yes", "appendfsync no"],
            "persistence",
            "appendfsync everysec",
        ),
        (
            &["maxmemory-policy allkeys-lru"],
            "eviction",
            "maxmemory-policy noeviction",
        ),
        (&["maxmemory 900kb"], "memory", "raise `maxmemory`"),
    ] {
        let one = Standalone::start(lines);
        let report = doctor(one.url());
        assert_eq!(report.code, Some(1), "{lines:?}");
        assert_eq!(
            report.level(check),
            "risk",
            "{lines:?}: {:?}",
            report.findings
        );
        assert!(report.text(check).contains(says), "{}", report.text(check));
        assert!(report.complaint.contains("need"), "{}", report.complaint);
    }
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn who_cannot_be_reached_is_told_apart() {
    let mut one = Standalone::with_acl("~* &* +@all");
    let wrong = one.url().replace("app:", "app:hush");
    let report = doctor(&wrong);
    assert_eq!(report.code, Some(3));
    assert!(
        report.complaint.contains("user and password"),
        "{}",
        report.complaint
    );
    assert!(!report.complaint.contains("hush"));
    assert_eq!(doctor("redis://h:x").code, Some(2));
    one.server.kill();
    assert_eq!(doctor(one.url()).code, Some(3));
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn missing_rights_are_listed_and_what_is_not_seen_is_not_fine() {
    let namespace = Namespace::new("shop").unwrap();
    let rule = acl_rule(&namespace);
    let one = Standalone::with_acl(&rule);
    let url = format!("{}?namespace=shop", one.url());
    let report = doctor(&url);
    assert_eq!(report.level("rights"), "fine", "{:?}", report.findings);
    assert_eq!(
        report.level("persistence"),
        "unseen",
        "{:?}",
        report.findings
    );
    assert_eq!(report.code, Some(1));

    one.server
        .tell::<()>(&["ACL", "SETUSER", "app", "-zadd", "-subscribe"]);
    let report = doctor(&url);
    let text = report.text("rights");
    assert_eq!(report.level("rights"), "risk", "{text}");
    assert!(text.contains("lacks subscribe, zadd\""), "{text}");

    // A command that the server knows by no name is one that is missing.
    let unnamed = Standalone::start(&["rename-command zlexcount \"\""]);
    let report = doctor(unnamed.url());
    let text = report.text("rights");
    assert_eq!(report.level("rights"), "risk", "{text}");
    assert!(text.contains("lacks zlexcount\""), "{text}");

    // Another application's keys are out of reach.
    let report = doctor(&format!("{}?namespace=shop2", one.url()));
    assert_eq!(report.level("rights"), "risk", "{:?}", report.findings);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn replicas_need_a_primary_that_waits_for_them() {
    let set = SentinelSet::start(GOOD);
    let report = doctor(&set.url());
    assert_eq!(report.code, Some(1));
    let text = report.text("replication");
    assert!(text.contains("min-replicas-to-write 1"), "{text}");
    set.servers[0].tell::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let report = doctor(&set.url());
    assert_eq!(report.level("replication"), "note", "{:?}", report.findings);
    assert_eq!(report.code, Some(0), "{:?}", report.findings);
    let replica = format!("redis://admin:admin@{}", set.servers[1].address());
    let report = doctor(&replica);
    assert_eq!(report.level("replication"), "risk");
    // It takes no library: that says nothing of the user's rights.
    assert_eq!(report.level("rights"), "note", "{:?}", report.findings);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_cluster_is_looked_at_as_a_whole_and_node_by_node() {
    let mut cluster = Cluster::start(GOOD);
    let report = doctor(&cluster.url());
    assert_eq!(report.level("cluster"), "fine", "{:?}", report.findings);
    let versions = report
        .findings
        .iter()
        .filter(|finding| finding["check"] == "version");
    assert_eq!(versions.count(), 3);
    let one = format!("redis://{}", cluster.nodes[0].address());
    let text = doctor(&one).text("cluster");
    assert!(text.contains("redis+cluster://"), "{text}");

    for lost in [2, 5] {
        cluster.nodes[lost].kill();
    }
    let down = until("the cluster notices", || {
        let report = doctor(&cluster.url());
        (report.level("cluster") == "risk").then_some(report)
    });
    assert_eq!(down.code, Some(1));
}

/// Jobs whose line was deleted by hand are missed and put back. `--repair` is for Redis only.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_repair_puts_back_what_was_deleted() {
    let one = Standalone::start(GOOD);
    let client = leasehold::Client::open(one.url()).await.unwrap();
    for payload in ["1", "2", "3"] {
        let job = NewJob::raw(QueueName::default(), Kind::new("mail").unwrap(), payload);
        client.enqueue(job).await.unwrap();
    }
    assert_eq!(doctor(one.url()).level("losses"), "fine");
    let key = "{leasehold:default:0}:4";
    assert_eq!(one.server.tell::<u64>(&["DEL", key]), 1);

    let report = doctor(one.url());
    assert_eq!(report.code, Some(1), "{:?}", report.findings);
    assert_eq!(report.level("losses"), "risk");
    let text = report.text("losses");
    assert!(text.contains("3 jobs where nobody finds them"), "{text}");
    assert!(text.contains("doctor --repair"), "{text}");

    let report = doctor_with(one.url(), &["--repair"]);
    assert_eq!(report.code, Some(0), "{:?}", report.findings);
    assert_eq!(report.level("repair"), "note");
    assert_eq!(report.level("losses"), "fine");
    assert_eq!(one.server.tell::<u64>(&["LLEN", key]), 3);
    let report = doctor_with(one.url(), &["--repair"]);
    assert_eq!(report.level("repair"), "fine", "{:?}", report.findings);

    let refused = doctor_with("memory:", &["--repair"]);
    assert_eq!(refused.code, Some(2), "{}", refused.complaint);
    assert!(
        refused.complaint.contains("--repair"),
        "{}",
        refused.complaint
    );
}
