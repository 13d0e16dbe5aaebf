//! What a seed means: a workload and a kind of trouble out of two tables, and dice for the rest.

use std::fmt;
use std::time::Duration;

use leasehold::job::JobOptions;
use leasehold::{Job, LeaseTerms, NewJob};
use serde::{Deserialize, Serialize};

pub(crate) const TERM: Duration = Duration::from_secs(2);
pub(crate) const TERMS: LeaseTerms = LeaseTerms::of_term(TERM);
/// When the troubles are over.
pub(crate) const HEALED: Duration = Duration::from_secs(6);
/// How long a run for safety goes on after that.
pub(crate) const AFTERMATH: Duration = Duration::from_secs(3);

/// How the network treats calls, in percent of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quality {
    pub(crate) lose_request: u8,
    pub(crate) lose_reply: u8,
    /// Arrives after its caller has given up.
    pub(crate) late: u8,
    /// Arrives a second time, perhaps much later.
    pub(crate) duplicate: u8,
    pub(crate) slow: u8,
}

impl Quality {
    pub(crate) const CALM: Self = Self::of(0, 0, 0, 0, 0);

    const fn of(lose_request: u8, lose_reply: u8, late: u8, duplicate: u8, slow: u8) -> Self {
        Self {
            lose_request,
            lose_reply,
            late,
            duplicate,
            slow,
        }
    }
}

/// A row of the table of troubles: how the network is, and how often something happens in a run.
#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) name: &'static str,
    pub(crate) quality: Quality,
    freezes: u8,
    crashes: u8,
    drains: u8,
    cuts: u8,
    jumps: u8,
    restarts: u8,
    pub(crate) rollbacks: u8,
}

const NONE: Faults = Faults {
    name: "calm",
    quality: Quality::CALM,
    freezes: 0,
    crashes: 0,
    drains: 0,
    cuts: 0,
    jumps: 0,
    restarts: 0,
    rollbacks: 0,
};

const FAULTS: [Faults; 12] = [
    NONE,
    Faults {
        name: "lossy",
        quality: Quality::of(12, 12, 0, 0, 5),
        ..NONE
    },
    Faults {
        name: "slow",
        quality: Quality::of(0, 0, 10, 0, 40),
        ..NONE
    },
    Faults {
        name: "duplicating",
        quality: Quality::of(0, 10, 10, 40, 10),
        ..NONE
    },
    Faults {
        name: "cut off",
        quality: Quality::of(1, 1, 0, 0, 5),
        cuts: 4,
        ..NONE
    },
    Faults {
        name: "frozen",
        freezes: 4,
        ..NONE
    },
    Faults {
        name: "crashing",
        crashes: 4,
        ..NONE
    },
    Faults {
        name: "draining",
        quality: Quality::of(3, 3, 3, 3, 10),
        drains: 4,
        ..NONE
    },
    Faults {
        name: "clock jumps",
        quality: Quality::of(2, 2, 2, 2, 5),
        jumps: 4,
        ..NONE
    },
    Faults {
        name: "restarts",
        quality: Quality::of(2, 2, 2, 2, 5),
        restarts: 3,
        ..NONE
    },
    Faults {
        name: "issuer rollback",
        quality: Quality::of(2, 2, 5, 5, 5),
        freezes: 1,
        rollbacks: 2,
        ..NONE
    },
    Faults {
        name: "everything",
        quality: Quality::of(4, 4, 6, 10, 10),
        freezes: 2,
        crashes: 2,
        drains: 1,
        cuts: 2,
        jumps: 1,
        restarts: 1,
        rollbacks: 0,
    },
];

/// What a handler does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Style {
    Plain,
    /// Runs for more than a term.
    Slow,
    /// Fails once or twice.
    Fails,
    Buries,
    Snoozes,
    /// Opens a resource, reads it, and writes it back, all under its token.
    Fenced,
    Checkpoints,
    /// Shows no progress, and has a stall limit.
    Stalls,
    /// Does not heed its stop signal.
    Deaf,
}

/// What the operator does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    Cancel,
    RevokeJob,
    RevokeOwner,
    PauseAndResume,
    Reschedule,
}

/// A row of the table of workloads.
#[derive(Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    styles: &'static [Style],
    exclusive_keys: u8,
    unique_keys: u8,
    delayed: bool,
    priorities: bool,
    orders: &'static [Order],
}

