//! The one writer of a store handle: merges all waiting calls into one transaction.
//!
//! Calls that wait together share a commit, and so one `fsync`. Renewals go first, so that no lease
//! is lost behind a large enqueue; claims go last, so that they see what the others made ready. A
//! claimer that sleeps is woken before its job is committed, so that its claim shares the commit. A
//! call that is refused does not affect its neighbours. If a call breaks the transaction, that is
//! rolled back and each call runs again in one of its own: only the broken one gets the error.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::fault::{Done, Fault};
use super::file::{Reserve, SameFile, no_room};
use super::migrate::{self, beside};
use super::sleepers::Sleepers;
use super::turn::Turn;
use super::tx::{Tx, Wakeup};
use crate::clock::{Clock, Timestamp, monotonic};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::job::{NewJob, QueueName};
use crate::lease::Verdict;
use crate::rules::issue::WhenBehind;
use crate::store::codec::Kinds;
use crate::store::wake::Wakers;
use crate::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneKeys, PruneRequest, ReapRequest, Renewal, RequestId,
    SessionId, SettleRequest,
};

/// Calls in one transaction.
const BATCH_CALLS: usize = 1_024;
/// Work in one transaction: what is over waits for the next, and other processes have their turn.
const BATCH_TIME: Duration = Duration::from_millis(20);
/// How long jobs that are about to be stored wait for the claim of a sleeper: far less than a
/// commit.
const CALL_IN: Duration = Duration::from_micros(200);
/// How often the log's size is looked at, in commits, and from which size on it is cut back.
const LOG_EVERY: u64 = 64;
pub(super) const LOG_BYTES: u64 = 64 * 1024 * 1024;

/// What a call wants.
pub(super) enum Work {
    OpenSession,
    Enqueue(EnqueueRequest),
    Claim(ClaimRequest),
    Renew(Vec<Beat>),
    Settle(SettleRequest),
    Checkpoint(CheckpointRequest),
    Reap(ReapRequest),
    Control(ControlRequest),
    Prune(PruneRequest),
    PruneKeys(PruneKeys),
}

/// What it gets.
pub(super) enum Reply {
    Opened(SessionId),
    Enqueued(Vec<Enqueued>),
    Claimed(Claimed),
    Renewed(Vec<Renewal>),
    Settled(Vec<Verdict>),
    Checkpointed(Vec<Checkpointed>),
    Expired(Vec<Expiry>),
    Controlled(Controlled),
    /// How many jobs, and whether keys may be left.
    Pruned(u64, bool),
}

/// A call that waits for the writer.
pub(super) struct Call {
    pub(super) work: Work,
    /// It waited for a transaction that had no room for it.
    pub(super) left_over: bool,
    pub(super) reply: oneshot::Sender<Result<Reply>>,
}

impl Work {
    pub(super) fn verb(&self) -> Verb {
        match self {
            Self::OpenSession => Verb::Open,
            Self::Enqueue(_) => Verb::Enqueue,
            Self::Claim(_) => Verb::Claim,
            Self::Renew(_) => Verb::Renew,
            Self::Settle(_) => Verb::Settle,
            Self::Checkpoint(_) => Verb::Checkpoint,
            Self::Reap(_) => Verb::Reap,
            Self::Control(_) => Verb::Control,
            Self::Prune(_) | Self::PruneKeys(_) => Verb::Prune,
        }
    }

    /// Whether it may have what is in reserve on a full disk.
    fn ends_work(&self) -> bool {
        matches!(self, Self::Renew(_) | Self::Settle(_) | Self::Checkpoint(_))
    }

    /// Whether it would take from that what others need.
    fn takes_room(&self) -> bool {
        matches!(self, Self::Enqueue(_) | Self::Claim(_))
    }
}

impl Call {
    fn is_renewal(&self) -> bool {
        matches!(self.work, Work::Renew(_))
    }

    /// Where it stands among those that wait together.
    fn rank(&self) -> u8 {
        match &self.work {
            Work::Renew(_) => 0,
            // Otherwise a steady stream of others could keep a claim waiting for ever.
            _ if self.left_over => 1,
            Work::OpenSession | Work::Settle(_) | Work::Checkpoint(_) => 2,
            Work::Enqueue(_)
            | Work::Reap(_)
            | Work::Control(_)
            | Work::Prune(_)
            | Work::PruneKeys(_) => 3,
            Work::Claim(_) => 4,
        }
    }
}

