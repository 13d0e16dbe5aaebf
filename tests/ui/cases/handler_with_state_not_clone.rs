//! The handler takes something as `State` that cannot be cloned for each run.
use leasehold::{Client, Context, Job, State};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet;

impl Job for Greet {
    const KIND: &'static str = "greet";
}

struct Pool;

async fn greet(_job: Greet, _ctx: Context, State(_pool): State<Pool>) -> Result<(), std::io::Error> {
    Ok(())
}

fn mistake(client: &Client) {
    let _ = client.worker().handle(greet).state(Pool);
}

fn main() {
    let _ = mistake;
}
