//! Trouble is one clear line and the documented exit code, whatever the command.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::operate::world::{New, job, leasehold, on_each_store, refused, sqlite};

on_each_store! {
    what_is_not_there_is_not_found,
}

const NOBODY: &str = "01977a3e-11aa-7bcd-8f00-0123456789ab";

/// Every command that needs a store that is there, with arguments that are right.
const COMMANDS: &[&[&str]] = &[
    &["stats"],
    &["queues", "ls"],
    &["queues", "parked", "day"],
    &["queues", "pause", "day"],
    &["queues", "resume", "day"],
    &["queues", "purge", "day", "--yes"],
    &["queues", "rm", "day"],
    &["leases", "ls"],
    &["leases", "revoke", NOBODY, "--reason", "x", "--yes"],
    &["jobs", "ls"],
    &["jobs", "show", NOBODY],
    &["jobs", "cancel", NOBODY, "--yes"],
    &["jobs", "retry", NOBODY],
    &["dead", "ls"],
    &["dead", "retry", "--all"],
    &["dead", "purge", "--all", "--yes"],
    &["workers", "ls"],
    &["audit"],
    &["top"],
];

/// Those that need none, make one, or find it in their own way.
const OTHERS: &[&[&str]] = &[
    &["enqueue", "mail"],
    &["serve", "--listen", "127.0.0.1:0"],
    &["doctor"],
    &["bench"],
    &["demo"],
    &["migrate"],
    &["completions"],
    &["man"],
];

/// The manual has a page for each command: none is left out here.
#[test]
fn every_command_is_on_the_list() {
    let dir = tempfile::tempdir().unwrap();
    let man = ["man", "--dir", dir.path().to_str().unwrap()];
    assert!(leasehold(&man).output().unwrap().status.success());
    let pages = std::fs::read_dir(dir.path()).unwrap().map(|page| {
        let name = page.unwrap().file_name().into_string().unwrap();
        name.trim_end_matches(".1").to_owned()
    });
    let pages: std::collections::BTreeSet<String> = pages.collect();
    let is_leaf = |page: &&String| !pages.iter().any(|p| p.starts_with(&format!("{page}-")));
    let listed = COMMANDS.iter().chain(OTHERS).map(|args| {
        let two = format!("leasehold-{}", args[..args.len().min(2)].join("-"));
        if pages.contains(&two) {
            two
        } else {
            format!("leasehold-{}", args[0])
        }
    });
    let listed: std::collections::BTreeSet<String> = listed.collect();
    let leaves: std::collections::BTreeSet<String> =
        pages.iter().filter(is_leaf).cloned().collect();
    assert_eq!(leaves, listed);
}

#[test]
fn a_wrong_or_missing_store_is_one_line() {
    let place = sqlite();
    let path = place.url.strip_prefix("sqlite://").unwrap().to_owned();
    for args in COMMANDS {
        refused(leasehold(args), 2, "LEASEHOLD_URL");
        place.refused(args, 3, "no store at");
        let mut wrong = leasehold(args);
        wrong.args(["--url", "kafka://ann:hunter2@host:1/0"]);
        let output = wrong.output().unwrap();
        let text = crate::operate::world::stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(
            text.contains("kafka") && !text.contains("hunter2"),
            "{text}"
        );
    }
    assert!(
        !std::path::Path::new(&path).exists(),
        "looking must not make a store"
    );

    std::fs::write(&path, "not a database ".repeat(512)).unwrap();
    for args in COMMANDS {
        place.refused(args, 3, "sqlite");
    }
}

/// A command that repeats its calls takes at least 30 s, one that does not at most 8, and a busy
/// machine some more.
const SOON: Duration = Duration::from_secs(28);

