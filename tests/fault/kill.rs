//! `kill -9` of workers at random moments, while work streams in.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use leasehold::clock::{Clock as _, SystemClock, Timestamp};
use leasehold::inspect::JobView;
use leasehold::job::JobState;
use leasehold::lease::{Cause, EndedLease, LeaseEnd};
use leasehold::limits;
use leasehold::{FencingToken, JobId};
use rustix::process::Signal;

use crate::broken::Flaw;
use crate::process::{Killed, Process};
use crate::roles::{Errand, Role};
use crate::table::{Row, report};
use crate::world::{TERM, World, assert_in_order, figures};
use crate::{MACHINE, in_campaign};

const SLOTS: usize = 8;

/// What was seen when a worker was killed.
struct Fallen {
    killed: Killed,
    /// The leases that it left, as of `looked`.
    held: HashSet<FencingToken>,
    looked: Timestamp,
}

/// What a run of kills has left behind.
struct Aftermath {
    world: World,
    fallen: HashMap<String, Fallen>,
    took: Duration,
    /// The longest that the supervisor itself was kept waiting for the store and the processor.
    lag: Duration,
}

/// What the machine may add to the bound on takeovers without being called busy.
const USUAL_LAG: Duration = Duration::from_millis(100);

/// Keeps `workers` at work, kills one after another at random moments, and lets the rest finish.
async fn kill_workers(
    mut world: World,
    workers: usize,
    kills: usize,
    gap: std::ops::Range<u64>,
    flaw: Option<Flaw>,
) -> Aftermath {
    let start = Instant::now();
    let enlist = |world: &mut World| {
        let mut role = world.role(SLOTS);
        role.flaw = flaw;
        (role.owner.clone(), Process::start(&Role::Worker(role)))
    };
    let mut fleet: Vec<_> = (0..workers).map(|_| enlist(&mut world)).collect();
    let mut fallen = HashMap::new();
    let mut next_kill = Instant::now() + Duration::from_millis(500);
    let mut lag = Duration::ZERO;
    top_up(&world, 0).await;
    while fallen.len() < kills {
        let tick = Instant::now();
        top_up(&world, world.look().await.counts.ready).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        lag = lag.max(tick.elapsed());
        if Instant::now() < next_kill {
            continue;
        }
        next_kill = Instant::now() + Duration::from_millis(fastrand::u64(gap.clone()));
        let victim = fastrand::usize(..fleet.len());
        let (owner, mut process) = fleet.swap_remove(victim);
        assert!(!process.has_ended(), "{owner} ended by itself");
        let killed = world.kill(&mut process, &owner).await;
        fleet.push(enlist(&mut world));
        let held = world.leases(&owner).await;
        let held = held.into_iter().map(|lease| lease.token).collect();
        let looked = SystemClock.now();
        fallen.insert(
            owner,
            Fallen {
                killed,
                held,
                looked,
            },
        );
    }
    let settled = |view: &leasehold::inspect::QueueView| {
        view.counts.completed + view.counts.dead == view.ledger.enqueued
    };
    world.until("everything to be settled", settled).await;
    for (owner, process) in &mut fleet {
        process.signal(Signal::TERM);
        assert!(process.ends().await.success(), "{owner}");
    }
    Aftermath {
        world,
        fallen,
        took: start.elapsed(),
        lag,
    }
}

/// Never lets the workers run out of jobs, nor the line grow long.
async fn top_up(world: &World, ready: u64) {
    if ready < 100 {
        let waits: Vec<_> = (0..100)
            .map(|_| Errand::Wait {
                millis: fastrand::u64(0..=60),
            })
            .collect();
        world.enqueue(&waits).await;
    }
}

/// A lease that expired.
struct Expired<'a> {
    lease: &'a EndedLease,
    /// When its job was granted again.
    next: Timestamp,
    /// Whether its job had expired before, and waited in the suspects' line from then on.
    suspect: bool,
}

/// The expired leases of all jobs.
fn expired(jobs: &[JobView]) -> Vec<Expired<'_>> {
    let mut expired = Vec::new();
    for view in jobs {
        let mut suspect = false;
        for pair in view.job.history.windows(2) {
            if pair[0].end == LeaseEnd::Expired(Cause::Deadline) {
                let (lease, next) = (&pair[0], pair[1].granted_at);
                expired.push(Expired {
                    lease,
                    next,
                    suspect,
                });
                suspect = true;
            }
        }
    }
    expired
}

