//! control: what operators do, each time on record.

use std::sync::Arc;

use bytes::Bytes;
use tokio::task::JoinSet;

use super::RedisStore;
use super::queue::Partition;
use super::session::Plan;
use super::step::Steps;
use super::wire::{In, Out, garbled};
use crate::clock::micros;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::job::{JobId, JobState, QueueName};
use crate::lease::FencingToken;
use crate::store::call::check_empty;
use crate::store::{ControlCommand, ControlRequest, Controlled, LeaseSelect, Select};

/// Tokens listed in one audit record.
const AUDIT_TOKENS: usize = 100;

/// Jobs that one step of a command deals with.
const CHUNK: usize = 100;

/// What stands in an audit record behind the time.
pub(super) type Entry = (String, String, String, u64, Vec<FencingToken>);

/// The letter of a state in the functions.
pub(super) const fn letter(state: JobState) -> &'static str {
    match state {
        JobState::Scheduled => "s",
        JobState::Ready => "r",
        JobState::Leased => "l",
        JobState::Completed => "c",
        JobState::Dead => "d",
        JobState::Cancelled => "x",
    }
}

impl RedisStore {
    pub(super) async fn command(&self, request: &ControlRequest) -> Result<Controlled> {
        request.validate()?;
        self.shared.sessions.begin(request.request, Verb::Control)?;
        let plan = if let Some(plan) = self.shared.sessions.plan(request.request) {
            plan
        } else {
            let plan = Arc::new(self.control_plan(&request.command).await?);
            self.shared.sessions.set_plan(request.request, &plan);
            plan
        };
        if let ControlCommand::Remove(name) = &request.command {
            let partitions: Vec<_> = plan.iter().map(|(partition, _)| partition).collect();
            check_empty(name, &self.view_of(name, &partitions).await?.0.counts)?;
        }
        // On record before anything is done, and again once it is known what was done.
        let place = self.record(request, 0, &[], None).await?;
        let (answer, tokens) = self.carry_out(request, &plan).await?;
        self.record(request, answer.done, &tokens, Some(place))
            .await?;
        Ok(answer)
    }

    async fn carry_out(
        &self,
        request: &ControlRequest,
        plan: &Plan,
    ) -> Result<(Controlled, Vec<FencingToken>)> {
        if let ControlCommand::Remove(name) = &request.command {
            return self.remove(request, name, plan).await;
        }
        let mut answer = Controlled::default();
        let mut tokens = Vec::new();
        let max = most(&request.command);
        for (partition, _) in plan.iter() {
            let acted = answer.done.saturating_add(answer.skipped);
            let acted = acted.saturating_add(answer.duplicates.len() as u64);
            let Some(left) = max.checked_sub(acted as usize).filter(|left| *left > 0) else {
                break;
            };
            let (part, ended) = self.control_one(request, partition, left).await?;
            answer.done = answer.done.saturating_add(part.done);
            answer.skipped = answer.skipped.saturating_add(part.skipped);
            answer.duplicates.extend(part.duplicates);
            tokens.extend(ended);
            tokens.sort_unstable();
            tokens.truncate(AUDIT_TOKENS);
        }
        if about_queue(&request.command).is_some() {
            answer.done = 1;
        }
        Ok((answer, tokens))
    }

    /// Takes a queue off the list and deletes its partitions, each if it has no jobs. If jobs have
    /// come meanwhile the queue is on the list again.
    async fn remove(
        &self,
        request: &ControlRequest,
        name: &QueueName,
        plan: &Plan,
    ) -> Result<(Controlled, Vec<FencingToken>)> {
        let mut answer = Controlled::default();
        if plan.is_empty() {
            self.nowhere(request.request).await?;
            return Ok((answer, Vec::new()));
        }
        // An introduction puts a queue on the list whose partition is there.
        for (partition, _) in plan.iter() {
            let (keys, request) = (partition.keys(), request.request);
            self.introduce(keys, &keys.session(request.session), request)
                .await?;
        }
        self.forget_queue(name).await?;
        let mut left = Vec::new();
        for (partition, _) in plan.iter() {
            match self.control_one(request, partition, usize::MAX).await {
                Ok((part, _)) if part.skipped == 0 => {}
                Ok(_) => left.push(partition),
                Err(error) => {
                    if let Some(listed) = &partition.keys().queue {
                        self.write_queue(listed).await?;
                    }
                    return Err(error);
                }
            }
        }
        if let Some(listed) = left
            .first()
            .and_then(|partition| partition.keys().queue.as_ref())
        {
            self.write_queue(listed).await?;
            check_empty(name, &self.view_of(name, &left).await?.0.counts)?;
        }
        answer.done = 1;
        Ok((answer, Vec::new()))
    }

