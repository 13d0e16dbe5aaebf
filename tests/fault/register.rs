//! The register of the lock-set experiment: a set of numbers in one row, read and replaced as a whole.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use leasehold::{Context, Failure, FencingToken};
use rusqlite::{Connection, Transaction, TransactionBehavior};
use serde::{Deserialize, Serialize};

type Names = BTreeSet<u64>;

/// Where registers are kept.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Place {
    Sqlite(PathBuf),
}

/// One register, and a connection to it.
pub(crate) struct Register {
    db: tokio::sync::Mutex<Connection>,
    key: i64,
}

impl Register {
    pub(crate) async fn connect(place: &Place, key: usize) -> Self {
        let Place::Sqlite(path) = place;
        let db = Connection::open(path).unwrap();
        db.busy_timeout(Duration::from_secs(60)).unwrap();
        Self {
            db: db.into(),
            key: key as i64,
        }
    }

    pub(crate) async fn create(place: &Place, key: usize) {
        let register = Self::connect(place, key).await;
        let db = register.db.lock().await;
        db.execute_batch(
            "PRAGMA journal_mode = WAL;
             CREATE TABLE IF NOT EXISTS register (key INTEGER PRIMARY KEY, names TEXT, mark INTEGER)",
        )
        .unwrap();
        let row = "INSERT INTO register (key, names, mark) VALUES (?1, '[]', 0)";
        db.execute(row, [register.key]).unwrap();
    }

    pub(crate) async fn read(&self) -> Names {
        select(&*self.db.lock().await, self.key)
    }

    /// The fence is opened before the first read, and the mark is there when this returns.
    pub(crate) async fn open_and_read(&self, ctx: &Context) -> Result<Names, Failure> {
        let mut db = self.db.lock().await;
        let tx = begin(&mut db);
        let names = select(&*ctx.fence_in(&tx)?, self.key);
        tx.commit()?;
        Ok(names)
    }

    /// Writes, whoever has written meanwhile.
    pub(crate) async fn write(&self, names: &Names) -> bool {
        replace(&*self.db.lock().await, self.key, names);
        true
    }

    /// Writes, unless somebody with a larger token has written. What is often called fencing.
    pub(crate) async fn write_checked(&self, token: FencingToken, names: &Names) -> bool {
        let mut db = self.db.lock().await;
        let tx = begin(&mut db);
        let sql = "UPDATE register SET mark = ?2 WHERE key = ?1 AND mark <= ?2";
        let passed = tx.execute(sql, [self.key, token.get() as i64]).unwrap() == 1;
        if passed {
            replace(&tx, self.key, names);
        }
        tx.commit().unwrap();
        passed
    }

    /// Writes, unless somebody with a larger token has opened.
    pub(crate) async fn write_fenced(&self, ctx: &Context, names: &Names) -> Result<bool, Failure> {
        let mut db = self.db.lock().await;
        let tx = begin(&mut db);
        match ctx.fence_in(&tx) {
            Ok(fenced) => replace(&fenced, self.key, names),
            Err(error) if error.stale().is_some() => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        tx.commit()?;
        Ok(true)
    }
}

fn begin(db: &mut Connection) -> Transaction<'_> {
    db.transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap()
}

fn select(db: &Connection, key: i64) -> Names {
    let sql = "SELECT names FROM register WHERE key = ?1";
    let names: String = db.query_row(sql, [key], |row| row.get(0)).unwrap();
    serde_json::from_str(&names).unwrap()
}

fn replace(db: &Connection, key: i64, names: &Names) {
    let names = serde_json::to_string(names).unwrap();
    let sql = "UPDATE register SET names = ?2 WHERE key = ?1";
    assert_eq!(db.execute(sql, (key, names)).unwrap(), 1);
}
