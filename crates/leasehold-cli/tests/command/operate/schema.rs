//! The shape of everything that the command prints for programs. What is here is a promise: fields
//! may be added, none may go or change its type.

use serde_json::{Map, Value, json};

use crate::operate::world::{New, on_each_store};

on_each_store! {
    what_is_printed_for_programs_keeps_its_shape,
    what_the_doctor_finds_keeps_its_shape,
    what_the_bench_measures_keeps_its_shape,
    what_the_regime_measures_keeps_its_shape,
}

/// Keys and types; of a list, those of its first element.
fn shape(value: &Value) -> Value {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "string".into(),
        Value::Array(values) => values.iter().take(1).map(shape).collect(),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| (key.clone(), shape(value)));
            Value::Object(fields.collect::<Map<_, _>>())
        }
    }
}

fn queue() -> Value {
    let counts = [
        "scheduled",
        "ready",
        "parked",
        "leased",
        "completed",
        "dead",
        "cancelled",
    ];
    let ledger = [
        "enqueued",
        "granted",
        "completed",
        "retried",
        "surrendered",
        "buried",
        "cancelled",
        "expired_deadline",
        "expired_stalled",
        "expired_lifetime",
        "dead_by_expiry",
        "revoked",
        "live",
        "late",
        "fenced",
        "pruned",
        "purged",
    ];
    let numbers = |names: &[&str]| -> Value {
        Value::Object(
            names
                .iter()
                .map(|name| ((*name).to_owned(), "number".into()))
                .collect(),
        )
    };
    json!({
        "queue": "string", "paused": "bool", "relaxed": "bool", "counts": numbers(&counts),
        "ledger": numbers(&ledger), "released": "number", "expired": "number", "failed": "number",
        "failed_share": "number", "died": "number", "balances": "bool",
        "oldest_ready_seconds": "number",
    })
}

fn lease(progress: bool) -> Value {
    let shown = json!({ "done": "number", "total": "number", "note": "string" });
    json!({
        "job": "string", "kind": "string", "queue": "string", "owner": "string", "task": "string",
        "token": "number", "attempt": "number", "granted_at": "string",
        "time_left_seconds": "number", "term_seconds": "number", "renewals": "number",
        "cancel": "bool", "progress": if progress { shown } else { "null".into() },
    })
}

/// A job in a list; of some fields it depends on the job whether they are null.
fn job(settled: &str, owner: &str, ended: &str) -> Value {
    json!({
        "id": "string", "kind": "string", "queue": "string", "state": "string", "parked": "bool",
        "attempt": "number", "failures": "number", "expiries": "number", "priority": "number",
        "enqueued_at": "string", "run_at": "string", "settled_at": settled, "owner": owner,
        "last_end": ended, "error": ended,
    })
}

fn done() -> Value {
    json!({ "command": "string", "done": "number", "skipped": "number", "duplicates": [] })
}

