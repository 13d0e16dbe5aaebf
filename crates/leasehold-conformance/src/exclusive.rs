//! Exclusive keys: at most one job of a key is leased, and the line keeps its order.

use super::driver::{
    Driver, Held, TERM, bury, complete, decline, job, queue, retry, secs, snooze, surrender,
};
use leasehold::NewJob;
use leasehold::job::{JobId, JobState};
use leasehold::store::{ControlCommand, LeaseSelect, Renewal, Select};

fn keyed() -> NewJob {
    job().exclusive("k").expect("a key")
}

/// Enqueues three jobs of one key and claims the first.
async fn line(d: &Driver) -> (Held, JobId, JobId) {
    let held = d.held(keyed()).await;
    let ids = d.enqueue_all(vec![keyed(), keyed()]).await;
    assert!(d.claim_ids(9).await.is_empty());
    (held, ids[0], ids[1])
}

async fn parked(d: &Driver) -> u64 {
    d.queue().await.counts.parked
}

/// At most one job of a key is leased; the others are parked, and counted.
pub async fn one_at_a_time(d: &Driver) {
    let ids = d.enqueue_all(vec![keyed(), keyed(), job(), keyed()]).await;
    assert_eq!(d.claim_ids(9).await, [ids[0], ids[2]]);
    let counts = d.queue().await.counts;
    assert_eq!((counts.ready, counts.parked, counts.leased), (2, 2, 2));
    assert!(d.view(ids[1]).await.parked && !d.view(ids[0]).await.parked);
}

/// The next of the line follows when the head completes, dies or is cancelled.
pub async fn the_next_follows_at_the_end(d: &Driver) {
    let (head, second, third) = line(d).await;
    d.settled(&head, complete()).await;
    assert_eq!(parked(d).await, 1);
    let next = d.claim_one().await;
    assert_eq!(next.id(), second);
    d.settled(&next, bury()).await;
    let next = d.claim_one().await;
    assert_eq!(next.id(), third);
    d.control(ControlCommand::Cancel(Select::Job(third))).await;
    let last = d.enqueue(keyed()).await;
    assert!(d.settle(&next, retry(secs(1))).await.is_held());
    assert_eq!(d.claim_one().await.id(), last);
}

/// A head that ends by its expiry leaves the key to whoever falls due in the same step.
pub async fn the_next_may_fall_due_as_the_head_ends(d: &Driver) {
    let head = d.held(keyed()).await;
    d.control(ControlCommand::Cancel(Select::Job(head.id())))
        .await;
    let next = d.enqueue(keyed().delay(TERM)).await;
    d.advance(2 * TERM).await;
    assert_eq!(d.claim_ids(9).await, [next]);
    assert_eq!(d.state(head.id()).await, Some(JobState::Cancelled));
}

/// The next goes to the back of its priority, in the same step.
pub async fn the_next_goes_to_the_back(d: &Driver) {
    let (head, second, _) = line(d).await;
    let plain = d.enqueue(job()).await;
    d.settled(&head, complete()).await;
    assert_eq!(d.claim_ids(9).await, [plain, second]);
}

/// The line is in the order of falling due, whatever the priorities.
pub async fn priorities_do_not_count_within_the_line(d: &Driver) {
    let ids = d
        .enqueue_all(vec![
            keyed().priority(7),
            keyed().priority(0),
            keyed().priority(3),
        ])
        .await;
    for id in ids {
        let held = d.claim_one().await;
        assert_eq!(held.id(), id);
        d.settled(&held, complete()).await;
    }
}

/// A delayed job joins when it falls due, not when it is enqueued.
pub async fn delayed_jobs_join_when_due(d: &Driver) {
    let late = d.enqueue(keyed().delay(secs(10))).await;
    let first = d.enqueue(keyed()).await;
    let second = d.enqueue(keyed()).await;
    assert_eq!(
        (d.state(late).await, parked(d).await),
        (Some(JobState::Scheduled), 1)
    );
    d.advance(secs(10)).await;
    for id in [first, second, late] {
        let held = d.claim_one().await;
        assert_eq!(held.id(), id);
        d.settled(&held, complete()).await;
    }
}

