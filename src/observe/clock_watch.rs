//! Warnings about a store whose clock is behind its tokens.
//!
//! A clock that was ahead and has been set back stops nothing ([`Issuer::room`]). But if the store
//! loses data while its clock is behind, it could give the same tokens again. So the worker logs
//! when that begins, once a minute while it lasts, and when it is over.
//!
//! [`Issuer::room`]: crate::rules::issue::Issuer::room

use std::time::Duration;

use tokio::time::Instant;

/// Between two warnings. It is over when no claim has found it for as long: the queues of a worker
/// take turns, and not all of them need be behind.
const PAUSE: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct ClockWatch {
    behind: Option<Spell>,
}

struct Spell {
    seen: Instant,
    told: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Behind(Duration),
    Over,
}

impl ClockWatch {
    /// Takes note of a claim's answer, and says what there is to say.
    pub(crate) fn note(&mut self, behind: Option<Duration>, now: Instant) {
        match self.word(behind, now) {
            None => {}
            Some(Word::Behind(behind)) => tracing::warn!(
                ?behind,
                "the store's clock is behind the tokens that it has given: it was set back. Claims \
                 go on; until it has caught up, lose no data of the store and restore no backup"
            ),
            Some(Word::Over) => {
                tracing::info!("the store's clock has caught up with the tokens that it has given");
            }
        }
    }

    fn word(&mut self, behind: Option<Duration>, now: Instant) -> Option<Word> {
        match (behind, &mut self.behind) {
            (Some(behind), None) => {
                let (seen, told) = (now, now);
                self.behind = Some(Spell { seen, told });
                Some(Word::Behind(behind))
            }
            (Some(behind), Some(spell)) => {
                spell.seen = now;
                let is_time = now - spell.told >= PAUSE;
                is_time.then(|| {
                    spell.told = now;
                    Word::Behind(behind)
                })
            }
            (None, Some(spell)) if now - spell.seen >= PAUSE => {
                self.behind = None;
                Some(Word::Over)
            }
            (None, _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::monotonic;

    #[test]
    fn says_it_once_a_minute_and_that_it_is_over() {
        let (mut watch, start) = (ClockWatch::default(), monotonic());
        let behind = Duration::from_secs(7_200);
        let mut said = Vec::new();
        // Another queue is not behind, and is claimed from in turn.
        for second in 0..400_u32 {
            let is_behind = (10..200).contains(&second) && second % 2 == 0;
            let found = is_behind.then_some(behind);
            let word = watch.word(found, start + Duration::from_secs(1) * second);
            said.extend(word.map(|word| (second, word)));
        }
        let late = Word::Behind(behind);
        assert_eq!(
            said,
            [
                (10, late),
                (70, late),
                (130, late),
                (190, late),
                (258, Word::Over)
            ]
        );
    }
}
