//! acquire: what conflicts is busy, everything else is granted.

use std::time::Duration;

use super::driver::{
    HoldingDriver, LIFETIME, TERM, ask, ask_all, by, family, name, path, range, secs, shared,
};
use leasehold::lease::Nonce;
use leasehold::limits;
use leasehold::rules::holding::{FamilyName, Mode, Scope};
use leasehold::store::holding::{
    Acquired, Ask, Checked, FamilySettings, HoldingCommand, HoldingRenewal, Missing, Refusal,
    Released,
};

/// Asserts that the two conflict, in both orders, and are compatible again after the release.
async fn conflict(d: &HoldingDriver, a: &Ask, b: &Ask) {
    for (first, second) in [(a, b), (b, a)] {
        let held = d.held(first).await;
        assert_eq!(d.busy(second).await.holders[0].token, held.receipt.token);
        d.release(&held).await;
        let held = d.held(second).await;
        d.release(&held).await;
    }
}

/// Asserts that the two are held side by side.
async fn beside(d: &HoldingDriver, a: &Ask, b: &Ask) {
    let (one, other) = (d.held(a).await, d.held(b).await);
    d.release(&one).await;
    d.release(&other).await;
}

/// Equal names conflict, others do not.
pub async fn names_conflict(d: &HoldingDriver) {
    conflict(d, &ask(name("a")), &ask(name("a"))).await;
    beside(d, &ask(name("a")), &ask(name("a/b"))).await;
    beside(d, &ask(name("a")), &ask(name("A"))).await;
}

/// A path conflicts with itself, its ancestors and its descendants.
pub async fn paths_conflict(d: &HoldingDriver) {
    for (a, b) in [
        ("/a", "/a"),
        ("/", "/a/b/c"),
        ("/a", "/a/b"),
        ("/a/b", "/a/b/c/d"),
    ] {
        conflict(d, &ask(path(a)), &ask(path(b))).await;
    }
    for (a, b) in [
        ("/a", "/b"),
        ("/a", "/ab"),
        ("/a/b", "/a/c"),
        ("/a", "/a.b"),
        ("/a-", "/a/b"),
    ] {
        beside(d, &ask(path(a)), &ask(path(b))).await;
    }
}

/// Ranges of one resource conflict where they overlap.
pub async fn ranges_conflict(d: &HoldingDriver) {
    conflict(d, &ask(range(0, 10)), &ask(range(9, 11))).await;
    conflict(d, &ask(range(0, 10)), &ask(range(4, 5))).await;
    conflict(
        d,
        &ask(range(7, 8)),
        &ask(Scope::whole("file").expect("a range")),
    )
    .await;
    beside(d, &ask(range(0, 10)), &ask(range(10, 20))).await;
    let other = Scope::range("other", 0..10).expect("a range");
    beside(d, &ask(range(0, 10)), &ask(other)).await;
}

/// Different kinds and different families never conflict.
pub async fn kinds_and_families_are_apart(d: &HoldingDriver) {
    beside(d, &ask(name("/a")), &ask(path("/a"))).await;
    beside(d, &ask(name("file")), &ask(range(0, 1))).await;
    let other = Ask {
        family: FamilyName::new("other").expect("a name"),
        ..ask(name("a"))
    };
    beside(d, &ask(name("a")), &other).await;
}

/// Shared holdings are compatible with each other, and with nothing exclusive.
pub async fn shared_excludes_exclusive(d: &HoldingDriver) {
    for (scope, part) in [
        (name("a"), name("a")),
        (path("/a"), path("/a/b")),
        (range(0, 9), range(3, 4)),
    ] {
        beside(d, &shared(scope.clone()), &shared(part.clone())).await;
        conflict(d, &shared(scope.clone()), &ask(part.clone())).await;
        conflict(d, &ask(scope), &shared(part)).await;
    }
}

/// All scopes of an ask are granted under one token, or none.
pub async fn all_or_none(d: &HoldingDriver) {
    let held = d.held(&ask(name("b"))).await;
    let both = ask_all(vec![name("a"), name("b"), path("/c")]);
    assert_eq!(d.busy(&both).await.holders.len(), 1);
    let a = d.held(&ask(name("a"))).await;
    d.release(&a).await;
    d.release(&held).await;
    let all = d.held(&both).await;
    for scope in both.scopes {
        assert_eq!(
            d.busy(&ask(scope)).await.holders[0].token,
            all.receipt.token
        );
    }
}

