//! The guide's recipe for SeaORM: the functions of leasehold's schema, in its transactions.

use leasehold::{Client, Context, Failure, Job};
use sea_orm::{ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend, DbErr};
use sea_orm::{Statement, TransactionTrait, Value};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Charge {
    order: i64,
}

impl Job for Charge {
    const KIND: &'static str = "charge";
}

async fn run(tx: &DatabaseTransaction, sql: &str, value: impl Into<Value>) -> Result<(), DbErr> {
    let statement = Statement::from_sql_and_values(DbBackend::Postgres, sql, [value.into()]);
    tx.execute_raw(statement).await.map(|_| ())
}

/// The order and its job, or neither.
async fn place(db: &DatabaseConnection, order: i64) -> Result<(), DbErr> {
    let tx = db.begin().await?;
    run(&tx, "INSERT INTO orders (id) VALUES ($1)", order).await?;
    let enqueue = "SELECT id FROM leasehold.enqueue('default', 'charge', jsonb_build_object('order', $1::bigint))";
    run(&tx, enqueue, order).await?;
    tx.commit().await
}

/// The effect and the end of the job, or neither.
async fn charge(job: Charge, ctx: Context) -> Result<(), Failure> {
    let db: &DatabaseConnection = ctx.state()?;
    let receipt = ctx.receipt().to_string();
    let tx = db.begin().await?;
    run(&tx, "SELECT leasehold.begin($1)", receipt.as_str()).await?;
    run(&tx, "UPDATE orders SET paid = true WHERE id = $1", job.order).await?;
    run(&tx, "SELECT leasehold.complete($1)", receipt.as_str()).await?;
    tx.commit().await?;
    Ok(())
}

fn main() {
    let _ = place;
    let _ = |client: &Client| drop(client.worker().handle(charge));
}
