//! wait: sleep until one of the queues may have work.
//!
//! Commits of this handle wake its sleepers directly, those of other processes through
//! [`poll`](super::poll); woken from there, a sleeper looks for work with a read.

use std::time::Duration;

use rusqlite::OptionalExtension;

use super::SqliteStore;
use super::fault::Done;
use super::place::{first_position, queue_of_position, tier_of_position};
use super::tx::Tx;
use crate::clock::{Timestamp, monotonic};
use crate::error::{Result, Verb};
use crate::job::QueueName;
use crate::rules::order::is_suspects;

statements! {
    READY_POSITION = "
        SELECT position FROM leasehold_ready WHERE position >= ?1 AND position < ?2
        ORDER BY position LIMIT 1";
}

impl SqliteStore {
    pub(super) async fn until_work(
        &self,
        queues: &[QueueName],
        suspects: bool,
        limit: Duration,
    ) -> Result<()> {
        // Asleep before the look, so that no job slips in between.
        let mut woken = self.shared.wakers.sleep(queues, suspects);
        let mut elsewhere = self.shared.poll.subscribe();
        let sleeper = self
            .shared
            .poll
            .sleeper()
            .filter(|_| !self.shared.options.inline);
        let asleep = sleeper.map(|sleeper| sleeper.sleep(queues));
        let (work, due) = self.look(queues, suspects).await?;
        if work {
            return Ok(());
        }
        if self.shared.options.inline {
            let _ = tokio::time::timeout(limit, woken).await;
            return Ok(());
        }
        self.shared
            .poll
            .start(&self.shared.path, &self.shared.wakers);
        let until = tokio::time::sleep_until(monotonic() + limit);
        tokio::pin!(until);
        loop {
            tokio::select! {
                _ = &mut woken => return Ok(()),
                () = &mut until => return Ok(()),
                _ = elsewhere.changed() => {
                    if let Some(asleep) = &asleep {
                        asleep.again();
                    }
                    let (work, now_due) = self.look(queues, suspects).await?;
                    let earlier = now_due.is_some_and(|at| due.is_none_or(|due| at < due));
                    if work || earlier {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn look(
        &self,
        queues: &[QueueName],
        suspects: bool,
    ) -> Result<(bool, Option<Timestamp>)> {
        let queues = queues.to_vec();
        self.read(Verb::Wait, move |tx, _| tx.look(&queues, suspects))
            .await
    }
}

impl Tx<'_> {
    /// Whether one of the queues has a job in tier, and when the first of their scheduled jobs is
    /// due.
    fn look(&mut self, queues: &[QueueName], suspects: bool) -> Done<(bool, Option<Timestamp>)> {
        let mut first_due: Option<Timestamp> = None;
        for name in queues {
            let Some(queue) = self.known(name)? else {
                continue;
            };
            first_due = first_due.into_iter().chain(self.first_due(queue)?).min();
            let at = &self.queues[queue];
            if at.paused || at.counts.ready == at.counts.parked {
                continue;
            }
            let end = first_position(at.id + 1, 0);
            let mut from = first_position(at.id, usize::from(!suspects));
            loop {
                let position = self
                    .sql(READY_POSITION)?
                    .query_row([from, end], |row| row.get::<_, i64>(0))
                    .optional()?;
                let Some(position) = position else { break };
                let tier = tier_of_position(position);
                if suspects || !is_suspects(tier) {
                    return Ok((true, first_due));
                }
                from = first_position(queue_of_position(position), tier + 1);
            }
        }
        Ok((false, first_due))
    }
}
