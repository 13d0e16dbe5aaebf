//! leasehold and sqlx in one program, each with its default features, and in one transaction.

use leasehold::{Client, Context, Failure, Job};
use leasehold_sqlx as _;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

#[derive(Serialize, Deserialize)]
struct Charge;

impl Job for Charge {
    const KIND: &'static str = "charge";
}

async fn charge(_: Charge, ctx: Context) -> Result<(), Failure> {
    let pool: &PgPool = ctx.state()?;
    let mut tx = ctx.begin(pool).await?;
    sqlx::query("UPDATE orders SET paid = true").execute(&mut *tx).await?;
    ctx.fence(&mut tx).await?;
    ctx.save_checkpoint_in(&mut tx, &1).await?;
    ctx.complete_in(tx).await
}

async fn place(pool: &PgPool, client: &Client) -> Result<(), Box<dyn std::error::Error>> {
    let mut tx = pool.begin().await?;
    client.enqueue_in(&mut tx, Charge).await?;
    client.enqueue_in(&mut *tx, Charge).await?;
    Ok(tx.commit().await?)
}

fn main() {
    let _ = place;
    let _ = |client: &Client| drop(client.worker().handle(charge));
}
