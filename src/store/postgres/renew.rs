//! renew: extend grants, let single leases of them lapse.

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::tx::{GrantKey, Tx};
use crate::job::QueueName;
use crate::lease::{Cause, FencingToken, deadline};
use crate::lifecycle;
use crate::store::held::offset;
use crate::store::{Beat, Renewal};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn renew(&mut self, beats: &[Beat]) -> Done<Vec<Renewal>> {
        let mut wanted: Vec<(&QueueName, FencingToken)> =
            beats.iter().map(|beat| (&beat.queue, beat.grant)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let names: Vec<&str> = wanted.iter().map(|(queue, _)| queue.as_str()).collect();
        let ((), queues, grants, now) = tokio::try_join!(biased;
            self.begin(),
            self.named(&names),
            self.lock_grants(&wanted),
            self.clock()
        )?;
        self.now = now;
        self.keep(&queues)?;
        self.hold(&grants).await?;
        let lapsing = beats.iter().filter(|beat| !beat.lapse.is_empty());
        let lapsing: Vec<GrantKey> = lapsing
            .filter_map(|beat| Some((self.known(&beat.queue)?, beat.grant)))
            .collect();
        self.open(&lapsing).await?;
        beats.iter().map(|beat| self.renew_one(beat)).collect()
    }

    fn renew_one(&mut self, beat: &Beat) -> Done<Renewal> {
        let Some(key) = self.may_renew(beat) else {
            self.fenced(&beat.queue, beat.leases.len() + beat.lapse.len());
            return Ok(Renewal::Fenced);
        };
        for (token, progress) in &beat.progress {
            if let Some(at) = self.live(key, *token) {
                self.note(key, at, |note| note.progress = Some(progress.clone()));
            }
        }
        self.lapse(key, &beat.lapse)?;

        let mut cancel = Vec::new();
        let mut fenced = Vec::new();
        for &token in &beat.leases {
            match self.live(key, token) {
                Some(at) if self.grants[&key].cancel(at) => cancel.push(token),
                Some(_) => {}
                None => fenced.push(token),
            }
        }
        self.fenced(&beat.queue, fenced.len());
        let now = self.now;
        let Some(held) = self.held(key) else {
            return Ok(Renewal::Fenced);
        };
        held.renew(deadline(now, held.term, held.granted_at, held.max_lifetime));
        Ok(Renewal::Held {
            granted: held.deadline.since(now),
            cancel,
            fenced,
        })
    }

    fn may_renew(&mut self, beat: &Beat) -> Option<GrantKey> {
        let key = (self.known(&beat.queue)?, beat.grant);
        let now = self.now;
        let held = self.held(key)?;
        // Past its deadline a lease is gone, whether or not anybody has expired it yet.
        let may = held.deadline > now && held.nonce.matches(&beat.nonce) && beat.partition == 0;
        may.then_some(key)
    }

    fn live(&mut self, key: GrantKey, token: FencingToken) -> Option<usize> {
        let held = self.held(key)?;
        offset(key.1, token).filter(|at| held.is_live(*at))
    }

    fn lapse(&mut self, key: GrantKey, tokens: &[FencingToken]) -> Done<()> {
        let mut front = Vec::new();
        for &token in tokens {
            let Some(at) = self.live(key, token) else {
                continue;
            };
            let Some((facts, job)) = self.leased(key, at)? else {
                continue;
            };
            let step = lifecycle::expire(&job, Cause::Stalled, facts.cancel, self.now);
            front.extend(self.end_lease(key, &facts, job, step));
        }
        self.put_front(key.0, front);
        Ok(())
    }
}
