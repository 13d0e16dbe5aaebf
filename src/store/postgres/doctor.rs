//! The check-up of a server: what can be lost, and what to set. Changes nothing.

use std::time::Duration;

use tokio_postgres::{Client, Row};

use super::fault::{Done, explain};
use super::migrate::{Found, VERSION, found};
use super::tally::Count;
use super::text::in_schema;
use super::tx::{Arg, args};
use super::{CONNECT_LIMIT, PostgresOptions, at, dial, url};
use crate::clock::{Clock as _, SystemClock, Timestamp, monotonic};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::rules::issue::Issuer;
use crate::store::health::Finding;

/// The oldest version whose statements can do what ours do.
const OLDEST: i32 = 130_000;

/// A clock that differs more than this from the asker's is worth a look.
const CLOCKS: Duration = Duration::from_secs(1);

/// A transaction that is open for longer keeps vacuum from its work.
const LONG: i64 = 600;

/// A transaction that puts jobs into a queue and is open for longer, in seconds, makes claims look
/// at places that they have been at before.
const LONG_ENQUEUE: i64 = 30;

/// A statement that may not take longer, in milliseconds, is cut off on a busy day.
const SHORT_STATEMENT: i64 = 5_000;

/// Below this many, dead rows are nothing to worry about.
const DEAD_ROWS: i64 = 100_000;

/// Looks at the server that a URL names.
///
/// # Errors
/// If it cannot be reached, or the URL cannot be read.
pub async fn examine(text: &str) -> Result<Vec<Finding>> {
    let failed = |error: Error| at(Verb::Open, error);
    let (mut config, options) = url::parsed(text).map_err(failed)?;
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(Duration::from_secs(5));
    }
    config.application_name("leasehold doctor");
    let dial = dial::dial(&options.trust).map_err(failed)?;
    let connected = tokio::time::timeout(CONNECT_LIMIT, config.connect(dial)).await;
    let silent = |_| {
        failed(Error::new(
            ErrorKind::Unavailable,
            "the server does not answer",
        ))
    };
    let connected = connected.map_err(silent)?;
    let (db, connection) = connected.map_err(|error| failed(explain(&error)))?;
    let driver = tokio::spawn(connection);
    let patient = Patient { db, options };
    let findings = patient.examine().await;
    driver.abort();
    Ok(findings)
}

struct Patient {
    db: Client,
    options: PostgresOptions,
}

impl Patient {
    async fn examine(&self) -> Vec<Finding> {
        let found = found(&self.db, &self.options.schema).await;
        let has_tables = matches!(found, Ok(Found::Fit { .. }));
        let mut findings = vec![
            self.version().await,
            self.schema(&found),
            self.writable().await,
            self.durability().await,
            self.replication().await,
            self.vacuum().await,
            self.transactions().await,
            self.statements().await,
            self.clock().await,
            self.encryption().await,
            self.connections().await,
            self.rights().await,
        ];
        if has_tables {
            findings.extend([
                self.enqueuers().await,
                self.tokens().await,
                self.ledger().await,
            ]);
        }
        findings
    }

