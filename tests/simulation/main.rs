//! The real worker runtime and the real stores on virtual time, with seeded troubles.
//!
//! A seed is a workload, a kind of trouble and dice. Everything runs on one thread: each process
//! has a runtime of its own with a paused clock, which a freeze leaves standing and a crash drops
//! where it is; calls go through a network that loses, delays, repeats and reorders them. Each seed
//! runs twice and must leave the same history. A failure prints the command that replays it.

#![allow(
    clippy::disallowed_methods,
    clippy::unchecked_time_subtraction,
    reason = "the clocks here are virtual"
)]

mod apart;
mod broken;
mod database;
mod engine;
mod link;
mod model;
mod net;
mod oversee;
mod plan;
use leasehold_support::postgres as postgres_server;
mod program;
use leasehold_support::redis as redis_server;
mod resource;
mod server;
mod trace;
mod world;

use std::fmt;
use std::panic::{catch_unwind, resume_unwind};
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use broken::Variant;
use engine::Engine;
use plan::{PAIRS, Plan};
use trace::Seen;
use world::{Goal, Outcome, run};

/// The name of one run: what to replay.
#[derive(Clone, Copy)]
struct Case {
    goal: Goal,
    engine: Engine,
    seed: u64,
}

impl Case {
    fn run(self, variant: Variant) -> Outcome {
        run(&Plan::of(self.seed), self.goal, self.engine, variant)
    }

    /// Runs it twice, and panics with all that is wrong.
    fn assert_right(self) -> Seen {
        let once = self.run(Variant::Sound);
        let again = self.run(Variant::Sound);
        let mut wrong = once.violations;
        if once.fingerprint != again.fingerprint {
            let lengths = (once.events.len(), again.events.len());
            wrong.push(format!(
                "two runs left two histories, {lengths:?} events long"
            ));
        }
        assert!(
            wrong.is_empty(),
            "{}\n{}\nreplay: LEASEHOLD_SEED={self} cargo test --all-features --test simulation -- --nocapture replay",
            Plan::of(self.seed),
            wrong.join("\n")
        );
        once.seen
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let goal = format!("{:?}", self.goal).to_lowercase();
        let engine = format!("{:?}", self.engine).to_lowercase();
        write!(f, "{goal}:{engine}:{}", self.seed)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("LEASEHOLD_SEED={text}: want goal:engine:seed");
        let mut parts = text.split(':');
        let goal = match parts.next() {
            Some("safety") => Goal::Safety,
            Some("liveness") => Goal::Liveness,
            _ => return Err(wrong()),
        };
        let engine = match parts.next() {
            Some("memory") => Engine::Memory,
            Some("sqlite") => Engine::Sqlite,
            Some("postgres") => Engine::Postgres,
            Some("redis") => Engine::Redis,
            _ => return Err(wrong()),
        };
        let seed = parts.next().and_then(|seed| seed.parse().ok());
        Ok(Self {
            goal,
            engine,
            seed: seed.ok_or_else(wrong)?,
        })
    }
}

/// Which seeds: a few in the daily run, many in the campaign, or those of `LEASEHOLD_SEEDS`: a
/// number, or the first and the last of a piece of a longer run.
fn seeds(daily: impl Iterator<Item = u64>, campaign: u64) -> Vec<u64> {
    let Ok(asked) = std::env::var("LEASEHOLD_SEEDS") else {
        return match std::env::var_os("LEASEHOLD_CAMPAIGN") {
            Some(_) => (1..=campaign).collect(),
            None => daily.collect(),
        };
    };
    let number = |text: &str| text.parse().expect("LEASEHOLD_SEEDS is N, or FIRST-LAST");
    match asked.split_once('-') {
        Some((first, last)) => (number(first)..=number(last)).collect(),
        None => (1..=number(&asked)).collect(),
    }
}

/// So many seeds that meet every kind of trouble, and every workload, equally often: neighbours
/// have their trouble in common, and all pairs are too many for an engine whose calls take
/// milliseconds.
fn spread(few: u64) -> impl Iterator<Item = u64> {
    const STRIDE: u64 = 7;
    const { assert!(!PAIRS.is_multiple_of(STRIDE)) };
    (1..=few).map(|nth| nth * STRIDE)
}

/// So many seeds in which a resource refuses a stale owner: few do, and where to look is known from
/// memory.
fn refusing(few: usize) -> impl Iterator<Item = u64> {
    let refuses = |seed: &u64| {
        let case = Case {
            goal: Goal::Safety,
            engine: Engine::Memory,
            seed: *seed,
        };
        case.run(Variant::Sound).seen.writes_refused > 0
    };
    (1..=1_000).filter(refuses).take(few)
}

