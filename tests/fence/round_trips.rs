//! What opening costs in round trips, counted on the wire.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::fence::Scope;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A relay in front of a server that counts how often a client speaks after it was answered.
struct Wire {
    at: SocketAddr,
    trips: Arc<AtomicUsize>,
}

impl Wire {
    async fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let trips = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&trips);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(server).await.unwrap();
                tokio::spawn(relay(client, server, Arc::clone(&counted)));
            }
        });
        Self { at, trips }
    }

    /// The round trips that this took.
    async fn count<T>(&self, act: impl Future<Output = T>) -> (T, usize) {
        let before = self.trips.load(Ordering::SeqCst);
        let done = act.await;
        (done, self.trips.load(Ordering::SeqCst) - before)
    }
}

async fn relay(mut client: TcpStream, mut server: TcpStream, trips: Arc<AtomicUsize>) {
    let (mut asked, mut said) = (vec![0; 65_536], vec![0; 65_536]);
    let mut is_asking = false;
    loop {
        tokio::select! {
            read = client.read(&mut asked) => match read {
                Ok(bytes @ 1..) => {
                    if !is_asking {
                        trips.fetch_add(1, Ordering::SeqCst);
                    }
                    is_asking = true;
                    server.write_all(&asked[..bytes]).await.unwrap();
                }
                _ => return,
            },
            read = server.read(&mut said) => match read {
                Ok(bytes @ 1..) => {
                    is_asking = false;
                    let _ = client.write_all(&said[..bytes]).await;
                }
                _ => return,
            },
        }
    }
}

fn scope() -> Scope {
    Scope::parse("bank/default/k:account").unwrap()
}

mod redis {
    use leasehold::FencingToken;
    use leasehold::clock::ManualClock;
    use leasehold::fence::Fence as _;
    use leasehold::fence::redis::{Commands, RedisFence};
    use leasehold::store::{Outcome, RedisOptions, RedisStore, SettleRequest, Settlement, Store};
    use leasehold_conformance::{Driver, ManualFixture, job, queue};

    use super::{Arc, Wire, scope};
    use crate::redis_server::Standalone;

    #[tokio::test]
    #[ignore = "needs redis-server: ./tests/run"]
    async fn opening_is_one_and_none_where_it_is_sent_along() {
        let server = Standalone::start(&[]);
        let wire = Wire::before(server.server.address().parse().unwrap()).await;
        let client = redis::Client::open(format!("redis://{}", wire.at)).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        let fence = RedisFence::new(connection, "bank").unwrap();
        let count = || Commands::new().incr_by(fence.key("n"), 1);
        let token = FencingToken::new;
        // The server learns the script.
        fence.open_with(&scope(), token(1), count()).await.unwrap();

        let (opened, trips) = wire.count(fence.open(&scope(), token(2))).await;
        assert_eq!(trips, 1, "opened");
        let mut opened = opened.unwrap();
        let (run, trips) = wire.count(opened.run_all(count())).await;
        assert_eq!((run.unwrap().len(), trips), (1, 1), "written");
        let scope = scope();
        let with = fence.open_with(&scope, token(3), count());
        let (run, trips) = wire.count(with).await;
        assert_eq!((run.unwrap().1.len(), trips), (1, 1), "opened and written");
    }

    #[tokio::test]
    #[ignore = "needs redis-server: ./tests/run"]
    async fn a_completion_with_commands_is_one_like_a_completion_without() {
        let server = Standalone::start(&[]);
        let wire = Wire::before(server.server.address().parse().unwrap()).await;
        let clock = ManualClock::default();
        let options = RedisOptions::new(format!("redis://{}", wire.at)).clock(clock.clone());
        let store = RedisStore::open(options).unwrap();
        let fixture = ManualFixture::new(store.clone(), clock);
        let d = Driver::new(Arc::new(fixture)).await;
        let n = store.data_key(&queue(), 0, "n");
        let mut trips = Vec::new();
        // The first of each kind teaches the server its script.
        for _ in 0..2 {
            let held = d.held(job()).await;
            let settle = SettleRequest {
                request: d.request(),
                settlements: vec![Settlement {
                    receipt: held.receipt.clone(),
                    outcome: Outcome::Complete { result: None },
                }],
            };
            let (verdicts, without) = wire.count(store.settle(settle)).await;
            assert!(verdicts.unwrap()[0].is_held());
            let held = d.held(job()).await;
            let commands = Commands::new().incr_by(&n, 1);
            let complete = store.complete_with(d.request(), &held.receipt, None, &commands);
            let (verdict, with) = wire.count(complete).await;
            assert!(verdict.unwrap().is_held());
            trips = vec![without, with];
        }
        assert_eq!(trips, [1, 1]);
    }
}

mod postgres {
    use leasehold::FencingToken;
    use leasehold::fence::postgres::{migrate, open};
    use tokio_postgres::{Client, Config, NoTls};

    use super::{Wire, scope};
    use crate::postgres_server::Server;

    async fn write(client: &mut Client, token: Option<u64>) {
        let tx = client.transaction().await.unwrap();
        if let Some(token) = token {
            let token = FencingToken::new(token);
            open(&tx, &scope(), token).await.unwrap();
        }
        tx.execute_typed("UPDATE account SET balance = balance - 1", &[])
            .await
            .unwrap();
        tx.commit().await.unwrap();
    }

    #[tokio::test]
    #[ignore = "needs postgresql: ./tests/run"]
    async fn opening_is_one_statement_of_the_callers_transaction_and_two_the_first_time() {
        let server = Server::start(&["fsync=off"]);
        let mut config: Config = server.url().parse().unwrap();
        let port = config.get_ports()[0];
        let wire = Wire::before(([127, 0, 0, 1], port).into()).await;
        config = server
            .url()
            .replace(&port.to_string(), &wire.at.port().to_string())
            .parse()
            .unwrap();
        let (mut client, connection) = config.connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        migrate(&client).await.unwrap();
        let table = "CREATE TABLE account (balance BIGINT); INSERT INTO account VALUES (0)";
        client.batch_execute(table).await.unwrap();
        let ((), plain) = wire.count(write(&mut client, None)).await;
        let ((), first) = wire.count(write(&mut client, Some(1))).await;
        assert_eq!((plain, first), (3, 5), "begin, open, floor, write, commit");
        for token in [1, 2] {
            let ((), fenced) = wire.count(write(&mut client, Some(token))).await;
            assert_eq!(fenced, 4, "begin, open, write, commit");
        }
    }
}
