//! Repeats: a request with the same id is the same call, applied once.

use std::sync::Arc;

use bytes::Bytes;

use super::driver::{
    Driver, HELD, Held, TERM, bury, complete, job, queue, queue_named, retry, secs, surrender,
};
use leasehold::job::JobState;
use leasehold::lease::Verdict;
use leasehold::store::{
    Checkpoint, CheckpointRequest, Checkpointed, ControlCommand, Enqueued, LeaseSelect,
    PruneRequest, ReapRequest, RequestId, SESSION_IDLE, Select, SessionId,
};
use leasehold::{Error, ErrorKind};

fn is_lost<T>(answer: leasehold::Result<T>) -> bool {
    answer.is_err_and(|error: Error| error.kind() == ErrorKind::SessionLost)
}

/// A repeated enqueue stores its jobs once.
pub async fn enqueue_stores_once(d: &Driver) {
    let request = d.enqueue_request(vec![job(), job().unique("k").expect("a key")]);
    let first = d.store().enqueue(request.clone()).await.expect("enqueue");
    d.unchanged(async || {
        assert_eq!(d.store().enqueue(request).await.expect("enqueue"), first);
    })
    .await;
    assert!(matches!(first[1], Enqueued::New(_)));
    assert_eq!(d.ledger().await.enqueued, 2);
}

/// A repeated enqueue does not bring back what has been settled since.
pub async fn enqueue_does_not_revive(d: &Driver) {
    let request = d.enqueue_request(vec![job()]);
    let first = d.store().enqueue(request.clone()).await.expect("enqueue");
    let other = d.other().await;
    let held = other.claim_one().await;
    other.settled(&held, complete()).await;
    assert_eq!(d.store().enqueue(request).await.expect("enqueue"), first);
    assert_eq!(d.queue().await.counts.ready, 0);
}

/// A repeated claim tells what comes next in all of its queues, also where it has not been.
pub async fn claim_tells_what_comes_next(d: &Driver) {
    let of = |name: &str| job().queue(name).expect("a name");
    d.enqueue_all(vec![of("a"), of("b"), of("b").delay(secs(50))])
        .await;
    let mut request = d.claim_request(1);
    request.queues[0].queue = queue_named("b");
    d.claim_as(request).await;
    d.advance(secs(20)).await;
    let mut request = d.claim_request(1);
    request.queues[0].queue = queue_named("a");
    let mut last = request.queues[0].clone();
    last.queue = queue_named("b");
    request.queues.push(last);
    d.claim_as(request.clone()).await;
    let again = d.claim_as(request).await;
    assert_eq!(again.grants.len(), 1);
    assert_eq!(again.next_due, Some(secs(30)));
    assert_eq!(again.next_deadline, Some(TERM - secs(20)));
}

/// A repeated claim grants nothing more, and lists the same leases.
pub async fn claim_grants_once(d: &Driver) {
    d.enqueue_many(5).await;
    let request = d.claim_request(3);
    let first = d.claim_as(request.clone()).await;
    d.advance(secs(10)).await;
    d.unchanged(async || {
        let again = d.claim_as(request).await;
        assert_eq!(again.grants, first.grants);
    })
    .await;
    assert_eq!(d.ledger().await.granted, 3);
}

/// A repeated claim lists only live leases, with the time originally granted.
pub async fn claim_lists_the_living(d: &Driver) {
    d.enqueue_many(3).await;
    let request = d.claim_request(3);
    let first = d.claim_as(request.clone()).await;
    let held = Held::all(&first);
    let other = d.other().await;
    other.settled(&held[1], complete()).await;
    d.advance(secs(50)).await;
    assert!(matches!(
        d.renew(held[0].beat()).await,
        leasehold::store::Renewal::Held { .. }
    ));
    d.advance(secs(50)).await;
    let again = d.claim_as(request).await;
    let listed: Vec<_> = Held::all(&again)
        .iter()
        .map(|h| (h.token(), h.granted))
        .collect();
    assert_eq!(listed, [(held[0].token(), TERM), (held[2].token(), TERM)]);
    assert_eq!(again.grants[0].nonce, first.grants[0].nonce);
}

