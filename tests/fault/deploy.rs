//! A rolling deploy: workers of the old version are replaced one by one, under load.

use std::time::Duration;

use leasehold::inspect::{JobView, QueueView};
use leasehold::job::JobState;
use leasehold::lease::LeaseEnd;
use leasehold::{Job as _, NewJob};
use rustix::process::Signal;

use crate::crew::{Chore, Novelty};
use crate::journal::Judgement;
use crate::stage::Stage;
use crate::support::redis::Standalone;
use crate::table::{Row, report};
use crate::world::TERM;
use crate::{MACHINE, in_campaign};

const WORKERS: usize = 4;

/// The work of both versions, a tenth of it too long for the grace of a drain.
async fn load(stage: &Stage) {
    stage.waits(45, 40).await;
    stage
        .enqueue(&[const { Chore::Wait { millis: 4_000 } }; 5])
        .await;
}

async fn roll(by: Signal, rounds: usize) -> (Stage, QueueView, Vec<JobView>, Judgement) {
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let mut stage = Stage::at(server.url()).await;
    let role = |stage: &mut Stage, number: usize, new| {
        let mut role = stage.role(&format!("worker-{number}"));
        role.drain_grace = Duration::from_secs(2);
        // However busy the machine is, nobody who lives loses a lease.
        role.term = if by == Signal::KILL { TERM } else { 10 * TERM };
        role.new = new;
        role
    };
    let mut fleet = Vec::new();
    for number in 0..WORKERS {
        fleet.push(Stage::hire(role(&mut stage, number, false)).await);
    }
    for number in WORKERS..WORKERS * (1 + rounds) {
        load(&stage).await;
        // Enqueued by the new version, and met by the old one, too.
        let novelties = vec![NewJob::of(&Novelty).unwrap(); 5];
        stage.world.client.enqueue_many(novelties).await.unwrap();
        let busy = |view: &QueueView| view.counts.leased >= WORKERS as u64;
        stage.world.until("everybody to be at work", busy).await;
        let mut old = fleet.remove(0);
        old.signal(by);
        fleet.push(Stage::hire(role(&mut stage, number, true)).await);
        let ended = old.ends().await;
        assert!(by == Signal::KILL || ended.success(), "{ended}");
    }
    // What was met by somebody who did not know it is put off for longer than we wait.
    let over =
        |view: &QueueView| view.counts.completed + view.counts.scheduled == view.ledger.enqueued;
    let view = stage.world.until("the rest", over).await;
    let novelties = stage.world.jobs(JobState::Scheduled).await;
    let unknown = |view: &JobView| view.job.kind.as_str() == Novelty::KIND;
    assert!(
        novelties
            .iter()
            .all(|view| unknown(view) && view.job.failures == 0)
    );
    let jobs = stage.world.jobs(JobState::Completed).await;
    let judged = stage.finish(fleet).await;
    (stage, view, jobs, judged)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn rolling_deploy() {
    const CASE: &str = "rolling deploy";
    let _machine = MACHINE.write().await;
    let rounds = if in_campaign() { 10 } else { 1 };
    let control = tokio::spawn(roll(Signal::KILL, 1));
    let (stage, view, jobs, judged) = roll(Signal::TERM, rounds).await;
    judged.assert_sound(CASE);
    stage.assert_none_expired(CASE, &view, 10 * TERM);
    let mut gaps = Vec::new();
    for view in &jobs {
        // What nobody knew yet was put off on purpose.
        if view.job.kind.as_str() == Novelty::KIND {
            assert_eq!(
                view.job.failures, 0,
                "a deploy is not the job's fault: {view:?}"
            );
            continue;
        }
        for pair in view.job.history.windows(2) {
            if pair[0].end == LeaseEnd::Surrendered {
                gaps.push(pair[1].granted_at.since(pair[0].ended_at));
            }
        }
    }
    let (_, killed, ..) = control.await.unwrap();
    assert!(killed.ledger.expired_deadline > 0, "this test cannot fail");
    assert!(!gaps.is_empty(), "nobody was in the midst of anything");
    let row = Row {
        takeovers: gaps,
        control: format!("killed: {} expired", killed.ledger.expired_deadline),
        ..judged.row
    };
    let bound = TERM / 4 + stage.slack();
    assert!(
        row.takeover().is_some_and(|[_, p99]| p99 < bound),
        "{:?}",
        row.takeover()
    );
    report(CASE, row);
}