    async fn control_one(
        &self,
        request: &ControlRequest,
        partition: &Partition,
        max: usize,
    ) -> Result<(Controlled, Vec<FencingToken>)> {
        let function = &self.functions().control;
        let mut steps = Steps::new(self, partition.keys(), request.request, Verb::Control);
        let mut answer = Controlled::default();
        let mut tokens = Vec::new();
        let mut cursor = Bytes::from_static(&[0; 24]);
        let mut left = max;
        loop {
            let chunk = if goes_in_steps(&request.command) {
                left.min(CHUNK)
            } else {
                left
            };
            let command = packed(&request.command, chunk, left);
            let reason = request.reason.as_bytes();
            let args: [&[u8]; 3] = [&command.0, reason, &cursor];
            let mut body = steps.take(function, &args).await?;
            let acted = read_step(&mut body, &mut answer, &mut tokens)?;
            let more = body.u8()? == 1;
            cursor = body.raw(24)?;
            left = left.saturating_sub(acted);
            if !more || left == 0 || !goes_in_steps(&request.command) {
                break;
            }
        }
        steps.end(function).await?;
        Ok((answer, tokens))
    }

    /// The partitions that a command is about.
    async fn control_plan(&self, command: &ControlCommand) -> Result<Vec<(Partition, usize)>> {
        let partitions = if let Some(name) = about_queue(command) {
            self.make_queue(name).await?.all(0).collect()
        } else if let ControlCommand::Remove(name) = command {
            let queue = self.queue(name).await?;
            queue.iter().flat_map(|queue| queue.all(0)).collect()
        } else {
            match command {
                ControlCommand::Revoke(LeaseSelect::Owner(_) | LeaseSelect::Task(_)) => {
                    self.all_partitions().await?
                }
                ControlCommand::Revoke(LeaseSelect::Job(id))
                | ControlCommand::Cancel(Select::Job(id))
                | ControlCommand::RetryDead(Select::Job(id))
                | ControlCommand::Purge(Select::Job(id))
                | ControlCommand::Reschedule {
                    jobs: Select::Job(id),
                    ..
                } => self.locate(*id).await?.into_iter().collect(),
                ControlCommand::Cancel(Select::State { queue, .. })
                | ControlCommand::RetryDead(Select::State { queue, .. })
                | ControlCommand::Purge(Select::State { queue, .. })
                | ControlCommand::Reschedule {
                    jobs: Select::State { queue, .. },
                    ..
                } => {
                    let queue = self.queue(queue).await?;
                    queue.iter().flat_map(|queue| queue.all(0)).collect()
                }
                _ => Vec::new(),
            }
        };
        Ok(partitions
            .into_iter()
            .map(|partition| (partition, 0))
            .collect())
    }

    /// The partition that has a job.
    async fn locate(&self, id: JobId) -> Result<Option<Partition>> {
        let found = self.find(id).await?;
        Ok(found.map(|(partition, _)| partition))
    }

    /// Asks all partitions for a job, all at once: their calls share one round trip.
    pub(super) async fn find(&self, id: JobId) -> Result<Option<(Partition, In)>> {
        let mut asked = JoinSet::new();
        for partition in self.all_partitions().await? {
            let store = self.clone();
            asked.spawn(async move {
                let function = &store.functions().inspect;
                let args: [&[u8]; 3] = [b"job", id.as_bytes(), b"1"];
                let mut body = store.look(function, partition.keys(), &args).await?.body;
                let is_there = !body.is_empty() && body.u32()? == 1;
                Ok::<_, Error>(is_there.then_some((partition, body)))
            });
        }
        let mut trouble = None;
        while let Some(answer) = asked.join_next().await {
            match answer.map_err(|_| Error::new(ErrorKind::Unexpected, "a look-up panicked"))? {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => {}
                Err(error) => trouble = Some(error),
            }
        }
        trouble.map_or(Ok(None), Err)
    }

