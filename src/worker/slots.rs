//! Running: call the handler of each lease.
//!
//! A slot keeps taking leases from the pool's buffer. It polls each handler once where it stands;
//! most end there, and cost no task and no timer. When a handler waits for something, another slot
//! is woken to go on, and this one attends to the handler until it ends.
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
use tracing::instrument::Instrumented;

use super::held::{HeldGrant, HeldLease, Stop};
use super::outcome::HandlerEnd;
use super::pool::{BufferedLease, Pool};
use super::settler::{self, Times};
use crate::clock::monotonic;
use crate::context::Context;
use crate::handler::{AnyHandler, Running};
use crate::observe::{Event, trace};
use crate::panics::caught;

/// Handlers that end at once could keep a slot from ever giving way to the other tasks of its
/// thread. So it gives way after so many nanoseconds, or after so many leases. It does not after
/// each lease, because the runtime then looks at all its timers and sockets.
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
    loop {
        let pause = std::future::poll_fn(|cx| Poll::Ready(go_on(pool, next.take(), &mut turn, cx)));
        match pause.await {
            Pause::Nothing => return,
            Pause::GiveWay => {
                tokio::task::yield_now().await;
                turn = Turn::begin(pool);
            }
            Pause::Waits(handler) => {
                let StartedHandler {
                    held,
                    index,
                    started,
                    running,
                } = handler;
                let ended = attend(pool, &held, index, running, pool.clock.instant(started)).await;
                turn.now = end(pool, held, index, ended, started);
            }
        }
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

/// Why a slot does not go on.
enum Pause<'a> {
    /// No lease waits.
    Nothing,
    /// It has had its turn.
    GiveWay,
    /// A handler waits for something.
    Waits(StartedHandler<'a>),
}

/// A handler that did not end where it was first polled.
struct StartedHandler<'a> {
    held: Arc<HeldGrant>,
    index: usize,
    started: u64,
    running: Instrumented<Caught<'a>>,
}

/// Works lease after lease, as long as each handler ends where it is first polled.
fn go_on<'a>(
    pool: &'a Pool,
    mut next: Option<BufferedLease>,
    turn: &mut Turn,
    cx: &mut Poller<'_>,
) -> Pause<'a> {
    while !turn.is_over() {
        let Some((held, index)) = next.take().or_else(|| pool.take()) else {
            return Pause::Nothing;
        };
        turn.leases += 1;
        let Some(begun) = begin(pool, &held, index, turn.now, cx) else {
            continue;
        };
        match begun {
            Ok(ended) => turn.now = end(pool, held, index, ended, turn.now),
            Err(running) => {
                return Pause::Waits(StartedHandler {
                    held,
                    index,
                    started: turn.now,
                    running,
                });
            }
        }
    }
    Pause::GiveWay
}

/// Whether the job's own term or lifetime is what was too short for the answer to the claim: with
/// the queue's it would have been worked.
fn is_too_short(pool: &Pool, held: &HeldGrant) -> bool {
    held.came_late && held.grant.granted < pool.queues[held.queue].terms.term
}

/// Begins to work a lease, and polls its handler once. None: it was handed in without one.
fn begin<'a>(
    pool: &'a Pool,
    held: &Arc<HeldGrant>,
    index: usize,
    now: u64,
    cx: &mut Poller<'_>,
) -> Option<Result<HandlerEnd, Instrumented<Caught<'a>>>> {
    let lease = &held.leases[index];
    if lease.stopped().is_some() || held.is_over(now) || pool.draining() {
        // Lost or cancelled while it waited for a slot or for the answer to its claim, or too late
        // for this worker.
        let ended = if is_too_short(pool, held) && !pool.draining() {
            HandlerEnd::TooShort(held.grant.granted)
        } else {
            HandlerEnd::Dropped
        };
        settler::hand_in(pool, Arc::clone(held), index, ended, Times::default());
        return None;
    }
    let Some(kind) = lease.kind().map(|kind| &pool.kinds[kind]) else {
        let ended = HandlerEnd::UnknownKind;
        settler::hand_in(pool, Arc::clone(held), index, ended, Times::default());
        return None;
    };
    held.start(index, now);
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    pool.observers.emit(|| Event::Started { queue, job, token });

    let ctx = Context::new(Arc::clone(held), index);
    let span = tracing::info_span!(
        "run", otel.kind = "consumer", %queue, kind = %job.kind, job = %job.id, %token,
        attempt = job.attempt()
    );
    trace::link(&span, &job.headers);
    let first = span.in_scope(|| poll_first(&*kind.handler, ctx, cx));
    Some(first.map_err(|running| Caught(running).instrument(span)))
}

/// Starts a handler and polls it once. Returns it if it did not end.
fn poll_first<'a>(
    handler: &'a dyn AnyHandler,
    ctx: Context,
    cx: &mut Poller<'_>,
) -> Result<HandlerEnd, Running<'a>> {
    // Outside of what is caught: a panic must not drop it on its way.
    let (mut running, mut ran) = (None, None);
    let caught = caught(|| match handler.start(ctx) {
        Err(failure) => ran = Some(HandlerEnd::Returned(Err(failure))),
        Ok(started) => {
            let started: &mut Running<'a> = running.insert(started);
            if let Poll::Ready(result) = started.as_mut().poll(cx) {
                ran = Some(HandlerEnd::Returned(result));
                running = None;
            }
        }
    });
    match (caught, ran, running) {
        (Ok(()), None, Some(running)) => Err(running),
        (Ok(()), Some(ran), _) => Ok(ran),
        (Err(panic), Some(ran), _) => {
            tracing::warn!(panic, "a handler panicked as it was dropped");
            Ok(ran)
        }
        (Err(panic), None, running) => {
            drop(running.map(Caught));
            Ok(HandlerEnd::Panicked(panic))
        }
        (Ok(()), None, None) => unreachable!("it ended, or it is there"),
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
    match caught(|| held.pool.kinds[kind].handler.start(ctx)) {
        Err(panic) => HandlerEnd::Panicked(panic),
        Ok(Err(failure)) => HandlerEnd::Returned(Err(failure)),
        Ok(Ok(running)) => Caught(running).await,
    }
}

/// Attends to a handler that waits for something: to its stop signal and its time limits.
async fn attend(
    pool: &Pool,
    held: &HeldGrant,
    index: usize,
    running: impl Future<Output = HandlerEnd>,
    started: Instant,
) -> HandlerEnd {
    let lease = &held.leases[index];
    // The span's wrapper is not `Unpin`; the handler stays where it is from here on.
    let mut running = std::pin::pin!(running);
    pool.wake_another();
    let own = lease.job.options.runs.timeout;
    let timeout = own.or(pool.queues[held.queue].runs.timeout);
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
) -> HandlerEnd {
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
