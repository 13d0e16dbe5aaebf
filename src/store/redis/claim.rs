//! claim: expire what is overdue, promote what is due, grant; one partition after the other.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::queue::Partition;
use super::reap::reports;
use super::session::Plan;
use super::step::Steps;
use super::wait::{Down, Next, Seen};
use super::wire::{In, Out, exact, garbled};
use super::{AHEAD, CROWDED, RedisStore, refusal};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::lease::{FencingToken, Grant, Lease, Nonce};
use crate::limits;
use crate::rules::issue::{WhenBehind, tokens_ahead};
use crate::store::codec::Kinds;
use crate::store::{ClaimQueue, ClaimRequest, Claimed, Expiry};

/// What is left of a claim's wishes.
pub(super) struct Left {
    pub(super) leases: usize,
    pub(super) bytes: usize,
    pub(super) suspect: bool,
}

impl Left {
    fn of(request: &ClaimRequest) -> Self {
        Self {
            leases: request.max,
            bytes: limits::CALL_BYTES,
            suspect: request.admit_suspect,
        }
    }
}

impl RedisStore {
    pub(super) async fn claim_from(&self, request: ClaimRequest) -> Result<Claimed> {
        request.validate()?;
        let id = request.request;
        let is_repeat = self.shared.sessions.begin(id, Verb::Claim)?;
        let plan = self.claim_plan(&request).await?;
        let mut claimed = Claimed::default();
        let mut left = Left::of(&request);
        let (mut refused, mut in_steps) = (None, false);
        let names = request.queues.iter().map(|wanted| wanted.queue.clone());
        let sleepers = &self.shared.sleepers;
        let mut down = sleepers.prepare(id, names.collect(), request.admit_suspect);
        let mut lying = 0;
        let mut visited = HashSet::new();
        for (partition, wanted) in plan.iter() {
            if left.leases == 0 {
                break;
            }
            visited.insert(partition.keys().tag());
            let visit = async {
                let asked = Asked {
                    wanted: &request.queues[*wanted],
                    request: &request,
                    sleeper: down.as_ref().map_or("", Down::name),
                };
                let mut steps = Steps::new(self, partition.keys(), request.request, Verb::Claim);
                let (mut body, mut now) = if steps.are_known() {
                    let body = steps.take(&self.functions().claim, &[]).await?;
                    (body, Timestamp::ZERO)
                } else {
                    self.claim_one(partition, &asked, &left).await?
                };
                let all = body.clone();
                let mut status = body.u8()?;
                if status == CROWDED {
                    in_steps = true;
                    if !steps.is_begun() {
                        steps.keep(all.clone().rest());
                    }
                    let expired;
                    (body, now, expired) =
                        self.crowded(&mut steps, partition, &asked, &left).await?;
                    claimed.expired.extend(expired);
                    status = body.u8()?;
                }
                match status {
                    AHEAD => refused = refused.max(Some(body.micros()?)),
                    status => {
                        refusal(status)?;
                        let next =
                            take_in(&mut body, partition, &request, &mut left, &mut claimed)?;
                        let lies = body.u8()? == 1;
                        if let Some(down) = &mut down {
                            // A repeat does not say whether the first send lay down.
                            if lies || !is_repeat {
                                sleepers.note(down.name(), partition, lies);
                            }
                            lying += usize::from(lies);
                            down.add(Seen::of(partition, now, next), lies);
                        }
                        self.see(&claimed);
                    }
                }
                Ok::<(), Error>(())
            };
            match visit.await {
                // What the partitions before it have granted would be left to expire.
                Err(lost)
                    if lost.kind() == ErrorKind::SessionLost && !claimed.grants.is_empty() =>
                {
                    break;
                }
                visited => visited?,
            }
        }
        if let Some(ahead) = refused.filter(|_| claimed.grants.is_empty()) {
            // A partition remembers steps that were taken: a repeat goes on behind them.
            if !in_steps {
                self.shared.sessions.withdraw(request.request);
            }
            return Err(tokens_ahead(ahead));
        }
        if plan.is_empty() {
            self.nowhere(request.request).await?;
        }
        if let Some(mut down) = down {
            let is_all = lying == plan.len() && left.leases > 0;
            let has_queues = request.queues.iter().all(|wanted| {
                let of = |(partition, _): &(Partition, usize)| partition.queue.name == wanted.queue;
                plan.iter().any(of)
            });
            if is_all && has_queues {
                down.suspects = left.suspect;
                sleepers.lie_down(down);
            } else if left.leases == 0 {
                self.get_up(&down).await?;
            }
        }
        if is_repeat {
            self.other_hints(&request, &visited, &mut claimed).await?;
        }
        Ok(claimed)
    }

