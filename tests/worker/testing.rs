//! The zombie test: handlers with one fault each, which it must find where it is, right ones, which
//! it must pass, and handlers that cannot be tested, which it must not pass either.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::fence::file::FencedFile;
use leasehold::fence::memory::Cell;
use leasehold::{Context, Failure, FencingToken, Handler, Job, NewJob, async_trait};
use leasehold_testing::{Ended, FaultKind, FrozenAt, Report, Zombie, await_point};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Merge {
    steps: usize,
}

impl Job for Merge {
    const KIND: &'static str = "merge";
}

const JOB: Merge = Merge { steps: 1 };

/// The names of all jobs that were merged: merging one again changes nothing.
type Names = BTreeSet<String>;

/// A register with a round trip, that checks the token of writes, or nothing.
#[derive(Clone, Default)]
struct Register {
    inner: Arc<Mutex<(Option<FencingToken>, Names)>>,
}

impl Register {
    async fn read(&self) -> Names {
        await_point().await;
        self.look()
    }

    async fn write(&self, names: Names) {
        await_point().await;
        self.inner.lock().unwrap().1 = names;
    }

    async fn write_checked(&self, token: FencingToken, names: Names) -> Result<(), Failure> {
        await_point().await;
        let mut inner = self.inner.lock().unwrap();
        match inner.0 {
            Some(mark) if token < mark => Err(Failure::fenced(mark)),
            _ => {
                *inner = (Some(token), names);
                Ok(())
            }
        }
    }

    fn look(&self) -> Names {
        self.inner.lock().unwrap().1.clone()
    }
}

fn with(mut names: Names, ctx: &Context) -> Names {
    names.insert(ctx.job_id().to_string());
    names
}

/// The kinds and places of what was found.
fn found(report: &Report) -> Vec<(FaultKind, FrozenAt)> {
    let faults = report.faults().iter();
    faults
        .map(|fault| (fault.kind, fault.frozen.unwrap()))
        .collect()
}

fn kinds(report: &Report) -> BTreeSet<FaultKind> {
    report.faults().iter().map(|fault| fault.kind).collect()
}

/// How many names there are: ids differ from run to run.
fn count(cell: &Cell<Names>) -> usize {
    cell.look(BTreeSet::len)
}

#[test]
fn an_unfenced_write_is_found() {
    let report = Zombie::new(&JOB, Register::default, |register| {
        move |_: Merge, ctx: Context| {
            let register = register.clone();
            async move {
                let names = register.read().await; // 1
                register.write(with(names, &ctx)).await; // 2
                Ok::<(), Failure>(())
            }
        }
    })
    .watch("registry", |register| register.look().len())
    .run();
    println!("{report}");
    assert_eq!(report.await_points(), 2);
    assert_eq!(kinds(&report), [FaultKind::Accepted].into());
    let last = report.faults().last().unwrap();
    assert_eq!(last.frozen, Some(FrozenAt::Await(2)));
    assert_eq!(last.resource.as_deref(), Some("registry"));
    // The successor and the next job had merged two; the zombie's stale list has only itself.
    assert_eq!(last.detail, "2 → 1, when the successor had ended");
}

#[test]
fn a_local_look_at_the_lease_is_no_fence() {
    let report = Zombie::new(&JOB, Register::default, |register| {
        move |_: Merge, ctx: Context| {
            let register = register.clone();
            async move {
                let names = register.read().await; // 1
                tokio::time::sleep(Duration::from_secs(1)).await; // 2
                if ctx.is_lost() || ctx.time_left().is_zero() {
                    return Err(Failure::lost());
                }
                register.write(with(names, &ctx)).await; // 3
                Ok(())
            }
        }
    })
    .watch("registry", |register| register.look().len())
    .run();
    for point in [2, 3] {
        let fault = (FaultKind::Accepted, FrozenAt::Await(point));
        assert!(found(&report).contains(&fault), "{report}");
    }
}