pub(super) struct Writer {
    pub(super) db: Connection,
    pub(super) turn: Turn,
    pub(super) path: PathBuf,
    pub(super) namespace: String,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) when_behind: WhenBehind,
    pub(super) patience: Duration,
    pub(super) commits: Arc<AtomicU64>,
    pub(super) sleepers: Sleepers,
    pub(super) file: SameFile,
    /// None: the file is not for keeps.
    pub(super) reserve: Option<Reserve>,
    /// Whether this handle has yet to raise the issuer's floor: there was no room to.
    pub(super) unprepared: bool,
    /// The last claim of each lane that was answered with nothing and not written down: a repeat
    /// gets the same answer. A lane belongs to one process, so it is enough to know it here.
    pub(super) vain: HashMap<(SessionId, u32), RequestId>,
    pub(super) kinds: Kinds,
}

/// Answers for the first calls of a batch, and whom to wake.
pub(super) type Ran = (Vec<Result<Reply>>, Vec<Wakeup>);

/// Why a transaction did not happen.
enum Unrun {
    /// A call broke it: nothing was applied.
    Broken(Error),
    /// It could not begin, or its end is not known.
    Whole(Error),
}

impl Writer {
    /// Serves calls until the last sender is gone.
    pub(super) fn serve(mut self, calls: &Receiver<Call>, wakers: &Wakers) {
        let mut waiting: Vec<Call> = Vec::new();
        loop {
            if waiting.is_empty() {
                let Ok(call) = calls.recv() else { break };
                waiting.push(call);
            }
            gather(&mut waiting, calls);
            let called = call_in(&mut waiting, calls, wakers);
            if self.is_in_vain(&mut waiting) {
                continue;
            }
            // What comes while we wait for the turn shares it, and a renewal hastens it.
            let begun = self.turn.begin(&self.db, self.patience, || {
                gather(&mut waiting, calls);
                waiting.iter().any(Call::is_renewal)
            });
            waiting.sort_by_key(Call::rank);
            let works: Vec<&Work> = waiting.iter().map(|call| &call.work).collect();
            let (answers, mut wakeups) = self.run_begun(begun, &works);
            wakeups.retain_mut(|(queue, suspect, jobs)| {
                let awake = called.iter().filter(|(name, _)| name == queue && !*suspect);
                *jobs = jobs.saturating_sub(awake.map(|(_, woken)| woken).sum());
                *jobs > 0
            });
            // Before the answers: who hears one and then goes to sleep must not be woken by its own
            // call.
            wake_sleepers(wakers, &self.sleepers, wakeups);
            let answered = answers.len();
            for (call, answer) in waiting.drain(..answered).zip(answers) {
                let verb = call.work.verb();
                // Who no longer listens treats the call as unknown.
                let _ = call.reply.send(answer.map_err(|error| at(verb, error)));
            }
            for call in &mut waiting {
                call.left_over = true;
            }
            self.trim_log();
        }
    }

    /// Answers claims that would find nothing without taking a turn, if nothing else waits: a crowd
    /// that has no work must not stand in the way of those who have.
    fn is_in_vain(&mut self, waiting: &mut Vec<Call>) -> bool {
        if !waiting
            .iter()
            .all(|call| matches!(call.work, Work::Claim(_)))
        {
            return false;
        }
        // Whatever goes wrong here goes wrong again in the turn, where it is told.
        if self.file.check().is_err() || self.db.execute_batch("BEGIN").is_err() {
            return false;
        }
        let now = self.clock.now();
        let mut tx = Tx::new(&self.db, &self.namespace, &mut self.kinds);
        waiting.retain_mut(|call| {
            let Work::Claim(request) = &call.work else {
                return true;
            };
            let id = request.request;
            let lane = (id.session, id.lane);
            let claimed = match self.vain.get(&lane) {
                Some(last) if *last == id => Claimed::default(),
                Some(last) if last.seq > id.seq => return true,
                _ => match tx.claim_in_vain(request, now) {
                    Ok(Some(claimed)) => claimed,
                    _ => return true,
                },
            };
            self.vain.insert(lane, id);
            let (unheard, _) = oneshot::channel();
            let reply = std::mem::replace(&mut call.reply, unheard);
            // Who no longer listens needs no answer.
            let _ = reply.send(Ok(Reply::Claimed(claimed)));
            false
        });
        drop(tx);
        // A read leaves nothing behind.
        let _ = self.db.execute_batch("COMMIT");
        waiting.is_empty()
    }

