//! Claiming: ask for as many leases as there are free slots, and a few ahead.
//!
//! The claimer asks while the current leases run, so that a slot that becomes free finds the next
//! one waiting. How far ahead it asks depends on the work: as many leases as the slots finish in a
//! moment, so that quick jobs never wait for the store, and a slow job is never held by a worker
//! that cannot start it. When the store has nothing, the claimer sleeps on `wait`; a busy store is
//! not polled.
//!
//! A queue with slots of its own is claimed by itself, and only for as many leases as it has free
//! slots, so that leases which its slots cannot work never fill the buffer. All other queues share
//! a claim.
//!
//! Before: [`enqueue`](crate::calls::enqueue). After: a [slot](super::slots) runs the handler.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use tracing::Instrument as _;

use super::held::Stop;
use super::lost;
use super::outcome::HandlerEnd;
use super::pool::{Pool, PoolQueue};
use super::settler::{self, Times};
use crate::calls::lane::{Answer, Lane, spread};
use crate::clock::monotonic;
use crate::error::ErrorKind;
use crate::job::QueueName;
use crate::lease::Nonce;
use crate::limits;
use crate::observe::clock_watch::ClockWatch;
use crate::observe::{Event, metrics};
use crate::store::{ClaimQueue, ClaimRequest, Claimed, Store};

/// How much work to hold ahead of the slots: what they finish in this long.
const AHEAD: Duration = Duration::from_millis(20);

/// How long a claimer rests at most after a claim that came to nothing.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// How long an idle worker is asleep at most if the store cannot wake it.
const LOST_WAKE_UP: Duration = Duration::from_secs(1);

/// A lease that waited this long for a slot goes back: another worker may have one free.
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
        let shares = claimer.shares(want);
        if shares.is_empty() {
            claimer.wait_for_room().await;
            continue;
        }
        match claimer.claim_all(shares, want).await {
            None => claimer.rest().await,
            Some(granted) if granted < want && !drain.is_cancelled() => {
                claimer.wait_for_work().await;
            }
            Some(_) => {}
        }
    }
    give_back(&claimer.pool);
}

/// Claims one lease, if there is one, for a test that works it by hand.
#[cfg(feature = "testing")]
pub(crate) async fn one(pool: &Arc<Pool>) -> Option<super::pool::BufferedLease> {
    let mut claimer = Claimer::new(Arc::clone(pool));
    let shares = claimer.shares(1);
    claimer.claim_all(shares, 1).await;
    pool.unfill().pop()
}

/// Surrenders everything that waits for a slot.
pub(crate) fn give_back(pool: &Pool) {
    for (held, index) in pool.unfill() {
        held.leases[index].stop(Stop::Drain);
        settler::hand_in(pool, held, index, HandlerEnd::Dropped, Times::default());
    }
    pool.outbox.flush();
}

struct Claimer {
    pool: Arc<Pool>,
    lane: Lane,
    pace: Pace,
    /// When the queues are worth a claim without a wake-up.
    next: Duration,
    /// How many handlers had ended, and since when no other has while leases wait.
    still: (u64, Instant),
    clock: ClockWatch,
}

/// How fast the slots end handlers.
struct Pace {
    since: Instant,
    finished: u64,
    per_second: f64,
}

