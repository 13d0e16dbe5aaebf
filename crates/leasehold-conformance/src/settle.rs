//! settle: end held leases; each end has one meaning.

use bytes::Bytes;

use super::driver::{
    Driver, HELD, Held, TERM, bury, complete, decline, job, names_the_field, queue, queue_named,
    retry, secs, snooze, surrender,
};
use leasehold::inspect;
use leasehold::job::{JobOptions, JobState, Kind, NewJob};
use leasehold::lease::{FencingToken, LeaseEnd, Verdict};
use leasehold::limits;
use leasehold::rules::ends::DISBELIEVED_DELAY;
use leasehold::rules::issue::Issuer;
use leasehold::store::{
    Checkpointed, ControlCommand, Enqueued, Outcome, Renewal, Select, SettleRequest,
};

const LATE: Verdict = Verdict::Held {
    late: true,
    cancel: false,
};

/// A completed job without retention is gone.
pub async fn complete_deletes_without_retention(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, complete()).await;
    assert_eq!(d.state(held.id()).await, None);
    assert_eq!(d.ledger().await.completed, 1);
}

/// A completed job with retention stays, with its result.
pub async fn complete_keeps_the_result(d: &Driver) {
    let held = d.held(job().retention(secs(60))).await;
    let result = Some(Bytes::from_static(b"\x00done"));
    d.settled(
        &held,
        Outcome::Complete {
            result: result.clone(),
        },
    )
    .await;
    let view = d.view(held.id()).await;
    assert_eq!(
        (view.state, &view.job.result),
        (JobState::Completed, &result)
    );
    assert_eq!(view.job.history[0].end, LeaseEnd::Completed);
    assert!(view.lease.is_none() && view.settled_at.is_some());
}

/// A retry waits for its delay, and counts a failure.
pub async fn retry_counts_a_failure(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, retry(secs(30))).await;
    let job = d.view(held.id()).await.job;
    assert_eq!((job.failures, job.expiries, job.attempt()), (1, 0, 2));
    assert_eq!(job.history[0].reason.as_deref(), Some("it failed"));
    assert_eq!(d.ledger().await.retried, 1);
    d.advance(secs(29)).await;
    assert!(d.claim(1).await.is_empty());
    d.advance(secs(1)).await;
    assert_eq!(d.claim_one().await.job.failures, 1);
}

/// A retry without a delay can be claimed at once.
pub async fn retry_at_once(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, retry(secs(0))).await;
    assert_eq!(d.state(held.id()).await, Some(JobState::Scheduled));
    assert_eq!(d.claim_one().await.id(), held.id());
}

/// A surrender counts nothing.
pub async fn surrender_counts_nothing(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, surrender()).await;
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.job.attempt()), (JobState::Ready, 1));
    assert_eq!(view.job.run_at, held.job.run_at);
    assert_eq!(d.ledger().await.surrendered, 1);
}

/// A surrender with a delay is a snooze.
pub async fn snooze_waits_and_counts_nothing(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, snooze(secs(10))).await;
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.job.attempt()), (JobState::Scheduled, 1));
    d.advance(secs(10)).await;
    assert_eq!(d.claim_one().await.id(), held.id());
}

/// A declined job waits, says why, and nothing is counted.
pub async fn decline_waits_and_counts_nothing(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, decline(secs(10))).await;
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.job.attempt()), (JobState::Scheduled, 1));
    let last = &view.job.history[0];
    assert_eq!(last.end, LeaseEnd::Surrendered);
    assert_eq!(last.reason.as_deref(), Some("unknown here"));
    assert_eq!(d.ledger().await.surrendered, 1);
    d.advance(secs(9)).await;
    assert!(d.claim(1).await.is_empty());
    d.advance(secs(1)).await;
    assert_eq!(d.claim_one().await.job.declined_since, Some(last.ended_at));
}

