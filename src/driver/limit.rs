//! Limits on a transaction under a lease: a frozen owner does not hold its successor (I16).
//!
//! An owner that stops in the middle of its transaction keeps the rows that it has written, and its
//! successor waits for them. Two things end that. **Limits**: the server ends a transaction that
//! stands still for a term, and a statement that takes longer than the lease had left. And **the
//! successor**: a transaction under a lease holds two shared advisory locks, on the scope and on
//! the token; whoever comes with a larger token and finds such a transaction standing still ends
//! its backend. A backend that has gone on to another transaction does not hold those locks any
//! more: a pooler's next client is not hit.
//!
//! | lock | key | seen in `pg_locks` as |
//! |---|---|---|
//! | scope | `hashtextextended(scope, 16)` | `classid`, `objid`: the two halves; `objsubid` 1 |
//! | token | the token's halves, the upper with its sign bit set | `classid - 2^31`, `objid`; `objsubid` 2 |

use std::time::Duration;

use super::{SqlArg, SqlError, SqlRow, SqlRunner};
use crate::lease::FencingToken;

/// What a transaction under a lease is allowed.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Limits {
    /// How long it may stand still.
    pub(crate) idle: Option<Duration>,
    /// How long one of its statements may take, and wait for a lock.
    pub(crate) wait: Option<Duration>,
}

impl Limits {
    /// Two arguments, in milliseconds.
    pub(crate) fn args(self) -> [SqlArg<'static>; 2] {
        let ms = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        // The server takes 0 for no limit, and nothing above 31 bits.
        let ms = |time| ms(time).clamp(1, i64::from(i32::MAX));
        [self.idle, self.wait].map(|limit| SqlArg::Int(limit.map(ms)))
    }
}

/// Two tables for a statement's `WITH`, over these names of arguments: `limits`, which puts limits
/// on the transaction, and `held`, which holds its scopes and token and says whether `another` is
/// at one of the scopes. Both do it when they are read, `held` after `limits`.
///
/// A limit of the caller's own that is stricter stays. The caller's own are kept in settings of
/// ours, so that a later call under a renewed lease can set longer ones.
macro_rules! limited {
    (idle $idle:literal, wait $wait:literal) => {
        concat!(
            "limits AS MATERIALIZED (
                 SELECT set_config('leasehold.' || name, own, true),
                        set_config(name, least(most, nullif(
                            (extract(epoch FROM own::interval) * 1000)::int8, 0))::text, true)
                 FROM (SELECT name, most,
                              coalesce(nullif(current_setting('leasehold.' || name, true), ''),
                                       current_setting(name)) AS own
                       FROM (VALUES ('idle_in_transaction_session_timeout', ",
            $idle,
            "::int8), ('statement_timeout', ",
            $wait,
            "::int8), ('lock_timeout', ",
            $wait,
            "::int8)) AS wanted (name, most)
                       WHERE most IS NOT NULL OFFSET 0) AS known)"
        )
    };
    (idle $idle:literal, wait $wait:literal, scopes $scopes:literal, token $token:literal) => {
        concat!(
            $crate::driver::limit::limited!(idle $idle, wait $wait),
            ", held AS MATERIALIZED (
                 SELECT coalesce(bool_or(is_shared), false) AS another
                 FROM (SELECT
                           -- In this order: what follows a false is not looked at.
                           pg_advisory_xact_lock_shared(scope)::text IS NOT NULL
                           AND pg_advisory_xact_lock_shared(
                               ((token >> 32) - 2147483648)::int4, ((token << 32) >> 32)::int4
                           )::text IS NOT NULL
                           -- Nobody else has it if it can be had alone, for a moment.
                           AND CASE WHEN pg_try_advisory_lock(scope)
                                    THEN NOT pg_advisory_unlock(scope) ELSE true END AS is_shared
                       FROM (SELECT hashtextextended(text, 16) AS scope, ", $token, "::int8 AS token
                             FROM (SELECT count(*) FROM limits) AS first,
                                  unnest(", $scopes, "::text[]) AS text
                             OFFSET 0) AS keys
                       OFFSET 0) AS locks)"
        )
    };
}
pub(crate) use limited;

const BEGIN: &str = concat!(
    "WITH ",
    limited!(idle "$1", wait "$2", scopes "$3", token "$4"),
    " SELECT ARRAY[another::text] AS answer FROM held"
);

/// In one statement with the proof: the backend holds one of the scopes now, under smaller tokens
/// only, and has stood still for a second.
const END_STALE: &str = "
    WITH still AS MATERIALIZED (
        SELECT pid FROM pg_stat_activity
        WHERE pid <> pg_backend_pid()
          AND (state LIKE 'idle in transaction%' AND state_change < clock_timestamp() - interval '1 s'
               OR wait_event = 'ClientWrite' AND query_start < clock_timestamp() - interval '1 s')
    ), stale AS MATERIALIZED (
        SELECT pid FROM pg_locks JOIN still USING (pid)
        WHERE locktype = 'advisory' AND granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        GROUP BY pid
        HAVING bool_or(objsubid = 1 AND classid::int8 << 32 | objid::int8 IN
                           (SELECT hashtextextended(text, 16) FROM unnest($1::text[]) AS text))
           AND max(CASE WHEN objsubid = 2 AND classid::int8 >> 31 = 1
                        THEN (classid::int8 & 2147483647) << 32 | objid::int8 END) < $2::int8
    )
    SELECT ARRAY[pg_terminate_backend(pid)::text] AS answer FROM stale";

/// Puts the limits on the transaction, holds the scopes, and ends whoever has been replaced there
/// and stands still.
pub(crate) async fn limit<D>(
    db: &mut impl SqlRunner<D>,
    limits: Limits,
    scopes: &[&str],
    token: FencingToken,
) -> Result<(), SqlError> {
    let texts = scopes.iter().map(|scope| Some(*scope)).collect();
    let [idle, wait] = limits.args();
    let token_arg = SqlArg::Int(Some(token.get() as i64));
    let args = [idle, wait, SqlArg::Texts(Some(texts)), token_arg];
    let answer = db.run(BEGIN, &args).await?;
    if is_true(&answer, 0) {
        end_stale(db, scopes, token).await?;
    }
    Ok(())
}

/// Whether the only row says so.
pub(crate) fn is_true(rows: &[SqlRow], column: usize) -> bool {
    let cell = rows.first().and_then(|row| row.get(column)?.as_deref());
    cell == Some("true")
}

/// Ends transactions under smaller tokens of these scopes that stand still. A server that does not
/// let this role do so is left to its own limits.
pub(crate) async fn end_stale<D>(
    db: &mut impl SqlRunner<D>,
    scopes: &[&str],
    token: FencingToken,
) -> Result<(), SqlError> {
    let texts = scopes.iter().map(|scope| Some(*scope)).collect();
    let args = [
        SqlArg::Texts(Some(texts)),
        SqlArg::Int(Some(token.get() as i64)),
    ];
    db.run("SAVEPOINT leasehold_stale", &[]).await?;
    let end = match db.run(END_STALE, &args).await {
        Ok(ended) => {
            if !ended.is_empty() {
                tracing::warn!(%token, "ended a transaction of a replaced owner that stood still");
            }
            "RELEASE SAVEPOINT leasehold_stale"
        }
        Err(refused) => {
            tracing::debug!(?refused, "cannot end the transaction of a replaced owner");
            "ROLLBACK TO SAVEPOINT leasehold_stale"
        }
    };
    db.run(end, &[]).await?;
    Ok(())
}
