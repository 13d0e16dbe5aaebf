//! Running: call the handler of each lease.
//!
//! A slot keeps taking leases from the pool's buffer, and runs the handler of each where it stands.
//! When a handler waits for something, another slot is woken to go on, and this one attends to its
//! handler until it ends: to its stop signal and its time limits.
//!
//! A slot never touches the store. The lease's stop signal tells it that its handler must stop;
//! after the grace the handler is dropped where it stands. A handler that blocks its thread cannot
//! be dropped; it keeps its slot.
//!
//! Before: the [claimer](super::claimer) claimed the lease. After: the [settler](super::settler)
//! settles it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Poller, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tracing::Instrument as _;

use super::held::{HeldGrant, Stop};
use super::outcome::HandlerEnd;
use super::pool::{BufferedLease, Pool};
use super::settler::{self, Times};
use crate::clock::monotonic;
use crate::context::Context;
use crate::handler::{AnyHandler, Running};
use crate::observe::{Event, trace};
use crate::panics::caught;

/// A slot whose handlers all end at once would never yield to the other tasks of its thread. So it
/// yields after this many nanoseconds, or after this many leases. It does not yield after every
/// lease, because the runtime then checks all of its timers and sockets.
const GIVE_WAY_AFTER: u64 = 100_000;
const GIVE_WAY_EVERY: usize = 1_024;

/// One slot: works leases until the pool drains. It is free until it has one: a claim that is sent
/// before all slots have begun asks for all of them.
pub(crate) async fn slot(pool: Arc<Pool>) {
    while let Some(first) = pool.next().await {
        work(&pool, first).await;
        pool.has_free_slot();
    }
}

/// Works a lease, and what waits behind it, until nothing does.
async fn work(pool: &Pool, first: BufferedLease) {
    let mut turn = Turn::begin(pool);
    let mut next = Some(first);
    while let Some((held, index)) = next {
        turn.leases += 1;
        turn.now = run(pool, held, index, turn.now).await;
        if turn.is_over() {
            tokio::task::yield_now().await;
            turn = Turn::begin(pool);
        }
        next = pool.take();
    }
}

/// What a slot did since it last gave way.
struct Turn {
    since: u64,
    /// The end of one run is the start of the next, if nothing came between.
    now: u64,
    leases: usize,
}

impl Turn {
    fn begin(pool: &Pool) -> Self {
        let now = pool.clock.stamp(monotonic());
        Self {
            since: now,
            now,
            leases: 0,
        }
    }

    fn is_over(&self) -> bool {
        self.now - self.since >= GIVE_WAY_AFTER || self.leases >= GIVE_WAY_EVERY
    }
}

/// Works one lease, which a slot has taken at `now`. Returns when its handler ended.
async fn run(pool: &Pool, held: Arc<HeldGrant>, index: usize, now: u64) -> u64 {
    let lease = &held.leases[index];
    if lease.stopped().is_some() || held.is_over(now) || pool.draining() {
        // Lost or cancelled while it waited for a slot or for the answer to its claim, or too late
        // for this worker.
        let ended = if is_too_short(pool, &held) && !pool.draining() {
            HandlerEnd::TooShort(held.grant.granted)
        } else {
            HandlerEnd::Dropped
        };
        settler::hand_in(pool, held, index, ended, Times::default());
        return now;
    }
    let Some(kind) = lease.kind().map(|kind| &pool.kinds[kind]) else {
        let ended = HandlerEnd::UnknownKind;
        settler::hand_in(pool, held, index, ended, Times::default());
        return now;
    };
    held.start(index, now);
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    pool.observers.emit(|| Event::Started { queue, job, token });

    let ctx = Context::new(Arc::clone(&held), index);
    let span = tracing::info_span!(
        "run", otel.kind = "consumer", %queue, kind = %job.kind, job = %job.id, %token,
        attempt = job.attempt()
    );
    trace::link(&span, &job.headers);
    let running = handled(&*kind.handler, ctx).instrument(span);
    let ended = attend(pool, &held, index, running, now).await;
    end(pool, held, index, ended, now)
}

