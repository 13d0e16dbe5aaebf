//! One store in a differential run: turns steps into requests, and answers into comparable text.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::{Clock, ManualClock};
use leasehold::job::{JobState, Key, Kind, QueueName, UniqueKey};
use leasehold::lease::Receipt;
use leasehold::lease::{Grant, Nonce, Progress};
use leasehold::rules::Transition;
use leasehold::store::{
    Beat, Checkpoint, CheckpointRequest, ClaimQueue, ClaimRequest, ControlCommand, ControlRequest,
    EnqueueRequest, LeaseSelect, Outcome, PruneRequest, ReapRequest, RequestId, Select, SessionId,
    SettleRequest, Settlement,
};
use leasehold::{Error, ErrorKind, FencingToken, JobId, NewJob, Store};
use leasehold_conformance::Snapshot;

use crate::program::{
    BeatSpec, ClaimSpec, ControlSpec, End, JobSpec, ReceiptSpec, SelectSpec, Step, Tamper,
};

/// A request as it was sent, to be sent again.
#[derive(Clone)]
enum Sent {
    Enqueue(EnqueueRequest),
    Claim(ClaimRequest),
    Settle(SettleRequest),
    Checkpoint(CheckpointRequest),
    Reap(ReapRequest),
    Control(ControlRequest),
    Prune(PruneRequest),
}

/// A store, and all that its callers know.
pub(crate) struct World {
    pub(crate) store: Arc<dyn Store>,
    clock: ManualClock,
    session: SessionId,
    lanes: [u64; 2],
    steps: u64,
    jobs: Vec<JobId>,
    grants: Vec<Grant>,
    receipts: Vec<Receipt>,
    sent: Vec<Sent>,
    /// Tokens in the order in which they were given.
    ranks: HashMap<FencingToken, usize>,
    last_token: FencingToken,
}

const OWNERS: [&str; 2] = ["ann", "bob"];
const TASKS: [&str; 2] = ["run-1", "run-2"];

