//! The lock-set experiment: holders that add their name to a register, read-modify-write, under a
//! lease, and are frozen between the read and the write.
//!
//! Whoever was told that its update is stored must find it in the end. Three arms run side by side:
//! without a fence, with a token that is checked on writes only, and with the fence opened before the
//! first read. The first two are the control arms.
//!
//! A pause is placed by facts: the holder says that it has read and waits for a word; the supervisor
//! freezes it, and gives the word just before it thaws it, one and a half terms later. Every other
//! successor takes so long that it has read and not yet written when the zombie wakes up.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::job::JobOptions;
use leasehold::store::{SqliteStore, Store};
use leasehold::{Client, Context, Failure, FencingToken, Job, LeaseTerms, NewJob};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::MACHINE;
use crate::process::Process;
use crate::register::{Place, Register};
use crate::roles::{GO, Role, say};
use crate::world::figures;

const HOLDERS: usize = 5;
const TERM: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_secs(3);

/// Registers that each arm works on beside each other: as many pauses at once.
const KEYS: usize = 2;
/// Updates without a pause, between two with one.
const QUICK: usize = 5;
/// An arm goes on until it has this many.
const PAUSES: usize = 24;
const UPDATES: usize = 100;
const REFUSALS: usize = 20;
/// An arm that has not got there by then has failed.
const MOST_PAUSES: usize = 100;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Arm {
    NoFence,
    WritesOnly,
    Fenced,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct HolderRole {
    db: PathBuf,
    place: Place,
    arm: Arm,
}

/// One update of a register.
#[derive(Serialize, Deserialize)]
struct Update {
    key: usize,
    /// Whether its first holder is frozen.
    pause: bool,
    /// How long the holder that is not frozen takes between the read and the write.
    millis: u64,
}

impl Job for Update {
    const KIND: &'static str = "update";
    const QUEUE: &'static str = "lockset";

    fn options(&self) -> JobOptions {
        let mut options = JobOptions::default();
        options.max_expiries = 1_000;
        options
    }
}

/// The child: a worker with one slot.
pub(crate) async fn hold(role: HolderRole) {
    let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&role.db).unwrap());
    let (place, arm) = (Arc::new(role.place), role.arm);
    let handler = move |update: Update, ctx: Context| {
        let place = Arc::clone(&place);
        async move { add(&update, &ctx, &place, arm).await }
    };
    let worker = Client::new(store).worker().handle(handler);
    let worker = worker.slots(1).prefetch(0).terms(LeaseTerms::of_term(TERM));
    // A zombie gets all the time it needs to do harm.
    let worker = worker.grace(Duration::from_secs(60));
    worker
        .drain_grace(Duration::from_secs(5))
        .run()
        .await
        .unwrap();
}

/// Adds the token to the register, and says what came of it.
async fn add(update: &Update, ctx: &Context, place: &Place, arm: Arm) -> Result<(), Failure> {
    let register = Register::connect(place, update.key).await;
    let mut names = match arm {
        Arm::Fenced => register.open_and_read(ctx).await?,
        Arm::NoFence | Arm::WritesOnly => register.read().await,
    };
    if update.pause && ctx.attempt() == 1 {
        say(&format!("read {}", ctx.token()));
        GO.acquire().await?.forget();
    } else {
        tokio::time::sleep(Duration::from_millis(update.millis)).await;
    }
    names.insert(ctx.token().get());
    let stored = match arm {
        Arm::NoFence => register.write(&names).await,
        Arm::WritesOnly => register.write_checked(ctx.token(), &names).await,
        Arm::Fenced => register.write_fenced(ctx, &names).await?,
    };
    let word = if stored { "stored" } else { "refused" };
    say(&format!("{word} {} {}", ctx.token(), update.key));
    if stored { Ok(()) } else { Err(Failure::lost()) }
}

/// What one arm saw.
#[derive(Debug, Default)]
struct Tally {
    pauses: usize,
    refused: usize,
    /// The tokens that were told so, by register.
    stored: [BTreeSet<u64>; KEYS],
    lost: usize,
}

impl Tally {
    fn updates(&self) -> usize {
        self.stored.iter().map(BTreeSet::len).sum()
    }

    fn hear(&mut self, line: &str) {
        let mut words = line.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some("refused"), ..) => self.refused += 1,
            (Some("stored"), Some(token), Some(key)) => {
                let token = token.parse::<FencingToken>().unwrap().get();
                self.stored[key.parse::<usize>().unwrap()].insert(token);
            }
            _ => {}
        }
    }
}

