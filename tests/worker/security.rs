//! Forged receipts, oversized input, names and keys that try to collide, and secrets that must not
//! show. What needs a server is tested beside that server's store.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::job::{Kind, QueueName};
use leasehold::lease::Receipt;
use leasehold::lease::{Grant, Nonce};
use leasehold::limits;
use leasehold::store::MemoryStore;
use leasehold::store::{
    Checkpoint, CheckpointRequest, Checkpointed, ClaimRequest, Enqueued, Outcome, SettleRequest,
    Settlement,
};
use leasehold::{Client, Context, ErrorKind, Failure, Job, LeaseTerms, NewJob};
use leasehold_conformance::{Driver, Held, ManualFixture, job};
use serde::{Deserialize, Serialize};
use tracing_subscriber::fmt::MakeWriter;

async fn driver() -> Driver {
    let clock = ManualClock::default();
    let fixture = ManualFixture::new(MemoryStore::with_clock(clock.clone()), clock);
    Driver::new(Arc::new(fixture)).await
}

fn settlement(receipt: Receipt) -> Settlement {
    let outcome = Outcome::Complete { result: None };
    Settlement { receipt, outcome }
}

/// The grant with another proof in it.
fn forged(grant: &Grant, proof: [u8; 16]) -> Receipt {
    let mut grant = grant.clone();
    grant.nonce = Nonce::from_bytes(proof);
    grant.receipt(&grant.leases[0])
}

#[tokio::test]
async fn of_a_million_guesses_none_is_accepted() {
    let driver = driver().await;
    driver.enqueue(job()).await;
    let request: ClaimRequest = driver.claim_request(1);
    let claimed = driver.claim_as(request).await;
    let grant = &claimed.grants[0];
    let before = driver.snapshot().await.without_fenced();
    let mut dice = fastrand::Rng::with_seed(1);
    let mut guesses: u64 = 0;
    // Near misses first: every single bit of the right proof.
    let mut proofs: Vec<[u8; 16]> = (0..128)
        .map(|bit| {
            let mut proof = *grant.nonce.as_bytes();
            proof[bit / 8] ^= 1 << (bit % 8);
            proof
        })
        .collect();
    while guesses < 1_000_000 {
        proofs.resize_with(limits::CALL_ITEMS, || dice.u128(..).to_le_bytes());
        let settlements = proofs
            .drain(..)
            .map(|proof| settlement(forged(grant, proof)));
        let request = SettleRequest {
            request: driver.request(),
            settlements: settlements.collect(),
        };
        let verdicts = driver.store().settle(request).await.unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_fenced()));
        guesses += verdicts.len() as u64;
    }
    assert_eq!(driver.snapshot().await.without_fenced(), before);
    assert_eq!(driver.ledger().await.fenced, guesses);
    // Control arm: the right one is.
    let held = Held::all(&claimed);
    let right = settlement(grant.receipt(&grant.leases[0]));
    assert_eq!(right.receipt, held[0].receipt);
    let request = SettleRequest {
        request: driver.request(),
        settlements: vec![right],
    };
    let verdicts = driver.store().settle(request).await.unwrap();
    assert!(verdicts[0].is_held());
}

