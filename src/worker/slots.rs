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
use std::task::{Context as Poller, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tracing::Instrument as _;
use tracing::instrument::Instrumented;

use super::held::{Held, HeldLease, Stop};
use super::pool::{Pool, Run};
use super::settler::{self, Tally, Times};
use crate::clock::monotonic;
use crate::context::Context;
use crate::handler::{AnyHandler, Failure, Running};
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
    /// The lease was over before it arrived, as short as this.
    TooShort(Duration),
    /// No handler knows the job's kind.
    UnknownKind,
}

/// One slot: works leases until the pool drains. It is free until it has one: a claim that is sent
/// before all slots have begun asks for all of them.
pub(crate) async fn slot(pool: Arc<Pool>, number: usize) {
    let mut done = Tally::of(number);
    let mut own: Option<Arc<Run>> = None;
    while let Some(first) = pool.next(&mut own).await {
        work(&pool, &mut own, first, &mut done).await;
        pool.has_free_slot();
    }
}

/// Works a lease, and what waits behind it, until nothing does.
async fn work(pool: &Pool, own: &mut Option<Arc<Run>>, first: usize, done: &mut Tally) {
    let mut turn = Turn::begin(pool);
    let mut next = Some(first);
    loop {
        let pause = std::future::poll_fn(|cx| {
            let pause = go_on(pool, own, next.take(), &mut turn, done, cx);
            done.tell(&pool.outbox);
            Poll::Ready(pause)
        });
        match pause.await {
            Pause::Nothing => return,
            Pause::GiveWay => {
                tokio::task::yield_now().await;
                turn = Turn::begin(pool);
            }
            Pause::Waits(handler) => {
                let Handler {
                    held,
                    index,
                    started,
                    running,
                } = handler;
                let ran = attend(pool, &held, index, running, pool.clock.instant(started)).await;
                turn.now = end(pool, &held, index, ran, started, done);
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
    Waits(Handler<'a>),
}

/// A handler that did not end where it was first polled.
struct Handler<'a> {
    held: Arc<Run>,
    index: usize,
    started: u64,
    running: Instrumented<Caught<'a>>,
}

/// Works lease after lease, as long as each handler ends where it is first polled.
fn go_on<'a>(
    pool: &'a Pool,
    own: &mut Option<Arc<Run>>,
    mut next: Option<usize>,
    turn: &mut Turn,
    done: &mut Tally,
    cx: &mut Poller<'_>,
) -> Pause<'a> {
    while !turn.is_over() {
        let next = next.take().or_else(|| pool.take(own));
        let Some((held, index)) = own.as_ref().zip(next) else {
            return Pause::Nothing;
        };
        turn.leases += 1;
        let Some(begun) = begin(pool, held, index, turn.now, cx) else {
            continue;
        };
        match begun {
            Ok(ran) => turn.now = end(pool, held, index, ran, turn.now, done),
            Err(running) => {
                return Pause::Waits(Handler {
                    held: Arc::clone(held),
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
fn is_too_short(pool: &Pool, held: &Run) -> bool {
    held.came_late && held.grant.granted < pool.queues[held.queue].terms.term
}

/// Begins to work a lease, and polls its handler once. None: it was handed in without one.
fn begin<'a>(
    pool: &'a Pool,
    held: &Arc<Run>,
    index: usize,
    now: u64,
    cx: &mut Poller<'_>,
) -> Option<Result<Ran, Instrumented<Caught<'a>>>> {
    let lease = &held.leases[index];
    if lease.stopped().is_some() || held.is_over(now) || pool.draining() {
        // Lost or cancelled while it waited for a slot or for the answer to its claim, or too late
        // for this worker.
        let ran = if is_too_short(pool, held) && !pool.draining() {
            Ran::TooShort(held.grant.granted)
        } else {
            Ran::Dropped
        };
        settler::hand_in(pool, held, index, ran, Times::default());
        return None;
    }
    let Some(kind) = lease.kind().map(|kind| &pool.kinds[kind]) else {
        let (queue, job) = (&held.grant.queue, &*lease.job);
        pool.observers.emit(|| Event::UnknownKind { queue, job });
        settler::hand_in(pool, held, index, Ran::UnknownKind, Times::default());
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
) -> Result<Ran, Running<'a>> {
    // Outside of what is caught: a panic must not drop it on its way.
    let (mut running, mut ran) = (None, None);
    let caught = caught(|| match handler.start(ctx) {
        Err(failure) => ran = Some(Ran::Returned(Err(failure))),
        Ok(started) => {
            let started: &mut Running<'a> = running.insert(started);
            if let Poll::Ready(result) = started.as_mut().poll(cx) {
                ran = Some(Ran::Returned(result));
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
            Ok(Ran::Panicked(panic))
        }
        (Ok(()), None, None) => unreachable!("it ended, or it is there"),
    }
}

/// A handler has ended. Tells when.
fn end(
    pool: &Pool,
    held: &Arc<Run>,
    index: usize,
    ran: Ran,
    started: u64,
    done: &mut Tally,
) -> u64 {
    let waited = held.granted_at().since(held.leases[index].job.run_at) + held.age(started);
    let ended = pool.clock.stamp(monotonic()).max(started);
    let times = Times {
        waited: Some(waited),
        ran: Duration::from_nanos(ended - started),
    };
    settler::hand_in(pool, held, index, ran, times);
    done.add(&pool.outbox, held.queue, times.ran);
    ended
}

/// Runs a handler that nobody attends to: it is polled by hand.
#[cfg(feature = "testing")]
pub(crate) async fn alone(held: Arc<Run>, index: usize) -> Ran {
    let Some(kind) = held.leases[index].kind() else {
        return Ran::UnknownKind;
    };
    let ctx = Context::new(Arc::clone(&held), index);
    match caught(|| held.pool.kinds[kind].handler.start(ctx)) {
        Err(panic) => Ran::Panicked(panic),
        Ok(Err(failure)) => Ran::Returned(Err(failure)),
        Ok(Ok(running)) => Caught(running).await,
    }
}

/// Attends to a handler that waits for something: to its bell and its clock.
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