const PLAIN: Workload = Workload {
    name: "plain",
    styles: &[Style::Plain, Style::Slow, Style::Fails],
    exclusive_keys: 0,
    unique_keys: 0,
    delayed: false,
    priorities: false,
    orders: &[],
};

const WORKLOADS: [Workload; 10] = [
    PLAIN,
    Workload {
        name: "fenced writes",
        styles: &[Style::Fenced],
        exclusive_keys: 2,
        ..PLAIN
    },
    Workload {
        name: "exclusive keys",
        exclusive_keys: 3,
        styles: &[Style::Plain, Style::Fails, Style::Fenced, Style::Snoozes],
        ..PLAIN
    },
    Workload {
        name: "unique keys",
        unique_keys: 3,
        ..PLAIN
    },
    Workload {
        name: "delays",
        delayed: true,
        styles: &[Style::Plain, Style::Snoozes, Style::Fails],
        orders: &[Order::Reschedule],
        ..PLAIN
    },
    Workload {
        name: "priorities",
        priorities: true,
        ..PLAIN
    },
    Workload {
        name: "cancels",
        styles: &[Style::Slow, Style::Plain, Style::Deaf],
        orders: &[Order::Cancel, Order::Cancel, Order::Cancel],
        ..PLAIN
    },
    Workload {
        name: "revokes",
        styles: &[Style::Slow, Style::Fenced, Style::Checkpoints],
        orders: &[Order::RevokeJob, Order::RevokeOwner, Order::RevokeJob],
        ..PLAIN
    },
    Workload {
        name: "checkpoints",
        styles: &[Style::Checkpoints, Style::Stalls],
        ..PLAIN
    },
    Workload {
        name: "mixed",
        styles: &[
            Style::Plain,
            Style::Slow,
            Style::Fails,
            Style::Buries,
            Style::Snoozes,
            Style::Fenced,
            Style::Checkpoints,
            Style::Stalls,
            Style::Deaf,
        ],
        exclusive_keys: 1,
        unique_keys: 1,
        delayed: true,
        priorities: true,
        orders: &[Order::PauseAndResume, Order::Cancel, Order::RevokeOwner],
    },
];

/// How many seeds show every pair of a workload and a kind of trouble.
pub(crate) const PAIRS: u64 = (WORKLOADS.len() * FAULTS.len()) as u64;

/// A job of the simulation.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Work {
    pub(crate) n: usize,
    pub(crate) style: Style,
    /// The resource that it writes to.
    pub(crate) scope: String,
}

impl Job for Work {
    const KIND: &'static str = "work";
}

/// Something that happens to the world.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    Freeze(usize, Duration),
    Crash(usize, Duration),
    Drain(usize, Duration),
    Cut {
        host: usize,
        requests: bool,
        replies: bool,
        lasts: Duration,
    },
    Jump(i64),
    Restart(Duration),
    /// The store keeps a copy of itself, where it can.
    Keep,
    /// The store is as it was then, or empty.
    Rollback(Duration),
}

/// Something that the producer does.
#[derive(Clone)]
pub(crate) enum Act {
    Enqueue(Vec<NewJob>),
    Order(Order),
}

/// All that a seed decides in advance.
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) workload: &'static Workload,
    pub(crate) faults: &'static Faults,
    pub(crate) workers: usize,
    pub(crate) troubles: Vec<(Duration, Trouble)>,
    pub(crate) script: Vec<(Duration, Act)>,
}

impl Plan {
    pub(crate) fn of(seed: u64) -> Self {
        let mut dice = fastrand::Rng::with_seed(seed);
        let pair = (seed % PAIRS) as usize;
        let workload = &WORKLOADS[pair % WORKLOADS.len()];
        let faults = &FAULTS[pair / WORKLOADS.len()];
        let workers = if dice.u8(0..4) == 0 { 3 } else { 2 };
        Self {
            seed,
            workload,
            faults,
            workers,
            troubles: troubles(faults, workers, &mut dice),
            script: script(workload, &mut dice),
        }
    }