/// Several that fall due together join by (run-at, sequence).
pub async fn due_together_join_in_order(d: &Driver) {
    let b = d.enqueue(keyed().delay(secs(9))).await;
    let a = d.enqueue(keyed().delay(secs(5))).await;
    d.advance(secs(9)).await;
    let held = d.claim_one().await;
    assert_eq!((held.id(), parked(d).await), (a, 1));
    d.settled(&held, complete()).await;
    assert_eq!(d.claim_one().await.id(), b);
}

/// A surrendered head stays the head.
pub async fn surrender_keeps_the_head(d: &Driver) {
    let (head, ..) = line(d).await;
    d.settled(&head, surrender()).await;
    assert_eq!(d.claim_ids(9).await, [head.id()]);
}

/// An expired head stays the head.
pub async fn expiry_keeps_the_head(d: &Driver) {
    let (head, ..) = line(d).await;
    d.advance(TERM).await;
    assert_eq!(d.claim_ids(9).await, [head.id()]);
    assert_eq!(parked(d).await, 2);
}

/// A revoked head stays the head.
pub async fn revoke_keeps_the_head(d: &Driver) {
    let (head, ..) = line(d).await;
    d.control(ControlCommand::Revoke(LeaseSelect::Job(head.id())))
        .await;
    assert_eq!(d.claim_ids(9).await, [head.id()]);
}

/// Strict: while the head waits for its retry, nobody passes.
pub async fn retry_keeps_the_head_in_strict_order(d: &Driver) {
    let (head, second, _) = line(d).await;
    d.settled(&head, retry(secs(10))).await;
    assert!(d.claim_ids(9).await.is_empty());
    d.advance(secs(10)).await;
    let again = d.claim(9).await;
    assert_eq!((again[0].id(), again.len()), (head.id(), 1));
    d.settled(&again[0], complete()).await;
    assert_eq!(d.claim_ids(9).await, [second]);
}

/// Strict: so it is at every retry, not at the first alone.
pub async fn every_retry_keeps_the_head_in_strict_order(d: &Driver) {
    let (mut head, second, _) = line(d).await;
    for failures in 1..=4 {
        d.settled(&head, retry(secs(10))).await;
        let passed = d.claim_ids(9).await;
        assert!(passed.is_empty(), "freed by retry {failures}");
        assert_eq!(parked(d).await, 2);
        d.advance(secs(10)).await;
        let mut again = d.claim(9).await;
        assert_eq!((again[0].id(), again.len()), (head.id(), 1));
        head = again.remove(0);
    }
    d.settled(&head, complete()).await;
    assert_eq!(d.claim_ids(9).await, [second]);
}

/// A snoozed or declined head stays the head, in strict and in relaxed queues.
pub async fn snooze_keeps_the_head(d: &Driver) {
    let ends = [snooze(secs(10)), decline(secs(10))];
    for (relaxed, end) in ends
        .into_iter()
        .flat_map(|end| [(false, end.clone()), (true, end)])
    {
        d.control(ControlCommand::Configure {
            queue: queue(),
            relaxed,
        })
        .await;
        let (head, second, third) = line(d).await;
        d.settled(&head, end).await;
        assert!(d.claim_ids(9).await.is_empty());
        d.advance(secs(10)).await;
        let again = d.claim_one().await;
        assert_eq!(again.id(), head.id());
        for id in [second, third] {
            d.control(ControlCommand::Purge(Select::Job(id))).await;
        }
        d.settled(&again, complete()).await;
    }
}

/// Relaxed: a waiting retry lets the next go, and joins again at the end when due.
pub async fn retry_frees_the_key_when_relaxed(d: &Driver) {
    d.control(ControlCommand::Configure {
        queue: queue(),
        relaxed: true,
    })
    .await;
    assert!(d.queue().await.relaxed);
    let (head, second, third) = line(d).await;
    d.settled(&head, retry(secs(10))).await;
    let next = d.claim_one().await;
    assert_eq!(next.id(), second);
    d.advance(secs(10)).await;
    assert!(d.claim_ids(9).await.is_empty());
    assert!(d.view(head.id()).await.parked);
    d.settled(&next, complete()).await;
    let next = d.claim_one().await;
    assert_eq!(next.id(), third);
    d.settled(&next, complete()).await;
    assert_eq!(d.claim_one().await.id(), head.id());
}

