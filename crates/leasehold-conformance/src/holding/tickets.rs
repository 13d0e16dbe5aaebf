//! Waiting: places in line, which nobody overtakes and the dead give up by themselves.

use std::time::Duration;

use super::driver::{
    HoldingDriver, TERM, ask, ask_all, by, family, name, path, range, secs, shared, units, waiting,
};
use leasehold::limits::{self, TICKET_TERM};
use leasehold::store::holding::{
    Ask, HoldingCommand, HoldingQuery, HoldingSelect, HoldingViews, Released,
};

/// Longer than a lost wake-up may cost, shorter than the limit given to `wait`.
const PATIENCE: Duration = Duration::from_millis(2_500);
/// How long to watch somebody who should stay asleep.
const MOMENT: Duration = Duration::from_millis(30);

/// Those who wait are served in line, and each knows its place.
pub async fn served_in_line(d: &HoldingDriver) {
    let mut held = d.held(&ask(name("a"))).await;
    let line: Vec<Ask> = (0..4)
        .map(|n| waiting(by(&format!("w{n}"), ask(name("a")))))
        .collect();
    for (n, ask) in (0..).zip(&line) {
        let busy = d.busy(ask).await;
        assert_eq!((busy.place, busy.waiting), (Some(n + 1), n));
    }
    let owners: Vec<_> = d
        .tickets()
        .await
        .iter()
        .map(|it| it.owner.to_string())
        .collect();
    assert_eq!(owners, ["w0", "w1", "w2", "w3"]);
    for n in 0..4 {
        d.release(&held).await;
        for late in line[n + 1..].iter().rev() {
            let busy = d.busy(late).await;
            assert!(busy.holders.is_empty(), "only tickets are in the way");
        }
        let newcomer = d.busy(&ask(name("a"))).await;
        assert_eq!((newcomer.waiting, newcomer.place), (4 - n as u64, None));
        held = d.held(&line[n]).await;
    }
}

/// A ticket lives for three seconds from the last ask.
pub async fn a_ticket_is_a_lease(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let (dead, alive) = (waiting(ask(name("a"))), waiting(ask(name("a"))));
    d.busy(&dead).await;
    d.busy(&alive).await;
    d.release(&held).await;
    d.advance(secs(2)).await;
    let busy = d.busy(&alive).await;
    assert_eq!((busy.place, busy.again_in), (Some(2), Some(secs(1))));
    d.advance(secs(1)).await;
    let held = d.held(&alive).await;
    assert!(d.tickets().await.is_empty());
    d.release(&held).await;
}

/// Many dead waiters delay others by one ticket term in all (H3).
pub async fn dead_waiters_delay_once(d: &HoldingDriver) {
    let held = d.held(&ask(path("/a"))).await;
    for n in 0..20 {
        d.busy(&waiting(ask(path(&format!("/a/{n}"))))).await;
        d.busy(&waiting(ask(path("/a")))).await;
    }
    let alive = waiting(ask(path("/")));
    d.busy(&alive).await;
    d.release(&held).await;
    d.advance(secs(2)).await;
    assert_eq!(d.busy(&alive).await.again_in, Some(secs(1)));
    d.advance(secs(1)).await;
    d.held(&alive).await;
}

/// A ticket that has run out has lost its place.
pub async fn a_late_waiter_goes_to_the_end(d: &HoldingDriver) {
    d.held(&ask(name("a"))).await;
    let (first, second) = (waiting(ask(name("a"))), waiting(ask(name("a"))));
    d.busy(&first).await;
    d.advance(TICKET_TERM - Duration::from_micros(1)).await;
    d.busy(&second).await;
    assert_eq!(d.busy(&first).await.place, Some(1), "just in time");
    d.advance(secs(2)).await;
    d.busy(&second).await;
    d.advance(secs(1)).await;
    assert_eq!(d.busy(&first).await.place, Some(2));
    assert_eq!(d.busy(&second).await.place, Some(1));
}

/// Waiting is transitive: a ticket for the root stops the family, though most of it is free.
pub async fn waiting_is_transitive(d: &HoldingDriver) {
    let held = d.held(&ask(path("/a"))).await;
    let root = waiting(ask(path("/")));
    d.busy(&root).await;
    let behind = waiting(ask(path("/b")));
    let busy = d.busy(&behind).await;
    assert_eq!(
        (busy.holders.len(), busy.waiting, busy.place),
        (0, 1, Some(2))
    );
    assert_eq!(busy.again_in, Some(TICKET_TERM));
    d.busy(&ask(path("/c"))).await;
    d.held(&ask(name("elsewhere"))).await;
    d.release(&held).await;
    d.busy(&behind).await;
    let root = d.held(&root).await;
    d.release(&root).await;
    d.held(&behind).await;
}

