//! The `leasehold` command, as a process: what it prints, where, and how it ends.

use leasehold_support::postgres as postgres_server;
use leasehold_support::redis as redis_server;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn leasehold(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    command.args(args).env_remove("LEASEHOLD_URL");
    command
}

fn run(args: &[&str]) -> Output {
    leasehold(args).stdin(Stdio::null()).output().unwrap()
}

/// The one JSON document on stdout.
fn json(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text:?}");
    serde_json::from_str(&text).unwrap()
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Trouble: nothing on stdout, one line on stderr, this exit code.
fn refused(args: &[&str], code: i32, says: &str) {
    let output = run(args);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
    assert!(text.contains(says), "{args:?}: {text}");
    assert!(output.stdout.is_empty(), "{args:?}");
}

/// Far more than anything here takes, on a machine that others use as well.
const PATIENCE: Duration = Duration::from_secs(120);

fn url(dir: &tempfile::TempDir) -> String {
    format!("sqlite://{}", dir.path().join("jobs.db").display())
}

#[test]
fn the_demo_loses_nothing_and_refuses_the_zombie() {
    plays("a SQLite file", &["demo", "--json"]);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn the_demo_plays_on_redis() {
    let server = redis_server::Standalone::start(&[]);
    plays("Redis", &["demo", "--json", "--url", server.url()]);
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn the_demo_plays_on_postgres() {
    let server = postgres_server::Server::start(&["fsync=off"]);
    plays("PostgreSQL", &["demo", "--json", &server.url()]);
}

#[test]
fn workers_of_the_demo_cannot_share_memory() {
    refused(&["demo", "memory:"], 2, "memory");
}

fn plays(place: &str, args: &[&str]) {
    let began = Instant::now();
    let output = run(args);
    let took = began.elapsed();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(took < PATIENCE, "{took:?}");
    let result = json(&output);
    let ended = [
        "completed",
        "retried",
        "surrendered",
        "buried",
        "cancelled",
        "expired",
        "revoked",
        "live",
    ];
    let expected = ended
        .into_iter()
        .chain(["granted", "lost", "stale_refused"]);
    assert_eq!(keys(&result), expected.collect());
    let count = |key: &str| result[key].as_u64().unwrap();
    assert_eq!(count("granted"), ended.map(count).iter().sum::<u64>());
    assert_eq!((count("lost"), count("live")), (0, 0));
    assert!(count("stale_refused") > 0);
    // At least two leases each, of the killed worker and of the frozen one.
    assert!(count("expired") >= 4, "{result}");
    for says in [place, "SIGKILL", "SIGSTOP", "FENCED"] {
        assert!(stderr(&output).contains(says), "{says}");
    }
}

/// The children of a process, as the kernel has them.
#[cfg(target_os = "linux")]
fn children(of: u32) -> Vec<String> {
    let parent = |pid: &String| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name of a program may hold anything, a closing bracket too.
        let (_, rest) = stat.rsplit_once(')')?;
        rest.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().into_string().ok());
    pids.filter(|pid| parent(pid) == Some(of)).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn a_demo_that_is_killed_takes_its_workers_along() {
    let mut demo = leasehold(&["demo"]).stderr(Stdio::null()).spawn().unwrap();
    let is_worker = |pid: &String| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|command| command.contains("demo-worker"))
    };
    let until = Instant::now() + PATIENCE;
    let workers = loop {
        let found = children(demo.id());
        if found.len() == 4 && found.iter().all(is_worker) {
            break found;
        }
        assert!(Instant::now() < until, "the workers did not start");
        std::thread::sleep(Duration::from_millis(20));
    };
    // The worst case: one of them is frozen.
    let stop = Command::new("kill").args(["-STOP", &workers[0]]).status();
    assert!(stop.unwrap().success());
    demo.kill().unwrap();
    demo.wait().unwrap();
    let until = Instant::now() + PATIENCE;
    while workers.iter().any(is_worker) {
        assert!(Instant::now() < until, "a worker outlived the demo");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn bench(store: &str) -> Value {
    let output = run(&["bench", store, "--jobs", "3000", "--slots", "4", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let result = json(&output);
    let expected = [
        "store",
        "jobs",
        "slots",
        "payload_bytes",
        "enqueue_per_s",
        "drain_per_s",
        "wait_ms_p50",
        "wait_ms_p99",
        "lost",
        "duplicates",
        "raw_enqueue_per_s",
        "raw_drain_per_s",
        "drain_over_raw",
    ];
    assert_eq!(keys(&result), BTreeSet::from(expected));
    for key in ["lost", "duplicates"] {
        assert_eq!(result[key], 0, "{result}");
    }
    for key in [
        "enqueue_per_s",
        "drain_per_s",
        "raw_enqueue_per_s",
        "raw_drain_per_s",
    ] {
        assert!(result[key].as_u64().unwrap() > 0, "{result}");
    }
    assert_eq!(
        (&result["jobs"], &result["slots"]),
        (&3000.into(), &4.into())
    );
    assert!(stderr(&output).is_empty(), "{}", stderr(&output));
    result
}

#[test]
fn bench_measures_memory() {
    assert_eq!(bench("memory:")["store"], "memory");
}

#[test]
fn bench_measures_sqlite_and_leaves_the_directory_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(bench(&url(&dir))["store"], "sqlite");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn bench_leaves_the_jobs_of_others_alone() {
    let dir = tempfile::tempdir().unwrap();
    let url = url(&dir);
    assert!(run(&["--url", &url, "enqueue", "mail"]).status.success());
    bench(&url);
    let stats = json(&run(&["--url", &url, "stats", "--output", "json"]));
    assert_eq!(stats["queues"].as_array().unwrap().len(), 1);
    assert_eq!(stats["queues"][0]["counts"]["ready"], 1);
}

#[test]
fn what_is_enqueued_is_in_the_stats() {
    let dir = tempfile::tempdir().unwrap();
    let url = url(&dir);
    let args = ["enqueue", "mail", r#"{"to":"a@b"}"#, "--url", &url];
    let first = run(&args);
    let text = String::from_utf8(first.stdout.clone()).unwrap();
    assert!(
        text.trim_end().ends_with(" new"),
        "{text:?} {}",
        stderr(&first)
    );

    let file = dir.path().join("payload.json");
    std::fs::write(&file, "[1, 2, 3]").unwrap();
    let at_file = format!("@{}", file.display());
    let more = [
        "--queue",
        "slow",
        "--delay",
        "1h",
        "--priority",
        "2",
        "--unique-key",
        "k",
        "--exclusive-key",
        "e",
        "--header",
        "traceparent=00-1",
        "--output",
        "json",
    ];
    let args = [&["enqueue", "report", &at_file][..], &more].concat();
    let new = json(
        &leasehold(&args)
            .env("LEASEHOLD_URL", &url)
            .output()
            .unwrap(),
    );
    assert_eq!(new["enqueued"], "new");
    let again = json(
        &leasehold(&args)
            .env("LEASEHOLD_URL", &url)
            .output()
            .unwrap(),
    );
    assert_eq!(again["enqueued"], "duplicate");
    assert_eq!(again["id"], new["id"]);

    let stats = json(&run(&["stats", "--url", &url, "--output", "json"]));
    let queues = stats["queues"].as_array().unwrap();
    let queue = |name: &str| queues.iter().find(|view| view["queue"] == name).unwrap();
    assert_eq!(queue("default")["counts"]["ready"], 1);
    assert!(queue("default")["oldest_ready_seconds"].as_f64().unwrap() >= 0.0);
    assert_eq!(queue("slow")["counts"]["scheduled"], 1);
    assert_eq!(queue("slow")["ledger"]["enqueued"], 1);
    assert_eq!(queue("slow")["balances"], true);

    let table = run(&["stats", "--url", &url]);
    let text = String::from_utf8(table.stdout).unwrap();
    for word in ["slow", "oldest ready", "released : expired"] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn a_payload_can_come_from_stdin() {
    let dir = tempfile::tempdir().unwrap();
    let url = url(&dir);
    let mut child = leasehold(&["enqueue", "mail", "-", "--url", &url])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"{\"to\":1}")
        .unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn trouble_is_one_line_and_an_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let url = url(&dir);
    let missing = dir.path().join("nothing.json");
    let missing = format!("@{}", missing.display());
    refused(&["enqueue", "mail", "--url", "kafka://host:1"], 2, "kafka");
    refused(&["stats", "--url", "sqlite://"], 2, "path");
    refused(&["bench", "kafka://host:1"], 2, "kafka");
    refused(
        &["enqueue", "mail", "{not json", "--url", &url],
        2,
        "payload",
    );
    refused(&["enqueue", "two words", "--url", &url], 2, "kind");
    refused(
        &["enqueue", "mail", "--queue", "a/b", "--url", &url],
        2,
        "queue",
    );
    refused(
        &["enqueue", "mail", "--priority", "8", "--url", &url],
        2,
        "priority",
    );
    refused(
        &["enqueue", "mail", "--delay", "soon", "--url", &url],
        2,
        "delay",
    );
    refused(
        &["enqueue", "mail", &missing, "--url", &url],
        3,
        "nothing.json",
    );
    refused(&["enqueue", "--url", &url], 2, "KIND");
    refused(&["enqueue", "mail"], 2, "LEASEHOLD_URL");
    refused(&["stats", "--url", &url], 3, "no store at");
    refused(&["frobnicate"], 2, "frobnicate");
    refused(&["bench", "memory:", "--jobs", "0"], 2, "jobs");
    refused(&["bench", "memory:", "--rate", "50"], 2, "--regime");
    refused(&["bench", "memory:", "--regime"], 2, "one process");
    refused(
        &["bench", "sqlite:", "--regime", "--jobs", "9"],
        2,
        "--jobs",
    );
    // None of these made a store.
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn a_file_that_is_no_store_is_unhealthy() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("jobs.db"), "not a database ".repeat(512)).unwrap();
    refused(&["stats", "--url", &url(&dir)], 3, "sqlite");
}

#[test]
fn the_doctor_looks_at_a_file_and_changes_nothing() {
    let dir = tempfile::TempDir::new().unwrap();
    refused(&["doctor", &url(&dir)], 3, "no store at");
    assert!(!dir.path().join("jobs.db").exists());
    refused(&["doctor", "ftp://hush"], 2, "redis://");

    let enqueued = run(&["enqueue", "greet", "{}", "--url", &url(&dir)]);
    assert!(enqueued.status.success(), "{}", stderr(&enqueued));
    let output = run(&["doctor", &url(&dir), "--json"]);
    let report = json(&output);
    let level = |check: &str| {
        let findings = report["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["check"] == check);
        found.map_or("missing", |finding| finding["level"].as_str().unwrap())
    };
    for check in ["version", "journal", "synchronous", "log"] {
        assert_eq!(level(check), "fine", "{check}: {report}");
    }
    // The disk is the machine's, and may be full.
    assert_ne!(level("disk"), "missing");
    let healthy = report["healthy"].as_bool().unwrap();
    assert_eq!(output.status.code(), Some(i32::from(!healthy)));

    let path = dir.path().join("jobs.db");
    let db = rusqlite::Connection::open(path).unwrap();
    db.query_row("PRAGMA journal_mode = DELETE", [], |_| Ok(()))
        .unwrap();
    drop(db);
    let output = run(&["doctor", "--url", &url(&dir)]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("risk    journal      delete"), "{text}");

    let memory = run(&["doctor", "memory:"]);
    assert_eq!(memory.status.code(), Some(0));
}