/// A repeated claim brings what its leases have saved since, each its own.
pub async fn claim_brings_what_was_saved(d: &Driver) {
    d.enqueue_many(3).await;
    let request = d.claim_request(3);
    let held = Held::all(&d.claim_as(request.clone()).await);
    let other = d.other().await;
    let saved = other.checkpoint(&held[1], 4, "half").await;
    assert!(matches!(saved, Checkpointed::Saved { .. }), "{saved:?}");
    let again = Held::all(&d.claim_as(request).await);
    let saved = again.iter().map(|held| {
        let saved = held.job.checkpoint.as_ref();
        saved.map(|saved| (saved.token, saved.seq, &saved.bytes[..]))
    });
    let half = Some((held[1].token(), 4, &b"half"[..]));
    assert_eq!(saved.collect::<Vec<_>>(), [None, half, None]);
}

/// A repeated claim of overdue leases lists none, and expires none.
pub async fn claim_lists_nothing_overdue(d: &Driver) {
    d.enqueue_many(2).await;
    let request = d.claim_request(2);
    d.claim_as(request.clone()).await;
    d.advance(TERM).await;
    d.unchanged(async || assert!(d.claim_as(request).await.grants.is_empty()))
        .await;
}

/// A repeated claim reports the expiries that it recorded the first time.
pub async fn claim_reports_its_expiries_again(d: &Driver) {
    d.held(job()).await;
    d.advance(TERM).await;
    let request = d.claim_request(1);
    let first = d.claim_as(request.clone()).await;
    assert_eq!(first.expired.len(), 1);
    assert_eq!(d.claim_as(request).await.expired, first.expired);
    assert_eq!(d.ledger().await.expired(), 1);
}

/// A repeated claim that got nothing gets nothing, though there is work now.
pub async fn claim_of_nothing_stays_nothing(d: &Driver) {
    let request = d.claim_request(1);
    assert!(d.claim_as(request.clone()).await.grants.is_empty());
    d.other().await.enqueue(job()).await;
    assert!(d.claim_as(request).await.grants.is_empty());
}

/// A repeated settlement gets the first verdict, and counts once.
pub async fn settle_settles_once(d: &Driver) {
    d.enqueue_many(2).await;
    let held = d.claim(2).await;
    let request = d.settle_request(vec![(&held[0], retry(secs(0))), (&held[1], complete())]);
    let first = d.store().settle(request.clone()).await.expect("settle");
    let other = d.other().await;
    let again = other.claim_one().await;
    assert_eq!(again.id(), held[0].id());
    d.unchanged(async || {
        assert_eq!(d.store().settle(request).await.expect("settle"), first);
    })
    .await;
    assert_eq!(first, [HELD, HELD]);
    assert_eq!((again.job.failures, d.ledger().await.fenced), (1, 0));
}

/// So are many, however they end.
pub async fn many_settle_once(d: &Driver) {
    const MANY: usize = 120;
    for outcome in [complete(), surrender(), bury()] {
        d.enqueue_many(MANY).await;
        let held = d.claim(MANY).await;
        let ends = held.iter().map(|held| (held, outcome.clone()));
        let settle = d.settle_request(ends.collect());
        for _ in 0..2 {
            let verdicts = d.store().settle(settle.clone()).await;
            assert_eq!(verdicts.expect("settle"), [HELD; MANY], "{outcome:?}");
        }
        let back = if outcome == surrender() { MANY } else { 0 };
        assert_eq!(d.claim(MANY).await.len(), back, "{outcome:?}");
    }
    let ledger = d.ledger().await;
    let many = MANY as u64;
    assert_eq!((ledger.completed, ledger.surrendered), (many, many));
    assert_eq!((ledger.buried, ledger.fenced), (many, 0));
}

