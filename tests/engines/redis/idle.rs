//! What a pool costs the server while there is nothing to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Client, Context, Failure, Job};
use serde::{Deserialize, Serialize};

use crate::redis::support::proxy::Proxy;
use crate::redis::support::redis::{PATIENCE, Standalone};

#[derive(Serialize, Deserialize)]
struct Work;

impl Job for Work {
    const KIND: &'static str = "work";
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn an_idle_pool_of_a_hundred_slots_is_nearly_silent() {
    let one = Standalone::start(&[]);
    let proxy = Proxy::start(one.server.port()).await;
    let by_proxy = format!("redis://127.0.0.1:{}", proxy.port());
    let pool = Client::open(&by_proxy).await.unwrap();
    let producer = Client::open(one.url()).await.unwrap();
    let started = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&started);
    let worker = pool.worker().slots(100).handle(move |_: Work, _: Context| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok::<(), Failure>(()) }
    });
    let one_more = async |before: usize| {
        producer.enqueue(&Work).await.unwrap();
        let begun = Instant::now();
        while started.load(Ordering::SeqCst) == before {
            assert!(begun.elapsed() < PATIENCE, "the pool does not wake up");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let watch = async {
        one_more(0).await;
        // The settlement, and the look whether there is more.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (before, begun) = (proxy.requests(), Instant::now());
        tokio::time::sleep(Duration::from_secs(6)).await;
        let rate = (proxy.requests() - before) as f64 / begun.elapsed().as_secs_f64();
        println!("an idle pool of 100 slots sends {rate:.2} commands a second");
        assert!(rate <= 5.0, "{rate} commands a second");
        assert!(rate > 0.0, "the meter works, and so does the pool");
        one_more(1).await;
    };
    worker.run_until(watch).await.unwrap();
}
