//! What the commands that only look show.

use std::io::{BufRead as _, BufReader};

use crate::operate::http::get;
use crate::operate::world::{New, on_each_store};

on_each_store! {
    leases_are_found_by_holder_and_by_time_left,
    workers_are_what_the_leases_say,
    the_keys_with_the_most_parked_jobs_come_first,
    a_job_tells_how_its_leases_ended_and_why,
    jobs_are_listed_by_queue_state_and_kind_and_paged,
    a_list_longer_than_a_page_is_read_page_by_page,
    dead_jobs_are_grouped_by_kind_and_error,
    stats_can_be_watched,
    a_store_is_served,
}

async fn leases_are_found_by_holder_and_by_time_left(new: New) {
    let place = new();
    let stage = place.world().await.stage().await;
    let ids = |args: &[&str]| -> Vec<String> {
        let leases = place.json(&[&["leases", "ls"], args].concat());
        let leases = leases["leases"].as_array().unwrap().clone();
        leases
            .iter()
            .map(|lease| lease["job"].as_str().unwrap().to_owned())
            .collect()
    };
    let (soon, late) = (stage.soon.id.to_string(), stage.late.id.to_string());
    assert_eq!(ids(&[]), [&*soon, &*late]);
    assert_eq!(ids(&["--expiring-within", "2h"]), [&*soon]);
    assert_eq!(ids(&["--expiring-within", "5h"]), [&*soon, &*late]);
    assert_eq!(ids(&["--expiring-within", "1s"]), [""; 0]);
    assert_eq!(ids(&["--owner", "host-2"]), [&*late]);
    assert_eq!(ids(&["--task", "deploy-7", "--owner", "host-1"]), [&*soon]);
    assert_eq!(ids(&["--task", "deploy-8"]), [""; 0]);
    assert_eq!(ids(&["--queue", "night"]), [""; 0]);

    let text = place.text(&["leases", "ls"]);
    for word in [&*soon, "host-1", "deploy-7", "3 of 8 pages", "time left"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(
        place.text(&["leases", "ls", "--queue", "night"]),
        "no leases\n"
    );
    let dead = place.text(&["dead", "ls", "--queue", "day"]);
    assert_eq!(dead, "no dead jobs\n");
}

async fn the_keys_with_the_most_parked_jobs_come_first(new: New) {
    let place = new();
    let world = place.world().await;
    for (key, jobs) in [("tenant 1", 2), ("tenant 2", 5), ("tenant 3", 1)] {
        for _ in 0..jobs {
            let job = crate::operate::world::job("day", "mail")
                .exclusive(key)
                .unwrap();
            world.enqueue(job).await;
        }
    }
    let keys = place.json(&["queues", "parked", "day"]);
    let expected = serde_json::json!({
        "keys": [{ "key": "tenant 2", "jobs": 4 }, { "key": "tenant 1", "jobs": 1 }],
        "more": false,
    });
    assert_eq!(keys, expected);
    let first = place.ndjson(&["queues", "parked", "day", "--limit", "1"]);
    assert_eq!(first, [expected["keys"][0].clone()]);
    assert!(
        place
            .text(&["queues", "parked", "day"])
            .contains("tenant 2")
    );
}

async fn workers_are_what_the_leases_say(new: New) {
    let place = new();
    place.world().await.stage().await;
    let workers = place.ndjson(&["workers", "ls"]);
    let owners: Vec<_> = workers.iter().map(|worker| &worker["owner"]).collect();
    assert_eq!(owners, ["host-1", "host-2"]);
    assert!(
        workers
            .iter()
            .all(|worker| worker["leases"] == 1 && worker["overdue"] == 0)
    );
    let left = |at: usize| workers[at]["least_time_left_seconds"].as_f64().unwrap();
    assert!(left(0) < 3600.1 && left(1) > 3600.1, "{workers:?}");
    assert!(place.text(&["workers", "ls"]).contains("oldest lease"));
}

async fn a_job_tells_how_its_leases_ended_and_why(new: New) {
    let place = new();
    let stage = place.world().await.stage().await;
    let id = stage.soon.id.to_string();
    let shown = place.json(&["jobs", "show", &id]);
    let history = shown["history"].as_array().unwrap();
    let ends: Vec<_> = history
        .iter()
        .map(|ended| (&ended["end"], &ended["cause"]))
        .collect();
    assert_eq!(ends[0], (&"expired".into(), &"deadline".into()));
    let why = history[0]["why"].as_str().unwrap();
    assert!(why.starts_with("nobody renewed it"), "{why}");
    assert_eq!(ends[1], (&"retried".into(), &serde_json::Value::Null));
    assert_eq!(history[1]["why"], "no route to \u{1b}[31mhost\u{1b}[0m");
    assert_eq!(shown["lease"]["owner"], "host-1");
    assert_eq!(
        (&shown["attempt"], &shown["failures"], &shown["expiries"]),
        (&3.into(), &1.into(), &1.into())
    );
    // As it was stored: no reader has rounded the number.
    assert_eq!(shown["payload"], r#"{"big":12345678901234567890123}"#);

    let text = place.text(&["jobs", "show", &id]);
    for words in [
        "held by host-1 for deploy-7",
        "expired (deadline)",
        "nobody renewed it",
        "no route to",
        "tenant 7",
        "traceparent: 00-1",
        "12345678901234567890123",
        "3 of 8 pages",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    // A reason cannot steer the terminal of whoever reads it.
    assert!(!text.contains('\x1b'), "{text:?}");
    assert!(
        place
            .text(&["jobs", "show", &stage.ready.to_string()])
            .contains("no lease has ended yet")
    );
}

async fn jobs_are_listed_by_queue_state_and_kind_and_paged(new: New) {
    let place = new();
    let stage = place.world().await.stage().await;
    let count = |args: &[&str]| place.ndjson(&[&["jobs", "ls"], args].concat()).len();
    assert_eq!(count(&[]), 7);
    assert_eq!(count(&["--queue", "day"]), 4);
    assert_eq!(count(&["--state", "dead"]), 3);
    assert_eq!(count(&["--kind", "report"]), 3);
    assert_eq!(
        count(&["--kind", "report", "--state", "dead", "--queue", "night"]),
        2
    );
    let scheduled = place.ndjson(&["jobs", "ls", "--state", "scheduled"]);
    assert_eq!(scheduled[0]["id"], stage.scheduled.to_string());

    let first = place.json(&["jobs", "ls", "--limit", "3"]);
    assert_eq!(first["jobs"].as_array().unwrap().len(), 3);
    assert_eq!(first["more"], true);
    let all = place.json(&["jobs", "ls", "--limit", "7"]);
    assert_eq!(
        (all["jobs"].as_array().unwrap().len(), &all["more"]),
        (7, &false.into())
    );
    let output = place.run(&["jobs", "ls", "--limit", "3"]);
    assert!(crate::operate::world::stderr(&output).contains("--limit"));
}

async fn a_list_longer_than_a_page_is_read_page_by_page(new: New) {
    let place = new();
    let world = place.world().await;
    let jobs = (0..2_345).map(|_| crate::operate::world::job("day", "mail"));
    world.client.enqueue_many(jobs).await.unwrap();
    let ids = place
        .ndjson(&["jobs", "ls", "--limit", "0"])
        .into_iter()
        .map(|job| job["id"].to_string());
    let ids: std::collections::BTreeSet<_> = ids.collect();
    assert_eq!(ids.len(), 2_345);
    assert_eq!(
        place.ndjson(&["jobs", "ls", "--limit", "1500"]).len(),
        1_500
    );
}

async fn dead_jobs_are_grouped_by_kind_and_error(new: New) {
    let place = new();
    place.world().await.stage().await;
    let groups = place.ndjson(&["dead", "ls"]);
    let named = |at: usize| {
        (
            groups[at]["kind"].as_str().unwrap(),
            groups[at]["error"].as_str().unwrap(),
        )
    };
    assert_eq!(groups.len(), 2);
    assert_eq!(
        (named(0), &groups[0]["jobs"]),
        (("report", "timeout after # ms"), &2.into())
    );
    assert_eq!(
        (named(1), &groups[1]["jobs"]),
        (("mail", "no such mailbox"), &1.into())
    );

    let count = |args: &[&str]| {
        place
            .ndjson(&[&["dead", "ls", "--ungrouped"], args].concat())
            .len()
    };
    assert_eq!(count(&[]), 3);
    assert_eq!(count(&["--match", "MAILBOX"]), 1);
    assert_eq!(count(&["--match", "after 31"]), 1);
    // Each has run once: the attempt of the dead is the last one, not the next.
    for dead in place.ndjson(&["dead", "ls", "--ungrouped"]) {
        let runs = dead["failures"].as_u64().unwrap() + dead["expiries"].as_u64().unwrap();
        assert_eq!((dead["attempt"].as_u64(), runs), (Some(1), 1), "{dead}");
    }
    let table = place.text(&["dead", "ls", "--ungrouped", "--match", "MAILBOX"]);
    let row = table.lines().find(|line| line.contains("no such mailbox"));
    let cells: Vec<&str> = row.unwrap().split_whitespace().collect();
    assert_eq!(cells[1..4], ["mail", "night", "1"], "{table}");
    // The name of a group can be given back.
    assert_eq!(count(&["--match", "timeout after # ms"]), 2);
    assert_eq!(count(&["--match", "report"]), 2);
    assert_eq!(count(&["--queue", "day"]), 0);
}

async fn stats_can_be_watched(new: New) {
    let place = new();
    let world = place.world().await;
    world
        .enqueue(crate::operate::world::job("day", "mail"))
        .await;
    for watch in [&["--watch"][..], &["--watch", "0.1"]] {
        let args = [&["stats"], watch, &["--output", "json"]].concat();
        let mut child = place
            .command(&args)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for line in lines.take(2) {
            let document: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
            assert_eq!(document["queues"][0]["counts"]["ready"], 1);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

/// A server that ends with the test.
struct Serving(std::process::Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn a_store_is_served(new: New) {
    let place = new();
    let stage = place.world().await.stage().await;
    let mut command = place.command(&["serve", "--listen", "127.0.0.1:0"]);
    let mut child = command
        .stdin(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = child.stderr.take().unwrap();
    let _serving = Serving(child);
    let mut line = String::new();
    BufReader::new(stderr).read_line(&mut line).unwrap();
    let (_, url) = line.trim().split_once("http://").expect(&line);
    let at = url.trim_end_matches('/').parse().unwrap();

    let job = get(at, &format!("/jobs/{}", stage.soon.id)).await;
    assert!(job.body.contains("host-1"), "{job:?}");
    let scrape = get(at, "/metrics").await;
    let dead = ",queue=\"night\",state=\"dead\"} 3";
    assert!(scrape.body.contains(dead), "{scrape:?}");
}