/// A job is declined since the first decline of a row, whatever else it carries; any other end of a
/// lease ends the row.
pub async fn declined_since_the_first_of_a_row(d: &Driver) {
    let mut new = job().version(7).header("name", "value");
    new.options.retention = Some(secs(60));
    let first = d.held(new).await;
    let saved = d.checkpoint(&first, 1, "state").await;
    assert!(matches!(saved, Checkpointed::Saved { .. }));
    d.settled(&first, decline(secs(1))).await;
    let since = d.view(first.id()).await.job.declined_since;
    assert!(since.is_some());
    // More than the history holds.
    for _ in 0..10 {
        d.advance(secs(1)).await;
        let held = d.claim_one().await;
        assert_eq!(held.job.declined_since, since);
        d.settled(&held, decline(secs(1))).await;
    }
    d.advance(secs(1)).await;
    let held = d.claim_one().await;
    assert_eq!((held.job.history.len(), held.job.version), (8, 7));
    let saved = held.job.checkpoint.as_ref().expect("a checkpoint");
    assert_eq!(saved.bytes, "state");
    d.settled(&held, surrender()).await;
    let held = d.claim_one().await;
    assert_eq!(held.job.declined_since, None);
    d.settled(&held, decline(secs(0))).await;
    let again = d.view(first.id()).await.job.declined_since;
    assert!(again > since, "{again:?}");
    let held = d.claim_one().await;
    d.settled(&held, complete()).await;
    assert_eq!(d.view(first.id()).await.job.declined_since, None);
}

/// A buried job is dead, and a failure is counted.
pub async fn bury_makes_dead(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, bury()).await;
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.job.failures), (JobState::Dead, 1));
    // It has run once: there is no second attempt to come.
    assert_eq!(view.attempt(), 1);
    assert_eq!(view.job.history[0].reason.as_deref(), Some("hopeless"));
    assert_eq!(
        (d.ledger().await.buried, d.queue().await.counts.dead),
        (1, 1)
    );
    let held = d.held(job()).await;
    d.settled(&held, retry(secs(0))).await;
    let held = d.claim_one().await;
    d.settled(&held, bury()).await;
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.attempt()), (JobState::Dead, 2));
}

/// The store counts failures; the worker decides what they mean.
pub async fn failures_never_kill_a_job(d: &Driver) {
    let mut new = job();
    new.options.runs.max_failures = Some(1);
    d.enqueue(new).await;
    for failures in 0..5 {
        let held = d.claim_one().await;
        assert_eq!(held.job.failures, failures);
        d.settled(&held, retry(secs(0))).await;
    }
}

/// Overdue but not yet reaped: accepted, and counted as late.
pub async fn late_is_accepted_and_counted(d: &Driver) {
    d.enqueue_many(4).await;
    let held = d.claim(4).await;
    d.advance(TERM + secs(500)).await;
    let outcomes = [complete(), retry(secs(1)), surrender(), bury()];
    for (held, outcome) in held.iter().zip(outcomes) {
        assert_eq!(d.settle(held, outcome).await, LATE);
    }
    let ledger = d.ledger().await;
    assert_eq!(
        (ledger.late, ledger.released(), ledger.expired()),
        (4, 4, 0)
    );
}

/// So is the settlement of a job that was cancelled meanwhile.
pub async fn late_is_counted_of_cancelled_jobs(d: &Driver) {
    d.enqueue_many(4).await;
    let held = d.claim(4).await;
    for held in &held {
        d.control(ControlCommand::Cancel(Select::Job(held.id())))
            .await;
    }
    d.advance(TERM).await;
    let outcomes = [complete(), retry(secs(1)), surrender(), bury()];
    for (held, outcome) in held.iter().zip(outcomes) {
        let verdict = Verdict::Held {
            late: true,
            cancel: true,
        };
        assert_eq!(d.settle(held, outcome).await, verdict);
    }
    let ledger = d.ledger().await;
    assert_eq!((ledger.late, ledger.expired()), (4, 0));
}

