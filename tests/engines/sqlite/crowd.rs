//! Many processes on one file: no lease is lost, renewals do not stand in line, one job wakes one.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use leasehold::store::SqliteStore;
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob};
use serde::{Deserialize, Serialize};

use crate::sqlite::client::{Client as Caller, beat, job};
use crate::sqlite::machine;
use crate::sqlite::processes::{RUN, ready, say, spawn, wait_for_go};

const TERM: Duration = Duration::from_secs(2);

/// Two milliseconds of work.
#[derive(Serialize, Deserialize)]
struct Errand;

impl Job for Errand {
    const KIND: &'static str = "errand";
    const QUEUE: &'static str = "errands";
}

async fn run(_: Errand, _: Context) -> Result<(), Failure> {
    tokio::time::sleep(Duration::from_millis(2)).await;
    Ok(())
}

fn url(path: &Path) -> String {
    format!("sqlite://{}", path.display())
}

/// A worker with four slots, until it is killed.
pub(crate) async fn hand(path: &Path) {
    let client = Client::open(&url(path)).await.unwrap();
    wait_for_go(path);
    let worker = client.worker().handle(run).slots(4);
    let worker = worker.terms(LeaseTerms::of_term(TERM));
    worker
        .run_until(std::future::pending::<()>())
        .await
        .unwrap();
}

struct Crowd(Vec<Child>);

impl Crowd {
    fn gather(role: &str, hands: usize, path: &Path) -> Self {
        let mut children: Vec<_> = (0..hands).map(|_| spawn(role, path)).collect();
        for child in &mut children {
            // Its output ends with it; nobody reads what it says later.
            drop(ready(child));
        }
        Self(children)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.0 {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

/// So many jobs by so many processes: jobs per second, and leases that expired.
async fn drained(hands: usize, jobs: u64) -> (f64, u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let client = Client::open(&url(&path)).await.unwrap();
    let each = || NewJob::of(&Errand).unwrap();
    for _ in 0..jobs / 500 {
        client.enqueue_many((0..500).map(|_| each())).await.unwrap();
    }
    let crowd = Crowd::gather("hand", hands, &path);
    std::fs::write(path.with_extension("go"), "").unwrap();
    let start = Instant::now();
    let ledger = loop {
        let ledger = client.ledger().await.unwrap();
        if ledger.completed == jobs || start.elapsed() > Duration::from_secs(60) {
            break ledger;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let rate = ledger.completed as f64 / start.elapsed().as_secs_f64();
    drop(crowd);
    assert_eq!(
        ledger.completed, jobs,
        "not done after a minute: {ledger:?}"
    );
    println!(
        "{hands} processes: {rate:.0} jobs/s, {} expired",
        ledger.expired()
    );
    (rate, ledger.expired())
}

pub(crate) fn in_campaign() -> bool {
    std::env::var_os("LEASEHOLD_CAMPAIGN").is_some_and(|value| value == "1")
}

#[tokio::test]
async fn thirty_two_processes_lose_no_lease_and_are_no_slower_than_half_of_eight() {
    let jobs = if in_campaign() { 10_000 } else { 2_000 };
    machine::judged(|| async move {
        let (few, _) = drained(8, jobs).await;
        let (many, expired) = drained(32, jobs).await;
        if expired > 0 {
            return Err(format!("{expired} leases expired, and no process died"));
        }
        if many < few / 2.0 {
            return Err(format!("{many:.0} jobs/s by 32 processes, {few:.0} by 8"));
        }
        Ok(())
    })
    .await;
}

/// Renews one lease again and again, or stores one job again and again, among others who are busy.
/// Says how long the middle one of its calls took, and how long all but one of a hundred, in
/// microseconds.
pub(crate) async fn patient(path: &Path, renews: bool) {
    let store = SqliteStore::open(path).unwrap();
    let mut client = Caller::new(store).await;
    let name = format!("p{}", std::process::id());
    client.enqueue(vec![job(&name)]).await.unwrap();
    let claimed = client.claim(&name, 1).await.unwrap();
    let beat = beat(&claimed.grants[0]);
    wait_for_go(path);
    let start = Instant::now();
    let mut waits = Vec::new();
    while start.elapsed() < RUN {
        let call = Instant::now();
        if renews {
            client.store.renew(vec![beat.clone()]).await.unwrap();
        } else {
            client.enqueue(vec![job(&name)]).await.unwrap();
        }
        waits.push(call.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    waits.sort();
    let [middle, p99] =
        [50, 99].map(|share| waits[(waits.len() * share / 100).min(waits.len() - 1)]);
    say(format_args!(
        "waits {} {}",
        middle.as_micros(),
        p99.as_micros()
    ));
}

/// The control arm stands in the same line at the same time, with a call that is no renewal.
#[tokio::test]
async fn a_renewal_walks_past_thirty_processes_that_stand_in_line() {
    machine::judged(|| async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("jobs.db");
        drop(SqliteStore::open(&path).unwrap());
        let mut patients = ["renews", "stores"].map(|role| spawn(role, &path));
        let said = patients.each_mut().map(ready);
        let crowd = Crowd::gather("busy", 30, &path);
        std::fs::write(path.with_extension("go"), "").unwrap();
        let [[renews, p99], [stores, _]] = said.map(|mut lines| {
            let line = lines.find_map(|line| Some(line.split_once("waits ")?.1.to_owned()));
            let line = line.unwrap();
            let (middle, p99) = line.trim().split_once(' ').unwrap();
            [middle, p99].map(|micros| Duration::from_micros(micros.parse().unwrap()))
        });
        for patient in &mut patients {
            patient.wait().unwrap();
        }
        drop(crowd);
        println!("middle call: {renews:?} renewing (p99 {p99:?}), {stores:?} storing");
        if renews * 2 > stores {
            return Err(format!("{renews:?} renewing, {stores:?} storing"));
        }
        // By then the next renewal is due.
        if p99 >= TERM / 3 {
            return Err(format!("one renewal in a hundred takes {p99:?} or longer"));
        }
        Ok(())
    })
    .await;
}
