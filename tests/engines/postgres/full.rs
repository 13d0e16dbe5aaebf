//! A disk without room: nothing that was acknowledged is lost, and work goes on when there is room.
//!
//! The tables are on a small disk of their own. The server's log is elsewhere: without room for it
//! the server stops, which is the case of a killed server.

use std::collections::BTreeSet;
use std::time::Duration;

use leasehold::inspect;
use leasehold::job::{Kind, QueueName};
use leasehold::store::{EnqueueRequest, PostgresStore, SettleRequest};
use leasehold::{ErrorKind, JobId, NewJob, Store};

use crate::postgres::disk::SmallDisk;
use crate::postgres::server::{Server, own};
use crate::postgres::{Caller, answered, complete};

const TERM: Duration = Duration::from_secs(600);

fn job() -> NewJob {
    // Nothing that the server could make smaller.
    let noise: String = std::iter::repeat_with(fastrand::alphanumeric)
        .take(1_500)
        .collect();
    let payload = format!("\"{noise}\"");
    NewJob::raw(QueueName::default(), Kind::new("work").unwrap(), payload)
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn nothing_acknowledged_is_lost_when_the_disk_is_full() {
    let server = Server::start(&["fsync=off"]);
    let place = server.dir().join("small");
    std::fs::create_dir(&place).unwrap();
    let Some(disk) = SmallDisk::for_case("a full disk, PostgreSQL", &place, "12m") else {
        return;
    };
    let space = place.join("space");
    std::fs::create_dir(&space).unwrap();
    own(&space);
    let db = server.client().await;
    let small = format!("CREATE TABLESPACE small LOCATION '{}'", space.display());
    db.batch_execute(&small).await.unwrap();
    let mut config = server.config();
    config.options("-c default_tablespace=small");
    let store = PostgresStore::with(config, Server::options())
        .await
        .unwrap();
    let mut caller = Caller::new(store).await;
    let ballast = disk.fill(512);

    let mut acknowledged = BTreeSet::new();
    let mut refused = 0;
    while refused < 3 {
        let jobs: Vec<_> = (0..20).map(|_| (JobId::generate(), job())).collect();
        let ids: Vec<JobId> = jobs.iter().map(|(id, _)| *id).collect();
        let request = EnqueueRequest {
            request: caller.request(),
            jobs: jobs.into(),
        };
        match caller.store.enqueue(request).await {
            Ok(_) => acknowledged.extend(ids),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
                refused += 1;
            }
        }
    }
    assert!(!acknowledged.is_empty());
    // What is refused has not happened: the ledger says so, and asking needs no room.
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!(ledger.enqueued, acknowledged.len() as u64);

    ballast.drop_all();
    let mut done = BTreeSet::new();
    while done.len() < acknowledged.len() {
        let grants = caller.claim(50, TERM).await;
        assert!(!grants.is_empty(), "jobs are missing");
        for grant in grants {
            let receipts = grant.leases.iter().map(|lease| grant.receipt(lease));
            let settlements: Vec<_> = receipts.map(complete).collect();
            done.extend(grant.leases.iter().map(|lease| lease.job.id));
            let request = SettleRequest {
                request: caller.request(),
                settlements,
            };
            let verdicts = answered(|| caller.store.settle(request.clone())).await;
            assert!(verdicts.iter().all(|verdict| verdict.is_held()));
        }
    }
    assert_eq!(done, acknowledged);
    println!(
        "a full disk: {} acknowledged and done, {refused} calls refused",
        done.len()
    );
}
