//! What a fence adds to one write, adapter by adapter, on private servers.
//!
//! ```text
//! cargo bench --features sqlite,redis,postgres,http --bench fence
//! ```
//! One side writes; the other opens under a larger token than before and writes, as a job does that
//! has one effect. One scope, one connection, one write at a time. The sides take turns, round by
//! round; figures are medians. `LEASEHOLD_BENCH_WRITES` is the number of writes a round, `_ROUNDS`
//! how many rounds each side has.

#![allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]

mod common;
use leasehold_support::postgres as postgres_server;
use leasehold_support::redis as redis_server;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use axum::Router;
use axum::extract::Extension;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use common::{median, setting};
use leasehold::FencingToken;
use leasehold::fence::file::FencedFile;
use leasehold::fence::http::{FenceLayer, Fenced, stamp};
use leasehold::fence::memory::{Cell, OpenCell};
use leasehold::fence::redis::{Commands, RedisFence};
use leasehold::fence::{Fence as _, Scope, postgres, sqlite};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Which side writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Plain,
    Fenced,
}

fn main() {
    let runtime = common::runtime();
    println!("| resource | write, µs | fenced, µs | more, µs |");
    println!("|---|---|---|---|");
    runtime.block_on(async {
        memory().await;
        file().await;
        in_sqlite().await;
        in_redis().await;
        in_postgres().await;
        http().await;
    });
}

fn scope() -> Scope {
    Scope::parse("bank/default/k:account 7").unwrap()
}

/// Measures both sides of a resource, and prints its row. A write gets a token of its own.
async fn compare(name: &str, writes: usize, mut write: impl AsyncFnMut(Side, FencingToken)) {
    let writes = setting("WRITES", writes, writes / 10);
    let rounds = setting("ROUNDS", 9, 3);
    let mut token = 0;
    let mut took = async |side| {
        let start = Instant::now();
        for _ in 0..writes {
            token += 1;
            write(side, FencingToken::new(token)).await;
        }
        start.elapsed().as_secs_f64() * 1e6 / writes as f64
    };
    // Connections, scripts, tables and caches.
    took(Side::Plain).await;
    took(Side::Fenced).await;
    let (mut plain, mut fenced, mut more) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (without, with) = (took(Side::Plain).await, took(Side::Fenced).await);
        plain.push(without);
        fenced.push(with);
        more.push(with - without);
    }
    println!(
        "| {name} | {:.1} | {:.1} | {:.1} |",
        median(plain),
        median(fenced),
        median(more)
    );
}

async fn memory() {
    let (value, cell, scope) = (Mutex::new(0_u64), Cell::new(0_u64), scope());
    compare("a value in this process", 100_000, async |side, token| {
        if side == Side::Plain {
            *value.lock().unwrap() += 1;
        } else {
            let mut opened = cell.open(&scope, token).await.unwrap();
            opened.write(|value| *value += 1).unwrap();
        }
    })
    .await;
}

/// The same care without a fence: on disk under another name before it gets its own.
fn replace(path: &Path) {
    let new = path.with_extension("new");
    let old = fs::read(path).unwrap_or_default();
    let mut file = File::create(&new).unwrap();
    file.write_all(&grown(old)).unwrap();
    file.sync_all().unwrap();
    fs::rename(&new, path).unwrap();
    File::open(path.parent().unwrap())
        .unwrap()
        .sync_all()
        .unwrap();
}

/// A hundred bytes that differ from those before.
fn grown(mut old: Vec<u8>) -> Vec<u8> {
    old.resize(100, 0);
    old.rotate_left(1);
    old[0] = old[0].wrapping_add(1);
    old
}

async fn file() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, scope): (PathBuf, _) = (dir.path().join("plain"), scope());
    let fenced = FencedFile::new(dir.path().join("fenced"));
    compare("a file", 300, async |side, token| {
        if side == Side::Plain {
            let plain = plain.clone();
            let write = tokio::task::spawn_blocking(move || replace(&plain));
            write.await.unwrap();
        } else {
            let mut opened = fenced.open(&scope, token).await.unwrap();
            opened.write(grown).await.unwrap();
        }
    })
    .await;
}