/// At its deadline a lease is late, just before it is not.
pub async fn late_begins_at_the_deadline(d: &Driver) {
    let outcomes = || [complete(), retry(secs(1)), surrender(), bury()];
    for (term, late) in [(secs(20), 4), (TERM, 8)] {
        d.enqueue_many(12).await;
        let mut request = d.claim_request(12);
        request.queues[0].term = term;
        let held = Held::all(&d.claim_as(request).await);
        d.advance(term - std::time::Duration::from_micros(1)).await;
        for (held, outcome) in held[..4].iter().zip(outcomes()) {
            assert_eq!(d.settle(held, outcome).await, HELD);
        }
        d.advance(std::time::Duration::from_micros(1)).await;
        for (held, outcome) in held[8..].iter().zip(outcomes()) {
            assert_eq!(d.settle(held, outcome).await, LATE);
        }
        assert_eq!(d.ledger().await.late, late);
        // What is left is in nobody's way.
        let back = d.claim(99).await;
        let ends = back.iter().map(|held| (held, complete())).collect();
        let verdicts = d.store().settle(d.settle_request(ends)).await;
        assert_eq!(verdicts.expect("settle"), vec![HELD; back.len()]);
    }
}

/// So it does for leases that were granted one by one and renewed together.
pub async fn late_begins_at_the_deadline_they_share(d: &Driver) {
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(d.held(job()).await);
        d.advance(secs(1)).await;
    }
    let beats = held.iter().map(Held::beat).collect();
    let told = d.store().renew(beats).await.expect("renew");
    assert!(told.iter().all(|told| matches!(told, Renewal::Held { .. })));
    d.advance(TERM - std::time::Duration::from_micros(1)).await;
    assert_eq!(d.settle(&held[0], complete()).await, HELD);
    d.advance(std::time::Duration::from_micros(1)).await;
    assert_eq!(d.settle(&held[1], complete()).await, LATE);
    assert_eq!(d.ledger().await.late, 1);
}

/// Each settlement of a call has its own reason, to the last byte.
pub async fn each_reason_of_a_call_is_its_own(d: &Driver) {
    d.enqueue_many(4).await;
    let held = d.claim(4).await;
    let reasons = ["", "a", "no such host", "ü"];
    let settlements = held.iter().zip(reasons).map(|(held, reason)| {
        let reason = reason.to_owned();
        (held, Outcome::Bury { reason })
    });
    let request = d.settle_request(settlements.collect());
    let verdicts = d.store().settle(request).await.expect("settle");
    assert_eq!(verdicts, [HELD; 4]);
    for (held, reason) in held.iter().zip(reasons) {
        let kept = d.view(held.id()).await.job.history[0].reason.clone();
        assert_eq!(kept.unwrap_or_default(), reason);
    }
}

/// Leases of two grants complete in whatever order a call names them, and each once.
pub async fn grants_complete_in_turns(d: &Driver) {
    d.enqueue_many(4).await;
    let (a, b) = (d.claim(2).await, d.claim(2).await);
    let all = [&b[1], &a[0], &b[0], &a[1], &b[1]];
    let request = d.settle_request(all.map(|held| (held, complete())).to_vec());
    let verdicts = d.store().settle(request).await.expect("settle");
    assert_eq!(verdicts, [HELD, HELD, HELD, HELD, Verdict::Fenced]);
    let ledger = d.ledger().await;
    assert_eq!((ledger.completed, ledger.live), (4, 0));

    d.enqueue_many(4).await;
    let (a, b) = (d.claim(2).await, d.claim(2).await);
    let all = [&b[1], &a[0], &b[0], &a[1]];
    let request = d.settle_request(all.map(|held| (held, complete())).to_vec());
    let verdicts = d.store().settle(request).await.expect("settle");
    assert_eq!(verdicts, [HELD; 4]);
    let ledger = d.ledger().await;
    assert_eq!((ledger.completed, ledger.live), (8, 0));

    let held = d.held(job()).await;
    let twice = d.settle_request(vec![(&held, complete()), (&held, complete())]);
    let verdicts = d.store().settle(twice).await.expect("settle");
    assert_eq!(verdicts, [HELD, Verdict::Fenced]);
    assert_eq!(d.ledger().await.completed, 9);
}

