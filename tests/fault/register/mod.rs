//! The register of the lock-set experiment: a set of numbers that is read and replaced as a whole.

use std::collections::BTreeSet;
use std::path::PathBuf;

use leasehold::{Context, Failure, FencingToken, async_trait};
use serde::{Deserialize, Serialize};

mod postgres;
mod redis;
mod sqlite;

pub(crate) type Names = BTreeSet<u64>;

/// Where registers are kept.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Place {
    /// A file.
    Sqlite(PathBuf),
    /// A server, and the table.
    Postgres(String, String),
    /// A server, and the tag of the keys.
    Redis(String, String),
}

impl Place {
    /// Makes an empty register.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(clippy::unused_async, reason = "a server has to be waited for")
    )]
    pub(crate) async fn create(&self, key: usize) {
        match self {
            Self::Sqlite(path) => sqlite::Row::create(path, key),
            Self::Postgres(server, table) => postgres::Row::create(server, table, key).await,
            // A key that is not there is an empty register.
            Self::Redis(..) => {}
        }
    }

    /// Connects to a register.
    pub(crate) async fn connect(&self, key: usize) -> Box<dyn Register> {
        match self {
            Self::Sqlite(path) => Box::new(sqlite::Row::connect(path, key)),
            Self::Postgres(server, table) => {
                Box::new(postgres::Row::connect(server, table, key).await)
            }
            Self::Redis(server, tag) => Box::new(redis::Value::connect(server, tag, key).await),
        }
    }
}

/// One register, and a connection to it.
#[async_trait]
pub(crate) trait Register: Send {
    async fn read(&mut self) -> Names;

    /// Writes, whoever has written meanwhile.
    async fn write(&mut self, names: &Names);

    /// Writes, unless somebody with a larger token has written. What is often called fencing.
    async fn write_checked(&mut self, token: FencingToken, names: &Names) -> bool;

    /// Opens the fence, and then reads.
    async fn open_and_read(&mut self, ctx: &Context) -> Result<Names, Failure>;

    /// Writes, unless somebody with a larger token has opened.
    async fn write_fenced(&mut self, ctx: &Context, names: &Names) -> Result<bool, Failure>;
}
