//! Concurrent acquisition: many processes claim from one queue, one lease at a time.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use leasehold::inspect::QueueView;
use leasehold::job::QueueName;
use leasehold::lease::Nonce;
use leasehold::store::{ClaimQueue, ClaimRequest, Outcome, RequestId, SettleRequest, Settlement};
use leasehold::{Job as _, NewJob};
use tokio::task::JoinSet;

use crate::crew::{Chore, CrewRole};
use crate::process::Process;
use crate::roles::{Errand, Role, say};
use crate::stage::Stage;
use crate::support::redis::Standalone;
use crate::table::{Row, report};
use crate::world::TERM;
use crate::{MACHINE, in_campaign};

const PROCESSES: usize = 4;
const CLAIMERS: u32 = 8;
const KEYS: usize = 4;

/// The child: so many claimers, each of which claims one job after the other and completes it.
pub(crate) async fn race(role: CrewRole) {
    let store = role.open().await;
    let session = store.open_session().await.unwrap();
    let owner: Arc<str> = role.owner.into();
    let mut claimers = JoinSet::new();
    say("ready");
    for lane in 0..CLAIMERS {
        let (store, owner) = (Arc::clone(&store), Arc::clone(&owner));
        claimers.spawn(async move {
            let name = |lane, seq| RequestId { session, lane, seq };
            for seq in 1.. {
                let request = claim(name(lane, seq), Arc::clone(&owner));
                let claimed = store.claim(request).await.unwrap();
                let Some(grant) = claimed.grants.first() else {
                    tokio::task::yield_now().await;
                    continue;
                };
                let settlements = vec![Settlement {
                    receipt: grant.receipt(&grant.leases[0]),
                    outcome: Outcome::Complete { result: None },
                }];
                let request = SettleRequest {
                    request: name(CLAIMERS + lane, seq),
                    settlements,
                };
                store.settle(request).await.unwrap();
            }
        });
    }
    claimers.join_next().await.unwrap().unwrap();
}

fn claim(request: RequestId, owner: Arc<str>) -> ClaimRequest {
    ClaimRequest {
        request,
        owner,
        task: "race".into(),
        nonce: Nonce::draw().unwrap(),
        queues: vec![ClaimQueue {
            queue: QueueName::new(Errand::QUEUE).unwrap(),
            term: 10 * TERM,
            max_lifetime: 100 * TERM,
        }],
        max: 1,
        admit_suspect: false,
    }
}

/// A queue that looks first and takes then, on the same server.
async fn naive(server: &Standalone, jobs: usize) -> usize {
    let client = redis::Client::open(server.url()).unwrap();
    let mut fill = client.get_multiplexed_async_connection().await.unwrap();
    let ids: Vec<usize> = (0..jobs).collect();
    let push = redis::cmd("RPUSH").arg("naive").arg(&ids).to_owned();
    let () = push.query_async(&mut fill).await.unwrap();
    let taken = Arc::new(Mutex::new((HashSet::new(), 0)));
    let mut claimers = JoinSet::new();
    for _ in 0..CLAIMERS {
        let (client, taken) = (client.clone(), Arc::clone(&taken));
        claimers.spawn(async move {
            let mut link = client.get_multiplexed_async_connection().await.unwrap();
            loop {
                let look = redis::cmd("LINDEX").arg("naive").arg(0).to_owned();
                let head: Option<usize> = look.query_async(&mut link).await.unwrap();
                let Some(job) = head else { return };
                let take = redis::cmd("LREM").arg("naive").arg(1).arg(job).to_owned();
                let () = take.query_async(&mut link).await.unwrap();
                let mut taken = taken.lock().unwrap();
                taken.1 += usize::from(!taken.0.insert(job));
            }
        });
    }
    claimers.join_all().await;
    let taken = taken.lock().unwrap();
    taken.1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn concurrent_acquisition() {
    const CASE: &str = "concurrent acquisition";
    const JOBS: usize = 2_000;
    let _machine = MACHINE.read().await;
    let rounds = if in_campaign() { 25 } else { 1 };
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let mut stage = Stage::at(server.url()).await;
    let mut crew = Vec::new();
    for number in 0..PROCESSES {
        let role = stage.role(&format!("racer-{number}"));
        let mut racer = Process::start(&Role::Racer(role));
        racer.hears("ready").await;
        crew.push(racer);
    }
    // A part of them behind one key each, so that only one of those can be had.
    let all = (0..JOBS).map(|n| {
        let job = NewJob::of(&Chore::Wait { millis: 0 }).unwrap();
        match n % (5 * KEYS) {
            key if key < KEYS => job.exclusive(key.to_string()).unwrap(),
            _ => job,
        }
    });
    let all: Vec<_> = all.collect();
    for _ in 0..rounds {
        stage.world.client.enqueue_many(all.clone()).await.unwrap();
        stage.drained().await;
    }
    let view: QueueView = stage.drained().await;
    for mut racer in crew {
        racer.kill();
    }
    let judged = stage.finish([]).await;
    judged.assert_sound(CASE);
    assert_eq!(
        view.ledger.granted,
        (rounds * JOBS) as u64,
        "{CASE}: {:?}",
        view.ledger
    );
    let twice = naive(&server, 1_000).await;
    assert!(twice > 0, "this test cannot fail");
    let control = format!("look, then take: {twice} of 1000 twice");
    report(
        CASE,
        Row {
            control,
            ..judged.row
        },
    );
}
