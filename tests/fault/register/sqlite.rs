//! A row of a SQLite file.

use std::path::Path;
use std::time::Duration;

use leasehold::{Context, Failure, FencingToken, async_trait};
use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::{Names, Register};

pub(crate) struct Row {
    db: Connection,
    key: i64,
}

impl Row {
    pub(crate) fn connect(path: &Path, key: usize) -> Self {
        let db = Connection::open(path).unwrap();
        db.busy_timeout(Duration::from_secs(60)).unwrap();
        let key = key as i64;
        Self { db, key }
    }

    pub(crate) fn create(path: &Path, key: usize) {
        let row = Self::connect(path, key);
        row.db
            .execute_batch(
                "PRAGMA journal_mode = WAL;
                 CREATE TABLE IF NOT EXISTS register (
                     key INTEGER PRIMARY KEY, names TEXT NOT NULL, mark INTEGER NOT NULL
                 )",
            )
            .unwrap();
        let sql = "INSERT INTO register (key, names, mark) VALUES (?1, '[]', 0)";
        row.db.execute(sql, [row.key]).unwrap();
    }

    fn begin(&mut self) -> Transaction<'_> {
        let immediate = TransactionBehavior::Immediate;
        self.db.transaction_with_behavior(immediate).unwrap()
    }
}

#[async_trait]
impl Register for Row {
    async fn read(&mut self) -> Names {
        select(&self.db, self.key)
    }

    async fn write(&mut self, names: &Names) {
        replace(&self.db, self.key, names);
    }

    async fn write_checked(&mut self, token: FencingToken, names: &Names) -> bool {
        let key = self.key;
        let tx = self.begin();
        let sql = "UPDATE register SET mark = ?2 WHERE key = ?1 AND mark <= ?2";
        let passed = tx.execute(sql, [key, token.get() as i64]).unwrap() == 1;
        if passed {
            replace(&tx, key, names);
        }
        tx.commit().unwrap();
        passed
    }

    async fn open_and_read(&mut self, ctx: &Context) -> Result<Names, Failure> {
        let key = self.key;
        let tx = self.begin();
        let names = select(&*ctx.fence_in(&tx)?, key);
        tx.commit()?;
        Ok(names)
    }

    async fn write_fenced(&mut self, ctx: &Context, names: &Names) -> Result<bool, Failure> {
        let key = self.key;
        let tx = self.begin();
        match ctx.fence_in(&tx) {
            Ok(fenced) => replace(&fenced, key, names),
            Err(error) if error.stale().is_some() => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        tx.commit()?;
        Ok(true)
    }
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