/// Under a new id a second settlement is fenced: it may be one's own success.
pub async fn settle_under_a_new_id_is_fenced(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, complete()).await;
    assert!(d.settle(&held, complete()).await.is_fenced());
}

/// A repeated checkpoint does not undo a later one.
pub async fn checkpoint_saves_once(d: &Driver) {
    let held = d.held(job()).await;
    let request = CheckpointRequest {
        request: d.request_on(5),
        checkpoints: vec![Checkpoint {
            receipt: held.receipt.clone(),
            seq: 4,
            bytes: "four".into(),
        }],
    };
    let first = d
        .store()
        .checkpoint(request.clone())
        .await
        .expect("checkpoint");
    assert!(matches!(
        d.checkpoint(&held, 4, "later").await,
        Checkpointed::Saved { .. }
    ));
    let again = d.store().checkpoint(request).await.expect("checkpoint");
    assert_eq!(again, first);
    let saved = d
        .view(held.id())
        .await
        .job
        .checkpoint
        .clone()
        .expect("a checkpoint");
    assert_eq!(&saved.bytes[..], b"later");
}

/// A repeated reap reports the same expiries, and expires no more.
pub async fn reap_expires_once(d: &Driver) {
    d.enqueue_many(4).await;
    d.claim(4).await;
    d.advance(TERM).await;
    let request = ReapRequest {
        request: d.request(),
        max: 2,
    };
    let first = d.store().reap(request.clone()).await.expect("reap");
    d.unchanged(async || {
        assert_eq!(d.store().reap(request).await.expect("reap"), first);
    })
    .await;
    assert_eq!((first.len(), d.ledger().await.expired()), (2, 2));
}

/// A repeated reap expires nothing in another queue either: where it goes is settled by the first
/// send.
pub async fn reap_goes_nowhere_else(d: &Driver) {
    let mut tokens = Vec::new();
    for name in ["a", "b"] {
        d.enqueue(job().queue(name).expect("a name")).await;
        let mut request = d.claim_request(1);
        request.queues[0].queue = queue_named(name);
        tokens.push(d.claim_as(request).await.grants[0].id);
        d.advance(secs(1)).await;
    }
    d.advance(TERM).await;
    for token in tokens {
        let request = ReapRequest {
            request: d.request(),
            max: 1,
        };
        let first = d.store().reap(request.clone()).await.expect("reap");
        let expired: Vec<_> = first.iter().map(|expiry| expiry.token).collect();
        assert_eq!(expired, [token]);
        d.unchanged(async || {
            assert_eq!(d.store().reap(request).await.expect("reap"), first);
        })
        .await;
    }
}

/// A repeated command is carried out once, and on record once.
pub async fn control_acts_once(d: &Driver) {
    let held = d.held(job()).await;
    let commands = [
        ControlCommand::Revoke(LeaseSelect::Job(held.id())),
        ControlCommand::Reschedule {
            jobs: Select::Job(held.id()),
            delay: secs(5),
        },
        ControlCommand::Cancel(Select::Job(held.id())),
        ControlCommand::Purge(Select::Job(held.id())),
        ControlCommand::Pause(queue()),
    ];
    for command in commands {
        let request = d.control_request(command);
        let first = d.store().control(request.clone()).await.expect("control");
        assert_eq!(first.done, 1);
        d.unchanged(async || {
            assert_eq!(d.store().control(request).await.expect("control"), first);
        })
        .await;
    }
    assert_eq!(
        (d.snapshot().await.audit.len(), d.ledger().await.purged),
        (5, 1)
    );
}

/// A repeated revoke does not hit the next holder.
pub async fn a_repeated_revoke_spares_the_next_holder(d: &Driver) {
    let held = d.held(job()).await;
    let request = d.control_request(ControlCommand::Revoke(LeaseSelect::Job(held.id())));
    d.store().control(request.clone()).await.expect("control");
    let next = d.other().await.claim_one().await;
    d.store().control(request).await.expect("control");
    d.settled(&next, complete()).await;
}

