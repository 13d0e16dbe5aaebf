//! `leasehold serve`.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_support::machine;

use crate::dashboard::http::{Events, LONG, get, send};
use crate::dashboard::scene::job;

/// A server that ends with the test.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn leasehold() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    command.env_remove("LEASEHOLD_URL").stdin(Stdio::null());
    command
}

/// Starts it, and reads where it listens from the first line it says.
fn serve(arguments: &[&str], secret: &str) -> (Serving, SocketAddr, String) {
    let mut child = leasehold()
        .arg("serve")
        .args(arguments)
        .args(["--listen", "127.0.0.1:0"])
        .env("DASHBOARD_SECRET", secret)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = child.stderr.take().unwrap();
    let serving = Serving(child);
    let mut line = String::new();
    BufReader::new(stderr).read_line(&mut line).unwrap();
    let (_, url) = line.trim().split_once("http://").expect(&line);
    let (address, path) = url.split_once('/').unwrap();
    (serving, address.parse().unwrap(), path.to_owned())
}

fn refused(arguments: &[&str]) -> Output {
    let output = leasehold().arg("serve").args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(output.stdout.is_empty());
    output
}

async fn store() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("jobs.db").display());
    let client = Client::open(&url).await.unwrap();
    client
        .enqueue(job("from-the-file", "step", "{}"))
        .await
        .unwrap();
    (dir, url)
}

#[tokio::test]
async fn it_serves_the_dashboard_and_the_ledger_under_a_prefix() {
    let (_dir, url) = store().await;
    let (_serving, at, path) = serve(&[&url, "--prefix", "/ops"], "");
    assert_eq!(path, "ops");
    let page = get(at, "/ops/queues").await;
    assert!(page.body.contains("from-the-file"), "{}", page.body);
    assert!(page.body.contains("read-only"));
    let scrape = get(at, "/ops/metrics").await;
    assert!(
        scrape.body.contains(
            "leasehold_queue_jobs{store=\"leasehold\",queue=\"from-the-file\",state=\"ready\"} 1"
        ),
        "{}",
        scrape.body
    );
}

#[tokio::test]
async fn it_ends_when_a_supervisor_says_so() {
    machine::judged(|| async {
        let took = ended().await;
        // At once; the rest is for a busy machine.
        if took >= Duration::from_secs(5) {
            return Err(format!("{took:?}"));
        }
        Ok(())
    })
    .await;
}

/// How long it takes to end when it is told to, with a page open.
async fn ended() -> Duration {
    let (_dir, url) = store().await;
    let (mut serving, at, _) = serve(&[&url], "");
    assert_eq!(get(at, "/").await.status, 200);
    // A page that is open does not keep it.
    let mut events = Events::open(at, "/").await;
    events.until("event: live").await;
    let begun = Instant::now();
    let pid = rustix::process::Pid::from_child(&serving.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let ended = async {
        loop {
            if let Some(status) = serving.0.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let status = tokio::time::timeout(LONG, ended)
        .await
        .expect("still there");
    assert_eq!(status.code(), Some(0), "{status}");
    begun.elapsed()
}

#[tokio::test]
async fn secrets_come_from_the_environment() {
    let (_dir, url) = store().await;
    let (_serving, at, _) = serve(
        &["--url", &url, "--auth-token-env", "DASHBOARD_SECRET"],
        "s3cret",
    );
    assert_eq!(get(at, "/").await.status, 401);
    assert_eq!(
        send(at, "GET", "/", &["Authorization: Bearer s3cret"], "")
            .await
            .status,
        200
    );
    let (_serving, at, _) = serve(
        &[&url, "--auth-basic-env", "DASHBOARD_SECRET"],
        "ada:s3cret",
    );
    assert_eq!(get(at, "/").await.status, 401);
    let right = "Authorization: Basic YWRhOnMzY3JldA==";
    assert_eq!(send(at, "GET", "/", &[right], "").await.status, 200);
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_in_one_line() {
    let (dir, url) = store().await;
    let public = refused(&[&url, "--listen", "0.0.0.0:0"]);
    assert_eq!(public.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&public.stderr).contains("loopback"));
    assert_eq!(
        refused(&[&url, "--auth-token-env", "NO_SUCH_VARIABLE"])
            .status
            .code(),
        Some(2)
    );
    assert_eq!(refused(&[&url, "--prefix", "/a b"]).status.code(), Some(2));
    assert_eq!(refused(&[]).status.code(), Some(2));
    let nowhere = format!("sqlite://{}", dir.path().join("nothing.db").display());
    assert_eq!(refused(&[&nowhere]).status.code(), Some(3));
    // A URL that cannot be opened may hold a password: it is not repeated.
    let secret = refused(&["nosuch://user:hunter2@host/0"]);
    assert!(!String::from_utf8_lossy(&secret.stderr).contains("hunter2"));
}