fn queue(at: usize) -> QueueName {
    QueueName::new(["north", "south"][at % 2]).unwrap()
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

impl World {
    pub(crate) async fn new(store: Arc<dyn Store>, clock: ManualClock) -> Self {
        let session = store.open_session().await.unwrap();
        Self {
            store,
            clock,
            session,
            lanes: [0; 2],
            steps: 0,
            jobs: Vec::new(),
            grants: Vec::new(),
            receipts: Vec::new(),
            sent: Vec::new(),
            ranks: HashMap::new(),
            last_token: FencingToken::new(0),
        }
    }

    fn request(&mut self, lane: usize) -> RequestId {
        self.lanes[lane] += 1;
        RequestId {
            session: self.session,
            lane: lane as u32,
            seq: self.lanes[lane],
        }
    }

    /// Does what a store does that had no token left for the claim: nothing. An issuer may wait for
    /// its clock; the model never has to.
    pub(crate) fn take_refused(&mut self, step: &Step) -> Result<(), String> {
        self.steps += 1;
        let again = match step {
            Step::Repeat(back) => self.sent.len().checked_sub(back + 1),
            _ => None,
        };
        let request = match (step, again.map(|at| self.sent[at].clone())) {
            (Step::Claim(spec), _) => self.claim(spec, (self.steps % 2) as usize),
            (_, Some(Sent::Claim(request))) => request,
            _ => return Err(format!("only a claim needs tokens: {step:?}")),
        };
        self.sent.push(Sent::Claim(request));
        Ok(())
    }

    /// Takes a step. The clock is moved by whoever owns both worlds.
    pub(crate) async fn take(&mut self, step: &Step) -> Result<String, String> {
        self.steps += 1;
        let lane = (self.steps % 2) as usize;
        let sent = match step {
            Step::Nothing | Step::Advance(_) | Step::Back(_) => return Ok(String::new()),
            Step::Renew(beats) => {
                let beats: Vec<Beat> = beats.iter().filter_map(|beat| self.beat(beat)).collect();
                let answer = self.store.renew(beats).await;
                return Ok(self.text(&answer.map_err(|error| kind_of(&error))));
            }
            Step::Repeat(back) => {
                let Some(at) = self.sent.len().checked_sub(back + 1) else {
                    return Ok(String::new());
                };
                self.sent[at].clone()
            }
            Step::Enqueue(jobs) => {
                let jobs: Vec<_> = jobs.iter().map(|spec| self.job(spec)).collect();
                let request = self.request(lane);
                let jobs = jobs.into();
                Sent::Enqueue(EnqueueRequest { request, jobs })
            }
            Step::Claim(spec) => Sent::Claim(self.claim(spec, lane)),
            Step::Settle(ends) => {
                let request = self.request(lane);
                Sent::Settle(self.settle(request, ends))
            }
            Step::Checkpoint(saves) => {
                let saves = saves.iter();
                let checkpoints = saves.filter_map(|(spec, seq)| {
                    Some(Checkpoint {
                        receipt: self.receipt(spec)?,
                        seq: *seq,
                        bytes: format!("state {seq} of step {}", self.steps).into(),
                    })
                });
                let checkpoints = checkpoints.collect();
                let request = self.request(lane);
                Sent::Checkpoint(CheckpointRequest {
                    request,
                    checkpoints,
                })
            }
            Step::Reap(max) => {
                let request = self.request(lane);
                Sent::Reap(ReapRequest { request, max: *max })
            }
            Step::Control(spec) => {
                let command = self.command(spec);
                Sent::Control(ControlRequest {
                    request: self.request(lane),
                    actor: "operator".into(),
                    reason: format!("step {}", self.steps),
                    command,
                })
            }
            Step::Prune(overdue) => {
                let request = self.request(lane);
                let overdue = secs(*overdue);
                // Which jobs a bounded prune takes first is the store's own affair.
                Sent::Prune(PruneRequest {
                    request,
                    overdue,
                    max: 10_000,
                })
            }
        };
        self.sent.push(sent.clone());
        self.send(sent).await
    }

    async fn send(&mut self, sent: Sent) -> Result<String, String> {
        let store = Arc::clone(&self.store);
        match sent {
            Sent::Enqueue(request) => self.done(store.enqueue(request).await).await,
            Sent::Settle(request) => self.done(store.settle(request).await).await,
            Sent::Checkpoint(request) => self.done(store.checkpoint(request).await).await,
            Sent::Reap(request) => self.done(store.reap(request).await).await,
            Sent::Control(request) => self.done(store.control(request).await).await,
            Sent::Prune(request) => self.done(store.prune(request).await).await,
            Sent::Claim(request) => {
                let mut answer = store.claim(request).await;
                if let Ok(claimed) = &mut answer {
                    // As in a snapshot.
                    claimed.clock_behind = None;
                    for grant in &claimed.grants {
                        self.learn(grant)?;
                    }
                }
                self.done(answer).await
            }
        }
    }

    /// Learns a grant. Its tokens must be larger than any before, unless it is a repeat.
    fn learn(&mut self, grant: &Grant) -> Result<(), String> {
        if self.grants.iter().any(|known| known.id == grant.id) {
            return Ok(());
        }
        for lease in &grant.leases {
            if lease.token <= self.last_token {
                return Err(format!("token {} after {}", lease.token, self.last_token));
            }
            self.last_token = lease.token;
            self.ranks.insert(lease.token, self.ranks.len());
            self.receipts.push(grant.receipt(lease));
        }
        self.grants.push(grant.clone());
        Ok(())
    }

    async fn done<T: Debug>(&mut self, answer: leasehold::Result<T>) -> Result<String, String> {
        let answer = answer.map_err(|error| kind_of(&error));
        if matches!(answer, Err((ErrorKind::SessionLost, _))) {
            // Either an old repeat, or the session was idle: go on under a new one.
            self.session = self.store.open_session().await.map_err(|e| e.to_string())?;
            self.lanes = [0; 2];
        }
        Ok(self.text(&answer))
    }

    /// Text in which tokens are their ranks: stores may give other numbers, not another order.
    fn text(&self, answer: &impl Debug) -> String {
        const MARK: &str = "FencingToken(";
        let raw = format!("{answer:?}");
        let mut text = String::with_capacity(raw.len());
        let mut rest = raw.as_str();
        while let Some(at) = rest.find(MARK) {
            let (before, from) = rest.split_at(at + MARK.len());
            let (number, after) = from.split_once(')').unwrap_or((from, ""));
            let token = FencingToken::new(number.parse().unwrap_or_default());
            text.push_str(before);
            match self.ranks.get(&token) {
                Some(rank) => text.extend(["#", &rank.to_string(), ")"]),
                None => text.push_str("?)"),
            }
            rest = after;
        }
        text.push_str(rest);
        text
    }

    /// Everything that the store shows, with ranks for tokens. How far these are ahead of the clock
    /// is the issuer's affair: of memory there is one, elsewhere one for each queue.
    pub(crate) async fn snapshot(&self) -> Snapshot {
        let mut all = Snapshot::of(&*self.store).await;
        for queue in &mut all.queues {
            queue.clock_behind = None;
        }
        let rank = |token: &mut FencingToken| {
            let rank = self.ranks.get(token).map_or(u64::MAX, |rank| *rank as u64);
            *token = FencingToken::new(rank);
        };
        for lease in &mut all.leases {
            rank(&mut lease.token);
        }
        for view in &mut all.jobs {
            let job = Arc::make_mut(&mut view.job);
            job.history
                .iter_mut()
                .for_each(|ended| rank(&mut ended.token));
            job.checkpoint
                .iter_mut()
                .for_each(|saved| rank(&mut saved.token));
            view.lease
                .iter_mut()
                .for_each(|lease| rank(&mut lease.token));
        }
        for record in &mut all.audit {
            record.tokens.iter_mut().for_each(rank);
        }
        all
    }

    fn job(&mut self, spec: &JobSpec) -> (JobId, NewJob) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(self.jobs.len() as u64 + 1).to_be_bytes());
        let id = JobId::from_bytes(bytes);
        self.jobs.push(id);
        let kind = Kind::new("work").unwrap();
        let mut job = NewJob::raw(queue(spec.queue), kind, vec![b'x'; spec.bytes]);
        job.delay = secs(spec.delay);
        job.unique = spec.unique.map(|(key, window)| UniqueKey {
            key: Key::new(format!("u{key}")).unwrap(),
            window: window.map(secs),
        });
        job.exclusive = spec
            .exclusive
            .map(|key| Key::new(format!("e{key}")).unwrap());
        job.options.priority = spec.priority;
        job.options.term = spec.term.map(secs);
        job.options.max_lifetime = spec.max_lifetime.map(secs);
        job.options.max_expiries = spec.max_expiries;
        job.options.retention = spec.retention.map(secs);
        (id, job)
    }

    fn claim(&mut self, spec: &ClaimSpec, lane: usize) -> ClaimRequest {
        let names: &[usize] = [&[0][..], &[1], &[0, 1], &[1, 0]][spec.queues];
        let queues = names.iter().map(|&at| ClaimQueue {
            queue: queue(at),
            term: secs(30),
            max_lifetime: secs(120),
        });
        let mut nonce = [7; 16];
        nonce[..8].copy_from_slice(&self.steps.to_be_bytes());
        ClaimRequest {
            request: self.request(lane),
            owner: OWNERS[spec.owner as usize].into(),
            task: TASKS[spec.max % 2].into(),
            nonce: Nonce::from_bytes(nonce),
            queues: queues.collect(),
            max: spec.max,
            admit_suspect: spec.suspect,
        }
    }

    fn receipt(&self, spec: &ReceiptSpec) -> Option<Receipt> {
        let at = self.receipts.len().checked_sub(spec.back + 1)?;
        let receipt = &self.receipts[at];
        let other = &self.receipts[0];
        let mut parts: Vec<String> = receipt.to_string().split('/').map(Into::into).collect();
        match spec.tamper {
            Tamper::Not => {}
            Tamper::Nonce => parts[5] = "f".repeat(32),
            Tamper::Token => parts[3] = other.token().to_string(),
            Tamper::Job => parts[4] = other.job().to_string(),
            Tamper::Queue => {
                let elsewhere = usize::from(*receipt.queue() == queue(0));
                parts[0] = queue(elsewhere).to_string();
            }
        }
        parts.join("/").parse().ok()
    }

    fn settle(&self, request: RequestId, ends: &[(ReceiptSpec, End)]) -> SettleRequest {
        let settlements = ends.iter().filter_map(|(spec, end)| {
            let outcome = match end {
                End::Complete(result) => Outcome::Complete {
                    result: result.then(|| "result".into()),
                },
                End::Retry(delay) => Outcome::Retry {
                    delay: secs(*delay),
                    reason: "failed".into(),
                },
                End::Surrender(delay) => Outcome::Surrender {
                    delay: secs(*delay),
                    mark: None,
                },
                End::Marked(hours) => {
                    let mark = self.clock.now().after(secs(hours * 3_600));
                    Outcome::Surrender {
                        delay: Duration::ZERO,
                        mark: Some(FencingToken::new(mark.as_micros())),
                    }
                }
                End::Decline(delay) => Outcome::Decline {
                    delay: secs(*delay),
                    reason: "strange".into(),
                },
                End::Bury => Outcome::Bury {
                    reason: "hopeless".into(),
                },
            };
            let receipt = self.receipt(spec)?;
            Some(Settlement { receipt, outcome })
        });
        SettleRequest {
            request,
            settlements: settlements.collect(),
        }
    }

    fn beat(&self, spec: &BeatSpec) -> Option<Beat> {
        let at = self.grants.len().checked_sub(spec.back + 1)?;
        let grant = &self.grants[at];
        let mut beat = Beat::of(grant);
        let tokens = std::mem::take(&mut beat.leases);
        for (bit, token) in tokens.into_iter().enumerate() {
            let has = |bits: u8| bits & (1 << (bit % 8)) != 0;
            if has(spec.lapse) {
                beat.lapse.push(token);
            } else if !has(spec.omit) {
                beat.leases.push(token);
            }
            if spec.progress {
                let progress = Progress {
                    done: self.steps,
                    total: None,
                    note: String::new(),
                };
                beat.progress.push((token, progress));
            }
        }
        if spec.tamper {
            beat.nonce = Nonce::from_bytes([0; 16]);
        }
        Some(beat)
    }

    fn select(&self, spec: &SelectSpec) -> Select {
        match spec {
            SelectSpec::Job(at) => Select::Job(self.some_job(*at)),
            SelectSpec::State {
                queue: at,
                state,
                max,
            } => Select::State {
                queue: queue(*at),
                state: JobState::ALL[*state],
                max: *max,
            },
        }
    }

    fn some_job(&self, at: usize) -> JobId {
        let back = self.jobs.len().checked_sub(at % self.jobs.len().max(1) + 1);
        back.map_or(JobId::from_bytes([9; 16]), |at| self.jobs[at])
    }

    fn command(&self, spec: &ControlSpec) -> ControlCommand {
        match spec {
            ControlSpec::Pause(at) => ControlCommand::Pause(queue(*at)),
            ControlSpec::Resume(at) => ControlCommand::Resume(queue(*at)),
            ControlSpec::Configure(at, relaxed) => ControlCommand::Configure {
                queue: queue(*at),
                relaxed: *relaxed,
            },
            ControlSpec::Cancel(jobs) => ControlCommand::Cancel(self.select(jobs)),
            ControlSpec::RevokeJob(at) => {
                ControlCommand::Revoke(LeaseSelect::Job(self.some_job(*at)))
            }
            ControlSpec::RevokeOwner(at) => {
                ControlCommand::Revoke(LeaseSelect::Owner(OWNERS[*at as usize].into()))
            }
            ControlSpec::RevokeTask(at) => {
                ControlCommand::Revoke(LeaseSelect::Task(TASKS[*at as usize].into()))
            }
            ControlSpec::RetryDead(jobs) => ControlCommand::RetryDead(self.select(jobs)),
            ControlSpec::Purge(jobs) => ControlCommand::Purge(self.select(jobs)),
            ControlSpec::Reschedule(jobs, delay) => ControlCommand::Reschedule {
                jobs: self.select(jobs),
                delay: secs(*delay),
            },
        }
    }
}

