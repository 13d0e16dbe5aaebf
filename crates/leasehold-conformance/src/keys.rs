//! Unique keys: who holds one, from when, until when.

use super::driver::{Driver, bury, complete, job, queue, retry, secs, snooze, surrender};
use leasehold::NewJob;
use leasehold::job::JobId;
use leasehold::store::{ControlCommand, Enqueued, LeaseSelect, Renewal, Select};

fn unique() -> NewJob {
    job().unique("k").expect("a key")
}

fn windowed(seconds: u64) -> NewJob {
    job().unique_for("k", secs(seconds)).expect("a key")
}

async fn is_taken_by(d: &Driver, holder: JobId) {
    let answer = d.try_enqueue(vec![unique()]).await.expect("enqueue");
    assert_eq!(answer, [Enqueued::Duplicate(holder)]);
}

/// The second job with a key is not stored, and the answer names the first.
pub async fn a_second_job_is_a_duplicate(d: &Driver) {
    let first = d.enqueue(unique()).await;
    is_taken_by(d, first).await;
    let view = d.queue().await;
    assert_eq!((view.counts.ready, view.ledger.enqueued), (1, 1));
}

/// Duplicates within one call are seen, and spoil no other job of it.
pub async fn duplicates_within_a_call(d: &Driver) {
    let request = d.enqueue_request(vec![unique(), job(), unique()]);
    let first = request.jobs[0].0;
    let plain = request.jobs[1].0;
    let answers = d.store().enqueue(request).await.expect("enqueue");
    assert_eq!(
        answers,
        [
            Enqueued::New(first),
            Enqueued::New(plain),
            Enqueued::Duplicate(first)
        ]
    );
}

/// A key belongs to its queue, and keys are compared byte by byte.
pub async fn keys_do_not_collide(d: &Driver) {
    d.enqueue(unique()).await;
    d.enqueue(unique().queue("other").expect("a name")).await;
    for key in [
        "K",
        "k ",
        "k\u{0}",
        "\u{0}",
        "k/0",
        "{k}",
        "default/k",
        "%6b",
        "ｋ",
    ] {
        d.enqueue(job().unique(key).expect("a key")).await;
        d.enqueue(job().exclusive(key).expect("a key")).await;
    }
    d.enqueue(job().exclusive("k").expect("a key")).await;
}

/// The key is held while the job is scheduled, ready, leased, retried, surrendered, expired,
/// revoked.
pub async fn held_through_the_whole_life(d: &Driver) {
    let id = d.enqueue(unique().delay(secs(5))).await;
    is_taken_by(d, id).await;
    d.advance(secs(5)).await;
    let held = d.claim_one().await;
    is_taken_by(d, id).await;
    d.settled(&held, retry(secs(1))).await;
    is_taken_by(d, id).await;
    d.advance(secs(1)).await;
    let held = d.claim_one().await;
    d.settled(&held, surrender()).await;
    is_taken_by(d, id).await;
    let held = d.claim_one().await;
    d.settled(&held, snooze(secs(1))).await;
    is_taken_by(d, id).await;
    d.advance(secs(1)).await;
    d.claim_one().await;
    d.expire_all().await;
    is_taken_by(d, id).await;
    let held = d.claim_one().await;
    d.control(ControlCommand::Revoke(LeaseSelect::Job(held.id())))
        .await;
    is_taken_by(d, id).await;
    let delay = secs(1);
    d.control(ControlCommand::Reschedule {
        jobs: Select::Job(id),
        delay,
    })
    .await;
    is_taken_by(d, id).await;
}

/// A relaxed queue lets go of exclusive keys at a retry, and of no other.
pub async fn held_through_the_retries_of_a_relaxed_queue(d: &Driver) {
    d.control(ControlCommand::Configure {
        queue: queue(),
        relaxed: true,
    })
    .await;
    let id = d.enqueue(unique().exclusive("e").expect("a key")).await;
    for _ in 0..3 {
        let held = d.claim_one().await;
        d.settled(&held, retry(secs(1))).await;
        is_taken_by(d, id).await;
        d.advance(secs(1)).await;
    }
}

/// Completed, dead, cancelled and purged free it.
pub async fn freed_at_the_end(d: &Driver) {
    let held = d.held(unique().retention(secs(60))).await;
    d.settled(&held, complete()).await;
    let held = d.held(unique()).await;
    d.settled(&held, bury()).await;
    let id = d.enqueue(unique()).await;
    d.control(ControlCommand::Cancel(Select::Job(id))).await;
    let id = d.enqueue(unique()).await;
    d.control(ControlCommand::Purge(Select::Job(id))).await;
    d.enqueue(unique()).await;
}

/// Dead by too many expiries frees it as well.
pub async fn freed_by_the_expiry_limit(d: &Driver) {
    let mut new = unique();
    new.options.max_expiries = 3;
    d.enqueue(new).await;
    for _ in 0..3 {
        let held = d.claim_one().await;
        assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
    }
    d.enqueue(unique()).await;
}

/// Only the holding job frees it: not the purge of a job that held it before.
pub async fn only_the_holder_frees_it(d: &Driver) {
    let old = d.held(unique()).await;
    d.settled(&old, bury()).await;
    let new = d.enqueue(unique()).await;
    d.control(ControlCommand::Purge(Select::Job(old.id())))
        .await;
    is_taken_by(d, new).await;
}

/// With a window the key is held that long from the enqueue, whatever becomes of the job.
pub async fn a_window_outlives_the_job(d: &Driver) {
    let held = d.held(windowed(100)).await;
    d.settled(&held, complete()).await;
    d.advance(secs(99)).await;
    let answer = d.try_enqueue(vec![windowed(100)]).await.expect("enqueue");
    assert_eq!(answer, [Enqueued::Duplicate(held.id())]);
    d.advance(secs(1)).await;
    d.enqueue(windowed(100)).await;
}

/// When the window is over the key is free, though the job still waits.
pub async fn a_window_can_end_before_the_job(d: &Driver) {
    let first = d.enqueue(windowed(10)).await;
    d.advance(secs(10)).await;
    let second = d.enqueue(windowed(10)).await;
    assert_ne!(first, second);
    d.control(ControlCommand::Purge(Select::Job(first))).await;
    let answer = d.try_enqueue(vec![windowed(10)]).await.expect("enqueue");
    assert_eq!(answer, [Enqueued::Duplicate(second)]);
}

/// A purge does not shorten a window.
pub async fn a_purge_leaves_the_window(d: &Driver) {
    let id = d.enqueue(windowed(100)).await;
    d.control(ControlCommand::Purge(Select::Job(id))).await;
    is_taken_by(d, id).await;
    d.advance(secs(100)).await;
    d.enqueue(unique()).await;
}

/// A dead job whose key another took stays dead, and the answer says which.
pub async fn retry_dead_of_many(d: &Driver) {
    let mut dead = Vec::new();
    for _ in 0..2 {
        let held = d.held(unique()).await;
        d.settled(&held, bury()).await;
        dead.push(held.id());
    }
    let answer = d.control(ControlCommand::RetryDead(Select::State {
        queue: super::queue(),
        state: leasehold::job::JobState::Dead,
        max: 9,
    }));
    let answer = answer.await;
    assert_eq!((answer.done, answer.skipped), (1, 0));
    assert_eq!(answer.duplicates, [(dead[1], dead[0])]);
}
