//! renew: extend grants, let single leases of them lapse.

use std::time::Duration;

use tokio_postgres::GenericClient;

use super::fault::{Done, corrupt};
use super::record::Json;
use super::tx::{Tx, args, plain};
use crate::history::Progress;
use crate::lease::FencingToken;
use crate::limits::REASON_BYTES;
use crate::store::{Beat, Renewal};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn renew(&self, beats: &[Beat]) -> Done<Vec<Renewal>> {
        let number = |token: FencingToken| token.get().cast_signed();
        let (mut queues, mut grants, mut nonces) = (Vec::new(), Vec::new(), Vec::new());
        let (mut upto, mut tokens) = (Vec::new(), Vec::new());
        let (mut lapse_of, mut lapse) = (Vec::new(), Vec::new());
        let (mut shown_of, mut shown_tokens, mut shown) = (Vec::new(), Vec::new(), Vec::new());
        for (nth, beat) in (1_i32..).zip(beats) {
            queues.push(beat.queue.as_str());
            // This store has no partitions: no grant has the number of one that says so.
            grants.push(if beat.partition == 0 {
                number(beat.grant)
            } else {
                -1
            });
            nonces.push(&beat.nonce.as_bytes()[..]);
            tokens.extend(beat.leases.iter().copied().map(number));
            upto.push(tokens.len() as i32);
            for token in &beat.lapse {
                lapse_of.push(nth);
                lapse.push(number(*token));
            }
            for (token, progress) in &beat.progress {
                shown_of.push(nth);
                shown_tokens.push(number(*token));
                shown.push(Json(Progress {
                    note: plain(&progress.note, REASON_BYTES),
                    ..progress.clone()
                }));
            }
        }
        let (lapse_of, lapse) = (some(lapse_of), some(lapse));
        let (shown_of, shown_tokens, shown) = (some(shown_of), some(shown_tokens), some(shown));
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, queues => TEXT_ARRAY,
            grants => INT8_ARRAY, nonces => BYTEA_ARRAY, upto => INT4_ARRAY, tokens => INT8_ARRAY,
            lapse_of => INT4_ARRAY, lapse => INT8_ARRAY, shown_of => INT4_ARRAY,
            shown_tokens => INT8_ARRAY, shown => JSONB_ARRAY, &*self.base.patience => TEXT
        ];
        let mut renewals = vec![Renewal::Fenced; beats.len()];
        for row in self.rows("renew", args).await? {
            let nth: i32 = row.try_get(0)?;
            let at = usize::try_from(nth - 1).ok();
            let renewal = at.and_then(|at| renewals.get_mut(at));
            let renewal = renewal.ok_or_else(|| corrupt("a renewal of another grant"))?;
            let given = |of: Vec<i64>| {
                let tokens = of.into_iter().map(|n| FencingToken::new(n.cast_unsigned()));
                tokens.collect()
            };
            *renewal = Renewal::Held {
                granted: Duration::from_micros(row.try_get::<_, i64>(1)?.cast_unsigned()),
                cancel: given(row.try_get(2)?),
                fenced: given(row.try_get(3)?),
            };
        }
        Ok(renewals)
    }
}

fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