    /// Remembers the newest token.
    fn see(&self, claimed: &Claimed) {
        let newest = claimed.grants.last().and_then(|grant| grant.leases.last());
        let newest = newest.map_or(0, |lease| lease.token.get());
        self.shared.seen.fetch_max(newest, Ordering::Relaxed);
    }

    /// Claims from a partition that has more overdue than one step expires.
    async fn crowded(
        &self,
        steps: &mut Steps<'_>,
        partition: &Partition,
        asked: &Asked<'_>,
        left: &Left,
    ) -> Result<(In, Timestamp, Vec<Expiry>)> {
        let most = [limits::STEP_JOBS; 2];
        let expired = self.reap_steps(steps, partition, most).await?;
        let wishes = self.wishes(asked, left);
        let args = asked.args(&wishes);
        let (body, now) = steps.send(&self.functions().claim, &args).await?;
        Ok((body, now, expired))
    }

    /// The partitions to visit, in turn. A repeat visits the same.
    async fn claim_plan(&self, request: &ClaimRequest) -> Result<Plan> {
        if let Some(plan) = self.shared.sessions.plan(request.request) {
            return Ok(plan);
        }
        let mut partitions = Vec::new();
        for (at, wanted) in request.queues.iter().enumerate() {
            // A partition asked twice under one request would give its first answer twice.
            let before = &request.queues[..at];
            if before.iter().any(|other| other.queue == wanted.queue) {
                continue;
            }
            if let Some(queue) = self.queue(&wanted.queue).await? {
                let turn = request.request.seq + u64::from(request.request.lane);
                partitions.extend(queue.all(turn).map(|partition| (partition, at)));
            }
        }
        let plan = Arc::new(partitions);
        self.shared.sessions.set_plan(request.request, &plan);
        Ok(plan)
    }

    fn wishes(&self, asked: &Asked<'_>, left: &Left) -> Out {
        let mut wishes = Out::default();
        let strict = self.shared.options.when_behind == WhenBehind::Refuse;
        let wanted = asked.wanted;
        wishes.u16(left.leases).u8(left.suspect.into());
        wishes.u8(strict.into());
        wishes.u32(left.bytes).micros(wanted.term);
        wishes.micros(wanted.max_lifetime).raw(&exact(wanted.term));
        wishes.u64(self.shared.seen.load(Ordering::Relaxed));
        wishes.raw(asked.request.nonce.as_bytes());
        wishes
    }

    async fn claim_one(
        &self,
        partition: &Partition,
        asked: &Asked<'_>,
        left: &Left,
    ) -> Result<(In, Timestamp)> {
        let wishes = self.wishes(asked, left);
        let (function, keys) = (&self.functions().claim, partition.keys());
        let (id, args) = (asked.request.request, asked.args(&wishes));
        let reply = self.request(function, keys, id, Verb::Claim, &args).await?;
        Ok((reply.body, reply.now))
    }

    /// A repeat tells what comes next in all of its queues.
    async fn other_hints(
        &self,
        request: &ClaimRequest,
        visited: &HashSet<&str>,
        claimed: &mut Claimed,
    ) -> Result<()> {
        for wanted in &request.queues {
            let Some(queue) = self.queue(&wanted.queue).await? else {
                continue;
            };
            for partition in queue.all(0) {
                if visited.contains(partition.keys().tag()) {
                    continue;
                }
                let function = &self.functions().inspect;
                let args: [&[u8]; 3] = [b"hints", b"", b"0"];
                let mut body = self.look(function, partition.keys(), &args).await?.body;
                if !body.is_empty() {
                    hints(&mut body, claimed)?;
                }
            }
        }
        Ok(())
    }
}

