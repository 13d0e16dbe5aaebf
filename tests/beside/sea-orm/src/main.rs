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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::store::PostgresOptions;
    use leasehold_support::postgres::shared;
    use sea_orm::{Database, DbErr};

    use super::*;

    async fn count(db: &DatabaseConnection, of: &str) -> Result<i64, DbErr> {
        let sql = format!("SELECT count(*) FROM {of}");
        let row = db.query_one_raw(Statement::from_string(DbBackend::Postgres, sql));
        row.await?.expect("a row").try_get_by_index(0)
    }

    #[tokio::test]
    #[ignore = "needs postgresql: ./tests/run"]
    async fn the_order_and_its_job_or_neither_and_the_effect_with_its_end() {
        let url = shared().url();
        let client = Client::open(&format!("{url}?migrate=true")).await.unwrap();
        let db = Database::connect(PostgresOptions::server_url(&url)).await.unwrap();
        let table = "CREATE TABLE orders (id bigint PRIMARY KEY, paid boolean NOT NULL DEFAULT false)";
        db.execute_unprepared(table).await.unwrap();
        place(&db, 7).await.unwrap();
        assert!(place(&db, 7).await.is_err(), "the order is there");
        assert_eq!(count(&db, "leasehold.jobs").await.unwrap(), 1, "and no second job");
        let worker = client.worker().handle(charge).state(db.clone());
        let worker = worker.start().unwrap();
        while client.ledger().await.unwrap().completed == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(count(&db, "orders WHERE paid").await.unwrap(), 1);
        worker.drain();
        worker.await.unwrap();
        let ledger = client.ledger().await.unwrap();
        assert_eq!((ledger.granted, ledger.completed, ledger.live), (1, 1, 0));
    }
}
