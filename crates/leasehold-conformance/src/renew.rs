//! renew: extend live leases, and never one that is gone.

use super::driver::{
    Driver, HELD, Held, LIFETIME, TERM, complete, job, names_the_field, queue_named, retry, secs,
    surrender,
};
use leasehold::job::JobState;
use leasehold::lease::{Cause, FencingToken, LeaseEnd, Nonce, Progress, Verdict};
use leasehold::limits;
use leasehold::store::{Beat, Checkpointed, ControlCommand, LeaseSelect, Renewal, Select};

fn held_for(granted: std::time::Duration) -> Renewal {
    Renewal::Held {
        granted,
        cancel: Vec::new(),
        fenced: Vec::new(),
    }
}

/// A renewal grants a term from now.
pub async fn grants_a_term_from_now(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(secs(40)).await;
    assert_eq!(d.renew(held.beat()).await, held_for(TERM));
    d.advance(secs(40)).await;
    assert!(d.reap(10).await.is_empty());
    let lease = d.view(held.id()).await.lease.expect("a lease");
    assert_eq!((lease.time_left, lease.renewals), (secs(20), 1));
}

/// Never beyond granted-at + maximum lifetime: the store enforces that.
pub async fn never_goes_beyond_the_lifetime(d: &Driver) {
    let mut new = job();
    new.options.max_lifetime = Some(secs(100));
    let held = d.held(new).await;
    d.advance(secs(50)).await;
    assert_eq!(d.renew(held.beat()).await, held_for(secs(50)));
    d.advance(secs(49)).await;
    assert_eq!(d.renew(held.beat()).await, held_for(secs(1)));
    d.advance(secs(1)).await;
    assert_eq!(d.renew(held.beat()).await, Renewal::Fenced);
    assert_eq!(d.reap(10).await[0].cause, Cause::Lifetime);
}

/// The lifetime of the claim holds for jobs without one of their own.
pub async fn the_claims_lifetime_holds(d: &Driver) {
    let held = d.held(job()).await;
    let mut left = LIFETIME;
    while left > secs(50) {
        d.advance(secs(50)).await;
        left -= secs(50);
        assert_eq!(d.renew(held.beat()).await, held_for(TERM.min(left)));
    }
    d.advance(left).await;
    assert_eq!(d.renew(held.beat()).await, Renewal::Fenced);
}

/// Past its deadline a lease is gone, reaped or not: renewal never resurrects it.
pub async fn never_resurrects(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(TERM).await;
    d.untouched(async || assert_eq!(d.renew(held.beat()).await, Renewal::Fenced))
        .await;
    d.reap(10).await;
    d.untouched(async || assert_eq!(d.renew(held.beat()).await, Renewal::Fenced))
        .await;
    let next = d.claim_one().await;
    d.untouched(async || assert_eq!(d.renew(held.beat()).await, Renewal::Fenced))
        .await;
    assert_eq!(d.renew(next.beat()).await, held_for(TERM));
}

/// From its deadline on a grant is not renewed, though nobody has claimed or reaped since. It may
/// have one lease or many, and may have been renewed before.
pub async fn refused_from_the_deadline_on(d: &Driver) {
    let instant = std::time::Duration::from_micros(1);
    for (leases, renewals, over) in [
        (1, 0, instant),
        (1, 1, secs(0)),
        (1, 3, secs(1)),
        (5, 0, secs(1)),
        (5, 1, secs(0)),
        (5, 3, instant),
    ] {
        d.enqueue_many(leases).await;
        let claimed = d.claim_as(d.claim_request(leases)).await;
        let all = Beat::of(&claimed.grants[0]);
        for _ in 0..renewals {
            d.advance(secs(40)).await;
            assert_eq!(d.renew(all.clone()).await, held_for(TERM));
        }
        d.advance(TERM + over).await;
        let mut last = all.clone();
        last.leases.drain(..leases - 1);
        for beat in [last, all] {
            d.untouched(async || assert_eq!(d.renew(beat.clone()).await, Renewal::Fenced))
                .await;
        }
        let expired = d.reap(9).await;
        assert_eq!(expired.len(), leases);
        assert!(expired.iter().all(|end| end.cause == Cause::Deadline));
        for end in expired {
            d.control(ControlCommand::Purge(Select::Job(end.job))).await;
        }
    }
}

