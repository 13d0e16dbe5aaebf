//! A job that takes its process with it, among healthy neighbours.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::NewJob;
use leasehold::inspect::QueueView;
use leasehold::job::JobState;
use leasehold::lease::{EndedLease, LeaseEnd};

use crate::MACHINE;
use crate::broken::Flaw;
use crate::process::Process;
use crate::roles::{Errand, Role};
use crate::stage::pulse;
use crate::table::{Row, report};
use crate::world::{TERM, World, assert_in_order, figures};

const POISON: Errand = Errand::Poison { millis: 200 };
const HEALTHY: Errand = Errand::Wait { millis: 300 };

/// How it ended.
struct Ended {
    queue: QueueView,
    /// Jobs by how they ended, the poison left out.
    healthy: BTreeMap<Fate, usize>,
    crashes: usize,
    lag: Duration,
}

/// What became of a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Fate {
    state: JobState,
    /// Leases that ran out because their owner had crashed.
    hit: usize,
    /// Leases that ran out although their owner lived: the machine kept it waiting for too long.
    starved: usize,
}

impl Ended {
    fn healthy(&self, check: impl Fn(Fate) -> bool) -> usize {
        let healthy = self.healthy.iter();
        healthy
            .filter(|(fate, _)| check(**fate))
            .map(|(_, count)| count)
            .sum()
    }

    /// Nobody but the poison is dead, and nobody is hit a third time: a suspect has its process for
    /// itself, as far as suspects go.
    fn is_fair(&self) -> bool {
        let harmed = |fate: Fate| fate.state == JobState::Dead || fate.hit + fate.starved > 2;
        self.healthy(harmed) == 0
    }

    /// Whether the machine kept nobody waiting for so long that a live owner could lose a lease.
    /// Such a loss makes a suspect of a neighbour one crash early, when the poison is none yet.
    fn is_calm(&self) -> bool {
        self.lag <= TERM / 8
    }
}

/// Works until a round is as it should be. One that is not, on a machine that stood still, is void;
/// on any other it fails at once.
async fn fairly(
    neighbours: usize,
    workers: usize,
    limit: u32,
    check: impl Fn(&Ended) -> bool,
) -> Ended {
    const ROUNDS: usize = 4;
    for _ in 0..ROUNDS {
        let ended = work(neighbours, workers, limit, None).await;
        if check(&ended) {
            return ended;
        }
        let Ended { lag, crashes, .. } = ended;
        let told = format!("{crashes} crashes, {:?}", ended.healthy);
        assert!(!ended.is_calm(), "{told}, on a calm machine ({lag:?})");
        figures(&format!(
            "void: the machine stood still for {lag:?}; {told}"
        ));
    }
    panic!("the machine never stood still for less than an eighth of a term");
}

/// Works one poison job and its neighbours, in processes that are started again when they die.
async fn work(neighbours: usize, workers: usize, limit: u32, flaw: Option<Flaw>) -> Ended {
    pulse::start();
    let began = Instant::now();
    let mut world = World::new();
    let jobs = std::iter::once(POISON).chain(vec![HEALTHY; neighbours]);
    let jobs = jobs.map(|errand| {
        let mut job = NewJob::of(&errand).unwrap();
        job.options.max_expiries = limit;
        job
    });
    let ids = world.client.enqueue_many(jobs).await.unwrap();
    let poison = ids[0].id();
    let start = |world: &mut World| {
        let mut role = world.role(8);
        role.flaw = flaw;
        (role.owner.clone(), Process::start(&Role::Worker(role)))
    };
    let mut fleet: Vec<(String, Process)> = (0..workers).map(|_| start(&mut world)).collect();
    let mut crashed: Vec<String> = Vec::new();
    let queue = loop {
        let over =
            |view: &QueueView| view.counts.completed + view.counts.dead == view.ledger.enqueued;
        let wait = world.until("every job to be settled", over);
        if let Ok(queue) = tokio::time::timeout(Duration::from_millis(20), wait).await {
            break queue;
        }
        for (owner, process) in &mut fleet {
            if process.has_ended() {
                let (next, started) = start(&mut world);
                crashed.push(std::mem::replace(owner, next));
                *process = started;
            }
        }
        assert!(
            crashed.len() < 50,
            "it never ends: {:?}",
            world.look().await
        );
    };
    let mut jobs = world.jobs(JobState::Completed).await;
    jobs.extend(world.jobs(JobState::Dead).await);
    assert_in_order(&queue, &jobs);
    let died = world.died();
    // Whether a lease ran out because its owner had crashed.
    let was_hit = |ended: &EndedLease| {
        let crash = died.iter().find(|(owner, _)| **owner == *ended.owner);
        crash.is_some_and(|(_, at)| ended.ended_at >= *at)
    };
    let mut healthy = BTreeMap::new();
    for view in &jobs {
        let history = view.job.history.iter();
        let expired = history.filter(|ended| matches!(ended.end, LeaseEnd::Expired(_)));
        let (hit, starved): (Vec<_>, Vec<_>) = expired.partition(|ended| was_hit(ended));
        let fate = Fate {
            state: view.state,
            hit: hit.len(),
            starved: starved.len(),
        };
        assert_eq!(fate.hit + fate.starved, view.job.expiries as usize);
        if view.job.id == poison {
            assert_eq!(view.state, JobState::Dead);
            assert_eq!((view.job.failures, view.job.expiries), (0, limit));
        } else {
            *healthy.entry(fate).or_default() += 1;
        }
    }
    Ended {
        queue,
        healthy,
        crashes: crashed.len(),
        lag: pulse::stood_still(began),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_job() {
    let _machine = MACHINE.read().await;
    let mut row = Row {
        control: "neighbours die: in a test of its own".into(),
        ..Row::default()
    };
    for limit in [3, 4] {
        let ended = fairly(99, 2, limit, |ended| {
            let alone = ended.crashes == limit as usize && ended.queue.counts.dead == 1;
            alone && ended.is_fair()
        })
        .await;
        let hit = ended.healthy(|fate| fate.hit > 0);
        figures(&format!(
            "poison_job: limit {limit}, dead after {} crashes; 99 neighbours, {hit} of them hit, \
             lag {:?}: {:?}",
            ended.crashes, ended.lag, ended.healthy
        ));
        assert!(hit > 0, "the poison had no neighbours");
        row.acknowledged += ended.queue.ledger.enqueued;
    }
    report("poison job", row);
}

/// Seven neighbours that are always claimed together with the poison; and the control arm, in which
/// suspects may meet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suspects_do_not_meet() {
    let _machine = MACHINE.read().await;
    let ended = fairly(7, 1, 3, Ended::is_fair).await;
    let crowded = work(7, 1, 3, Some(Flaw::CrowdsSuspects)).await;
    let dead = |ended: &Ended| ended.healthy(|fate| fate.state == JobState::Dead);
    figures(&format!(
        "suspects_do_not_meet: {} of 7 neighbours dead, {} without the suspects' line",
        dead(&ended),
        dead(&crowded)
    ));
    assert_eq!(dead(&ended), 0, "{:?}", ended.healthy);
    assert!(dead(&crowded) > 0, "this test cannot fail");
}