    /// Asks unnamed, as the store does: a pooler may be between.
    async fn one(&self, sql: &str, args: &[Arg<'_>]) -> Option<Row> {
        self.db
            .query_typed(sql, args)
            .await
            .ok()?
            .into_iter()
            .next()
    }

    async fn setting(&self, name: &str) -> Option<String> {
        let sql = "SELECT current_setting($1)";
        self.one(sql, args![name => TEXT]).await?.try_get(0).ok()
    }

    async fn number(&self, sql: &str) -> Option<i64> {
        self.one(sql, &[]).await?.try_get(0).ok()
    }

    async fn version(&self) -> Finding {
        const CHECK: &str = "version";
        let number = self.setting("server_version_num").await;
        let number = number.and_then(|number| number.parse::<i32>().ok());
        let Some(number) = number else {
            return Finding::unseen(CHECK, "the right to read settings");
        };
        let found = format!("{}.{}", number / 10_000, number % 10_000);
        if number < OLDEST {
            let advice = "version 13 or later is needed: upgrade the server";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
    }

    fn schema(&self, found: &Done<Found>) -> Finding {
        const CHECK: &str = "schema";
        let schema = &self.options.schema;
        match found {
            Ok(Found::Fit {
                version: VERSION,
                needs_nothing: true,
            }) => Finding::fine(CHECK, format!("{schema}, version {VERSION}")),
            Ok(Found::Fit {
                version: VERSION, ..
            }) => {
                let advice = "its functions are those of another build of this version: `leasehold migrate` \
                              replaces them";
                Finding::note(
                    CHECK,
                    format!("{schema}, version {VERSION}, changed"),
                    advice,
                )
            }
            Ok(Found::Fit { version, .. }) => {
                let advice = format!("this program knows version {VERSION}, and works with it");
                Finding::note(CHECK, format!("{schema}, version {version}"), advice)
            }
            Ok(Found::Nothing) => {
                let advice = "the first call that writes makes its tables, if the role may; or run \
                              `leasehold migrate`";
                Finding::note(CHECK, format!("{schema} is not there"), advice)
            }
            Ok(Found::Older(version)) => {
                let advice = format!(
                    "this program needs version {VERSION}: run `leasehold migrate`, or add migrate=true to \
                     the URL. Older programs go on working"
                );
                Finding::risk(CHECK, format!("{schema}, version {version}"), advice)
            }
            Ok(Found::TooNew(version)) => {
                let advice = format!("this program knows version {VERSION}: upgrade it");
                Finding::risk(CHECK, format!("{schema}, version {version}"), advice)
            }
            Err(_) => Finding::unseen(CHECK, "USAGE of the schema and SELECT of its tables"),
        }
    }

    async fn writable(&self) -> Finding {
        const CHECK: &str = "writable";
        match self
            .setting("default_transaction_read_only")
            .await
            .as_deref()
        {
            Some("off") => Finding::fine(CHECK, "transactions may write"),
            Some(_) => {
                let advice = "nothing can be enqueued, claimed or completed: set \
                              default_transaction_read_only to off for this role or database";
                Finding::risk(CHECK, "default_transaction_read_only is on", advice)
            }
            None => Finding::unseen(CHECK, "the right to read settings"),
        }
    }

    async fn statements(&self) -> Finding {
        const CHECK: &str = "statements";
        let sql = "SELECT (extract(epoch FROM current_setting('statement_timeout')::interval) * 1000)::bigint";
        match self.number(sql).await {
            Some(0) => Finding::fine(CHECK, "no statement_timeout"),
            Some(most) if most >= SHORT_STATEMENT => {
                Finding::fine(CHECK, format!("statement_timeout is {most} ms"))
            }
            Some(most) => {
                let advice = "calls are cut off when the server is busy, and fail again when they are \
                              repeated: set it to 30 s or more for this role";
                Finding::risk(CHECK, format!("statement_timeout is {most} ms"), advice)
            }
            None => Finding::unseen(CHECK, "the right to read settings"),
        }
    }

    async fn durability(&self) -> Finding {
        const CHECK: &str = "durability";
        let mut off = Vec::new();
        for name in ["fsync", "full_page_writes", "synchronous_commit"] {
            match self.setting(name).await {
                Some(value) if value == "off" => off.push(name),
                Some(_) => {}
                None => return Finding::unseen(CHECK, "the right to read settings"),
            }
        }
        match off.as_slice() {
            [] => Finding::fine(CHECK, "an answered call survives the loss of power"),
            ["synchronous_commit"] => {
                let advice = "a crash of the server takes the last calls with it, though they were \
                              answered: jobs are lost or run again. Set it to on for this role";
                Finding::risk(CHECK, "synchronous_commit is off", advice)
            }
            off => {
                let advice = "the loss of power can destroy the whole database: turn it on";
                Finding::risk(CHECK, format!("{} is off", off.join(", ")), advice)
            }
        }
    }

    async fn replication(&self) -> Finding {
        const CHECK: &str = "replication";
        let standby = self.number("SELECT pg_is_in_recovery()::int::bigint").await;
        if standby == Some(1) {
            let advice = "it cannot be written: use the address of the primary";
            return Finding::risk(CHECK, "this is a standby", advice);
        }
        let copies = self
            .number("SELECT count(*) FROM pg_stat_replication")
            .await;
        let Some(copies) = copies else {
            return Finding::unseen(CHECK, "SELECT of pg_stat_replication");
        };
        let names = self.setting("synchronous_standby_names").await;
        let synchronous = names.is_some_and(|names| !names.is_empty());
        match (copies, synchronous) {
            (0, true) => {
                let advice = "calls wait until a standby answers, and none is connected";
                Finding::risk(CHECK, "synchronous, without a standby", advice)
            }
            (0, false) => {
                let advice = "if this machine is lost, its jobs are";
                Finding::note(CHECK, "no standby", advice)
            }
            (n, true) => Finding::fine(CHECK, format!("{n} connected, synchronous")),
            (n, false) => {
                let advice = "a failover may lose the last moments: jobs are lost or run again. Tokens \
                              still grow. Set synchronous_standby_names where that matters";
                Finding::note(CHECK, format!("{n} connected, asynchronous"), advice)
            }
        }
    }

    async fn vacuum(&self) -> Finding {
        const CHECK: &str = "vacuum";
        if self.setting("autovacuum").await.as_deref() == Some("off") {
            let advice = "the queue's tables grow without end: turn it on";
            return Finding::risk(CHECK, "autovacuum is off", advice);
        }
        let schema = &self.options.schema;
        let sql =
            "SELECT coalesce(sum(n_dead_tup), 0)::bigint, coalesce(sum(n_live_tup), 0)::bigint,
                          coalesce(sum(pg_total_relation_size(relid)), 0)::bigint
                   FROM pg_stat_user_tables WHERE schemaname = $1";
        let Some(row) = self.one(sql, args![schema => TEXT]).await else {
            return Finding::unseen(CHECK, "SELECT of pg_stat_user_tables");
        };
        let (dead, live, bytes): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
        let found = format!("{dead} dead rows, {live} live, {} MiB", bytes >> 20);
        if dead > DEAD_ROWS.max(2 * live) {
            let advice = "vacuum does not keep up: look for a transaction that never ends, and at \
                          autovacuum_max_workers";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
    }

    async fn transactions(&self) -> Finding {
        const CHECK: &str = "transactions";
        let sql = "SELECT age, whose FROM (
                       SELECT extract(epoch FROM clock_timestamp() - xact_start)::bigint AS age,
                              format('process %s of role %s in database %s, application %L, %s', pid, usename, datname,
                                     application_name, state)
                       FROM pg_stat_activity WHERE backend_type = 'client backend' AND xact_start IS NOT NULL
                       UNION ALL
                       SELECT extract(epoch FROM clock_timestamp() - prepared)::bigint,
                              format('prepared transaction %L of role %s in database %s', gid, owner, database)
                       FROM pg_prepared_xacts) AS open (age, whose)
                   ORDER BY age DESC LIMIT 1";
        let Some(row) = self.one(sql, &[]).await else {
            return Finding::unseen(CHECK, "pg_read_all_stats");
        };
        let (oldest, whose): (i64, String) = (row.get(0), row.get(1));
        let found = format!("the oldest is open for {oldest} s: {whose}");
        if oldest > LONG {
            let advice = "vacuum cannot remove what it might still see, and the queue's tables grow: end it, \
                          or set idle_in_transaction_session_timeout";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
    }

    /// Whoever puts jobs into a queue holds a lock of it until the transaction ends (`place.sql`).
    async fn enqueuers(&self) -> Finding {
        const CHECK: &str = "enqueuers";
        let sql = in_schema(
            "SELECT coalesce(q.namespace || '/' || q.name, 'a new queue'), extract(epoch FROM clock_timestamp() - a.xact_start)::bigint,
                    format('process %s of role %s, application %L, %s', a.pid, a.usename, a.application_name, a.state)
             FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
             LEFT JOIN leasehold.queue q ON q.id = (l.objid::bigint / 2)::integer
             WHERE l.locktype = 'advisory' AND l.granted AND l.mode = 'ShareLock' AND l.objsubid = 2
               AND l.classid = 'leasehold.queue'::regclass
               AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
               AND a.pid <> pg_backend_pid()
             ORDER BY a.xact_start NULLS LAST LIMIT 1",
            &self.options.schema,
        );
        let Ok(rows) = self.db.query_typed(&sql, &[]).await else {
            return Finding::unseen(CHECK, "SELECT of the table queue");
        };
        let Some(row) = rows.first() else {
            return Finding::fine(CHECK, "no transaction is putting jobs into a queue");
        };
        let (queue, open): (String, Option<i64>) = (row.get(0), row.get(1));
        let (Some(open), Some(whose)) = (open, row.get::<_, Option<String>>(2)) else {
            return Finding::unseen(CHECK, "pg_read_all_stats");
        };
        if open <= LONG_ENQUEUE {
            return Finding::fine(CHECK, format!("the oldest is open for {open} s"));
        }
        let found = format!("one has put jobs into {queue} and is open for {open} s: {whose}");
        let advice = "until it ends its jobs are not there, and claims of that queue slow down with each \
                      job taken: commit or roll back soon after enqueue_in";
        Finding::risk(CHECK, found, advice)
    }

    async fn clock(&self) -> Finding {
        const CHECK: &str = "clock";
        let sent = monotonic();
        let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
        let Some(theirs) = self.number(sql).await else {
            return Finding::unseen(CHECK, "the right to ask the time");
        };
        let took = sent.elapsed();
        let ours = SystemClock.now().before(took / 2).as_micros();
        let apart = Duration::from_micros(ours.abs_diff(theirs as u64));
        let found = format!("{} ms from this machine's", apart.as_millis());
        if apart > CLOCKS + took {
            let advice = "leases and tokens go by the server's clock: see that it and its standbys keep \
                          the time (NTP)";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
    }

    async fn tokens(&self) -> Finding {
        const CHECK: &str = "tokens";
        let sql = in_schema(
            "SELECT h.last, h.floor, leasehold.clock_1(NULL)
             FROM leasehold.queue q CROSS JOIN LATERAL leasehold.head_1(q.id) AS h
             ORDER BY greatest(h.last, h.floor) DESC LIMIT 1",
            &self.options.schema,
        );
        let Ok(rows) = self.db.query_typed(&sql, &[]).await else {
            return Finding::unseen(CHECK, "SELECT of the tables queue and head");
        };
        let number = |row: &Row, at: usize| row.get::<_, i64>(at) as u64;
        let behind = rows.first().and_then(|row| {
            let (last, floor) = (number(row, 0), number(row, 1));
            Issuer { last, floor }.clock_behind(Timestamp::from_micros(number(row, 2)))
        });
        Finding::tokens(behind)
    }

    async fn ledger(&self) -> Finding {
        // One statement, so that nobody grants in between.
        let live = Count::Live as usize + 1;
        let sql = in_schema(
            &format!(
                "SELECT coalesce((SELECT sum((leasehold.counts_1(q.id))[{live}]) FROM leasehold.queue q), 0)::bigint,
                        (SELECT count(*) FROM leasehold.job WHERE state = state.LEASED)"
            ),
            &self.options.schema,
        );
        match self.one(&sql, &[]).await {
            Some(row) => {
                let (counted, leases): (i64, i64) = (row.get(0), row.get(1));
                Finding::ledger(counted as u64, leases as u64)
            }
            None => Finding::unseen("ledger", "SELECT of the tables head, tally and job"),
        }
    }

    async fn encryption(&self) -> Finding {
        const CHECK: &str = "encryption";
        let sql = "SELECT CASE WHEN ssl THEN 1 WHEN inet_client_addr() IS NULL
                       OR inet_client_addr() <<= '127.0.0.0/8' OR inet_client_addr() = '::1' THEN 2
                       ELSE 0 END::bigint
                   FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
        match self.number(sql).await {
            Some(1) => Finding::fine(CHECK, "TLS"),
            Some(2) => Finding::fine(CHECK, "none, on one machine"),
            Some(_) => {
                let advice = "who is on the way can read and change everything: \
                              sslmode=verify-full";
                Finding::note(CHECK, "none", advice)
            }
            None => Finding::unseen(CHECK, "SELECT of pg_stat_ssl"),
        }
    }

    async fn connections(&self) -> Finding {
        const CHECK: &str = "connections";
        let most = self.setting("max_connections").await;
        let most = most.and_then(|most| most.parse::<i64>().ok());
        let used = self
            .number("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
            .await;
        let (Some(most), Some(used)) = (most, used) else {
            return Finding::unseen(CHECK, "pg_read_all_stats");
        };
        let found = format!("{used} of {most} in use");
        if used * 10 > most * 9 {
            let advice = "workers that start now may find none: raise max_connections, or put a pooler \
                          between";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
    }

    /// All that is missing, in one list.
    async fn rights(&self) -> Finding {
        const CHECK: &str = "rights";
        let schema = &self.options.schema;
        let sql = "SELECT coalesce(string_agg(what, '; ' ORDER BY nth, what), '') FROM (
                SELECT 1, format('USAGE of the schema %s', n.nspname) FROM pg_namespace n
                WHERE n.nspname = $1 AND NOT has_schema_privilege(n.oid, 'USAGE')
                UNION ALL
                SELECT 2, format('%s of %s', string_agg(p.name, ', ' ORDER BY p.nth), c.relname)
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                CROSS JOIN (VALUES (1, 'SELECT'), (2, 'INSERT'), (3, 'UPDATE'), (4, 'DELETE')) AS p (nth, name)
                WHERE n.nspname = $1 AND c.relkind = 'r' AND NOT has_table_privilege(c.oid, p.name)
                  AND NOT (c.relname = 'meta' AND p.nth > 1 OR c.relname = 'audit' AND p.nth > 2)
                GROUP BY c.relname
                UNION ALL
                SELECT 3, format('USAGE and SELECT of the sequence %s', c.relname)
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = $1 AND c.relkind = 'S' AND c.relname = 'place'
                  AND NOT (has_sequence_privilege(c.oid, 'USAGE') AND has_sequence_privilege(c.oid, 'SELECT'))
                UNION ALL
                SELECT 4, 'EXECUTE of ' || string_agg(DISTINCT p.proname::text, ', ' ORDER BY p.proname::text)
                FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
                WHERE n.nspname = $1 AND NOT has_function_privilege(p.oid, 'EXECUTE')
                HAVING count(*) > 0
            ) AS missing (nth, what)";
        let Some(row) = self.one(sql, args![schema => TEXT]).await else {
            return Finding::unseen(CHECK, "SELECT of the catalog");
        };
        let missing: String = row.get(0);
        if missing.is_empty() {
            return Finding::fine(CHECK, "all that workers and operators need");
        }
        let advice = "`leasehold migrate --roles` prints roles for producers, workers, readers and operators; \
                      one that only enqueues or looks needs less";
        Finding::risk(CHECK, format!("no {missing}"), advice)
    }
}