    /// How far the store's clock is set back in all.
    pub(crate) fn set_back(&self) -> Duration {
        let jumps = self.troubles.iter().map(|(_, trouble)| match trouble {
            Trouble::Jump(millis) if *millis < 0 => millis.unsigned_abs(),
            _ => 0,
        });
        Duration::from_millis(jumps.sum())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seed,
            workload,
            faults,
            workers,
            troubles,
            ..
        } = self;
        write!(
            f,
            "seed {seed}: {} × {}, {workers} workers",
            workload.name, faults.name
        )?;
        troubles
            .iter()
            .try_for_each(|(at, trouble)| write!(f, "\n  {at:?} {trouble:?}"))
    }
}

fn millis(dice: &mut fastrand::Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(dice.u64(range))
}

fn troubles(faults: &Faults, workers: usize, dice: &mut fastrand::Rng) -> Vec<(Duration, Trouble)> {
    let mut all = Vec::new();
    let mut draw =
        |times: u8, dice: &mut fastrand::Rng, make: &dyn Fn(&mut fastrand::Rng) -> Trouble| {
            for _ in 0..times {
                all.push((millis(dice, 300..5_500), make(dice)));
            }
        };
    let worker = |dice: &mut fastrand::Rng| 1 + dice.usize(0..workers);
    draw(faults.freezes, dice, &|dice| {
        Trouble::Freeze(worker(dice), millis(dice, 200..4_000))
    });
    draw(faults.crashes, dice, &|dice| {
        Trouble::Crash(worker(dice), millis(dice, 100..2_000))
    });
    draw(faults.drains, dice, &|dice| {
        Trouble::Drain(worker(dice), millis(dice, 500..3_000))
    });
    draw(faults.cuts, dice, &|dice| {
        let way = dice.u8(0..3);
        Trouble::Cut {
            host: dice.usize(0..=workers),
            requests: way != 1,
            replies: way != 0,
            lasts: millis(dice, 200..3_000),
        }
    });
    draw(faults.jumps, dice, &|dice| {
        let by = [-60_000, -5_000, -1_000, -300, 300, 1_500, 5_000, 700_000];
        Trouble::Jump(by[dice.usize(0..by.len())])
    });
    draw(faults.restarts, dice, &|dice| {
        Trouble::Restart(millis(dice, 50..1_500))
    });
    if faults.rollbacks > 0 {
        all.push((millis(dice, 300..2_000), Trouble::Keep));
    }
    for _ in 0..faults.rollbacks {
        let at = millis(dice, 2_000..5_500);
        all.push((at, Trouble::Rollback(millis(dice, 50..1_000))));
    }
    all.sort_by_key(|(at, _)| *at);
    all
}

fn script(workload: &Workload, dice: &mut fastrand::Rng) -> Vec<(Duration, Act)> {
    let mut all = Vec::new();
    let jobs = dice.usize(4..10);
    let mut n = 0;
    while n < jobs {
        let batch = dice.usize(1..5);
        let jobs = (n..n + batch).map(|n| job(n, workload, dice)).collect();
        n += batch;
        all.push((millis(dice, 0..3_000), Act::Enqueue(jobs)));
    }
    for order in workload.orders {
        all.push((millis(dice, 500..4_500), Act::Order(*order)));
    }
    all.sort_by_key(|(at, _)| *at);
    all
}

fn job(n: usize, workload: &Workload, dice: &mut fastrand::Rng) -> NewJob {
    let style = workload.styles[dice.usize(0..workload.styles.len())];
    let key = (workload.exclusive_keys > 0 && dice.u8(0..10) > 1)
        .then(|| format!("key {}", dice.u8(0..workload.exclusive_keys)));
    let scope = key.clone().unwrap_or_else(|| format!("job {n}"));
    let mut job = NewJob::of(&Work { n, style, scope }).expect("it encodes");
    let mut options = JobOptions::default();
    if style == Style::Stalls {
        options = options.stall_limit(Duration::from_millis(700));
    }
    if dice.u8(0..8) == 0 {
        options = options.term(TERM / 2);
    }
    if workload.priorities {
        options = options.priority(dice.u8(0..8));
    }
    job = job.options(options);
    if let Some(key) = key {
        job = job.exclusive(key).expect("a short key");
    }
    if workload.unique_keys > 0 && dice.bool() {
        let key = dice.u8(0..workload.unique_keys);
        job = job.unique(format!("key {key}")).expect("a short key");
    }
    if workload.delayed && dice.bool() {
        job = job.delay(millis(dice, 1..4_000));
    }
    job
}
