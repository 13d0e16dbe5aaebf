//! renew, release, save: what a holder can do, and a holder that has been replaced cannot.

use std::time::Duration;

use bytes::Bytes;

use super::driver::{
    HoldingDriver, LIFETIME, TERM, ask, ask_all, family, name, path, secs, shared,
};
use leasehold::clock::Timestamp;
use leasehold::lease::{Cause, FencingToken, HoldingReceipt, Nonce, Progress};
use leasehold::limits;
use leasehold::store::holding::{
    Acquired, Ask, GrantedHolding, HoldingBeat, HoldingEnd, HoldingRenewal, HoldingState, Release,
    ReleaseRequest, Released, Save, SaveRequest, SavedState,
};

const ENDED: Released = Released::Ended {
    late: false,
    saved: false,
};
const LATE: Released = Released::Ended {
    late: true,
    saved: false,
};

fn held_for(granted: Duration) -> HoldingRenewal {
    HoldingRenewal::Held {
        granted,
        recalled: None,
    }
}

/// Receipts that are not the holder's.
fn foreign(held: &GrantedHolding) -> Vec<HoldingReceipt> {
    let good = &held.receipt;
    let mut forged = good.clone();
    forged.nonce = Nonce::from_bytes([7; 16]);
    let mut token = good.clone();
    token.token = FencingToken::new(good.token.get() + 1);
    let mut partition = good.clone();
    partition.partition += 1;
    let mut family = good.clone();
    family.family = "elsewhere".parse().expect("a name");
    vec![forged, token, partition, family]
}

/// A renewal grants a term from now, never beyond the maximum lifetime.
pub async fn renewals_grant_a_term_from_now(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let mut left = LIFETIME;
    while left > secs(40) {
        d.advance(secs(40)).await;
        left -= secs(40);
        assert_eq!(d.renew(&held).await, held_for(TERM.min(left)));
    }
    d.advance(left).await;
    assert_eq!(d.renew(&held).await, HoldingRenewal::Fenced);
    assert_eq!(d.reap().await.expired[0].cause, Cause::Lifetime);
    assert_eq!(d.ledger().await.expired_lifetime, 1);
}

/// Past its deadline a holding is gone, recorded or not: renewal never resurrects it.
pub async fn a_renewal_never_resurrects(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    d.advance(TERM).await;
    d.unchanged(async || assert_eq!(d.renew(&held).await, HoldingRenewal::Fenced))
        .await;
    let next = d.held(&ask(name("a"))).await;
    d.unchanged(async || assert_eq!(d.renew(&held).await, HoldingRenewal::Fenced))
        .await;
    assert_eq!(d.renew(&next).await, held_for(TERM));
}

/// Foreign receipts renew, release and save nothing.
pub async fn foreign_receipts_are_fenced(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    for receipt in foreign(&held) {
        d.unchanged(async || {
            let state = None;
            let foreign = GrantedHolding {
                receipt: receipt.clone(),
                granted: TERM,
                state,
            };
            assert_eq!(d.renew(&foreign).await, HoldingRenewal::Fenced);
            assert_eq!(d.lapse(&foreign).await, HoldingRenewal::Fenced);
            assert_eq!(d.release(&foreign).await, Released::Fenced);
            assert_eq!(d.save(&foreign, 1, "x").await, SavedState::Fenced);
        })
        .await;
    }
    let state = d.scope(name("a")).await.expect("the scope").state;
    assert_eq!(state, None);
    assert_eq!(
        d.ledger().await.fenced,
        6,
        "three in the family, twice each"
    );
    assert_eq!(d.release(&held).await, ENDED);
}

/// A holding that lapses expires now.
pub async fn a_lapse_is_an_expiry(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    assert_eq!(d.lapse(&held).await, HoldingRenewal::Fenced);
    assert_eq!(d.ledger().await.expired_stalled, 1);
    d.unchanged(async || assert_eq!(d.renew(&held).await, HoldingRenewal::Fenced))
        .await;
    d.held(&ask(name("a"))).await;
    d.advance(TERM).await;
    let ended = d.scope(name("a")).await.expect("the scope").ended;
    assert_eq!(ended[0].end, HoldingEnd::Expired(Cause::Stalled));
}

/// An overdue holding expires by its deadline, though it is told to lapse.
pub async fn an_overdue_holding_does_not_lapse(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    d.advance(TERM).await;
    assert_eq!(d.lapse(&held).await, HoldingRenewal::Fenced);
    assert_eq!(d.reap().await.expired[0].cause, Cause::Deadline);
}

