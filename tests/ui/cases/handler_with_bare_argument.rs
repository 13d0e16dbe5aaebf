//! The handler takes what the worker shares as it is, and not as a `State`.
use leasehold::{Client, Context, Job};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet;

impl Job for Greet {
    const KIND: &'static str = "greet";
}

#[derive(Clone)]
struct Pool;

async fn greet(_job: Greet, _ctx: Context, _pool: Pool) -> Result<(), std::io::Error> {
    Ok(())
}

fn mistake(client: &Client) {
    let _ = client.worker().handle(greet).state(Pool);
}

fn main() {
    let _ = mistake;
}