/// The asks of a call are served in order, each seeing what those before it did.
pub async fn asks_are_served_in_order(d: &HoldingDriver) {
    let asks = [ask(name("a")), ask(name("a")), ask(name("b"))];
    let answers = d.acquire_all(&[&asks[0], &asks[1], &asks[2]]).await.answers;
    let [
        Acquired::Granted(a),
        Acquired::Busy(_),
        Acquired::Granted(b),
    ] = &answers[..]
    else {
        panic!("{answers:?}");
    };
    assert!(a.receipt.token < b.receipt.token);
    assert!(d.acquire_all(&[]).await.answers.is_empty());
}

/// Tokens grow from grant to grant.
pub async fn tokens_grow(d: &HoldingDriver) {
    let mut last = d.held(&ask(name("a"))).await;
    for scope in [name("a"), path("/a"), name("b"), name("a")] {
        d.release(&last).await;
        let next = d.held(&ask(scope)).await;
        assert!(next.receipt.token > last.receipt.token);
        last = next;
    }
}

/// Tokens grow while the clock is behind, and the answer says by how much it is.
pub async fn tokens_grow_when_the_clock_is_set_back(d: &HoldingDriver) {
    let before = d.held(&ask(name("a"))).await;
    d.release(&before).await;
    d.set_back(secs(3600)).await;
    let again = ask(name("a"));
    let answer = d.acquire_all(&[&again]).await;
    let Acquired::Granted(after) = &answer.answers[0] else {
        panic!("{answer:?}");
    };
    assert!(after.receipt.token > before.receipt.token);
    assert_eq!(after.granted, TERM);
    assert!(answer.clock_behind >= Some(secs(3600)), "{answer:?}");
}

/// What has expired stays so when the clock is set back; what is held stays held.
pub async fn a_clock_set_back_revives_nothing(d: &HoldingDriver) {
    let old = d.held(&ask(name("a"))).await;
    d.advance(TERM).await;
    let new = d.held(&ask(name("a"))).await;
    d.set_back(secs(30)).await;
    d.unchanged(async || {
        assert_eq!(d.renew(&old).await, HoldingRenewal::Fenced);
        assert_eq!(d.release(&old).await, Released::Fenced);
        let expired = Checked::Fenced(Missing::Expired);
        assert_eq!(d.check(&old.receipt, name("a")).await, expired);
        d.busy(&ask(name("a"))).await;
    })
    .await;
    let ended = Released::Ended {
        late: false,
        saved: false,
    };
    assert_eq!(d.release(&new).await, ended);
}

/// What is granted is the term, cut by the maximum lifetime.
pub async fn grants_the_term(d: &HoldingDriver) {
    assert_eq!(d.held(&ask(name("a"))).await.granted, TERM);
    let brief = Ask {
        max_lifetime: secs(5),
        ..ask(name("b"))
    };
    assert_eq!(d.held(&brief).await.granted, secs(5));
}

/// Busy tells who holds, since when, until when, and when to ask again.
pub async fn busy_names_the_holders(d: &HoldingDriver) {
    let first = d.held(&by("x", shared(path("/a")))).await;
    d.advance(secs(10)).await;
    let second = d.held(&by("y", shared(path("/a/b")))).await;
    let busy = d.busy(&ask(path("/"))).await;
    let tokens: Vec<_> = busy.holders.iter().map(|holder| holder.token).collect();
    assert_eq!(tokens, [first.receipt.token, second.receipt.token]);
    assert_eq!(
        (&*busy.holders[0].owner, &*busy.holders[0].task),
        ("x", "run-1")
    );
    assert_eq!(busy.holders[0].since, secs(10));
    assert_eq!(busy.holders[0].left, secs(50));
    assert_eq!(busy.holders[0].latest, LIFETIME - secs(10));
    assert_eq!(busy.holders[1].mode, Mode::Shared);
    assert_eq!(busy.again_in, Some(secs(50)));
    assert!(!busy.own && !busy.holders[0].resting);
    assert_eq!((busy.waiting, busy.place), (0, None));
}

/// Busy names eight holders at most.
pub async fn busy_names_eight_holders(d: &HoldingDriver) {
    let mut first = Vec::new();
    for n in 0..12 {
        first.push(d.held(&shared(path(&format!("/{n}")))).await.receipt.token);
    }
    let busy = d.busy(&ask(Scope::root())).await;
    let named: Vec<_> = busy.holders.iter().map(|holder| holder.token).collect();
    assert_eq!(named, first[..limits::BUSY_HOLDERS]);
}

/// Nothing is re-entrant, and the answer says that it is one's own.
pub async fn not_re_entrant(d: &HoldingDriver) {
    d.held(&ask(path("/a"))).await;
    assert!(d.busy(&ask(path("/a/b"))).await.own);
    assert!(!d.busy(&by("other", ask(path("/a/b")))).await.own);
    let other_run = Ask {
        task: "run-2".into(),
        ..ask(path("/a"))
    };
    assert!(!d.busy(&other_run).await.own);
}

