//! control: what operators do with holdings, each time on record.

use super::driver::{
    HoldingDriver, TERM, ask, ask_all, by, family, name, path, secs, shared, units,
};
use leasehold::ErrorKind;
use leasehold::inspect::Page;
use leasehold::lease::FencingToken;
use leasehold::store::holding::{
    Acquired, FamilySettings, HoldingBeat, HoldingCommand, HoldingEnd, HoldingFilter, HoldingQuery,
    HoldingRenewal, HoldingSelect, HoldingViews, Released,
};

fn of_scope(text: &str) -> HoldingSelect {
    HoldingSelect::Scope {
        family: family(),
        scope: name(text),
    }
}

fn of_token(token: FencingToken) -> HoldingSelect {
    HoldingSelect::Token {
        family: family(),
        partition: 0,
        token,
    }
}

/// A revoke ends holdings now: fenced, on record, and free for the next.
pub async fn a_revoke_ends_now(d: &HoldingDriver) {
    let held = d.held(&ask_all(vec![name("a"), name("b")])).await;
    assert_eq!(d.control(HoldingCommand::Revoke(of_scope("b"))).await, 1);
    assert_eq!(d.renew(&held).await, HoldingRenewal::Fenced);
    assert_eq!(d.release(&held).await, Released::Fenced);
    let next = d.held(&ask(name("a"))).await;
    assert!(next.receipt.token > held.receipt.token);
    let known = d.scope(name("b")).await.expect("the scope");
    assert_eq!(known.ended[0].end, HoldingEnd::Revoked);
    assert_eq!(known.ended[0].reason.as_deref(), Some("a test"));
    let audit = d.audit().await;
    assert_eq!(audit[0].tokens, [held.receipt.token]);
    assert_eq!((&*audit[0].actor, audit[0].done), ("operator", 1));
    assert_eq!(d.ledger().await.revoked, 1);
}

/// Holdings are revoked by token, scope, owner and task.
pub async fn revoke_by_each_selection(d: &HoldingDriver) {
    let mut token = None;
    for text in ["a", "b", "c"] {
        token = Some(d.held(&by(text, shared(name("x")))).await.receipt.token);
    }
    let token = token.expect("the last");
    let mut other = shared(name("x"));
    other.task = "run-2".into();
    d.held(&other).await;
    d.held(&ask(name("y"))).await;
    for (select, done) in [
        (of_token(FencingToken::new(token.get() + 99)), 0),
        (of_token(token), 1),
        (HoldingSelect::Owner("a".into()), 1),
        (HoldingSelect::Owner("a".into()), 0),
        (HoldingSelect::Task("run-2".into()), 1),
        (of_scope("x"), 1),
        (of_scope("nothing"), 0),
    ] {
        assert_eq!(d.control(HoldingCommand::Revoke(select)).await, done);
    }
    assert_eq!(d.holdings().await.len(), 1);
    assert_eq!(d.audit().await.len(), 7, "those in vain are on record too");
}

/// An overdue holding is not there to be revoked: it has expired.
pub async fn an_overdue_holding_is_not_revoked(d: &HoldingDriver) {
    d.held(&ask(name("a"))).await;
    d.advance(TERM).await;
    assert_eq!(d.control(HoldingCommand::Revoke(of_scope("a"))).await, 0);
    let ledger = d.ledger().await;
    assert_eq!((ledger.revoked, ledger.expired_deadline), (0, 1));
}

/// After a revoke the scope rests.
pub async fn rests_after_a_revoke(d: &HoldingDriver) {
    d.configure(None, Some(secs(30))).await;
    d.held(&ask(name("a"))).await;
    d.control(HoldingCommand::Revoke(of_scope("a"))).await;
    assert_eq!(d.busy(&ask(name("a"))).await.again_in, Some(secs(30)));
    d.advance(secs(30)).await;
    let held = d.held(&ask(name("a"))).await;
    d.release(&held).await;
    d.held(&ask(name("a"))).await;
}

/// A recalled holder learns of it with its next renewal, and no renewal passes the grace.
pub async fn a_recall_bounds_renewals(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let recall = |grace| HoldingCommand::Recall {
        holdings: of_scope("a"),
        grace,
    };
    assert_eq!(d.control(recall(secs(90))).await, 1);
    assert_eq!(
        d.control(recall(secs(95))).await,
        0,
        "it was recalled for sooner"
    );
    d.advance(secs(20)).await;
    let told = |granted, left| HoldingRenewal::Held {
        granted,
        recalled: Some(left),
    };
    assert_eq!(d.renew(&held).await, told(TERM, secs(70)));
    d.advance(secs(50)).await;
    assert_eq!(d.renew(&held).await, told(secs(20), secs(20)));
    assert!(d.holdings().await[0].recalled);
    assert_eq!(d.busy(&ask(name("a"))).await.holders[0].latest, secs(20));
    d.advance(secs(20)).await;
    assert_eq!(d.renew(&held).await, HoldingRenewal::Fenced);
    d.held(&ask(name("a"))).await;
}