/// Whether the job's own term or lifetime is what was too short for the answer to the claim: with
/// the queue's it would have been worked.
fn is_too_short(pool: &Pool, held: &HeldGrant) -> bool {
    held.came_late && held.grant.granted < pool.queues[held.queue].terms.term
}

/// Runs a handler to its end.
async fn handled(handler: &dyn AnyHandler, ctx: Context) -> HandlerEnd {
    match caught(|| handler.start(ctx)) {
        Err(panic) => HandlerEnd::Panicked(panic),
        Ok(Err(failure)) => HandlerEnd::Returned(Err(failure)),
        Ok(Ok(running)) => Caught(running).await,
    }
}

/// A handler has ended. Tells when.
fn end(pool: &Pool, held: Arc<HeldGrant>, index: usize, how: HandlerEnd, started: u64) -> u64 {
    let waited = held.granted_at().since(held.leases[index].job.run_at) + held.age(started);
    let ended = pool.clock.stamp(monotonic()).max(started);
    let times = Times {
        waited: Some(waited),
        ran: Duration::from_nanos(ended - started),
    };
    pool.count(held.queue, started, ended);
    settler::hand_in(pool, held, index, how, times);
    ended
}

/// Runs a handler for a test that polls it by hand.
#[cfg(feature = "testing")]
pub(crate) async fn alone(held: Arc<HeldGrant>, index: usize) -> HandlerEnd {
    let Some(kind) = held.leases[index].kind() else {
        return HandlerEnd::UnknownKind;
    };
    let ctx = Context::new(Arc::clone(&held), index);
    handled(&*held.pool.kinds[kind].handler, ctx).await
}

/// Attends to a handler: to its stop signal and its time limits, once it waits for something.
async fn attend(
    pool: &Pool,
    held: &HeldGrant,
    index: usize,
    running: impl Future<Output = HandlerEnd>,
    started: u64,
) -> HandlerEnd {
    tokio::select! {
        biased;
        ran = running => ran,
        // A handler that is always ready uses up what the runtime lets a task do at a stretch, and
        // would leave nothing for a look at the clock.
        ran = tokio::task::unconstrained(limits(pool, held, index, started)) => ran,
    }
}

/// Resolves when the handler must be dropped. It is polled for the first time when the handler
/// waits for something.
async fn limits(pool: &Pool, held: &HeldGrant, index: usize, started: u64) -> HandlerEnd {
    pool.wake_another();
    let lease = &held.leases[index];
    let own = lease.job.options.runs.timeout;
    let timeout = own.or(pool.queues[held.queue].runs.timeout);
    let started = pool.clock.instant(started);
    let signal = lease.stop_signal();
    let mut drop_at: Option<Instant> = None;
    loop {
        let times_out = timeout.map(|timeout| started + timeout);
        let next = drop_at.into_iter().chain(times_out).min();
        tokio::select! {
            biased;
            () = signal.changed.notified() => {
                let by = match lease.stopped() {
                    None => continue,
                    Some(Stop::Drain) => pool.drop_deadline(),
                    Some(_) => monotonic() + pool.grace,
                };
                drop_at = Some(drop_at.map_or(by, |at| at.min(by)));
            }
            () = sleep_until(next) => {
                return match timeout {
                    Some(timeout) if next == times_out => HandlerEnd::TimedOut(timeout),
                    _ => HandlerEnd::Dropped,
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

/// A handler whose panics are caught: while it runs they are how it ended, and while it is dropped
/// they are logged.
struct Caught<'a>(Running<'a>);

impl Future for Caught<'_> {
    type Output = HandlerEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Poller<'_>) -> Poll<HandlerEnd> {
        match caught(|| self.0.as_mut().poll(cx)) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(result)) => Poll::Ready(HandlerEnd::Returned(result)),
            Err(panic) => Poll::Ready(HandlerEnd::Panicked(panic)),
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
