//! Being asked to stop: everything is handed back, and nothing is left to expire.

use std::time::{Duration, Instant};

use leasehold::inspect::QueueView;
use rustix::process::Signal;

use crate::MACHINE;
use crate::process::Process;
use crate::roles::{Errand, Role};
use crate::stage::pulse;
use crate::world::{TERM, World, figures};

const SHORT: Errand = Errand::Wait { millis: 400 };
const LONG: Errand = Errand::Wait { millis: 600_000 };

/// Long enough for the short jobs to end, and for no long one.
const GRACE: Duration = Duration::from_secs(4);

/// A worker with four short and four long jobs gets this signal in their midst.
async fn stopped_by(signal: Signal) -> (bool, Duration, QueueView) {
    let mut world = World::new();
    world.enqueue(&[SHORT; 4]).await;
    world.enqueue(&[LONG; 20]).await;
    let mut role = world.role(8);
    role.drain_grace = GRACE;
    // However busy the machine is, nobody who lives loses a lease.
    role.term = 10 * TERM;
    let mut worker = Process::start(&Role::Worker(role));
    let busy = |view: &QueueView| view.counts.leased >= 8;
    world.until("eight leases", busy).await;
    // A lease that no handler works yet is handed back at once, a short job's, too.
    for _ in 0..8 {
        worker.hears("waits").await;
    }
    let start = Instant::now();
    worker.signal(signal);
    let ended = worker.ends().await;
    let took = start.elapsed();
    (ended.success(), took, world.look().await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_on_sigterm() {
    let _machine = MACHINE.read().await;
    pulse::start();
    for (name, signal) in [("SIGTERM", Signal::TERM), ("SIGINT", Signal::INT)] {
        let began = Instant::now();
        let (success, took, view) = stopped_by(signal).await;
        let ledger = view.ledger;
        figures(&format!(
            "drain_on_sigterm: {name}, gone after {took:.1?}; {} completed, {} surrendered, \
             {} expired, {} left",
            ledger.completed,
            ledger.surrendered,
            ledger.expired(),
            ledger.live
        ));
        assert!(success);
        assert_eq!(ledger.completed, 4, "{ledger:?}");
        assert!(ledger.surrendered >= 4, "{ledger:?}");
        assert_eq!((ledger.expired(), ledger.live), (0, 0), "{ledger:?}");
        assert!(ledger.balances(), "{ledger:?}");
        assert_eq!((view.counts.ready, view.counts.leased), (20, 0));
        // Two more for the store to answer and the process to end.
        let bound = GRACE + Duration::from_secs(2) + 3 * pulse::longest(began);
        assert!(took < bound, "{took:?}, allowed {bound:?}");
    }
    let (success, _, view) = stopped_by(Signal::KILL).await;
    assert!(
        !success && view.ledger.live >= 8,
        "the control arm left nothing behind: {view:?}"
    );
}
