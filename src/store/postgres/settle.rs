//! settle: end held leases; refuse every other receipt.

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::tx::{Named, Receipts, Tx, args, plain};
use crate::clock::nanos;
use crate::lease::Verdict;
use crate::limits::REASON_BYTES;
use crate::store::{Outcome, Settlement};

const COMPLETE: i16 = 0;
const RETRY: i16 = 1;
const SURRENDER: i16 = 2;
const DECLINE: i16 = 3;
const BURY: i16 = 4;

/// The codes of outcomes, by the names that the functions know: `outcome.RETRY`.
pub(super) const OUTCOMES: [(&str, i16); 5] = [
    ("COMPLETE", COMPLETE),
    ("RETRY", RETRY),
    ("SURRENDER", SURRENDER),
    ("DECLINE", DECLINE),
    ("BURY", BURY),
];

pub(super) const fn code(outcome: &Outcome) -> i16 {
    match outcome {
        Outcome::Complete { .. } => COMPLETE,
        Outcome::Retry { .. } => RETRY,
        Outcome::Surrender { .. } => SURRENDER,
        Outcome::Decline { .. } => DECLINE,
        Outcome::Bury { .. } => BURY,
    }
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn settle(
        &self,
        named: Named,
        settlements: &[Settlement],
    ) -> Done<Vec<Verdict>> {
        let receipts: Receipts = settlements.iter().map(|one| &one.receipt).collect();
        let outcomes = settlements.iter().map(|one| &one.outcome);
        let codes: Vec<i16> = outcomes.clone().map(code).collect();
        let codes = codes.iter().any(|code| *code != COMPLETE).then_some(codes);
        let delays = any(outcomes.clone(), |outcome| match outcome {
            Outcome::Retry { delay, .. }
            | Outcome::Surrender { delay, .. }
            | Outcome::Decline { delay, .. } => Some(nanos(*delay)),
            _ => None,
        });
        let reasons = any(outcomes.clone(), |outcome| match outcome {
            Outcome::Retry { reason, .. }
            | Outcome::Decline { reason, .. }
            | Outcome::Bury { reason } => Some(plain(reason, REASON_BYTES)),
            _ => None,
        });
        let marks = any(outcomes.clone(), |outcome| {
            Some(i64::try_from(outcome.mark()?.get()).unwrap_or(i64::MAX))
        });
        let results = any(outcomes, |outcome| match outcome {
            Outcome::Complete { result } => result.as_deref(),
            _ => None,
        });
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, named.session => UUID,
            named.lane => INT8, named.seq => INT8, receipts.queues => TEXT_ARRAY,
            receipts.jobs => UUID_ARRAY, receipts.grants => INT8_ARRAY,
            receipts.tokens => INT8_ARRAY, receipts.nonces => BYTEA_ARRAY, codes => INT2_ARRAY,
            delays => INT8_ARRAY, reasons => TEXT_ARRAY, marks => INT8_ARRAY,
            results => BYTEA_ARRAY, self.patience(named) => TEXT
        ];
        let verdicts: Vec<i16> = self.row("settle", args).await?.try_get(0)?;
        Ok(verdicts.into_iter().map(verdict).collect())
    }
}

/// A verdict as the functions give it.
pub(super) fn verdict(code: i16) -> Verdict {
    if code == 0 {
        return Verdict::Fenced;
    }
    Verdict::Held {
        late: code & 2 > 0,
        cancel: code & 4 > 0,
    }
}

/// None if no outcome has any.
fn any<'o, T>(
    outcomes: impl Iterator<Item = &'o Outcome>,
    of: impl Fn(&'o Outcome) -> Option<T>,
) -> Option<Vec<Option<T>>> {
    let all: Vec<Option<T>> = outcomes.map(of).collect();
    all.iter().any(Option::is_some).then_some(all)
}
