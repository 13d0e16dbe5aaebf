//! Leases: who may work a job, until when, and how that is proved.
//!
//! The number that fences ([`FencingToken`]) and the secret that settles ([`Receipt`]) are two things.
//! Everybody may know a token; it gives no right. Only the holder knows the receipt.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{Timestamp, micros};
use crate::error::{Error, ErrorKind, Result};
use crate::job::{JobId, JobRecord, QueueName, duration, positive};

/// A number larger than any its issuer gave before. Show it to whatever the handler writes to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FencingToken(u64);

impl FencingToken {
    /// A token from its number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The token's number. Fits a SQL `BIGINT` and a double.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The token `n` places after this one in a grant.
    #[must_use]
    pub(crate) const fn plus(self, n: u64) -> Self {
        Self(self.0 + n)
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl FromStr for FencingToken {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let number = text.parse().map_err(|_| {
            Error::invalid(
                "token",
                format!("{} bytes of text", text.len()),
                "a whole number",
            )
        })?;
        Ok(Self(number))
    }
}

/// Issues tokens: a hybrid logical clock. Pure; the store keeps its two numbers in the same atomic
/// step as the grant.
///
/// A counter forgets what it gave when its store is rolled back, and re-arms the zombie. This
/// follows the clock, so that an issuer that lost its memory starts above everything it gave before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Issuer {
    /// The last token given.
    pub last: u64,
    /// Nothing at or below this is ever given again.
    pub floor: u64,
}

impl Issuer {
    /// How far `last` may run ahead of the clock, in microseconds, one token each. An issuer that
    /// lost its memory skips as far.
    pub const LEAD: u64 = 20_000;
    /// A fence's mark further ahead of the clock than this is a broken fence, not a lost token.
    pub const BELIEF: Duration = Duration::from_secs(24 * 3600);

    /// An issuer that finds no memory of what was given before.
    pub fn without_memory(now: Timestamp) -> Self {
        Self {
            last: 0,
            floor: now.as_micros() + Self::LEAD,
        }
    }

    /// How many tokens can be given now.
    pub fn room(&self, now: Timestamp) -> u64 {
        let base = self.base(now);
        (now.as_micros().max(self.floor) + Self::LEAD + 1).saturating_sub(base)
    }

    /// Gives `n` tokens and returns the first.
    pub fn issue(&mut self, n: u64, now: Timestamp) -> FencingToken {
        let base = self.base(now);
        self.last = base + n - 1;
        FencingToken(base)
    }

    /// Raises the floor above a mark that a fence has already accepted. False if the mark is too far
    /// ahead to be believed.
    pub fn raise(&mut self, mark: FencingToken, now: Timestamp) -> bool {
        if mark.0 > now.after(Self::BELIEF).as_micros() {
            return false;
        }
        self.floor = self.floor.max(mark.0);
        true
    }

    /// Follows a token that the caller has seen of another issuer, as long as that leaves room. One
    /// far ahead is left alone: a mark that raised one queue's tokens must not stop another queue.
    #[cfg(any(feature = "postgres", test))]
    pub(crate) fn follow(&mut self, seen: u64, now: Timestamp) {
        let last = self.last.max(seen);
        let followed = Self { last, ..*self };
        if followed.room(now) > 0 {
            *self = followed;
        }
    }

    fn base(&self, now: Timestamp) -> u64 {
        (self.last + 1).max(self.floor + 1).max(now.as_micros())
    }
}

/// The refusal of a claim for which no token fits.
#[cfg_attr(
    not(any(feature = "sqlite", feature = "redis", feature = "postgres")),
    expect(dead_code, reason = "memory needs it not")
)]
pub(crate) fn tokens_ahead() -> Error {
    Error::new(
        ErrorKind::TokensAhead,
        format!(
            "the last token is {} ms ahead of the clock; repeat in a moment",
            Issuer::LEAD / 1_000
        ),
    )
}

/// 128 bits of the client's OS randomness, drawn for one claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce([u8; 16]);

