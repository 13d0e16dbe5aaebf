use std::sync::Arc;
use std::time::Duration;

use shuttle::thread;

use fence::{Board, Held, HolderClock, Stop};
use nap::Nap;
use pool::Pool;

const GUARD: Duration = Duration::from_millis(50);

fn held() -> (Arc<Pool>, Arc<Held>) {
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

/// A handler asks for its bell while a renewal finds the lease fenced, somebody cancels the job and
/// the worker drains.
pub(crate) fn listen() {
    let (pool, held) = held();
    let listens = {
        let held = Arc::clone(&held);
        // What it listens to is what it got here, whenever that was.
        thread::spawn(move || held.leases[0].bell().token.clone())
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
            assert!(held.leases[0].stop(Stop::Fenced), "the gravest is news");
        })
    };
    for held in pool.board.grants() {
        for lease in &held.leases {
            lease.stop(Stop::Drain);
        }
    }
    cancels.join().unwrap();
    fences.join().unwrap();
    let bell = listens.join().unwrap();
    assert_eq!(held.leases[0].stopped(), Some(Stop::Fenced));
    assert_eq!(held.leases[1].stopped(), Some(Stop::Drain));
    assert!(bell.is_cancelled(), "told to stop, and did not hear it");
}

/// A lease is settled, found lost by the renewer, and abandoned with the pool, all at once.
pub(crate) fn end() {
    let (pool, held) = held();
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
    let (pool, held) = held();
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

/// What the settler sleeps on: it keeps one ring for later.
#[derive(Default)]
struct Soon {
    rings: crate::sync::Mutex<bool>,
    rung: crate::sync::Condvar,
}

impl Soon {
    fn ring(&self) {
        *self.rings.lock().unwrap() = true;
        self.rung.notify_one();
    }

    fn heard(&self) {
        let mut rings = self.rings.lock().unwrap();
        while !*rings {
            rings = self.rung.wait(rings).unwrap();
        }
        *rings = false;
    }
}

/// Two slots leave a lease each, while a claim takes along what it finds and the settler looks and
/// sleeps. If one is left lying, the settler never wakes, which shuttle reports.
pub(crate) fn settle() {
    let (_pool, held) = held();
    let (nap, soon) = (Arc::new(Nap::begun()), Arc::new(Soon::default()));
    // Only one takes at a time; this is how many were taken.
    let taken = Arc::new(crate::sync::Mutex::new(0));
    let take = {
        let (held, taken) = (Arc::clone(&held), Arc::clone(&taken));
        move || {
            let mut taken = taken.lock().unwrap();
            let left = held.leases.iter().filter(|lease| lease.take_along()).count();
            *taken += left;
            (left > 0).then_some(*taken)
        }
    };
    let slots = [0, 1].map(|index| {
        let (held, nap, soon) = (Arc::clone(&held), Arc::clone(&nap), Arc::clone(&soon));
        spawn(move || {
            held.leases[index].hand_in();
            held.leases[index].leave();
            if nap.end() {
                soon.ring();
            }
        })
    });
    let claims = {
        let (take, soon) = (take.clone(), Arc::clone(&soon));
        spawn(move || {
            if take() == Some(2) {
                // Nothing is left for the settler, whose part is over.
                soon.ring();
            }
        })
    };
    let settles = spawn(move || {
        while *taken.lock().unwrap() < 2 {
            soon.heard();
            while nap.unless(&take).is_some() {}
        }
    });
    slots.into_iter().for_each(|slot| slot.join().unwrap());
    claims.join().unwrap();
    settles.join().unwrap();
    assert!(held.leases.iter().all(|lease| lease.is_gone()));
}
