//! reap: expire overdue leases, the oldest first.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_postgres::GenericClient;

use super::fault::{Done, garbled};
use super::tx::{GrantKey, Tx, args, time};
use crate::error::Verb;
use crate::job::JobRecord;
use crate::lease::FencingToken;
use crate::rules::ends;
use crate::rules::order::overdue_cause;
use crate::store::{Expiry, ReapRequest};

/// How often, and how long each time, a reaper waits for grants that somebody has in hand. One who is
/// frozen with them must not keep the others from theirs.
const TRIES: u32 = 10;
const MOMENT: Duration = Duration::from_millis(10);

/// Jobs of one step that go to the front, with the token that each had.
type Front = Vec<(FencingToken, JobRecord)>;

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn reap(&mut self, request: &ReapRequest) -> Done<Vec<Expiry>> {
        let ((), recalled, queues, now) = tokio::try_join!(biased;
            self.begin(),
            self.recall(request.request),
            async {
                self.rows("queue_ids", args![self.base.namespace => TEXT])
                    .await
            },
            self.clock()
        )?;
        self.now = now;
        if let Some(first) = self.recalled(request.request, Verb::Reap, &recalled)? {
            return serde_json::from_slice(&first).map_err(|_| garbled());
        }
        let mut overdue = Vec::new();
        for row in queues {
            let id: i32 = row.try_get(0)?;
            overdue.extend(self.all_overdue(id, request.max).await?);
        }
        overdue.sort_unstable_by_key(|key| (self.grants[key].deadline, key.1));
        let mut expired = Vec::new();
        let mut fronts = BTreeMap::<usize, Front>::new();
        for key in overdue {
            let front = fronts.entry(key.0).or_default();
            self.expire_grant(key, request.max, &mut expired, front)?;
        }
        for (queue, front) in fronts {
            self.put_front(queue, front);
        }
        let answer = serde_json::to_vec(&expired).map_err(|_| garbled())?;
        self.remember(request.request, Verb::Reap, answer);
        Ok(expired)
    }

    /// Expires up to `max` overdue leases of a queue, by (deadline, token).
    pub(super) async fn expire_overdue(&mut self, queue: usize, max: usize) -> Done<Vec<Expiry>> {
        let mut expired = Vec::new();
        let mut front = Front::new();
        for key in self.overdue(self.queues[queue].id, max).await? {
            self.expire_grant(key, max, &mut expired, &mut front)?;
        }
        self.put_front(queue, front);
        Ok(expired)
    }

    /// The same, also those that somebody else has in hand, if he lets go of them in a moment.
    async fn all_overdue(&mut self, of: i32, max: usize) -> Done<Vec<GrantKey>> {
        let mut keys = self.overdue(of, max).await?;
        for _ in 0..TRIES {
            let args = args![of => INT4, time(self.now) => INT8, max as i64 => INT8];
            if self.rows("overdue_ids", args).await?.len() <= keys.len() {
                break;
            }
            tokio::time::sleep(MOMENT).await;
            keys = self.overdue(of, max).await?;
        }
        Ok(keys)
    }

    /// The overdue grants of a queue by (deadline, token), locked. Each has a live lease, so that
    /// `max` of them are enough for `max` leases.
    async fn overdue(&mut self, of: i32, max: usize) -> Done<Vec<GrantKey>> {
        let args = args![of => INT4, time(self.now) => INT8, max as i64 => INT8];
        let rows = self.rows("overdue", args).await?;
        let keys = self.hold(&rows).await?;
        // One that a settlement of this very call has opened came without its records.
        self.open(&keys).await?;
        Ok(keys)
    }

    /// Expires the leases of an overdue grant in token order, until `expired` has `max`.
    fn expire_grant(
        &mut self,
        key: GrantKey,
        max: usize,
        expired: &mut Vec<Expiry>,
        front: &mut Front,
    ) -> Done<()> {
        let Some(held) = self.held(key) else {
            return Ok(());
        };
        let cause = overdue_cause(held.deadline, held.granted_at, held.max_lifetime);
        let living: Vec<usize> = held.living().take(max - expired.len()).collect();
        for at in living {
            let Some((facts, job)) = self.leased(key, at)? else {
                continue;
            };
            let step = ends::expire(&job, cause, facts.cancel, self.now);
            let name = &self.queues[key.0].name;
            expired.push(Expiry::new(name, &job, &facts, cause, &step));
            front.extend(self.end_lease(key, &facts, job, step));
        }
        Ok(())
    }
}