/// At its deadline a holding is gone, and its expiry is reported.
pub async fn a_deadline_needs_no_process(d: &HoldingDriver) {
    let held = d.held(&by("dead", ask(name("a")))).await;
    d.advance(TERM - Duration::from_micros(1)).await;
    d.busy(&ask(name("a"))).await;
    d.advance(Duration::from_micros(1)).await;
    let next = ask(name("a"));
    let answer = d.acquire_all(&[&next]).await;
    assert!(matches!(answer.answers[0], Acquired::Granted(_)));
    assert_eq!(answer.expired.len(), 1);
    let expiry = &answer.expired[0];
    assert_eq!((&*expiry.owner, expiry.token), ("dead", held.receipt.token));
    assert_eq!(expiry.scopes, [name("a")]);
    let ledger = d.ledger().await;
    assert_eq!((ledger.expired_deadline, ledger.live), (1, 1));
}

/// A step expires the oldest that it did not meet, too.
pub async fn a_step_expires_what_it_does_not_need(d: &HoldingDriver) {
    for text in ["a", "b", "c"] {
        d.held(&ask(name(text))).await;
    }
    d.advance(TERM).await;
    let next = ask(name("b"));
    let expired = d.acquire_all(&[&next]).await.expired;
    let scopes: Vec<_> = expired.iter().map(|it| it.scopes[0].clone()).collect();
    assert_eq!(scopes, [name("b"), name("a"), name("c")]);
    assert_eq!(d.ledger().await.live, 1);
}

/// A thousand expiries are enough for one step: then it says "again, now".
pub async fn a_step_is_bounded(d: &HoldingDriver) {
    for batch in 0..3 {
        let asks: Vec<_> = (0..400)
            .map(|n| shared(path(&format!("/{batch}/{n}"))))
            .collect();
        let asks: Vec<_> = asks.iter().collect();
        d.acquire_all(&asks).await;
    }
    d.advance(TERM).await;
    let all = ask(Scope::root());
    let busy = d.acquire_all(&[&all]).await;
    assert_eq!(busy.expired.len(), limits::STEP_JOBS);
    let Acquired::Busy(busy) = &busy.answers[0] else {
        panic!("{busy:?}");
    };
    assert_eq!(
        (busy.again_in, busy.holders.len()),
        (Some(Duration::ZERO), 0)
    );
    let answer = d.acquire_all(&[&all]).await;
    assert!(matches!(answer.answers[0], Acquired::Granted(_)));
    assert_eq!(answer.expired.len(), 200);
}

/// The nonce names the ask: asking again answers the same holding, not a second one.
pub async fn asking_again_extends_nothing(d: &HoldingDriver) {
    let first = ask(name("a"));
    let held = d.held(&first).await;
    d.advance(secs(20)).await;
    let again = d.held(&first).await;
    assert_eq!(again.receipt, held.receipt);
    assert_eq!(again.granted, TERM - secs(20));
    assert_eq!(d.ledger().await.granted, 1);
    d.advance(TERM - secs(20)).await;
    let anew = d.held(&first).await;
    assert!(
        anew.receipt.token > held.receipt.token,
        "the old one has expired"
    );
}

/// A nonce that names another ask is refused.
pub async fn a_nonce_names_one_ask(d: &HoldingDriver) {
    let first = ask(name("a"));
    d.held(&first).await;
    for other in [
        Ask {
            scopes: vec![name("b")],
            ..first.clone()
        },
        Ask {
            mode: Mode::Shared,
            ..first.clone()
        },
        by("other", first.clone()),
    ] {
        d.unchanged(async || {
            assert_eq!(d.acquire(&other).await, Acquired::Refused(Refusal::Nonce));
        })
        .await;
    }
}

/// After an expiry the scope rests from the deadline on, whenever the expiry is recorded.
pub async fn rests_after_an_expiry(d: &HoldingDriver) {
    d.configure(None, Some(secs(30))).await;
    let held = d.held(&ask(name("a"))).await;
    d.advance(TERM + secs(10)).await;
    let busy = d.busy(&ask(name("a"))).await;
    assert_eq!(busy.holders[0].token, held.receipt.token);
    assert!(busy.holders[0].resting && !busy.own);
    assert_eq!(busy.again_in, Some(secs(20)));
    assert_eq!(d.ledger().await.expired_deadline, 1);
    d.advance(secs(20)).await;
    let next = d.held(&ask(name("a"))).await;
    d.release(&next).await;
    d.held(&ask(name("a"))).await;
}