#[tokio::test]
async fn a_receipt_with_any_part_changed_is_refused() {
    let driver = driver().await;
    driver.enqueue_all(vec![job(), job()]).await;
    let held = driver.claim(2).await;
    let text = held[0].receipt.to_string();
    let mut refused = 0;
    for bit in 0..text.len() * 8 {
        let mut bytes = text.clone().into_bytes();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let Ok(other) = String::from_utf8(bytes) else {
            continue;
        };
        let Ok(other) = other.parse::<Receipt>() else {
            refused += 1;
            continue;
        };
        let request = SettleRequest {
            request: driver.request(),
            settlements: vec![settlement(other.clone())],
        };
        let verdicts = driver.store().settle(request).await.unwrap();
        assert!(verdicts[0].is_fenced(), "{other} was accepted");
        let request = CheckpointRequest {
            request: driver.request(),
            checkpoints: vec![Checkpoint {
                receipt: other,
                seq: 1,
                bytes: "stolen".into(),
            }],
        };
        let answers = driver.store().checkpoint(request).await.unwrap();
        assert_eq!(answers, [Checkpointed::Fenced]);
        refused += 1;
    }
    assert!(refused > 500, "only {refused} tried");
    // The parts of another lease of the same grant do not fit either.
    let (a, b) = (held[0].receipt.to_string(), held[1].receipt.to_string());
    let (a, b): (Vec<_>, Vec<_>) = (a.split('/').collect(), b.split('/').collect());
    for part in [3, 4] {
        let mut mixed = a.clone();
        mixed[part] = b[part];
        let receipt: Receipt = mixed.join("/").parse().unwrap();
        let verdict = driver
            .settle_receipt(&receipt, Outcome::Complete { result: None })
            .await;
        assert!(verdict.is_fenced());
    }
}

#[tokio::test]
async fn what_is_too_large_is_refused_by_name_and_nothing_is_stored() {
    let driver = driver().await;
    let of = |bytes: usize| {
        NewJob::raw(
            QueueName::default(),
            Kind::new("k").unwrap(),
            vec![0; bytes],
        )
    };
    driver.enqueue(of(limits::PAYLOAD_BYTES)).await;
    driver
        .refuses(vec![of(limits::PAYLOAD_BYTES + 1)], "payload")
        .await;
    let mut many = job();
    for n in 0..=limits::HEADERS {
        many = many.header(n.to_string(), "");
    }
    driver.refuses(vec![many], "headers").await;
    let long = job().header("h", "x".repeat(limits::HEADER_BYTES));
    driver.refuses(vec![long], "headers").await;
    let heavy = vec![of(limits::PAYLOAD_BYTES); limits::CALL_BYTES / limits::PAYLOAD_BYTES + 1];
    driver.refuses(heavy, "jobs").await;
    driver
        .refuses(vec![of(0); limits::CALL_ITEMS + 1], "jobs")
        .await;
    driver
        .refuses(vec![job().delay(Duration::MAX)], "delay")
        .await;
    assert_eq!(driver.queue().await.ledger.enqueued, 1);
}

#[derive(Serialize, Deserialize)]
struct Nested {
    next: Option<Box<Nested>>,
}

impl Job for Nested {
    const KIND: &'static str = "nested";
}