#[test]
fn a_check_on_writes_only_is_found() {
    let report = Zombie::new(&JOB, Register::default, |register| {
        move |_: Merge, ctx: Context| {
            let register = register.clone();
            async move {
                let names = register.read().await; // 1
                register.write_checked(ctx.token(), with(names, &ctx)).await // 2
            }
        }
    })
    .watch("registry", |register| register.look().len())
    .run();
    println!("{report}");
    let all = found(&report);
    assert!(
        all.contains(&(FaultKind::Accepted, FrozenAt::Await(2))),
        "{report}"
    );
    assert_eq!(kinds(&report), [FaultKind::Accepted].into());
    // It does refuse the one who wakes up when all is over.
    assert!(
        report
            .faults()
            .iter()
            .all(|fault| !fault.detail.contains("ended"))
    );
}

/// The fence is opened in the right place, or after the first read.
fn merge_in_cell(early: bool) -> Report {
    Zombie::new(&JOB, Cell::<Names>::default, move |cell| {
        move |_: Merge, ctx: Context| {
            let cell = cell.clone();
            async move {
                if early {
                    await_point().await; // something else first
                    let mut cell = ctx.fence(&cell).await?;
                    let names = cell.read()?;
                    await_point().await;
                    cell.write(|stored| *stored = with(names, &ctx))?;
                    await_point().await;
                } else {
                    let names = cell.look(Clone::clone);
                    await_point().await; // 1
                    let mut cell = ctx.fence(&cell).await?; // 2, 3
                    cell.write(|stored| *stored = with(names, &ctx))?;
                    await_point().await; // 4
                }
                Ok::<(), Failure>(())
            }
        }
    })
    .watch("registry", count)
    .run()
}

#[test]
fn a_fence_opened_too_late_is_found() {
    let report = merge_in_cell(false);
    println!("{report}");
    assert_eq!(report.await_points(), 4);
    assert_eq!(kinds(&report), [FaultKind::OpenedLate].into());
    // Once it has opened, it is refused: only points 1 and 2 (before the opening) and 3 can harm.
    let points: Vec<_> = found(&report)
        .into_iter()
        .map(|(_, frozen)| frozen)
        .collect();
    assert!(points.contains(&FrozenAt::Await(1)), "{report}");
    assert!(!points.contains(&FrozenAt::Await(4)), "{report}");
}

#[test]
fn a_right_handler_passes() {
    let report = merge_in_cell(true);
    assert_eq!(report.await_points(), 5);
    assert!(report.runs() > 5 * 6, "{report}");
    report.assert_safe();
}

/// A directory with a file in it, which goes with the last of its clones.
#[derive(Clone)]
struct Lines(Arc<tempfile::TempDir>);

impl Lines {
    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("lines")
    }

    fn look(&self) -> usize {
        std::fs::read_to_string(self.path()).map_or(0, |text| text.lines().count())
    }
}

/// Notes the job in a file, once: behind its fence, or past it.
fn note_in_file(fenced: bool) -> Report {
    fn noted(mut text: Vec<u8>, id: &str) -> Vec<u8> {
        if !text.windows(id.len()).any(|part| part == id.as_bytes()) {
            text.extend(id.bytes().chain(*b"\n"));
        }
        text
    }
    let make = || Lines(Arc::new(tempfile::tempdir().unwrap()));
    Zombie::new(&JOB, make, move |lines| {
        move |_: Merge, ctx: Context| {
            let path = lines.path();
            async move {
                let id = ctx.job_id().to_string();
                if fenced {
                    let mut file = ctx.fence(FencedFile::new(path)).await?;
                    file.write(move |text| noted(text, &id)).await?;
                } else {
                    let text = std::fs::read(&path).unwrap_or_default();
                    await_point().await;
                    std::fs::write(&path, noted(text, &id))?;
                }
                Ok::<(), Failure>(())
            }
        }
    })
    .watch("lines", Lines::look)
    .run()
}

#[test]
fn a_file_stands_still_with_its_handler() {
    note_in_file(true).assert_safe();
    let report = note_in_file(false);
    assert_eq!(kinds(&report), [FaultKind::Accepted].into(), "{report}");
}

