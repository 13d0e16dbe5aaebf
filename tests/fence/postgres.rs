//! The fence in a PostgreSQL transaction, on a real server.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::fence::postgres::{migrate, open, open_all, prune};
use leasehold::fence::{FenceError, Scope};
use leasehold::{ErrorKind, FencingToken, async_trait};
use leasehold_conformance::resource::{Holder, Subject};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, GenericClient, NoTls, Transaction};

use crate::conform_side_by_side;
use crate::postgres_server::Server;

async fn connect(server: &Server) -> Client {
    connect_in(server, "postgres").await
}

async fn connect_in(server: &Server, database: &str) -> Client {
    let mut config: tokio_postgres::Config = server.socket().parse().unwrap();
    config.dbname(database);
    let (client, connection) = config.connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn prepared(server: &Server) -> Client {
    let client = connect(server).await;
    prepare(&client).await;
    client
}

async fn prepare(client: &Client) {
    migrate(client).await.unwrap();
    let list = "CREATE TABLE list (n BIGSERIAL PRIMARY KEY, scope TEXT, value BIGINT);
                CREATE INDEX ON list (scope, n)";
    client.batch_execute(list).await.unwrap();
}

/// Marks and lists in a database of their own.
pub(crate) struct Pg {
    server: Arc<Server>,
    database: String,
    idle: Arc<Mutex<Vec<Client>>>,
    /// For what goes past the fence.
    client: tokio::sync::Mutex<Client>,
}

impl Pg {
    pub(crate) async fn in_database(server: &Arc<Server>, database: &str) -> Self {
        let create = format!("CREATE DATABASE {database}");
        let admin = connect(server).await;
        admin.batch_execute(&create).await.unwrap();
        let client = connect_in(server, database).await;
        prepare(&client).await;
        Self {
            server: Arc::clone(server),
            database: database.to_owned(),
            idle: Arc::default(),
            client: tokio::sync::Mutex::new(client),
        }
    }
}

struct PgHolder {
    client: Option<Client>,
    idle: Arc<Mutex<Vec<Client>>>,
    scope: Scope,
    token: FencingToken,
}

async fn list(client: &impl GenericClient, scope: &Scope) -> Vec<u64> {
    let sql = "SELECT value FROM list WHERE scope = $1 ORDER BY n";
    let scope = (&scope.as_str() as _, Type::TEXT);
    let rows = client.query_typed(sql, &[scope]).await.unwrap();
    let value = |row: &tokio_postgres::Row| row.get::<_, i64>(0).cast_unsigned();
    rows.iter().map(value).collect()
}

async fn append(tx: &Transaction<'_>, scope: &Scope, value: u64) {
    let sql = "INSERT INTO list (scope, value) VALUES ($1, $2)";
    let scope = (&scope.as_str() as _, Type::TEXT);
    let value = (&value.cast_signed() as _, Type::INT8);
    tx.execute_typed(sql, &[scope, value]).await.unwrap();
}

#[derive(Clone, Copy)]
enum Act<'a> {
    Open,
    Read,
    Write(u64),
    Once(&'a str, u64),
}

impl PgHolder {
    /// One transaction. Returns what was read, and whether anything was done.
    async fn act(&mut self, act: Act<'_>) -> Result<(Vec<u64>, bool), FenceError> {
        let tx = self.client.as_mut().unwrap().transaction().await.unwrap();
        // If refused, the transaction is rolled back before anything else on its connection.
        let mut fenced = open(&tx, &self.scope, self.token).await?;
        let mut read = Vec::new();
        let mut first = true;
        match act {
            Act::Open => {}
            Act::Read => read = list(&*fenced, &self.scope).await,
            Act::Write(value) => append(&fenced, &self.scope, value).await,
            Act::Once(operation, value) => {
                first = fenced.is_first(operation).await?;
                if first {
                    append(&fenced, &self.scope, value).await;
                }
            }
        }
        tx.commit().await.unwrap();
        Ok((read, first))
    }
}

impl Drop for PgHolder {
    fn drop(&mut self) {
        self.idle.lock().unwrap().extend(self.client.take());
    }
}

#[async_trait]
impl Subject for Pg {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        let idle = self.idle.lock().unwrap().pop();
        let client = match idle {
            Some(client) => client,
            None => connect_in(&self.server, &self.database).await,
        };
        Box::new(PgHolder {
            client: Some(client),
            idle: Arc::clone(&self.idle),
            scope: scope.clone(),
            token,
        })
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        list(&*self.client.lock().await, scope).await
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        let mut client = self.client.lock().await;
        let tx = client.transaction().await.unwrap();
        prune(&tx, below).await?;
        tx.commit().await.unwrap();
        Ok(())
    }
}

