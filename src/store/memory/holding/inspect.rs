//! inspect: look at holdings, and change nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Family, Hold, State, Ticket};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::lease::FencingToken;
use crate::limits;
use crate::rules::holding::{FamilyName, Scope};
use crate::store::holding::{
    ContendedView, FamilyView, HoldingFilter, HoldingQuery, HoldingView, HoldingViews, ScopeView,
    TicketView,
};
use crate::store::memory::inspect::paged;

impl State {
    pub(super) fn inspect_holdings(
        &self,
        query: &HoldingQuery,
        now: Timestamp,
    ) -> Result<HoldingViews> {
        Ok(match query {
            HoldingQuery::Families => {
                let families = self.families.iter();
                let views = families.map(|(name, family)| family.view(name, now));
                HoldingViews::Families(views.collect())
            }
            HoldingQuery::Holdings { filter, page } => {
                let mut rows = Vec::new();
                for (name, family) in self
                    .families
                    .iter()
                    .filter(|(name, _)| in_family(filter, name))
                {
                    let holds = family.holdings.iter();
                    let holds = holds.filter(|(_, hold)| wanted(filter, &hold.owner, &hold.task));
                    rows.extend(holds.map(|(token, hold)| (hold.deadline, *token, name, hold)));
                }
                rows.sort_unstable_by_key(|(deadline, token, name, _)| (*deadline, *token, *name));
                let views = rows.into_iter();
                let views =
                    views.map(|(_, token, name, hold)| holding_view(name, token, hold, now));
                HoldingViews::Holdings(paged(views, page)?)
            }
            HoldingQuery::Tickets { filter, page } => {
                let families = self.families.iter();
                let families = families.filter(|(name, _)| in_family(filter, name));
                let tickets = families.flat_map(|(name, family)| {
                    let live = family.tickets.values().filter(|ticket| ticket.is_live(now));
                    live.map(move |ticket| (name, ticket))
                });
                let tickets =
                    tickets.filter(|(_, ticket)| wanted(filter, &ticket.owner, &ticket.task));
                let views = tickets.map(|(name, ticket)| ticket_view(name, ticket, now));
                HoldingViews::Tickets(paged(views, page)?)
            }
            HoldingQuery::Scope { family, scope } => {
                let known = self.families.get(family);
                let view = known.and_then(|known| known.scope_view(family, scope, now));
                HoldingViews::Scope(view.map(Box::new))
            }
            HoldingQuery::Contended => HoldingViews::Contended(self.contended(now)),
            HoldingQuery::Audit { page } => {
                HoldingViews::Audit(paged(self.audit.iter().rev().cloned(), page)?)
            }
        })
    }

    fn contended(&self, now: Timestamp) -> Vec<ContendedView> {
        let mut counts = BTreeMap::<(&FamilyName, &Scope), u64>::new();
        for (name, family) in &self.families {
            for ticket in family.tickets.values().filter(|ticket| ticket.is_live(now)) {
                for scope in &ticket.scopes {
                    *counts.entry((name, scope)).or_default() += 1;
                }
            }
        }
        let mut rows: Vec<_> = counts.into_iter().collect();
        rows.sort_by_key(|(_, waiting)| std::cmp::Reverse(*waiting));
        rows.truncate(limits::CONTENDED);
        let views = rows.into_iter().map(|((family, scope), waiting)| {
            ContendedView::new(family.clone(), scope.clone(), waiting.min(limits::WAITING))
        });
        views.collect()
    }
}

fn in_family(filter: &HoldingFilter, name: &FamilyName) -> bool {
    filter.family.as_ref().is_none_or(|family| family == name)
}

fn wanted(filter: &HoldingFilter, owner: &Arc<str>, task: &Arc<str>) -> bool {
    filter.owner.as_ref().is_none_or(|wanted| wanted == owner)
        && filter.task.as_ref().is_none_or(|wanted| wanted == task)
}

fn holding_view(
    family: &FamilyName,
    token: FencingToken,
    hold: &Hold,
    now: Timestamp,
) -> HoldingView {
    let whose = (Arc::clone(&hold.owner), Arc::clone(&hold.task));
    let scopes = hold.scopes.clone();
    let mut view = HoldingView::new(family.clone(), scopes, hold.mode, token, whose);
    view.partition = hold.partition;
    view.granted_at = hold.granted_at;
    view.left = hold.deadline.since(now);
    if hold.is_live(now) {
        view.latest = hold.latest().since(now);
    }
    view.term = hold.term;
    view.renewals = hold.renewals;
    view.recalled = hold.recalled_until.is_some();
    view.progress.clone_from(&hold.progress);
    view
}

fn ticket_view(family: &FamilyName, ticket: &Ticket, now: Timestamp) -> TicketView {
    let whose = (Arc::clone(&ticket.owner), Arc::clone(&ticket.task));
    let mut view = TicketView::new(family.clone(), ticket.scopes.clone(), ticket.mode, whose);
    view.partition = ticket.partition;
    view.since = ticket.since;
    view.left = ticket.deadline.since(now);
    view
}

impl Family {
    fn view(&self, name: &FamilyName, now: Timestamp) -> FamilyView {
        let mut view = FamilyView::new(name.clone());
        view.units = self.units;
        view.rest = self.rest;
        view.partitions = self.partitions();
        view.ledger = self.ledger;
        let live = self.tickets.values().filter(|ticket| ticket.is_live(now));
        view.waiting = live.count() as u64;
        view
    }

    fn scope_view(&self, name: &FamilyName, scope: &Scope, now: Timestamp) -> Option<ScopeView> {
        let known = self.scopes.get(scope)?;
        let holds = self.holdings.iter();
        let holds = holds.filter(|(_, hold)| hold.scopes.contains(scope));
        let tickets = self.tickets.values();
        let tickets = tickets.filter(|ticket| ticket.is_live(now) && ticket.scopes.contains(scope));
        let state = known.state.as_ref();
        Some(ScopeView {
            holdings: holds
                .map(|(token, hold)| holding_view(name, *token, hold, now))
                .collect(),
            waiting: (tickets.count() as u64).min(limits::WAITING),
            ended: known.ended.clone(),
            state: state.map(|state| (state.token, state.seq, state.bytes.len())),
            committed: known.committed,
        })
    }
}
