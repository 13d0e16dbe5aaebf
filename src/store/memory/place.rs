//! Where jobs are between verbs: ready in a tier, parked behind their key, scheduled, leased,
//! settled.
//!
//! Every job is found by its id. The maps of a queue are sorted as the contract says. The map of
//! ready jobs shares the job records, because a claim needs them; the other maps hold ids.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::State;
use crate::clock::Timestamp;
use crate::inspect::{Counts, Ledger};
use crate::job::{JobId, JobRecord, JobState, Key, QueueName};
use crate::lease::FencingToken;
use crate::rules::order::{TIERS, is_suspects, tier_of};

/// A job, and where it is.
pub(super) struct Stored {
    pub(super) queue: usize,
    pub(super) job: Arc<JobRecord>,
    pub(super) location: Location,
}

/// Where a job is: the key under which its queue has it.
#[derive(Clone, Copy)]
pub(super) enum Location {
    Ready(usize, Position),
    Parked(u64),
    Scheduled(Timestamp, u64),
    Leased {
        grant: FencingToken,
        token: FencingToken,
    },
    Settled {
        state: JobState,
        at: Timestamp,
        seq: u64,
        keep_until: Timestamp,
    },
}

impl Location {
    pub(super) const fn state(self) -> JobState {
        match self {
            Self::Ready(..) | Self::Parked(_) => JobState::Ready,
            Self::Scheduled(..) => JobState::Scheduled,
            Self::Leased { .. } => JobState::Leased,
            Self::Settled { state, .. } => state,
        }
    }
}

/// Where a ready job stands in its tier. Steps that put jobs to the front count down from zero,
/// jobs that go to the back count up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(i64, FencingToken);

impl Position {
    /// Ahead of everything that was there: the latest step first, within a step in token order.
    fn front(step: u64, token: FencingToken) -> Self {
        Self(-(step as i64), token)
    }

    /// Behind everything that was there.
    fn back(seq: u64) -> Self {
        Self(seq as i64, FencingToken::new(0))
    }
}

/// One queue: jobs by id, in order.
pub(super) struct Queue {
    pub(super) name: QueueName,
    pub(super) paused: bool,
    /// Whether a waiting retry lets the next job of its exclusive key go.
    pub(super) relaxed: bool,
    /// By tier.
    pub(super) ready: [BTreeMap<Position, Arc<JobRecord>>; TIERS],
    pub(super) scheduled: BTreeMap<(Timestamp, u64), JobId>,
    /// The job of an exclusive key that may be ready, leased or waiting for its retry.
    pub(super) key_owners: HashMap<Key, JobId>,
    /// The others of the key, in the order in which they fell due.
    pub(super) parked: BTreeMap<(Key, u64), JobId>,
    /// Unique keys: the job that holds it, and until when if it has a window.
    pub(super) unique: HashMap<Key, (JobId, Option<Timestamp>)>,
    pub(super) settled: BTreeMap<JobState, BTreeMap<(Timestamp, u64), JobId>>,
    /// The same jobs by when they may be pruned.
    pub(super) kept: BTreeSet<(Timestamp, u64, JobId)>,
    /// Live grants by (deadline, id).
    pub(super) deadlines: BTreeSet<(Timestamp, FencingToken)>,
    pub(super) ledger: Ledger,
}

impl Queue {
    pub(super) fn new(name: QueueName) -> Self {
        Self {
            name,
            paused: false,
            relaxed: false,
            ready: Default::default(),
            scheduled: BTreeMap::new(),
            key_owners: HashMap::new(),
            parked: BTreeMap::new(),
            unique: HashMap::new(),
            settled: BTreeMap::new(),
            kept: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            ledger: Ledger::default(),
        }
    }

    pub(super) fn has_ready(&self, suspects: bool) -> bool {
        let tiers = self.ready.iter().enumerate();
        tiers
            .filter(|(tier, _)| suspects || !is_suspects(*tier))
            .any(|(_, jobs)| !jobs.is_empty())
    }

    pub(super) fn counts(&self) -> Counts {
        let settled = |state| self.settled.get(&state).map_or(0, BTreeMap::len) as u64;
        let in_tiers: usize = self.ready.iter().map(BTreeMap::len).sum();
        Counts {
            scheduled: self.scheduled.len() as u64,
            ready: (in_tiers + self.parked.len()) as u64,
            parked: self.parked.len() as u64,
            leased: self.ledger.live,
            completed: settled(JobState::Completed),
            dead: settled(JobState::Dead),
            cancelled: settled(JobState::Cancelled),
        }
    }
}

impl State {
    /// The queue of this name, which exists from now on.
    pub(super) fn queue(&mut self, name: &QueueName) -> usize {
        if let Some(&queue) = self.names.get(name) {
            return queue;
        }
        self.names.insert(name.clone(), self.queues.len());
        self.queues.push(Queue::new(name.clone()));
        self.queues.len() - 1
    }

