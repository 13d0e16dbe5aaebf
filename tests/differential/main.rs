//! Random programs on two stores with one clock: every answer and every view must be the same, and
//! every change of state must be in the transition table. A failure prints the shortest program
//! found; proptest keeps its seed.
//!
//! The control arms at the end show that a broken store is caught, and by what.

#![allow(
    clippy::unwrap_used,
    clippy::unchecked_time_subtraction,
    reason = "a test that panics has failed"
)]

mod broken;
mod program;
#[cfg(unix)]
mod redis;
#[cfg(unix)]
use leasehold_support as support;
use leasehold_support::postgres as server;
mod world;

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::{Clock, ManualClock};
use leasehold::inspect::{Counts, Ledger};
use leasehold::job::JobState;
use leasehold::rules::{TRANSITIONS, Transition};
use leasehold::store::MemoryStore;
use leasehold::store::{SqliteOptions, SqliteStore};
use leasehold::{JobId, Store};
use leasehold_conformance::checker::{Rule, check};
use leasehold_conformance::history::{Final, History};
use leasehold_conformance::{ManualFixture, RecordingStore, Snapshot, cases};
use proptest::test_runner::{Config, FileFailurePersistence, TestError, TestRunner};

use broken::{Broken, Fault};
use program::{Step, programs};
use world::{World, moves};

type Made = (Arc<dyn Store>, Box<dyn Any>);
/// Makes the store under test on a clock, with whatever must be kept while it lives.
type Make = dyn Fn(ManualClock) -> Pin<Box<dyn Future<Output = Made>>>;

const STEPS: usize = 40;

fn quick_or(campaign: u32, quick: u32) -> u32 {
    let long = std::env::var("LEASEHOLD_CAMPAIGN").is_ok_and(|value| value == "1");
    if long { campaign } else { quick }
}

/// Runs random programs on the store and on memory.
fn agrees_with_memory(
    make: &Make,
    programs_to_run: u32,
    shrink: u32,
) -> Result<(), TestError<Vec<Step>>> {
    agrees_on(make, |program| program, programs_to_run, shrink)
}

