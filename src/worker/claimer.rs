//! Claiming: ask for as many leases as there are free slots, and a few ahead.
//!
//! The claimer asks while the current leases run, so that a slot that becomes free finds the next
//! one waiting. How far ahead follows the work: as many leases as the slots finish in a moment, so
//! that quick jobs never wait for the store, and a slow job is never held by a worker that cannot
//! start it. When the store has nothing, the claimer sleeps on `wait`; a busy store is not polled.
//!
//! Before: [`enqueue`](crate::calls::enqueue). After: a slot [`run`](super::slots)s the handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use tracing::Instrument as _;

use super::held::Stop;
use super::pool::{Pool, PoolQueue};
use super::settler::{self, Ride, Times};
use super::slots::Ran;
use crate::calls::lane::{Answer, Lane, spread};
use crate::clock::monotonic;
use crate::error::ErrorKind;
use crate::job::QueueName;
use crate::lease::Nonce;
use crate::limits;
use crate::observe::{Event, metrics};
use crate::store::{ClaimRequest, Claimed, SettleRequest, Store};

/// How much work to hold ahead of the slots: what they finish in this long.
const AHEAD: Duration = Duration::from_millis(20);

/// A lost wake-up costs at most this.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// A lease that waited this long for a slot goes back: somebody else may have one free.
const STALE_BUFFER: Duration = Duration::from_secs(1);

/// Fills the slots until the pool drains. What is left over goes back at once.
pub(crate) async fn claimer(pool: Arc<Pool>) {
    let mut claimer = Claimer::new(pool);
    let drain = claimer.pool.drain.clone();
    while !drain.is_cancelled() {
        if claimer.pool.is_paused() {
            give_back(&claimer.pool);
            claimer.pool.until_resumed().await;
            continue;
        }
        claimer.give_back_stale();
        let want = claimer.want();
        if want == 0 {
            claimer.wait_for_room().await;
            continue;
        }
        let Some(granted) = claimer.claim(want).await else {
            claimer.rest().await;
            continue;
        };
        if granted < want && !drain.is_cancelled() {
            claimer.wait_for_work().await;
        }
    }
    give_back(&claimer.pool);
}

/// Claims one lease, if there is one, for whoever works it by hand.
#[cfg(feature = "testing")]
pub(crate) async fn one(pool: &Arc<Pool>) -> Option<(Arc<super::pool::Run>, usize)> {
    Claimer::new(Arc::clone(pool)).claim(1).await;
    pool.unfill().pop()
}

/// Surrenders everything that waits for a slot.
pub(crate) fn give_back(pool: &Pool) {
    for (held, index) in pool.unfill() {
        held.leases[index].stop(Stop::Drain);
        settler::hand_in(pool, &held, index, Ran::Dropped, Times::default());
    }
    pool.outbox.flush_all();
}

struct Claimer {
    pool: Arc<Pool>,
    lane: Lane,
    pace: Pace,
    /// When the queues are worth a claim without a wake-up.
    next: Duration,
    /// How many handlers had ended, and since when no other has while leases wait.
    still: (u64, Instant),
}

/// How fast the slots finish.
struct Pace {
    since: Instant,
    finished: u64,
    per_second: f64,
}

impl Pace {
    /// Handlers have ended, so many in all. Worth a look after a while, or when all slots have had their
    /// turn: the first claims of a pool tell nothing of its pace, and it must not stay slow for that.
    fn measure(&mut self, finished: u64, slots: usize, now: Instant) {
        let elapsed = now - self.since;
        let is_first = self.per_second == 0.0 && finished - self.finished >= slots as u64;
        if elapsed < Duration::from_millis(1) && !is_first {
            return;
        }
        // A coarse clock may not have moved at all.
        let elapsed = elapsed.max(Duration::from_micros(1));
        let rate = (finished - self.finished) as f64 / elapsed.as_secs_f64();
        self.per_second = f64::midpoint(self.per_second, rate);
        self.finished = finished;
        self.since = now;
    }
}

impl Claimer {
    fn new(pool: Arc<Pool>) -> Self {
        // Settlements that ride along must not wait for room: it is they that make it.
        let lane = pool.session.lane().told_when_full();
        let pace = Pace {
            since: monotonic(),
            finished: 0,
            per_second: 0.0,
        };
        Self {
            pool,
            lane,
            pace,
            next: LONGEST_SLEEP,
            still: (0, monotonic()),
        }
    }