    /// Runs the first of the calls, as many as fit into one transaction.
    pub(super) fn run(&mut self, works: &[&Work]) -> Ran {
        let begun = self.turn.begin(&self.db, self.patience, || false);
        self.run_begun(begun, works)
    }

    fn run_begun(&mut self, begun: Done<()>, works: &[&Work]) -> Ran {
        let error = match self.transaction(begun, works) {
            Ok(ran) => return ran,
            Err(Unrun::Broken(error)) if works.len() == 1 && !is_full(&error) => error,
            Err(Unrun::Broken(_)) => return self.run_apart(works),
            Err(Unrun::Whole(error)) => error,
        };
        let answers = works.iter().map(|_| Err(error.duplicate()));
        (answers.collect(), Vec::new())
    }

    fn run_apart(&mut self, works: &[&Work]) -> Ran {
        let mut answers = Vec::with_capacity(works.len());
        let mut wakeups = Vec::new();
        for work in works {
            let mut ran = self.run_alone(work);
            if let Err(Unrun::Broken(error)) = &ran
                && is_full(error)
                && work.ends_work()
                && self.make_room()
            {
                ran = self.run_alone(work);
            }
            match ran {
                Ok((answer, more)) => {
                    answers.extend(answer);
                    wakeups.extend(more);
                }
                Err(Unrun::Broken(error) | Unrun::Whole(error)) => answers.push(Err(error)),
            }
        }
        (answers, wakeups)
    }

    fn run_alone(&mut self, work: &Work) -> Result<Ran, Unrun> {
        let begun = self.turn.begin(&self.db, self.patience, || false);
        self.transaction(begun, &[work])
    }

    /// Gives up what is in reserve on a full disk, and has the log begin anew if it can.
    fn make_room(&mut self) -> bool {
        let given_up = self.reserve.as_mut().is_some_and(Reserve::give_up);
        if given_up {
            tracing::warn!("the disk is full: running work can end, and no new work begins");
        }
        let log = self
            .db
            .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0));
        given_up || log == Ok(0)
    }

    fn transaction(&mut self, begun: Done<()>, works: &[&Work]) -> Result<Ran, Unrun> {
        begun.map_err(|fault| Unrun::Whole(fault.into_error()))?;
        let ran = self.file.check().map_err(Unrun::Whole).and_then(|()| {
            let ran = self.apply_all(works);
            ran.map_err(|fault| Unrun::Broken(fault.into_error()))
        });
        let ran = ran.and_then(|ran| match commit(&self.db) {
            Ok(()) => {
                self.commits.fetch_add(1, Ordering::Relaxed);
                self.unprepared = false;
                Ok(ran)
            }
            Err(error) => Err(match Fault::from(error).into_error() {
                // One that is certain is as if a call had broken the transaction.
                full if is_full(&full) => Unrun::Broken(full),
                error => Unrun::Whole(error),
            }),
        });
        if ran.is_err() && !self.db.is_autocommit() {
            // The engine rolls back by itself when the connection goes.
            let _ = self.db.execute_batch("ROLLBACK");
        }
        ran
    }

    fn apply_all(&mut self, works: &[&Work]) -> Done<Ran> {
        let started = monotonic();
        if self.unprepared {
            migrate::migrate(&self.db, || self.clock.now())?;
        }
        let is_full = self.reserve.as_mut().is_some_and(Reserve::is_missing);
        let mut tx = Tx::new(&self.db, &self.namespace, &mut self.kinds);
        let mut answers = Vec::with_capacity(works.len());
        for work in works {
            if !answers.is_empty() && monotonic() - started > BATCH_TIME {
                break;
            }
            if is_full && work.takes_room() {
                answers.push(Err(no_room()));
                continue;
            }
            if let Work::Claim(request) = work
                && let id = request.request
                && let Some(last) = self.vain.get(&(id.session, id.lane))
                && last.seq >= id.seq
            {
                tx.remember_vain(*last)?;
            }
            // The time is asked under the write lock, so that its order is the order of the steps.
            match apply(&mut tx, work, self.when_behind, self.clock.now()) {
                Ok(reply) => answers.push(Ok(reply)),
                Err(Fault::Refused(error)) => answers.push(Err(error)),
                Err(broken) => return Err(broken),
            }
        }
        Ok((answers, tx.finish()?))
    }

    /// Cuts a log back that others kept from being reused: under steady load from several
    /// processes there is always a last page that is not yet in the file.
    fn trim_log(&mut self) {
        if !self
            .commits
            .load(Ordering::Relaxed)
            .is_multiple_of(LOG_EVERY)
        {
            return;
        }
        if std::fs::metadata(beside(&self.path, "-wal")).is_ok_and(|file| file.len() > LOG_BYTES) {
            // If a reader is in the way, the next time will do.
            let _ = self
                .db
                .query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()));
        }
    }
}

