//! Tokens grow over everything that takes the issuer's memory away. The control arm is a plain
//! sequence, which goes back each time.

use std::time::Duration;

use leasehold::store::PostgresStore;
use tokio_postgres::Client;

use crate::Caller;
use crate::server::Server;

const TERM: Duration = Duration::from_secs(60);

async fn plain(db: &Client) -> i64 {
    let row = db.query_one("SELECT nextval('plain')", &[]).await;
    row.unwrap().get(0)
}

/// Grants from one server, and then from the one that took its place.
struct Line {
    highest: u64,
    plain: i64,
}

impl Line {
    async fn grants(caller: &mut Caller, db: &Client) -> Self {
        let mut line = Self {
            highest: 0,
            plain: 0,
        };
        for _ in 0..20 {
            caller.enqueue(10).await;
            for grant in caller.claim(10, TERM).await {
                for lease in &grant.leases {
                    assert!(lease.token.get() > line.highest);
                    line.highest = lease.token.get();
                }
            }
            line.plain = plain(db).await;
        }
        line
    }

    /// No token of the successor is as low as one that was given before.
    async fn is_followed_by(&self, server: &Server, options: leasehold::store::PostgresOptions) {
        // A process of its own, which remembers nothing.
        let store = PostgresStore::with(server.config(), options).await.unwrap();
        let mut caller = Caller::new(store).await;
        let db = server.client().await;
        let control = plain(&db).await;
        assert!(control <= self.plain, "the plain sequence was to go back");
        let next = Self::grants_from(&mut caller).await;
        assert!(next > self.highest, "{next} after {}", self.highest);
    }

    async fn grants_from(caller: &mut Caller) -> u64 {
        caller.enqueue(1).await;
        let grants = caller.claim(1, TERM).await;
        grants[0].leases[0].token.get()
    }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn over_an_old_backup() {
    let mut server = Server::start(&["fsync=off"]);
    let options = Server::options();
    let store = PostgresStore::with(server.config(), options.clone())
        .await
        .unwrap();
    let db = server.client().await;
    db.batch_execute("CREATE SEQUENCE plain").await.unwrap();
    let mut caller = Caller::new(store.clone()).await;
    Line::grants(&mut caller, &db).await;
    server.back_up();
    let caller = &mut Caller::new(store).await;
    let db = server.client().await;
    let line = Line::grants(caller, &db).await;
    server.restore();
    line.is_followed_by(&server, options).await;
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn over_a_backup_from_before_the_queue() {
    let mut server = Server::start(&["fsync=off"]);
    let options = Server::options();
    let db = server.client().await;
    db.batch_execute("CREATE SEQUENCE plain").await.unwrap();
    server.back_up();
    let store = PostgresStore::with(server.config(), options.clone())
        .await
        .unwrap();
    let db = server.client().await;
    let line = Line::grants(&mut Caller::new(store).await, &db).await;
    server.restore();
    line.is_followed_by(&server, options).await;
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn over_the_promotion_of_a_lagging_standby() {
    let mut primary = Server::start(&["fsync=off", "wal_level=replica"]);
    let options = Server::options();
    let store = PostgresStore::with(primary.config(), options.clone())
        .await
        .unwrap();
    let db = primary.client().await;
    db.batch_execute("CREATE SEQUENCE plain").await.unwrap();
    let mut caller = Caller::new(store).await;
    Line::grants(&mut caller, &db).await;
    let standby = primary.standby();
    standby.cut_off().await;
    let line = Line::grants(&mut caller, &db).await;
    primary.kill();
    standby.promote().await;
    line.is_followed_by(&standby, options).await;
}