impl Nonce {
    /// Draws from the operating system.
    pub fn draw() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| {
            Error::new(
                ErrorKind::Unavailable,
                format!("the operating system gave no randomness: {e}"),
            )
        })?;
        Ok(Self(bytes))
    }

    /// A nonce from its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The nonce's bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Equal, in a time that does not tell where they differ.
    pub fn matches(&self, other: &Self) -> bool {
        self.0
            .iter()
            .zip(other.0)
            .fold(0, |acc, (a, b)| acc | (a ^ b))
            == 0
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(…)")
    }
}

/// Opaque, unguessable proof of one lease.
///
/// It names its lease by queue, grant, token and job, and proves it by the claim's randomness, which
/// the store compares. `Debug` hides the proof; [`Display`](fmt::Display) writes it out, to be
/// handed to another process.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Receipt {
    pub(crate) queue: QueueName,
    pub(crate) partition: u16,
    pub(crate) grant: FencingToken,
    pub(crate) token: FencingToken,
    pub(crate) job: JobId,
    pub(crate) nonce: Nonce,
}

impl Receipt {
    /// The queue of the lease.
    pub fn queue(&self) -> &QueueName {
        &self.queue
    }

    /// The partition of the queue.
    pub fn partition(&self) -> u16 {
        self.partition
    }

    /// The first token of the lease's grant, which names the grant.
    pub fn grant(&self) -> FencingToken {
        self.grant
    }

    /// The token of the lease.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// The job of the lease.
    pub fn job(&self) -> JobId {
        self.job
    }

    /// The proof.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Receipt({} {} token {} …)",
            self.queue, self.job, self.token
        )
    }
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `/` is in no name, number or id, so the parts cannot run into each other.
        let Self {
            queue,
            partition,
            grant,
            token,
            job,
            nonce,
        } = self;
        write!(f, "{queue}/{partition}/{grant}/{token}/{job}/")?;
        nonce.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Receipt {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let malformed = || {
            let found = format!("{} bytes of text", text.len());
            Error::invalid("receipt", found, "queue/partition/grant/token/job/proof")
        };
        let parts: Vec<&str> = text.split('/').collect();
        let [queue, partition, grant, token, job, proof] = parts[..] else {
            return Err(malformed());
        };
        if proof.len() != 32 || !proof.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(malformed());
        }
        let mut nonce = [0; 16];
        for (byte, at) in nonce.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(&proof[at..at + 2], 16).map_err(|_| malformed())?;
        }
        let receipt = Self {
            queue: QueueName::new(queue)?,
            partition: partition.parse().map_err(|_| malformed())?,
            grant: grant.parse()?,
            token: token.parse()?,
            job: job.parse()?,
            nonce: Nonce(nonce),
        };
        // One receipt has one text: leading zeros, signs and capitals are not its own.
        if receipt.to_string() != text {
            return Err(malformed());
        }
        Ok(receipt)
    }
}

/// One job under one lease, as a claim returns it.
#[derive(Clone, PartialEq, Debug)]
pub struct Lease {
    /// Larger than any token given before by the same issuer.
    pub token: FencingToken,
    /// The job.
    pub job: Arc<JobRecord>,
}

/// The leases that one claim gives from one queue partition: one deadline, renewed together, each
/// settled on its own.
#[derive(Clone, PartialEq, Debug)]
pub struct Grant {
    /// The queue.
    pub queue: QueueName,
    /// The partition of the queue.
    pub partition: u16,
    /// The first token, which names the grant.
    pub id: FencingToken,
    /// The claim's randomness.
    pub nonce: Nonce,
    /// When it was granted, on the store's clock.
    pub granted_at: Timestamp,
    /// How long each renewal extends it.
    pub term: Duration,
    /// What this claim granted: the holder counts it from its *first* send of the request.
    pub granted: Duration,
    /// The leases, in token order.
    pub leases: Vec<Lease>,
}

impl Grant {
    /// The receipt of one of its leases.
    pub fn receipt(&self, lease: &Lease) -> Receipt {
        Receipt {
            queue: self.queue.clone(),
            partition: self.partition,
            grant: self.id,
            token: lease.token,
            job: lease.job.id,
            nonce: self.nonce,
        }
    }
}