#[test]
fn a_fenced_repeat_is_found() {
    let report = Zombie::new(&JOB, Cell::<i64>::default, |balance| {
        move |_: Merge, ctx: Context| {
            let balance = balance.clone();
            async move {
                let mut balance = ctx.fence(&balance).await?; // 1, 2
                balance.write_once("debit", |cents| *cents -= 30)?;
                await_point().await; // 3
                Ok::<(), Failure>(())
            }
        }
    })
    .watch("balance", |balance| balance.look(|cents| *cents))
    .run();
    println!("{report}");
    assert_eq!(kinds(&report), [FaultKind::Repeated].into());
    let all = found(&report);
    for frozen in [FrozenAt::Await(3), FrozenAt::Return] {
        assert!(all.contains(&(FaultKind::Repeated, frozen)), "{report}");
    }
    let text = "frozen after its return: balance: the end is another than without a zombie \
                (-60, not -30)";
    assert!(report.to_string().ends_with(text), "{report}");
}

/// Two resources, opened one after the other: what is not opened yet may still be written to.
#[derive(Clone, Default)]
struct Two {
    cache: Cell<Names>,
    table: Cell<Names>,
}

struct Merger(Two);

#[async_trait]
impl Handler<Merge> for Merger {
    async fn handle(&self, _: Merge, ctx: Context) -> Result<(), Failure> {
        for cell in [&self.0.cache, &self.0.table] {
            let mut cell = ctx.fence(cell).await?;
            let names = cell.read()?;
            tokio::task::yield_now().await;
            cell.write(|stored| *stored = with(names, &ctx))?;
        }
        Ok(())
    }
}

#[test]
fn resources_that_are_opened_one_after_the_other_pass() {
    Zombie::new(&JOB, Two::default, Merger)
        .watch("cache", |two| count(&two.cache))
        .watch("table", |two| count(&two.table))
        .exclusive("registry")
        .unwrap()
        .run()
        .assert_safe();
}

#[test]
fn a_fence_with_a_hole_is_found_and_named() {
    let report = Zombie::new(
        &JOB,
        <(Cell<Names>, Register)>::default,
        |(cell, register)| {
            move |_: Merge, ctx: Context| {
                let (cell, register) = (cell.clone(), register.clone());
                async move {
                    let mut cell = ctx.fence(&cell).await?; // 1, 2
                    let names = register.read().await; // 3
                    cell.write(|stored| *stored = with(stored.clone(), &ctx))?;
                    register.write(with(names, &ctx)).await; // 4
                    Ok::<(), Failure>(())
                }
            }
        },
    )
    .watch("table", |(cell, _)| count(cell))
    .watch("cache", |(_, register)| register.look().len())
    .run();
    println!("{report}");
    let faults = report.faults();
    assert!(found(&report).contains(&(FaultKind::Accepted, FrozenAt::Await(4))));
    assert!(
        faults
            .iter()
            .all(|fault| fault.resource.as_deref() == Some("cache"))
    );
}

/// A handler without a fence, whose effect has a key of its own.
fn keyed(strict: bool) -> Report {
    let test = Zombie::new(&JOB, Register::default, |register| {
        move |_: Merge, ctx: Context| {
            let register = register.clone();
            async move {
                await_point().await;
                let mut sent = register.inner.lock().unwrap();
                sent.1.insert(ctx.job_id().to_string());
                Ok::<(), Failure>(())
            }
        }
    });
    let look = |register: &Register| register.look().len();
    if strict {
        test.watch("mails", look).run()
    } else {
        test.watch_end("mails", look).run()
    }
}

#[test]
fn an_idempotency_key_is_enough_where_only_the_end_counts() {
    keyed(false).assert_safe();
    assert_eq!(kinds(&keyed(true)), [FaultKind::Accepted].into());
}

