//! `leasehold doctor` on what an earlier clock and a careless hand have left in a store.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::{Clock as _, ManualClock, SystemClock, Timestamp};
use leasehold::store::{
    PostgresOptions, PostgresStore, RedisOptions, RedisStore, SqliteOptions, SqliteStore, Store,
};
use leasehold_conformance::{Driver, ManualFixture, job};
use leasehold_support::postgres::Server;
use leasehold_support::redis::Standalone;
use serde_json::Value;

const HOURS: Duration = Duration::from_secs(7_200);

/// The finding of one check: how bad it is, and what was found.
fn finding(url: &str, check: &str) -> (String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .args(["doctor", url, "--json"])
        .env_remove("LEASEHOLD_URL")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|found| found["check"] == check);
    let text = |of: &str| found.unwrap()[of].as_str().unwrap().to_owned();
    (text("level"), text("found"))
}

/// The store is on a clock that is set by hand, the doctor is not.
async fn look(store: impl Store, clock: ManualClock, url: &str, delete_grants: impl AsyncFnOnce()) {
    // Not under `run`, which would find in the end what is broken here by hand.
    let by_hand = clock.clone();
    let d = Driver::new(Arc::new(ManualFixture::new(store, clock))).await;
    let held = d.held(job()).await;
    let level = |check| finding(url, check).0;
    assert_eq!([level("tokens"), level("ledger")], ["fine", "fine"]);

    d.advance(HOURS).await;
    let later = d.other().await;
    let claimed = by_hand.now();
    assert_eq!(later.claim_one().await.id(), held.id());
    d.set_back(HOURS).await;
    let before = SystemClock.now();
    let (level, found) = finding(url, "tokens");
    assert_eq!(level, "risk", "{found}");
    // The command's clock runs on, and the one by hand does not.
    let ahead = |of: Timestamp| claimed.since(of).as_secs_f64();
    let told: f64 = found.split('s').next().unwrap().parse().unwrap();
    let (least, most) = (ahead(SystemClock.now()) - 0.1, ahead(before) + 0.1);
    assert!((least..most).contains(&told), "{found}");

    let (level, found) = finding(url, "ledger");
    assert_eq!(
        [&*level, &*found],
        ["fine", "1 live leases by the ledger, 1 there"]
    );
    delete_grants().await;
    let (level, found) = finding(url, "ledger");
    assert_eq!(
        [&*level, &*found],
        ["risk", "1 live leases by the ledger, 0 there"]
    );
}

fn present() -> ManualClock {
    ManualClock::new(SystemClock.now())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let (path, clock) = (dir.path().join("jobs.db"), present());
    let options = SqliteOptions::new().clock(clock.clone());
    let store = SqliteStore::with(&path, options).unwrap();
    let url = format!("sqlite://{}", path.display());
    look(store, clock, &url, async || {
        let db = rusqlite::Connection::open(&path).unwrap();
        db.execute("DELETE FROM leasehold_grants", []).unwrap();
    })
    .await;
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server: ./tests/run"]
async fn of_redis() {
    let (server, clock) = (Standalone::start(&[]), present());
    let options = RedisOptions::new(server.url()).clock(clock.clone());
    let store = RedisStore::open(options).unwrap();
    look(store, clock, server.url(), async || {
        let queue = "{leasehold:default:0}";
        let keys = [format!("{queue}:held"), format!("{queue}:ends")];
        let deleted: u32 = server.server.ask(&["DEL", &keys[0], &keys[1]]).unwrap();
        assert_eq!(deleted, 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn of_postgres() {
    let (server, clock) = (Server::start(&[]), present());
    let options = PostgresOptions::new().clock(clock.clone());
    let store = PostgresStore::with(server.config(), options).await.unwrap();
    look(store, clock, &server.url(), async || {
        let db = server.client().await;
        let leased = "DELETE FROM leasehold.job WHERE state = 6";
        assert_eq!(db.execute(leased, &[]).await.unwrap(), 1);
    })
    .await;
}