async fn what_is_printed_for_programs_keeps_its_shape(new: New) {
    let place = new();
    let stage = place.world().await.stage().await;
    let (dead, scheduled) = (stage.dead[0].to_string(), stage.scheduled.to_string());
    let document = |args: &[&str]| shape(&place.json(args));
    let line = |args: &[&str]| {
        let lines = place.ndjson(args);
        shape(&lines[0])
    };

    assert_eq!(
        document(&["enqueue", "mail"]),
        json!({ "id": "string", "enqueued": "string" })
    );
    assert_eq!(
        line(&["enqueue", "mail"]),
        json!({ "id": "string", "enqueued": "string" })
    );
    assert_eq!(document(&["stats"]), json!({ "queues": [queue()] }));
    assert_eq!(line(&["stats"]), queue());
    assert_eq!(
        document(&["queues", "ls"]),
        json!({ "queues": [queue()], "more": "bool" })
    );
    assert_eq!(line(&["queues", "ls"]), queue());
    assert_eq!(
        document(&["leases", "ls"]),
        json!({ "leases": [lease(true)], "more": "bool" })
    );
    assert_eq!(line(&["leases", "ls"]), lease(true));
    assert_eq!(line(&["leases", "ls", "--owner", "host-2"]), lease(false));

    let buried = job("string", "null", "string");
    let jobs = json!({ "jobs": [buried], "more": "bool" });
    assert_eq!(document(&["jobs", "ls", "--state", "dead"]), jobs);
    assert_eq!(document(&["dead", "ls", "--ungrouped"]), jobs);
    assert_eq!(line(&["dead", "ls", "--ungrouped"]), buried);
    assert_eq!(
        line(&["jobs", "ls", "--state", "leased"]),
        job("null", "string", "string")
    );
    assert_eq!(
        line(&["jobs", "ls", "--state", "ready"]),
        job("null", "null", "null")
    );
    let group = json!({
        "kind": "string", "error": "string", "jobs": "number", "first_at": "string",
        "last_at": "string", "example": "string",
    });
    assert_eq!(
        document(&["dead", "ls"]),
        json!({ "groups": [group], "more": "bool" })
    );
    assert_eq!(line(&["dead", "ls"]), group);
    assert_eq!(
        document(&["queues", "parked", "day"]),
        json!({ "keys": [], "more": "bool" })
    );
    let worker = json!({
        "owner": "string", "task": "string", "leases": "number", "overdue": "number",
        "oldest_granted_at": "string", "least_time_left_seconds": "number", "queues": ["string"],
    });
    assert_eq!(
        document(&["workers", "ls"]),
        json!({ "workers": [worker], "more": "bool" })
    );
    assert_eq!(line(&["workers", "ls"]), worker);

    let shown = document(&["jobs", "show", &stage.soon.id.to_string()]);
    assert_eq!(shown, shown_job());
    assert_eq!(
        line(&["jobs", "show", &stage.soon.id.to_string()]),
        shown_job()
    );

    assert_eq!(document(&["queues", "pause", "day"]), done());
    assert_eq!(line(&["queues", "resume", "day"]), done());
    assert_eq!(document(&["jobs", "retry", &dead]), done());
    assert_eq!(document(&["jobs", "cancel", &scheduled, "--yes"]), done());
    assert_eq!(document(&["dead", "retry", "--match", "timeout"]), done());
    assert_eq!(document(&["dead", "purge", "--all", "--yes"]), done());
    let revoke = [
        "leases", "revoke", "--owner", "host-2", "--reason", "x", "--yes",
    ];
    assert_eq!(document(&revoke), done());
    assert_eq!(document(&["queues", "purge", "day", "--yes"]), done());
    let command = json!({
        "at": "string", "actor": "string", "reason": "string", "command": "string",
        "done": "number", "tokens": [],
    });
    assert_eq!(
        document(&["audit"]),
        json!({ "commands": [command], "more": "bool" })
    );
    assert_eq!(line(&["audit"]), command);
}

async fn what_the_doctor_finds_keeps_its_shape(new: New) {
    let place = new();
    place.world().await.stage().await;
    let output = place.run(&["doctor", "--output", "json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = json!({
        "place": "string", "check": "string", "level": "string", "found": "string",
        "advice": "string",
    });
    assert_eq!(
        shape(&report),
        json!({ "healthy": "bool", "findings": [finding] })
    );
    // What is at risk depends on the machine and on the server's settings.
    let code = i32::from(report["healthy"] == false);
    assert_eq!(output.status.code(), Some(code), "{report}");
}