/// Relaxed changes nothing for expiry and surrender.
pub async fn relaxed_keeps_the_head_otherwise(d: &Driver) {
    d.control(ControlCommand::Configure {
        queue: queue(),
        relaxed: true,
    })
    .await;
    let (head, ..) = line(d).await;
    d.settled(&head, surrender()).await;
    let again = d.claim_one().await;
    assert_eq!(again.id(), head.id());
    d.advance(TERM).await;
    assert_eq!(d.claim_ids(9).await, [head.id()]);
}

/// Cancelling a ready head lets the next go; cancelling a parked one takes it out of the line.
pub async fn cancel_of_head_and_parked(d: &Driver) {
    let ids = d.enqueue_all(vec![keyed(), keyed(), keyed()]).await;
    d.control(ControlCommand::Cancel(Select::Job(ids[1]))).await;
    assert_eq!(
        (d.state(ids[1]).await, parked(d).await),
        (Some(JobState::Cancelled), 1)
    );
    d.control(ControlCommand::Cancel(Select::Job(ids[0]))).await;
    assert_eq!(parked(d).await, 0);
    assert_eq!(d.claim_ids(9).await, [ids[2]]);
}

/// Cancelling a head that waits for its retry lets the next go.
pub async fn cancel_of_a_waiting_head(d: &Driver) {
    let (head, second, _) = line(d).await;
    d.settled(&head, retry(secs(10))).await;
    d.control(ControlCommand::Cancel(Select::Job(head.id())))
        .await;
    assert_eq!(d.claim_ids(9).await, [second]);
}

/// Purging the head lets the next go; purging a parked one takes it out.
pub async fn purge_of_head_and_parked(d: &Driver) {
    let ids = d.enqueue_all(vec![keyed(), keyed(), keyed()]).await;
    d.control(ControlCommand::Purge(Select::Job(ids[1]))).await;
    d.control(ControlCommand::Purge(Select::Job(ids[0]))).await;
    assert_eq!(parked(d).await, 0);
    assert_eq!(d.claim_ids(9).await, [ids[2]]);
}

/// Purging by state takes the whole line, head first.
pub async fn purge_of_the_whole_line(d: &Driver) {
    d.enqueue_all(vec![keyed(), keyed(), keyed()]).await;
    let all = Select::State {
        queue: queue(),
        state: JobState::Ready,
        max: 9,
    };
    assert_eq!(d.control(ControlCommand::Purge(all)).await.done, 3);
    let next = d.enqueue(keyed()).await;
    assert_eq!(d.claim_ids(9).await, [next]);
}

/// A rescheduled head gives up its place, and joins at the end when due.
pub async fn reschedule_of_the_head(d: &Driver) {
    let ids = d.enqueue_all(vec![keyed(), keyed(), keyed()]).await;
    let delay = secs(10);
    d.control(ControlCommand::Reschedule {
        jobs: Select::Job(ids[0]),
        delay,
    })
    .await;
    assert_eq!(parked(d).await, 1);
    d.advance(secs(10)).await;
    for at in [1, 2, 0] {
        let held = d.claim_one().await;
        assert_eq!(held.id(), ids[at]);
        d.settled(&held, complete()).await;
    }
}

/// A head rescheduled to now goes behind its own line.
pub async fn reschedule_of_the_head_to_now(d: &Driver) {
    let ids = d.enqueue_all(vec![keyed(), keyed()]).await;
    let delay = secs(0);
    d.control(ControlCommand::Reschedule {
        jobs: Select::Job(ids[0]),
        delay,
    })
    .await;
    assert!(d.view(ids[0]).await.parked);
    assert_eq!(d.claim_ids(9).await, [ids[1]]);
}