/// The command tells soon, in one line and without the password, that this server does not answer.
fn gives_up(url: &str, args: &[&str]) {
    let began = Instant::now();
    let mut command = leasehold(args);
    let command = command.args(["--url", url]).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = crate::operate::world::stderr(&output);
    assert_eq!(output.status.code(), Some(3), "{args:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
    let store = if url.starts_with("redis") {
        "redis"
    } else {
        "postgres"
    };
    assert!(text.contains(store), "{args:?}: {text}");
    assert!(!text.contains("hunter2"), "{args:?}: {text}");
    assert!(output.stdout.is_empty(), "{args:?}");
    assert!(began.elapsed() < SOON, "{args:?}: {:?}", began.elapsed());
}

#[tokio::test]
async fn a_dead_server_is_one_line_and_soon() {
    // Bound and not listening: nobody else gets the port, and whoever knocks is turned away.
    let closed = tokio::net::TcpSocket::new_v4().unwrap();
    closed.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let at = closed.local_addr().unwrap();
    for args in COMMANDS.iter().chain(&OTHERS[..3]) {
        gives_up(&format!("redis://ann:hunter2@{at}"), args);
        gives_up(&format!("postgres://ann:hunter2@{at}/app"), args);
    }
    // One that takes calls and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap();
    for args in [&["stats"][..], &["enqueue", "mail"]] {
        gives_up(&format!("redis://ann:hunter2@{at}"), args);
        gives_up(&format!("postgres://ann:hunter2@{at}/app"), args);
    }
}

#[test]
fn what_bench_cannot_measure_it_says() {
    let url = "mysql://ann:hunter2@127.0.0.1:1/app";
    refused(leasehold(&["bench", url]), 2, "cannot measure \"mysql\"");
}

#[test]
fn a_password_is_not_printed_where_it_does_not_belong() {
    for args in [
        &["redis://ann:hunter2@host:1/0"][..],
        &["stats", "redis://ann:hunter2@host:1/0"],
        &["stats", "--output", "redis://ann:hunter2@host:1/0"],
        &["jobs", "show", "redis://ann:hunter2@host:1/0"],
    ] {
        let output = leasehold(args).output().unwrap();
        let text = crate::operate::world::stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
    let help = leasehold(&["stats", "--help"])
        .env("LEASEHOLD_URL", "redis://ann:hunter2@host:1/0")
        .output()
        .unwrap();
    assert!(!String::from_utf8_lossy(&help.stdout).contains("hunter2"));
}

async fn what_is_not_there_is_not_found(new: New) {
    let place = new();
    let world = place.world().await;
    let id = world.enqueue(job("day", "mail")).await.to_string();
    for args in [
        &["jobs", "show", NOBODY][..],
        &["jobs", "cancel", NOBODY, "--yes"],
        &["jobs", "retry", NOBODY],
        &["dead", "retry", NOBODY],
        &["dead", "purge", NOBODY, "--yes"],
        &["leases", "revoke", NOBODY, "--reason", "x", "--yes"],
    ] {
        place.refused(args, 3, NOBODY);
    }
    place.refused(
        &["leases", "revoke", &id, "--reason", "x", "--yes"],
        3,
        "it is ready",
    );
    place.refused(
        &[
            "leases", "revoke", "--owner", "nobody", "--reason", "x", "-y",
        ],
        3,
        "nobody",
    );
    for args in [
        &["queues", "parked", "nigth"][..],
        &["queues", "pause", "nigth"],
        &["queues", "resume", "nigth"],
        &["queues", "purge", "nigth", "--yes"],
        &["jobs", "ls", "--queue", "nigth"],
        &["dead", "ls", "--queue", "nigth"],
        &["dead", "purge", "--all", "--queue", "nigth", "--yes"],
    ] {
        place.refused(args, 3, "no queue nigth");
    }
}

#[test]
fn wrong_usage_is_one_line() {
    let place = sqlite();
    for (args, says) in [
        (&["jobs", "show", "17"][..], "17"),
        (&["jobs", "ls", "--state", "asleep"], "asleep"),
        (&["jobs", "cancel"], "JOB"),
        (&["leases", "ls", "--expiring-within", "soon"], "soon"),
        (&["leases", "ls", "--limit", "few"], "few"),
        (&["queues", "pause", "two words"], "two words"),
        (&["dead", "purge", "--all", "--match", "x"], "--match"),
        (&["stats", "--output", "xml"], "xml"),
        (&["stats", "--watch", "0.01"], "0.1"),
        (&["completions", "cmd"], "cmd"),
        (&["queues", "drop", "day"], "drop"),
    ] {
        place.refused(args, 2, says);
    }
}

#[test]
fn the_exit_codes_are_in_the_help() {
    let help = leasehold(&["--help"]).output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    for code in ["0  done", "1  failed", "2  wrong usage", "3  not found"] {
        assert!(text.contains(code), "{text}");
    }
}
