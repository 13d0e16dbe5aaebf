//! Repeats: the first answer, applied once.

use super::driver::{HoldingDriver, TERM, ask, family, name, secs, units, waiting};
use leasehold::ErrorKind;
use leasehold::store::ReapRequest;
use leasehold::store::holding::{
    Acquired, CommitRequest, Committed, HoldingCommand, HoldingSelect, Release, Released, Save,
    SaveRequest, SavedState,
};

/// A repeated acquire gets the first answer, with the time originally granted.
pub async fn acquire_grants_once(d: &HoldingDriver) {
    let asks = [ask(name("a")), waiting(ask(name("a"))), ask(name("b"))];
    let request = d.acquire_request(&[&asks[0], &asks[1], &asks[2]]);
    let first = d.store().acquire(request.clone()).await.expect("acquire");
    d.advance(secs(1)).await;
    d.unchanged(async || {
        let again = d.store().acquire(request).await.expect("acquire");
        assert_eq!(again, first);
    })
    .await;
    assert_eq!(d.ledger().await.granted, 2);
}

/// A repeat does not hand out what has ended or is overdue.
pub async fn acquire_answers_the_living(d: &HoldingDriver) {
    let asks = [ask(name("a")), ask(name("b"))];
    let request = d.acquire_request(&[&asks[0], &asks[1]]);
    let first = d.store().acquire(request.clone()).await.expect("acquire");
    let Acquired::Granted(b) = &first.answers[1] else {
        panic!("{first:?}");
    };
    d.advance(secs(30)).await;
    let _ = d.renew(b).await;
    d.advance(secs(30)).await;
    d.unchanged(async || {
        let again = d.store().acquire(request.clone()).await.expect("acquire");
        assert_eq!(again.answers, [Acquired::Ended, first.answers[1].clone()]);
    })
    .await;
}

/// A repeated release, save, commit, reap and command act once.
pub async fn every_call_acts_once(d: &HoldingDriver) {
    d.configure(Some(2), None).await;
    let held = d.held(&ask(name("a"))).await;
    let save = SaveRequest {
        request: d.request(),
        saves: vec![Save {
            receipt: held.receipt.clone(),
            seq: 1,
            bytes: "one".into(),
        }],
    };
    for _ in 0..2 {
        let saved = d.store().save(save.clone()).await.expect("save");
        assert_eq!(saved, [SavedState::Saved { late: false }]);
    }
    let release = d.release_request(Release::of(held.receipt.clone()));
    let ended = [Released::Ended {
        late: false,
        saved: false,
    }];
    for _ in 0..2 {
        let released = d.store().release(release.clone()).await.expect("release");
        assert_eq!(released, ended);
    }
    let permit = d.held(&units("u", 1)).await;
    let commit = CommitRequest {
        request: d.request(),
        receipts: vec![permit.receipt.clone()],
    };
    for _ in 0..2 {
        let done = d.store().commit(commit.clone()).await.expect("commit");
        assert_eq!(done, [Committed::Done]);
    }
    assert_eq!(d.scope(name("u")).await.expect("the scope").committed, 1);
    d.held(&ask(name("a"))).await;
    d.advance(TERM).await;
    let reap = ReapRequest {
        request: d.request(),
        max: 10,
    };
    for _ in 0..2 {
        let reaped = d.store().reap(reap.clone()).await.expect("reap");
        assert_eq!(reaped.expired.len(), 1);
    }
    let revoke = HoldingCommand::Revoke(HoldingSelect::Scope {
        family: family(),
        scope: name("a"),
    });
    d.held(&ask(name("a"))).await;
    let revoke = d.control_request(revoke);
    assert_eq!(d.store().control(revoke.clone()).await.expect("control"), 1);
    let next = d.held(&ask(name("b"))).await;
    let ledger = d.ledger().await;
    assert_eq!(
        (ledger.released, ledger.committed, ledger.revoked),
        (1, 1, 1)
    );
    assert_eq!(ledger.fenced, 0);
    let late = d.store().control(revoke).await.expect_err("overtaken");
    assert_eq!(late.kind(), ErrorKind::SessionLost);
    assert_eq!(d.release(&next).await, ended[0]);
}

/// An ask that was taken back under a later number leaves nothing when its copy comes late.
pub async fn a_late_copy_leaves_no_ghost(d: &HoldingDriver) {
    let wait = waiting(ask(name("a")));
    let request = d.acquire_request(&[&wait]);
    assert_eq!(d.withdraw(&wait).await, Released::Fenced);
    d.unchanged(async || {
        let error = d.store().acquire(request).await.expect_err("overtaken");
        assert_eq!(error.kind(), ErrorKind::SessionLost);
    })
    .await;
    assert!(d.holdings().await.is_empty() && d.tickets().await.is_empty());
}

/// An id names one call of one verb.
pub async fn an_id_names_one_verb(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let request = d.request();
    let release = |request| {
        let mut release = d.release_request(Release::of(held.receipt.clone()));
        release.request = request;
        release
    };
    let commit = CommitRequest {
        request,
        receipts: vec![held.receipt.clone()],
    };
    let done = d.store().commit(commit).await.expect("commit");
    assert_eq!(done, [Committed::NoUnits]);
    d.unchanged(async || {
        let error = d
            .store()
            .release(release(request))
            .await
            .expect_err("another verb");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    })
    .await;
}