    /// How many leases there is room for.
    fn want(&mut self) -> usize {
        let finished = self.pool.outbox.finished();
        self.pace.measure(finished, self.pool.slots, monotonic());
        let ahead = self.ahead();
        let buffered = self.pool.buffered();
        if buffered > ahead / 2 {
            return 0;
        }
        let free = self
            .pool
            .slots
            .saturating_sub(self.pool.busy.load(Ordering::Acquire));
        (free + ahead)
            .saturating_sub(buffered)
            .min(limits::GRANT_LEASES)
    }

    fn ahead(&self) -> usize {
        ((self.pace.per_second * AHEAD.as_secs_f64()) as usize).min(self.pool.prefetch)
    }

    /// Sleeps until a slot is free or the buffer runs low.
    async fn wait_for_room(&mut self) {
        let pool = &self.pool;
        // "Less than" half of what is held ahead, and always when a slot finds nothing.
        pool.low_water
            .store(self.ahead() / 2 + 1, Ordering::Release);
        tokio::select! {
            biased;
            () = pool.drain.cancelled() => {}
            () = pool.room.notified() => {}
            () = tokio::time::sleep(STALE_BUFFER) => {}
        }
    }

    /// Gives back what waits for a slot if no slot was done with anything for too long, whatever the
    /// claimer slept on.
    fn give_back_stale(&mut self) {
        let (finished, now) = (self.pool.outbox.finished(), monotonic());
        let (seen, since) = self.still;
        if finished != seen || self.pool.buffered() == 0 {
            self.still = (finished, now);
        } else if now - since >= STALE_BUFFER {
            give_back(&self.pool);
            // Or they would be the first to be claimed again.
            self.pace.per_second = 0.0;
            self.still = (finished, now);
        }
    }

    /// Sleeps until one of the queues may have work.
    async fn wait_for_work(&self) {
        let pool = &self.pool;
        let limit = self.next.clamp(Duration::from_millis(1), LONGEST_SLEEP);
        let queues: Vec<QueueName> = pool.queues.iter().map(|queue| queue.name.clone()).collect();
        let wait = pool.store().wait(&queues, pool.suspects.is_free(), limit);
        let sleep = async {
            // A store that cannot tell, or does not come back, costs no more than the longest sleep.
            if let Ok(Err(_)) = tokio::time::timeout(LONGEST_SLEEP, wait).await {
                tokio::time::sleep(limit).await;
            }
        };
        tokio::select! {
            biased;
            () = pool.drain.cancelled() => {}
            () = sleep => {}
        }
    }

    /// Sleeps after a claim that came to nothing: the store may have work, so that it would not let
    /// anybody wait, and refuse again. Those that were refused together do not come back together.
    async fn rest(&self) {
        let half = LONGEST_SLEEP / 2;
        tokio::select! {
            biased;
            () = self.pool.drain.cancelled() => {}
            () = tokio::time::sleep(half + spread(half)) => {}
        }
    }

    /// One claim, repeated until it is known. Returns the number of leases; none if it came to
    /// nothing.
    async fn claim(&mut self, want: usize) -> Option<usize> {
        let place = self.pool.suspects.enter();
        let admit_suspect = place.is_some();
        let sent = monotonic();
        let mut ride = self.pool.outbox.ride();
        let mut claimed = match Nonce::draw() {
            Ok(nonce) => self.send(want, admit_suspect, nonce, &mut ride).await,
            Err(error) => {
                tracing::error!(%error, "cannot claim");
                None
            }
        };
        let arrived = claimed.as_mut().and_then(|(claimed, along)| {
            let ride = along.then(|| ride.take()).flatten();
            ride.zip(Some(std::mem::take(&mut claimed.settled)))
        });
        if let Some(ride) = ride {
            ride.send(&self.pool).await;
        }
        let (claimed, _) = claimed?;
        let leases: usize = claimed.grants.iter().map(|grant| grant.leases.len()).sum();
        self.pool.meter.claimed(sent.elapsed(), leases);
        let mut suspects = claimed.grants.iter().flat_map(|grant| &grant.leases);
        if let Some(place) = place.filter(|_| suspects.any(|lease| lease.job.is_suspect())) {
            place.keep();
        }
        self.next = claimed
            .next_due
            .into_iter()
            .chain(claimed.next_deadline)
            .min()
            .unwrap_or(LONGEST_SLEEP);
        self.take_in(claimed, sent);
        // Slots that wait for these leases do not wait for the books of those before.
        if let Some((ride, verdicts)) = arrived {
            ride.arrived(&self.pool, &verdicts);
        }
        Some(leases)
    }

