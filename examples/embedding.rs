//! A worker inside a server process: requests enqueue, the worker runs beside the server, and one
//! signal stops both.
//!
//! Run it: `cargo run --example embedding`
//!
//! The server accepts a line with a name and answers with the id of the job that will greet it. The
//! answer goes out once the job is stored: from then on it survives the server (on a store that
//! survives it; this example uses memory).

use leasehold::{Client, Context, Job};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

#[derive(Serialize, Deserialize)]
struct Greet {
    name: String,
}

impl Job for Greet {
    const KIND: &'static str = "greet";
}

/// One request: a name in, a job id out.
async fn answer(client: Client, stream: TcpStream) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut name = String::new();
    stream.read_line(&mut name).await?;
    let name = name.trim().to_owned();
    let reply = match client.enqueue(&Greet { name }).await {
        Ok(enqueued) => format!("202 accepted {}\n", enqueued.id()),
        // `Unknown` means that it may have been stored. The caller decides whether to ask again.
        Err(error) => format!("503 {error}\n"),
    };
    stream.write_all(reply.as_bytes()).await?;
    Ok(())
}

async fn serve(client: Client, listener: TcpListener, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    tokio::spawn(answer(client.clone(), stream));
                }
            }
        }
    }
}

async fn ask(address: std::net::SocketAddr, name: &str) -> anyhow::Result<String> {
    let mut stream = BufReader::new(TcpStream::connect(address).await?);
    stream.write_all(format!("{name}\n").as_bytes()).await?;
    let mut reply = String::new();
    stream.read_line(&mut reply).await?;
    Ok(reply)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let stop = CancellationToken::new();

    let server = tokio::spawn(serve(client.clone(), listener, stop.clone()));

    let (greeted, mut printed) = mpsc::unbounded_channel();
    let greet = move |job: Greet, _ctx: Context| {
        let greeted = greeted.clone();
        async move { anyhow::Ok(greeted.send(format!("hello {}", job.name))?) }
    };
    // The worker is a future like any other. It shares the runtime with the server; only its
    // renewals have a thread of their own, so that a busy runtime costs nobody a lease.
    let worker = client
        .worker()
        .handle(greet)
        .slots(4)
        .run_until(stop.clone().cancelled_owned());
    let worker = tokio::spawn(worker);

    for name in ["ann", "bob", "cid"] {
        let reply = ask(address, name).await?;
        println!("{}", reply.split_at(12).0);
    }
    let mut lines = Vec::new();
    while lines.len() < 3 {
        lines.extend(printed.recv().await);
    }
    lines.sort();
    println!("{}", lines.join(", "));

    // One signal: the server accepts no more, the worker drains.
    stop.cancel();
    server.await?;
    let report = worker.await??;
    println!("drained, {} unsettled", report.unsettled);
    Ok(())
}
