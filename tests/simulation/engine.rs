//! The real stores, on the world's clock: memory, SQLite without its writer's thread, and
//! PostgreSQL and Redis with their servers.

use std::sync::Arc;

use leasehold::Store;
use leasehold::store::MemoryStore;

use crate::database::Database;
use crate::net::StoreClock;
use crate::server::Server;

/// Which store code runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Engine {
    Memory,
    Sqlite,
    Postgres,
    Redis,
}

/// Where a store's state is between two starts of it.
pub(crate) enum Disk {
    /// The state is the store: a restart is an outage, a rollback loses everything.
    Memory(Option<Arc<dyn Store>>),
    File(tempfile::TempDir),
    Database(Database),
    Server(Server),
}

impl Disk {
    #[cfg_attr(
        not(feature = "postgres"),
        expect(unused_variables, reason = "only a server's store has dice of its own")
    )]
    pub(crate) fn new(engine: Engine, seed: u64) -> Self {
        match engine {
            Engine::Memory => Self::Memory(None),
            Engine::Sqlite => {
                // In memory where the system has it: nothing here is about the disk.
                let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
                Self::File(dir.expect("a directory"))
            }
            Engine::Postgres => Self::Database(Database::new(seed)),
            Engine::Redis => Self::Server(Server::new(seed)),
        }
    }

    /// Starts the store.
    pub(crate) fn open(&mut self, clock: &StoreClock) -> Arc<dyn Store> {
        match self {
            Self::Memory(kept) => {
                let new = || Arc::new(MemoryStore::with_clock(clock.clone())) as Arc<dyn Store>;
                Arc::clone(kept.get_or_insert_with(new))
            }
            Self::File(dir) => {
                use leasehold::store::{SqliteOptions, SqliteStore};

                let options = SqliteOptions::new()
                    .clock(clock.clone())
                    .synchronous_normal()
                    .inline();
                let store = SqliteStore::with(dir.path().join("jobs.db"), options);
                Arc::new(store.expect("the file opens"))
            }
            Self::Database(database) => database.open(clock),
            Self::Server(server) => server.open(clock),
        }
    }

    /// Keeps a copy, for a later rollback.
    pub(crate) fn keep(&self) {
        match self {
            Self::Memory(_) => {}
            Self::File(dir) => copy(dir.path(), "jobs.db", "kept.db"),
            Self::Database(database) => database.keep(),
            Self::Server(server) => server.keep(),
        }
    }

    /// The store has stopped; when it starts again it is as it was when a copy was kept.
    pub(crate) fn roll_back(&mut self) {
        match self {
            Self::Memory(kept) => *kept = None,
            Self::File(dir) => copy(dir.path(), "kept.db", "jobs.db"),
            Self::Database(database) => database.roll_back(),
            Self::Server(server) => server.roll_back(),
        }
    }
}

fn copy(dir: &std::path::Path, from: &str, to: &str) {
    for part in ["", "-wal"] {
        let (from, to) = (
            dir.join(format!("{from}{part}")),
            dir.join(format!("{to}{part}")),
        );
        if from.exists() {
            std::fs::copy(from, to).expect("a copy");
        } else if to.exists() {
            std::fs::remove_file(to).expect("it is there");
        }
    }
    let shared = dir.join(format!("{to}-shm"));
    if shared.exists() {
        std::fs::remove_file(shared).expect("it is there");
    }
}