/// Median, 99th percentile and longest, in milliseconds.
fn spread(times: &mut [Duration]) -> [u128; 3] {
    times.sort();
    let at = |part: usize| times.get((times.len() * part / 100).min(times.len().max(1) - 1));
    [50, 99, 100].map(|part| at(part).map_or(0, Duration::as_millis))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill9_200_times() {
    let _machine = MACHINE.write().await;
    let kills = if in_campaign() { 2_000 } else { 200 };
    let world = owner_crash("owner crash", World::new(), kills).await;
    world.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn kill9_on_postgres() {
    let _machine = MACHINE.write().await;
    let kills = if in_campaign() { 1_000 } else { 30 };
    // The disk takes part: nobody has turned it off.
    let host = crate::engine::Engine::Postgres.durable();
    let world = World::on(&host).await;
    owner_crash("owner crash, PostgreSQL", world, kills).await;
}

/// Kills workers, and judges what the store says of it.
async fn owner_crash(case: &'static str, world: World, kills: usize) -> World {
    let Aftermath {
        world,
        fallen,
        took,
        lag,
    } = kill_workers(world, 4, kills, 20..480, None).await;
    let queue = world.look().await;
    let (counts, ledger) = (queue.counts, queue.ledger);
    let jobs = world.jobs(JobState::Completed).await;
    assert_in_order(&queue, &jobs);

    assert_eq!(ledger.completed, ledger.enqueued, "{ledger:?}");
    assert_eq!(counts.completed, ledger.enqueued, "{counts:?}");
    let ends = ledger.completed + ledger.surrendered + ledger.expired_deadline;
    assert_eq!(ledger.granted, ends, "{ledger:?}");
    let done = world.done();
    for view in &jobs {
        let history = &view.job.history;
        assert!(done.contains(&view.job.id), "completed by nobody: {view:?}");
        let completed = history.iter().filter(|l| l.end == LeaseEnd::Completed);
        assert_eq!(completed.count(), 1, "{view:?}");
    }

    let expiries = jobs.iter().map(|view| u64::from(view.job.expiries));
    assert_eq!(expiries.sum::<u64>(), ledger.expired_deadline);
    let expired = expired(&jobs);
    let whole = jobs
        .iter()
        .all(|view| view.job.history.len() < limits::HISTORY);
    assert!(!whole || expired.len() as u64 == ledger.expired_deadline);
    let (mut takeovers, mut suspects) = (Vec::new(), Vec::new());
    let mut tokens = HashSet::new();
    let mut alive = 0;
    for Expired {
        lease,
        next,
        suspect,
    } in &expired
    {
        tokens.insert(lease.token);
        let fallen = fallen.get(&*lease.owner);
        let Some(fallen) = fallen.filter(|f| lease.ended_at >= f.killed.not_before) else {
            alive += 1;
            continue;
        };
        let (killed, looked) = (fallen.killed, fallen.looked);
        assert!(lease.granted_at <= killed.not_after, "{lease:?} {killed:?}");
        let left = fallen.held.contains(&lease.token) || lease.ended_at <= looked;
        assert!(left, "not seen when its owner was killed: {lease:?}");
        let line = if *suspect {
            &mut suspects
        } else {
            &mut takeovers
        };
        line.push(next.since(killed.not_before));
    }
    let held: usize = fallen.values().map(|fallen| fallen.held.len()).sum();
    for token in fallen.values().flat_map(|fallen| &fallen.held) {
        let known = tokens.contains(token) || !whole;
        assert!(known, "left behind and not expired");
    }
    let [median, p99, longest] = spread(&mut takeovers);
    let [_, suspect_p99, suspect_longest] = spread(&mut suspects);
    figures(&format!(
        "{case}: {} kills in {took:.1?}, {} jobs, {} leases ({held} left at the kills, {} \
         expired, {} surrendered), 0 lost; takeover median {median} ms, p99 {p99} ms, longest \
         {longest} ms; of {} suspects p99 {suspect_p99} ms, longest {suspect_longest} ms; the \
         machine's own lag {} ms",
        fallen.len(),
        ledger.enqueued,
        ledger.granted,
        ledger.expired_deadline,
        ledger.surrendered,
        suspects.len(),
        lag.as_millis(),
    ));
    let row = Row {
        acknowledged: ledger.enqueued,
        lost: ledger.enqueued - jobs.len() as u64,
        refused: ledger.fenced,
        takeovers: takeovers.clone(),
        control: "in a test of its own".into(),
        ..Row::default()
    };
    assert!(takeovers.len() > kills, "hardly anybody held anything");
    let busy = lag.saturating_sub(USUAL_LAG);
    // On a machine that stands still for a quarter of a term, a live worker can lose a lease.
    assert!(alive == 0 || busy > TERM / 4, "{alive} expired needlessly");
    let bound = TERM + Duration::from_millis(250) + busy;
    assert!(p99 <= bound.as_millis(), "{p99} ms, allowed {bound:?}");
    report(case, row);
    world
}

/// The control arm: if jobs were completed when they are handed out, kills would lose some.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill9_without_leases_loses_jobs() {
    let _machine = MACHINE.read().await;
    let flaw = Some(Flaw::CompletesAtClaim);
    let aftermath = kill_workers(World::new(), 2, 8, 300..600, flaw).await;
    let jobs = aftermath.world.jobs(JobState::Completed).await;
    let done = aftermath.world.done();
    let lost: Vec<JobId> = jobs
        .iter()
        .map(|view| view.job.id)
        .filter(|id| !done.contains(id))
        .collect();
    figures(&format!(
        "kill9_without_leases_loses_jobs: {} of {} jobs lost in 8 kills",
        lost.len(),
        jobs.len()
    ));
    assert!(!lost.is_empty(), "this test cannot fail");
}
