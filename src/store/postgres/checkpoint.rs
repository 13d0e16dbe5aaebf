//! checkpoint: save state under a lease, never behind what that lease has saved.

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::settle::verdict;
use super::tx::{Named, Receipts, Tx, args};
use crate::lease::Verdict;
use crate::store::{Checkpoint, Checkpointed};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn checkpoint(
        &self,
        named: Named,
        checkpoints: &[Checkpoint],
    ) -> Done<Vec<Checkpointed>> {
        let receipts: Receipts = checkpoints.iter().map(|one| &one.receipt).collect();
        let seqs: Vec<i64> = checkpoints
            .iter()
            .map(|one| one.seq.cast_signed())
            .collect();
        let states: Vec<&[u8]> = checkpoints.iter().map(|one| &*one.bytes).collect();
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, named.session => UUID,
            named.lane => INT8, named.seq => INT8, receipts.queues => TEXT_ARRAY,
            receipts.jobs => UUID_ARRAY, receipts.grants => INT8_ARRAY,
            receipts.tokens => INT8_ARRAY, receipts.nonces => BYTEA_ARRAY, seqs => INT8_ARRAY,
            states => BYTEA_ARRAY, self.patience(named) => TEXT
        ];
        let mut answers = vec![Checkpointed::Fenced; checkpoints.len()];
        for row in self.rows("checkpoint", args).await? {
            let nth: i32 = row.try_get(0)?;
            let code: i16 = row.try_get(1)?;
            let at = usize::try_from(nth - 1).ok();
            let Some(answer) = at.and_then(|at| answers.get_mut(at)) else {
                continue;
            };
            *answer = if code == 8 {
                let seq: i64 = row.try_get(2)?;
                Checkpointed::Behind {
                    seq: seq.cast_unsigned(),
                }
            } else {
                match verdict(code) {
                    Verdict::Held { late, cancel } => Checkpointed::Saved { late, cancel },
                    Verdict::Fenced => Checkpointed::Fenced,
                }
            };
        }
        Ok(answers)
    }
}
