//! wait: sleep until work may exist.
//!
//! A lost wake-up may cost a second, so every case allows more than that. No case sleeps by
//! itself.

use std::time::Duration;

use super::claim::suspect;
use super::driver::{Driver, TERM, bury, job, queue, queue_named, secs, surrender};
use leasehold::NewJob;
use leasehold::store::{ControlCommand, Renewal, Select};

/// Longer than a lost wake-up may cost, shorter than the limit given to `wait`.
const PATIENCE: Duration = Duration::from_millis(2_500);
/// How long to watch somebody who should stay asleep.
const MOMENT: Duration = Duration::from_millis(30);

/// Asserts that a sleeper wakes up because of what is done meanwhile.
async fn wakes(d: &Driver, suspects: bool, act: impl AsyncFnOnce()) {
    let queues = [queue()];
    let wait = d.store().wait(&queues, suspects, secs(60));
    tokio::pin!(wait);
    let early = tokio::time::timeout(MOMENT, &mut wait).await;
    assert!(early.is_err(), "woke before there was work");
    act().await;
    let woken = tokio::time::timeout(PATIENCE, wait).await;
    woken.expect("nobody woke the sleeper").expect("wait");
}

/// Asserts that a sleeper that starts now sleeps on.
async fn sleeps(d: &Driver, suspects: bool) {
    let queues = [queue()];
    let wait = d.store().wait(&queues, suspects, secs(60));
    let woken = tokio::time::timeout(MOMENT, wait).await;
    assert!(woken.is_err(), "woke though there was nothing to do");
}

/// Asserts that a sleeper that starts now does not sleep long.
async fn returns(d: &Driver, suspects: bool, limit: Duration, otherwise: &str) {
    let queues = [queue()];
    let wait = d.store().wait(&queues, suspects, limit);
    let woken = tokio::time::timeout(PATIENCE, wait).await;
    woken.expect(otherwise).expect("wait");
}

/// Work that is there is no reason to sleep.
pub async fn returns_at_once_if_there_is_work(d: &Driver) {
    d.enqueue(job()).await;
    returns(d, false, secs(60), "slept over ready work").await;
}

/// With nothing to do it sleeps, and gives up at its limit.
pub async fn gives_up_at_its_limit(d: &Driver) {
    sleeps(d, true).await;
    returns(d, true, MOMENT, "beyond its limit").await;
}

/// An enqueue wakes.
pub async fn wakes_on_enqueue(d: &Driver) {
    wakes(d, false, async || {
        let _ = d.enqueue(job()).await;
    })
    .await;
}

/// An enqueue by another process wakes.
pub async fn wakes_on_enqueue_of_another(d: &Driver) {
    let other = d.other().await;
    wakes(d, false, async || {
        let _ = other.enqueue(job()).await;
    })
    .await;
}

/// A sleeper on several queues wakes for each of them.
pub async fn wakes_for_any_of_its_queues(d: &Driver) {
    let queues = [queue_named("a"), queue_named("b")];
    let wait = d.store().wait(&queues, false, secs(60));
    tokio::pin!(wait);
    assert!(tokio::time::timeout(MOMENT, &mut wait).await.is_err());
    d.enqueue(job().queue("b").expect("a name")).await;
    tokio::time::timeout(PATIENCE, wait)
        .await
        .expect("still asleep")
        .expect("wait");
}

/// An enqueue that is due earlier than anything before wakes, so that it is not overslept.
pub async fn wakes_on_an_earlier_due_enqueue(d: &Driver) {
    d.enqueue(job().delay(secs(100))).await;
    wakes(d, false, async || {
        let _ = d.enqueue(job().delay(secs(10))).await;
    })
    .await;
}

/// A resumed queue wakes.
pub async fn wakes_on_resume(d: &Driver) {
    d.enqueue(job()).await;
    d.control(ControlCommand::Pause(queue())).await;
    wakes(d, false, async || {
        let _ = d.control(ControlCommand::Resume(queue())).await;
    })
    .await;
}

/// A surrender wakes: the job is ready again.
pub async fn wakes_on_surrender(d: &Driver) {
    let held = d.held(job()).await;
    wakes(d, false, async || d.settled(&held, surrender()).await).await;
}

/// A reaped lease wakes.
pub async fn wakes_on_expiry(d: &Driver) {
    d.held(job()).await;
    d.advance(TERM).await;
    wakes(d, false, async || {
        let _ = d.reap(9).await;
    })
    .await;
}

/// A freed exclusive key wakes for the next of its line.
pub async fn wakes_on_a_freed_key(d: &Driver) {
    let keyed: NewJob = job().exclusive("k").expect("a key");
    let held = d.held(keyed.clone()).await;
    d.enqueue(keyed).await;
    wakes(d, false, async || d.settled(&held, bury()).await).await;
}

/// A retried dead job wakes.
pub async fn wakes_on_retry_dead(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, bury()).await;
    let command = ControlCommand::RetryDead(Select::Job(held.id()));
    wakes(d, false, async || {
        let _ = d.control(command).await;
    })
    .await;
}

/// Suspects are no work for those who do not ask for them.
pub async fn sleeps_over_suspects_unless_asked(d: &Driver) {
    suspect(d).await;
    sleeps(d, false).await;
    returns(d, true, secs(60), "slept over a suspect").await;
}

/// A new suspect wakes those who ask for them.
pub async fn wakes_for_a_suspect_if_asked(d: &Driver) {
    suspect(d).await;
    let held = d.claim_one().await;
    wakes(d, true, async || {
        assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
    })
    .await;
}

/// Ready jobs of a paused queue are no work.
pub async fn sleeps_over_a_paused_queue(d: &Driver) {
    d.enqueue(job()).await;
    d.control(ControlCommand::Pause(queue())).await;
    sleeps(d, true).await;
}

/// Work of another queue is no work.
pub async fn sleeps_over_other_queues(d: &Driver) {
    d.enqueue(job().queue("other").expect("a name")).await;
    sleeps(d, true).await;
}

/// Parked and leased jobs are no work.
pub async fn sleeps_over_parked_jobs(d: &Driver) {
    let keyed: NewJob = job().exclusive("k").expect("a key");
    d.held(keyed.clone()).await;
    d.enqueue(keyed).await;
    sleeps(d, true).await;
}

/// Many sleepers: many jobs wake all of them, in the end.
pub async fn many_sleepers_wake_for_many_jobs(d: &Driver) {
    let queues = [queue()];
    let wait = || d.store().wait(&queues, false, secs(60));
    let sleepers = async { tokio::join!(wait(), wait(), wait()) };
    tokio::pin!(sleepers);
    assert!(tokio::time::timeout(MOMENT, &mut sleepers).await.is_err());
    d.enqueue_many(3).await;
    let woken = tokio::time::timeout(PATIENCE, sleepers)
        .await
        .expect("somebody sleeps on");
    woken.0.and(woken.1).and(woken.2).expect("wait");
}

/// A sleeper that gave up takes no wake-up along: it goes to the one behind it.
pub async fn a_sleeper_that_is_gone_takes_no_wakeup(d: &Driver) {
    let queues = [queue()];
    let wait = || Box::pin(d.store().wait(&queues, false, secs(60)));
    let (mut gone, mut there) = (wait(), wait());
    for sleeper in [&mut gone, &mut there] {
        assert!(tokio::time::timeout(MOMENT, sleeper).await.is_err());
    }
    drop(gone);
    d.enqueue(job()).await;
    let woken = tokio::time::timeout(PATIENCE, there).await;
    woken.expect("the wake-up got lost").expect("wait");
}