/// A receipt settles once, also within one call.
pub async fn a_receipt_settles_once(d: &Driver) {
    let held = d.held(job().retention(secs(60))).await;
    let twice = d.settle_request(vec![(&held, complete()), (&held, retry(secs(1)))]);
    let verdicts = d.store().settle(twice).await.expect("settle");
    assert_eq!(verdicts, [HELD, Verdict::Fenced]);
    d.unchanged(async || assert!(d.settle(&held, bury()).await.is_fenced()))
        .await;
    assert_eq!(d.ledger().await.fenced, 2);
}

/// One verdict per settlement, in order; a stale one spoils no other.
pub async fn verdicts_come_in_order(d: &Driver) {
    d.enqueue_many(4).await;
    let held = d.claim(4).await;
    d.settled(&held[2], complete()).await;
    let all = held.iter().map(|held| (held, complete())).collect();
    let verdicts = d
        .store()
        .settle(d.settle_request(all))
        .await
        .expect("settle");
    assert_eq!(verdicts, [HELD, HELD, Verdict::Fenced, HELD]);
}

/// An empty call is a call.
pub async fn nothing_is_fine(d: &Driver) {
    let none = d.settle_request(Vec::new());
    assert_eq!(d.store().settle(none).await.expect("settle"), []);
}

/// Leases of one grant are settled each on its own.
pub async fn leases_of_a_grant_end_apart(d: &Driver) {
    let ids = d.enqueue_many(3).await;
    let held = d.claim(3).await;
    d.settled(&held[1], complete()).await;
    assert_eq!(d.state(ids[0]).await, Some(JobState::Leased));
    assert_eq!(d.state(ids[2]).await, Some(JobState::Leased));
    // They are their holder's as before.
    let lease = d.view(ids[2]).await.lease.expect("a lease");
    assert_eq!((&*lease.owner, &*lease.task), ("worker-1", "run-1"));
    let expired = d.expire_all().await;
    let jobs: Vec<_> = expired.iter().map(|expiry| expiry.job).collect();
    assert_eq!(jobs, [ids[0], ids[2]]);
    for end in expired {
        assert_eq!((&*end.owner, &*end.task), ("worker-1", "run-1"));
    }
}

/// A mark too far ahead to be believed counts as a failure, and waits.
pub async fn an_unbelievable_mark_is_a_failure(d: &Driver) {
    let held = d.held(job()).await;
    let day = 24 * 3_600 * 1_000_000;
    let mark = FencingToken::new(held.token().get() + 2 * day);
    let outcome = Outcome::Surrender {
        delay: secs(0),
        mark: Some(mark),
    };
    assert!(d.settle(&held, outcome).await.is_held());
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.job.failures), (JobState::Scheduled, 1));
    let reason = view.job.history[0].reason.clone().expect("a reason");
    assert!(reason.contains("broken fence"), "{reason}");
    d.advance(DISBELIEVED_DELAY).await;
    assert!(d.claim_one().await.token() < mark);
}

/// The last eight ended leases are remembered, oldest first.
pub async fn eight_ended_leases_are_remembered(d: &Driver) {
    d.enqueue(job()).await;
    let mut tokens = Vec::new();
    for _ in 0..11 {
        let held = d.claim_one().await;
        tokens.push(held.token());
        d.settled(&held, surrender()).await;
    }
    let held = d.claim_one().await;
    let history: Vec<_> = held.job.history.iter().map(|ended| ended.token).collect();
    assert_eq!(history, tokens[3..]);
    let last = &held.job.history[7];
    assert_eq!((&*last.owner, &*last.task), ("worker-1", "run-1"));
    assert_eq!((last.end, last.renewals), (LeaseEnd::Surrendered, 0));
}

/// A long reason is cut at a character, not refused.
pub async fn a_long_reason_is_cut(d: &Driver) {
    let held = d.held(job()).await;
    let reason = format!("x{}", "ü".repeat(limits::REASON_BYTES));
    d.settled(&held, Outcome::Bury { reason }).await;
    let kept = d.view(held.id()).await.job.history[0].reason.clone();
    assert_eq!(kept.expect("a reason").len(), limits::REASON_BYTES - 1);
}

