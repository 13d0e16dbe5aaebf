//! The struct has no `impl Handler<Greet>`.
use leasehold::{Client, Job};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet;

impl Job for Greet {
    const KIND: &'static str = "greet";
}

struct Greeter;

fn mistake(client: &Client) {
    let _ = client.worker().handle(Greeter);
}

fn main() {
    let _ = mistake;
}
