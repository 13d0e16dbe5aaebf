//! A job that takes its process with it, among healthy neighbours.

use std::collections::BTreeMap;

use leasehold::inspect::QueueView;
use leasehold::job::JobState;
use leasehold::{JobId, NewJob};

use crate::MACHINE;
use crate::broken::Flaw;
use crate::process::Process;
use crate::roles::Errand;
use crate::table::{Row, report};
use crate::world::{World, assert_in_order, figures};

const POISON: Errand = Errand::Poison { millis: 200 };
const HEALTHY: Errand = Errand::Nap { millis: 300 };

/// How it ended.
struct Ended {
    queue: QueueView,
    poison: JobId,
    /// Jobs by state and expiries, the poison left out.
    healthy: BTreeMap<(JobState, u32), usize>,
    crashes: usize,
}

impl Ended {
    fn healthy(&self, check: impl Fn(JobState, u32) -> bool) -> usize {
        let healthy = self.healthy.iter();
        healthy
            .filter(|((state, expiries), _)| check(*state, *expiries))
            .map(|(_, count)| count)
            .sum()
    }
}

/// Works one poison job and its neighbours, in processes that are started again when they die.
async fn work(neighbours: usize, workers: usize, limit: u32, flaw: Option<Flaw>) -> Ended {
    let mut world = World::new();
    let jobs = std::iter::once(POISON).chain(vec![HEALTHY; neighbours]);
    let jobs = jobs.map(|errand| {
        let mut job = NewJob::of(&errand).unwrap();
        job.options.max_expiries = limit;
        job
    });
    let ids = world.client.enqueue_all(jobs.collect()).await.unwrap();
    let poison = ids[0].id();
    let mut fleet: Vec<Process> = (0..workers).map(|_| world.flawed(8, flaw)).collect();
    let mut crashes = 0;
    let queue = loop {
        let over =
            |view: &QueueView| view.counts.completed + view.counts.dead == view.ledger.enqueued;
        let wait = world.until("every job to be settled", over);
        if let Ok(queue) = tokio::time::timeout(std::time::Duration::from_millis(20), wait).await {
            break queue;
        }
        for process in &mut fleet {
            if process.has_ended() {
                crashes += 1;
                *process = world.flawed(8, flaw);
            }
        }
        assert!(crashes < 50, "it never ends: {:?}", world.look().await);
    };
    let mut jobs = world.jobs(JobState::Completed).await;
    jobs.extend(world.jobs(JobState::Dead).await);
    assert_in_order(&queue, &jobs);
    let mut healthy = BTreeMap::new();
    for view in &jobs {
        if view.job.id == poison {
            assert_eq!(view.state, JobState::Dead);
            assert_eq!((view.job.failures, view.job.expiries), (0, limit));
        } else {
            *healthy.entry((view.state, view.job.expiries)).or_default() += 1;
        }
    }
    Ended {
        queue,
        poison,
        healthy,
        crashes,
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
        let ended = work(99, 2, limit, None).await;
        let hit = ended.healthy(|_, expiries| expiries > 0);
        figures(&format!(
            "poison_job: limit {limit}, dead after {} crashes; 99 neighbours, {hit} of them hit, \
             by expiries {:?}",
            ended.crashes, ended.healthy
        ));
        assert_eq!(ended.crashes, limit as usize, "{}", ended.poison);
        assert_eq!(ended.healthy(|state, _| state == JobState::Completed), 99);
        assert_eq!(ended.queue.counts.dead, 1);
        // A suspect has its process for itself, as far as suspects go: nobody is hit a third time.
        assert_eq!(ended.healthy(|_, expiries| expiries > 2), 0);
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
    let ended = work(7, 1, 3, None).await;
    let crowded = work(7, 1, 3, Some(Flaw::CrowdsSuspects)).await;
    let dead = |ended: &Ended| ended.healthy(|state, _| state == JobState::Dead);
    figures(&format!(
        "suspects_do_not_meet: {} of 7 neighbours dead, {} without the suspects' line",
        dead(&ended),
        dead(&crowded)
    ));
    assert_eq!(dead(&ended), 0, "{:?}", ended.healthy);
    assert!(dead(&crowded) > 0, "this test cannot fail");
}
