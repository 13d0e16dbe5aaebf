//! Renew ∥ settle ∥ cancel ∥ drain ∥ drop on what a worker's threads share, in schedules that
//! shuttle chooses, one step of a lock or an atomic at a time.
//!
//! The code is the shipped `worker/held.rs`, which finds shuttle's locks and atomics in the module
//! `sync`. Two copies have a flaw each, and must be caught. Shuttle's memory is sequentially
//! consistent: what weaker orderings would allow is not seen here, and is why the shipped code has
//! a fence where two threads look at each other's flags.
//!
//! `cargo test --manifest-path tests/shuttle/Cargo.toml`

#![cfg(test)]
#![allow(dead_code, reason = "the shipped file has more than is played here")]

/// What the shipped file takes from the standard library.
mod sync {
    pub(crate) use shuttle::sync::*;

    /// Shuttle has none. Each look at it is a step.
    pub(crate) struct OnceLock<T> {
        step: atomic::AtomicBool,
        inner: std::sync::OnceLock<T>,
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> Self {
            Self::new()
        }
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self {
                step: atomic::AtomicBool::new(false),
                inner: std::sync::OnceLock::new(),
            }
        }

        fn step(&self) {
            self.step.load(atomic::Ordering::SeqCst);
        }

        pub(crate) fn get(&self) -> Option<&T> {
            self.step();
            self.inner.get()
        }

        pub(crate) fn set(&self, value: T) -> Result<(), T> {
            self.step();
            self.inner.set(value)
        }

        pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            self.step();
            self.inner.get_or_init(make)
        }
    }
}

/// What it takes from the rest of the crate.
mod clock {
    pub(crate) use leasehold::clock::Timestamp;

    pub(crate) fn micros(d: std::time::Duration) -> u64 {
        d.as_micros() as u64
    }
}

mod job {
    pub(crate) use leasehold::job::JobRecord;
}

mod lease {
    pub(crate) use leasehold::lease::{FencingToken, Grant, Nonce, Progress, Verdict};

    /// Only the crate itself can put one together.
    pub(crate) struct Receipt {
        pub(crate) queue: leasehold::job::QueueName,
        pub(crate) partition: u16,
        pub(crate) grant: FencingToken,
        pub(crate) token: FencingToken,
        pub(crate) job: leasehold::JobId,
        pub(crate) nonce: Nonce,
    }
}

mod observe {
    pub(crate) mod metrics {
        #[derive(PartialEq, Eq, Debug)]
        pub(crate) enum LostWhy {
            Stalled,
            Deadline,
            Fenced,
        }
    }
}

/// A claim of two jobs, as a store answers it.
fn grant() -> lease::Grant {
    use leasehold::job::{Kind, NewJob, QueueName};
    use leasehold::store::{ClaimQueue, ClaimRequest, EnqueueRequest, RequestId, Store as _};

    static GRANT: std::sync::OnceLock<lease::Grant> = std::sync::OnceLock::new();
    let make = || {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(async {
            let store = leasehold::store::MemoryStore::new();
            let session = store.open_session().await.expect("a session");
            let name = |seq| RequestId {
                session,
                lane: 0,
                seq,
            };
            let job = || {
                let kind = Kind::new("race").expect("a name");
                let new = NewJob::raw(QueueName::default(), kind, bytes::Bytes::new());
                (leasehold::JobId::generate(), new)
            };
            let jobs = vec![job(), job()].into();
            let request = name(1);
            let enqueue = EnqueueRequest { request, jobs };
            store.enqueue(enqueue).await.expect("stored");
            let second = std::time::Duration::from_secs(1);
            let claim = ClaimRequest {
                request: name(2),
                owner: "owner".into(),
                task: "task".into(),
                nonce: lease::Nonce::from_bytes([7; 16]),
                queues: vec![ClaimQueue {
                    queue: QueueName::default(),
                    term: second,
                    max_lifetime: 100 * second,
                }],
                max: 2,
                admit_suspect: false,
            };
            let claimed = store.claim(claim).await.expect("claimed");
            claimed.grants.into_iter().next().expect("a grant")
        })
    };
    GRANT.get_or_init(make).clone()
}

/// A copy of the shipped file with what it needs, and the plays.
macro_rules! copy {
    ($name:ident, $held:literal) => {
        mod $name {
            pub(crate) mod held {
                include!(concat!(env!("OUT_DIR"), "/", $held));
            }

            pub(crate) use crate::sync;

            pub(crate) mod pool {
                use super::held::{Board, HeldGrant, HolderClock};

                pub(crate) struct Meter;

                impl Meter {
                    pub(crate) fn granted(&self, _: u64) {}
                }

                pub(crate) struct PoolKind {
                    pub(crate) meters: Vec<Meter>,
                }

                /// As much of a pool as the shipped file looks at.
                pub(crate) struct Pool {
                    pub(crate) clock: HolderClock,
                    pub(crate) kinds: Vec<PoolKind>,
                    pub(crate) board: Board,
                    pub(crate) ended: crate::sync::atomic::AtomicUsize,
                }

                impl Pool {
                    pub(crate) fn kind(&self, _: &leasehold::job::Kind) -> Option<usize> {
                        None
                    }

                    /// What every way to end a lease comes to.
                    pub(crate) fn end(&self, held: &HeldGrant, index: usize) {
                        if held.leases[index].end() {
                            self.ended
                                .fetch_add(1, crate::sync::atomic::Ordering::SeqCst);
                            self.board.end(held, 1);
                        }
                    }
                }
            }

            include!("plays.rs");
        }
    };
}

copy!(shipped, "held.rs");
copy!(deaf, "deaf.rs");
copy!(twice, "twice.rs");

/// Schedules of each play.
fn schedules() -> usize {
    match std::env::var_os("LEASEHOLD_CAMPAIGN") {
        Some(_) => 100_000,
        None => 5_000,
    }
}

/// Chooses at random, and then so that rare orders of few steps come up.
fn explore(play: fn()) {
    shuttle::check_random(play, schedules());
    shuttle::check_pct(play, schedules(), 3);
}

/// Whether some schedule shows the flaw.
fn catches(play: fn()) -> bool {
    std::panic::catch_unwind(|| explore(play)).is_err()
}

#[test]
fn a_handler_that_listens_while_it_is_stopped_hears_it() {
    explore(shipped::listen);
}

#[test]
fn every_lease_ends_once_whoever_ends_it() {
    explore(shipped::end);
}

#[test]
fn progress_that_is_shown_meanwhile_is_not_taken_for_seen() {
    explore(shipped::progress);
}

#[test]
fn flaws_are_found() {
    assert!(catches(deaf::listen), "deaf");
    assert!(catches(twice::end), "twice");
}