    /// Sends the claim, and tells whether the settlements came along. `None`: nothing was granted to
    /// us.
    async fn send(
        &mut self,
        max: usize,
        admit_suspect: bool,
        nonce: Nonce,
        ride: &mut Option<Ride>,
    ) -> Option<(Claimed, bool)> {
        let pool = Arc::clone(&self.pool);
        let queues: Vec<_> = in_turn(&pool.queues).map(PoolQueue::wanted).collect();
        let riders_id = match ride {
            Some(ride) => ride.reserve().await.ok(),
            None => None,
        };
        let riders = ride.as_ref().zip(riders_id);
        let along = AtomicBool::new(false);
        let call = self
            .lane
            .call(Duration::MAX, |store: Arc<dyn Store>, request| {
                // After a lost session the riders' id means nothing; they go alone under a new one.
                let riders = riders.filter(|(_, id)| id.session == request.session);
                let settle = riders.map(|(ride, request)| {
                    let settlements = ride.settlements();
                    SettleRequest {
                        request,
                        settlements,
                    }
                });
                along.store(settle.is_some(), Ordering::Relaxed);
                let request = ClaimRequest {
                    request,
                    owner: Arc::clone(&pool.owner),
                    task: Arc::clone(&pool.task),
                    nonce,
                    queues: queues.clone(),
                    max,
                    admit_suspect,
                    settle,
                };
                let span = tracing::debug_span!("store.claim", max);
                async move { store.claim(request).await }.instrument(span)
            });
        let answer = tokio::select! {
            biased;
            answer = call => answer,
            () = pool.give_up.cancelled() => return None,
        };
        match answer {
            Answer::Known(claimed) => {
                pool.heard();
                Some((claimed, along.load(Ordering::Relaxed)))
            }
            // Whatever was granted expires by itself.
            Answer::Lost => None,
            Answer::Refused(error) | Answer::GaveUp(error) => {
                match error.kind() {
                    ErrorKind::TokensAhead => {}
                    ErrorKind::Full => tracing::warn!(%error, "claim refused"),
                    _ => tracing::error!(%error, "claim refused"),
                }
                None
            }
        }
    }

    /// Leases have arrived: they are held from the first send of the claim.
    fn take_in(&self, claimed: Claimed, sent: Instant) {
        let pool = &self.pool;
        for expiry in &claimed.expired {
            metrics::expired(&expiry.queue, &expiry.kind, expiry.cause);
            pool.observers.emit(|| Event::Expired { expiry });
        }
        for grant in claimed.grants {
            let Some(queue) = pool.queue_index(&grant.queue) else {
                continue;
            };
            pool.observers.emit(|| Event::Claimed { grant: &grant });
            let terms = &pool.queues[queue].terms;
            // A job's own lifetime can be shorter than any term.
            let granted = grant.granted.min(grant.term);
            let guard = terms.guard().min(granted / 4);
            let is_short = granted < terms.term;
            let held = pool.board.hold(queue, grant, sent, guard, pool);
            // The watch sleeps until the next end that it knows of, and an answer that took long
            // brings an earlier one.
            let is_late = sent.elapsed() > terms.renew_every;
            if is_short || is_late {
                pool.short_term.iter().for_each(Notify::notify_one);
            }
            // Whoever closed the pool meanwhile may not have seen this one.
            if pool.give_up.is_cancelled() {
                pool.abandon(&held);
            }
            pool.fill(&held);
        }
        pool.meter
            .slots(pool.busy.load(Ordering::Relaxed), pool.slots);
        pool.meter.held(pool.board.leases());
    }
}

/// The queues in a random order in which the heavier tend to come first: over many claims each gets
/// its share, and none waits for ever.
fn in_turn(queues: &[PoolQueue]) -> impl Iterator<Item = &PoolQueue> {
    let mut order: Vec<(f64, &PoolQueue)> = queues
        .iter()
        .map(|queue| {
            (
                -fastrand::f64().max(f64::MIN_POSITIVE).ln() / queue.weight,
                queue,
            )
        })
        .collect();
    order.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    order.into_iter().map(|(_, queue)| queue)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_knows_its_pace_as_soon_as_all_slots_have_had_a_turn() {
        let start = monotonic();
        let mut pace = Pace {
            since: start,
            finished: 0,
            per_second: 0.0,
        };
        let after = |micros| start + Duration::from_micros(micros);
        pace.measure(15, 16, after(100));
        assert!(pace.per_second == 0.0, "one slot has not ended anything");
        pace.measure(16, 16, after(100));
        assert!((79_000.0..81_000.0).contains(&pace.per_second));
        // From then on after a while only: so few say little.
        let known = pace.per_second;
        pace.measure(64, 16, after(200));
        assert!((pace.per_second - known).abs() < 1e-9);
        pace.measure(16, 16, after(1_200));
        assert!(pace.per_second < known);
    }
}