fn enqueuing(unique: bool) -> Report {
    Zombie::new(
        &JOB,
        || (),
        move |()| {
            move |_: Merge, ctx: Context| async move {
                let mut child = NewJob::of(&JOB)?.queue("children")?;
                if unique {
                    child = child.unique(ctx.job_id().to_string())?;
                }
                ctx.enqueue(child).await?;
                ctx.save_checkpoint(&"enqueued").await
            }
        },
    )
    .run()
}

#[test]
fn a_job_that_is_enqueued_twice_is_found() {
    enqueuing(true).assert_safe();
    let report = enqueuing(false);
    println!("{report}");
    assert!(kinds(&report).contains(&FaultKind::Repeated));
    let names = report
        .faults()
        .iter()
        .map(|fault| fault.resource.as_deref());
    assert!(names.into_iter().all(|name| name == Some("jobs enqueued")));
}

#[test]
fn a_handler_that_never_waits_was_not_tested() {
    let report = Zombie::new(&JOB, Register::default, |register| {
        move |_: Merge, _: Context| {
            register.inner.lock().unwrap().1.insert("me".into());
            async { Ok::<(), Failure>(()) }
        }
    })
    .watch("registry", Register::look)
    .run();
    assert_eq!(kinds(&report), [FaultKind::NoAwaitPoint].into());
    assert_eq!((report.await_points(), report.runs()), (0, 0));
    let failed = std::panic::catch_unwind(|| report.assert_safe()).unwrap_err();
    let text = failed.downcast_ref::<String>().unwrap();
    assert!(
        text.starts_with("0 await points, 0 zombies, 1 faults"),
        "{text}"
    );
}

#[test]
fn a_test_that_watches_nothing_is_none() {
    let handler = |_: Merge, _: Context| async {
        await_point().await;
        Ok::<(), Failure>(())
    };
    let report = Zombie::new(&JOB, || (), move |()| handler).run();
    assert_eq!(kinds(&report), [FaultKind::NothingWatched].into());
}

#[test]
fn a_handler_that_fails_alone_was_not_tested() {
    let report = Zombie::new(
        &JOB,
        || (),
        |()| {
            |_: Merge, _: Context| async {
                await_point().await;
                Err::<(), _>(Failure::bury("no"))
            }
        },
    )
    .run();
    assert_eq!(
        kinds_text(&report),
        ["undisturbed, the handler does not complete its job (buried: no)"]
    );
}

fn kinds_text(report: &Report) -> Vec<String> {
    report.faults().iter().map(ToString::to_string).collect()
}

#[test]
fn a_successor_that_fails_on_what_it_finds_is_found() {
    let report = Zombie::new(&JOB, Cell::<Names>::default, |cell| {
        move |_: Merge, ctx: Context| {
            let cell = cell.clone();
            async move {
                let mut cell = ctx.fence(&cell).await?; // 1, 2
                let new = cell.write(|names| names.insert(ctx.job_id().to_string()))?;
                await_point().await; // 3
                if new {
                    Ok(())
                } else {
                    Err(Failure::from("it is there already"))
                }
            }
        }
    })
    .watch("registry", count)
    .run();
    println!("{report}");
    assert!(
        found(&report).contains(&(FaultKind::Failed, FrozenAt::Await(3))),
        "{report}"
    );
    assert_eq!(kinds(&report), [FaultKind::Failed].into());
}

#[test]
fn a_lock_held_across_an_await_is_reported_as_such() {
    type Lock = Arc<tokio::sync::Mutex<Names>>;
    let report = Zombie::new(&JOB, Lock::default, |lock| {
        move |_: Merge, ctx: Context| {
            let lock = lock.clone();
            async move {
                await_point().await; // 1
                let mut names = lock.lock().await;
                await_point().await; // 2
                names.insert(ctx.job_id().to_string());
                Ok::<(), Failure>(())
            }
        }
    })
    .watch_end("names", |lock| {
        lock.try_lock().map_or(0, |names| names.len())
    })
    .run();
    println!("{report}");
    assert!(
        found(&report).contains(&(FaultKind::Blocked, FrozenAt::Await(2))),
        "{report}"
    );
    assert!(!found(&report).contains(&(FaultKind::Blocked, FrozenAt::Await(1))));
}