/// What a store says to a holder: this lease is yours, or it is not.
///
/// An answer, not an error: `?` cannot swallow "you are fenced".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "a fenced call did nothing"]
pub enum Verdict {
    /// The lease was the caller's, and the call took effect.
    Held {
        /// Its deadline had passed, but nobody else had been granted the job.
        late: bool,
        /// Somebody asked for the job to be cancelled. After a retry or a surrender it *is*
        /// cancelled.
        cancel: bool,
    },
    /// The lease was not the caller's, or no longer. Nothing changed. After a repeat under a new
    /// request id this may be the caller's own earlier success.
    Fenced,
}

impl Verdict {
    /// Whether the call took effect.
    pub const fn is_held(self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// Whether the caller was refused as stale.
    pub const fn is_fenced(self) -> bool {
        matches!(self, Self::Fenced)
    }
}

/// Evidence that work advances.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// How much is done, in the handler's own unit.
    pub done: u64,
    /// Of how much, if known.
    pub total: Option<u64>,
    /// A few words for people.
    pub note: String,
}

/// Why a lease expired.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Nobody renewed it in time: the holder is dead, frozen or cut off.
    Deadline,
    /// The holder let it lapse: its handler showed no progress.
    Stalled,
    /// It reached its maximum lifetime.
    Lifetime,
}

impl Cause {
    /// The cause's one spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::Stalled => "stalled",
            Self::Lifetime => "lifetime",
        }
    }
}

/// How a lease ended. Every lease ends exactly once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// Settled: done.
    Completed,
    /// Settled: again later, a failure counted.
    Retried,
    /// Settled: handed back unfinished, nothing counted.
    Surrendered,
    /// Settled: given up.
    Buried,
    /// Settled by a retry or a surrender after a cancel.
    Cancelled,
    /// Expired.
    Expired(Cause),
    /// Ended by an operator.
    Revoked,
}

impl LeaseEnd {
    /// The end's one spelling, without the cause.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Retried => "retried",
            Self::Surrendered => "surrendered",
            Self::Buried => "buried",
            Self::Cancelled => "cancelled",
            Self::Expired(_) => "expired",
            Self::Revoked => "revoked",
        }
    }

    /// Whether its holder ended it: the opposite of expired.
    pub const fn is_released(self) -> bool {
        !matches!(self, Self::Expired(_) | Self::Revoked)
    }
}

/// One ended lease in a job's history.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EndedLease {
    /// Its token.
    pub token: FencingToken,
    /// The worker that held it.
    pub owner: Arc<str>,
    /// The run that the worker served.
    pub task: Arc<str>,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// When it ended.
    pub ended_at: Timestamp,
    /// How often it was renewed.
    pub renewals: u32,
    /// How it ended.
    pub end: LeaseEnd,
    /// Why, in words: the failure's reason, the revoke's.
    pub reason: Option<String>,
    /// The last progress shown.
    pub progress: Option<Progress>,
}

impl EndedLease {
    /// What it adds to its job's record: eight long reasons weigh more than most payloads.
    pub(crate) fn weight(&self) -> usize {
        const NUMBERS: usize = 30;
        const LENGTH: usize = 4;
        const SHOWN: usize = 17;
        let reason = self.reason.as_ref().map_or(0, |it| LENGTH + it.len());
        let shown = self.progress.as_ref();
        let shown = shown.map_or(0, |it| SHOWN + LENGTH + it.note.len());
        NUMBERS + LENGTH + self.owner.len() + LENGTH + self.task.len() + reason + shown
    }
}

/// How long leases last, and what that rests on.
///
/// The screen of [`validate`](Self::validate): `margin = term − (renew interval + 2·clock
/// uncertainty + network allowance + pause allowance)` must be positive. That is no proof of
/// safety (the fence is); it refuses terms that are certain to expire under live workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LeaseTerms {
    /// What each claim and renewal grants.
    pub term: Duration,
    /// How often to renew.
    pub renew_every: Duration,
    /// No renewal carries a lease beyond this age.
    pub max_lifetime: Duration,
    /// How far the holder's and the store's clocks may run apart within one term.
    pub clock_uncertainty: Duration,
    /// How long a call may be under way.
    pub network_allowance: Duration,
    /// How long the holder may stand still without losing its leases.
    pub pause_allowance: Duration,
}

