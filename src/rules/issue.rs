//! Which token the next lease gets.

use std::time::Duration;

use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind};
use crate::token::FencingToken;

/// Issues tokens: a hybrid logical clock. Pure; the store keeps its two numbers in the same atomic
/// step as the grant.
///
/// A counter that is rolled back with its store issues old tokens again, and fences let a stale
/// owner pass. This follows the clock, so that an issuer that lost its memory starts above
/// everything it gave before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Issuer {
    /// The last token given.
    pub last: u64,
    /// Nothing at or below this is ever given again.
    pub floor: u64,
}

/// What a store does with claims while its clock is behind the tokens that it has given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenBehind {
    /// Grants, with the tokens that follow the last.
    #[default]
    GoOn,
    /// Refuses, until the clock has caught up.
    Refuse,
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

    /// How far the clock is behind the tokens given, if by more than speed can explain: it was
    /// ahead and has been set back, or a fence has shown a mark of the future.
    pub fn clock_behind(&self, now: Timestamp) -> Option<Duration> {
        // Speed takes `last` up to the lead above a floor that is itself the lead above the clock.
        let is_past_floor = self.last > self.floor.saturating_add(Self::LEAD);
        let highest = if is_past_floor { self.last } else { self.floor };
        (highest > now.as_micros() + Self::LEAD).then(|| self.ahead(now))
    }

    /// How far the tokens given are ahead of the clock, for whatever reason.
    pub fn ahead(&self, now: Timestamp) -> Duration {
        let highest = self.last.max(self.floor);
        Duration::from_micros(highest.saturating_sub(now.as_micros()))
    }

    /// How many tokens can be given now.
    ///
    /// Refusing claims while the clock is behind would only guard against a loss of memory in that
    /// time, and would stop all work for as long. So unless `when_behind` says
    /// otherwise they go on, and `last` grows by one for each lease: slower than any clock.
    pub fn room(&self, now: Timestamp, when_behind: WhenBehind) -> u64 {
        if when_behind == WhenBehind::GoOn && self.clock_behind(now).is_some() {
            return Self::LEAD;
        }
        self.room_by_clock(now)
    }

    fn room_by_clock(&self, now: Timestamp) -> u64 {
        let base = self.base(now);
        (now.as_micros().max(self.floor) + Self::LEAD + 1).saturating_sub(base)
    }

    /// Gives `n` tokens and returns the first.
    pub fn issue(&mut self, n: u64, now: Timestamp) -> FencingToken {
        let base = self.base(now);
        self.last = base + n - 1;
        FencingToken::new(base)
    }

    /// Raises the floor above a mark that a fence has already accepted. False if the mark is too
    /// far ahead to be believed.
    pub fn raise(&mut self, mark: FencingToken, now: Timestamp) -> bool {
        if mark.get() > now.after(Self::BELIEF).as_micros() {
            return false;
        }
        self.floor = self.floor.max(mark.get());
        true
    }

    /// Follows a token that the caller has seen of another issuer, as long as that leaves room. One
    /// far ahead is left alone: a mark that raised one queue's tokens must not stop another queue.
    pub fn follow(&mut self, seen: u64, now: Timestamp) {
        let last = self.last.max(seen);
        let followed = Self { last, ..*self };
        if followed.room_by_clock(now) > 0 {
            *self = followed;
        }
    }

    fn base(&self, now: Timestamp) -> u64 {
        (self.last + 1).max(self.floor + 1).max(now.as_micros())
    }
}

/// The refusal of a claim for which no token fits, the last being so far ahead of the clock.
#[cfg_attr(
    not(any(feature = "sqlite", feature = "redis", feature = "postgres")),
    expect(dead_code, reason = "unused by the memory store")
)]
pub(crate) fn tokens_ahead(ahead: Duration) -> Error {
    let then = if ahead > Duration::from_micros(2 * Issuer::LEAD) {
        "the clock was set back, and `clock=strict` refuses claims until it has caught up"
    } else {
        "repeat in a moment"
    };
    Error::new(
        ErrorKind::TokensAhead,
        format!("the last token is {ahead:.1?} ahead of the clock; {then}"),
    )
}