#[test]
fn a_lock_that_blocks_the_thread_is_reported_by_the_watchdog() {
    let report = Zombie::new(&JOB, Arc::<AtomicBool>::default, |taken| {
        move |_: Merge, _: Context| {
            let taken = taken.clone();
            async move {
                await_point().await; // 1
                while taken.swap(true, Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                await_point().await; // 2
                taken.store(false, Ordering::SeqCst);
                Ok::<(), Failure>(())
            }
        }
    })
    .watch("taken", |taken| taken.load(Ordering::SeqCst))
    .patience(Duration::from_secs(2))
    .run();
    println!("{report}");
    // One stands still with the lock, and the other does not let go of the thread.
    assert_eq!(kinds(&report), [FaultKind::Hung].into());
    assert_eq!((report.await_points(), found(&report).len()), (2, 1));
}

#[test]
fn twenty_await_points_are_all_tried_and_no_time_is_waited_for() {
    let polls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = Arc::clone(&polls);
    let report = Zombie::new(&Merge { steps: 18 }, Cell::<Names>::default, move |cell| {
        let polls = Arc::clone(&counted);
        move |job: Merge, ctx: Context| {
            let (cell, polls) = (cell.clone(), polls.clone());
            async move {
                let mut cell = ctx.fence(&cell).await?;
                for _ in 0..job.steps {
                    tokio::time::sleep(Duration::from_secs(600)).await;
                    polls.fetch_add(1, Ordering::Relaxed);
                    cell.write(|names| names.insert(ctx.job_id().to_string()))?;
                }
                Ok::<(), Failure>(())
            }
        }
    })
    .watch("registry", count)
    .run();
    assert_eq!(report.await_points(), 20);
    // Each zombie wakes up before and after its successor opens the fence and changes something, in
    // both roles of the successor, and when all is over.
    assert!(report.runs() >= 20 * 7, "{report}");
    // Time is what a run costs: so few steps of the handler take no second on any machine.
    let steps = polls.load(Ordering::Relaxed);
    assert!(steps <= 20 * 20 * 18, "{steps}");
    report.assert_safe();
}

#[tokio::test(start_paused = true)]
async fn a_handler_runs_without_a_store() {
    async fn work(job: Merge, ctx: Context) -> Result<(), Failure> {
        assert_eq!((ctx.attempt(), ctx.queue().as_str()), (1, "default"));
        tokio::time::sleep(Duration::from_secs(10)).await;
        match job.steps {
            0 => Err("no steps".into()),
            1 => Err(Failure::bury("one step")),
            2 => Err(Failure::snooze(Duration::from_secs(5))),
            3 => Err(Failure::retry_in(Duration::from_secs(7), "three")),
            4 => panic!("four"),
            5 => Err(Failure::lost()),
            6 => Err(Failure::fenced(FencingToken::new(ctx.token().get() + 1))),
            _ => {
                ctx.save_checkpoint(&job.steps).await?;
                ctx.set_result(&"done")?;
                ctx.enqueue(&Merge { steps: 0 }).await?;
                Ok(())
            }
        }
    }
    let run = async |steps| {
        leasehold_testing::run(work, &Merge { steps })
            .await
            .unwrap()
    };
    run(0).await.assert_retried("no steps");
    run(1).await.assert_buried("one step");
    run(2).await.assert_snoozed(Duration::from_secs(5));
    let delay = Duration::from_secs(7);
    let reason = "three".to_owned();
    assert_eq!(run(3).await.ended(), &Ended::Retried { delay, reason });
    run(4).await.assert_retried("panic: four");
    run(5).await.assert_lost();
    run(6).await.assert_lost();
    let ran = run(7).await;
    ran.assert_completed();
    assert_eq!(ran.checkpoint::<usize>(), Some(7));
    assert_eq!(ran.result::<String>().as_deref(), Some("done"));
    assert_eq!(ran.enqueued().len(), 1);
    let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ran.assert_lost()));
    assert!(wrong.is_err(), "this test cannot fail");
}