/// A rescheduled parked job leaves its place in the line.
pub async fn reschedule_of_a_parked_job(d: &Driver) {
    let (head, second, third) = line(d).await;
    let delay = secs(1);
    d.control(ControlCommand::Reschedule {
        jobs: Select::Job(second),
        delay,
    })
    .await;
    assert_eq!(
        (d.state(second).await, parked(d).await),
        (Some(JobState::Scheduled), 1)
    );
    d.advance(secs(1)).await;
    assert!(d.claim_ids(9).await.is_empty());
    d.settled(&head, complete()).await;
    assert_eq!(d.claim_ids(9).await, [third]);
}

/// Rescheduling a head that waits for its retry frees the key.
pub async fn reschedule_of_a_waiting_head(d: &Driver) {
    let (head, second, _) = line(d).await;
    d.settled(&head, retry(secs(10))).await;
    let delay = secs(20);
    d.control(ControlCommand::Reschedule {
        jobs: Select::Job(head.id()),
        delay,
    })
    .await;
    assert_eq!(d.claim_ids(9).await, [second]);
}

/// A retried dead job joins at the end of the line.
pub async fn retry_dead_joins_at_the_end(d: &Driver) {
    let (head, second, third) = line(d).await;
    d.settled(&head, bury()).await;
    d.control(ControlCommand::RetryDead(Select::Job(head.id())))
        .await;
    assert!(d.view(head.id()).await.parked);
    for id in [second, third, head.id()] {
        let held = d.claim_one().await;
        assert_eq!(held.id(), id);
        d.settled(&held, complete()).await;
    }
}

/// A head that dies of its expiries lets the next go.
pub async fn the_expiry_limit_frees_the_key(d: &Driver) {
    let mut new = keyed();
    new.options.max_expiries = 3;
    let first = d.enqueue(new).await;
    let second = d.enqueue(keyed()).await;
    for _ in 0..3 {
        let held = d.claim_one().await;
        assert_eq!(held.id(), first);
        assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
    }
    assert_eq!(d.claim_ids(9).await, [second]);
}

/// A suspect at the head blocks its own line only.
pub async fn a_suspect_blocks_its_own_line_only(d: &Driver) {
    let (head, ..) = line(d).await;
    assert_eq!(d.renew(head.lapse()).await, Renewal::Fenced);
    let again = d.claim_one().await;
    assert_eq!(d.renew(again.lapse()).await, Renewal::Fenced);
    let plain = d.enqueue(job()).await;
    assert_eq!(d.claim_ids(9).await, [plain]);
    assert_eq!(d.claim_one().await.id(), head.id());
}

/// A key belongs to one queue: the same word elsewhere is another key.
pub async fn a_key_belongs_to_its_queue(d: &Driver) {
    let here = d.enqueue(keyed()).await;
    let there = d.enqueue(keyed().queue("other").expect("a name")).await;
    let mut request = d.claim_request(9);
    let mut other = request.queues[0].clone();
    other.queue = super::queue_named("other");
    request.queues.push(other);
    let got: Vec<_> = Held::all(&d.claim_as(request).await)
        .iter()
        .map(Held::id)
        .collect();
    assert_eq!(got, [here, there]);
}

/// Claims do not pay for parked jobs: the line behind a blocked key does not stand in the way.
pub async fn blocked_jobs_are_not_in_the_way(d: &Driver) {
    d.held(keyed()).await;
    d.enqueue_all(vec![keyed(); 2_000]).await;
    let plain = d.enqueue(job()).await;
    assert_eq!(d.claim_ids(1).await, [plain]);
    assert_eq!(parked(d).await, 2_000);
}

/// Many keys run side by side, each in its own order.
pub async fn many_lines_side_by_side(d: &Driver) {
    let mut jobs = Vec::new();
    for at in 0..12 {
        jobs.push(job().exclusive(format!("key-{}", at % 4)).expect("a key"));
    }
    let ids = d.enqueue_all(jobs).await;
    for round in ids.chunks(4) {
        let held = d.claim(99).await;
        assert_eq!(held.iter().map(Held::id).collect::<Vec<_>>(), round);
        let all = held.iter().map(|held| (held, complete())).collect();
        d.store()
            .settle(d.settle_request(all))
            .await
            .expect("settle");
    }
}
