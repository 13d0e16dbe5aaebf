//! The bare engines: what the same machine does without leases.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use rusqlite::Connection;
use tokio::task::JoinSet;

use super::Trouble;
use super::bench_run::{BATCH, Bare, Count, Numbered, Tally, gathered, rate};
use leasehold::hooks::List;
use leasehold::hooks::Table;
use leasehold::hooks::monotonic;
use leasehold::job::{Namespace, QueueName};

/// Jobs a second.
pub(super) struct Rates {
    pub(super) enqueue: f64,
    pub(super) drain: f64,
}

/// A locked deque, and one loop that pops it and awaits the handler.
pub(super) async fn memory(jobs: usize, payload: usize) -> Result<Rates, Trouble> {
    let deque: Mutex<VecDeque<Bytes>> = Mutex::default();
    let make = Numbered::maker(payload);
    let began = monotonic();
    for n in 0..jobs {
        let payload = encode(&make(n))?;
        let mut deque = deque.lock().unwrap_or_else(PoisonError::into_inner);
        deque.push_back(payload.into());
    }
    let enqueue = rate(jobs, began.elapsed());

    let tally = Tally::new(jobs);
    let counting = Count(tally);
    // On a worker thread of the runtime, as the slots are.
    let popping = tokio::spawn(async move {
        // Known only by its trait, as the runtime knows handlers.
        let handler: &(dyn Bare + Sync) = std::hint::black_box(&counting);
        let began = monotonic();
        loop {
            let payload = deque
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front();
            let Some(payload) = payload else { break };
            if let Ok(running) = handler.start(&payload) {
                let _ = running.await;
            }
        }
        began.elapsed()
    });
    let took = popping
        .await
        .map_err(|error| Trouble::Failed(format!("bench: {error}")))?;
    Ok(Rates {
        enqueue,
        drain: rate(jobs, took),
    })
}

/// One table; rows go in and come out, a hundred in a transaction.
pub(super) fn sqlite(
    file: &Path,
    full: bool,
    jobs: usize,
    payload: usize,
) -> Result<Rates, Trouble> {
    rows(file, full, jobs, payload)
        .map_err(|error| Trouble::Failed(format!("bench: bare engine: {error}")))
}

fn rows(
    file: &Path,
    full: bool,
    jobs: usize,
    payload: usize,
) -> Result<Rates, Box<dyn std::error::Error>> {
    let db = Connection::open(file)?;
    db.pragma_update(None, "journal_mode", "WAL")?;
    db.pragma_update(None, "synchronous", if full { "FULL" } else { "NORMAL" })?;
    db.execute_batch(
        "CREATE TABLE IF NOT EXISTS raw (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)",
    )?;
    let make = Numbered::maker(payload);
    let began = monotonic();
    let mut insert = db.prepare("INSERT INTO raw (payload) VALUES (?)")?;
    for from in (0..jobs).step_by(BATCH) {
        db.execute_batch("BEGIN IMMEDIATE")?;
        for n in from..(from + BATCH).min(jobs) {
            insert.execute([serde_json::to_vec(&make(n))?])?;
        }
        db.execute_batch("COMMIT")?;
    }
    let enqueue = rate(jobs, began.elapsed());

    let began = monotonic();
    let mut delete = db.prepare(&format!(
        "DELETE FROM raw WHERE id IN (SELECT id FROM raw ORDER BY id LIMIT {BATCH})
         RETURNING payload"
    ))?;
    let mut taken = 0;
    while taken < jobs {
        let mut rows = delete.query([])?;
        let before = taken;
        while let Some(row) = rows.next()? {
            row.get_ref(0)?.as_blob()?;
            taken += 1;
        }
        if taken == before {
            return Err("rows are missing".into());
        }
    }
    Ok(Rates {
        enqueue,
        drain: rate(jobs, began.elapsed()),
    })
}

/// Calls to the server at the same time, on one connection.
const IN_FLIGHT: usize = 8;

/// One list; payloads go in and come out, a hundred in a call.
pub(super) async fn redis(
    url: &str,
    namespace: &Namespace,
    jobs: usize,
    payload: usize,
) -> Result<Rates, Trouble> {
    let list = Arc::new(List::open(url, namespace, &QueueName::default())?);
    let next = Arc::new(AtomicUsize::new(0));
    let mut callers = JoinSet::new();
    let began = monotonic();
    for _ in 0..IN_FLIGHT {
        let (list, next) = (Arc::clone(&list), Arc::clone(&next));
        let make = Numbered::maker(payload);
        callers.spawn(async move {
            loop {
                let from = next.fetch_add(BATCH, Ordering::Relaxed);
                if from >= jobs {
                    return Ok(());
                }
                let numbers = from..(from + BATCH).min(jobs);
                let batch = gathered(numbers, |n| encode(&make(n)))?;
                list.push(&batch).await?;
            }
        });
    }
    all(callers).await?;
    let enqueue = rate(jobs, began.elapsed());

    let mut callers = JoinSet::new();
    let began = monotonic();
    for _ in 0..IN_FLIGHT {
        let list = Arc::clone(&list);
        callers.spawn(async move {
            while list.pop(BATCH).await? > 0 {}
            Ok(())
        });
    }
    all(callers).await?;
    Ok(Rates {
        enqueue,
        drain: rate(jobs, began.elapsed()),
    })
}

/// One table; payloads go in and come out, a hundred in a transaction.
pub(super) async fn postgres(url: &str, jobs: usize, payload: usize) -> Result<Rates, Trouble> {
    let table = Table::create(url).await?;
    let rates = through(&table, jobs, payload).await;
    table.drop().await?;
    rates
}

async fn through(table: &Table, jobs: usize, payload: usize) -> Result<Rates, Trouble> {
    let make = Numbered::maker(payload);
    let began = monotonic();
    for from in (0..jobs).step_by(BATCH) {
        let numbers = from..(from + BATCH).min(jobs);
        let batch = gathered(numbers, |n| encode(&make(n)))?;
        table.push(&batch).await?;
    }
    let enqueue = rate(jobs, began.elapsed());
    let began = monotonic();
    while table.pop(BATCH).await? > 0 {}
    Ok(Rates {
        enqueue,
        drain: rate(jobs, began.elapsed()),
    })
}

async fn all(mut callers: JoinSet<Result<(), Trouble>>) -> Result<(), Trouble> {
    while let Some(caller) = callers.join_next().await {
        caller.map_err(|error| Trouble::Failed(format!("bench: {error}")))??;
    }
    Ok(())
}

fn encode(job: &Numbered) -> Result<Vec<u8>, Trouble> {
    serde_json::to_vec(job).map_err(|error| Trouble::Failed(format!("bench: {error}")))
}