/// A microsecond before its deadline a lease is still there.
pub async fn renews_until_the_deadline(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(TERM - std::time::Duration::from_micros(1)).await;
    assert_eq!(d.renew(held.beat()).await, held_for(TERM));
}

/// Leases that are renewed together for the first time end each at its own deadline, at that very
/// moment.
pub async fn each_until_its_own_deadline(d: &Driver) {
    let instant = std::time::Duration::from_micros(1);
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(d.held(job()).await);
        d.advance(instant).await;
    }
    // Exactly at the first one's.
    d.advance(TERM - 3 * instant).await;
    let beats: Vec<Beat> = held.iter().map(Held::beat).collect();
    let told = d.store().renew(beats.clone()).await.expect("renew");
    assert_eq!(told, [Renewal::Fenced, held_for(TERM), held_for(TERM)]);
    let expired = d.reap(10).await;
    assert_eq!(expired.len(), 1);
    assert_eq!(expired[0].token, held[0].token());
    d.advance(TERM - instant).await;
    let told = d.store().renew(beats[1..].to_vec()).await.expect("renew");
    assert_eq!(told, [held_for(TERM), held_for(TERM)]);
}

/// Leases that are renewed together for the first time have each its own term, lifetime and proof.
pub async fn each_by_its_own_terms(d: &Driver) {
    let mut short = job();
    short.options.term = Some(secs(30));
    let mut brief = job();
    brief.options.max_lifetime = Some(secs(65));
    for (other, granted) in [
        (short, Some(secs(30))),
        (brief, Some(secs(45))),
        (job(), None),
    ] {
        let held = [
            d.held(job()).await,
            d.held(other).await,
            d.held(job()).await,
        ];
        let mut beats: Vec<Beat> = held.iter().map(Held::beat).collect();
        if granted.is_none() {
            beats[1].nonce = Nonce::from_bytes([9; 16]);
        }
        d.advance(secs(20)).await;
        let told = d.store().renew(beats).await.expect("renew");
        let other = granted.map_or(Renewal::Fenced, held_for);
        assert_eq!(told, [held_for(TERM), other, held_for(TERM)]);
    }
}

/// Who is renewed together with others ends with its own lifetime, not with theirs.
pub async fn each_for_its_own_lifetime(d: &Driver) {
    lifetimes(d, false).await;
}

/// So it is if they have been renewed one by one before.
pub async fn each_for_its_own_lifetime_after_a_time_apart(d: &Driver) {
    lifetimes(d, true).await;
}

async fn lifetimes(d: &Driver, apart_at_first: bool) {
    let mut beats = vec![d.held(job()).await.beat()];
    d.advance(secs(40)).await;
    beats.push(d.held(job()).await.beat());
    if apart_at_first {
        for beat in &beats {
            assert_eq!(d.renew(beat.clone()).await, held_for(TERM));
        }
    }
    let mut left = LIFETIME - secs(40);
    while !left.is_zero() {
        let told = d.store().renew(beats.clone()).await.expect("renew");
        let later = TERM.min(left + secs(40));
        assert_eq!(told, [held_for(TERM.min(left)), held_for(later)]);
        let passed = left.min(secs(40));
        d.advance(passed).await;
        left -= passed;
    }
    let told = d.store().renew(beats).await.expect("renew");
    assert_eq!(told, [Renewal::Fenced, held_for(secs(40))]);
}