/// Takes in the calls that have come meanwhile.
fn gather(waiting: &mut Vec<Call>, calls: &Receiver<Call>) {
    let room = BATCH_CALLS.saturating_sub(waiting.len());
    waiting.extend(calls.try_iter().take(room));
}

/// Wakes the sleepers for whom jobs are about to be stored, and gives one a moment to claim in the
/// same transaction. Tells how many were woken, by queue.
fn call_in(
    waiting: &mut Vec<Call>,
    calls: &Receiver<Call>,
    wakers: &Wakers,
) -> Vec<(QueueName, usize)> {
    let is_claim = |call: &Call| matches!(call.work, Work::Claim(_));
    if waiting.iter().any(is_claim) || wakers.is_empty() {
        return Vec::new();
    }
    let mut called: Vec<(QueueName, usize)> = Vec::new();
    for call in waiting.iter() {
        let Work::Enqueue(request) = &call.work else {
            continue;
        };
        let due = |(_, job): &&(_, NewJob)| job.delay.is_zero();
        let jobs = request.jobs.iter().filter(due).map(|(_, job)| job);
        for queue in jobs.map(|job| &job.queue) {
            let woken = wakers.wake(queue, false, 1);
            if woken == 0 {
                break;
            }
            called.push((queue.clone(), woken));
        }
    }
    let until = monotonic() + CALL_IN;
    while !called.is_empty() && waiting.len() < BATCH_CALLS && !waiting.iter().any(is_claim) {
        let left = until.saturating_duration_since(monotonic());
        let Ok(call) = calls.recv_timeout(left) else {
            break;
        };
        waiting.push(call);
    }
    called
}

/// Wakes those who sleep until there is what a transaction made ready: here first, and for what is
/// left in other processes.
pub(super) fn wake_sleepers(wakers: &Wakers, sleepers: &Sleepers, wakeups: Vec<Wakeup>) {
    for (queue, suspect, jobs) in wakeups {
        let left = jobs - wakers.wake(&queue, suspect, jobs);
        if left > 0 {
            sleepers.wake(&queue, left);
        }
    }
}

fn apply(tx: &mut Tx<'_>, work: &Work, when_behind: WhenBehind, now: Timestamp) -> Done<Reply> {
    Ok(match work {
        Work::OpenSession => Reply::Opened(tx.open_session(now)?),
        Work::Enqueue(request) => Reply::Enqueued(tx.enqueue(request, now)?),
        Work::Claim(request) => Reply::Claimed(tx.claim(request, when_behind, now)?),
        Work::Renew(beats) => {
            let renewals = beats.iter().map(|beat| tx.renew(beat, now));
            Reply::Renewed(renewals.collect::<Done<_>>()?)
        }
        Work::Settle(request) => Reply::Settled(tx.settle(request, now)?),
        Work::Checkpoint(request) => Reply::Checkpointed(tx.checkpoint(request, now)?),
        Work::Reap(request) => Reply::Expired(tx.reap(request, now)?),
        Work::Control(request) => Reply::Controlled(tx.control(request, now)?),
        Work::Prune(request) => {
            let (jobs, more) = tx.prune(request, now)?;
            Reply::Pruned(jobs, more)
        }
        Work::PruneKeys(keys) => Reply::Pruned(0, tx.prune_keys(keys, now)?),
    })
}

fn is_full(error: &Error) -> bool {
    error.kind() == ErrorKind::Full
}

fn commit(db: &Connection) -> rusqlite::Result<()> {
    db.prepare_cached("COMMIT")?.execute([]).map(|_| ())
}

/// Names the verb and the store in an error.
pub(super) fn at(verb: Verb, error: Error) -> Error {
    error.during(verb).in_store("sqlite")
}
