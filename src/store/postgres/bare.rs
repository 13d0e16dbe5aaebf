//! A table of payloads without leases: what the store is measured against.

use std::net::IpAddr;

use deadpool_postgres::Object;
use tokio_postgres::types::Type;

use super::fault::{Done, Fault};
use super::{PostgresStore, at};
use crate::error::{Result, Verb};
use crate::store::load::{ProcessStat, ServerLoad};

/// A table beside the store's, behind the same connections, with the same durability.
pub struct Table {
    store: PostgresStore,
    name: String,
}

impl Table {
    /// # Errors
    /// As for opening a store.
    pub async fn create(url: &str) -> Result<Self> {
        let store = PostgresStore::open(url).await?;
        let ready = store.ready().await;
        ready.map_err(|fault| at(Verb::Open, fault.into_error()))?;
        let schema = &store.shared.options.schema;
        let name = format!("\"{schema}\".\"raw_{:016x}\"", fastrand::u64(..));
        let table = Self { store, name };
        let name = &table.name;
        let made =
            format!("CREATE TABLE {name} (id bigserial PRIMARY KEY, payload bytea NOT NULL)");
        table.run(&made).await?;
        Ok(table)
    }

    /// # Errors
    /// As for any call.
    pub async fn drop(self) -> Result<()> {
        self.run(&format!("DROP TABLE {}", self.name)).await
    }

    async fn run(&self, sql: &str) -> Result<()> {
        let done = async {
            let db = self.connection().await?;
            Ok::<_, Fault>(db.batch_execute(sql).await?)
        };
        done.await
            .map_err(|fault| at(Verb::Open, fault.into_error()))
    }

    async fn connection(&self) -> Done<Object> {
        let mut open = self.store.connection().await?;
        open.0.take().ok_or_else(super::given_back)
    }

    /// Inserts payloads, in a transaction.
    ///
    /// # Errors
    /// As for any call.
    pub async fn push(&self, payloads: &[Vec<u8>]) -> Result<()> {
        let sql = format!("INSERT INTO {} (payload) SELECT unnest($1)", self.name);
        let done = async {
            let db = self.connection().await?;
            Ok::<_, Fault>(
                db.execute_typed(&sql, &[(&payloads, Type::BYTEA_ARRAY)])
                    .await?,
            )
        };
        let pushed = done.await.map(drop);
        pushed.map_err(|fault| at(Verb::Enqueue, fault.into_error()))
    }

    /// Takes up to `max` payloads, in a transaction, and says how many there were.
    ///
    /// # Errors
    /// As for any call.
    pub async fn pop(&self, max: usize) -> Result<usize> {
        let name = &self.name;
        let sql = format!(
            "DELETE FROM {name} WHERE id = ANY (ARRAY (
                 SELECT id FROM {name} ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED))
             RETURNING payload"
        );
        let done = async {
            let db = self.connection().await?;
            let max = max as i64;
            Ok::<_, Fault>(db.query_typed(&sql, &[(&max, Type::INT8)]).await?)
        };
        let popped = done.await.map(|rows| rows.len());
        popped.map_err(|fault| at(Verb::Claim, fault.into_error()))
    }

    /// What the server has done since it started. Its CPU time is known if it runs on this machine.
    ///
    /// # Errors
    /// As for any call.
    pub async fn load(&self) -> Result<ServerLoad> {
        let sql = "SELECT pg_backend_pid(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
                          coalesce(host(inet_server_addr()), '127.0.0.1')";
        let looked = async {
            let db = self.connection().await?;
            let row = db.query_typed(sql, &[]).await?;
            let row = row.first().ok_or_else(super::given_back)?;
            let host: String = row.try_get(2)?;
            Ok::<_, Fault>((row.try_get::<_, i32>(0)?, row.try_get::<_, i64>(1)?, host))
        };
        let (pid, writes, host) = looked
            .await
            .map_err(|fault| at(Verb::Inspect, fault.into_error()))?;
        let is_here = host.parse().is_ok_and(|host: IpAddr| host.is_loopback());
        let backend = is_here.then(|| ProcessStat::of(pid as u32)).flatten();
        Ok(ServerLoad {
            cpu: backend.and_then(|backend| ProcessStat::of_family(backend.parent)),
            writes: Some(writes as u64),
            ..ServerLoad::default()
        })
    }
}
