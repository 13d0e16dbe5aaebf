//! The fence in an SQLite transaction: several connections to one file.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::fence::{FenceError, Scope, sqlite};
use leasehold::{ErrorKind, FencingToken, async_trait};
use leasehold_conformance::resource::{Holder, Subject};
use rusqlite::Connection;
use tempfile::TempDir;

use crate::conforms;

pub(crate) struct Sqlite {
    path: PathBuf,
    idle: Arc<Mutex<Vec<Connection>>>,
    _dir: TempDir,
}

impl Sqlite {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            path: new_file(&dir),
            idle: Arc::default(),
            _dir: dir,
        }
    }
}

/// Each holder has a connection of its own.
struct SqliteHolder {
    db: Option<Connection>,
    idle: Arc<Mutex<Vec<Connection>>>,
    scope: Scope,
    token: FencingToken,
}

fn connect(path: &Path, patience: Duration) -> Connection {
    let db = Connection::open(path).unwrap();
    db.busy_timeout(patience).unwrap();
    db.execute_batch("PRAGMA synchronous = OFF").unwrap();
    db
}

fn new_file(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("data.db");
    let db = connect(&path, Duration::ZERO);
    db.execute_batch(
        "PRAGMA journal_mode = WAL;
         CREATE TABLE list (n INTEGER PRIMARY KEY, scope TEXT NOT NULL, value INTEGER NOT NULL);
         CREATE INDEX list_scope ON list (scope, n);",
    )
    .unwrap();
    path
}

fn list(db: &Connection, scope: &Scope) -> rusqlite::Result<Vec<u64>> {
    let mut list = db.prepare_cached("SELECT value FROM list WHERE scope = ?1 ORDER BY n")?;
    let rows = list.query_map([scope.as_str()], |row| row.get(0))?;
    rows.map(|value| value.map(i64::cast_unsigned)).collect()
}

fn append(db: &Connection, scope: &Scope, value: u64) {
    db.prepare_cached("INSERT INTO list (scope, value) VALUES (?1, ?2)")
        .and_then(|mut insert| insert.execute((scope.as_str(), value.cast_signed())))
        .unwrap();
}

impl SqliteHolder {
    fn within<T>(
        &mut self,
        act: impl FnOnce(&sqlite::OpenConnection<'_>, &Scope) -> Result<T, FenceError>,
    ) -> Result<T, FenceError> {
        let tx = self.db.as_mut().unwrap().transaction().unwrap();
        let fenced = sqlite::open(&tx, &self.scope, self.token)?;
        let done = act(&fenced, &self.scope)?;
        tx.commit().unwrap();
        Ok(done)
    }
}

impl Drop for SqliteHolder {
    fn drop(&mut self) {
        self.idle.lock().unwrap().extend(self.db.take());
    }
}

#[async_trait]
impl Subject for Sqlite {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        let idle = self.idle.lock().unwrap().pop();
        let db = idle.unwrap_or_else(|| connect(&self.path, Duration::from_secs(60)));
        Box::new(SqliteHolder {
            db: Some(db),
            idle: Arc::clone(&self.idle),
            scope: scope.clone(),
            token,
        })
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        let idle = self.idle.lock().unwrap();
        match idle.last() {
            Some(db) => list(db, scope).unwrap(),
            None => list(&connect(&self.path, Duration::from_secs(60)), scope).unwrap(),
        }
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        let mut db = connect(&self.path, Duration::from_secs(60));
        let tx = db.transaction().unwrap();
        sqlite::prune(&tx, below)?;
        tx.commit().unwrap();
        Ok(())
    }
}

#[async_trait]
impl Holder for SqliteHolder {
    async fn open(&mut self) -> Result<(), FenceError> {
        self.within(|_, _| Ok(()))
    }

    async fn read(&mut self) -> Result<Vec<u64>, FenceError> {
        self.within(|db, scope| Ok(list(db, scope).unwrap()))
    }

    async fn write(&mut self, value: u64) -> Result<(), FenceError> {
        self.within(|db, scope| {
            append(db, scope, value);
            Ok(())
        })
    }

    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError> {
        self.within(|db, scope| {
            let first = db.is_first(operation)?;
            if first {
                append(db, scope, value);
            }
            Ok(first)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_sqlite_transaction_conforms() {
    conforms("sqlite", &Sqlite::new()).await;
}

fn scope() -> Scope {
    Scope::parse("bank/default/k:account").unwrap()
}

fn token(n: u64) -> FencingToken {
    FencingToken::new(n)
}

fn is_contended(opened: Result<sqlite::OpenConnection<'_>, FenceError>) -> Option<String> {
    match opened {
        Err(FenceError::Trouble(error)) if error.kind() == ErrorKind::Contended => {
            Some(error.to_string())
        }
        _ => None,
    }
}

#[test]
fn what_was_read_before_opening_and_has_changed_since_cannot_be_acted_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = new_file(&dir);
    let (mut old, mut new) = (
        connect(&path, Duration::ZERO),
        connect(&path, Duration::ZERO),
    );
    let late = old.transaction().unwrap();
    assert!(list(&late, &scope()).unwrap().is_empty());
    let tx = new.transaction().unwrap();
    let fenced = sqlite::open(&tx, &scope(), token(1)).unwrap();
    append(&fenced, &scope(), 7);
    tx.commit().unwrap();
    // Even with the newer token: its picture of the file is from before.
    let said = is_contended(sqlite::open(&late, &scope(), token(2))).unwrap();
    assert!(said.contains("open the fence first"), "{said}");
}

#[test]
fn an_open_transaction_has_the_file_to_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = new_file(&dir);
    let (mut one, mut two) = (
        connect(&path, Duration::ZERO),
        connect(&path, Duration::ZERO),
    );
    let first = one.transaction().unwrap();
    // It has read, but nothing has changed since: that is as good as reading afterwards.
    assert!(list(&first, &scope()).unwrap().is_empty());
    let fenced = sqlite::open(&first, &scope(), token(1)).unwrap();
    let second = two.transaction().unwrap();
    assert!(is_contended(sqlite::open(&second, &scope(), token(2))).is_some());
    drop(second);
    append(&fenced, &scope(), 1);
    first.commit().unwrap();
    let second = two.transaction().unwrap();
    let fenced = sqlite::open(&second, &scope(), token(2)).unwrap();
    assert_eq!(list(&fenced, &scope()).unwrap(), [1]);
}

#[test]
fn what_is_rolled_back_raises_no_mark_and_a_refusal_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = connect(&new_file(&dir), Duration::ZERO);
    let tx = db.transaction().unwrap();
    let fenced = sqlite::open(&tx, &scope(), token(9)).unwrap();
    assert!(fenced.is_first("a").unwrap());
    // The tables were made in this transaction, and go with it.
    tx.rollback().unwrap();
    let tx = db.transaction().unwrap();
    let fenced = sqlite::open(&tx, &scope(), token(5)).unwrap();
    assert!(fenced.is_first("a").unwrap());
    tx.commit().unwrap();
    let tx = db.transaction().unwrap();
    let refused = sqlite::open(&tx, &scope(), token(4)).unwrap_err();
    assert_eq!(refused.stale().unwrap().mark(), token(5));
    tx.commit().unwrap();
    let tx = db.transaction().unwrap();
    assert!(
        !sqlite::open(&tx, &scope(), token(5))
            .unwrap()
            .is_first("a")
            .unwrap()
    );
}
