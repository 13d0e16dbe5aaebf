//! One trace through the store: what enqueues and what runs are linked, and every verb is a span.

#![allow(
    clippy::disallowed_methods,
    reason = "the limits here are of real time"
)]
#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use leasehold::job::Headers;
use leasehold::{Client, Context, Job, LeaseTerms, NewJob};
use opentelemetry::trace::{SpanId, SpanKind, TracerProvider as _};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use serde::{Deserialize, Serialize};
use tracing::{Instrument as _, info_span};
use tracing_subscriber::layer::SubscriberExt as _;

/// One recorder for all tests of this process: workers have threads of their own, and spans are
/// found by the name of the test.
static SPANS: LazyLock<InMemorySpanExporter> = LazyLock::new(|| {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(exporter.clone())
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer)).unwrap();
    exporter
});

#[derive(Serialize, Deserialize)]
struct Ping {
    checkpoint: bool,
}

impl Job for Ping {
    const KIND: &'static str = "ping";
}

fn attribute(span: &SpanData, key: &str) -> Option<String> {
    let found = span
        .attributes
        .iter()
        .find(|attribute| attribute.key.as_str() == key);
    found.map(|attribute| attribute.value.to_string())
}

/// Waits for a span.
async fn span(what: &str, is: impl Fn(&SpanData) -> bool) -> SpanData {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let spans = SPANS.get_finished_spans().unwrap();
        if let Some(span) = spans.into_iter().find(&is) {
            return span;
        }
        assert!(Instant::now() < until, "no span {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs all jobs of a store to their end, in another client, and tells the headers that each had.
async fn work(url: &str, jobs: usize) -> Vec<Headers> {
    let client = Client::open(url).await.unwrap();
    let seen = Arc::<Mutex<Vec<Headers>>>::default();
    let told = Arc::clone(&seen);
    let handler = move |job: Ping, ctx: Context| {
        let told = Arc::clone(&told);
        let inside = info_span!("inside", job = %ctx.job_id());
        let body = async move {
            if job.checkpoint {
                let saved = ctx.save_checkpoint(&1).await;
                saved.map_err(|_| anyhow::anyhow!("no checkpoint"))?;
                span("store.renew", |span| span.name == "store.renew").await;
            }
            told.lock().unwrap().push(ctx.job().headers.clone());
            anyhow::Ok(())
        };
        body.instrument(inside)
    };
    let all = Arc::clone(&seen);
    let done = async move {
        let until = Instant::now() + Duration::from_secs(60);
        while all.lock().unwrap().len() < jobs {
            assert!(Instant::now() < until, "not done");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // The first renewal is due after a fifth of a second, and the term outlasts any pause here.
    let terms =
        LeaseTerms::of_term(Duration::from_secs(60)).renew_every(Duration::from_millis(200));
    let worker = client.worker().terms(terms).handle(handler);
    worker.run_until(done).await.unwrap();
    std::mem::take(&mut *seen.lock().unwrap())
}

fn store() -> (tempfile::TempDir, String) {
    LazyLock::force(&SPANS);
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("jobs.db").display());
    (dir, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_run_links_to_the_enqueue_through_the_store() {
    let (_dir, url) = store();
    let client = Client::open(&url).await.unwrap();
    let outer = info_span!("checkout");
    let enqueue = async { client.enqueue(&Ping { checkpoint: false }).await.unwrap() };
    let id = enqueue.instrument(outer).await.id().to_string();
    let headers = work(&url, 1).await.remove(0);

    let checkout = span("checkout", |span| span.name == "checkout").await;
    let context = &checkout.span_context;
    let producer = |span: &SpanData| {
        span.name == "enqueue" && span.span_context.trace_id() == context.trace_id()
    };
    let producer = span("enqueue", producer).await;
    assert_eq!(producer.parent_span_id, checkout.span_context.span_id());
    assert_eq!(producer.span_kind, SpanKind::Producer);
    let expected = format!(
        "00-{}-{}-01",
        producer.span_context.trace_id(),
        producer.span_context.span_id()
    );
    assert_eq!(headers, [("traceparent".to_owned(), expected)]);

    let run = |span: &SpanData| span.name == "run" && attribute(span, "job").as_ref() == Some(&id);
    let run = span("run", run).await;
    assert_eq!(run.span_kind, SpanKind::Consumer);
    assert_eq!(run.links.len(), 1);
    assert_eq!(
        run.links[0].span_context.trace_id(),
        producer.span_context.trace_id()
    );
    assert_eq!(
        run.links[0].span_context.span_id(),
        producer.span_context.span_id()
    );
    assert!(run.links[0].span_context.is_remote());
    // A trace of its own, in which the handler's spans are.
    assert_ne!(
        run.span_context.trace_id(),
        producer.span_context.trace_id()
    );
    assert_eq!(run.parent_span_id, SpanId::INVALID);
    let inside =
        |span: &SpanData| span.name == "inside" && attribute(span, "job").as_ref() == Some(&id);
    let inside = span("inside", inside).await;
    assert_eq!(inside.parent_span_id, run.span_context.span_id());
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_that_the_caller_gave_stay_and_are_linked_to_if_they_are_good() {
    let (_dir, url) = store();
    let client = Client::open(&url).await.unwrap();
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let good = format!("00-{trace}-b7ad6b7169203331-01");
    let mut ids = Vec::new();
    for parent in [good.as_str(), "00-what-is-this"] {
        let job = NewJob::of(&Ping { checkpoint: false }).unwrap();
        let job = job
            .header("Traceparent", parent)
            .header("tracestate", "a=1");
        ids.push(client.enqueue(job).await.unwrap().id().to_string());
    }
    let mut headers = work(&url, 2).await;
    headers.sort();
    let given = |parent: &str| -> Headers {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        vec![pair("Traceparent", parent), pair("tracestate", "a=1")]
    };
    assert_eq!(headers, [given(&good), given("00-what-is-this")]);

    let run = async |id: &String| {
        let is =
            |span: &SpanData| span.name == "run" && attribute(span, "job").as_ref() == Some(id);
        span("run", is).await
    };
    let (linked, alone) = (run(&ids[0]).await, run(&ids[1]).await);
    assert_eq!(linked.links.len(), 1);
    assert_eq!(linked.links[0].span_context.trace_id().to_string(), trace);
    assert_eq!(linked.links[0].span_context.trace_state().header(), "a=1");
    assert!(alone.links.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_full_of_headers_goes_without_a_context() {
    let (_dir, url) = store();
    let client = Client::open(&url).await.unwrap();
    let mut job = NewJob::of(&Ping { checkpoint: false }).unwrap();
    job.headers = (0..leasehold::limits::HEADERS)
        .map(|at| (format!("h{at}"), String::new()))
        .collect();
    let given = job.headers.clone();
    client.enqueue(job).await.unwrap();
    assert_eq!(work(&url, 1).await, [given]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_to_the_store_is_a_span_of_its_verb() {
    let (_dir, url) = store();
    let client = Client::open(&url).await.unwrap();
    client.enqueue(&Ping { checkpoint: true }).await.unwrap();
    work(&url, 1).await;
    let pause = leasehold::store::ControlCommand::Pause(leasehold::job::QueueName::default());
    client
        .operator("ann")
        .because("")
        .command(pause)
        .await
        .unwrap();
    client.queues().await.unwrap();
    for verb in [
        "enqueue",
        "claim",
        "renew",
        "checkpoint",
        "settle",
        "control",
        "inspect",
    ] {
        let name = format!("store.{verb}");
        span(&name, |span| *span.name == *name).await;
    }
    let names: BTreeSet<_> = SPANS
        .get_finished_spans()
        .unwrap()
        .into_iter()
        .map(|span| span.name)
        .collect();
    assert!(
        names.contains("run") && names.contains("enqueue"),
        "{names:?}"
    );
}
