//! Which token the next lease gets.

use std::time::Duration;

use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind};
use crate::token::FencingToken;

/// Issues tokens: a hybrid logical clock. Pure; the store keeps its two numbers in the same atomic
/// step as the grant.
///
/// A counter forgets what it gave when its store is rolled back, and re-arms the zombie. This
/// follows the clock, so that an issuer that lost its memory starts above everything it gave
/// before.
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
    expect(dead_code, reason = "unused by the memory store")
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
        assert_eq!((issuer.last, issuer.room(now)), (near, 1));
    }
}