/// A rest keeps away what the holding kept away.
pub async fn a_rest_is_as_the_holding_was(d: &HoldingDriver) {
    d.configure(None, Some(secs(30))).await;
    let held = d.held(&shared(path("/a"))).await;
    let _ = d.lapse(&held).await;
    d.held(&shared(path("/a/b"))).await;
    assert_eq!(d.busy(&ask(path("/a/c"))).await.again_in, Some(secs(30)));
}

/// Scopes of one ask are of one partition; how many there are is fixed once something was asked.
pub async fn one_partition_per_ask(d: &HoldingDriver) {
    let settings = FamilySettings {
        partitions: Some(8),
        ..FamilySettings::default()
    };
    let family = family();
    let configure = |settings| HoldingCommand::Configure {
        family: family.clone(),
        settings,
    };
    d.control(configure(settings)).await;
    let names: Vec<Scope> = (0..20).map(|n| name(&n.to_string())).collect();
    let of = |scope: &Scope| scope.partition(8);
    let alike = names
        .iter()
        .skip(1)
        .find(|scope| of(scope) == of(&names[0]));
    let alike = alike.expect("a name of the same partition").clone();
    let apart = names.iter().find(|scope| of(scope) != of(&names[0]));
    let apart = apart.expect("a name of another partition").clone();
    let both = ask_all(vec![names[0].clone(), apart]);
    assert_eq!(
        d.acquire(&both).await,
        Acquired::Refused(Refusal::Partitions)
    );
    let held = d.held(&ask_all(vec![names[0].clone(), alike])).await;
    assert_eq!(held.receipt.partition, of(&names[0]));
    d.unchanged(async || {
        let other = FamilySettings {
            partitions: Some(4),
            units: Some(9),
            ..FamilySettings::default()
        };
        let request = d.control_request(configure(other));
        let error = d.store().control(request).await.expect_err("fixed");
        assert_eq!(error.field(), Some("partitions"));
    })
    .await;
}

/// What is outside the limits is refused by field, and changes nothing.
pub async fn limits_are_checked(d: &HoldingDriver) {
    d.refuses(ask_all(vec![]), "scopes").await;
    d.refuses(ask_all(vec![path("/a"), path("/a/b")]), "scopes")
        .await;
    let many = (0..17).map(|n| name(&n.to_string())).collect();
    d.refuses(ask_all(many), "scopes").await;
    let long = "x".repeat(limits::OWNER_BYTES + 1);
    d.refuses(by(&long, ask(name("a"))), "owner").await;
    d.refuses(by("a\0b", ask(name("a"))), "owner").await;
    let task = Ask {
        task: "a\0b".into(),
        ..ask(name("a"))
    };
    d.refuses(task, "task").await;
    let term = Ask {
        term: Duration::ZERO,
        ..ask(name("a"))
    };
    d.refuses(term, "term").await;
    let lifetime = Ask {
        max_lifetime: limits::DURATION_MAX + secs(1),
        ..ask(name("a"))
    };
    d.refuses(lifetime, "max_lifetime").await;
    let units = Ask {
        mode: Mode::Units(1),
        ..ask(path("/a"))
    };
    d.refuses(units, "units").await;
}

/// A check tells by the clock what a receipt is good for.
pub async fn a_check_tells_by_the_clock(d: &HoldingDriver) {
    let held = d.held(&ask(path("/a"))).await;
    d.advance(secs(20)).await;
    let good = Checked::Held {
        left: secs(40),
        mode: Mode::Exclusive,
    };
    assert_eq!(d.check(&held.receipt, path("/a")).await, good);
    assert_eq!(d.check(&held.receipt, path("/a/b")).await, good);
    for scope in [path("/"), path("/b"), name("/a")] {
        assert_eq!(d.check(&held.receipt, scope).await, Checked::ScopeMismatch);
    }
    let mut forged = held.receipt.clone();
    forged.nonce = Nonce::from_bytes([7; 16]);
    let unknown = Checked::Fenced(Missing::Unknown);
    assert_eq!(d.check(&forged, path("/a")).await, unknown);
    d.advance(secs(40)).await;
    let expired = Checked::Fenced(Missing::Expired);
    assert_eq!(d.check(&held.receipt, path("/a")).await, expired);
    d.reap().await;
    assert_eq!(d.check(&held.receipt, path("/a")).await, expired);
    let next = d.held(&ask(path("/a"))).await;
    d.release(&next).await;
    assert_eq!(d.check(&next.receipt, path("/a")).await, unknown);
}
