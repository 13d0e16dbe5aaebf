//! expire: by the passage of time alone, and counted once.

use super::driver::{Driver, TERM, complete, job, names_the_field, queue_named, retry, secs};
use leasehold::job::JobState;
use leasehold::lease::{Cause, LeaseEnd, Progress};
use leasehold::limits;
use leasehold::store::{ControlCommand, LeaseSelect, Outcome, ReapRequest, Renewal, Select};

/// At its deadline a lease is overdue, and not a microsecond before.
pub async fn begins_at_the_deadline(d: &Driver) {
    let held = d.held(job()).await;
    let instant = std::time::Duration::from_micros(1);
    d.advance(TERM - instant).await;
    assert!(d.reap(10).await.is_empty());
    d.advance(instant).await;
    assert_eq!(d.reap(10).await[0].token, held.token());
}

/// A claim expires by itself: nobody else is needed.
pub async fn a_claim_needs_no_reaper(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(TERM).await;
    let next = d.claim_one().await;
    assert_eq!(next.id(), held.id());
    assert!(next.token() > held.token());
    assert_eq!(
        (next.job.expiries, next.job.failures, next.job.attempt()),
        (1, 0, 2)
    );
}

/// The report names who held it, for what, why it expired, and how far it came.
pub async fn the_report_is_complete(d: &Driver) {
    let held = d.held(job()).await;
    let mut beat = held.beat();
    let progress = Progress {
        done: 3,
        total: None,
        note: "third".into(),
    };
    beat.progress = vec![(held.token(), progress.clone())];
    assert!(matches!(d.renew(beat).await, Renewal::Held { .. }));
    let expiry = d.expire_all().await.remove(0);
    assert_eq!((expiry.job, &expiry.kind), (held.id(), &held.job.kind));
    assert_eq!((&*expiry.owner, &*expiry.task), ("worker-1", "run-1"));
    assert_eq!(
        (expiry.token, expiry.cause),
        (held.token(), Cause::Deadline)
    );
    assert_eq!((expiry.progress, expiry.expiries), (Some(progress), 1));
    assert_eq!(expiry.state, JobState::Ready);
    let ended = d.view(held.id()).await.job.history[0].clone();
    assert_eq!((ended.token, ended.renewals), (held.token(), 1));
    assert_eq!(ended.end, LeaseEnd::Expired(Cause::Deadline));
}

/// Two reapers never count one expiry twice.
pub async fn nothing_is_counted_twice(d: &Driver) {
    d.enqueue_many(20).await;
    d.claim(20).await;
    d.advance(TERM).await;
    let other = d.other().await;
    let (a, b, c) = tokio::join!(
        d.reap(15),
        other.reap(15),
        d.store().inspect(leasehold::inspect::Query::Queues)
    );
    c.expect("the queues");
    assert_eq!(a.len() + b.len(), 20);
    assert!(d.reap(15).await.is_empty());
    assert_eq!(d.ledger().await.expired_deadline, 20);
}

/// The oldest first, at most as many as asked, across queues.
pub async fn the_oldest_first(d: &Driver) {
    let mut tokens = Vec::new();
    for name in ["a", "b", "a", "b"] {
        d.enqueue(job().queue(name).expect("a name")).await;
        let mut request = d.claim_request(1);
        request.queues[0].queue = queue_named(name);
        tokens.push(d.claim_as(request).await.grants[0].id);
        d.advance(secs(1)).await;
    }
    d.advance(TERM).await;
    for part in tokens.chunks(3) {
        let reaped: Vec<_> = d.reap(3).await.iter().map(|expiry| expiry.token).collect();
        assert_eq!(reaped, part);
    }
}

/// Part of a grant can be reaped; the rest can still be settled, late.
pub async fn part_of_a_grant(d: &Driver) {
    let ids = d.enqueue_many(3).await;
    let held = d.claim(3).await;
    d.advance(TERM).await;
    assert_eq!(d.reap(1).await[0].job, ids[0]);
    assert!(d.settle(&held[0], complete()).await.is_fenced());
    assert!(d.settle(&held[2], complete()).await.is_held());
    assert_eq!(d.reap(9).await[0].job, ids[1]);
    assert_eq!(d.ledger().await.late, 1);
}

