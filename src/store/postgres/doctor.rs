//! The check-up of a server: what can be lost, and what to set. Changes nothing.

use std::time::Duration;

use tokio_postgres::{Client, Row};

use super::fault::explain;
use super::migrate::{VERSION, is_current};
use super::tally::Count;
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
        let mut findings = vec![
            self.version().await,
            self.schema().await,
            self.durability().await,
            self.replication().await,
            self.vacuum().await,
            self.transactions().await,
            self.clock().await,
            self.encryption().await,
            self.connections().await,
            self.rights().await,
        ];
        if self.has_tables().await {
            findings.extend([self.tokens().await, self.ledger().await]);
        }
        findings
    }

    async fn has_tables(&self) -> bool {
        let schema = &self.options.schema;
        let sql = "SELECT 1 FROM pg_tables WHERE schemaname = $1 AND tablename = 'tallies'";
        self.one(sql, args![schema => TEXT]).await.is_some()
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

    async fn schema(&self) -> Finding {
        const CHECK: &str = "schema";
        let schema = &self.options.schema;
        match is_current(&self.db, schema).await {
            Ok(true) => Finding::fine(CHECK, format!("{schema}, version {VERSION}")),
            Ok(false) => {
                let advice = "opening the store makes or updates its tables, if the role may; or run \
                              `leasehold migrate`";
                Finding::note(CHECK, format!("{schema}, not there or older"), advice)
            }
            Err(fault) => match fault.into_error() {
                error if error.kind() == ErrorKind::TooNew => {
                    let advice = format!("this program knows version {VERSION}: upgrade it");
                    Finding::risk(CHECK, format!("{schema}, of a later version"), advice)
                }
                _ => Finding::unseen(CHECK, "USAGE of the schema and SELECT of its tables"),
            },
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
        // Also that of a replication slot or a prepared one: whatever holds old rows.
        let sql = "SELECT greatest(
                       (SELECT max(extract(epoch FROM clock_timestamp() - xact_start))::bigint
                        FROM pg_stat_activity WHERE backend_type = 'client backend'),
                       (SELECT max(extract(epoch FROM clock_timestamp() - prepared))::bigint
                        FROM pg_prepared_xacts), 0)";
        let Some(oldest) = self.number(sql).await else {
            return Finding::unseen(CHECK, "pg_read_all_stats");
        };
        let found = format!("the oldest is open for {oldest} s");
        if oldest > LONG {
            let advice = "it keeps vacuum from its work in the whole database: end it, or set \
                          idle_in_transaction_session_timeout";
            return Finding::risk(CHECK, found, advice);
        }
        Finding::fine(CHECK, found)
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
        let sql = format!(
            "SELECT q.last, q.floor, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
             FROM {}.queues q ORDER BY greatest(q.last, q.floor) DESC LIMIT 1",
            self.options.schema
        );
        let Ok(rows) = self.db.query_typed(&sql, &[]).await else {
            return Finding::unseen(CHECK, "SELECT of the table queues");
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
        let sql = format!(
            "SELECT (SELECT coalesce(sum(tally[{live}]), 0)::bigint FROM {schema}.tallies),
                    (SELECT coalesce(sum(live), 0)::bigint FROM {schema}.grants)",
            live = Count::Live as usize + 1,
            schema = self.options.schema
        );
        match self.one(&sql, &[]).await {
            Some(row) => {
                let (counted, leases): (i64, i64) = (row.get(0), row.get(1));
                Finding::ledger(counted as u64, leases as u64)
            }
            None => Finding::unseen("ledger", "SELECT of the tables tallies and grants"),
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

    async fn rights(&self) -> Finding {
        const CHECK: &str = "rights";
        let schema = &self.options.schema;
        let sql = "SELECT coalesce(string_agg(c.relname, ', ' ORDER BY c.relname), '')
                   FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE n.nspname = $1 AND (
                       (c.relkind = 'r' AND NOT (has_table_privilege(c.oid, 'SELECT')
                            AND has_table_privilege(c.oid, 'INSERT')
                            AND has_table_privilege(c.oid, 'UPDATE')
                            AND has_table_privilege(c.oid, 'DELETE')))
                       OR (c.relkind = 'S' AND c.relname = 'places'
                           AND NOT has_sequence_privilege(c.oid, 'USAGE')))";
        let usage = "SELECT coalesce(bool_and(has_schema_privilege(oid, 'USAGE')), true)
                     FROM pg_namespace WHERE nspname = $1";
        let (Some(tables), Some(usage)) = (
            self.one(sql, args![schema => TEXT]).await,
            self.one(usage, args![schema => TEXT]).await,
        ) else {
            return Finding::unseen(CHECK, "SELECT of the catalog");
        };
        let (missing, usage): (String, bool) = (tables.get(0), usage.get(0));
        if usage && missing.is_empty() {
            return Finding::fine(CHECK, "all that the store needs");
        }
        let found = match missing.as_str() {
            _ if !usage => format!("no USAGE of the schema {schema}"),
            missing => format!("not all of {missing}"),
        };
        let advice = "grant the role USAGE of the schema, all rights on its tables, and USAGE of its \
                      sequence";
        Finding::risk(CHECK, found, advice)
    }
}
