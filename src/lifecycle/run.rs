//! Running: one call of the handler.
//!
//! A slot keeps taking leases. It polls each handler once where it stands; most end there, and cost
//! no task and no timer. When a handler waits for something, another slot is woken to go on.
//!
//! `run` never touches the store. It is told to stop by the lease's bell: after the grace the
//! handler is dropped where it stands. A handler that blocks its thread cannot be dropped; it keeps
//! its slot.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context as Poller, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tracing::Instrument as _;

use super::fence::{Held, HeldLease, Stop};
use super::pool::{Pool, Run};
use super::settle::{self, Times};
use crate::clock::monotonic;
use crate::context::Context;
use crate::handler::{Failure, Running};
use crate::observe::{Event, trace};

/// Handlers that end at once could keep a slot from ever giving way to the other tasks of its
/// thread: it does so after this long, and no later than after this many. To give way costs a look
/// at all timers and sockets of the runtime.
const GIVE_WAY_AFTER: u64 = 100_000; // nanoseconds
const GIVE_WAY_EVERY: usize = 1_024;

/// How a run ended.
pub(crate) enum Ran {
    /// The handler returned.
    Returned(Result<(), Failure>),
    /// The handler panicked.
    Panicked(String),
    /// The handler took longer than this.
    TimedOut(Duration),
    /// The handler was told to stop and did not, so it was dropped.
    Dropped,
    /// No handler knows the job's kind.
    UnknownKind,
}

/// One slot: works leases until the pool drains.
pub(crate) async fn slot(pool: Arc<Pool>, number: usize) {
    pool.busy.fetch_add(1, Ordering::AcqRel);
    let mut streak: usize = 0;
    let clock = || pool.clock.stamp(monotonic());
    let mut since = clock();
    // The end of one run is the start of the next, if nothing came between.
    let mut now = since;
    let mut own: Option<Arc<Run>> = None;
    loop {
        let mut next = pool.take(&mut own);
        if next.is_none() {
            next = pool.next(&mut own).await;
            (since, streak) = (clock(), 0);
            now = since;
        }
        let Some((held, index)) = own.as_ref().zip(next) else {
            break;
        };
        now = work(&pool, held, index, number, now).await;
        streak += 1;
        if now - since >= GIVE_WAY_AFTER || streak == GIVE_WAY_EVERY {
            tokio::task::yield_now().await;
            (since, streak) = (clock(), 0);
            now = since;
        }
    }
    pool.busy.fetch_sub(1, Ordering::AcqRel);
}

/// Works one lease from a moment of the pool's clock on, and tells when it was done.
async fn work(pool: &Pool, held: &Arc<Run>, index: usize, slot: usize, started: u64) -> u64 {
    let lease = &held.leases[index];
    if lease.stopped().is_some() || held.is_over(started) || pool.draining() {
        // Lost or cancelled while it waited for a slot or for the answer to its claim, or too late
        // for this worker.
        settle::hand_in(pool, held, index, Ran::Dropped, slot, Times::default());
        return started;
    }
    let Some(kind) = lease.kind.map(|kind| &pool.kinds[kind]) else {
        let (queue, job) = (&held.grant.queue, &*lease.job);
        pool.observers.emit(|| Event::UnknownKind { queue, job });
        settle::hand_in(pool, held, index, Ran::UnknownKind, slot, Times::default());
        return started;
    };
    held.start(index, started);
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    pool.observers.emit(|| Event::Started { queue, job, token });

    let ctx = Context::new(Arc::clone(held), index);
    let span = tracing::info_span!(
        "run", otel.kind = "consumer", %queue, kind = %job.kind, job = %job.id, %token,
        attempt = job.attempt()
    );
    trace::link(&span, &job.headers);
    let ran = match caught(|| span.in_scope(|| kind.handler.start(ctx))) {
        Err(panic) => Ran::Panicked(panic),
        Ok(Err(failure)) => Ran::Returned(Err(failure)),
        Ok(Ok(running)) => {
            let running = Caught(running).instrument(span);
            let started = pool.clock.instant(started);
            attend(pool, held, index, running, started).await
        }
    };

    let waited = held.granted_at().since(job.run_at) + held.age(started);
    let ended = pool.clock.stamp(monotonic()).max(started);
    let times = Times {
        waited: Some(waited),
        ran: Duration::from_nanos(ended - started),
    };
    settle::hand_in(pool, held, index, ran, slot, times);
    ended
}

