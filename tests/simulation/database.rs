//! Where the PostgreSQL store's state is: a schema of the test's own server, one for each world.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::Store;
use leasehold::job::Namespace;
use leasehold::store::{PostgresOptions, PostgresStore};
use tokio_postgres::Client;

use crate::apart::Apart;
use crate::net::StoreClock;
use crate::postgres_server::shared;

/// Schemas that no world uses now. Making one costs more than most worlds.
static FREE: Mutex<Vec<String>> = Mutex::new(Vec::new());
static MADE: AtomicU64 = AtomicU64::new(0);
static WORLDS: AtomicU64 = AtomicU64::new(0);

pub(crate) struct Database {
    schema: String,
    /// Of this world alone: what a former one still does on the side concerns nobody.
    namespace: String,
    seed: u64,
}

impl Database {
    pub(crate) fn new(seed: u64) -> Self {
        // Starts the server, if nobody has yet.
        shared();
        let free = || FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let made = || format!("world_{}", MADE.fetch_add(1, Ordering::Relaxed));
        Self {
            schema: free().unwrap_or_else(made),
            namespace: format!("world-{}", WORLDS.fetch_add(1, Ordering::Relaxed)),
            seed,
        }
    }

    pub(crate) fn open(&self, clock: &StoreClock) -> Arc<dyn Store> {
        let namespace = Namespace::new(&self.namespace).expect("a good name");
        let options = PostgresOptions::new()
            .schema(&self.schema)
            .expect("a good name")
            .namespace(namespace)
            .connections(2)
            .clock(clock.clone());
        let mut config = shared().config();
        config.application_name(&self.namespace);
        Arc::new(Apart::open(self.seed, async move {
            let store = PostgresStore::with(config, options).await;
            Arc::new(store.expect("a store")) as Arc<dyn Store>
        }))
    }

    /// A copy of all tables and sequences, as a dump has it.
    pub(crate) fn keep(&self) {
        let (from, to) = (self.schema.clone(), self.kept());
        as_operator(async move |db| {
            // One snapshot for all of them: the store may be at work.
            let mut steps = vec![
                "BEGIN ISOLATION LEVEL REPEATABLE READ".to_owned(),
                "SET LOCAL client_min_messages = warning".to_owned(),
                format!("DROP SCHEMA IF EXISTS {to} CASCADE"),
                format!("CREATE SCHEMA {to}"),
                format!(
                    "CREATE TABLE {to}.sequences_kept AS SELECT sequencename, last_value
                     FROM pg_sequences WHERE schemaname = '{from}'"
                ),
            ];
            let copy = |table| format!("CREATE TABLE {to}.{table} AS TABLE {from}.{table}");
            steps.extend(tables(&db, &from).await.into_iter().map(copy));
            done(&db, steps).await;
        });
    }

    /// The store has stopped: the tables and sequences are as they were when a copy was kept.
    pub(crate) fn roll_back(&self) {
        let (from, to, store) = (self.kept(), self.schema.clone(), self.namespace.clone());
        as_operator(async move |db| {
            // What it had sent before it stopped must not arrive after.
            let open = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1)";
            while db.query_one(open, &[&store]).await.expect("a look").get(0) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let mut steps = vec!["BEGIN".to_owned()];
            for table in tables(&db, &to).await {
                steps.push(format!("DELETE FROM {to}.{table}"));
                steps.push(format!(
                    "INSERT INTO {to}.{table} OVERRIDING SYSTEM VALUE TABLE {from}.{table}"
                ));
            }
            steps.push(format!(
                "SELECT setval(format('{to}.%I', sequencename), coalesce(last_value, 1),
                               last_value IS NOT NULL)
                 FROM {from}.sequences_kept"
            ));
            done(&db, steps).await;
        });
    }

    fn kept(&self) -> String {
        format!("{}_kept", self.schema)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let schema = self.schema.clone();
        as_operator(async move |db| {
            let mut steps = vec!["BEGIN".to_owned()];
            // Which database this is does not change from one world to the next.
            let others = tables(&db, &schema).await;
            let others = others.iter().filter(|table| *table != "meta");
            steps.extend(others.map(|table| format!("DELETE FROM {schema}.{table}")));
            done(&db, steps).await;
        });
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(std::mem::take(&mut self.schema));
    }
}

/// All of it, or nothing.
async fn done(db: &Client, mut steps: Vec<String>) {
    steps.push("COMMIT".to_owned());
    let steps = steps.join(";\n");
    db.batch_execute(&steps).await.expect("an operator may");
}

async fn tables(db: &Client, schema: &str) -> Vec<String> {
    let sql = "SELECT tablename::text FROM pg_tables WHERE schemaname = $1 ORDER BY 1";
    let rows = db.query(sql, &[&schema]).await.expect("the tables");
    rows.iter().map(|row| row.get(0)).collect()
}

/// Does something at the server that is no business of the store.
fn as_operator(work: impl AsyncFnOnce(Client)) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async { work(shared().client().await).await });
}