fn kind_of(error: &Error) -> (ErrorKind, Option<&'static str>) {
    (error.kind(), error.field())
}

/// What a step may do to a job.
pub(crate) fn moves(step: &Step) -> &'static [Transition] {
    use Transition::{
        Bury, Cancel, Claim, Complete, Enqueue, Expire, Promote, Prune, Purge, Reschedule, Retry,
        RetryDead, Revoke, Surrender,
    };
    match step {
        Step::Enqueue(_) => &[Enqueue],
        Step::Claim(_) => &[Expire, Promote, Claim],
        Step::Settle(_) => &[Complete, Retry, Surrender, Bury],
        Step::Renew(_) | Step::Reap(_) => &[Expire],
        Step::Control(ControlSpec::Cancel(_)) => &[Cancel],
        Step::Control(
            ControlSpec::RevokeJob(_) | ControlSpec::RevokeOwner(_) | ControlSpec::RevokeTask(_),
        ) => &[Revoke],
        Step::Control(ControlSpec::RetryDead(_)) => &[RetryDead],
        Step::Control(ControlSpec::Purge(_)) => &[Purge],
        Step::Control(ControlSpec::Reschedule(..)) => &[Reschedule],
        Step::Prune(_) => &[Prune],
        Step::Nothing
        | Step::Control(_)
        | Step::Checkpoint(_)
        | Step::Repeat(_)
        | Step::Advance(_)
        | Step::Back(_) => &[],
    }
}
