//! Renewing: keep the leases while the handlers run.
//!
//! One renewer serves the whole pool, on its own thread, runtime and connection: a handler that
//! hogs the CPU must not cost other handlers their leases. Each tick renews everything in one call.
//! It does not decide whether work is worth renewing; progress does: the lease of a handler that
//! shows none for its stall limit lapses.
//!
//! **Invariant (I8).** The handler is told to stop before *first send + granted − guard*, whatever
//! the reply says: the watch runs concurrently with the calls, and does not wait for them.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use tracing::Instrument as _;

use super::held::{HeldGrant, Stop};
use super::lost;
use super::pool::Pool;
use crate::calls::lane::spread;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::lease::{Cause, FencingToken, Progress};
use crate::limits;
use crate::observe::{Death, Event, metrics};
use crate::panics::caught;
use crate::store::{Beat, Renewal, Store};

/// Renews until it is dropped.
pub(crate) async fn renewer(pool: Arc<Pool>) {
    let renew = async {
        // The handle is made here, so that this runtime drives its connection. The watch does not
        // wait for it.
        match pool.store().dedicated().await {
            Ok(store) => beat(&pool, &*store).await,
            Err(error) => pool.fail(error.during(Verb::Run)),
        }
    };
    let mut renew = pin!(renew);
    let renew = poll_fn(|cx| {
        caught(|| renew.as_mut().poll(cx)).unwrap_or_else(|panic| {
            // The watch goes on, and ends the leases that are no longer renewed.
            let why = format!("the worker's renewer: {panic}");
            pool.fail(Error::new(ErrorKind::Unexpected, why).during(Verb::Run));
            Poll::Ready(())
        })
    });
    tokio::join!(biased; watch(&pool), renew);
}

/// The shortest time between two renewals of any queue.
fn interval(pool: &Pool) -> Duration {
    let queues = pool.queues.iter().map(|queue| queue.terms.renew_every);
    queues.min().unwrap_or(Duration::from_secs(1))
}

/// Ends leases that can no longer be relied on.
async fn watch(pool: &Arc<Pool>) {
    let longest = interval(pool) / 8;
    loop {
        let now = monotonic();
        let mut next = now + longest;
        for held in pool.board.grants() {
            let until = held.until();
            if until <= now {
                lost::lose_all(pool, &held, Stop::Deadline);
            } else {
                next = next.min(until);
            }
        }
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(next) => {}
            () = pool.short_term[0].notified() => {}
        }
    }
}

/// Renews at each tick; after a failure again soon.
async fn beat(pool: &Arc<Pool>, store: &dyn Store) {
    let interval = interval(pool);
    let mut failures: u32 = 0;
    let mut next = monotonic() + interval.mul_f64(fastrand::f64());
    loop {
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(next.min(first_short_term(pool, interval))) => {}
            () = pool.short_term[1].notified() => continue,
        }
        failures = if tick(pool, store, interval).await {
            0
        } else {
            failures + 1
        };
        let pause = match failures {
            // Jitter keeps the renewers of a fleet apart. Early, never late.
            0 => interval.mul_f64(0.85 + 0.15 * fastrand::f64()),
            n => spread((interval / 16).saturating_mul(1 << n.min(3))).max(SHORTEST_PAUSE),
        };
        next = monotonic() + pause;
    }
}

/// Between two calls, whatever fails.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// When the first job with a short term of its own is due: at a third of that.
fn first_short_term(pool: &Pool, interval: Duration) -> Instant {
    let grants = pool.board.grants().into_iter();
    let short = grants.filter(|held| held.grant.term / 3 < interval);
    let first = short.map(|held| held.renewed() + held.grant.term / 3).min();
    // A grant that could not be renewed in time is not asked for in a hot loop.
    let soonest = monotonic() + SHORTEST_PAUSE;
    first.map_or(soonest + interval, |first| first.max(soonest))
}

/// One call for everything that is due. False if the store did not answer.
async fn tick(pool: &Arc<Pool>, store: &dyn Store, interval: Duration) -> bool {
    let now = monotonic();
    let mut due = Vec::new();
    let mut beats = Vec::new();
    for held in pool.board.grants() {
        let every = interval.min(held.grant.term / 3);
        if let Some(beat) = beat_for(pool, &held, now, every) {
            beats.push(beat);
            due.push(held);
        }
    }
    let mut answered = true;
    while !beats.is_empty() {
        let rest = beats.split_off(beats.len().min(limits::CALL_ITEMS));
        let held = due.drain(..beats.len()).collect::<Vec<_>>();
        answered &= renew(pool, store, beats, &held, interval).await;
        beats = rest;
    }
    answered
}