    /// Puts a command on record, or corrects the record.
    async fn record(
        &self,
        request: &ControlRequest,
        done: u64,
        tokens: &[FencingToken],
        place: Option<u64>,
    ) -> Result<u64> {
        let entry: Entry = (
            request.actor.clone(),
            request.reason.clone(),
            request.command.to_string(),
            done,
            tokens.to_vec(),
        );
        let entry = serde_json::to_vec(&entry).map_err(|_| garbled())?;
        let place = place.map(|place| place.to_string()).unwrap_or_default();
        let args: [&[u8]; 2] = [&entry, place.as_bytes()];
        let function = &self.functions().audit;
        let home = &self.shared.home;
        let reply = self.request(function, home, request.request, Verb::Control, &args);
        reply.await?.body.u64()
    }
}

/// Adds what one step has done, and returns how many jobs that were.
pub(super) fn read_step(
    body: &mut In,
    answer: &mut Controlled,
    tokens: &mut Vec<FencingToken>,
) -> Result<usize> {
    let (done, skipped) = (body.u64()?, body.u64()?);
    let duplicates = body.u32()?;
    for _ in 0..duplicates {
        answer.duplicates.push((body.id()?, body.id()?));
    }
    for _ in 0..body.u32()? {
        tokens.push(FencingToken::new(body.u64()?));
    }
    answer.done = answer.done.saturating_add(done);
    answer.skipped = answer.skipped.saturating_add(skipped);
    let acted = usize::try_from(done.saturating_add(skipped)).unwrap_or(usize::MAX);
    Ok(acted.saturating_add(duplicates))
}

fn about_queue(command: &ControlCommand) -> Option<&QueueName> {
    match command {
        ControlCommand::Pause(queue)
        | ControlCommand::Resume(queue)
        | ControlCommand::Configure { queue, .. } => Some(queue),
        _ => None,
    }
}

fn most(command: &ControlCommand) -> usize {
    match command {
        ControlCommand::Cancel(Select::State { max, .. })
        | ControlCommand::RetryDead(Select::State { max, .. })
        | ControlCommand::Purge(Select::State { max, .. })
        | ControlCommand::Reschedule {
            jobs: Select::State { max, .. },
            ..
        } => *max,
        _ => usize::MAX,
    }
}

/// Whether a command can be cut into steps: what a step has done, the next one does not meet again.
fn goes_in_steps(command: &ControlCommand) -> bool {
    use JobState::{Dead, Leased, Ready, Scheduled};
    match command {
        ControlCommand::Revoke(_) => true,
        ControlCommand::Purge(Select::State { state, .. }) => *state != Leased,
        ControlCommand::Cancel(Select::State { state, .. }) => {
            matches!(state, Scheduled | Ready | Leased)
        }
        ControlCommand::RetryDead(Select::State { state, .. }) => *state == Dead,
        ControlCommand::Reschedule {
            jobs: Select::State { state, .. },
            delay,
        } => *state == Ready && micros(*delay) > 0,
        _ => false,
    }
}

/// `chunk` is for this step, `left` for all of them.
fn packed(command: &ControlCommand, chunk: usize, left: usize) -> Out {
    let mut out = Out::default();
    let selected = |out: &mut Out, letter: &[u8], delay, jobs: &Select| {
        out.raw(letter).micros(delay);
        match jobs {
            Select::Job(id) => out.raw(b"j").raw(id.as_bytes()),
            Select::State { state, .. } => {
                let state = self::letter(*state).as_bytes();
                out.raw(b"s").raw(state).u32(chunk).u32(left)
            }
        };
    };
    let zero = std::time::Duration::ZERO;
    match command {
        ControlCommand::Pause(_) => {
            out.raw(b"P");
        }
        ControlCommand::Resume(_) => {
            out.raw(b"R");
        }
        ControlCommand::Remove(_) => {
            out.raw(b"X");
        }
        ControlCommand::Configure { relaxed, .. } => {
            out.raw(b"F").u8((*relaxed).into());
        }
        ControlCommand::Cancel(jobs) => selected(&mut out, b"C", zero, jobs),
        ControlCommand::Purge(jobs) => selected(&mut out, b"U", zero, jobs),
        ControlCommand::RetryDead(jobs) => selected(&mut out, b"D", zero, jobs),
        ControlCommand::Reschedule { jobs, delay } => selected(&mut out, b"S", *delay, jobs),
        ControlCommand::Revoke(LeaseSelect::Job(id)) => {
            out.raw(b"Vj").raw(id.as_bytes());
        }
        ControlCommand::Revoke(LeaseSelect::Owner(owner)) => {
            out.raw(b"Vo").raw(owner.as_bytes());
        }
        ControlCommand::Revoke(LeaseSelect::Task(task)) => {
            out.raw(b"Vt").raw(task.as_bytes());
        }
    }
    out
}
