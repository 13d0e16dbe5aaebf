//! The handler takes the payload's field, not the job.
use leasehold::{Client, Context};

async fn greet(_name: String, _ctx: Context) -> Result<(), std::io::Error> {
    Ok(())
}

fn mistake(client: &Client) {
    let _ = client.worker().handle(greet);
}

fn main() {
    let _ = mistake;
}
