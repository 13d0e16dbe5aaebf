//! What a user can name, and what can be relied on about it.

use std::sync::Arc;

use leasehold::error::Verb;
use leasehold::lease::{Receipt, Verdict};
use leasehold::observe::{Event, Observer};
use leasehold::store::MemoryStore;
use leasehold::store::{Enqueued, Outcome};
use leasehold::worker::DrainReport;
use leasehold::{
    Client, Context, Error, ErrorKind, Failure, FencingToken, Handler, Job, JobId, LeaseTerms,
    NewJob, QueueConfig, RetryPolicy, State, Store, Worker, async_trait,
};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Ping;

impl Job for Ping {
    const KIND: &'static str = "ping";
}

fn shareable<T: Send + Sync + 'static>() {}
fn sendable<T: Send + 'static>() {}

#[test]
fn handles_cross_threads() {
    shareable::<Client>();
    shareable::<Context>();
    shareable::<Error>();
    shareable::<Failure>();
    shareable::<MemoryStore>();
    shareable::<Arc<dyn Store>>();
    shareable::<Arc<dyn Observer>>();
    shareable::<NewJob>();
    shareable::<Receipt>();
    shareable::<(
        JobId,
        FencingToken,
        Verdict,
        DrainReport,
        LeaseTerms,
        RetryPolicy,
    )>();
    sendable::<Worker>();
    sendable::<QueueConfig>();
}

#[test]
fn seams_are_object_safe() {
    let _: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let _: Box<dyn Handler<Ping>> = Box::new(ByTrait);
    let _: Arc<dyn Observer> = Arc::new(|_: &Event<'_>| {});
}

#[test]
fn the_error_is_a_standard_one() {
    fn standard<T: std::error::Error>(error: T) -> (String, T) {
        (error.to_string(), error)
    }
    let (text, error) = standard("one".parse::<FencingToken>().unwrap_err());
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(error.verb(), None::<Verb>);
    assert!(text.starts_with("token: found"), "{text}");
}

// Any error type ends a handler by `?`, and so does a text.

async fn by_anyhow(_: Ping, _: Context) -> anyhow::Result<()> {
    "1".parse::<u8>()?;
    anyhow::ensure!(true, "never");
    Ok(())
}

async fn by_std(_: Ping, _: Context) -> Result<(), std::num::ParseIntError> {
    "1".parse::<u8>()?;
    Ok(())
}

async fn by_box(_: Ping, _: Context) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    "1".parse::<u8>()?;
    Err("a text")?
}

async fn by_text(_: Ping, _: Context) -> Result<(), &'static str> {
    Ok(())
}

async fn by_string(_: Ping, _: Context) -> Result<(), String> {
    Ok(())
}

async fn by_failure(_: Ping, ctx: Context) -> Result<(), Failure> {
    "1".parse::<u8>()?;
    anyhow::Ok(1)?;
    Err("a text").or(Ok::<_, Failure>(()))?;
    let _: Option<u8> = ctx.last_checkpoint()?;
    ctx.save_checkpoint(&1).await?;
    ctx.enqueue(&Ping).await?;
    ctx.set_result(&1)?;
    Ok(())
}

async fn by_error(_: Ping, ctx: Context) -> leasehold::Result<()> {
    let enqueued: Enqueued = ctx.enqueue(&Ping).await?;
    assert_ne!(enqueued.id(), ctx.job_id());
    Ok(())
}

async fn by_states(
    _: Ping,
    _: Context,
    _: State<u8>,
    State(_): State<Arc<str>>,
) -> leasehold::Result<()> {
    Ok(())
}

struct ByTrait;

#[async_trait]
impl Handler<Ping> for ByTrait {
    async fn handle(&self, _: Ping, _: Context) -> Result<(), Failure> {
        Err(std::io::Error::other("any error"))?
    }
}

#[tokio::test]
async fn each_of_these_is_a_handler() {
    let client = Client::open("memory:").await.unwrap();
    let _ = client.worker().handle(by_anyhow);
    let _ = client.worker().handle(by_std);
    let _ = client.worker().handle(by_box);
    let _ = client.worker().handle(by_text);
    let _ = client.worker().handle(by_string);
    let _ = client.worker().handle(by_failure);
    let _ = client.worker().handle(by_error);
    let _ = client.worker().handle(ByTrait);
    let shared: Arc<dyn Handler<Ping>> = Arc::new(ByTrait);
    let _ = client.worker().handle(shared);
    let _ = client.worker().handle(by_states);
    let _ = client
        .worker()
        .handle(|_: Ping, _: Context| async { anyhow::Ok(()) });
}

#[tokio::test]
async fn a_worker_is_a_future_that_can_be_spawned() {
    let client = Client::open("memory:").await.unwrap();
    let worker = client.worker().handle(by_text);
    let report = tokio::spawn(worker.run_until(async {})).await.unwrap();
    assert_eq!(report.unwrap().unsettled, 0);
}

#[tokio::test]
async fn a_worker_that_cannot_start_says_what_to_change() {
    let client = Client::open("memory:").await.unwrap();
    let mut terms = LeaseTerms::SHORT;
    terms.renew_every = terms.term;
    let worker = client.worker().handle(by_text).terms(terms);
    let error = worker.run_until(async {}).await.unwrap_err();
    assert_eq!(error.field(), Some("renew_every"));
    assert!(error.to_string().contains("less than"), "{error}");

    let error = client.worker().run_until(async {}).await.unwrap_err();
    assert_eq!(error.field(), Some("handlers"));

    for url in ["mysql://somewhere", "sqlite://a\0b.db"] {
        let error = Client::open(url).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::InvalidInput, Some("url")),
            "{error}"
        );
    }
}

#[test]
fn one_spelling_each() {
    assert_eq!(Outcome::Complete { result: None }.as_str(), "complete");
    assert_eq!(Verb::Settle.to_string(), "settle");
    assert_eq!(ErrorKind::Unknown.as_str(), "unknown");
}