/// Five holders, frozen one after the other.
async fn run(arm: Arm, place: Place) -> Tally {
    let dir = tempfile::tempdir().unwrap();
    let db = dir.path().join("jobs.db");
    let client = Client::new(Arc::new(SqliteStore::open(&db).unwrap()));
    let mut jobs = Vec::new();
    for number in 0..MOST_PAUSES * (QUICK + 1) {
        let cycle = number / (QUICK + 1);
        let pause = number % (QUICK + 1) == QUICK;
        // Longer than from the end of a frozen holder's lease to its thaw, and by a term shorter.
        let millis = if pause && cycle.is_multiple_of(2) {
            1_800
        } else {
            10
        };
        for key in 0..KEYS {
            let job = NewJob::of(&Update { key, pause, millis }).unwrap();
            jobs.push(job.exclusive(key.to_string()).unwrap());
        }
    }
    client.enqueue_all(jobs).await.unwrap();
    for key in 0..KEYS {
        Register::create(&place, key).await;
    }
    let role = || HolderRole {
        db: db.clone(),
        place: place.clone(),
        arm,
    };
    let mut holders: Vec<_> = (0..HOLDERS)
        .map(|_| Process::start(&Role::Holder(role())))
        .collect();

    let mut tally = Tally::default();
    let mut frozen: Vec<(usize, Instant)> = Vec::new();
    loop {
        for (number, holder) in holders.iter_mut().enumerate() {
            while let Some(line) = holder.overhear() {
                tally.hear(&line);
                if line.starts_with("read ") {
                    holder.signal(Signal::STOP);
                    frozen.push((number, Instant::now() + PAUSE));
                    tally.pauses += 1;
                }
            }
            assert!(!holder.has_ended(), "{arm:?}: a holder has ended");
        }
        frozen.retain(|(number, until)| {
            let over = *until <= Instant::now();
            if over {
                holders[*number].go();
                holders[*number].signal(Signal::CONT);
            }
            !over
        });
        let enough = tally.pauses >= PAUSES && tally.updates() >= UPDATES;
        let enough = enough && (arm != Arm::Fenced || tally.refused >= REFUSALS);
        if enough || tally.pauses >= MOST_PAUSES {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for (number, _) in frozen {
        holders[number].go();
        holders[number].signal(Signal::CONT);
    }
    for holder in &holders {
        holder.signal(Signal::TERM);
    }
    for mut holder in holders {
        holder.ends().await;
        holder.last_words().iter().for_each(|line| tally.hear(line));
    }
    for (key, stored) in tally.stored.iter().enumerate() {
        let names = Register::connect(&place, key).await.read().await;
        tally.lost += stored.difference(&names).count();
    }
    tally
}

/// All three arms, side by side, on one sort of register.
async fn experiment(name: &str, place: impl Fn(Arm) -> Place) {
    let arms = [Arm::NoFence, Arm::WritesOnly, Arm::Fenced];
    let begin = Instant::now();
    let [none, writes, fenced] = arms.map(|arm| tokio::spawn(run(arm, place(arm))));
    let (none, writes, fenced) = (
        none.await.unwrap(),
        writes.await.unwrap(),
        fenced.await.unwrap(),
    );
    for (arm, tally) in arms.iter().zip([&none, &writes, &fenced]) {
        let (updates, lost) = (tally.updates(), tally.lost);
        figures(&format!(
            "lockset, sqlite queue, {name}: {arm:?}: {lost} of {updates} updates lost ({:.1} %), \
             {} pauses, {} refused, {:.0} s",
            lost as f64 / updates as f64 * 100.0,
            tally.pauses,
            tally.refused,
            begin.elapsed().as_secs_f64(),
        ));
        assert!(updates >= UPDATES, "{arm:?}: {updates}");
    }
    assert_eq!(fenced.lost, 0, "leasehold lost updates");
    assert!(fenced.refused >= REFUSALS, "{}", fenced.refused);
    assert!(
        none.lost * 10 >= none.updates(),
        "without a fence: this test cannot fail"
    );
    assert!(
        writes.lost > 0,
        "checked on writes only: this test cannot fail"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_set() {
    let _machine = MACHINE.read().await;
    let dir = tempfile::tempdir().unwrap();
    experiment("sqlite register", |arm| {
        Place::Sqlite(dir.path().join(format!("{arm:?}.db")))
    })
    .await;
}