/// A foreign beat is fenced: wrong proof, wrong queue, wrong grant, wrong partition.
pub async fn foreign_beats_are_fenced(d: &Driver) {
    let held = d.held(job()).await;
    d.enqueue(job().queue("other").expect("a name")).await;
    let beat = held.beat();
    let bad = [
        Beat {
            nonce: Nonce::from_bytes([9; 16]),
            ..beat.clone()
        },
        Beat {
            queue: queue_named("other"),
            ..beat.clone()
        },
        Beat {
            queue: queue_named("nowhere"),
            ..beat.clone()
        },
        Beat {
            grant: FencingToken::new(held.token().get() + 1),
            ..beat.clone()
        },
        Beat {
            partition: 9,
            ..beat.clone()
        },
    ];
    for mut beat in bad {
        d.untouched(async || {
            assert_eq!(d.renew(beat.clone()).await, Renewal::Fenced);
            beat.lapse = std::mem::take(&mut beat.leases);
            assert_eq!(d.renew(beat).await, Renewal::Fenced);
        })
        .await;
    }
    assert_eq!(d.renew(beat).await, held_for(TERM));
}

/// Renewals after every kind of end are fenced.
pub async fn ended_leases_are_fenced(d: &Driver) {
    for end in 0..4 {
        let held = d.held(job()).await;
        match end {
            0 => d.settled(&held, complete()).await,
            1 => d.settled(&held, retry(secs(9_999))).await,
            2 => assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced),
            _ => {
                let command = ControlCommand::Revoke(LeaseSelect::Job(held.id()));
                assert_eq!(d.control(command).await.done, 1);
            }
        }
        d.untouched(async || assert_eq!(d.renew(held.beat()).await, Renewal::Fenced))
            .await;
        d.control(ControlCommand::Purge(Select::Job(held.id())))
            .await;
    }
    assert_eq!(d.ledger().await.fenced, 0);
}

/// Verdicts differ per lease: what ended is listed, its siblings live on.
pub async fn siblings_of_an_ended_lease_live_on(d: &Driver) {
    d.enqueue_many(3).await;
    let claimed = d.claim_as(d.claim_request(3)).await;
    let held = Held::all(&claimed);
    d.settled(&held[1], complete()).await;
    d.advance(secs(30)).await;
    let renewal = d.renew(Beat::of(&claimed.grants[0])).await;
    let fenced = vec![held[1].token()];
    assert_eq!(
        renewal,
        Renewal::Held {
            granted: TERM,
            cancel: Vec::new(),
            fenced
        }
    );
    assert_eq!(d.ledger().await.fenced, 0);
    d.settled(&held[0], complete()).await;
    d.settled(&held[2], surrender()).await;
}

/// A named lease lapses: it expires now, as stalled; its siblings live on.
pub async fn a_lapsed_lease_expires_alone(d: &Driver) {
    let ids = d.enqueue_many(3).await;
    let claimed = d.claim_as(d.claim_request(3)).await;
    let held = Held::all(&claimed);
    let mut beat = Beat::of(&claimed.grants[0]);
    beat.lapse = vec![beat.leases.remove(1)];
    assert_eq!(d.renew(beat).await, held_for(TERM));
    let view = d.view(ids[1]).await;
    assert_eq!(
        (view.state, view.job.expiries, view.job.failures),
        (JobState::Ready, 1, 0)
    );
    assert_eq!(view.job.history[0].end, LeaseEnd::Expired(Cause::Stalled));
    assert_eq!(d.ledger().await.expired_stalled, 1);
    assert_eq!(d.claim_ids(9).await, [ids[1]]);
    d.unchanged(async || assert!(d.settle(&held[1], complete()).await.is_fenced()))
        .await;
    d.settled(&held[0], complete()).await;
}

/// Several lapse in token order, to the front.
pub async fn lapsed_leases_go_to_the_front(d: &Driver) {
    let ids = d.enqueue_many(5).await;
    let claimed = d.claim_as(d.claim_request(4)).await;
    let mut beat = Beat::of(&claimed.grants[0]);
    beat.lapse = vec![beat.leases[2], beat.leases[0]];
    beat.leases = vec![beat.leases[1], beat.leases[3]];
    assert_eq!(d.renew(beat).await, held_for(TERM));
    assert_eq!(d.claim_ids(9).await, [ids[0], ids[2], ids[4]]);
}