/// The last progress shown is in the report of an expiry.
pub async fn keeps_the_last_progress(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let progress = Progress {
        done: 3,
        total: Some(9),
        note: "half way".into(),
    };
    let mut beat = HoldingBeat::of(held.receipt.clone());
    beat.progress = Some(progress.clone());
    assert_eq!(d.beat(beat).await, held_for(TERM));
    assert_eq!(d.renew(&held).await, held_for(TERM));
    assert_eq!(d.holdings().await[0].progress, Some(progress.clone()));
    assert_eq!(d.holdings().await[0].renewals, 2);
    d.advance(TERM).await;
    assert_eq!(d.reap().await.expired[0].progress, Some(progress));
}

/// A release ends a holding once.
pub async fn a_release_ends_once(d: &HoldingDriver) {
    let held = d.held(&ask_all(vec![name("a"), name("b")])).await;
    assert_eq!(d.release(&held).await, ENDED);
    d.unchanged(async || assert_eq!(d.release(&held).await, Released::Fenced))
        .await;
    let next = d.held(&ask(name("b"))).await;
    d.unchanged(async || assert_eq!(d.release(&held).await, Released::Fenced))
        .await;
    assert_eq!(d.release(&next).await, ENDED);
    let ledger = d.ledger().await;
    assert_eq!((ledger.granted, ledger.released, ledger.live), (2, 2, 0));
}

/// A late release is accepted until the expiry has been recorded.
pub async fn late_is_accepted_and_counted(d: &HoldingDriver) {
    let (a, b) = (d.held(&ask(name("a"))).await, d.held(&ask(name("b"))).await);
    d.advance(TERM).await;
    assert_eq!(d.release(&a).await, LATE);
    d.reap().await;
    assert_eq!(d.release(&b).await, Released::Fenced);
    let ledger = d.ledger().await;
    assert_eq!((ledger.released, ledger.late, ledger.fenced), (1, 1, 1));
    assert_eq!(ledger.expired_deadline, 1);
}

/// An ask can be taken back without its token: the holding that it became ends.
pub async fn an_ask_is_taken_back(d: &HoldingDriver) {
    let mine = ask_all(vec![name("a"), name("b")]);
    d.held(&mine).await;
    let other = Ask {
        nonce: Nonce::from_bytes([7; 16]),
        ..mine.clone()
    };
    let elsewhere = Ask {
        scopes: vec![name("c")],
        ..mine.clone()
    };
    d.unchanged(async || {
        assert_eq!(d.withdraw(&other).await, Released::Fenced);
        assert_eq!(d.withdraw(&elsewhere).await, Released::Fenced);
    })
    .await;
    assert_eq!(d.ledger().await.fenced, 0);
    let by_second = Ask {
        scopes: vec![name("b")],
        ..mine.clone()
    };
    assert_eq!(d.withdraw(&by_second).await, ENDED);
    assert_eq!(d.withdraw(&mine).await, Released::Fenced);
}

/// The next holder gets the state, with the token that wrote it.
pub async fn state_reaches_the_next_holder(d: &HoldingDriver) {
    let first = d.held(&ask(name("a"))).await;
    assert_eq!(first.state, None);
    assert_eq!(
        d.save(&first, 1, "one").await,
        SavedState::Saved { late: false }
    );
    assert_eq!(
        d.save(&first, 1, "two").await,
        SavedState::Saved { late: false }
    );
    d.advance(TERM).await;
    let second = d.held(&ask(name("a"))).await;
    let state = |token, seq, text: &'static str| HoldingState {
        token,
        seq,
        bytes: Bytes::from_static(text.as_bytes()),
    };
    assert_eq!(second.state, Some(state(first.receipt.token, 1, "two")));
    let mut release = Release::of(second.receipt.clone());
    release.state = Some((0, Bytes::from_static(b"three")));
    let saved = Released::Ended {
        late: false,
        saved: true,
    };
    assert_eq!(d.release_as(release).await, saved);
    let both = d.held(&ask_all(vec![name("a"), name("b")])).await;
    assert_eq!(both.state, Some(state(second.receipt.token, 0, "three")));
    d.release(&both).await;
    let swapped = d.held(&ask_all(vec![name("b"), name("a")])).await;
    assert_eq!(swapped.state, None, "state belongs to the first scope");
}

