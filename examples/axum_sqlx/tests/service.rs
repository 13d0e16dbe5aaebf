//! The order service as a program: replicas of it, one of which is frozen in the middle of a
//! charge.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold_support::http;
use leasehold_support::postgres::Server;
use rustix::process::{Pid, Signal, kill_process};

const TERM: Duration = Duration::from_secs(2);
/// What I16 promises: how long a frozen replica's transaction may hold up its successor, from when
/// the successor could have the job, which is when the frozen one's lease is over.
const DELAY: Duration = TERM.saturating_add(Duration::from_secs(1));
/// Only a service that does not get on at all takes as long.
const PATIENCE: Duration = Duration::from_mins(2);

/// A charge takes a while on the replica named `frozen`, in the middle of its transaction.
const SLOW: &str = "
    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF current_setting('application_name') = 'frozen' THEN PERFORM pg_sleep(0.3); END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER slow AFTER UPDATE OF paid ON orders FOR EACH ROW EXECUTE FUNCTION slow()";
const IN_CHARGE: &str = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'frozen'
    AND query LIKE 'UPDATE orders SET paid%' AND state = 'active'";

struct Replica {
    process: Child,
    at: SocketAddr,
}

impl Replica {
    fn start(server: &Server, name: &str) -> Self {
        let url = format!("{}?application_name={name}&namespace=shop", server.url());
        let mut process = Command::new(env!("CARGO_BIN_EXE_axum-sqlx"))
            .env("DATABASE_URL", url)
            .env("TERM_SECONDS", TERM.as_secs().to_string())
            .env("PORT", "0")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        output.read_line(&mut said).unwrap();
        let at = said.trim().strip_prefix("listening on ").unwrap().parse();
        Self {
            process,
            at: at.unwrap(),
        }
    }

    async fn order(&self) -> Result<i64, u16> {
        let json = ["Content-Type: application/json"];
        let body = r#"{"email": "ann@example.org", "cents": 500}"#;
        let answer = http::send(self.at, "POST", "/orders", &json, body).await;
        match answer.status {
            200 => Ok(answer.body.trim().parse().unwrap()),
            status => Err(status),
        }
    }

    async fn is_done(&self, order: i64) -> bool {
        let answer = http::send(self.at, "GET", &format!("/orders/{order}"), &[], "").await;
        let order: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        order["paid"] == true && order["confirmed"] == true
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    async fn done(&self, order: i64) {
        let start = Instant::now();
        while !self.is_done(order).await {
            assert!(start.elapsed() < PATIENCE, "order {order} is not done");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn number(db: &tokio_postgres::Client, sql: &str) -> i64 {
    db.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn an_order_and_its_jobs_are_there_or_not_and_it_stops_when_it_is_told() {
    let server = Server::start(&["fsync=off"]);
    let mut replica = Replica::start(&server, "one");
    let order = replica.order().await.unwrap();
    replica.done(order).await;
    let db = server.client().await;
    db.batch_execute("UPDATE stock SET n = 0").await.unwrap();
    // It fails after the order and its jobs were written.
    assert_eq!(replica.order().await, Err(500));
    assert_eq!(number(&db, "SELECT count(*) FROM orders").await, 1);
    assert_eq!(number(&db, "SELECT count(*) FROM leasehold.jobs").await, 0);
    assert_eq!(number(&db, "SELECT count(*) FROM payments").await, 1);
    replica.signal(Signal::TERM);
    assert!(replica.process.wait().unwrap().success());
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_replica_that_is_frozen_in_a_charge_costs_a_term_and_nothing_is_paid_twice() {
    let server = Server::start(&["fsync=off"]);
    let campaign = std::env::var_os("LEASEHOLD_CAMPAIGN").is_some();
    let rounds = if campaign { 100 } else { 3 };
    let db = server.client().await;
    let mut worst = Duration::ZERO;
    for round in 0..rounds {
        let frozen = Replica::start(&server, "frozen");
        if round == 0 {
            db.batch_execute(SLOW).await.unwrap();
        }
        let order = frozen.order().await.unwrap();
        while number(&db, IN_CHARGE).await == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        frozen.signal(Signal::STOP);
        let charge = "FROM leasehold.leases WHERE kind = 'charge_card'";
        let token = number(&db, &format!("SELECT token {charge}")).await;
        let other = Replica::start(&server, "other");
        let its = format!("SELECT count(*) {charge} AND token = {token}");
        let start = Instant::now();
        while number(&db, &its).await > 0 {
            assert!(start.elapsed() < PATIENCE, "its lease does not end");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let start = Instant::now();
        other.done(order).await;
        worst = worst.max(start.elapsed());
        frozen.signal(Signal::CONT);
        // It is alive, works on, and is refused what it had begun.
        let next = frozen.order().await.unwrap();
        frozen.done(next).await;
    }
    println!("{rounds} replicas frozen, held up by at most {worst:?}");
    assert!(worst < DELAY, "held up for {worst:?}");
    let paid = number(&db, "SELECT count(*) FROM payments").await;
    assert_eq!(paid, 2 * rounds, "each order is paid once");
    let orders = "SELECT count(DISTINCT order_id) FROM payments";
    assert_eq!(number(&db, orders).await, 2 * rounds);
}
