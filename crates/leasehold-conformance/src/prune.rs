//! prune: settled jobs leave when their retention is over.

use super::driver::{Driver, bury, complete, job, names_the_field, secs};
use leasehold::job::JobState;
use leasehold::limits;
use leasehold::rules::ends::CANCELLED_RETENTION;
use leasehold::store::{ControlCommand, Enqueued, PruneRequest, Select};

/// Completed jobs are deleted when their retention is over, and not before.
pub async fn completed_jobs_go_when_their_time_is_over(d: &Driver) {
    let held = d.held(job().retention(secs(10))).await;
    d.settled(&held, complete()).await;
    d.advance(secs(10) - std::time::Duration::from_micros(1))
        .await;
    assert_eq!(d.prune(100).await, 0);
    d.advance(std::time::Duration::from_micros(1)).await;
    assert_eq!(d.prune(100).await, 1);
    assert_eq!(d.state(held.id()).await, None);
    assert_eq!((d.ledger().await.pruned, d.prune(100).await), (1, 0));
}

/// A retention of zero keeps the job until the next prune.
pub async fn zero_retention_waits_for_the_prune(d: &Driver) {
    let held = d.held(job().retention(secs(0))).await;
    d.settled(&held, complete()).await;
    assert_eq!(d.state(held.id()).await, Some(JobState::Completed));
    assert_eq!(d.prune(100).await, 1);
}

/// Cancelled jobs stay a day, or longer if their own retention is longer.
pub async fn cancelled_jobs_stay_a_day(d: &Driver) {
    let plain = d.enqueue(job()).await;
    let short = d.enqueue(job().retention(secs(1))).await;
    let long = d.enqueue(job().retention(CANCELLED_RETENTION * 2)).await;
    for id in [plain, short, long] {
        d.control(ControlCommand::Cancel(Select::Job(id))).await;
    }
    d.advance(CANCELLED_RETENTION - secs(1)).await;
    // Nobody called for a day: the driver's session is over.
    let d = d.other().await;
    assert_eq!(d.prune(100).await, 0);
    d.advance(secs(1)).await;
    assert_eq!(d.prune(100).await, 2);
    d.advance(CANCELLED_RETENTION).await;
    assert_eq!(d.other().await.prune(100).await, 1);
}

/// Dead jobs stay until somebody decides about them.
pub async fn dead_jobs_stay(d: &Driver) {
    let held = d.held(job().retention(secs(1))).await;
    d.settled(&held, bury()).await;
    d.advance(secs(3_650 * 24 * 3_600)).await;
    let d = d.other().await;
    assert_eq!(d.prune(100).await, 0);
    assert_eq!(d.state(held.id()).await, Some(JobState::Dead));
}

/// Pending and leased jobs are none of its business.
pub async fn the_living_stay(d: &Driver) {
    d.held(job().retention(secs(0))).await;
    d.enqueue(job().retention(secs(0))).await;
    d.enqueue(job().retention(secs(0)).delay(secs(500))).await;
    d.advance(secs(400)).await;
    assert_eq!(d.prune(100).await, 0);
}

/// At most as many as asked.
pub async fn is_bounded(d: &Driver) {
    d.enqueue_all(vec![job().retention(secs(0)); 10]).await;
    let held = d.claim(10).await;
    let all = held.iter().map(|held| (held, complete())).collect();
    d.store()
        .settle(d.settle_request(all))
        .await
        .expect("settle");
    assert_eq!(
        (d.prune(4).await, d.prune(4).await, d.prune(4).await),
        (4, 4, 2)
    );
}

/// Jobs whose retention ran out less than `overdue` ago stay.
pub async fn overdue_gives_a_margin(d: &Driver) {
    let held = d.held(job().retention(secs(10))).await;
    d.settled(&held, complete()).await;
    d.advance(secs(15)).await;
    for (overdue, pruned) in [(secs(6), 0), (secs(5), 1)] {
        let request = PruneRequest {
            request: d.request(),
            overdue,
            max: 9,
        };
        assert_eq!(d.store().prune(request).await.expect("prune"), pruned);
    }
}

/// A windowed key outlives its job, and not its window.
pub async fn windows_outlive_pruned_jobs(d: &Driver) {
    let new = job()
        .unique_for("k", secs(100))
        .expect("a key")
        .retention(secs(1));
    let held = d.held(new.clone()).await;
    d.settled(&held, complete()).await;
    d.advance(secs(50)).await;
    assert_eq!(d.prune(9).await, 1);
    let again = d.try_enqueue(vec![new.clone()]).await.expect("enqueue");
    assert_eq!(again, [Enqueued::Duplicate(held.id())]);
    d.advance(secs(50)).await;
    d.prune(9).await;
    d.enqueue(new).await;
}

/// Bounds are checked.
pub async fn limits_are_checked(d: &Driver) {
    for max in [0, limits::CALL_ITEMS + 1] {
        let request = PruneRequest {
            request: d.request(),
            overdue: secs(0),
            max,
        };
        let error = d.store().prune(request).await.expect_err("out of bounds");
        names_the_field(&error, "max");
    }
}