/// A payload that nests deeper than the decoder goes is the death of its job alone, with a reason;
/// the worker lives on and works the next.
#[tokio::test]
async fn a_payload_that_is_too_deep_fails_its_job_alone() {
    let client = Client::open("memory:").await.unwrap();
    let deep = format!("{}null{}", "{\"next\":".repeat(20_000), "}".repeat(20_000));
    let kind = Kind::new(Nested::KIND).unwrap();
    let deep = NewJob::raw(QueueName::default(), kind, deep.into_bytes());
    let bad = client.enqueue(deep).await.unwrap().id();
    client.enqueue(&Nested { next: None }).await.unwrap();
    let watch = client.clone();
    let done = async move {
        loop {
            let ledger = watch.queues().await.unwrap()[0].ledger;
            if ledger.completed == 1 && ledger.buried == 1 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let worker = client
        .worker()
        .handle(|_: Nested, _: Context| async { Ok::<(), Failure>(()) })
        .decode_grace(Duration::ZERO);
    let run = tokio::time::timeout(Duration::from_secs(60), worker.run_until(done));
    run.await.expect("both jobs end").unwrap();
    let view = client.job(bad).await.unwrap().unwrap();
    let reason = view.job.history[0].reason.clone().unwrap();
    assert!(reason.contains("recursion limit"), "{reason}");
}

/// Keys that look alike once joined, escaped, folded or cut are different keys; and no key of one
/// kind or queue is a key of another.
#[tokio::test]
async fn keys_that_try_to_collide_are_different_keys() {
    let driver = driver().await;
    let long = "k".repeat(limits::KEY_BYTES - 1);
    let keys = [
        " ",
        "a",
        "A",
        "a ",
        " a",
        "a:b",
        "a/b",
        "a\0b",
        "a\0",
        "{a}",
        "{a}b",
        "a}b{",
        "*",
        "a*",
        "%",
        "_",
        "'",
        "\"",
        "';--",
        "\\",
        "é",
        "e\u{301}",
        "\u{202e}a",
        "\n",
        "a\nb",
        "NULL",
        "0",
        "-1",
        "\u{feff}a",
    ];
    let mut keys: Vec<String> = keys.map(String::from).to_vec();
    keys.extend([format!("{long}a"), format!("{long}b"), long]);
    let distinct = keys.len();
    for key in &keys {
        let unique = driver.try_enqueue(vec![job().unique(key).unwrap()]).await;
        assert!(matches!(unique.unwrap()[0], Enqueued::New(_)), "{key:?}");
        // An exclusive key of the same text is another thing.
        driver.enqueue(job().exclusive(key).unwrap()).await;
    }
    for key in &keys {
        let again = driver.try_enqueue(vec![job().unique(key).unwrap()]).await;
        assert!(
            matches!(again.unwrap()[0], Enqueued::Duplicate(_)),
            "{key:?}"
        );
        let elsewhere = job().queue("other").unwrap().unique(key).unwrap();
        let elsewhere = driver.try_enqueue(vec![elsewhere]).await.unwrap();
        assert!(matches!(elsewhere[0], Enqueued::New(_)), "{key:?}");
    }
    // Each exclusive key has one job, and none waits behind another.
    assert_eq!(driver.claim(1_000).await.len(), 2 * distinct);
}

#[test]
fn names_that_try_to_steer_are_refused() {
    for name in [
        "",
        "{a}",
        "a{b}",
        "a:b",
        "a/b",
        "a b",
        "a\0",
        "é",
        "../x",
        "a*",
        "?",
        "a\n",
        "'",
        "\"",
        "$a",
        "a;b",
        &"n".repeat(129),
    ] {
        let error = QueueName::new(name).unwrap_err();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::InvalidInput, Some("queue")),
            "{name:?}"
        );
        // Nor does the refusal repeat what may be hostile to a terminal or a log.
        assert!(
            name.len() < 2 || !error.to_string().contains(name),
            "{error}"
        );
    }
    QueueName::new("A-z_0.9").unwrap();
}

/// Everything that is written to it, as text.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

const CANARY: &str = "hunter2canary";

/// URLs with a secret in every place where one can stand.
fn secret_urls() -> Vec<String> {
    let mut urls = Vec::new();
    for scheme in [
        "redis",
        "rediss",
        "redis+cluster",
        "redis+sentinel",
        "postgres",
        "postgresql",
        "mysql",
        "memory ",
        "",
    ] {
        for rest in [
            "//user:SECRET@127.0.0.1:1/0",
            "//:SECRET@127.0.0.1:1",
            "//SECRET@127.0.0.1:1",
            "//user:a?SECRET@127.0.0.1:1/0",
            "//user:a?b=SECRET@127.0.0.1:1/0",
            "//user:a&SECRET@127.0.0.1:1?namespace=x",
            "//127.0.0.1:1/0?password=SECRET",
            "//127.0.0.1:1/0?SECRET",
            "SECRET",
        ] {
            urls.push(format!("{scheme}:{rest}"));
        }
    }
    urls.extend(
        [
            "SECRET@host",
            "//user:SECRET@host",
            "memory:?SECRET",
            "memory:?password=SECRET",
            "memory:?namespace=a/SECRET",
            "memory:?synchronous=SECRET",
            "sqlite:?SECRET",
            "sqlite://?password=SECRET",
        ]
        .map(String::from),
    );
    let urls = urls.into_iter();
    urls.map(|url| url.replace("SECRET", CANARY)).collect()
}