impl LeaseTerms {
    /// 10 s, renewed every 3⅓ s: a dead worker's jobs run again within ten seconds.
    pub const SHORT: Self = Self::of_term(Duration::from_secs(10));
    /// 60 s, renewed every 20 s.
    pub const MEDIUM: Self = Self::of_term(Duration::from_secs(60));
    /// 300 s, renewed every 100 s: for slow stores and long pauses.
    pub const LONG: Self = Self::of_term(Duration::from_secs(300));

    /// Terms for any length: renewed at a third, with allowances in proportion up to those of a
    /// 10 s term.
    pub const fn of_term(term: Duration) -> Self {
        Self {
            term,
            renew_every: Duration::from_micros(term.as_micros() as u64 / 3),
            max_lifetime: Duration::from_secs(24 * 3600),
            clock_uncertainty: shorter(term, 100, Duration::from_millis(100)),
            network_allowance: shorter(term, 20, Duration::from_millis(500)),
            pause_allowance: shorter(term, 10, Duration::from_secs(1)),
        }
    }

    /// How often to renew.
    #[must_use]
    pub const fn renew_every(mut self, interval: Duration) -> Self {
        self.renew_every = interval;
        self
    }

    /// The age beyond which no renewal carries a lease.
    #[must_use]
    pub const fn max_lifetime(mut self, lifetime: Duration) -> Self {
        self.max_lifetime = lifetime;
        self
    }

    /// What to allow for: clocks that run apart, calls that are under way, a holder that stands
    /// still.
    #[must_use]
    pub const fn allowances(mut self, clock: Duration, network: Duration, pause: Duration) -> Self {
        self.clock_uncertainty = clock;
        self.network_allowance = network;
        self.pause_allowance = pause;
        self
    }

    /// How long before its end a lease is no longer relied on: 2 · clock uncertainty + network
    /// allowance.
    pub const fn guard(&self) -> Duration {
        self.clock_uncertainty
            .saturating_mul(2)
            .saturating_add(self.network_allowance)
    }

    /// What is left of the term after everything that may go wrong without anybody dying.
    pub fn margin(&self) -> Option<Duration> {
        self.term
            .checked_sub(self.spent())
            .filter(|margin| !margin.is_zero())
    }

    fn spent(&self) -> Duration {
        self.renew_every
            .saturating_add(self.guard())
            .saturating_add(self.pause_allowance)
    }

    /// Refuses terms that cannot work, and says which number to change.
    pub fn validate(&self) -> Result<()> {
        positive("term", self.term)?;
        positive("renew_every", self.renew_every)?;
        duration("max_lifetime", self.max_lifetime)?;
        if self.max_lifetime < self.term {
            let limit = format!("at least the term, {:?}", self.term);
            return Err(Error::invalid(
                "max_lifetime",
                format!("{:?}", self.max_lifetime),
                limit,
            ));
        }
        if self.margin().is_none() {
            let Self {
                term, renew_every, ..
            } = self;
            let rest = term.saturating_sub(self.guard().saturating_add(self.pause_allowance));
            if rest.is_zero() {
                let limit = format!(
                    "more than guard {:?} + pause allowance {:?}",
                    self.guard(),
                    self.pause_allowance
                );
                return Err(Error::invalid("term", format!("{term:?}"), limit));
            }
            let limit = format!(
                "less than {rest:?} (term {term:?} − guard {:?} − pause allowance {:?})",
                self.guard(),
                self.pause_allowance
            );
            return Err(Error::invalid(
                "renew_every",
                format!("{renew_every:?}"),
                limit,
            ));
        }
        Ok(())
    }
}

impl Default for LeaseTerms {
    fn default() -> Self {
        Self::MEDIUM
    }
}

const fn shorter(term: Duration, part: u64, most: Duration) -> Duration {
    let share = term.as_micros() as u64 / part;
    let most_micros = most.as_micros() as u64;
    Duration::from_micros(if share < most_micros {
        share
    } else {
        most_micros
    })
}

/// The deadline that a renewal at `now` gives: a term from now, cut by the maximum lifetime.
pub(crate) fn deadline(
    now: Timestamp,
    term: Duration,
    granted_at: Timestamp,
    max_lifetime: Duration,
) -> Timestamp {
    now.after(term).min(granted_at.after(max_lifetime))
}