/// Runs random programs, changed to what the store can do, on the store and on memory.
fn agrees_on(
    make: &Make,
    change: fn(Vec<Step>) -> Vec<Step>,
    programs_to_run: u32,
    shrink: u32,
) -> Result<(), TestError<Vec<Step>>> {
    let config = Config {
        cases: programs_to_run,
        max_shrink_iters: shrink,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    TestRunner::new(config).run(&programs(STEPS), |program| {
        let outcome = runtime.block_on(compare(make, &change(program)));
        outcome.map_err(proptest::test_runner::TestCaseError::fail)
    })
}

async fn compare(make: &Make, program: &[Step]) -> Result<(), String> {
    let clock = ManualClock::default();
    let (under_test, _kept) = make(clock.clone()).await;
    let history = History::with_clock(clock.clone());
    let recording = RecordingStore::new(Arc::clone(&under_test), history.clone(), 1);
    let model = MemoryStore::with_clock(clock.clone());
    let mut ours = World::new(Arc::new(recording), clock.clone()).await;
    let mut theirs = World::new(Arc::new(model), clock.clone()).await;
    let mut before = ours.snapshot().await;
    let mut refused = false;
    for (at, step) in program.iter().enumerate() {
        match step {
            Step::Advance(secs) => clock.advance(Duration::from_secs(*secs)),
            Step::Back(secs) => clock.set(clock.now().before(Duration::from_secs(*secs))),
            _ => {}
        }
        let our = ours.take(step).await?;
        if our.starts_with("Err((TokensAhead") {
            refused = true;
            theirs.take_refused(step)?;
        } else {
            let their = theirs.take(step).await?;
            if our != their {
                return Err(format!(
                    "step {at} {step:?}\nstore:  {our}\nmemory: {their}"
                ));
            }
        }
        let after = ours.snapshot().await;
        let model = theirs.snapshot().await;
        if after != model {
            return Err(format!(
                "step {at} {step:?}\n{}",
                difference(&after, &model)
            ));
        }
        // A claim that was refused is no answer: its repeat is the claim.
        let anew = refused && matches!(step, Step::Repeat(_));
        if let Some(wrong) = illegal_move(step, &before, &after).filter(|_| !anew) {
            return Err(format!("step {at} {step:?}: {wrong}"));
        }
        if let Some(queue) = after.queues.iter().find(|queue| !queue.ledger.balances()) {
            return Err(format!("step {at} {step:?}: I9 {queue:?}"));
        }
        before = after;
    }
    let found = check(&history.events(), Some(&Final::of(&*under_test).await));
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    if found.is_empty() {
        Ok(())
    } else {
        Err(found.join("\n"))
    }
}

fn difference(ours: &Snapshot, model: &Snapshot) -> String {
    let (ours, model) = (format!("{ours:#?}"), format!("{model:#?}"));
    let lines = ours.lines().zip(model.lines());
    let different = lines.filter(|(ours, model)| ours != model).take(8);
    let mut text = String::new();
    for (ours, model) in different {
        text.extend(["store:  ", ours, "\nmemory: ", model, "\n"]);
    }
    text
}

/// A change of state that no transition of the step explains.
fn illegal_move(step: &Step, before: &Snapshot, after: &Snapshot) -> Option<String> {
    let states = |snapshot: &Snapshot| -> HashMap<JobId, JobState> {
        let jobs = snapshot.jobs.iter();
        jobs.map(|view| (view.job.id, view.state)).collect()
    };
    let (before, after) = (states(before), states(after));
    let jobs: HashSet<&JobId> = before.keys().chain(after.keys()).collect();
    jobs.into_iter().find_map(|id| {
        let (from, to) = (before.get(id).copied(), after.get(id).copied());
        let legal = reachable(from, moves(step)).contains(&to);
        (!legal).then(|| format!("job {id} went from {from:?} to {to:?}"))
    })
}

fn reachable(from: Option<JobState>, by: &[Transition]) -> HashSet<Option<JobState>> {
    let mut seen = HashSet::from([from]);
    loop {
        let steps = TRANSITIONS.iter();
        let next = steps.filter(|(from, with, _)| by.contains(with) && seen.contains(from));
        let next: Vec<_> = next.map(|(_, _, to)| *to).collect();
        let known = seen.len();
        seen.extend(next);
        if seen.len() == known {
            return seen;
        }
    }
}

fn memory(fault: Option<Fault>) -> Box<Make> {
    Box::new(move |clock| {
        Box::pin(async move {
            let store = MemoryStore::with_clock(clock);
            let made: Arc<dyn Store> = match fault {
                None => Arc::new(store),
                Some(fault) => Arc::new(Broken::new(store, fault)),
            };
            (made, Box::new(()) as Box<dyn Any>)
        })
    })
}

fn assert_agrees(make: &Make, programs_to_run: u32) {
    if let Err(error) = agrees_with_memory(make, programs_to_run, 600) {
        panic!("{error}");
    }
}

#[test]
fn memory_agrees_with_itself() {
    assert_agrees(&memory(None), quick_or(20_000, 256));
}

#[test]
fn sqlite_agrees_with_memory() {
    let make: Box<Make> = Box::new(|clock| {
        Box::pin(async move {
            let dir = tempfile::tempdir().unwrap();
            let options = SqliteOptions::new()
                .clock(clock)
                .synchronous_normal()
                .inline();
            let store = SqliteStore::with(dir.path().join("jobs.db"), options).unwrap();
            (
                Arc::new(store) as Arc<dyn Store>,
                Box::new(dir) as Box<dyn Any>,
            )
        })
    });
    assert_agrees(&make, quick_or(5_000, 256));
}

fn postgres_agrees(change: fn(Vec<Step>) -> Vec<Step>) {
    let make: Box<Make> = Box::new(|clock| {
        Box::pin(async move {
            let store = server::shared().store(clock).await;
            (
                Arc::new(store) as Arc<dyn Store>,
                Box::new(()) as Box<dyn Any>,
            )
        })
    });
    if let Err(error) = agrees_on(&make, change, quick_or(1_000, 12), 60) {
        panic!("{error}");
    }
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn postgres_agrees_with_memory_on_one_queue() {
    postgres_agrees(program::on_one_queue);
}

#[test]
#[ignore = "needs postgresql: ./tests/run"]
fn postgres_agrees_with_memory_on_two_queues() {
    postgres_agrees(program::with_time_in_order);
}

#[test]
fn the_wrapper_of_the_control_arms_is_no_fault() {
    assert_agrees(&memory(Some(Fault::None)), 32);
}

/// Programs that reach nothing would agree about nothing. As many as it takes: some ends are rare.
#[test]
fn programs_reach_every_end() {
    const BATCH: u32 = 128;
    const AT_MOST: u32 = 16;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let sum = RefCell::new((Ledger::default(), Counts::default()));
    let config = Config {
        cases: BATCH,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    };
    for _ in 0..AT_MOST {
        let run = TestRunner::new(config.clone()).run(&programs(STEPS), |program| {
            let last = runtime.block_on(judged(&memory(None), &program)).1;
            let mut sum = sum.borrow_mut();
            for queue in last.queues {
                sum.0 = sum.0.plus(&queue.ledger);
                sum.1.parked += queue.counts.parked;
                sum.1.dead += queue.counts.dead;
                sum.1.cancelled += queue.counts.cancelled;
            }
            Ok(())
        });
        assert!(run.is_ok());
        let (ledger, counts) = &*sum.borrow();
        let ends = [
            ledger.completed,
            ledger.retried,
            ledger.surrendered,
            ledger.buried,
            ledger.cancelled,
            ledger.expired_deadline,
            ledger.expired_stalled,
            ledger.expired_lifetime,
            ledger.revoked,
            ledger.late,
            ledger.fenced,
            ledger.pruned,
            ledger.purged,
            ledger.dead_by_expiry,
            counts.parked,
            counts.dead,
            counts.cancelled,
        ];
        if ends.iter().all(|reached| *reached > 0) {
            println!("{ledger:?} {counts:?}");
            return;
        }
    }
    panic!("{:?}", sum.borrow());
}

/// Whether a case of the conformance suite fails on a store with this fault.
fn fails(fault: Fault, verb: &str, name: &str) -> bool {
    let all = cases();
    let case = all
        .iter()
        .find(|case| (case.verb, case.name) == (verb, name));
    let case = case.unwrap_or_else(|| panic!("no case {verb}::{name}"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let run = || {
        let clock = ManualClock::default();
        let store = Broken::new(MemoryStore::with_clock(clock.clone()), fault);
        runtime.block_on(case.run(ManualFixture::new(store, clock)));
    };
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

fn suite_catches(fault: Fault, named: &[(&str, &str)]) {
    for (verb, name) in named {
        assert!(
            !fails(Fault::None, verb, name),
            "{verb}::{name} fails anyway"
        );
        assert!(
            fails(fault, verb, name),
            "{verb}::{name} passes under {fault:?}"
        );
    }
}

fn differential_catches(fault: Fault) {
    let caught = agrees_with_memory(&memory(Some(fault)), 2_000, 0);
    assert!(
        matches!(caught, Err(TestError::Fail(..))),
        "no program shows {fault:?}"
    );
}

/// Judges the history of programs on a store with this fault, without the model.
fn checker_catches(fault: Fault, rules: &[Rule]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let config = Config {
        cases: 2_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        max_shrink_iters: 0,
        ..Config::default()
    };
    let make = memory(Some(fault));
    let found = TestRunner::new(config).run(&programs(STEPS), |program| {
        let found = runtime.block_on(judged(&make, &program)).0;
        match found.iter().find(|rule| rules.contains(rule)) {
            Some(rule) => Err(proptest::test_runner::TestCaseError::fail(format!(
                "{rule:?}"
            ))),
            None => Ok(()),
        }
    });
    assert!(found.is_err(), "no history shows {fault:?} as {rules:?}");
}

async fn judged(make: &Make, program: &[Step]) -> (Vec<Rule>, Final) {
    let clock = ManualClock::default();
    let (store, _kept) = make(clock.clone()).await;
    let history = History::with_clock(clock.clone());
    let recording = RecordingStore::new(Arc::clone(&store), history.clone(), 1);
    let mut world = World::new(Arc::new(recording), clock.clone()).await;
    for step in program {
        if let Step::Advance(secs) = step {
            clock.advance(Duration::from_secs(*secs));
        }
        if world.take(step).await.is_err() {
            break;
        }
    }
    let last = Final::of(&*store).await;
    let found = check(&history.events(), Some(&last)).into_iter();
    (found.map(|violation| violation.rule).collect(), last)
}

#[test]
fn control_arm_receipt_check_off() {
    let fault = Fault::ReceiptCheckOff;
    suite_catches(
        fault,
        &[
            ("fence", "after_expiry"),
            ("fence", "a_guessed_receipt_is_fenced"),
            ("fence", "a_zombie_frees_no_key"),
        ],
    );
    differential_catches(fault);
    checker_catches(
        fault,
        &[Rule::AcceptedAfterEnd, Rule::ForeignReceiptAccepted],
    );
}

#[test]
fn control_arm_request_ids_ignored() {
    let fault = Fault::RequestIdsIgnored;
    suite_catches(
        fault,
        &[
            ("repeat", "enqueue_stores_once"),
            ("repeat", "claim_grants_once"),
            ("repeat", "settle_settles_once"),
            ("repeat", "reap_expires_once"),
            ("repeat", "control_acts_once"),
            ("repeat", "prune_deletes_once"),
            ("repeat", "an_older_sequence_is_refused"),
        ],
    );
    differential_catches(fault);
    checker_catches(fault, &[Rule::RepeatAnsweredAnew]);
}

#[test]
fn control_arm_renew_resurrects() {
    let fault = Fault::RenewResurrects;
    suite_catches(
        fault,
        &[("renew", "never_resurrects"), ("fence", "after_revoke")],
    );
    differential_catches(fault);
    checker_catches(fault, &[Rule::AcceptedAfterEnd]);
}

#[test]
fn control_arm_expiry_counted_twice() {
    let fault = Fault::ExpiryCountedTwice;
    suite_catches(
        fault,
        &[
            ("expire", "nothing_is_counted_twice"),
            ("expire", "a_claim_needs_no_reaper"),
        ],
    );
    differential_catches(fault);
    checker_catches(fault, &[Rule::LedgerOff]);
}

#[test]
fn control_arm_token_by_counter() {
    let fault = Fault::TokenByCounter;
    suite_catches(
        fault,
        &[
            ("claim", "tokens_follow_the_clock"),
            ("claim", "tokens_grow_across_sessions"),
        ],
    );
    checker_catches(fault, &[Rule::TokenWentBack, Rule::TokenIssuedTwice]);
}