#[derive(Serialize, Deserialize)]
struct Show;

impl Job for Show {
    const KIND: &'static str = "show";
}

/// Says that this process runs one test only.
const ALONE: &str = "LEASEHOLD_TEST_ALONE";

/// In a process of its own: what is logged is everybody's, and another test that sets up its own
/// log at the same moment may turn ours off.
#[test]
fn secrets_show_in_no_log_error_or_debug() {
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        return runtime.block_on(everything_that_is_told());
    }
    let test = "security::secrets_show_in_no_log_error_or_debug";
    let alone = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&alone.stdout);
    assert!(alone.status.success(), "{told}");
    assert!(told.contains("1 passed"), "{told}");
}

async fn everything_that_is_told() {
    let log = Log::default();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(log.clone())
        .init();
    tracing::trace!("the log is on");

    let mut told = String::new();
    for url in secret_urls() {
        // Where nobody listens, a server's URL may be taken, or the server be found to be out.
        let opened = tokio::time::timeout(Duration::from_secs(10), Client::open(&url)).await;
        let error = match opened.expect("an answer, soon") {
            Ok(client) => {
                write!(told, "{client:?} ").unwrap();
                continue;
            }
            Err(error) => error,
        };
        let is_server = ["redis", "postgres"]
            .iter()
            .any(|name| url.starts_with(name));
        let invalid = error.kind() == ErrorKind::InvalidInput;
        assert!(invalid || is_server, "{url}: {error}");
        write!(told, "{error} {error:?} {error:#?} ").unwrap();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            write!(told, "{cause} {cause:?} ").unwrap();
            source = cause.source();
        }
    }
    assert!(!told.contains(CANARY), "{told}");

    // A whole run, with failures, and the proof of every lease that it held.
    let client = Client::open("memory:").await.unwrap();
    let proofs = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&proofs);
    let debugs = Arc::new(Mutex::new(String::new()));
    let shown = Arc::clone(&debugs);
    let handler = move |_: Show, ctx: Context| {
        let receipt = ctx.receipt();
        let proof = receipt.to_string().rsplit('/').next().unwrap().to_owned();
        seen.lock().unwrap().push(proof);
        let mut shown = shown.lock().unwrap();
        write!(shown, "{receipt:?} {ctx:?} {:#?}", ctx.job()).unwrap();
        drop(shown);
        let failures = ctx.job().failures;
        async move {
            ctx.progress(1, 2, "half");
            ctx.save_checkpoint(&1).await?;
            tokio::time::sleep(Duration::from_millis(150)).await;
            match failures {
                0 => Err(Failure::retry_in(Duration::from_millis(1), "once more")),
                _ => Ok(()),
            }
        }
    };
    client.enqueue(&Show).await.unwrap();
    let watch = client.clone();
    let done = async move {
        while watch.queues().await.unwrap()[0].ledger.completed == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .terms(LeaseTerms::of_term(Duration::from_millis(300)));
    write!(told, "{client:?} {worker:?}").unwrap();
    let run = tokio::time::timeout(Duration::from_secs(60), worker.run_until(done));
    run.await.expect("the job is completed").unwrap();
    told += &debugs.lock().unwrap();

    let text = log.text();
    assert!(
        text.contains("the log is on") && text.contains("settled"),
        "{text}"
    );
    assert!(!text.contains(CANARY), "{text}");
    let proofs = proofs.lock().unwrap();
    assert!(proofs.len() >= 2);
    for proof in proofs.iter() {
        assert!(
            !text.contains(proof) && !told.contains(proof),
            "a proof shows"
        );
    }
    // Control arm: the canary would be seen if it were there.
    tracing::trace!(url = format!("redis://:{CANARY}@host"), "a leak");
    assert!(log.text().contains(CANARY));
}