/// Letting the last lease lapse leaves nothing to hold.
pub async fn lapsing_all_is_fenced(d: &Driver) {
    let held = d.held(job()).await;
    assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
    assert_eq!(d.ledger().await.expired_stalled, 1);
    assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
    assert_eq!(d.ledger().await.expired_stalled, 1);
}

/// Lapses count toward the expiry limit.
pub async fn lapses_count_toward_the_expiry_limit(d: &Driver) {
    let mut new = job();
    new.options.max_expiries = 3;
    let id = d.enqueue(new).await;
    for _ in 0..3 {
        let held = d.claim_one().await;
        assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
    }
    assert_eq!(d.state(id).await, Some(JobState::Dead));
}

/// An overdue grant cannot lapse any more: its deadline was first.
pub async fn an_overdue_lease_does_not_lapse(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(TERM).await;
    d.untouched(async || assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced))
        .await;
    assert_eq!(d.reap(10).await[0].cause, Cause::Deadline);
}

/// A cancelled job's holder is told at the next renewal, and each one after it.
pub async fn tells_of_a_cancel(d: &Driver) {
    let held = d.held(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(held.id())))
        .await;
    for _ in 0..2 {
        let cancel = vec![held.token()];
        let told = Renewal::Held {
            granted: TERM,
            cancel,
            fenced: Vec::new(),
        };
        assert_eq!(d.renew(held.beat()).await, told);
    }
}

/// Progress is kept with the lease, and with its end.
pub async fn keeps_the_last_progress(d: &Driver) {
    let held = d.held(job()).await;
    for done in 1..=2 {
        let mut beat = held.beat();
        let progress = Progress {
            done,
            total: Some(5),
            note: "rows".into(),
        };
        beat.progress = vec![(held.token(), progress)];
        assert_eq!(d.renew(beat).await, held_for(TERM));
    }
    assert_eq!(d.renew(held.beat()).await, held_for(TERM));
    let lease = d.view(held.id()).await.lease.expect("a lease");
    assert_eq!(lease.progress.expect("progress").done, 2);
    let expiry = d.expire_all().await.remove(0);
    assert_eq!(expiry.progress.expect("progress").done, 2);
    let ended = d.view(held.id()).await.job.history[0].clone();
    assert_eq!(
        (ended.progress.expect("progress").done, ended.renewals),
        (2, 3)
    );
}

/// One answer per beat, in order; one bad beat spoils no other.
pub async fn answers_each_beat(d: &Driver) {
    let good = d.held(job()).await;
    let bad = d.held(job()).await;
    d.settled(&bad, complete()).await;
    let beats = vec![bad.beat(), good.beat(), bad.beat()];
    let answers = d.store().renew(beats).await.expect("renew");
    assert_eq!(answers, [Renewal::Fenced, held_for(TERM), Renewal::Fenced]);
    assert_eq!(d.store().renew(Vec::new()).await.expect("renew"), []);
}

/// A renewal is evaluated anew each time, never replayed.
pub async fn is_never_replayed(d: &Driver) {
    let held = d.held(job()).await;
    let beat = held.beat();
    assert_eq!(d.renew(beat.clone()).await, held_for(TERM));
    d.advance(secs(59)).await;
    assert_eq!(d.renew(beat.clone()).await, held_for(TERM));
    d.settled(&held, complete()).await;
    assert_eq!(d.renew(beat).await, Renewal::Fenced);
}

