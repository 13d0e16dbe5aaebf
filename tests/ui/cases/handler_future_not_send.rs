//! The handler keeps an `Rc` across an await: it cannot move between the threads of the runtime.
use std::rc::Rc;

use leasehold::{Client, Context, Job};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet;

impl Job for Greet {
    const KIND: &'static str = "greet";
}

async fn greet(_job: Greet, ctx: Context) -> Result<(), std::io::Error> {
    let name = Rc::new("world");
    ctx.cancelled().await;
    drop(name);
    Ok(())
}

fn mistake(client: &Client) {
    let _ = client.worker().handle(greet);
}

fn main() {
    let _ = mistake;
}