/// An ask for several scopes is in line for each of them.
pub async fn in_line_for_all_scopes(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let both = waiting(ask_all(vec![name("a"), name("b")]));
    d.busy(&both).await;
    d.busy(&ask(name("b"))).await;
    d.release(&held).await;
    d.busy(&ask(name("b"))).await;
    d.held(&both).await;
}

/// Shared tickets do not stand in each other's way; a waiting exclusive one is not overtaken by
/// those who share.
pub async fn sharers_do_not_starve_a_writer(d: &HoldingDriver) {
    let reader = d.held(&shared(range(0, 9))).await;
    let writer = waiting(ask(range(5, 6)));
    d.busy(&writer).await;
    let late = waiting(shared(range(0, 9)));
    assert_eq!(d.busy(&late).await.place, Some(2));
    let other = waiting(shared(range(5, 9)));
    assert_eq!(
        d.busy(&other).await.place,
        Some(2),
        "not behind the other reader"
    );
    d.held(&shared(range(7, 9))).await;
    d.release(&reader).await;
    let writer = d.held(&writer).await;
    d.release(&writer).await;
    d.held(&other).await;
    d.held(&late).await;
}

/// Tickets for units of one name conflict with each other, so that a small ask does not overtake a
/// large one.
pub async fn units_wait_in_line(d: &HoldingDriver) {
    d.configure(Some(3), None).await;
    let two = d.held(&units("a", 2)).await;
    let large = waiting(units("a", 3));
    d.busy(&large).await;
    let busy = d.busy(&waiting(units("a", 1))).await;
    assert_eq!((busy.holders.len(), busy.place), (0, Some(2)));
    d.held(&units("b", 1)).await;
    d.release(&two).await;
    d.held(&large).await;
}

/// An ask that does not wait takes its ticket back.
pub async fn a_last_try_leaves_no_ticket(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let wait = waiting(ask(name("a")));
    let behind = waiting(ask(name("a")));
    d.busy(&wait).await;
    d.busy(&behind).await;
    let last = Ask {
        wait: false,
        ..wait.clone()
    };
    assert_eq!(d.busy(&last).await.place, None);
    assert_eq!(d.tickets().await.len(), 1);
    assert_eq!(d.busy(&behind).await.place, Some(1));
    d.release(&held).await;
    d.busy(&wait).await;
    d.held(&behind).await;
}

/// A ticket is taken back by a scope and the nonce of its ask.
pub async fn a_ticket_is_taken_back(d: &HoldingDriver) {
    d.held(&ask(name("a"))).await;
    let wait = waiting(ask(name("a")));
    d.busy(&wait).await;
    assert_eq!(d.withdraw(&wait).await, Released::Withdrawn);
    assert_eq!(d.withdraw(&wait).await, Released::Fenced);
    assert!(d.tickets().await.is_empty());
    d.busy(&wait).await;
    d.advance(TICKET_TERM).await;
    assert_eq!(d.withdraw(&wait).await, Released::Fenced, "it has run out");
    assert_eq!(d.ledger().await.fenced, 0);
}

/// An operator takes tickets out of line.
pub async fn tickets_are_dropped(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let (first, second) = (
        waiting(by("x", ask(name("a")))),
        waiting(by("y", ask(name("a")))),
    );
    d.busy(&first).await;
    d.busy(&second).await;
    let drop = HoldingCommand::DropTickets(HoldingSelect::Owner("x".into()));
    assert_eq!(d.control(drop.clone()).await, 1);
    assert_eq!(d.control(drop).await, 0);
    d.release(&held).await;
    d.busy(&first).await;
    d.held(&second).await;
    let scope = HoldingSelect::Scope {
        family: family(),
        scope: name("a"),
    };
    assert_eq!(d.control(HoldingCommand::DropTickets(scope)).await, 1);
    assert!(d.tickets().await.is_empty());
}

/// The scopes that most tickets name are in the sample of those that are waited for.
pub async fn contended_scopes_are_shown(d: &HoldingDriver) {
    for text in ["a", "b"] {
        d.held(&ask(name(text))).await;
    }
    for scopes in [vec![name("b")], vec![name("a"), name("b")]] {
        d.busy(&waiting(ask_all(scopes))).await;
    }
    let Ok(HoldingViews::Contended(rows)) = d.store().inspect(HoldingQuery::Contended).await else {
        panic!("no sample");
    };
    let rows: Vec<_> = rows
        .iter()
        .map(|row| (row.scope.clone(), row.waiting))
        .collect();
    assert_eq!(rows, [(name("b"), 2), (name("a"), 1)]);
    assert_eq!(d.scope(name("b")).await.expect("the scope").waiting, 2);
}

