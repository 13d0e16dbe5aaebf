use std::sync::Arc;
use std::time::Duration;

use shuttle::thread;

use held::{Board, HeldGrant, HolderClock, Stop};
use pool::Pool;

const GUARD: Duration = Duration::from_millis(50);

fn hold() -> (Arc<Pool>, Arc<HeldGrant>) {
    let now = tokio::time::Instant::now();
    let pool = Arc::new(Pool {
        clock: HolderClock::starting(now),
        kinds: Vec::new(),
        board: Board::default(),
        ended: crate::sync::atomic::AtomicUsize::new(0),
    });
    let held = pool.board.hold(0, crate::grant(), now, GUARD, &pool);
    (pool, held)
}

fn spawn(play: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    thread::spawn(play)
}

/// A handler asks for its stop signal while a renewal finds the lease fenced, somebody cancels the
/// job and the worker drains.
pub(crate) fn listen() {
    let (pool, held) = hold();
    let listens = {
        let held = Arc::clone(&held);
        // What it listens to is what it got here, whenever that was.
        thread::spawn(move || held.leases[0].stop_signal().token.clone())
    };
    let cancels = {
        let held = Arc::clone(&held);
        spawn(move || {
            held.leases[0].stop(Stop::Cancel);
        })
    };
    let fences = {
        let held = Arc::clone(&held);
        spawn(move || {
            let now = tokio::time::Instant::now();
            held.extend(now, Duration::from_secs(1));
            assert!(held.leases[0].stop(Stop::Fenced), "the most severe is news");
        })
    };
    for held in pool.board.grants() {
        for lease in &held.leases {
            lease.stop(Stop::Drain);
        }
    }
    cancels.join().unwrap();
    fences.join().unwrap();
    let signal = listens.join().unwrap();
    assert_eq!(held.leases[0].stopped(), Some(Stop::Fenced));
    assert_eq!(held.leases[1].stopped(), Some(Stop::Drain));
    assert!(signal.is_cancelled(), "told to stop, and did not hear it");
}

/// A lease is settled, found lost by the renewer, and abandoned with the pool, all at once.
pub(crate) fn end() {
    let (pool, held) = hold();
    let settles = {
        let (pool, held) = (Arc::clone(&pool), Arc::clone(&held));
        spawn(move || {
            held.leases[0].hand_in();
            pool.end(&held, 0);
        })
    };
    let loses = {
        let (pool, held) = (Arc::clone(&pool), Arc::clone(&held));
        spawn(move || {
            for (index, lease) in held.leases.iter().enumerate() {
                // The renewer leaves alone what only waits for its verdict.
                if !lease.is_handed_in() && !lease.has_ended() && lease.stop(Stop::Fenced) {
                    pool.end(&held, index);
                }
            }
        })
    };
    // The pool is dropped: everything that is still held ends with it.
    for held in pool.board.grants() {
        for index in 0..held.leases.len() {
            pool.end(&held, index);
        }
    }
    settles.join().unwrap();
    loses.join().unwrap();
    let ended = pool.ended.load(crate::sync::atomic::Ordering::SeqCst);
    assert_eq!(ended, 2, "a lease ended twice, or not at all");
    assert_eq!((held.live(), pool.board.leases()), (0, 0));
    assert!(pool.board.grants().is_empty(), "it is still on the board");
}

/// A handler shows progress while the renewer hears that the store has seen an earlier one.
pub(crate) fn progress() {
    let (pool, held) = hold();
    let shown = |done| leasehold::lease::Progress {
        done,
        total: None,
        note: String::new(),
    };
    let now = tokio::time::Instant::now();
    held.start(0, pool.clock.stamp(now));
    held.progress(0, shown(1), now);
    let renews = {
        let held = Arc::clone(&held);
        spawn(move || {
            if let Some(sent) = held.unseen_progress(0) {
                held.progress_seen(0, &sent);
            }
        })
    };
    held.progress(0, shown(2), now);
    renews.join().unwrap();
    let left = held.unseen_progress(0);
    // Either it was sent with the renewal, or it is still to be sent; the first never stays.
    assert!(left.is_none_or(|left| left.done == 2), "an old one is left");
}