/// Settlements over the limits are refused, and settle nothing.
pub async fn limits_are_checked(d: &Driver) {
    let held = d.held(job()).await;
    let before = d.snapshot().await;
    let result = Some(vec![0; limits::CHECKPOINT_BYTES + 1].into());
    let over = limits::DURATION_MAX + secs(1);
    let good = (&held, complete());
    let calls = [
        (
            "result",
            vec![good.clone(), (&held, Outcome::Complete { result })],
        ),
        ("delay", vec![good.clone(), (&held, retry(over))]),
        ("delay", vec![(&held, snooze(over))]),
        ("settlements", vec![good; limits::CALL_ITEMS + 1]),
    ];
    for (field, settlements) in calls {
        let request = d.settle_request(settlements);
        let error = d.store().settle(request).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert_eq!(d.snapshot().await, before);
}

/// A thousand leases can be settled by one call.
pub async fn many_in_one_call(d: &Driver) {
    d.enqueue_many(1_000).await;
    let held = d.claim(1_000).await;
    let all = held.iter().map(|held| (held, complete())).collect();
    let SettleRequest {
        request,
        settlements,
    } = d.settle_request(all);
    let verdicts = d
        .store()
        .settle(SettleRequest {
            request,
            settlements,
        })
        .await;
    assert_eq!(verdicts.expect("settle"), vec![HELD; 1_000]);
    assert_eq!(d.ledger().await.completed, 1_000);
}

/// One call may end leases of several queues, under whatever session; a receipt of a queue that is
/// not there spoils none of them. What is refused is counted where its lease was.
pub async fn leases_of_several_queues(d: &Driver) {
    let of = |name: &str| job().queue(name).expect("a name").retention(secs(60));
    let from = |name: &str| {
        let mut request = d.claim_request(3);
        request.queues[0].queue = queue_named(name);
        request
    };
    d.enqueue_all([vec![of("a"); 3], vec![of("b"); 3]].concat())
        .await;
    let a = Held::all(&d.claim_as(from("a")).await);
    let b = Held::all(&d.claim_as(from("b")).await);
    let mut nowhere = b[0].clone();
    nowhere.receipt.queue = queue_named("nowhere");
    let (fenced, other) = (Verdict::Fenced, d.other().await);
    for (by, ended, verdicts) in [
        (d, vec![&b[0], &a[0], &b[1]], vec![HELD, HELD, HELD]),
        (d, vec![&nowhere, &a[1]], vec![fenced, HELD]),
        (&other, vec![&b[2], &a[2]], vec![HELD, HELD]),
        (d, vec![&b[2]], vec![fenced]),
    ] {
        let ends = ended.into_iter().map(|held| (held, complete()));
        let settle = by.settle_request(ends.collect());
        let settled = d.store().settle(settle).await;
        assert_eq!(settled.expect("settle"), verdicts);
    }
    for held in a.iter().chain(&b) {
        assert_eq!(d.state(held.id()).await, Some(JobState::Completed));
    }
    for (name, refused) in [("a", 0), ("b", 1)] {
        let view = inspect::queue(d.store(), &queue_named(name)).await;
        let view = view.expect("the queues").expect("the queue is there");
        assert_eq!(view.ledger.fenced, refused, "{name}");
    }
}

/// Leases of two grants of one claim are not mistaken for neighbours, though their places are.
pub async fn two_grants_of_one_claim(d: &Driver) {
    let longer = || job().options(JobOptions::default().term(2 * TERM));
    d.enqueue_all(vec![job(), longer(), longer()]).await;
    let held = d.claim(3).await;
    let [one, other, next] = &held[..] else {
        panic!("{} leases", held.len());
    };
    assert_ne!(one.receipt.grant(), next.receipt.grant());
    let request = d.settle_request(vec![(one, complete()), (next, complete())]);
    let verdicts = d.store().settle(request).await.expect("settle");
    assert_eq!(verdicts, [HELD, HELD]);
    assert_eq!(d.state(other.id()).await, Some(JobState::Leased));
    d.settled(other, complete()).await;
}

/// One call may end leases of several grants, each in its own way; a stale one ends none of them.
pub async fn each_in_its_own_way(d: &Driver) {
    d.enqueue_all(vec![job().retention(secs(60)); 6]).await;
    let mut held = d.claim(4).await;
    held.extend(d.claim(2).await);
    d.settled(&held[1], bury()).await;
    let outcomes = [
        retry(secs(9)),
        complete(),
        surrender(),
        complete(),
        bury(),
        snooze(secs(9)),
    ];
    let all = held.iter().zip(outcomes).collect();
    let verdicts = d.store().settle(d.settle_request(all)).await;
    let mut expected = vec![HELD; 6];
    expected[1] = Verdict::Fenced;
    assert_eq!(verdicts.expect("settle"), expected);
    let states = [
        (JobState::Scheduled, 1),
        (JobState::Dead, 1),
        (JobState::Ready, 0),
        (JobState::Completed, 0),
        (JobState::Dead, 1),
        (JobState::Scheduled, 0),
    ];
    for (held, state) in held.iter().zip(states) {
        let view = d.view(held.id()).await;
        assert_eq!((view.state, view.job.failures), state);
        assert_eq!((view.job.expiries, view.job.history.len()), (0, 1));
    }
    let ledger = d.ledger().await;
    assert_eq!((ledger.released(), ledger.fenced), (6, 1));
}

/// Whether a lease is late is told for each grant, and only held ones are counted.
pub async fn late_is_told_of_each_grant(d: &Driver) {
    d.enqueue_many(4).await;
    let early = d.claim(2).await;
    d.advance(secs(1)).await;
    let later = d.claim(2).await;
    d.settled(&early[1], complete()).await;
    d.advance(TERM - secs(1)).await;
    let all = [&early[0], &early[1], &later[0], &later[1]];
    let request = d.settle_request(all.map(|held| (held, complete())).to_vec());
    let verdicts = d.store().settle(request).await.expect("settle");
    assert_eq!(verdicts, [LATE, Verdict::Fenced, HELD, HELD]);
    let ledger = d.ledger().await;
    assert_eq!((ledger.late, ledger.completed), (1, 4));
}

/// A cancel is told of the one lease that it is about.
pub async fn a_cancel_is_told_of_one_lease(d: &Driver) {
    d.enqueue_many(3).await;
    let held = d.claim(3).await;
    d.control(ControlCommand::Cancel(Select::Job(held[1].id())))
        .await;
    let all = held.iter().map(|held| (held, complete())).collect();
    let verdicts = d.store().settle(d.settle_request(all)).await;
    let told = Verdict::Held {
        late: false,
        cancel: true,
    };
    assert_eq!(verdicts.expect("settle"), [HELD, told, HELD]);
    assert_eq!(d.ledger().await.completed, 3);
}

/// A mark up to a day ahead is believed, a microsecond more is not.
pub async fn a_mark_is_believed_up_to_a_day(d: &Driver) {
    // A first token may be ahead of the clock; after a while it is the clock.
    d.settled(&d.held(job()).await, complete()).await;
    d.advance(secs(1)).await;
    let id = d.enqueue(job()).await;
    let far = |held: &super::Held, more: u64| {
        let day = u64::try_from(Issuer::BELIEF.as_micros()).expect("a day");
        let mark = FencingToken::new(held.token().get() + day + more);
        let delay = secs(0);
        let mark = Some(mark);
        Outcome::Surrender { delay, mark }
    };
    let held = d.claim_one().await;
    d.settled(&held, far(&held, 1)).await;
    let view = d.view(id).await;
    assert_eq!((view.state, view.job.failures), (JobState::Scheduled, 1));
    d.advance(DISBELIEVED_DELAY).await;
    let held = d.claim_one().await;
    d.settled(&held, far(&held, 0)).await;
    let view = d.view(id).await;
    assert_eq!((view.state, view.job.failures), (JobState::Ready, 1));
    let mark = held.token().get() + 24 * 3_600 * 1_000_000;
    assert!(d.claim_one().await.token().get() > mark);
}

/// What is left of a grant is whole, however many of its leases have ended, in whatever order.
pub async fn what_is_left_of_a_grant_is_whole(d: &Driver) {
    let new = |at: usize| {
        let kind = Kind::new(format!("kind-{at}")).expect("a name");
        let mut new = NewJob::raw(queue(), kind, vec![at as u8; 20_000 + 100 * at]);
        new.options.retention = at.is_multiple_of(3).then_some(secs(60));
        new.header("at", at.to_string())
    };
    let ids = d.enqueue_all((0..16).map(new).collect()).await;
    let held = d.claim(16).await;
    assert!(matches!(
        d.checkpoint(&held[15], 7, "fifteen").await,
        Checkpointed::Saved { .. }
    ));
    let mut left: Vec<usize> = (0..16).collect();
    for at in [3, 0, 14, 7, 8, 1, 12, 6, 5, 11, 13, 2] {
        d.settled(&held[at], complete()).await;
        left.retain(|other| *other != at);
        let shown: Vec<_> = d.jobs(JobState::Leased).await;
        assert_eq!(shown, left.iter().map(|at| ids[*at]).collect::<Vec<_>>());
        d.unchanged(async || assert!(d.settle(&held[at], bury()).await.is_fenced()))
            .await;
    }
    assert_eq!(left, [4, 9, 10, 15]);
    for end in d.expire_all().await {
        assert_eq!((&*end.owner, &*end.task), ("worker-1", "run-1"));
    }
    let again = d.claim(16).await;
    assert_eq!(again.len(), 4);
    for (held, at) in again.iter().zip(left) {
        let job = &held.job;
        assert_eq!(
            (job.id, job.kind.as_str()),
            (ids[at], &*format!("kind-{at}"))
        );
        assert_eq!(&job.payload[..], vec![at as u8; 20_000 + 100 * at]);
        assert_eq!(job.headers, [("at".to_owned(), at.to_string())]);
        assert_eq!((job.expiries, job.failures), (1, 0));
        let seq = job.checkpoint.as_ref().map(|saved| saved.seq);
        assert_eq!(seq, (at == 15).then_some(7));
    }
}

/// A completed job that has all that can be left behind leaves it as it should: both keys free, the
/// job and its result kept.
pub async fn complete_with_keys_and_retention(d: &Driver) {
    let new = || {
        let new = job().retention(secs(60)).unique("u").expect("a key");
        new.exclusive("e").expect("a key")
    };
    let held = d.held(new()).await;
    let parked = d.enqueue(job().exclusive("e").expect("a key")).await;
    d.settled(&held, complete()).await;
    assert_eq!(d.state(held.id()).await, Some(JobState::Completed));
    assert_eq!(d.claim_ids(9).await, [parked]);
    let again = d.try_enqueue(vec![new()]).await.expect("enqueue");
    assert!(matches!(again[..], [Enqueued::New(_)]), "{again:?}");
}

/// What one call surrenders goes to the front together, in token order, however much it is; a
/// receipt of a partition that is not there takes nothing along and changes no place.
pub async fn many_go_to_the_front_together(d: &Driver) {
    let ids = d.enqueue_many(121).await;
    for stray in [complete(), surrender()] {
        let held = d.claim(120).await;
        assert_eq!(held.len(), 120);
        let mut elsewhere = held[7].clone();
        elsewhere.receipt.partition = 9;
        let mut all: Vec<_> = held.iter().map(|held| (held, surrender())).collect();
        all.insert(60, (&elsewhere, stray));
        let verdicts = d.store().settle(d.settle_request(all)).await;
        let mut expected = vec![HELD; 121];
        expected[60] = Verdict::Fenced;
        assert_eq!(verdicts.expect("settle"), expected);
    }
    assert_eq!(d.claim_ids(1_000).await, ids);
    let ledger = d.ledger().await;
    assert_eq!((ledger.surrendered, ledger.fenced), (240, 2));
}
