//! The Redis store against memory, on a private server and on a cluster of six.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use leasehold::Store;
use leasehold::clock::ManualClock;
use leasehold::job::Namespace;
use leasehold::store::{RedisOptions, RedisStore};

use crate::program::{Step, on_one_queue, with_time_in_order};
use crate::support::redis::{Cluster, STEADY, Standalone};
use crate::{Make, agrees_on, quick_or};

fn server() -> &'static Standalone {
    static SERVER: OnceLock<Standalone> = OnceLock::new();
    SERVER.get_or_init(|| Standalone::start(&[]))
}

fn nodes() -> &'static Cluster {
    static NODES: OnceLock<Cluster> = OnceLock::new();
    NODES.get_or_init(|| Cluster::start(STEADY))
}

fn store(url: String) -> Box<Make> {
    Box::new(move |clock: ManualClock| {
        let url = url.clone();
        Box::pin(async move {
            let namespace = Namespace::new(format!("run-{:016x}", fastrand::u64(..))).unwrap();
            let options = RedisOptions::new(url).namespace(namespace).clock(clock);
            let store: Arc<dyn Store> = Arc::new(RedisStore::open(options).unwrap());
            (store, Box::new(()) as Box<dyn Any>)
        })
    })
}

fn agrees(change: fn(Vec<Step>) -> Vec<Step>) {
    let store = store(server().url().to_owned());
    if let Err(error) = agrees_on(&store, change, quick_or(2_000, 32), 200) {
        panic!("{error}");
    }
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn redis_agrees_with_memory_on_one_queue() {
    agrees(on_one_queue);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn redis_agrees_with_memory_on_two_queues() {
    agrees(with_time_in_order);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_cluster_agrees_with_memory_on_two_queues() {
    let store = store(nodes().url());
    if let Err(error) = agrees_on(&store, with_time_in_order, quick_or(1_000, 16), 200) {
        panic!("{error}");
    }
}
