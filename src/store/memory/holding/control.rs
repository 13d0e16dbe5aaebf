//! control: what operators do with holdings, each time on record.

use super::{Family, Hold, HoldingControlRequest, HoldingEnd, State};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::inspect::AuditView;
use crate::lease::FencingToken;
use crate::limits::AUDIT_TOKENS;
use crate::rules::holding::{FamilyName, Scope};
use crate::store::holding::{FamilySettings, HoldingCommand, HoldingSelect};

impl State {
    pub(super) fn control_holdings(
        &mut self,
        request: &HoldingControlRequest,
        now: Timestamp,
    ) -> Result<u64> {
        let mut tokens = Vec::new();
        let done = match &request.command {
            HoldingCommand::Revoke(select) => {
                self.revoke_holdings(select, &request.reason, now, &mut tokens)
            }
            HoldingCommand::Recall { holdings, grace } => {
                let until = now.after(*grace);
                self.recall_holdings(holdings, until, now, &mut tokens)
            }
            HoldingCommand::DropTickets(select) => self.drop_tickets(select, now),
            HoldingCommand::Configure { family, settings } => {
                self.configure_family(family, settings)?
            }
            HoldingCommand::Restock {
                family,
                scope,
                units,
            } => self.restock(family, scope, *units),
        };
        let names: Vec<_> = self.families.keys().cloned().collect();
        for name in names {
            self.wake_tickets(&name, now);
        }
        tokens.truncate(AUDIT_TOKENS);
        self.audit.push(AuditView {
            at: now,
            actor: request.actor.clone(),
            reason: request.reason.clone(),
            command: request.command.to_string(),
            done,
            tokens,
        });
        Ok(done)
    }

    fn selected_holdings(&self, select: &HoldingSelect) -> Vec<(FamilyName, FencingToken)> {
        let families = self.families.iter();
        let holdings = families.flat_map(|(name, family)| {
            let holds = family.holdings.iter();
            let holds = holds.filter(move |(token, hold)| is_selected(select, name, **token, hold));
            holds.map(move |(token, _)| (name.clone(), *token))
        });
        holdings.collect()
    }

    /// Overdue holdings are not there any more: they expire.
    fn revoke_holdings(
        &mut self,
        select: &HoldingSelect,
        reason: &str,
        now: Timestamp,
        tokens: &mut Vec<FencingToken>,
    ) -> u64 {
        let mut done = 0;
        for (name, token) in self.selected_holdings(select) {
            let Some(family) = self.families.get_mut(&name) else {
                continue;
            };
            if family.holdings[&token].is_live(now) {
                family.end(token, HoldingEnd::Revoked, Some(reason), now);
                tokens.push(token);
                done += 1;
            } else {
                family.expire(&name, token, None, now);
            }
        }
        done
    }

    fn recall_holdings(
        &mut self,
        select: &HoldingSelect,
        until: Timestamp,
        now: Timestamp,
        tokens: &mut Vec<FencingToken>,
    ) -> u64 {
        let mut done = 0;
        for (name, token) in self.selected_holdings(select) {
            let family = self.families.get_mut(&name);
            let hold = family.and_then(|family| family.holdings.get_mut(&token));
            let Some(hold) = hold.filter(|hold| hold.is_live(now)) else {
                continue;
            };
            if hold.recalled_until.is_none_or(|before| until < before) {
                hold.recalled_until = Some(until);
                tokens.push(token);
                done += 1;
            }
        }
        done
    }

    fn drop_tickets(&mut self, select: &HoldingSelect, now: Timestamp) -> u64 {
        let mut done = 0;
        for (name, family) in &mut self.families {
            family.tickets.retain(|_, ticket| {
                let is_selected = match select {
                    HoldingSelect::Token { .. } => false,
                    HoldingSelect::Scope { family, scope } => {
                        family == name && ticket.scopes.contains(scope)
                    }
                    HoldingSelect::Owner(owner) => *owner == ticket.owner,
                    HoldingSelect::Task(task) => *task == ticket.task,
                };
                done += u64::from(is_selected && ticket.is_live(now));
                !is_selected
            });
        }
        done
    }

    fn configure_family(&mut self, name: &FamilyName, settings: &FamilySettings) -> Result<u64> {
        let mut fresh = Family::default();
        let family = self.families.get(name).unwrap_or(&fresh);
        if let Some(partitions) = settings.partitions
            && family.is_asked
            && partitions != family.partitions()
        {
            let limit = format!("{}, as fixed by its first use", family.partitions());
            return Err(Error::invalid("partitions", partitions, limit));
        }
        let family = self.families.entry(name.clone());
        let family = family.or_insert_with(|| std::mem::take(&mut fresh));
        family.units = settings.units.unwrap_or(family.units);
        family.rest = settings.rest.unwrap_or(family.rest);
        family.partitions = settings.partitions.or(family.partitions);
        Ok(1)
    }

    fn restock(&mut self, family: &FamilyName, scope: &Scope, units: u32) -> u64 {
        let family = self.families.get_mut(family);
        let Some(scope) = family.and_then(|family| family.scopes.get_mut(scope)) else {
            return 0;
        };
        let done = scope.committed.min(units.into());
        scope.committed -= done;
        done
    }
}

fn is_selected(
    select: &HoldingSelect,
    name: &FamilyName,
    token: FencingToken,
    hold: &Hold,
) -> bool {
    match select {
        HoldingSelect::Token {
            family,
            partition,
            token: selected,
        } => (family, *partition, *selected) == (name, hold.partition, token),
        HoldingSelect::Scope { family, scope } => family == name && hold.scopes.contains(scope),
        HoldingSelect::Owner(owner) => *owner == hold.owner,
        HoldingSelect::Task(task) => *task == hold.task,
    }
}