/// A beat for a grant, if it is due or one of its handlers has stalled.
///
/// It holds the whole grant, and names only leases whose handlers have not ended. One that is
/// handed in may be settled before this call arrives: the store would refuse it, and rightly so.
fn beat_for(pool: &Pool, held: &HeldGrant, now: Instant, every: Duration) -> Option<Beat> {
    let queue = &pool.queues[held.queue];
    let mut beat = Beat {
        queue: held.grant.queue.clone(),
        partition: held.grant.partition,
        grant: held.grant.id,
        nonce: held.nonce(),
        leases: Vec::with_capacity(held.live()),
        lapse: Vec::new(),
        progress: Vec::new(),
    };
    let mut is_needed = false;
    for (index, lease) in held.leases.iter().enumerate() {
        if lease.is_to_lapse() {
            beat.lapse.push(lease.token);
            continue;
        }
        if lease.has_ended() || lease.stopped().is_some_and(Stop::is_lost) {
            continue;
        }
        is_needed = true;
        if lease.is_handed_in() {
            continue;
        }
        let own = lease.job.options.runs.stall_limit;
        let limit = own.or(queue.runs.stall_limit);
        let still = held.last_progress(index);
        let still = still.map(|last| now.saturating_duration_since(last));
        if limit
            .zip(still)
            .is_some_and(|(limit, still)| still >= limit)
        {
            beat.lapse.push(lease.token);
            continue;
        }
        beat.leases.push(lease.token);
        beat.progress.extend(
            held.unseen_progress(index)
                .map(|progress| (lease.token, progress)),
        );
    }
    // A grant that was renewed a moment ago waits for the next tick with the others.
    let due = now.saturating_duration_since(held.renewed()) * 2 >= every;
    let worth = !beat.lapse.is_empty() || (due && is_needed);
    worth.then_some(beat)
}

async fn renew(
    pool: &Arc<Pool>,
    store: &dyn Store,
    beats: Vec<Beat>,
    due: &[Arc<HeldGrant>],
    limit: Duration,
) -> bool {
    let lapsed: Vec<_> = beats.iter().map(|beat| beat.lapse.clone()).collect();
    let counts: Vec<_> = beats.iter().map(|beat| beat.leases.len()).collect();
    let shown: Vec<_> = beats.iter().map(|beat| beat.progress.clone()).collect();
    // The handlers stop first: once their leases have lapsed, another worker may hold them.
    for (held, tokens) in due.iter().zip(&lapsed) {
        for (index, lease) in held.leases.iter().enumerate() {
            if tokens.contains(&lease.token) {
                lost::lose(pool, held, index, Stop::Stalled);
            }
        }
    }
    let sent = monotonic();
    let span = tracing::debug_span!("store.renew", grants = beats.len());
    let answer = timed(limit, store.renew(beats)).instrument(span).await;
    let took = sent.elapsed();
    pool.renewal_answered(answer.is_ok());
    match answer {
        Ok(renewals) => {
            pool.meter.renewed(took);
            count_lapsed(pool, due, &lapsed);
            for (held, shown) in due.iter().zip(&shown) {
                progress_seen(held, shown);
            }
            for ((held, renewal), leases) in due.iter().zip(&renewals).zip(&counts) {
                apply(pool, held, renewal, sent, *leases);
            }
            let leases = counts.iter().sum();
            pool.observers.emit(|| Event::Renewed {
                grants: due.len(),
                leases,
                took,
            });
            true
        }
        Err(error) => {
            for (held, leases) in due.iter().zip(&counts) {
                pool.queues[held.queue].meter.renewal_failed(*leases as u64);
            }
            let leases = counts.iter().sum();
            pool.observers.emit(|| Event::RenewalFailed {
                error: &error,
                leases,
            });
            false
        }
    }
}

fn progress_seen(held: &HeldGrant, shown: &[(FencingToken, Progress)]) {
    let mut shown = shown.iter().peekable();
    for (index, lease) in held.leases.iter().enumerate() {
        if let Some((_, progress)) = shown.next_if(|(token, _)| *token == lease.token) {
            held.progress_seen(index, progress);
        }
    }
}

/// What the holder lets lapse expires in this very call, and no claim will report it.
fn count_lapsed(pool: &Pool, due: &[Arc<HeldGrant>], lapsed: &[Vec<FencingToken>]) {
    for (held, tokens) in due
        .iter()
        .zip(lapsed)
        .filter(|(_, tokens)| !tokens.is_empty())
    {
        for lease in held
            .leases
            .iter()
            .filter(|lease| tokens.contains(&lease.token))
        {
            lease.has_lapsed();
            let (queue, job, cause) = (&held.grant.queue, &*lease.job, Cause::Stalled);
            metrics::expired(queue, &job.kind, cause);
            let expiries = job.expiries.saturating_add(1);
            if expiries >= job.options.max_expiries {
                let id = (job.id, &job.kind);
                let death = Death::by_expiry(queue, id, lease.token, cause, expiries);
                pool.observers.emit(|| Event::Dead { death: &death });
            }
        }
    }
}

async fn timed<T>(limit: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
        let why = format!("no answer within {limit:?}");
        Err(Error::new(ErrorKind::Unavailable, why).during(Verb::Renew))
    })
}

/// Applies the store's answer for one grant: a longer lease, a cancellation, or a refusal. Not
/// counted as refused is a lease that its own settlement ended while the call was under way, one
/// that this very call lets lapse, and one that was known to be lost before the answer came.
fn apply(pool: &Arc<Pool>, held: &Arc<HeldGrant>, renewal: &Renewal, sent: Instant, leases: usize) {
    let meter = &pool.queues[held.queue].meter;
    match renewal {
        Renewal::Held {
            granted,
            cancel,
            fenced,
        } => {
            held.extend(sent, *granted);
            let mut refused = 0;
            for (index, lease) in held.leases.iter().enumerate() {
                if fenced.contains(&lease.token) {
                    refused += u64::from(lost::lose(pool, held, index, Stop::Fenced));
                } else if cancel.contains(&lease.token) {
                    lease.stop(Stop::Cancel);
                }
            }
            meter.renewed((leases - fenced.len()) as u64, refused);
        }
        Renewal::Fenced => {
            let refused = lost::lose_all(pool, held, Stop::Fenced);
            meter.renewed(0, refused as u64);
        }
    }
}