/// Asserts that a waiter wakes up because of what is done meanwhile.
async fn wakes(d: &HoldingDriver, waiter: &Ask, act: impl AsyncFnOnce()) {
    let tickets = [waiter.ticket()];
    let wait = d.store().wait(&tickets, secs(60));
    tokio::pin!(wait);
    let early = tokio::time::timeout(MOMENT, &mut wait).await;
    assert!(early.is_err(), "woke before it could be granted");
    act().await;
    let woken = tokio::time::timeout(PATIENCE, wait).await;
    woken.expect("nobody woke the waiter").expect("wait");
}

/// Asserts that a waiter sleeps on.
async fn sleeps(d: &HoldingDriver, waiter: &Ask) {
    let tickets = [waiter.ticket()];
    let wait = d.store().wait(&tickets, secs(60));
    let woken = tokio::time::timeout(MOMENT, wait).await;
    assert!(woken.is_err(), "woke though it cannot be granted");
}

/// A release wakes the first in line and not the second, whom the grant's end wakes in turn.
pub async fn a_release_wakes_the_first(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let (first, second) = (waiting(ask(name("a"))), waiting(ask(name("a"))));
    d.busy(&first).await;
    d.busy(&second).await;
    wakes(d, &first, async || {
        d.release(&held).await;
    })
    .await;
    sleeps(d, &second).await;
    let held = d.held(&first).await;
    sleeps(d, &second).await;
    wakes(d, &second, async || {
        let _ = d.lapse(&held).await;
    })
    .await;
}

/// The end of a ticket wakes those that waited for it alone.
pub async fn a_ticket_that_goes_wakes(d: &HoldingDriver) {
    d.held(&ask(path("/a"))).await;
    let root = waiting(ask(path("/")));
    d.busy(&root).await;
    let behind = waiting(ask(path("/b")));
    d.busy(&behind).await;
    wakes(d, &behind, async || {
        d.withdraw(&root).await;
    })
    .await;
    d.held(&behind).await;
}

/// More units wake those who can have them now.
pub async fn more_units_wake(d: &HoldingDriver) {
    d.configure(Some(2), None).await;
    d.held(&units("a", 1)).await;
    let wait = waiting(units("a", 2));
    d.busy(&wait).await;
    wakes(d, &wait, async || d.configure(Some(3), None).await).await;
    d.held(&wait).await;
}

/// A step wakes 64 at most; every grant wakes what is left.
pub async fn each_grant_wakes_on(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let line: Vec<Ask> = (0..=limits::STEP_WAKES)
        .map(|_| waiting(shared(name("a"))))
        .collect();
    for ask in &line {
        d.busy(ask).await;
    }
    let limit = limits::STEP_WAKES;
    let tickets = [[line[limit - 1].ticket()], [line[limit].ticket()]];
    let woken = d.store().wait(&tickets[0], secs(60));
    let woken_on = d.store().wait(&tickets[1], secs(60));
    tokio::pin!(woken, woken_on);
    for wait in [woken.as_mut(), woken_on.as_mut()] {
        let early = tokio::time::timeout(MOMENT, wait).await;
        assert!(early.is_err(), "woke before it could be granted");
    }
    d.release(&held).await;
    let woken = tokio::time::timeout(PATIENCE, woken).await;
    woken.expect("nobody woke the 64th").expect("wait");
    d.held(&line[0]).await;
    let woken = tokio::time::timeout(PATIENCE, woken_on).await;
    woken.expect("the grant did not wake on").expect("wait");
    for ask in &line[1..] {
        d.held(ask).await;
    }
    assert_eq!(d.ledger().await.live, line.len() as u64);
}

/// A wait returns at once for a ticket that can be granted or is gone, and gives up at its limit.
pub async fn a_wait_ends(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let waiter = waiting(ask(name("a")));
    let returns = async |limit| {
        let tickets = [waiter.ticket()];
        let wait = d.store().wait(&tickets, limit);
        let woken = tokio::time::timeout(PATIENCE, wait).await;
        woken.expect("it slept").expect("wait");
    };
    returns(secs(60)).await;
    d.busy(&waiter).await;
    returns(MOMENT).await;
    d.advance(TICKET_TERM).await;
    returns(secs(60)).await;
    d.busy(&waiter).await;
    d.release(&held).await;
    returns(secs(60)).await;
    d.advance(TERM).await;
}
