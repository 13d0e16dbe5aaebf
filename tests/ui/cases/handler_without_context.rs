//! The handler forgets its context.
use leasehold::{Client, Job};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet;

impl Job for Greet {
    const KIND: &'static str = "greet";
}

async fn greet(_job: Greet) -> Result<(), std::io::Error> {
    Ok(())
}

fn mistake(client: &Client) {
    let _ = client.worker().handle(greet);
}

fn main() {
    let _ = mistake;
}
