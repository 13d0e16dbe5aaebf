//! `kill -9` of whoever enqueues: what was acknowledged is there, and nothing is there twice.

use std::collections::HashSet;
use std::time::Duration;

use leasehold::inspect::QueueView;
use leasehold::job::JobState;

use crate::MACHINE;
use crate::process::Process;
use crate::roles::{Errand, ProducerRole, Role};
use crate::table::{Row, report};
use crate::world::{World, assert_in_order, figures};

type Note = (u32, u64);

/// What producers said was stored before they were killed, one after another.
async fn kill_producers(world: &World, kills: u32, hasty: bool) -> HashSet<Note> {
    let mut said = HashSet::new();
    for number in 0..kills {
        let mut producer = Process::start(&Role::Producer(ProducerRole {
            db: world.db().to_owned(),
            number,
            hasty,
        }));
        said.extend(note(&producer.hear("stored")));
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..100_000))).await;
        producer.kill();
        said.extend(producer.last_words().iter().filter_map(|line| note(line)));
    }
    said
}

fn note(line: &str) -> Option<Note> {
    let mut words = line.strip_prefix("stored ")?.split(' ');
    let producer = words.next()?.parse().ok()?;
    Some((producer, words.next()?.parse().ok()?))
}

/// The notes that a worker has completed, and how many of them twice.
async fn completed(world: &World) -> (HashSet<Note>, usize) {
    let jobs = world.jobs(JobState::Completed).await;
    assert_in_order(&world.look().await, &jobs);
    let mut notes = HashSet::new();
    let mut twice = 0;
    for view in &jobs {
        match serde_json::from_slice(&view.job.payload).unwrap() {
            Errand::Note { producer, number } => {
                twice += usize::from(!notes.insert((producer, number)));
            }
            _ => panic!("{view:?}"),
        }
    }
    (notes, twice)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill9_of_the_enqueuer() {
    let _machine = MACHINE.read().await;
    let mut world = World::new();
    let _worker = world.worker(8);
    let stored = kill_producers(&world, 20, false).await;
    let done = |view: &QueueView| view.counts.completed == view.ledger.enqueued;
    let queue = world.until("everything to be done", done).await;
    let (notes, twice) = completed(&world).await;
    let lost = stored.difference(&notes).count();
    world.assert_sound();

    let mut world = World::new();
    let _worker = world.worker(8);
    let claimed = kill_producers(&world, 20, true).await;
    world.until("everything to be done", done).await;
    let (there, _) = completed(&world).await;
    let lies = claimed.difference(&there).count();
    figures(&format!(
        "kill9_of_the_enqueuer: 20 kills, {} acknowledged, {lost} lost, {twice} twice, {} stored \
         and not acknowledged; {lies} lost when acknowledged too early",
        stored.len(),
        notes.difference(&stored).count(),
    ));
    assert_eq!((lost, twice), (0, 0));
    assert_eq!(notes.len() as u64, queue.ledger.enqueued);
    assert_eq!(queue.ledger.completed, queue.ledger.enqueued);
    assert!(lies > 0, "this test cannot fail");
    let row = Row {
        acknowledged: stored.len() as u64,
        lost: lost as u64,
        duplicated: twice as u64,
        control: format!("acknowledged too early: {lies} of {} lost", claimed.len()),
        ..Row::default()
    };
    report("kill -9 of the enqueuer", row);
}
