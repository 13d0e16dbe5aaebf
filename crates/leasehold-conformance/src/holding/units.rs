//! Permits: so many units of a name, which come back or are used up.

use super::driver::{HoldingDriver, TERM, ask, family, name, secs, shared, units};
use leasehold::limits;
use leasehold::store::holding::{Acquired, Ask, Committed, HoldingCommand, Refusal, Released};

fn restock(text: &str, units: u32) -> HoldingCommand {
    HoldingCommand::Restock {
        family: family(),
        scope: name(text),
        units,
    }
}

/// Never more units of a name are held than there are; each name has its own.
pub async fn units_are_counted(d: &HoldingDriver) {
    d.configure(Some(3), None).await;
    let one = d.held(&units("a", 1)).await;
    let two = d.held(&units("a", 2)).await;
    let busy = d.busy(&units("a", 1)).await;
    assert_eq!(busy.holders.len(), 2);
    assert_eq!(busy.again_in, Some(TERM));
    d.held(&units("b", 3)).await;
    d.release(&one).await;
    d.busy(&units("a", 2)).await;
    d.held(&units("a", 1)).await;
    d.release(&two).await;
    d.held(&units("a", 2)).await;
}

/// Units of several names are had together or not at all.
pub async fn units_of_several_names(d: &HoldingDriver) {
    d.configure(Some(2), None).await;
    let both = |n| Ask {
        scopes: vec![name("a"), name("b")],
        ..units("a", n)
    };
    let held = d.held(&units("b", 1)).await;
    d.busy(&both(2)).await;
    d.held(&both(1)).await;
    d.busy(&units("b", 1)).await;
    d.held(&units("a", 1)).await;
    assert_eq!(
        d.release(&held).await,
        Released::Ended {
            late: false,
            saved: false
        }
    );
}

/// An exclusive holding excludes units, and units an exclusive one; shared ones do neither.
pub async fn units_beside_other_modes(d: &HoldingDriver) {
    d.configure(Some(2), None).await;
    let held = d.held(&units("a", 1)).await;
    assert_eq!(d.busy(&ask(name("a"))).await.holders.len(), 1);
    let reader = d.held(&shared(name("a"))).await;
    d.release(&held).await;
    d.release(&reader).await;
    let all = d.held(&ask(name("a"))).await;
    d.busy(&units("a", 1)).await;
    d.release(&all).await;
}

/// More than there are of a name is refused, whoever holds some.
pub async fn more_than_there_are(d: &HoldingDriver) {
    let refused = |of| Acquired::Refused(Refusal::Units { of });
    assert_eq!(d.acquire(&units("a", 1)).await, refused(0));
    d.configure(Some(3), None).await;
    d.unchanged(async || assert_eq!(d.acquire(&units("a", 4)).await, refused(3)))
        .await;
    d.held(&units("a", 3)).await;
    d.configure(Some(1), None).await;
    assert_eq!(d.acquire(&units("a", 2)).await, refused(1));
}

/// Lowering the number ends nothing; nothing is granted until enough has come back.
pub async fn lowering_ends_nothing(d: &HoldingDriver) {
    d.configure(Some(3), None).await;
    let (two, one) = (d.held(&units("a", 2)).await, d.held(&units("a", 1)).await);
    d.configure(Some(2), None).await;
    assert_eq!(d.ledger().await.live, 2);
    d.release(&one).await;
    d.busy(&units("a", 1)).await;
    d.release(&two).await;
    d.held(&units("a", 2)).await;
}

/// The units of the dead come back at their deadline, by themselves.
pub async fn units_come_back(d: &HoldingDriver) {
    d.configure(Some(3), None).await;
    for _ in 0..5 {
        for n in [1, 2] {
            d.held(&units("a", n)).await;
        }
        d.busy(&units("a", 1)).await;
        d.advance(TERM).await;
    }
    d.held(&units("a", 3)).await;
    assert_eq!(d.ledger().await.expired_deadline, 10);
}

/// Committed units are used up until a restock.
pub async fn committed_units_are_used_up(d: &HoldingDriver) {
    d.configure(Some(3), None).await;
    let held = d.held(&units("a", 2)).await;
    assert_eq!(d.commit(&held).await, Committed::Done);
    d.unchanged(async || {
        assert_eq!(d.commit(&held).await, Committed::Fenced);
        assert_eq!(d.release(&held).await, Released::Fenced);
    })
    .await;
    let busy = d.busy(&units("a", 2)).await;
    assert_eq!((busy.holders.len(), busy.again_in), (0, None));
    d.advance(limits::STATE_RETENTION * 2).await;
    d.reap().await;
    d.busy(&units("a", 2)).await;
    assert_eq!(d.scope(name("a")).await.expect("the scope").committed, 2);
    assert_eq!(d.control(restock("a", 1)).await, 1);
    let held = d.held(&units("a", 2)).await;
    d.release(&held).await;
    assert_eq!(d.control(restock("a", 9)).await, 1);
    assert_eq!(d.control(restock("b", 9)).await, 0);
    d.held(&units("a", 3)).await;
    let ledger = d.ledger().await;
    assert_eq!((ledger.committed, ledger.released), (1, 1));
}

/// Past the deadline nothing is committed, whether or not the expiry has been recorded.
pub async fn overdue_commits_are_fenced(d: &HoldingDriver) {
    d.configure(Some(3), None).await;
    let held = d.held(&units("a", 2)).await;
    d.advance(TERM).await;
    d.unchanged(async || assert_eq!(d.commit(&held).await, Committed::Fenced))
        .await;
    d.held(&units("a", 3)).await;
    assert_eq!(d.ledger().await.fenced, 1);
}

/// Only units can be used up.
pub async fn only_units_are_committed(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    d.unchanged(async || assert_eq!(d.commit(&held).await, Committed::NoUnits))
        .await;
}

/// The units of the dead rest too.
pub async fn units_rest(d: &HoldingDriver) {
    d.configure(Some(3), Some(secs(30))).await;
    let held = d.held(&units("a", 2)).await;
    let _ = d.lapse(&held).await;
    d.busy(&units("a", 2)).await;
    d.held(&units("a", 1)).await;
    d.advance(secs(30)).await;
    d.held(&units("a", 2)).await;
}
