//! The lock-set experiment: holders that add their name to a register, read-modify-write, under a
//! lease, and are frozen between the read and the write.
//!
//! Whoever was told that its update is stored must find it in the end. Three arms run side by side:
//! without a fence, with a token that is checked on writes only, and with the fence opened before
//! the first read. The first two are the control arms.
//!
//! A pause is placed by facts: the holder says that it has read and waits for a word; the
//! supervisor freezes it, and gives the word just before it thaws it, one and a half terms later,
//! or when its successor has read, if that takes longer. Every other successor takes so long that
//! it has not yet written when the zombie wakes up.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::job::JobOptions;
use leasehold::{Client, Context, Failure, FencingToken, Job, LeaseTerms, NewJob};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::MACHINE;
use crate::postgres_server::Server;
use crate::process::Process;
use crate::register::Place;
use crate::roles::{GO, Role, say};
use crate::support::redis::Standalone;
use crate::table::{Row, report};
use crate::world::figures;

const HOLDERS: usize = 5;
const TERM: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_secs(3);

/// Registers that each arm works on beside each other: as many pauses at once.
const KEYS: usize = 2;
/// Updates without a pause, between two with one.
const QUICK: usize = 3;
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
    /// The URL of the store.
    queue: String,
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
    let client = Client::open(&role.queue).await.unwrap();
    let (place, arm) = (Arc::new(role.place), role.arm);
    let handler = move |update: Update, ctx: Context| {
        let place = Arc::clone(&place);
        async move { add(&update, &ctx, &place, arm).await }
    };
    let worker = client.worker().handle(handler);
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
    let mut register = place.connect(update.key).await;
    let mut names = match arm {
        Arm::Fenced => register.open_and_read(ctx).await?,
        Arm::NoFence | Arm::WritesOnly => register.read().await,
    };
    if update.pause && ctx.attempt() == 1 {
        say(&format!("read {}", update.key));
        GO.acquire().await?.forget();
    } else {
        if update.pause {
            say(&format!("again {}", update.key));
        }
        tokio::time::sleep(Duration::from_millis(update.millis)).await;
    }
    names.insert(ctx.token().get());
    let stored = match arm {
        Arm::NoFence => {
            register.write(&names).await;
            true
        }
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

/// A holder that stands still.
struct Frozen {
    number: usize,
    key: String,
    /// Not before.
    until: Instant,
    /// Its successor has read.
    replaced: bool,
}

/// Five holders, frozen one after the other.
async fn run(arm: Arm, queue: String, place: Place) -> Tally {
    let client = Client::open(&queue).await.unwrap();
    let mut jobs = Vec::new();
    for number in 0..MOST_PAUSES * (QUICK + 1) {
        let cycle = number / (QUICK + 1);
        let pause = number % (QUICK + 1) == QUICK;
        // So long that it has not written when the zombie wakes up, or not long at all.
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
    client.enqueue_many(jobs).await.unwrap();
    for key in 0..KEYS {
        place.create(key).await;
    }
    let role = || HolderRole {
        queue: queue.clone(),
        place: place.clone(),
        arm,
    };
    let mut holders: Vec<_> = (0..HOLDERS)
        .map(|_| Process::start(&Role::Holder(role())))
        .collect();

    let mut tally = Tally::default();
    let mut frozen: Vec<Frozen> = Vec::new();
    loop {
        for (number, holder) in holders.iter_mut().enumerate() {
            while let Some(line) = holder.overhear() {
                tally.hear(&line);
                match line.split_once(' ') {
                    Some(("read", key)) => {
                        holder.signal(Signal::STOP);
                        tally.pauses += 1;
                        frozen.push(Frozen {
                            number,
                            key: key.to_owned(),
                            until: Instant::now() + PAUSE,
                            replaced: false,
                        });
                    }
                    Some(("again", key)) => {
                        let zombie = frozen.iter_mut().rfind(|zombie| zombie.key == key);
                        if let Some(zombie) = zombie {
                            zombie.replaced = true;
                        }
                    }
                    _ => {}
                }
            }
            assert!(!holder.has_ended(), "{arm:?}: a holder has ended");
        }
        frozen.retain(|zombie| {
            let now = Instant::now();
            // One that was frozen with a file of the queue or the register locked keeps everybody
            // waiting: that pause was none.
            let over = zombie.until <= now && (zombie.replaced || zombie.until + 2 * TERM <= now);
            if over {
                holders[zombie.number].thaw();
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
    for zombie in frozen {
        holders[zombie.number].thaw();
    }
    for holder in &holders {
        holder.signal(Signal::TERM);
    }
    for mut holder in holders {
        holder.ends().await;
        holder.last_words().iter().for_each(|line| tally.hear(line));
    }
    for (key, stored) in tally.stored.iter().enumerate() {
        let names = place.connect(key).await.read().await;
        tally.lost += stored.difference(&names).count();
    }
    tally
}

/// All three arms, side by side: `on` tells where an arm's queue and register are.
async fn experiment(name: &str, on: impl Fn(Arm) -> (String, Place)) -> Row {
    let arms = [Arm::NoFence, Arm::WritesOnly, Arm::Fenced];
    let begin = Instant::now();
    let tallies = arms.map(|arm| {
        let (queue, place) = on(arm);
        tokio::spawn(run(arm, queue, place))
    });
    let mut ended = Vec::new();
    for (arm, tally) in arms.iter().zip(tallies) {
        let tally = tally.await.unwrap();
        let (updates, lost) = (tally.updates(), tally.lost);
        figures(&format!(
            "lock_set on {name}: {arm:?}: {lost} of {updates} updates lost ({:.1} %), {} pauses, \
             {} refused, {:.0} s",
            lost as f64 / updates as f64 * 100.0,
            tally.pauses,
            tally.refused,
            begin.elapsed().as_secs_f64(),
        ));
        assert!(updates >= UPDATES, "{arm:?}: {updates}");
        ended.push(tally);
    }
    let [none, writes, fenced] = &ended[..] else {
        panic!("three arms");
    };
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
    let lost = |tally: &Tally| format!("{} of {}", tally.lost, tally.updates());
    Row {
        acknowledged: fenced.updates() as u64,
        lost: fenced.lost as u64,
        refused: fenced.refused as u64,
        control: format!("no fence: {}; on writes only: {}", lost(none), lost(writes)),
        ..Row::default()
    }
}

/// Where something is, for each arm.
type On<T> = Box<dyn Fn(Arm) -> T>;

/// One experiment at a time: each arm of each gets a new file.
fn new_file(dir: &Path, arm: Arm) -> PathBuf {
    dir.join(format!("{arm:?}-{}.db", leasehold::JobId::generate()))
}

/// The queues, by name. The first is always tried, the others in a campaign.
fn queues(dir: &Path) -> Vec<(&'static str, On<String>)> {
    let dir = dir.to_owned();
    let sqlite = move |arm| format!("sqlite://{}", new_file(&dir, arm).display());
    #[cfg_attr(
        not(feature = "redis"),
        expect(unused_mut, reason = "there is but one")
    )]
    let mut queues: Vec<(_, On<String>)> = vec![("sqlite", Box::new(sqlite))];
    if crate::in_campaign() {
        let server = Standalone::start(&[]);
        let redis = move |_| {
            let namespace = leasehold::JobId::generate();
            format!("{}?namespace={namespace}", server.url())
        };
        queues.push(("redis", Box::new(redis)));
    }
    queues
}

/// The registers, by name, likewise.
fn registers(dir: &Path) -> Vec<(&'static str, On<Place>)> {
    let dir = dir.to_owned();
    let sqlite = move |arm| Place::Sqlite(new_file(&dir, arm));
    #[cfg_attr(
        not(any(feature = "postgres", feature = "redis")),
        expect(unused_mut, reason = "there is but one")
    )]
    let mut registers: Vec<(_, On<Place>)> = vec![("sqlite", Box::new(sqlite))];
    if crate::in_campaign() {
        let server = Server::start(&["fsync=off"]);
        let postgres = move |arm| {
            let table = format!("register_{arm:?}").to_lowercase();
            Place::Postgres(server.socket(), table)
        };
        registers.push(("postgres", Box::new(postgres)));
    }
    if crate::in_campaign() {
        let server = Standalone::start(&[]);
        let redis = move |arm| Place::Redis(server.url().to_owned(), format!("{arm:?}"));
        registers.push(("redis", Box::new(redis)));
    }
    registers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_set() {
    let _machine = MACHINE.read().await;
    let dir = tempfile::tempdir().unwrap();
    let mut rows = Vec::new();
    for (queue, queue_at) in queues(dir.path()) {
        for (register, register_at) in registers(dir.path()) {
            let name = format!("{queue} queue, {register} register");
            let row = experiment(&name, |arm| (queue_at(arm), register_at(arm)));
            rows.push(row.await);
        }
    }
    report("resource-side rejection", rows.swap_remove(0));
}