/// A repeated prune reports the same number, and deletes no more.
pub async fn prune_deletes_once(d: &Driver) {
    for _ in 0..3 {
        let held = d.held(job().retention(secs(0))).await;
        d.settled(&held, complete()).await;
    }
    let request = PruneRequest {
        request: d.request(),
        overdue: secs(0),
        max: 2,
    };
    assert_eq!(d.store().prune(request.clone()).await.expect("prune"), 2);
    assert_eq!(d.store().prune(request).await.expect("prune"), 2);
    assert_eq!(d.queue().await.counts.completed, 1);
}

/// A request that a later one of its lane has overtaken is refused, and not applied.
pub async fn an_older_sequence_is_refused(d: &Driver) {
    let held = d.held(job().retention(secs(60))).await;
    let enqueue = d.enqueue_request(vec![job()]);
    let claim = d.claim_request(1);
    let settle = d.settle_request(vec![(&held, complete())]);
    let reap = ReapRequest {
        request: d.request(),
        max: 1,
    };
    let control = d.control_request(ControlCommand::Pause(queue()));
    let prune = PruneRequest {
        request: d.request(),
        overdue: secs(0),
        max: 1,
    };
    let checkpoint = CheckpointRequest {
        request: d.request(),
        checkpoints: Vec::new(),
    };
    d.enqueue(job()).await;
    d.unchanged(async || {
        assert!(is_lost(d.store().enqueue(enqueue).await));
        assert!(is_lost(d.store().claim(claim).await));
        assert!(is_lost(d.store().settle(settle).await));
        assert!(is_lost(d.store().reap(reap).await));
        assert!(is_lost(d.store().control(control).await));
        assert!(is_lost(d.store().prune(prune).await));
        assert!(is_lost(d.store().checkpoint(checkpoint).await));
    })
    .await;
    assert_eq!(d.state(held.id()).await, Some(JobState::Leased));
}

/// A session that nobody opened is refused.
pub async fn an_unopened_session_is_refused(d: &Driver) {
    let mut request = d.enqueue_request(vec![job()]);
    request.request.session = SessionId::generate();
    assert!(is_lost(d.store().enqueue(request).await));
    assert!(d.snapshot().await.jobs.is_empty());
}

/// A session idle for more than ten minutes is over; each call keeps it.
pub async fn an_idle_session_is_refused(d: &Driver) {
    for _ in 0..3 {
        d.advance(SESSION_IDLE).await;
        d.enqueue(job()).await;
    }
    d.advance(SESSION_IDLE + secs(1)).await;
    assert!(is_lost(d.try_enqueue(vec![job()]).await));
    assert!(is_lost(d.store().claim(d.claim_request(1)).await));
    assert_eq!(d.queue().await.counts.ready, 3);
    d.other().await.enqueue(job()).await;
}

/// A reap that finds nothing is a call: it keeps its session, and is refused when that is over.
pub async fn a_reap_of_nothing_keeps_its_session(d: &Driver) {
    for _ in 0..3 {
        d.advance(SESSION_IDLE).await;
        assert!(d.reap(1).await.is_empty());
    }
    d.advance(SESSION_IDLE).await;
    d.enqueue(job()).await;
    d.advance(SESSION_IDLE + secs(1)).await;
    let request = d.request();
    let late = d.store().reap(ReapRequest { request, max: 1 }).await;
    assert!(is_lost(late));
}