async fn what_the_bench_measures_keeps_its_shape(new: New) {
    let place = new();
    place.world().await.stage().await;
    let before = place.json(&["queues", "ls"])["queues"].clone();
    let result = place.json(&["bench", "--jobs", "900", "--slots", "4"]);
    let number = Value::from("number");
    let expected = json!({
        "store": "string", "jobs": number, "slots": number, "payload_bytes": number,
        "enqueue_per_s": number, "drain_per_s": number, "wait_ms_p50": number,
        "wait_ms_p99": number, "lost": number, "duplicates": number, "raw_enqueue_per_s": number,
        "raw_drain_per_s": number, "drain_over_raw": number,
    });
    assert_eq!(shape(&result), expected);
    assert_eq!(
        (&result["lost"], &result["duplicates"]),
        (&0.into(), &0.into())
    );
    // It has a namespace of its own.
    let after = place.json(&["queues", "ls"])["queues"].clone();
    assert_eq!(before[0]["counts"], after[0]["counts"]);
    assert_eq!(before[0]["ledger"], after[0]["ledger"]);
}

async fn what_the_regime_measures_keeps_its_shape(new: New) {
    let place = new();
    let regime = ["bench", "--regime", "--seconds", "1", "--rate", "50"];
    let regime = [&regime[..], &["--processes", "2", "--slots", "3"]].concat();
    let result = place.json(&regime);
    let number = Value::from("number");
    let mut expected = json!({
        "store": "string", "rate": 50, "processes": 2, "slots": 3, "job_ms": 5, "seconds": 1, "jobs": 50,
        "store_us_per_job": number, "requests_per_job": number, "commands_per_job": number,
        "writes_per_job": number, "idle_commands_per_s": number, "idle_writes_per_s": number,
        "worker_us_per_job": number, "wait_ms_p50": number, "wait_ms_p99": number,
        "lost": 0, "duplicates": 0,
    });
    // Each store tells what it has.
    let missing: &[&str] = match result["store"].as_str() {
        Some("redis") => &["writes_per_job", "idle_writes_per_s"],
        Some("postgres") => &[
            "requests_per_job",
            "commands_per_job",
            "idle_commands_per_s",
        ],
        _ => &[
            "store_us_per_job",
            "requests_per_job",
            "commands_per_job",
            "writes_per_job",
            "idle_commands_per_s",
            "idle_writes_per_s",
        ],
    };
    for name in missing {
        expected[*name] = "null".into();
    }
    let mut found = result.clone();
    for (name, value) in expected.as_object().expect("an object") {
        if value.is_string() {
            found[name] = shape(&result[name]);
        }
    }
    assert_eq!(found, expected);
    for name in ["requests_per_job", "commands_per_job", "writes_per_job"] {
        assert!(
            result[name].as_f64().is_none_or(|count| count > 0.0),
            "{result}"
        );
    }
    let (p50, p99) = (&result["wait_ms_p50"], &result["wait_ms_p99"]);
    assert!(
        0.0 < p50.as_f64().unwrap() && p50.as_f64() <= p99.as_f64(),
        "{result}"
    );
    assert!(result["worker_us_per_job"].as_f64() > Some(0.0), "{result}");
}

fn shown_job() -> Value {
    let Value::Object(mut fields) = job("null", "string", "string") else {
        unreachable!("it is an object");
    };
    let ended = json!({
        "token": "number", "owner": "string", "task": "string", "granted_at": "string",
        "ended_at": "string", "held_seconds": "number", "renewals": "number", "end": "string",
        "cause": "string", "why": "string", "progress": "null",
    });
    let more = json!({
        "suspect": "bool", "max_failures": "null", "max_expiries": "number", "term_seconds": "null",
        "timeout_seconds": "null", "stall_limit_seconds": "null", "max_lifetime_seconds": "null",
        "retention_seconds": "null", "unique_key": "null", "exclusive_key": "string",
        "headers": [{ "name": "string", "value": "string" }], "payload": "string",
        "payload_version": "number", "declined_since": "null",
        "result": "null", "checkpoint": "null", "lease": lease(true), "history": [ended],
    });
    if let Value::Object(more) = more {
        fields.extend(more);
    }
    Value::Object(fields)
}
