//! A worker as a service: health, metrics and the dashboard on one port, and one signal that ends
//! everything in time.
//!
//! Run it: `cargo run --example service`, look at the addresses, and press Ctrl-C.
//!
//! `contrib/deploy` has files for programs like this one: a pod and a unit that ask `/healthz` and
//! `/readyz`, send SIGTERM, and wait longer than a drain takes.

use std::time::Duration;

use axum::Router;
use leasehold::worker::shutdown_signal;
use leasehold::{Client, Context, Failure, Job};
use leasehold_web::prometheus::Exporter;
use leasehold_web::{Dashboard, health};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;

#[derive(Serialize, Deserialize)]
struct Greet {
    name: String,
}

impl Job for Greet {
    const KIND: &'static str = "greet";
}

async fn greet(job: Greet, _: Context) -> Result<(), Failure> {
    println!("hello {}", job.name);
    Ok(())
}

/// A setting from the environment.
fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open(&setting("LEASEHOLD_URL", "memory:")).await?;
    let exporter = Exporter::install()?;
    let worker = client.worker().handle(greet).start()?;

    let mut dashboard = Dashboard::new(client.clone()).metrics(exporter);
    // Here your server decides who reaches the pages: whoever listens to others needs a token.
    if let Ok(token) = std::env::var("DASHBOARD_TOKEN") {
        dashboard = dashboard.token(token);
    }
    let app = Router::new()
        .merge(health::router(worker.clone()))
        .nest("/leases", dashboard.router());
    let listener = TcpListener::bind(setting("LISTEN", "127.0.0.1:0")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let name = "world".to_owned();
    client.enqueue(&Greet { name }).await?;

    let drains = worker.clone();
    let ending = async move {
        tokio::select! {
            () = shutdown_signal() => drains.drain(),
            // It could not go on: the process ends, and a supervisor starts it again.
            _ = drains.join() => {}
        }
        // Until the worker has drained, the server answers those who ask how it is.
        let _ = drains.join().await;
    };
    let overdue = async {
        let _ = worker.join().await;
        // For the answers that are under way. Nobody who reads slowly, or has sent half a request,
        // keeps the process until it is killed.
        tokio::time::sleep(Duration::from_secs(2)).await;
    };
    let server = axum::serve(listener, app)
        .with_graceful_shutdown(ending)
        .into_future();
    tokio::select! {
        ended = server => ended?,
        () = overdue => {}
    }
    let report = worker.join().await?;
    println!("unsettled: {}", report.unsettled);
    Ok(())
}