/// A call that has nowhere to go is a call: it keeps its session, and is refused when that is over.
pub async fn a_call_to_nowhere_keeps_its_session(d: &Driver) {
    let mut held = d.held(job()).await;
    held.receipt.queue = queue_named("nowhere");
    let claim = async || {
        let mut request = d.claim_request(1);
        request.queues[0].queue = queue_named("nowhere");
        d.store().claim(request).await
    };
    let settle = async || {
        let request = d.settle_request(vec![(&held, complete())]);
        d.store().settle(request).await
    };
    let checkpoint = async || {
        let request = CheckpointRequest {
            request: d.request(),
            checkpoints: vec![Checkpoint {
                receipt: held.receipt.clone(),
                seq: 1,
                bytes: Bytes::from_static(b"state"),
            }],
        };
        d.store().checkpoint(request).await
    };
    d.advance(SESSION_IDLE).await;
    assert!(claim().await.expect("claim").grants.is_empty());
    d.advance(SESSION_IDLE).await;
    assert_eq!(settle().await.expect("settle"), [Verdict::Fenced]);
    d.advance(SESSION_IDLE).await;
    assert_eq!(
        checkpoint().await.expect("checkpoint"),
        [Checkpointed::Fenced]
    );
    d.advance(SESSION_IDLE).await;
    d.enqueue(job()).await;
    d.advance(SESSION_IDLE + secs(1)).await;
    assert!(is_lost(claim().await));
    assert!(is_lost(settle().await));
    assert!(is_lost(checkpoint().await));
}

/// A repeat after the session's end is refused, not applied a second time.
pub async fn a_repeat_after_the_end_is_refused(d: &Driver) {
    let request = d.enqueue_request(vec![job()]);
    d.store().enqueue(request.clone()).await.expect("enqueue");
    d.advance(SESSION_IDLE + secs(1)).await;
    d.other().await;
    assert!(is_lost(d.store().enqueue(request).await));
    assert_eq!(d.queue().await.counts.ready, 1);
}

/// Session ids are new each time.
pub async fn sessions_are_never_reused(d: &Driver) {
    let mut ids = Vec::new();
    for _ in 0..50 {
        ids.push(d.store().open_session().await.expect("a session"));
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 50);
}

/// Lanes are independent: each remembers its own last answer.
pub async fn lanes_are_independent(d: &Driver) {
    let mut requests = Vec::new();
    for lane in 1..5 {
        let mut request = d.enqueue_request(vec![job()]);
        request.request = d.request_on(lane);
        d.store().enqueue(request.clone()).await.expect("enqueue");
        requests.push(request);
    }
    for request in requests {
        d.store().enqueue(request).await.expect("enqueue");
    }
    assert_eq!(d.ledger().await.enqueued, 4);
}

/// Two sessions may use the same lane and sequence number.
pub async fn sessions_are_independent(d: &Driver) {
    let other = d.other().await;
    let mine = d.enqueue_request(vec![job()]);
    let theirs = other.enqueue_request(vec![job()]);
    assert_eq!(
        (mine.request.lane, mine.request.seq),
        (theirs.request.lane, theirs.request.seq)
    );
    d.store().enqueue(mine).await.expect("enqueue");
    d.store().enqueue(theirs).await.expect("enqueue");
    assert_eq!(d.ledger().await.enqueued, 2);
}

/// A refused call is not an answer: its id can still be used.
pub async fn a_refused_call_uses_up_nothing(d: &Driver) {
    let mut request = d.enqueue_request(vec![job().priority(9)]);
    assert!(d.store().enqueue(request.clone()).await.is_err());
    Arc::make_mut(&mut request.jobs)[0].1.options.priority = 1;
    d.store().enqueue(request).await.expect("enqueue");
    assert_eq!(d.queue().await.counts.ready, 1);
}

/// An id that named another verb's call is refused.
pub async fn an_id_names_one_verb(d: &Driver) {
    let request = d.enqueue_request(vec![job()]);
    let RequestId { session, lane, seq } = request.request;
    d.store().enqueue(request).await.expect("enqueue");
    let mut claim = d.claim_request(1);
    claim.request = RequestId { session, lane, seq };
    d.unchanged(async || assert!(d.store().claim(claim).await.is_err()))
        .await;
}

/// Sessions outlive a clock that is set back.
pub async fn a_clock_set_back_ends_no_session(d: &Driver) {
    let request = d.enqueue_request(vec![job()]);
    d.store().enqueue(request.clone()).await.expect("enqueue");
    d.set_back(SESSION_IDLE * 2).await;
    d.store().enqueue(request).await.expect("enqueue");
    assert_eq!(d.ledger().await.enqueued, 1);
}
