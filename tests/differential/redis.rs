//! The Redis store against memory, on a private server and on a cluster of six.
//!
//! Without an index no job is called by its id.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use leasehold::Store;
use leasehold::clock::ManualClock;
use leasehold::job::Namespace;
use leasehold::store::{RedisOptions, RedisStore};

use crate::program::{ControlSpec, SelectSpec, Step, on_one_queue, with_time_in_order};
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

/// What becomes of the options.
type Change = fn(RedisOptions) -> RedisOptions;

const INDEXED: Change = |options| options.index(true);
const SCRIPTED: Change = |options| options.index(false);
const IN_BULK: Change = |options| options.index(false).bulk(1);

fn store(url: String, change: Change) -> Box<Make> {
    Box::new(move |clock: ManualClock| {
        let url = url.clone();
        Box::pin(async move {
            let namespace = Namespace::new(format!("run-{:016x}", fastrand::u64(..))).unwrap();
            let options = RedisOptions::new(url).namespace(namespace).clock(clock);
            let store: Arc<dyn Store> = Arc::new(RedisStore::open(change(options)).unwrap());
            (store, Box::new(()) as Box<dyn Any>)
        })
    })
}

fn without_ids(program: Vec<Step>) -> Vec<Step> {
    let mut program = on_one_queue(program);
    for step in &mut program {
        match step {
            Step::Control(
                ControlSpec::Cancel(jobs)
                | ControlSpec::RetryDead(jobs)
                | ControlSpec::Purge(jobs)
                | ControlSpec::Reschedule(jobs, _),
            ) => {
                if let SelectSpec::Job(at) = *jobs {
                    let (queue, state, max) = (0, at % 6, 1 + at % 4);
                    *jobs = SelectSpec::State { queue, state, max };
                }
            }
            Step::Control(control) => {
                if let ControlSpec::RevokeJob(at) = *control {
                    *control = ControlSpec::RevokeOwner((at % 2) as u8);
                }
            }
            _ => {}
        }
    }
    program
}

fn agrees(options: Change, change: fn(Vec<Step>) -> Vec<Step>) {
    let store = store(server().url().to_owned(), options);
    if let Err(error) = agrees_on(&store, change, quick_or(2_000, 32), 200) {
        panic!("{error}");
    }
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn redis_agrees_with_memory_on_one_queue() {
    agrees(INDEXED, on_one_queue);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn redis_agrees_with_memory_on_two_queues() {
    agrees(INDEXED, with_time_in_order);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn redis_without_an_index_agrees_with_memory() {
    agrees(SCRIPTED, without_ids);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn redis_in_bulk_agrees_with_memory() {
    agrees(IN_BULK, without_ids);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn a_cluster_agrees_with_memory_on_two_queues() {
    let store = store(nodes().url(), INDEXED);
    if let Err(error) = agrees_on(&store, with_time_in_order, quick_or(1_000, 16), 200) {
        panic!("{error}");
    }
}