impl Pace {
    /// Updates the pace; `finished` is the number of handlers that have ended so far. The pace is
    /// measured once a millisecond, and first when as many handlers have ended as there are slots:
    /// a pool must not stay slow because its first claims say nothing about its pace.
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
        // A full store has room again once leases are settled. Until then the claimer rests.
        let lane = pool.session.lane().told_when_full();
        let lane = lane.until(pool.drain.clone());
        let pace = Pace {
            since: monotonic(),
            finished: 0,
            per_second: 0.0,
        };
        Self {
            pool,
            lane,
            pace,
            next: Duration::MAX,
            still: (0, monotonic()),
            clock: ClockWatch::default(),
        }
    }

    /// How many leases there is room for.
    fn want(&mut self) -> usize {
        let finished = self.pool.finished();
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

    /// What to ask for in one round, in the order of the claims: the queues without slots of their
    /// own together, each other queue separately if it has a free slot. Empty if there is no room.
    fn shares(&self, want: usize) -> Vec<Share> {
        let mut shares: Vec<Share> = Vec::new();
        let mut common: Option<usize> = None;
        if want == 0 {
            return shares;
        }
        for index in in_turn(&self.pool.queues) {
            match (self.pool.queue_room(index), common) {
                (Some(0), _) => {}
                (Some(room), _) => shares.push(Share {
                    queues: vec![index],
                    most: room,
                }),
                (None, Some(at)) => shares[at].queues.push(index),
                (None, None) => {
                    common = Some(shares.len());
                    shares.push(Share {
                        queues: vec![index],
                        most: want,
                    });
                }
            }
        }
        shares
    }

    /// Claims each share, until there are as many leases as are wanted. Returns their number; none
    /// if a claim came to nothing.
    async fn claim_all(&mut self, shares: Vec<Share>, want: usize) -> Option<usize> {
        self.next = Duration::MAX;
        let mut granted = 0;
        for share in shares {
            let max = share.most.min(want - granted);
            if max == 0 || self.pool.draining() {
                break;
            }
            granted += self.claim(&share.queues, max).await?;
        }
        Some(granted)
    }

    fn ahead(&self) -> usize {
        ((self.pace.per_second * AHEAD.as_secs_f64()) as usize).min(self.pool.prefetch)
    }

    /// Sleeps until a slot is free or the buffer runs low.
    async fn wait_for_room(&self) {
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

    /// Gives back what waits for a slot if no handler has ended for too long, whatever the claimer
    /// slept on.
    fn give_back_stale(&mut self) {
        let (finished, now) = (self.pool.finished(), monotonic());
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
        let back = pool.declines.step_back(monotonic());
        let longest = pool.store().longest_wait();
        let limit = self.next.clamp(Duration::from_millis(1), longest) + back;
        // A queue that has no room may have work all the time.
        let has_room = |(index, _): &(usize, &PoolQueue)| pool.queue_room(*index) != Some(0);
        let with_room = pool.queues.iter().enumerate().filter(has_room);
        let queues: Vec<QueueName> = with_room.map(|(_, queue)| queue.name.clone()).collect();
        if queues.is_empty() {
            return self.wait_for_room().await;
        }
        let is_one_full = queues.len() < pool.queues.len();
        let wait = pool.store().wait(&queues, pool.suspects.is_free(), limit);
        let sleep = async {
            // A store that does not come back costs no more than the longest sleep; one that cannot
            // wake us, no more than a lost wake-up.
            if let Ok(Err(_)) = tokio::time::timeout(longest + back, wait).await {
                tokio::time::sleep(limit.min(LOST_WAKE_UP + back)).await;
            }
        };
        tokio::select! {
            biased;
            () = pool.drain.cancelled() => {}
            () = pool.room.notified(), if is_one_full => {}
            () = sleep => {}
        }
    }

    /// Sleeps after a claim that came to nothing. If the store has work, waiting for some would
    /// return at once, only to be refused again. Claimers that were refused together come back at
    /// different times.
    async fn rest(&self) {
        let half = LONGEST_REST / 2;
        tokio::select! {
            biased;
            () = self.pool.drain.cancelled() => {}
            () = tokio::time::sleep(half + spread(half)) => {}
        }
    }

    /// One claim from these queues, repeated until it is known. Returns the number of leases; none
    /// if it came to nothing.
    async fn claim(&mut self, queues: &[usize], max: usize) -> Option<usize> {
        let permit = self.pool.suspects.permit();
        let sent = monotonic();
        let request = Ask {
            queues: queues
                .iter()
                .map(|index| self.pool.queues[*index].wanted())
                .collect(),
            max,
            admit_suspect: permit.is_some(),
        };
        let claimed = self.send(request).await?;
        let leases: usize = claimed.grants.iter().map(|grant| grant.leases.len()).sum();
        self.pool.meter.claimed(sent.elapsed(), leases);
        self.clock.note(claimed.clock_behind, monotonic());
        let mut suspects = claimed.grants.iter().flat_map(|grant| &grant.leases);
        if let Some(permit) = permit.filter(|_| suspects.any(|lease| lease.job.is_suspect())) {
            permit.hold_until_lease_ends();
        }
        let next = claimed.next_due.into_iter().chain(claimed.next_deadline);
        self.next = next.min().unwrap_or(Duration::MAX).min(self.next);
        self.take_in(claimed, sent);
        Some(leases)
    }

    /// Sends the claim. None: nothing was granted to us.
    async fn send(&mut self, ask: Ask) -> Option<Claimed> {
        let nonce = match Nonce::draw() {
            Ok(nonce) => nonce,
            Err(error) => {
                tracing::error!(%error, "cannot claim");
                return None;
            }
        };
        let pool = Arc::clone(&self.pool);
        let call = self
            .lane
            .call(Duration::MAX, |store: Arc<dyn Store>, request| {
                let request = ClaimRequest {
                    request,
                    owner: Arc::clone(&pool.owner),
                    task: Arc::clone(&pool.task),
                    nonce,
                    queues: ask.queues.clone(),
                    max: ask.max,
                    admit_suspect: ask.admit_suspect,
                };
                let span = tracing::debug_span!("store.claim", max = ask.max);
                async move { store.claim(request).await }.instrument(span)
            });
        match call.await {
            Answer::Known(claimed) => {
                pool.answered();
                Some(claimed)
            }
            // Whatever was granted expires by itself.
            Answer::Lost => None,
            Answer::Refused(error) | Answer::GaveUp(error) => {
                match error.kind() {
                    _ if pool.draining() => {}
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
            // The watch sleeps until the next deadline that it knows. After a short term, or an
            // answer that took long, there is an earlier one.
            let is_late = sent.elapsed() > terms.renew_every;
            if is_short || is_late {
                pool.short_term.iter().for_each(Notify::notify_one);
            }
            // A pool that was closed meanwhile may not have seen this grant.
            if pool.is_closed() {
                lost::abandon(pool, &held);
            }
            pool.fill(&held);
        }
        pool.meter
            .slots(pool.busy.load(Ordering::Relaxed), pool.slots);
        pool.meter.held(pool.board.leases());
    }
}

/// Queues that are claimed together, and how many leases they have room for.
struct Share {
    /// By their index in the pool's list.
    queues: Vec<usize>,
    most: usize,
}

/// What one claim asks for.
struct Ask {
    queues: Vec<ClaimQueue>,
    max: usize,
    admit_suspect: bool,
}

/// The queues in a random order in which the heavier tend to come first: over many claims each gets
/// its share, and none waits for ever.
fn in_turn(queues: &[PoolQueue]) -> impl Iterator<Item = usize> {
    let mut order: Vec<(f64, usize)> = queues
        .iter()
        .map(|queue| -fastrand::f64().max(f64::MIN_POSITIVE).ln() / queue.weight)
        .zip(0..)
        .collect();
    order.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    order.into_iter().map(|(_, index)| index)
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
