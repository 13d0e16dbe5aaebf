//! reap: expire overdue leases, the oldest of all partitions first.
//!
//! Each partition is asked what is overdue; then each is told how many to expire. What somebody
//! else expires in between is simply not there any more.

use std::collections::VecDeque;
use std::sync::Arc;

use super::RedisStore;
use super::queue::Partition;
use super::session::Plan;
use super::step::Steps;
use super::wire::{In, garbled};
use crate::error::{Result, Verb};
use crate::job::{JobState, Kind, QueueName};
use crate::lease::{Cause, FencingToken};
use crate::limits;
use crate::store::{Expiry, ReapRequest, bounded, codec};

impl RedisStore {
    pub(super) async fn reap_all(&self, request: &ReapRequest) -> Result<Vec<Expiry>> {
        bounded("max", request.max, limits::STEP_JOBS)?;
        let id = request.request;
        self.shared.sessions.begin(id, Verb::Reap)?;
        let plan = match self.shared.sessions.plan(id) {
            Some(plan) => plan,
            None => self.reap_plan(request).await?,
        };
        if plan.is_empty() {
            self.nowhere(id).await?;
            return Ok(Vec::new());
        }
        // In the plan the grants stand by age; each partition is called once.
        let mut tags: Vec<&str> = Vec::new();
        let mut reaped: Vec<VecDeque<Expiry>> = Vec::new();
        for (partition, _) in plan.iter() {
            let tag = partition.keys().tag();
            if tags.contains(&tag) {
                continue;
            }
            let here = plan
                .iter()
                .filter(|(other, _)| other.keys().tag() == tag)
                .map(|(_, leases)| leases);
            let max = here.sum::<usize>();
            let mut steps = Steps::new(self, partition.keys(), id, Verb::Reap);
            tags.push(tag);
            let expired = self.reap_steps(&mut steps, partition, [max, 0]).await?;
            steps.end(&self.functions().reap).await?;
            reaped.push(expired.into());
        }
        let mut expired = Vec::new();
        for (partition, leases) in plan.iter() {
            let at = tags.iter().position(|tag| *tag == partition.keys().tag());
            if let Some(from) = at.and_then(|at| reaped.get_mut(at)) {
                let count = (*leases).min(from.len());
                expired.extend(from.drain(..count));
            }
        }
        expired.extend(reaped.into_iter().flatten());
        Ok(expired)
    }

    /// Expires so many leases and promotes so many jobs of a partition, at most. The newest expire
    /// first, and stand last in the answer.
    pub(super) async fn reap_steps(
        &self,
        steps: &mut Steps<'_>,
        partition: &Partition,
        most: [usize; 2],
    ) -> Result<Vec<Expiry>> {
        let [mut leases, mut jobs] = most;
        let mut parts = Vec::new();
        while leases + jobs > 0 {
            let args = [leases.to_string(), jobs.to_string()];
            let args = [args[0].as_bytes(), args[1].as_bytes()];
            let mut body = steps.take(&self.functions().reap, &args).await?;
            (leases, jobs) = (body.u32()?, body.u32()?);
            parts.push(reports(&mut body, &partition.queue.name)?);
        }
        Ok(parts.into_iter().rev().flatten().collect())
    }

    /// How many leases of which grants, the oldest first.
    async fn reap_plan(&self, request: &ReapRequest) -> Result<Plan> {
        let mut overdue = Vec::new();
        let max = request.max.to_string();
        for partition in self.all_partitions().await? {
            let function = &self.functions().inspect;
            let args: [&[u8]; 3] = [b"overdue", b"", max.as_bytes()];
            let mut body = self.look(function, partition.keys(), &args).await?.body;
            if body.is_empty() {
                continue;
            }
            for _ in 0..body.u32()? {
                let deadline = body.time()?;
                let grant = body.grant()?;
                overdue.push(((deadline, grant), partition.clone(), body.u16()?));
            }
        }
        overdue.sort_by_key(|(age, ..)| *age);
        let mut left = request.max;
        let mut plan = Vec::new();
        for (_, partition, live) in overdue {
            let leases = live.min(left);
            left -= leases;
            if leases > 0 {
                plan.push((partition, leases));
            }
        }
        let plan = Arc::new(plan);
        self.shared.sessions.set_plan(request.request, &plan);
        Ok(plan)
    }
}

/// Reads reports of expiries.
pub(super) fn reports(body: &mut In, queue: &QueueName) -> Result<Vec<Expiry>> {
    let count = body.u32()?;
    let mut reports = Vec::new();
    for _ in 0..count {
        let token = FencingToken::new(body.u64()?);
        let job = body.id()?;
        let length = body.u8()?;
        let kind = body.raw(length.into())?;
        let kind = std::str::from_utf8(&kind).map_err(|_| garbled())?;
        let kind = Kind::new(kind).map_err(|_| garbled())?;
        let (owner, task) = (body.text()?, body.text()?);
        let cause = match body.u8()? {
            0 => Cause::Deadline,
            1 => Cause::Stalled,
            2 => Cause::Lifetime,
            _ => return Err(garbled()),
        };
        let state = match body.u8()? {
            b'f' => JobState::Ready,
            b'd' => JobState::Dead,
            b'x' => JobState::Cancelled,
            _ => return Err(garbled()),
        };
        let expiries = body.u32()? as u32;
        let progress = body.bytes()?;
        let progress = (!progress.is_empty()).then(|| codec::progress(&progress));
        reports.push(Expiry {
            queue: queue.clone(),
            job,
            kind,
            token,
            owner,
            task,
            cause,
            progress: progress.transpose()?,
            expiries,
            state,
        });
    }
    Ok(reports)
}