/// Runs the seeds on all cores, or on as many as `LEASEHOLD_THREADS`, and returns what was seen.
fn sweep(goal: Goal, engine: Engine, seeds: &[u64]) -> Seen {
    let (next, total) = (AtomicUsize::new(0), Mutex::new(Seen::default()));
    let work = || {
        while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
            let case = Case { goal, engine, seed };
            let right = catch_unwind(|| case.assert_right()).unwrap_or_else(|panic| {
                // The others stop at their next seed.
                next.store(seeds.len(), Ordering::Relaxed);
                resume_unwind(panic)
            });
            total.lock().expect("nobody panics with it").add(right);
        }
    };
    let asked = std::env::var("LEASEHOLD_THREADS").ok();
    let asked = asked.map(|text| text.parse().expect("LEASEHOLD_THREADS is a number"));
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = asked.unwrap_or_else(cores);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in running {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
    let seen = total.into_inner().expect("nobody panics with it");
    let ends = (seeds.first(), seeds.last());
    println!("{goal:?} on {engine:?}, seeds {ends:?}: {seen:?}");
    seen
}

#[test]
fn nothing_forbidden_happens() {
    let seen = sweep(Goal::Safety, Engine::Memory, &seeds(1..=2_000, 100_000));
    assert_eq!(seen.missing(), Vec::<&str>::new(), "the tables do not bite");
}

#[test]
fn after_the_troubles_the_backlog_drains() {
    sweep(
        Goal::Liveness,
        Engine::Memory,
        &seeds(1..=2 * PAIRS, 20_000),
    );
}

#[test]
fn nothing_forbidden_happens_on_sqlite() {
    sweep(Goal::Safety, Engine::Sqlite, &seeds(1..=PAIRS, 5_000));
}

#[test]
fn after_the_troubles_the_backlog_drains_on_sqlite() {
    sweep(Goal::Liveness, Engine::Sqlite, &seeds(1..=PAIRS / 2, 2_000));
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn nothing_forbidden_happens_on_postgres() {
    let daily = spread(60).chain(refusing(4));
    let seen = sweep(Goal::Safety, Engine::Postgres, &seeds(daily, 2_000));
    assert_eq!(seen.missing(), Vec::<&str>::new(), "the tables do not bite");
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn after_the_troubles_the_backlog_drains_on_postgres() {
    sweep(Goal::Liveness, Engine::Postgres, &seeds(spread(24), 1_000));
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn nothing_forbidden_happens_on_redis() {
    let daily = spread(60).chain(refusing(4));
    let seen = sweep(Goal::Safety, Engine::Redis, &seeds(daily, 2_000));
    assert_eq!(seen.missing(), Vec::<&str>::new(), "the tables do not bite");
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn after_the_troubles_the_backlog_drains_on_redis() {
    sweep(Goal::Liveness, Engine::Redis, &seeds(spread(24), 1_000));
}

/// Whether a run for safety with a protection off breaks the rule that the protection stands for.
fn is_caught(variant: Variant, engine: Engine, seed: u64) -> bool {
    let case = Case {
        goal: Goal::Safety,
        engine,
        seed,
    };
    let rules = variant.caught_by();
    let by_rule = |text: &String| rules.iter().any(|rule| text.starts_with(rule));
    case.run(variant).violations.iter().any(by_rule)
}

/// Each protection that is off is caught by the rule that it stands for.
#[test]
fn broken_variants_are_caught_within_a_thousand_seeds() {
    for variant in Variant::UNSAFE {
        let caught = (1..=1_000).find(|seed| is_caught(variant, Engine::Memory, *seed));
        let rules = variant.caught_by();
        let seed = caught.unwrap_or_else(|| panic!("{variant:?} was not caught by {rules:?}"));
        println!("{variant:?}: caught by seed {seed}");
    }
}

/// What catches a protection that is off does so here, too. Where to look is known from memory.
fn assert_broken_variants_are_caught(engine: Engine) {
    for variant in Variant::UNSAFE {
        let mut known = (1..=1_000).filter(|seed| is_caught(variant, Engine::Memory, *seed));
        let caught = known.find(|seed| is_caught(variant, engine, *seed));
        let rules = variant.caught_by();
        let seed = caught.unwrap_or_else(|| panic!("{variant:?} was not caught by {rules:?}"));
        println!("{variant:?}: caught by seed {seed}");
    }
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn broken_variants_are_caught_on_postgres() {
    assert_broken_variants_are_caught(Engine::Postgres);
}

#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn broken_variants_are_caught_on_redis() {
    assert_broken_variants_are_caught(Engine::Redis);
}

#[test]
fn a_backlog_that_never_drains_is_caught() {
    assert_never_drains(Engine::Memory);
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn a_backlog_that_never_drains_is_caught_on_postgres() {
    assert_never_drains(Engine::Postgres);
}

fn assert_never_drains(engine: Engine) {
    let case = Case {
        goal: Goal::Liveness,
        engine,
        seed: 1,
    };
    let found = case.run(Variant::NothingGranted).violations;
    assert!(
        found.iter().any(|text| text.starts_with("I13 BacklogLeft")),
        "{found:?}"
    );
}

/// Runs the seed in `LEASEHOLD_SEED` with its whole history printed; without one, the first.
#[test]
fn replay() {
    let named = std::env::var("LEASEHOLD_SEED").ok();
    let case = named.as_deref().unwrap_or("safety:memory:1");
    let case: Case = case.parse().unwrap_or_else(|why| panic!("{why}"));
    if named.is_some() {
        println!("{}", Plan::of(case.seed));
        for event in case.run(Variant::Sound).events {
            println!("{event:?}");
        }
    }
    case.assert_right();
}