/// A recall takes nothing back that was granted.
pub async fn a_recall_shortens_no_deadline(d: &HoldingDriver) {
    let held = d.held(&ask(name("a"))).await;
    let holdings = HoldingSelect::Owner("worker-1".into());
    let grace = secs(5);
    d.control(HoldingCommand::Recall { holdings, grace }).await;
    d.advance(secs(10)).await;
    let told = HoldingRenewal::Held {
        granted: secs(50),
        recalled: Some(secs(50)),
    };
    assert_eq!(d.renew(&held).await, told);
    d.advance(secs(50)).await;
    assert_eq!(d.renew(&held).await, HoldingRenewal::Fenced);
}

/// Every command needs a name, a revoke a reason, and bad ones change nothing.
pub async fn commands_are_checked(d: &HoldingDriver) {
    d.held(&ask(name("a"))).await;
    let good = HoldingCommand::Revoke(of_scope("a"));
    let mut nobody = d.control_request(good.clone());
    nobody.actor.clear();
    let mut no_reason = d.control_request(good);
    no_reason.reason.clear();
    let settings = FamilySettings {
        partitions: Some(0),
        ..FamilySettings::default()
    };
    let no_partition = d.control_request(HoldingCommand::Configure {
        family: family(),
        settings,
    });
    let of_path = d.control_request(HoldingCommand::Restock {
        family: family(),
        scope: path("/a"),
        units: 1,
    });
    let token = HoldingCommand::DropTickets(of_token(FencingToken::new(1)));
    let token = d.control_request(token);
    for (request, field) in [
        (nobody, "actor"),
        (no_reason, "reason"),
        (no_partition, "partitions"),
        (of_path, "scope"),
        (token, "tickets"),
    ] {
        d.unchanged(async || {
            let error = d.store().control(request).await.expect_err("bad input");
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert_eq!(error.field(), Some(field), "{error}");
        })
        .await;
    }
}

/// Families show their settings and ledgers, holdings come by deadline, filtered and paged.
pub async fn views_show_what_is_there(d: &HoldingDriver) {
    assert!(d.families().await.is_empty());
    d.configure(Some(4), Some(secs(1))).await;
    let view = &d.families().await[0];
    assert_eq!((view.units, view.rest, view.partitions), (4, secs(1), 1));
    let first = d.held(&by("x", ask(path("/a")))).await;
    d.advance(secs(1)).await;
    let second = d.held(&by("y", units("u", 2))).await;
    let _ = d.renew(&first).await;
    d.advance(secs(1)).await;
    d.held(&by("x", shared(name("s")))).await;
    let rows = d.holdings().await;
    let tokens: Vec<_> = rows.iter().map(|row| row.token).collect();
    assert_eq!(tokens[..2], [first.receipt.token, second.receipt.token]);
    assert_eq!((rows[0].left, rows[0].term), (secs(59), TERM));
    assert_eq!(rows[0].scopes, [path("/a")]);
    let page = async |after, rows| {
        let filter = HoldingFilter {
            owner: Some("x".into()),
            ..HoldingFilter::default()
        };
        let page = Page { after, rows };
        match d
            .store()
            .inspect(HoldingQuery::Holdings { filter, page })
            .await
        {
            Ok(HoldingViews::Holdings(paged)) => paged,
            other => panic!("{other:?}"),
        }
    };
    let start = page(None, 1).await;
    assert_eq!(start.rows[0].token, first.receipt.token);
    let rest = page(start.next, 1).await;
    assert_eq!((rest.rows.len(), rest.next), (1, None));
    assert_eq!(d.scope(name("nothing")).await, None);
    let known = d.scope(name("u")).await.expect("the scope");
    assert_eq!(known.holdings[0].token, second.receipt.token);
    assert!(matches!(
        d.acquire(&ask(path("/a"))).await,
        Acquired::Busy(_)
    ));
}

/// A handle for another runtime is one to the same store.
pub async fn a_dedicated_handle_is_the_same_store(d: &HoldingDriver) {
    let other = d.store().dedicated().await.expect("a handle");
    assert_eq!(
        (other.name(), other.namespace()),
        (d.store().name(), d.store().namespace())
    );
    let held = d.held(&ask(name("a"))).await;
    d.advance(secs(20)).await;
    let beat = HoldingBeat::of(held.receipt.clone());
    let told = HoldingRenewal::Held {
        granted: TERM,
        recalled: None,
    };
    assert_eq!(other.renew(vec![beat]).await.expect("renew"), [told]);
    d.advance(secs(50)).await;
    assert!(matches!(
        d.acquire(&ask(name("a"))).await,
        Acquired::Busy(_)
    ));
}