/// Runs a handler that nobody attends to: it is polled by hand.
#[cfg(feature = "testing")]
pub(crate) async fn alone(held: Arc<Run>, index: usize) -> Ran {
    let Some(kind) = held.leases[index].kind else {
        return Ran::UnknownKind;
    };
    let ctx = Context::new(Arc::clone(&held), index);
    match caught(|| held.pool.kinds[kind].handler.start(ctx)) {
        Err(panic) => Ran::Panicked(panic),
        Ok(Err(failure)) => Ran::Returned(Err(failure)),
        Ok(Ok(running)) => Caught(running).await,
    }
}

/// Polls the handler once, and attends to its bell and its clock only if it did not end there.
async fn attend(
    pool: &Pool,
    held: &Held,
    index: usize,
    running: impl Future<Output = Ran>,
    started: Instant,
) -> Ran {
    let lease = &held.leases[index];
    // The span's wrapper is not `Unpin`; the handler stays where it is from here on.
    let mut running = std::pin::pin!(running);
    let first = std::future::poll_fn(|cx| Poll::Ready(running.as_mut().poll(cx))).await;
    if let Poll::Ready(ran) = first {
        return ran;
    }
    pool.wake_another();
    let timeout = lease
        .job
        .options
        .timeout
        .or(pool.queues[held.queue].timeout);
    tokio::select! {
        biased;
        ran = running.as_mut() => ran,
        // A handler that is always ready uses up what the runtime lets a task do at a stretch, and
        // would leave nothing for a look at the clock.
        ran = tokio::task::unconstrained(limits(pool, lease, started, timeout)) => ran,
    }
}

/// Resolves when the handler must be dropped.
async fn limits(
    pool: &Pool,
    lease: &HeldLease,
    started: Instant,
    timeout: Option<Duration>,
) -> Ran {
    let bell = lease.bell();
    let mut drop_at: Option<Instant> = None;
    loop {
        let times_out = timeout.map(|timeout| started + timeout);
        let next = drop_at.into_iter().chain(times_out).min();
        tokio::select! {
            biased;
            () = bell.nudge.notified() => {
                let by = match lease.stopped() {
                    None => continue,
                    Some(Stop::Drain) => pool.drain_deadline(),
                    Some(_) => monotonic() + pool.grace,
                };
                drop_at = Some(drop_at.map_or(by, |at| at.min(by)));
            }
            () = sleep_until(next) => {
                return match timeout {
                    Some(timeout) if next == times_out => Ran::TimedOut(timeout),
                    _ => Ran::Dropped,
                };
            }
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// A handler whose panics are answers, and go no further when it is dropped.
struct Caught<'a>(Running<'a>);

impl Future for Caught<'_> {
    type Output = Ran;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Poller<'_>) -> Poll<Ran> {
        match caught(|| self.0.as_mut().poll(cx)) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(result)) => Poll::Ready(Ran::Returned(result)),
            Err(panic) => Poll::Ready(Ran::Panicked(panic)),
        }
    }
}

impl Drop for Caught<'_> {
    fn drop(&mut self) {
        let running = std::mem::replace(&mut self.0, Box::pin(std::future::pending()));
        if let Err(panic) = caught(|| drop(running)) {
            tracing::warn!(panic, "a handler panicked as it was dropped");
        }
    }
}

/// Calls what others wrote: a panic of theirs ends no part of the pool.
pub(crate) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|panic| {
        let text = message(&*panic);
        // What was thrown can throw in its turn when it is dropped.
        if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(another);
        }
        text
    })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("without a message"))
}