    pub(super) fn next_seq(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    /// From here on, jobs that go to the front stand ahead of those that went there before.
    pub(super) fn begin_step(&mut self) {
        self.step = self.next_seq();
    }

    /// A job falls due: it goes to the back of its tier, or behind the others of its exclusive key.
    pub(super) fn join(&mut self, queue: usize, job: Arc<JobRecord>) {
        if let Some(key) = &job.exclusive {
            let owners = &mut self.queues[queue].key_owners;
            if *owners.entry(key.clone()).or_insert(job.id) != job.id {
                let seq = self.next_seq();
                let parked = &mut self.queues[queue].parked;
                parked.insert((key.clone(), seq), job.id);
                self.store(queue, job, Location::Parked(seq));
                return;
            }
        }
        self.put_back(queue, job);
    }

    /// Behind everything in its tier.
    pub(super) fn put_back(&mut self, queue: usize, job: Arc<JobRecord>) {
        let position = Position::back(self.next_seq());
        self.put_ready(queue, job, position);
    }

    /// Ahead of everything in its tier but what the same step put there under a smaller token.
    pub(super) fn put_front(&mut self, queue: usize, job: Arc<JobRecord>, token: FencingToken) {
        self.put_ready(queue, job, Position::front(self.step, token));
    }

    fn put_ready(&mut self, queue: usize, job: Arc<JobRecord>, position: Position) {
        let tier = tier_of(&job);
        self.queues[queue].ready[tier].insert(position, Arc::clone(&job));
        *self.wakeups.entry((queue, is_suspects(tier))).or_default() += 1;
        self.store(queue, job, Location::Ready(tier, position));
    }

    pub(super) fn put_scheduled(&mut self, queue: usize, job: Arc<JobRecord>) {
        let (run_at, seq) = (job.run_at, self.next_seq());
        let at = &mut self.queues[queue];
        let first = at.scheduled.first_key_value();
        if first.is_none_or(|((first, _), _)| run_at < *first) {
            *self.wakeups.entry((queue, false)).or_default() += 1;
        }
        at.scheduled.insert((run_at, seq), job.id);
        self.store(queue, job, Location::Scheduled(run_at, seq));
    }

    /// A job's life is over: its keys are free, and the next of its exclusive key is ready.
    pub(super) fn put_settled(
        &mut self,
        queue: usize,
        job: Arc<JobRecord>,
        state: JobState,
        keep_until: Option<Timestamp>,
        now: Timestamp,
    ) {
        self.free_unique(queue, &job);
        self.free_exclusive(queue, &job);
        let Some(keep_until) = keep_until else {
            return;
        };
        let (at, seq) = (now, self.next_seq());
        let settled = &mut self.queues[queue].settled;
        settled.entry(state).or_default().insert((at, seq), job.id);
        self.queues[queue].kept.insert((keep_until, seq, job.id));
        let location = Location::Settled {
            state,
            at,
            seq,
            keep_until,
        };
        self.store(queue, job, location);
    }

    fn store(&mut self, queue: usize, job: Arc<JobRecord>, location: Location) {
        let id = job.id;
        let stored = Stored {
            queue,
            job,
            location,
        };
        self.jobs.insert(id, stored);
    }

    /// A job with a window keeps its unique key until the window is over, whatever becomes of it.
    pub(super) fn free_unique(&mut self, queue: usize, job: &JobRecord) {
        let Some(unique) = &job.unique else { return };
        let held = &mut self.queues[queue].unique;
        if held.get(&unique.key) == Some(&(job.id, None)) {
            held.remove(&unique.key);
        }
    }

    /// If the job owns its exclusive key, the next one that waits for the key takes it over.
    pub(super) fn free_exclusive(&mut self, queue: usize, job: &JobRecord) {
        let Some(key) = &job.exclusive else { return };
        let at = &mut self.queues[queue];
        if at.key_owners.get(key) != Some(&job.id) {
            return;
        }
        at.key_owners.remove(key);
        let of_key = (key.clone(), 0)..=(key.clone(), u64::MAX);
        let next = at.parked.range(of_key).next().map(|(_, id)| *id);
        if let Some(Stored { job, .. }) = next.and_then(|id| self.take(id)) {
            self.join(queue, job);
        }
    }

    /// Takes a job out of where it is, unless it is leased. Its keys stay as they are.
    pub(super) fn take(&mut self, id: JobId) -> Option<Stored> {
        let Stored {
            queue,
            job,
            location,
        } = self.jobs.get(&id)?;
        let at = &mut self.queues[*queue];
        match *location {
            Location::Leased { .. } => return None,
            Location::Ready(tier, position) => at.ready[tier].remove(&position).map(|job| job.id),
            Location::Parked(seq) => at.parked.remove(&(job.exclusive.clone()?, seq)),
            Location::Scheduled(run_at, seq) => at.scheduled.remove(&(run_at, seq)),
            Location::Settled {
                state,
                at: settled_at,
                seq,
                keep_until,
            } => {
                at.kept.remove(&(keep_until, seq, id));
                at.settled.get_mut(&state)?.remove(&(settled_at, seq))
            }
        };
        self.jobs.remove(&id)
    }
}