#[async_trait]
impl Holder for PgHolder {
    async fn open(&mut self) -> Result<(), FenceError> {
        self.act(Act::Open).await.map(|_| ())
    }

    async fn read(&mut self) -> Result<Vec<u64>, FenceError> {
        self.act(Act::Read).await.map(|(list, _)| list)
    }

    async fn write(&mut self, value: u64) -> Result<(), FenceError> {
        self.act(Act::Write(value)).await.map(|_| ())
    }

    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError> {
        let done = self.act(Act::Once(operation, value)).await;
        done.map(|(_, first)| first)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_postgres_transaction_conforms() {
    let server = Arc::new(Server::start(&["fsync=off"]));
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    for n in 0..8 {
        let subject = Pg::in_database(&server, &format!("lane_{n}")).await;
        subjects.push(Box::new(subject));
    }
    conform_side_by_side("postgres", subjects).await;
}

fn scope(name: &str) -> Scope {
    Scope::parse(&format!("bank/default/k:{name}")).unwrap()
}

fn token(n: u64) -> FencingToken {
    FencingToken::new(n)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn scopes_opened_at_once_never_deadlock_and_one_by_one_one_side_is_told() {
    let server = Server::start(&["fsync=off"]);
    let mut one = prepared(&server).await;
    let mut two = connect(&server).await;
    let (a, b) = (scope("a"), scope("b"));
    let forth = [a.clone(), b.clone(), a.clone()];
    let back = [b.clone(), a.clone()];
    for round in 1..=200 {
        let both = |client, scopes| async move {
            let client: &mut Client = client;
            let tx = client.transaction().await.unwrap();
            let opened = open_all(&tx, scopes, token(round)).await;
            opened.unwrap_or_else(|e| panic!("round {round}: {e}"));
            tx.commit().await.unwrap();
        };
        tokio::join!(both(&mut one, &forth[..]), both(&mut two, &back[..]));
    }
    // Crosswise, one by one: the server ends one of the two, and the other gets on.
    let first = one.transaction().await.unwrap();
    let second = two.transaction().await.unwrap();
    open(&first, &a, token(300)).await.unwrap();
    open(&second, &b, token(300)).await.unwrap();
    let crosswise = tokio::join!(
        async { open(&first, &b, token(300)).await.map(|_| ()) },
        async {
            let opened = open(&second, &a, token(300)).await.map(|_| ());
            // Lets go of its rows, whatever it was told.
            second.rollback().await.unwrap();
            opened
        },
    );
    let told = [crosswise.0, crosswise.1];
    let contended = |told: &&Result<(), FenceError>| matches!(told, Err(FenceError::Trouble(e)) if e.kind() == ErrorKind::Contended);
    assert_eq!(told.iter().filter(contended).count(), 1, "{told:?}");
    assert_eq!(
        told.iter().filter(|told| told.is_ok()).count(),
        1,
        "{told:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn an_older_owner_waits_for_the_row_and_is_then_refused_at_every_isolation_level() {
    use tokio_postgres::IsolationLevel as Level;
    let server = Server::start(&["fsync=off"]);
    let mut one = prepared(&server).await;
    let mut two = connect(&server).await;
    let levels = [
        Level::ReadCommitted,
        Level::RepeatableRead,
        Level::Serializable,
    ];
    for (level, n) in levels.into_iter().zip(0..) {
        let scope = scope(&format!("level {n}"));
        let new = one.transaction().await.unwrap();
        let fenced = open(&new, &scope, token(2)).await.unwrap();
        append(&fenced, &scope, 7).await;
        let begin = two.build_transaction().isolation_level(level).start();
        let old = begin.await.unwrap();
        let refused = {
            let opening = async { open(&old, &scope, token(1)).await.map(|_| ()) };
            tokio::pin!(opening);
            let early = tokio::time::timeout(Duration::from_millis(50), &mut opening).await;
            assert!(early.is_err(), "it did not wait for the row");
            new.commit().await.unwrap();
            opening.await.unwrap_err()
        };
        match level {
            Level::ReadCommitted => assert_eq!(refused.stale().unwrap().mark(), token(2)),
            _ => assert!(
                matches!(&refused, FenceError::Trouble(e) if e.kind() == ErrorKind::Contended),
                "{refused}"
            ),
        }
    }
}

/// The floor that holds is the one of now: whoever has waited for the prune is refused like whoever
/// comes after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn an_older_owner_that_waits_for_a_prune_is_refused() {
    use tokio_postgres::IsolationLevel as Level;
    let server = Server::start(&["fsync=off"]);
    let mut one = prepared(&server).await;
    let mut two = connect(&server).await;
    let observer = connect(&server).await;
    // The first prune of all, and one that raises a floor.
    for (n, level) in [
        (10, Level::ReadCommitted),
        (20, Level::ReadCommitted),
        (30, Level::RepeatableRead),
    ] {
        let scope = scope(&format!("pruned {n}"));
        let tx = one.transaction().await.unwrap();
        open(&tx, &scope, token(n + 1)).await.unwrap();
        tx.commit().await.unwrap();
        let pruning = one.transaction().await.unwrap();
        prune(&pruning, token(n + 5)).await.unwrap();
        let begin = two.build_transaction().isolation_level(level).start();
        let old = begin.await.unwrap();
        let refused = {
            let opening = async { open(&old, &scope, token(n + 1)).await.map(|_| ()) };
            let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
            let commit = async {
                while observer
                    .query_one(waits, &[])
                    .await
                    .unwrap()
                    .get::<_, i64>(0)
                    == 0
                {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                pruning.commit().await.unwrap();
            };
            tokio::join!(opening, commit).0.unwrap_err()
        };
        match level {
            Level::ReadCommitted => assert_eq!(refused.stale().unwrap().mark(), token(n + 5)),
            _ => assert!(
                matches!(&refused, FenceError::Trouble(e) if e.kind() == ErrorKind::Contended),
                "{refused}"
            ),
        }
        old.rollback().await.unwrap();
        // A prune that is rolled back stops nobody.
        let newer = token(n + 6);
        let tx = one.transaction().await.unwrap();
        open(&tx, &scope, newer).await.unwrap();
        tx.commit().await.unwrap();
        let pruning = one.transaction().await.unwrap();
        prune(&pruning, token(n + 9)).await.unwrap();
        pruning.rollback().await.unwrap();
        let tx = two.transaction().await.unwrap();
        open(&tx, &scope, newer).await.unwrap();
        tx.commit().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn marks_survive_a_killed_server_and_missing_tables_are_named() {
    let mut server = Server::start(&[]);
    let mut client = connect(&server).await;
    let tx = client.transaction().await.unwrap();
    let error = open(&tx, &scope("a"), token(1))
        .await
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("migrate"), "{error}");
    drop(tx);
    drop(client);
    let mut client = prepared(&server).await;
    let tx = client.transaction().await.unwrap();
    open(&tx, &scope("a"), token(5)).await.unwrap();
    tx.commit().await.unwrap();
    server.kill();
    server.launch();
    let mut client = connect(&server).await;
    let tx = client.transaction().await.unwrap();
    let error = open(&tx, &scope("a"), token(4))
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(error.stale().unwrap().mark(), token(5));
}