/// Renewals over the limits are refused, and extend nothing.
pub async fn limits_are_checked(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(secs(1)).await;
    let before = d.snapshot().await;
    let many = vec![held.token(); limits::GRANT_LEASES + 1];
    let note = "n".repeat(limits::REASON_BYTES + 1);
    let progress = vec![(
        held.token(),
        Progress {
            done: 1,
            total: None,
            note,
        },
    )];
    let calls = [
        ("beats", vec![held.beat(); limits::CALL_ITEMS + 1]),
        (
            "leases",
            vec![Beat {
                leases: many.clone(),
                ..held.beat()
            }],
        ),
        (
            "lapse",
            vec![Beat {
                lapse: many,
                ..held.beat()
            }],
        ),
        (
            "progress note",
            vec![
                held.beat(),
                Beat {
                    progress,
                    ..held.beat()
                },
            ],
        ),
    ];
    for (field, beats) in calls {
        let error = d.store().renew(beats).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert_eq!(d.snapshot().await, before);
}

/// A lease that a renewal kept is not late when it is settled.
pub async fn a_renewed_lease_is_not_late(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(secs(50)).await;
    assert_eq!(d.renew(held.beat()).await, held_for(TERM));
    d.advance(secs(50)).await;
    assert_eq!(d.settle(&held, complete()).await, HELD);
}

/// A beat lets no lease lapse that is not of its grant.
pub async fn foreign_leases_do_not_lapse(d: &Driver) {
    d.enqueue_many(5).await;
    let mine = d.claim_as(d.claim_request(2)).await;
    let others = d.claim(2).await;
    d.advance(secs(1)).await;
    let mut beat = Beat::of(&mine.grants[0]);
    let last = beat.leases[1].get();
    beat.lapse = others.iter().map(Held::token).collect();
    beat.lapse.extend([
        FencingToken::new(beat.grant.get() - 1),
        FencingToken::new(last + limits::GRANT_LEASES as u64),
        FencingToken::new(u64::MAX),
    ]);
    assert_eq!(d.renew(beat).await, held_for(TERM));
    assert_eq!(d.ledger().await.expired(), 0);
    for held in &others {
        let lease = d.view(held.id()).await.lease.expect("it lives");
        assert_eq!((lease.time_left, lease.renewals), (TERM - secs(1), 0));
        d.settled(held, complete()).await;
    }
}

/// A beat that names foreign leases is told that they are not the holder's; they are not renewed.
pub async fn foreign_leases_are_not_renewed(d: &Driver) {
    d.enqueue_many(3).await;
    let mine = d.claim_as(d.claim_request(1)).await;
    let others = d.claim(2).await;
    d.advance(secs(40)).await;
    let mut beat = Beat::of(&mine.grants[0]);
    let own = beat.leases[0];
    let before = FencingToken::new(beat.grant.get() - 1);
    beat.leases = vec![others[0].token(), own, before, others[1].token()];
    let progress = |done| Progress {
        done,
        total: None,
        note: String::new(),
    };
    beat.progress = vec![(others[0].token(), progress(9)), (own, progress(1))];
    let told = Renewal::Held {
        granted: TERM,
        cancel: Vec::new(),
        fenced: vec![others[0].token(), before, others[1].token()],
    };
    assert_eq!(d.renew(beat).await, told);
    assert_eq!(d.ledger().await.fenced, 0);
    let lease = d.view(others[0].id()).await.lease.expect("a lease");
    assert_eq!((lease.time_left, lease.progress), (secs(20), None));
    d.advance(secs(20)).await;
    assert_eq!(d.reap(9).await.len(), 2);
    let held = &Held::all(&mine)[0];
    let lease = d.view(held.id()).await.lease.expect("a lease");
    assert_eq!(lease.progress.expect("progress").done, 1);
}

/// A cancel is told of the one lease that it is about, by its token.
pub async fn a_cancel_is_told_of_one_lease(d: &Driver) {
    d.enqueue_many(4).await;
    let claimed = d.claim_as(d.claim_request(4)).await;
    let held = Held::all(&claimed);
    d.settled(&held[0], complete()).await;
    d.control(ControlCommand::Cancel(Select::Job(held[2].id())))
        .await;
    let told = Renewal::Held {
        granted: TERM,
        cancel: vec![held[2].token()],
        fenced: vec![held[0].token()],
    };
    assert_eq!(d.renew(Beat::of(&claimed.grants[0])).await, told);
}

/// A cancelled job whose lease lapses is cancelled, whatever its expiries.
pub async fn a_cancelled_job_lapses_into_cancelled(d: &Driver) {
    d.enqueue_many(2).await;
    let held = d.claim(2).await;
    d.control(ControlCommand::Cancel(Select::Job(held[0].id())))
        .await;
    let mut beat = held[1].beat();
    beat.lapse = vec![held[0].token()];
    assert_eq!(d.renew(beat).await, held_for(TERM));
    let view = d.view(held[0].id()).await;
    assert_eq!((view.state, view.job.expiries), (JobState::Cancelled, 1));
    assert_eq!(d.ledger().await.expired_stalled, 1);
}

/// A refused renewal is not counted, whatever ended the lease: it may have been under way when its
/// own settlement came, and a grant that is gone cannot say. The next call that would change
/// something is counted.
pub async fn refused_renewals_are_not_counted(d: &Driver) {
    d.enqueue_many(5).await;
    let claimed = d.claim_as(d.claim_request(5)).await;
    let held = Held::all(&claimed);
    let mut beat = Beat::of(&claimed.grants[0]);
    d.settled(&held[4], complete()).await;
    let told = Renewal::Held {
        granted: TERM,
        cancel: Vec::new(),
        fenced: vec![held[4].token()],
    };
    assert_eq!(d.renew(beat.clone()).await, told);
    assert_eq!(d.ledger().await.fenced, 0, "its own settlement");
    beat.lapse = beat.leases.split_off(2);
    d.advance(TERM).await;
    let refused = async || assert_eq!(d.renew(beat.clone()).await, Renewal::Fenced);
    d.untouched(refused).await;
    d.reap(9).await;
    d.untouched(refused).await;
    assert!(d.settle(&held[0], complete()).await.is_fenced());
    assert_eq!(d.ledger().await.fenced, 1, "a settlement of a stale holder");
    let checkpoint = d.checkpoint(&held[1], 1, "late").await;
    assert_eq!(checkpoint, Checkpointed::Fenced);
    assert_eq!(d.ledger().await.fenced, 2, "a checkpoint of a stale holder");
    d.untouched(refused).await;
}

/// A lease that has lapsed is gone for the beats behind it, those of the same call included.
pub async fn a_lapsed_lease_is_gone_for_the_next_beat(d: &Driver) {
    let held = d.held(job()).await;
    let beats = vec![held.lapse(), held.lapse(), held.beat()];
    let renewals = d.store().renew(beats).await.expect("renew");
    assert!(
        renewals.iter().all(|r| *r == Renewal::Fenced),
        "{renewals:?}"
    );
    let ledger = d.ledger().await;
    assert_eq!((ledger.expired_stalled, ledger.fenced), (1, 0));
}

/// A beat may name any leases of its grant, in any order: it hears of those, and of no others.
pub async fn any_leases_of_a_grant(d: &Driver) {
    d.enqueue_many(4).await;
    let held = d.claim(4).await;
    d.settled(&held[1], complete()).await;
    let named = |places: &[usize]| {
        let mut beat = held[0].beat();
        beat.leases = places.iter().map(|at| held[*at].token()).collect();
        beat
    };
    let fenced = |places: &[usize]| Renewal::Held {
        granted: TERM,
        cancel: Vec::new(),
        fenced: places.iter().map(|at| held[*at].token()).collect(),
    };
    assert_eq!(d.renew(named(&[0, 2])).await, fenced(&[]));
    assert_eq!(d.renew(named(&[3, 0])).await, fenced(&[]));
    assert_eq!(d.renew(named(&[2, 1, 3])).await, fenced(&[1]));
    d.settled(&held[2], complete()).await;
    assert_eq!(d.renew(named(&[0, 2])).await, fenced(&[2]));
    assert_eq!(d.renew(named(&[0, 3])).await, fenced(&[]));
}

/// What a beat shows that is fenced is not kept: neither with a foreign proof, nor of a lease of
/// another grant, nor from the deadline on.
pub async fn fenced_progress_is_not_kept(d: &Driver) {
    d.enqueue_many(3).await;
    let held = d.claim(1).await.remove(0);
    let next = d.claim(2).await;
    let show = async |beat: Beat, token: FencingToken| {
        let progress = Progress {
            done: 9,
            total: None,
            note: String::new(),
        };
        let progress = vec![(token, progress)];
        d.renew(Beat { progress, ..beat }).await
    };
    let mut foreign = held.beat();
    foreign.nonce = Nonce::from_bytes([9; 16]);
    assert_eq!(show(foreign, held.token()).await, Renewal::Fenced);
    let below = FencingToken::new(held.token().get() - 1);
    for beside in [below, next[0].token()] {
        assert_eq!(show(held.beat(), beside).await, held_for(TERM));
    }
    assert_eq!(show(next[1].beat(), next[1].token()).await, held_for(TERM));
    for (held, shown) in [(&held, None), (&next[0], None), (&next[1], Some(9))] {
        let lease = d.view(held.id()).await.lease.expect("a lease");
        assert_eq!(lease.progress.map(|progress| progress.done), shown);
    }
    d.advance(TERM).await;
    assert_eq!(show(held.beat(), held.token()).await, Renewal::Fenced);
    let expired = d.reap(9).await;
    let mine = expired.iter().find(|end| end.token == held.token());
    assert_eq!(mine.expect("an expiry").progress, None);
}

/// One lease of a grant lapses in the beat in which another shows its first progress.
pub async fn lapses_beside_a_first_progress(d: &Driver) {
    d.enqueue_many(3).await;
    let held = d.claim(3).await;
    let progress = Progress {
        done: 5,
        total: None,
        note: String::new(),
    };
    let mut beat = held[1].beat();
    beat.leases.push(held[2].token());
    beat.lapse = vec![held[0].token()];
    beat.progress = vec![(held[2].token(), progress)];
    assert_eq!(d.renew(beat).await, held_for(TERM));
    assert_eq!(d.settle(&held[0], complete()).await, Verdict::Fenced);
    let lease = d.view(held[2].id()).await.lease.expect("a lease");
    assert_eq!(lease.progress.map(|progress| progress.done), Some(5));
    let ledger = d.ledger().await;
    assert_eq!((ledger.expired_stalled, ledger.live), (1, 2));
    assert_eq!(d.claim_ids(9).await, [held[0].id()]);
}

/// Beats of several grants in one call: each is told of its own leases.
pub async fn each_grant_of_a_call_is_its_own(d: &Driver) {
    d.enqueue_many(6).await;
    let mut grants = Vec::new();
    for _ in 0..3 {
        grants.push(d.claim(2).await);
    }
    d.settled(&grants[1][0], complete()).await;
    d.settled(&grants[2][1], complete()).await;
    let cancelled = &grants[1][1];
    d.control(ControlCommand::Cancel(Select::Job(cancelled.id())))
        .await;
    let beats = grants.iter().map(|held| {
        let mut beat = held[0].beat();
        beat.leases.push(held[1].token());
        beat
    });
    let told = |cancel: &[&Held], fenced: &[&Held]| Renewal::Held {
        granted: TERM,
        cancel: cancel.iter().map(|held| held.token()).collect(),
        fenced: fenced.iter().map(|held| held.token()).collect(),
    };
    let answers = d.store().renew(beats.collect()).await.expect("renew");
    let expected = [
        told(&[], &[]),
        told(&[cancelled], &[&grants[1][0]]),
        told(&[], &[&grants[2][1]]),
    ];
    assert_eq!(answers, expected);
}