/// State never goes back in (token, seq), also among those who share.
pub async fn state_never_goes_back(d: &HoldingDriver) {
    let first = d.held(&shared(name("a"))).await;
    let second = d.held(&shared(name("a"))).await;
    assert_eq!(
        d.save(&first, 9, "old").await,
        SavedState::Saved { late: false }
    );
    let behind = |held: &GrantedHolding, seq| SavedState::Behind {
        token: held.receipt.token,
        seq,
    };
    assert_eq!(d.save(&first, 8, "older").await, behind(&first, 9));
    assert_eq!(
        d.save(&second, 2, "new").await,
        SavedState::Saved { late: false }
    );
    assert_eq!(d.save(&first, 10, "old").await, behind(&second, 2));
    let mut release = Release::of(first.receipt.clone());
    release.state = Some((11, Bytes::from_static(b"old")));
    assert_eq!(
        d.release_as(release).await,
        ENDED,
        "released, and not saved"
    );
    d.advance(TERM).await;
    assert_eq!(
        d.save(&second, 3, "late").await,
        SavedState::Saved { late: true }
    );
    d.reap().await;
    assert_eq!(d.save(&second, 4, "gone").await, SavedState::Fenced);
    assert_eq!(
        d.held(&ask(name("a"))).await.state.map(|state| state.seq),
        Some(3)
    );
}

/// A state of more than 64 KiB is refused, and nothing of the call is done.
pub async fn a_large_state_is_refused(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let large = Bytes::from(vec![0; limits::STATE_BYTES + 1]);
    d.unchanged(async || {
        let save = |bytes| Save {
            receipt: held.receipt.clone(),
            seq: 1,
            bytes,
        };
        let request = SaveRequest {
            request: d.request(),
            saves: vec![save(Bytes::new()), save(large.clone())],
        };
        let error = d.store().save(request).await.expect_err("too large");
        assert_eq!(error.field(), Some("state"));
        let mut release = Release::of(held.receipt.clone());
        release.state = Some((1, large));
        let request: ReleaseRequest = d.release_request(release);
        let error = d.store().release(request).await.expect_err("too large");
        assert_eq!(error.field(), Some("state"));
    })
    .await;
    assert_eq!(d.scope(name("a")).await.expect("the scope").state, None);
    let most = SaveRequest {
        request: d.request(),
        saves: vec![Save {
            receipt: held.receipt.clone(),
            seq: 1,
            bytes: Bytes::from(vec![0; limits::STATE_BYTES]),
        }],
    };
    let saved = d.store().save(most).await.expect("as large as allowed");
    assert_eq!(saved, [SavedState::Saved { late: false }]);
}

/// A fence's mark raises the issuer above it, unless it is too far ahead to be believed.
pub async fn a_mark_raises_the_floor(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let ahead = |by: Duration| {
        let mark = Timestamp::from_micros(held.receipt.token.get()).after(by);
        FencingToken::new(mark.as_micros())
    };
    let mark = ahead(secs(3600));
    let mut release = Release::of(held.receipt.clone());
    release.mark = Some(mark);
    assert_eq!(d.release_as(release).await, ENDED);
    let next = d.held(&ask(name("a"))).await;
    assert!(next.receipt.token > mark);
    let disbelieved = ahead(secs(3 * 24 * 3600));
    let mut release = Release::of(next.receipt.clone());
    release.mark = Some(disbelieved);
    assert_eq!(d.release_as(release).await, ENDED);
    assert!(d.held(&ask(name("a"))).await.receipt.token < disbelieved);
}

/// The last eight ends of a scope are remembered, and forgotten a day after the last.
pub async fn scopes_are_remembered_for_a_while(d: &HoldingDriver) {
    for _ in 0..9 {
        let held = d.held(&ask(path("/a"))).await;
        d.release(&held).await;
    }
    let known = d.scope(path("/a")).await.expect("the scope");
    assert_eq!(known.ended.len(), limits::HISTORY);
    assert!(known.ended.is_sorted_by_key(|ended| ended.token));
    let held = d.held(&ask(name("state"))).await;
    let _ = d.save(&held, 1, "kept").await;
    d.release(&held).await;
    d.advance(limits::SCOPE_RETENTION - Duration::from_micros(1))
        .await;
    assert_eq!(d.reap().await.forgotten, 0);
    d.advance(Duration::from_micros(1)).await;
    assert_eq!(d.reap().await.forgotten, 1);
    assert_eq!(d.scope(path("/a")).await, None);
    d.advance(limits::STATE_RETENTION - limits::SCOPE_RETENTION)
        .await;
    assert_eq!(d.reap().await.forgotten, 1);
    assert_eq!(d.held(&ask(name("state"))).await.state, None);
    assert_eq!(d.families().await[0].family, family());
}

/// A scope that is held or waited for is not forgotten.
pub async fn what_is_held_is_not_forgotten(d: &HoldingDriver) {
    let long = Ask {
        term: limits::STATE_RETENTION,
        max_lifetime: limits::STATE_RETENTION,
        ..ask(name("a"))
    };
    let held = d.held(&long).await;
    d.advance(limits::SCOPE_RETENTION * 2).await;
    assert_eq!(d.reap().await.forgotten, 0);
    assert!(matches!(
        d.acquire(&ask(name("a"))).await,
        Acquired::Busy(_)
    ));
    assert_eq!(d.release(&held).await, ENDED);
}
