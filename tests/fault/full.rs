//! A disk without room: nothing that was acknowledged is lost, and work goes on when there is room.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use leasehold::inspect::QueueView;
use leasehold::job::JobState;
use leasehold::{ErrorKind, NewJob};

use crate::MACHINE;
use crate::roles::Errand;
use crate::support::disk::SmallDisk;
use crate::table::{Row, report};
use crate::world::{TERM, World, assert_in_order, figures};

/// Not smaller: the store's log alone takes 16 MiB before it is used again.
const SIZE: &str = "48m";
/// How soon jobs are taken again once there is room: a second, and time for a busy machine.
const PUT_BACK: Duration = Duration::from_secs(10);

/// The control arm: a queue that acknowledges what it wrote and does not look whether it could.
struct Careless {
    path: PathBuf,
    acknowledged: usize,
}

impl Careless {
    /// So many bytes that what the store gives up of its reserve cannot hold all of its lines.
    const LINE: usize = 20_000;

    fn on(disk: &SmallDisk) -> Self {
        let path = disk.path().join("careless");
        let acknowledged = 0;
        Self { path, acknowledged }
    }

    fn enqueue(&mut self) {
        let mut line = "x".repeat(Self::LINE);
        line.push('\n');
        let file = File::options().create(true).append(true).open(&self.path);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
        self.acknowledged += 1;
    }

    fn stored(&self) -> usize {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        let lines = text.split_terminator('\n');
        lines.filter(|line| line.len() == Self::LINE).count()
    }
}

fn job() -> NewJob {
    let mut job = NewJob::of(&Errand::Wait { millis: 20 }).unwrap();
    job.headers = vec![("ballast".into(), "x".repeat(1_000))];
    job
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk() {
    let _machine = MACHINE.read().await;
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("disk");
    std::fs::create_dir(&at).unwrap();
    let Some(disk) = SmallDisk::for_case("full_disk", &at, SIZE) else {
        return;
    };
    let mut world = World::at(dir, at.join("jobs.db"));
    let mut workers = [world.worker(8), world.worker(8)];
    let mut stored = 0;
    for _ in 0..20 {
        stored += world
            .client
            .enqueue_many(vec![job(); 10])
            .await
            .unwrap()
            .len();
    }
    let mut careless = Careless::on(&disk);
    (0..100).for_each(|_| careless.enqueue());
    let ballast = disk.fill(0);
    let (mut refused, mut first, mut stored_after) = (0, None, 0);
    let start = std::time::Instant::now();
    // Room that was used before is used again, so not every call is refused.
    while first.is_none() || start.elapsed() < 2 * TERM {
        careless.enqueue();
        match world.client.enqueue_many(vec![job(); 10]).await {
            Ok(jobs) => stored += jobs.len(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                refused += 1;
                first.get_or_insert(start.elapsed());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    let full = world.look().await;
    ballast.drop_all();
    // What was given up of the reserve is put back first, which is tried once a second.
    let since = std::time::Instant::now();
    while stored_after < 50 {
        match world.client.enqueue_many(vec![job(); 10]).await {
            Ok(jobs) => stored_after += jobs.len(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                assert!(
                    since.elapsed() < PUT_BACK,
                    "there is room, and still: {error}"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    stored += stored_after;
    let done = |view: &QueueView| view.counts.completed == view.ledger.enqueued;
    let queue = world.until("everything to be done", done).await;
    for worker in &mut workers {
        assert!(!worker.has_ended(), "a worker did not survive");
    }
    let jobs = world.jobs(JobState::Completed).await;
    assert_in_order(&queue, &jobs);
    world.assert_sound();
    figures(&format!(
        "full_disk: {stored} acknowledged, {refused} calls refused as full, {} of {} done while \
         full, {} leases expired; all done when there was room (control, a queue that does not \
         look: {} of {} lost)",
        full.ledger.completed,
        full.ledger.enqueued,
        queue.ledger.expired_deadline,
        careless.acknowledged - careless.stored(),
        careless.acknowledged
    ));
    assert!(
        careless.stored() < careless.acknowledged,
        "the disk was never full"
    );
    // `Full` is certain: what was refused is not there.
    assert_eq!(queue.ledger.enqueued, stored as u64);
    assert_eq!(jobs.len(), stored);
    let finished = world.done();
    assert!(jobs.iter().all(|view| finished.contains(&view.job.id)));
    let row = Row {
        acknowledged: stored as u64,
        lost: stored as u64 - queue.ledger.completed,
        refused: refused as u64,
        control: format!(
            "a queue that does not look: {} of {} lost",
            careless.acknowledged - careless.stored(),
            careless.acknowledged
        ),
        ..Row::default()
    };
    report("full disk", row);
    drop(workers);
    drop(world);
    drop(disk);
}
