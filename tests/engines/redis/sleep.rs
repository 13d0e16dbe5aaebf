//! Sleepers: a wake-up that is lost costs a second at most, and nobody gets those of others.

use std::time::{Duration, Instant};

use leasehold::Store;
use leasehold::job::{Namespace, QueueName};
use leasehold::store::{ClaimQueue, ControlCommand, RedisOptions, RedisStore};
use leasehold_conformance::{Driver, Held, ManualFixture, job, queue};

use crate::redis::support::redis::Standalone;

const SLEEP: &str = "{sleep:default:0}:sleep";
/// A look comes once a second; the rest is for a machine that is busy.
const LOST: Duration = Duration::from_millis(2_500);
/// How long a queue stays paused.
const PAUSED: Duration = Duration::from_millis(1_500);
/// What a sleep lasts if nobody looks.
const WHOLE: Duration = Duration::from_secs(5);

fn store(server: &Standalone) -> RedisStore {
    let namespace = Namespace::new("sleep").unwrap();
    RedisStore::open(RedisOptions::new(server.url()).namespace(namespace)).unwrap()
}

async fn driver(server: &Standalone) -> Driver {
    let clock = leasehold::clock::ManualClock::default();
    Driver::new(std::sync::Arc::new(ManualFixture::new(
        store(server),
        clock,
    )))
    .await
}

/// How long one sleeps who is on no list any longer when the news comes.
async fn oversleeps(server: &Standalone, news: impl AsyncFnOnce()) -> Duration {
    let sleeper = store(server);
    let asleep = tokio::spawn(async move { sleeper.wait(&[queue()], false, WHOLE).await });
    let lies = || server.server.tell::<usize>(&["ZCARD", SLEEP]) > 0;
    while !lies() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.server.tell::<()>(&["DEL", SLEEP]);
    let begun = Instant::now();
    news().await;
    asleep.await.unwrap().unwrap();
    begun.elapsed()
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_lost_wake_up_costs_a_second_whatever_it_was_for() {
    let server = Standalone::start(&[]);
    let d = driver(&server).await;
    // Control arm: without news the sleep is whole.
    let slept = oversleeps(&server, async || {}).await;
    assert!(slept > LOST, "{slept:?} without news");

    let delayed = job().delay(Duration::from_millis(200));
    let slept = oversleeps(&server, async || {
        d.enqueue(delayed).await;
    });
    let slept = slept.await;
    assert!(slept < LOST, "{slept:?} for a delayed job");
    assert_eq!(d.claim(9).await.len(), 1);

    d.control(ControlCommand::Pause(queue())).await;
    d.enqueue(job()).await;
    let resume = || d.control(ControlCommand::Resume(queue()));
    let slept = oversleeps(&server, async || {
        // A paused queue wakes nobody, however many jobs it has.
        tokio::time::sleep(PAUSED).await;
        assert_eq!(server.server.tell::<usize>(&["ZCARD", SLEEP]), 0);
        resume().await;
    });
    let slept = slept.await;
    assert!(
        slept < PAUSED + LOST,
        "{slept:?} for a queue that was paused"
    );
    assert_eq!(d.claim(9).await.len(), 1);
}

/// Work that is there already is nothing to sleep for, claimed or not.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn nobody_sleeps_who_finds_work() {
    let server = Standalone::start(&[]);
    let d = driver(&server).await;
    d.enqueue(job()).await;
    let begun = Instant::now();
    store(&server).wait(&[queue()], false, WHOLE).await.unwrap();
    assert!(
        begun.elapsed() < Duration::from_millis(900),
        "{:?}",
        begun.elapsed()
    );
}

/// Whoever has all it wants is on no list: the next job of another queue wakes somebody who has
/// room.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_worker_that_is_full_is_woken_by_no_queue() {
    let server = Standalone::start(&[]);
    let d = driver(&server).await;
    let other = || QueueName::new("other").unwrap();
    d.enqueue_all(vec![job(), job().queue("other").unwrap()])
        .await;
    let both = |max| {
        let mut request = d.claim_request(max);
        let first = request.queues[0].clone();
        request.queues.push(ClaimQueue {
            queue: other(),
            ..first
        });
        request
    };
    // From the first wait on it hears, and lies down with its claims.
    d.store()
        .wait(&[queue()], false, Duration::ZERO)
        .await
        .unwrap();
    assert_eq!(Held::all(&d.claim_as(both(9)).await).len(), 2);
    let lie = |queue| {
        let key = format!("{{sleep:{queue}:0}}:sleep");
        server.server.tell::<usize>(&["ZCARD", &key])
    };
    assert_eq!(
        (lie("default"), lie("other")),
        (1, 1),
        "it has room for more"
    );
    d.enqueue(job()).await;
    assert_eq!(lie("default"), 0, "it was woken");
    let held = d.claim_as(both(1)).await;
    assert_eq!(Held::all(&held).len(), 1);
    assert_eq!(lie("other"), 0, "it is full, and still on a list");
}
