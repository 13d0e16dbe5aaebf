//! The one writer of a store handle: merges all waiting calls into one transaction.
//!
//! Calls that wait together share a commit, and so one `fsync`. Renewals go first, so that no lease
//! is lost behind a large enqueue; claims go last, so that they see what the others made ready. Who
//! sleeps for want of work is woken before it is stored, so that its claim shares the commit. A
//! call that is refused leaves its neighbours alone. If a call breaks the transaction, it is rolled
//! back and each call runs again in one of its own: only the broken one gets the error.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::fault::{Done, Fault};
use super::turn::Turn;
use super::tx::{Tx, Wakeup};
use crate::clock::{Clock, Timestamp, monotonic};
use crate::error::{Error, Result, Verb};
use crate::job::{NewJob, QueueName};
use crate::lease::Verdict;
use crate::rules::issue::WhenBehind;
use crate::store::codec::Kinds;
use crate::store::wake::Wakers;
use crate::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneKeys, PruneRequest, ReapRequest, Renewal, SessionId,
    SettleRequest,
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
const LOG_BYTES: u64 = 128 * 1024 * 1024;

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
}

impl Call {
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
            let room = BATCH_CALLS.saturating_sub(waiting.len());
            waiting.extend(calls.try_iter().take(room));
            let called = call_in(&mut waiting, calls, wakers);
            waiting.sort_by_key(Call::rank);
            let works: Vec<&Work> = waiting.iter().map(|call| &call.work).collect();
            let (answers, mut wakeups) = self.run(&works);
            wakeups.retain_mut(|(queue, suspect, jobs)| {
                let awake = called.iter().filter(|(name, _)| name == queue && !*suspect);
                *jobs = jobs.saturating_sub(awake.map(|(_, woken)| woken).sum());
                *jobs > 0
            });
            // Before the answers: who hears one and then goes to sleep must not be woken by its own
            // call.
            wake_sleepers(wakers, wakeups);
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

    /// Runs the first of the calls, as many as fit into one transaction.
    pub(super) fn run(&mut self, works: &[&Work]) -> Ran {
        match self.transaction(works) {
            Ok(ran) => ran,
            Err(Unrun::Broken(_)) if works.len() > 1 => self.run_apart(works),
            Err(Unrun::Broken(error) | Unrun::Whole(error)) => {
                let answers = works.iter().map(|_| Err(error.duplicate()));
                (answers.collect(), Vec::new())
            }
        }
    }

    fn run_apart(&mut self, works: &[&Work]) -> Ran {
        let mut answers = Vec::with_capacity(works.len());
        let mut wakeups = Vec::new();
        for work in works {
            match self.transaction(&[*work]) {
                Ok((answer, more)) => {
                    answers.extend(answer);
                    wakeups.extend(more);
                }
                Err(Unrun::Broken(error) | Unrun::Whole(error)) => answers.push(Err(error)),
            }
        }
        (answers, wakeups)
    }

    fn transaction(&mut self, works: &[&Work]) -> Result<Ran, Unrun> {
        self.turn
            .begin(&self.db, self.patience)
            .map_err(|fault| Unrun::Whole(fault.into_error()))?;
        let ran = self.apply_all(works);
        let ran = match ran {
            Ok(ran) => match commit(&self.db) {
                Ok(()) => {
                    self.commits.fetch_add(1, Ordering::Relaxed);
                    Ok(ran)
                }
                Err(error) => Err(Unrun::Whole(Fault::from(error).into_error())),
            },
            Err(fault) => Err(Unrun::Broken(fault.into_error())),
        };
        if ran.is_err() && !self.db.is_autocommit() {
            // The engine rolls back by itself when the connection goes.
            let _ = self.db.execute_batch("ROLLBACK");
        }
        self.turn.done(&self.db);
        ran
    }

    fn apply_all(&mut self, works: &[&Work]) -> Done<Ran> {
        let started = monotonic();
        let mut tx = Tx::new(&self.db, &self.namespace, &mut self.kinds);
        let mut answers = Vec::with_capacity(works.len());
        for work in works {
            if !answers.is_empty() && monotonic() - started > BATCH_TIME {
                break;
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
        let mut log = self.path.as_os_str().to_owned();
        log.push("-wal");
        if std::fs::metadata(log).is_ok_and(|file| file.len() > LOG_BYTES) {
            // If a reader is in the way, the next time will do.
            let _ = self
                .db
                .query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()));
        }
    }
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

/// Wakes those who sleep until there is what a transaction made ready.
pub(super) fn wake_sleepers(wakers: &Wakers, wakeups: Vec<Wakeup>) {
    for (queue, suspect, jobs) in wakeups {
        wakers.wake(&queue, suspect, jobs);
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

fn commit(db: &Connection) -> rusqlite::Result<()> {
    db.prepare_cached("COMMIT")?.execute([]).map(|_| ())
}

/// Names the verb and the store in an error.
pub(super) fn at(verb: Verb, error: Error) -> Error {
    error.during(verb).in_store("sqlite")
}