/// Why a lease expired whose deadline passed.
pub(crate) fn overdue_cause(
    deadline: Timestamp,
    granted_at: Timestamp,
    max_lifetime: Duration,
) -> Cause {
    if deadline.as_micros() >= granted_at.as_micros().saturating_add(micros(max_lifetime)) {
        Cause::Lifetime
    } else {
        Cause::Deadline
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_grow_whatever_the_clock_does() {
        let mut issuer = Issuer::without_memory(Timestamp::from_micros(1_000));
        let mut last = 0;
        for now in [2_000, 1_500, 900_000, 10, 900_001] {
            let base = issuer.issue(7, Timestamp::from_micros(now)).get();
            assert!(base > last, "{base} after {last} at {now}");
            last = base + 6;
        }
    }

    #[test]
    fn tokens_of_a_grant_follow_each_other_and_the_clock() {
        let now = Timestamp::from_micros(50_000_000);
        let mut issuer = Issuer { last: 0, floor: 0 };
        let base = issuer.issue(7, now);
        assert_eq!(
            (base.get(), base.plus(6).get(), issuer.last),
            (50_000_000, 50_000_006, 50_000_006)
        );
        assert_eq!(issuer.issue(1, now).get(), 50_000_007);
        assert_eq!(Issuer::without_memory(now).floor, 50_020_000);
        assert_eq!(Issuer::BELIEF, Duration::from_secs(86_400));
    }

    #[test]
    fn a_nonce_matches_itself_alone() {
        let nonce = Nonce([0x5a; 16]);
        assert!(nonce.matches(&Nonce([0x5a; 16])));
        for (byte, bit) in (0..16).flat_map(|byte| (0..8).map(move |bit| (byte, bit))) {
            let mut other = nonce.0;
            other[byte] ^= 1 << bit;
            assert!(!nonce.matches(&Nonce(other)), "bit {bit} of byte {byte}");
            // Two equal differences do not make up for each other.
            other[(byte + 1) % 16] ^= 1 << bit;
            assert!(
                !nonce.matches(&Nonce(other)),
                "bit {bit} of {byte} and next"
            );
        }
    }

    #[test]
    fn an_issuer_without_memory_starts_above_everything_it_could_have_given() {
        let now = Timestamp::from_micros(50_000_000);
        let mut before = Issuer { last: 0, floor: 0 };
        let room = before.room(now);
        let highest = before.issue(room, now).get() + room - 1;
        assert_eq!(before.room(now), 0);
        assert!(Issuer::without_memory(now).issue(1, now).get() > highest);
    }

    #[test]
    fn a_mark_a_day_ahead_is_believed_and_one_beyond_is_not() {
        let now = Timestamp::from_micros(1_000_000);
        let mut issuer = Issuer { last: 5, floor: 0 };
        let day = now.after(Issuer::BELIEF).as_micros();
        assert!(!issuer.raise(FencingToken(day + 1), now));
        assert_eq!(issuer.floor, 0);
        assert!(issuer.raise(FencingToken(day), now));
        assert!(issuer.issue(1, now).get() > day);
    }

    #[test]
    fn another_issuers_token_is_followed_while_that_leaves_room() {
        let now = Timestamp::from_micros(1_000_000);
        let mut issuer = Issuer { last: 5, floor: 0 };
        let near = now.as_micros() + Issuer::LEAD - 1;
        issuer.follow(near, now);
        assert_eq!(issuer.last, near);
        issuer.follow(near + 1, now);
        assert_eq!(issuer.last, near, "there would be no token left to give");
        issuer.follow(now.after(Issuer::BELIEF).as_micros(), now);
        assert_eq!((issuer.last, issuer.room(now)), (near, 1));
    }

    #[test]
    fn terms_name_the_number_to_change() {
        assert!(LeaseTerms::SHORT.validate().is_ok());
        assert!(
            LeaseTerms::of_term(Duration::from_secs(1))
                .validate()
                .is_ok()
        );
        let slow = LeaseTerms {
            renew_every: Duration::from_secs(9),
            ..LeaseTerms::SHORT
        };
        assert_eq!(slow.validate().unwrap_err().field(), Some("renew_every"));
        let short = LeaseTerms {
            term: Duration::from_millis(1),
            ..LeaseTerms::SHORT
        };
        assert_eq!(short.validate().unwrap_err().field(), Some("term"));
        let term = LeaseTerms::SHORT.term;
        assert!(LeaseTerms::SHORT.max_lifetime(term).validate().is_ok());
        let brief = LeaseTerms::SHORT.max_lifetime(term / 2);
        assert_eq!(brief.validate().unwrap_err().field(), Some("max_lifetime"));
        let most = Duration::MAX;
        let doubtful = LeaseTerms::SHORT.allowances(most, most, most);
        assert_eq!(doubtful.validate().unwrap_err().field(), Some("term"));
    }

    #[test]
    fn terms_are_in_proportion_up_to_those_of_ten_seconds() {
        let millis = Duration::from_millis;
        let one = LeaseTerms::of_term(millis(3_000));
        assert_eq!(one.renew_every, millis(1_000));
        assert_eq!(one.max_lifetime, Duration::from_secs(86_400));
        assert_eq!(one.guard(), millis(2 * 30 + 150));
        assert_eq!(one.margin(), Some(millis(3_000 - 1_000 - 210 - 300)));
        let allowed = LeaseTerms::LONG;
        assert_eq!(allowed.guard(), millis(2 * 100 + 500));
        assert_eq!(allowed.pause_allowance, millis(1_000));
        // Nothing left is not enough.
        let rest = millis(3_000 - 210 - 300);
        assert_eq!(one.renew_every(rest).margin(), None);
    }

    #[test]
    fn a_renewal_is_cut_by_the_lifetime_and_so_is_the_cause() {
        let (at, second) = (Timestamp::from_micros, Duration::from_secs(1));
        let (granted, life) = (at(5_000_000), 10 * second);
        let until = |now| deadline(at(now), second, granted, life);
        assert_eq!(until(6_000_000), at(7_000_000));
        assert_eq!(until(14_500_000), at(15_000_000));
        let cause = |deadline| overdue_cause(at(deadline), granted, life);
        assert_eq!(cause(14_999_999), Cause::Deadline);
        assert_eq!(cause(15_000_000), Cause::Lifetime);
    }

    #[test]
    fn released_is_what_its_holder_ended() {
        let held = Verdict::Held {
            late: true,
            cancel: false,
        };
        assert!(held.is_held() && !held.is_fenced());
        assert!(Verdict::Fenced.is_fenced() && !Verdict::Fenced.is_held());
        assert!(LeaseEnd::Completed.is_released() && LeaseEnd::Surrendered.is_released());
        assert!(!LeaseEnd::Expired(Cause::Deadline).is_released());
        assert!(!LeaseEnd::Revoked.is_released());
    }

    #[test]
    fn a_receipt_survives_its_text_and_hides_its_proof() {
        let (queue, job) = (QueueName::new("mail").unwrap(), JobId::generate());
        let receipt = Receipt {
            queue: queue.clone(),
            partition: 3,
            grant: FencingToken(17),
            token: FencingToken(19),
            job,
            nonce: Nonce([0xab; 16]),
        };
        assert_eq!((receipt.queue(), receipt.partition()), (&queue, 3));
        assert_eq!((receipt.grant().get(), receipt.token().get()), (17, 19));
        assert_eq!((receipt.job(), receipt.nonce()), (job, &Nonce([0xab; 16])));
        let text = receipt.to_string();
        assert_eq!(text.parse::<Receipt>().unwrap(), receipt);
        let (parts, proof) = text.rsplit_once('/').unwrap();
        for proof in [
            &proof[1..],
            &format!("{proof}ab"),
            &format!("+b{}", &proof[2..]),
        ] {
            let wrong = format!("{parts}/{proof}").parse::<Receipt>().unwrap_err();
            assert_eq!(wrong.field(), Some("receipt"), "{proof}");
        }
        assert!(!format!("{receipt:?}").contains("abab"));
        assert!("a/b/c".parse::<Receipt>().is_err());
        let capitals = text.to_uppercase().replace("MAIL", "mail");
        assert!(capitals.parse::<Receipt>().is_err());
    }
}