/// The refusal to remove a queue that is an issuer of its own while its tokens are ahead of the
/// clock by more than the lead. Made again, it would begin below them.
#[cfg_attr(
    not(any(feature = "redis", feature = "postgres")),
    expect(dead_code, reason = "the other stores have one issuer, which stays")
)]
pub(crate) fn forgets_tokens() -> Error {
    let why = "the queue's last token is ahead of the clock, which was set back: removed now and made \
               again, the queue would give tokens that it has given; wait until the clock has caught \
               up";
    Error::new(ErrorKind::TokensAhead, why)
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
    fn an_issuer_without_memory_starts_above_everything_it_could_have_given() {
        let now = Timestamp::from_micros(50_000_000);
        let mut before = Issuer { last: 0, floor: 0 };
        let room = before.room(now, WhenBehind::GoOn);
        let highest = before.issue(room, now).get() + room - 1;
        assert_eq!(before.room(now, WhenBehind::GoOn), 0);
        assert!(Issuer::without_memory(now).issue(1, now).get() > highest);
    }

    #[test]
    fn a_mark_a_day_ahead_is_believed_and_one_beyond_is_not() {
        let now = Timestamp::from_micros(1_000_000);
        let mut issuer = Issuer { last: 5, floor: 0 };
        let day = now.after(Issuer::BELIEF).as_micros();
        assert!(!issuer.raise(FencingToken::new(day + 1), now));
        assert_eq!(issuer.floor, 0);
        assert!(issuer.raise(FencingToken::new(day), now));
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
        let room = issuer.room(now, WhenBehind::GoOn);
        assert_eq!((issuer.last, room), (near, 1));
    }

    #[test]
    fn speed_does_not_make_a_clock_late() {
        let now = Timestamp::from_micros(50_000_000);
        let mut issuer = Issuer::without_memory(now);
        let room = issuer.room(now, WhenBehind::GoOn);
        issuer.issue(room, now);
        assert_eq!(issuer.ahead(now), Duration::from_millis(40));
        assert_eq!(issuer.clock_behind(now), None);
        assert_eq!(issuer.room(now, WhenBehind::GoOn), 0);
    }

    #[test]
    fn a_clock_set_back_stops_claims_only_where_that_is_wished() {
        let hours = Duration::from_secs(7_200);
        let now = Timestamp::from_micros(50_000_000);
        let mut issuer = Issuer::without_memory(now);
        let before = issuer.issue(3, now.after(hours)).plus(2);
        assert_eq!(issuer.room(now, WhenBehind::Refuse), 0);
        assert_eq!(
            issuer.clock_behind(now),
            Some(hours + Duration::from_micros(2))
        );
        for _ in 0..100 {
            assert!(issuer.room(now, WhenBehind::GoOn) >= 1_000);
            issuer.issue(1_000, now);
        }
        assert_eq!(issuer.last, before.get() + 100_000, "one for each lease");
        let caught_up = now.after(hours + Duration::from_millis(81));
        assert_eq!(issuer.clock_behind(caught_up), None);
    }

    #[test]
    fn a_mark_of_the_future_does_not_stop_the_queue_that_it_raised() {
        let now = Timestamp::from_micros(50_000_000);
        let mut issuer = Issuer { last: 5, floor: 0 };
        let mark = FencingToken::new(now.after(Duration::from_secs(3_600)).as_micros());
        assert!(issuer.raise(mark, now));
        for _ in 0..100 {
            assert!(issuer.room(now, WhenBehind::GoOn) >= 1_000);
            issuer.issue(1_000, now);
        }
        assert!(issuer.clock_behind(now).is_some());
    }

    #[test]
    fn a_refusal_tells_the_true_distance() {
        let told = |ahead| tokens_ahead(ahead).to_string();
        assert!(told(Duration::from_millis(20)).contains("20.0ms ahead"));
        let hours = told(Duration::from_secs(7_200));
        assert!(
            hours.contains("7200.0s ahead") && hours.contains("clock=strict"),
            "{hours}"
        );
    }
}