/// At its limit of expiries a job is dead; its failures are untouched.
pub async fn the_limit_makes_dead(d: &Driver) {
    let mut new = job();
    new.options.max_expiries = 3;
    let id = d.enqueue(new).await;
    let held = d.claim_one().await;
    d.settled(&held, retry(secs(0))).await;
    for expiries in 1..=3 {
        d.claim_one().await;
        let expiry = d.expire_all().await.remove(0);
        let state = if expiries == 3 {
            JobState::Dead
        } else {
            JobState::Ready
        };
        assert_eq!((expiry.expiries, expiry.state), (expiries, state));
    }
    let view = d.view(id).await;
    assert_eq!(view.state, JobState::Dead);
    assert_eq!((view.job.failures, view.job.expiries), (1, 3));
    assert_eq!(d.ledger().await.expired(), 3);
}

/// The ledger counts deaths, by expiry and by burying, and goes on doing so: neither a retry of the
/// dead nor a purge takes one back, and a cancelled job has not died.
pub async fn deaths_only_grow(d: &Driver) {
    let deaths = async || {
        let ledger = d.ledger().await;
        (ledger.dead_by_expiry, ledger.buried, ledger.died())
    };
    let last_claim = async || {
        for _ in 1..limits::EXPIRIES_MIN {
            d.claim_one().await;
            d.expire_all().await;
        }
        d.claim_one().await
    };
    let mut new = job();
    new.options.max_expiries = limits::EXPIRIES_MIN;
    let id = d.enqueue(new.clone()).await;
    last_claim().await;
    assert_eq!(deaths().await, (0, 0, 0));
    d.expire_all().await;
    assert_eq!(deaths().await, (1, 0, 1));
    d.control(ControlCommand::RetryDead(Select::Job(id))).await;
    let held = d.claim_one().await;
    let reason = "no".to_owned();
    d.settled(&held, Outcome::Bury { reason }).await;
    assert_eq!(deaths().await, (1, 1, 2));
    d.control(ControlCommand::Purge(Select::Job(id))).await;
    assert_eq!(deaths().await, (1, 1, 2));
    let id = d.enqueue(new).await;
    last_claim().await;
    d.control(ControlCommand::Cancel(Select::Job(id))).await;
    d.expire_all().await;
    assert_eq!(d.state(id).await, Some(JobState::Cancelled));
    assert_eq!(deaths().await, (1, 1, 2));
}

/// Failures do not count toward the expiry limit.
pub async fn failures_do_not_count(d: &Driver) {
    let mut new = job();
    new.options.max_expiries = 3;
    let id = d.enqueue(new).await;
    for _ in 0..5 {
        let held = d.claim_one().await;
        d.settled(&held, retry(secs(0))).await;
    }
    d.claim_one().await;
    d.expire_all().await;
    assert_eq!(d.state(id).await, Some(JobState::Ready));
}

/// Reaping bounds are checked.
pub async fn limits_are_checked(d: &Driver) {
    d.held(job()).await;
    d.advance(TERM).await;
    let before = d.snapshot().await;
    for max in [0, limits::STEP_JOBS + 1] {
        let request = ReapRequest {
            request: d.request(),
            max,
        };
        let error = d.store().reap(request).await.expect_err("out of bounds");
        names_the_field(&error, "max");
    }
    assert_eq!(d.snapshot().await, before);
}

/// A clock that is set back expires nothing early, and nothing twice.
pub async fn a_clock_set_back_expires_nothing(d: &Driver) {
    let held = d.held(job()).await;
    d.set_back(secs(400)).await;
    assert!(d.reap(9).await.is_empty());
    d.advance(secs(400) + TERM).await;
    assert_eq!(d.reap(9).await.len(), 1);
    d.set_back(secs(400)).await;
    assert!(d.reap(9).await.is_empty());
    assert_eq!(d.view(held.id()).await.job.expiries, 1);
}

