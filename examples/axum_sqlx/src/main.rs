//! An order service: an order and its two jobs are stored in one transaction of sqlx, and a charge
//! ends in one transaction with its effect.
//!
//! Run it: `DATABASE_URL=postgres://… cargo run -p axum-sqlx`, as often as you like side by side
//! with another `PORT`, and
//! `curl -d '{"email":"ann@example.org","cents":500}' -H 'Content-Type: application/json'
//! localhost:3000/orders`
//!
//! `TERM_SECONDS` is how long a lease lasts, and so how long a dead replica's jobs wait: 10 by
//! default.

use std::time::Duration;

use axum::extract::{Path, State as Shared};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use leasehold::store::PostgresOptions;
use leasehold::worker::shutdown_signal;
use leasehold::{Client, Context, Failure, Job, LeaseTerms, State};
use leasehold_sqlx as _; // the calls take sqlx's transactions
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::net::TcpListener;

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS stock (item text PRIMARY KEY, n int NOT NULL CHECK (n >= 0));
    CREATE TABLE IF NOT EXISTS orders (
        id bigserial PRIMARY KEY, email text NOT NULL, cents bigint NOT NULL,
        paid boolean NOT NULL DEFAULT false, confirmed boolean NOT NULL DEFAULT false);
    CREATE TABLE IF NOT EXISTS payments (order_id bigint NOT NULL, cents bigint NOT NULL);
    INSERT INTO stock VALUES ('lamp', 1000) ON CONFLICT DO NOTHING";

#[derive(Serialize, Deserialize)]
struct ChargeCard {
    order: i64,
}

impl Job for ChargeCard {
    const KIND: &'static str = "charge_card";
}

#[derive(Serialize, Deserialize)]
struct Confirm {
    order: i64,
}

impl Job for Confirm {
    const KIND: &'static str = "confirm";
}

#[derive(Deserialize)]
struct NewOrder {
    email: String,
    cents: i64,
}

#[derive(Serialize)]
struct Order {
    paid: bool,
    confirmed: bool,
}

type Answer<T> = Result<T, (StatusCode, String)>;

fn trouble(error: impl std::fmt::Display) -> (StatusCode, String) {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// The order, its two jobs and the item from the stock: all of it, or nothing.
async fn place(pool: &PgPool, client: &Client, new: &NewOrder) -> anyhow::Result<i64> {
    let mut tx = pool.begin().await?;
    let insert = "INSERT INTO orders (email, cents) VALUES ($1, $2) RETURNING id";
    let insert = sqlx::query_scalar(insert).bind(&new.email).bind(new.cents);
    let order: i64 = insert.fetch_one(&mut *tx).await?;
    client.enqueue_in(&mut tx, ChargeCard { order }).await?;
    client.enqueue_in(&mut tx, Confirm { order }).await?;
    // Fails if there is none left.
    sqlx::query("UPDATE stock SET n = n - 1 WHERE item = 'lamp'")
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(order)
}

/// The payment and the end of the job: both, or neither.
async fn charge(job: ChargeCard, ctx: Context, State(pool): State<PgPool>) -> Result<(), Failure> {
    let mut tx = ctx.begin(&pool).await?; // its limits follow the lease
    let pay = "UPDATE orders SET paid = true WHERE id = $1 RETURNING cents";
    let cents: i64 = sqlx::query_scalar(pay)
        .bind(job.order)
        .fetch_one(&mut *tx)
        .await?;
    let book = "INSERT INTO payments VALUES ($1, $2)";
    sqlx::query(book)
        .bind(job.order)
        .bind(cents)
        .execute(&mut *tx)
        .await?;
    ctx.complete_in(tx).await
}

async fn confirm(job: Confirm, ctx: Context, State(pool): State<PgPool>) -> Result<(), Failure> {
    let mut tx = ctx.begin(&pool).await?;
    let confirm = "UPDATE orders SET confirmed = true WHERE id = $1";
    sqlx::query(confirm)
        .bind(job.order)
        .execute(&mut *tx)
        .await?;
    ctx.complete_in(tx).await
}

type App = Shared<(PgPool, Client)>;

async fn post_order(Shared((pool, client)): App, Json(new): Json<NewOrder>) -> Answer<Json<i64>> {
    place(&pool, &client, &new).await.map(Json).map_err(trouble)
}

async fn get_order(Shared((pool, _)): App, Path(id): Path<i64>) -> Answer<Json<Order>> {
    let select = sqlx::query_as("SELECT paid, confirmed FROM orders WHERE id = $1").bind(id);
    let found: Option<(bool, bool)> = select.fetch_optional(&pool).await.map_err(trouble)?;
    let order = found.map(|(paid, confirmed)| Json(Order { paid, confirmed }));
    order.ok_or((StatusCode::NOT_FOUND, "no such order".into()))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("DATABASE_URL")?;
    let seconds = std::env::var("TERM_SECONDS").map_or(Ok(10), |seconds| seconds.parse())?;
    let port = std::env::var("PORT").map_or(Ok(3000), |port| port.parse())?;

    // One URL for both: what is leasehold's in it is not sqlx's.
    let pool = PgPool::connect(&PostgresOptions::server_url(&url)).await?;
    let client = Client::open(&url).await?;
    sqlx::raw_sql(TABLES).execute(&pool).await?;

    let worker = client
        .worker()
        .handle(charge)
        .handle(confirm)
        .state(pool.clone())
        .terms(LeaseTerms::of_term(Duration::from_secs(seconds)))
        .start()?;
    let app = Router::new()
        .route("/orders", post(post_order))
        .route("/orders/{id}", get(get_order))
        .with_state((pool, client));
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app)
        .with_graceful_shutdown(shutdown_signal())
        .await?;
    worker.drain();
    worker.await?;
    Ok(())
}
