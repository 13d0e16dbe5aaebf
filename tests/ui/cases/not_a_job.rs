//! The payload has no `impl Job`.
use leasehold::Client;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet;

fn mistake(client: &Client) {
    drop(client.enqueue(&Greet));
}

fn main() {
    let _ = mistake;
}