/// A whole fleet that died is reaped in bounded steps.
pub async fn a_dead_fleet_is_reaped_in_steps(d: &Driver) {
    d.enqueue_many(2_500).await;
    for _ in 0..3 {
        d.claim(1_000).await;
    }
    d.advance(TERM).await;
    let mut steps = Vec::new();
    for _ in 0..4 {
        steps.push(d.reap(limits::STEP_JOBS).await.len());
    }
    assert_eq!(steps, [1_000, 1_000, 500, 0]);
    assert_eq!(d.queue().await.counts.ready, 2_500);
}

/// As many as asked, to the lease: across grants, and in the middle of one.
pub async fn exactly_as_many_as_asked(d: &Driver) {
    let mut tokens = Vec::new();
    for name in ["a", "b", "a"] {
        let jobs = vec![job().queue(name).expect("a name"); 3];
        d.enqueue_all(jobs).await;
        let mut request = d.claim_request(3);
        request.queues[0].queue = queue_named(name);
        let claimed = d.claim_as(request).await;
        tokens.extend(claimed.grants[0].leases.iter().map(|lease| lease.token));
        d.advance(secs(1)).await;
    }
    d.advance(TERM).await;
    let mut from = 0;
    for (max, got) in [(1, 1), (4, 4), (2, 2), (3, 2), (1, 0)] {
        let reaped: Vec<_> = d.reap(max).await.iter().map(|e| e.token).collect();
        assert_eq!(reaped, tokens[from..from + got], "of {max}");
        from += got;
    }
    assert_eq!(from, tokens.len());
}

/// What is not yet overdue is left alone, beside what is.
pub async fn the_living_stay(d: &Driver) {
    d.enqueue_many(4).await;
    let old = d.claim(2).await;
    d.advance(secs(1)).await;
    let young = d.claim(2).await;
    d.advance(TERM - secs(1)).await;
    let reaped: Vec<_> = d.reap(9).await.iter().map(|e| e.token).collect();
    assert_eq!(reaped, [old[0].token(), old[1].token()]);
    for held in &young {
        d.settled(held, complete()).await;
    }
}

/// Deadlines, lapses and lifetimes count toward one limit; failures and revokes do not.
pub async fn every_cause_counts_toward_the_limit(d: &Driver) {
    let mut new = job();
    new.options.max_expiries = 4;
    new.options.max_lifetime = Some(TERM + secs(10));
    let id = d.enqueue(new).await;
    let counts = async |state, failures, expiries| {
        let view = d.view(id).await;
        let found = (view.state, view.job.failures, view.job.expiries);
        assert_eq!(found, (state, failures, expiries));
    };
    d.claim_one().await;
    d.expire_all().await;
    counts(JobState::Ready, 0, 1).await;
    let held = d.claim_one().await;
    d.settled(&held, retry(secs(0))).await;
    let held = d.claim_one().await;
    assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
    counts(JobState::Ready, 1, 2).await;
    d.claim_one().await;
    d.control(ControlCommand::Revoke(LeaseSelect::Job(id)))
        .await;
    counts(JobState::Ready, 1, 2).await;
    let held = d.claim_one().await;
    d.advance(secs(50)).await;
    assert!(matches!(d.renew(held.beat()).await, Renewal::Held { .. }));
    assert_eq!(d.expire_all().await[0].cause, Cause::Lifetime);
    counts(JobState::Ready, 1, 3).await;
    d.claim_one().await;
    d.expire_all().await;
    counts(JobState::Dead, 1, 4).await;
}

/// Many grants of one lease each, more than a store looks at in one go: all expire, the oldest
/// first.
pub async fn many_small_grants(d: &Driver) {
    const GRANTS: usize = 130;
    d.enqueue_many(GRANTS).await;
    let mut tokens = Vec::new();
    for n in 0..GRANTS {
        if n % 50 == 0 {
            d.advance(secs(1)).await;
        }
        tokens.push(d.claim_one().await.token());
    }
    d.advance(TERM).await;
    let expired = d.reap(1_000).await;
    let reaped: Vec<_> = expired.iter().map(|end| end.token).collect();
    assert_eq!(reaped, tokens);
}
