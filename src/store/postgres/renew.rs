//! renew: extend grants, let single leases of them lapse.
//!
//! Where none lapses, that is one statement: a holder that is cut off amid it keeps nobody waiting.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio_postgres::GenericClient;

use super::PostgresStore;
use super::fault::{Done, corrupt};
use super::plain::kept;
use super::tx::{GrantKey, Tx, args};
use crate::job::QueueName;
use crate::lease::{Cause, FencingToken};
use crate::rules::ends;
use crate::rules::order::deadline;
use crate::store::sql::grant::offset;
use crate::store::{Beat, Renewal, codec};

impl PostgresStore {
    /// None: the call is not plain.
    pub(super) async fn renew_plain(&self, beats: &[Beat]) -> Done<Option<Vec<Renewal>>> {
        let Some(plain) = Beats::of(beats) else {
            return Ok(None);
        };
        let base = &self.shared.base;
        let patience = self.shared.options.patience.as_millis().to_string();
        let open = self.connection().await?;
        let rows = {
            let tx = Tx::new(open.client()?, base, false);
            tx.rows(
                "renew_plain",
                args![
                base.namespace => TEXT, patience => TEXT, tx.by_hand => INT8,
                plain.names => TEXT_ARRAY, plain.ids => INT8_ARRAY, plain.nonces => BYTEA_ARRAY,
                plain.upto => INT4_ARRAY, plain.tokens => INT8_ARRAY, plain.shown_names => TEXT_ARRAY,
                plain.shown_ids => INT8_ARRAY, plain.shown_nonces => BYTEA_ARRAY,
                plain.shown_tokens => INT8_ARRAY, plain.shown => BYTEA_ARRAY],
            )
            .await
        };
        let rows = kept(open, rows).await?;
        let Some((_, rows)) = rows.split_first() else {
            return Ok(None);
        };
        let mut renewals = vec![Renewal::Fenced; beats.len()];
        let mut refused = rows.len() < beats.len();
        for row in rows {
            let nth = row.try_get::<_, i32>(0)? as usize;
            let renewal = nth.checked_sub(1).and_then(|at| renewals.get_mut(at));
            let renewal = renewal.ok_or_else(|| corrupt("a renewal of another grant"))?;
            let tokens = |of: Vec<i64>| of.into_iter().map(|n| FencingToken::new(n as u64));
            let fenced: Vec<FencingToken> = tokens(row.try_get(3)?).collect();
            refused |= !fenced.is_empty();
            *renewal = Renewal::Held {
                granted: Duration::from_micros(row.try_get::<_, i64>(1)? as u64),
                cancel: tokens(row.try_get(2)?).collect(),
                fenced,
            };
        }
        if refused {
            self.fold(&plain.names).await;
        }
        Ok(Some(renewals))
    }
}

/// Beats without lapses, one for each grant.
#[derive(Default)]
struct Beats<'b> {
    names: Vec<&'b str>,
    ids: Vec<i64>,
    nonces: Vec<&'b [u8]>,
    upto: Vec<i32>,
    tokens: Vec<i64>,
    shown_names: Vec<&'b str>,
    shown_ids: Vec<i64>,
    shown_nonces: Vec<&'b [u8]>,
    shown_tokens: Vec<i64>,
    shown: Vec<Vec<u8>>,
}

impl<'b> Beats<'b> {
    fn of(beats: &'b [Beat]) -> Option<Self> {
        let number = |token: FencingToken| i64::try_from(token.get()).ok();
        let mut plain = Self::default();
        let (mut grants, mut showing) = (BTreeSet::new(), BTreeSet::new());
        for beat in beats {
            let first = grants.insert((&beat.queue, beat.grant));
            if !first || beat.partition != 0 || !beat.lapse.is_empty() {
                return None;
            }
            plain.names.push(beat.queue.as_str());
            plain.ids.push(number(beat.grant)?);
            plain.nonces.push(beat.nonce.as_bytes());
            for token in &beat.leases {
                plain.tokens.push(number(*token)?);
            }
            plain.upto.push(i32::try_from(plain.tokens.len()).ok()?);
            for (token, progress) in &beat.progress {
                if !showing.insert((&beat.queue, *token)) {
                    return None;
                }
                let mut shown = Vec::new();
                codec::put_progress(&mut shown, progress);
                plain.shown_names.push(beat.queue.as_str());
                plain.shown_ids.push(number(beat.grant)?);
                plain.shown_nonces.push(beat.nonce.as_bytes());
                plain.shown_tokens.push(number(*token)?);
                plain.shown.push(shown);
            }
        }
        (!plain.ids.is_empty()).then_some(plain)
    }
}

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
            let step = ends::expire(&job, Cause::Stalled, facts.cancel, self.now);
            front.extend(self.end_lease(key, &facts, job, step));
        }
        self.put_front(key.0, front);
        Ok(())
    }
}