async fn in_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = rusqlite::Connection::open(dir.path().join("bank.db")).unwrap();
    db.pragma_update(None, "journal_mode", "WAL").unwrap();
    db.pragma_update(None, "synchronous", "FULL").unwrap();
    db.execute_batch("CREATE TABLE account (balance INTEGER); INSERT INTO account VALUES (0)")
        .unwrap();
    let scope = scope();
    compare("SQLite, one transaction", 1_000, async |side, token| {
        let tx = db.transaction().unwrap();
        if side == Side::Fenced {
            sqlite::open(&tx, &scope, token).unwrap();
        }
        let debit = "UPDATE account SET balance = balance - 1";
        tx.prepare_cached(debit).unwrap().execute([]).unwrap();
        tx.commit().unwrap();
    })
    .await;
}

async fn in_redis() {
    let server = redis_server::Standalone::start(&[]);
    let client = redis::Client::open(server.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let fence = RedisFence::new(connection.clone(), "bank").unwrap();
    let (key, scope) = (fence.key("account"), scope());
    let plain = async || {
        let mut command = redis::cmd("INCRBY");
        command.arg(&key).arg(-1);
        let written: redis::RedisResult<i64> = command.query_async(&mut connection.clone()).await;
        written.unwrap();
    };
    let debit = || Commands::new().incr_by(key.clone(), -1);
    compare("Redis, opened and written", 2_000, async |side, token| {
        if side == Side::Plain {
            plain().await;
        } else {
            let mut opened = fence.open(&scope, token).await.unwrap();
            opened.run_all(debit()).await.unwrap();
        }
    })
    .await;
    let fence = RedisFence::new(connection.clone(), "shop").unwrap();
    let debit = || Commands::new().incr_by(fence.key("account"), -1);
    compare("Redis, in one call", 2_000, async |side, token| {
        if side == Side::Plain {
            plain().await;
        } else {
            fence.open_with(&scope, token, debit()).await.unwrap();
        }
    })
    .await;
}

async fn in_postgres() {
    let server = postgres_server::Server::start(&[]);
    let connected = tokio_postgres::connect(&server.socket(), tokio_postgres::NoTls).await;
    let (mut client, connection) = connected.unwrap();
    tokio::spawn(connection);
    postgres::migrate(&client).await.unwrap();
    let table = "CREATE TABLE account (balance BIGINT); INSERT INTO account VALUES (0)";
    client.batch_execute(table).await.unwrap();
    let scope = scope();
    compare("PostgreSQL, one transaction", 500, async |side, token| {
        let tx = client.transaction().await.unwrap();
        if side == Side::Fenced {
            postgres::open(&tx, &scope, token).await.unwrap();
        }
        let debit = "UPDATE account SET balance = balance - 1";
        tx.execute_typed(debit, &[]).await.unwrap();
        tx.commit().await.unwrap();
    })
    .await;
}

async fn debit(Extension(account): Extension<Fenced<OpenCell<u64>>>) -> StatusCode {
    let mut account = account.opened().await;
    match account.write(|value| *value += 1) {
        Ok(()) => StatusCode::NO_CONTENT,
        Err(_) => StatusCode::CONFLICT,
    }
}

async fn http() {
    let value: &Mutex<u64> = Box::leak(Box::default());
    let plain = async move || {
        *value.lock().unwrap() += 1;
        StatusCode::NO_CONTENT
    };
    let fenced = Router::new().route("/fenced", post(debit));
    let routes = fenced.layer(FenceLayer::new(Cell::new(0_u64)));
    let routes = routes.route("/plain", post(plain));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (mut stream, scope) = (BufReader::new(stream), scope());
    compare("HTTP, one request", 3_000, async |side, token| {
        let path = if side == Side::Plain {
            "plain"
        } else {
            "fenced"
        };
        let mut request = format!("POST /{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n");
        if side == Side::Fenced {
            let mut headers = HeaderMap::new();
            stamp(&mut headers, &scope, token, None).unwrap();
            for (name, value) in &headers {
                for part in [name.as_str(), ": ", value.to_str().unwrap(), "\r\n"] {
                    request += part;
                }
            }
        }
        request += "\r\n";
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(stream.read_line(&mut head).await.unwrap(), 0, "hung up");
        }
        assert!(head.starts_with("HTTP/1.1 204"), "{head}");
    })
    .await;
}