/// What a claim says to a partition.
struct Asked<'a> {
    wanted: &'a ClaimQueue,
    request: &'a ClaimRequest,
    /// Who sleeps if there is too little; empty for nobody.
    sleeper: &'a str,
}

impl<'a> Asked<'a> {
    fn args(&self, wishes: &'a Out) -> [&'a [u8]; 4] {
        let (owner, task) = (&self.request.owner, &self.request.task);
        let texts = [owner.as_bytes(), task.as_bytes(), self.sleeper.as_bytes()];
        [&wishes.0, texts[0], texts[1], texts[2]]
    }
}

/// Reads when the next job is due and the next lease ends.
fn hints(body: &mut In, claimed: &mut Claimed) -> Result<Next> {
    let (due, deadline) = (body.maybe_micros()?, body.maybe_micros()?);
    claimed.next_due = earliest(claimed.next_due, due);
    claimed.next_deadline = earliest(claimed.next_deadline, deadline);
    Ok((due, deadline))
}

fn earliest(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    a.into_iter().chain(b).min()
}

pub(super) fn take_in(
    body: &mut In,
    partition: &Partition,
    request: &ClaimRequest,
    left: &mut Left,
    claimed: &mut Claimed,
) -> Result<Next> {
    // What was given the first time, so that a repeat goes the same way.
    left.leases = left.leases.saturating_sub(body.u16()?);
    left.bytes = left.bytes.saturating_sub(body.u32()?);
    left.suspect &= body.u8()? == 0;
    let next = hints(body, claimed)?;
    claimed.clock_behind = claimed.clock_behind.max(body.maybe_micros()?);
    let mut kinds = Kinds::default();
    for _ in 0..body.u16()? {
        let grant = read_grant(body, partition, request.nonce, &mut kinds)?;
        claimed.grants.push(grant);
    }
    claimed
        .expired
        .extend(reports(body, &partition.queue.name)?);
    Ok(next)
}

fn read_grant(
    body: &mut In,
    partition: &Partition,
    nonce: Nonce,
    kinds: &mut Kinds,
) -> Result<Grant> {
    let id = body.grant()?;
    let granted = body.micros()?;
    let granted_at = body.time()?;
    let term = body.exact()?;
    let mapped = body.u16()?;
    let map: Vec<usize> = (0..mapped).map(|_| body.u16()).collect::<Result<_>>()?;
    let jobs = body.records(kinds)?;
    // A holder that believed in more time than its term would outlive its lease.
    if granted > term || mapped > 0 && mapped != jobs.len() {
        return Err(garbled());
    }
    let leases = jobs.into_iter().enumerate().map(|(at, job)| {
        let place = map.get(at).copied().unwrap_or(at) as u64;
        let token = id.checked_add(place).ok_or_else(garbled)?;
        Ok(Lease {
            token: FencingToken::new(token),
            job: Arc::new(job),
        })
    });
    Ok(Grant {
        queue: partition.queue.name.clone(),
        partition: partition.number,
        id: FencingToken::new(id),
        nonce,
        granted_at,
        term,
        granted,
        leases: leases.collect::<Result<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::queue::Queue;
    use super::*;
    use crate::job::{Namespace, QueueName};

    #[test]
    fn a_grant_of_more_than_its_term_or_of_other_jobs_is_not_believed() {
        let queue = Queue::new(&Namespace::default(), &QueueName::default(), 1);
        let partition = Partition { queue, number: 0 };
        let term = Duration::from_secs(60);
        let read = |granted: Duration, places: usize| {
            let mut out = Out::default();
            out.raw(&7_u64.to_be_bytes()).micros(granted).u64(1);
            out.raw(&exact(term)).u16(places);
            for place in 0..places {
                out.u16(place);
            }
            let mut body = In::new(out.text(&[]).0.clone().into());
            let nonce = Nonce::from_bytes([2; 16]);
            read_grant(&mut body, &partition, nonce, &mut Kinds::default())
        };
        assert_eq!(read(term, 0).unwrap().granted, term);
        let longer = term + Duration::from_micros(1);
        for (granted, places) in [(longer, 0), (term, 1), (longer, 1)] {
            let error = read(granted, places).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{granted:?} {places}");
        }
    }
}
