//! Several processes on one file: killed, frozen, busy, asleep.
//!
//! The test binary is its own child: `child` runs it again with a role.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::clock::{Clock, SystemClock};
use leasehold::inspect;
use leasehold::store::{SqliteOptions, SqliteStore};
use leasehold::{ErrorKind, JobId, Store};

use crate::sqlite::client::{Client, job, queue};
use crate::sqlite::{crowd, machine, replaced};

const ROLE: &str = "LEASEHOLD_TEST_ROLE";
const FILE: &str = "LEASEHOLD_TEST_FILE";

/// Makes a command a child with a role.
pub(crate) fn child(mut command: Command, role: &str, path: &Path) -> Command {
    command.args([
        "sqlite::processes::play_the_role",
        "--exact",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.env(ROLE, role).env(FILE, path);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

pub(crate) fn spawn(role: &str, path: &Path) -> Child {
    let exe = Command::new(std::env::current_exe().unwrap());
    child(exe, role, path).spawn().unwrap()
}

/// The lines that a child said before it ended.
fn said(child: &mut Child) -> Vec<String> {
    let out = BufReader::new(child.stdout.take().unwrap());
    out.lines().map_while(Result::ok).collect()
}

pub(crate) fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args([name, &id])
            .status()
            .unwrap()
            .success()
    );
}

pub(crate) fn say(line: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

#[tokio::test]
async fn play_the_role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let path = PathBuf::from(std::env::var_os(FILE).unwrap());
    match role.as_str() {
        "open" => {
            let error = SqliteStore::open(&path).unwrap_err();
            say(format_args!("kind {}", error.kind().as_str()));
        }
        "work" => work(&path).await,
        "sloppy" => sloppy(&path),
        "busy" => busy(&path).await,
        "greedy" => greedy(&path),
        "ticker" => ticker(&path).await,
        "sleeper" => sleeper(&path).await,
        "hand" => crowd::hand(&path).await,
        "renews" => crowd::patient(&path, true).await,
        "stores" => crowd::patient(&path, false).await,
        "stubborn" => stubborn(&path).await,
        "workers" => replaced::workers(&path).await,
        other => panic!("no role {other}"),
    }
}

/// Enqueues, claims and settles until it is killed, and says what was acknowledged.
async fn work(path: &Path) {
    let mut client = Client::new(SqliteStore::open(path).unwrap()).await;
    loop {
        let kept = client
            .enqueue(vec![job("keep"), job("work"), job("work")])
            .await
            .unwrap();
        say(format_args!("kept {}", kept[0].id()));
        let claimed = client.claim("work", 2).await.unwrap();
        for lease in claimed.grants.iter().flat_map(|grant| &grant.leases) {
            say(format_args!("token {}", lease.token));
        }
        let _ = client.complete(&claimed.grants).await.unwrap();
    }
}

/// The control arm: answers before it commits.
fn sloppy(path: &Path) {
    let db = rusqlite::Connection::open(path).unwrap();
    db.busy_timeout(Duration::from_secs(5)).unwrap();
    loop {
        db.execute_batch("BEGIN IMMEDIATE").unwrap();
        for _ in 0..20 {
            let id = JobId::generate();
            db.execute("INSERT INTO sloppy (id) VALUES (?1)", [id.to_string()])
                .unwrap();
            say(format_args!("kept {id}"));
        }
        db.execute_batch("COMMIT").unwrap();
    }
}

#[tokio::test]
async fn killed_in_the_middle_nothing_acknowledged_is_lost_and_tokens_grow() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    drop(SqliteStore::open(&path).unwrap());
    let campaign = std::env::var_os("LEASEHOLD_CAMPAIGN").is_some();
    let rounds = if campaign { 500 } else { 30 };
    let (mut kept, mut last_token) = (Vec::new(), 0_u64);
    for _ in 0..rounds {
        let lines = killed_after("work", &path);
        for line in lines {
            match line.split_once(' ') {
                Some(("kept", id)) => kept.push(id.parse::<JobId>().unwrap()),
                Some(("token", token)) => {
                    let token = token.parse().unwrap();
                    assert!(token > last_token, "{token} after {last_token}");
                    last_token = token;
                }
                _ => {}
            }
        }
    }
    let db = rusqlite::Connection::open(&path).unwrap();
    let sound: String = db
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(sound, "ok");
    let store = SqliteStore::open(&path).unwrap();
    assert!(kept.len() > rounds, "only {} were acknowledged", kept.len());
    for id in &kept {
        let found = inspect::job(&store, *id).await.unwrap();
        assert!(found.is_some(), "{id} was acknowledged and is gone");
    }
    for view in inspect::queues(&store).await.unwrap() {
        assert!(view.ledger.balances(), "{view:?}");
        let (counts, ledger) = (view.counts, view.ledger);
        assert_eq!(
            counts.ready + counts.leased + ledger.completed,
            ledger.enqueued
        );
    }

    db.execute_batch("CREATE TABLE sloppy (id TEXT PRIMARY KEY)")
        .unwrap();
    let mut lost = 0;
    for _ in 0..5 {
        for line in killed_after("sloppy", &path) {
            let Some(("kept", id)) = line.split_once(' ') else {
                continue;
            };
            let found = db.query_row("SELECT 1 FROM sloppy WHERE id = ?1", [id], |_| Ok(()));
            lost += u32::from(found.is_err());
        }
    }
    assert!(
        lost > 0,
        "the control arm lost nothing: this test cannot fail"
    );
    println!(
        "{rounds} kills, {} kept, none lost; control arm lost {lost}",
        kept.len()
    );
}

/// What a child said until it was killed, some milliseconds after its first word.
fn killed_after(role: &str, path: &Path) -> Vec<String> {
    let mut child = spawn(role, path);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    let mut lines = Vec::new();
    while !line.contains("kept") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "{role} ended early");
        // The test harness writes its own words before the first.
        lines.extend(line.find("kept").map(|at| line[at..].trim().to_owned()));
    }
    std::thread::sleep(Duration::from_micros(fastrand::u64(500..40_000)));
    child.kill().unwrap();
    lines.extend(out.lines().map_while(Result::ok));
    child.wait().unwrap();
    // A word that was cut off was not acknowledged.
    if lines.last().is_some_and(|line| line.len() < 15) {
        lines.pop();
    }
    lines
}

pub(crate) const RUN: Duration = Duration::from_secs(3);

pub(crate) fn wait_for_go(path: &Path) {
    say(format_args!("ready"));
    while !path.with_extension("go").exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Cycles of enqueue, claim and settle as fast as it can; says how many, and the longest call.
async fn busy(path: &Path) {
    let mut client = Client::new(SqliteStore::open(path).unwrap()).await;
    let name = format!("q{}", std::process::id());
    wait_for_go(path);
    let start = Instant::now();
    let (mut cycles, mut longest) = (0_u32, Duration::ZERO);
    while start.elapsed() < RUN {
        let call = Instant::now();
        client.enqueue(vec![job(&name); 100]).await.unwrap();
        longest = longest.max(call.elapsed());
        let call = Instant::now();
        let claimed = match client.claim(&name, 100).await {
            Err(error) if error.kind() == ErrorKind::TokensAhead => continue,
            claimed => claimed.unwrap(),
        };
        longest = longest.max(call.elapsed());
        let call = Instant::now();
        let _ = client.complete(&claimed.grants).await.unwrap();
        longest = longest.max(call.elapsed());
        cycles += 1;
    }
    say(format_args!("cycles {cycles} {}", longest.as_millis()));
}

/// The control arm: the same with the engine's own way of waiting.
fn greedy(path: &Path) {
    let mut db = rusqlite::Connection::open(path).unwrap();
    db.busy_timeout(Duration::from_secs(10)).unwrap();
    db.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
        .unwrap();
    let me = std::process::id();
    wait_for_go(path);
    let start = Instant::now();
    let (mut cycles, mut longest) = (0_u32, Duration::ZERO);
    while start.elapsed() < RUN {
        let call = Instant::now();
        let tx = db
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
            .unwrap();
        for _ in 0..300 {
            let insert = "INSERT INTO greedy (owner, payload) VALUES (?1, zeroblob(100))";
            tx.prepare_cached(insert).unwrap().execute([me]).unwrap();
        }
        tx.execute("DELETE FROM greedy WHERE owner = ?1", [me])
            .unwrap();
        tx.commit().unwrap();
        longest = longest.max(call.elapsed());
        cycles += 1;
    }
    say(format_args!("cycles {cycles} {}", longest.as_millis()));
}

/// Waits until a child says that it is ready, and returns what it will say after that.
pub(crate) fn ready(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    let out = BufReader::new(child.stdout.take().unwrap());
    let mut lines = out.lines().map_while(Result::ok);
    let ready = lines.any(|line| line.contains("ready"));
    assert!(ready, "a child ended early");
    lines
}

/// Four at once: their shares, and the longest wait in milliseconds.
fn contest(role: &str, path: &Path) -> (Vec<f64>, u64) {
    let mut children: Vec<Child> = (0..4).map(|_| spawn(role, path)).collect();
    let said: Vec<_> = children.iter_mut().map(ready).collect();
    std::fs::write(path.with_extension("go"), "").unwrap();
    let mut cycles = Vec::new();
    let mut longest = 0;
    for (child, mut lines) in children.iter_mut().zip(said) {
        let line = lines.find_map(|line| Some(line.split_once("cycles ")?.1.to_owned()));
        let line = line.unwrap();
        child.wait().unwrap();
        let (count, worst) = line.split_once(' ').unwrap();
        cycles.push(count.parse::<f64>().unwrap());
        longest = longest.max(worst.trim().parse().unwrap());
    }
    let total: f64 = cycles.iter().sum();
    println!("{role}: cycles {cycles:?}, longest call {longest} ms");
    (cycles.iter().map(|count| count / total).collect(), longest)
}

#[tokio::test]
async fn four_busy_processes_share_the_file_fairly() {
    machine::judged(|| async { fair_shares() }).await;
}

fn fair_shares() -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("greedy.db");
    let db = rusqlite::Connection::open(&path).unwrap();
    db.execute_batch(
        "PRAGMA journal_mode = WAL;
         CREATE TABLE greedy (id INTEGER PRIMARY KEY, owner, payload);
         CREATE INDEX greedy_owner ON greedy (owner)",
    )
    .unwrap();
    let (greedy, greedy_longest) = contest("greedy", &path);
    let path = dir.path().join("jobs.db");
    drop(SqliteStore::open(&path).unwrap());
    let (shares, longest) = contest("busy", &path);
    let least = |shares: &[f64]| shares.iter().copied().fold(1.0, f64::min);
    if least(&shares) < 0.125 {
        return Err(format!("a fair share is 0.25: {shares:?}"));
    }
    if longest >= 250 {
        return Err(format!("a call took {longest} ms"));
    }
    if least(&greedy) >= least(&shares) && greedy_longest <= longest {
        return Err(format!(
            "the control arm is as good: {greedy:?} {greedy_longest} ms"
        ));
    }
    Ok(())
}

#[tokio::test]
async fn a_frozen_process_delays_nobody_unless_it_holds_the_lock() {
    machine::judged(frozen_beside).await;
}

async fn frozen_beside() -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let options = SqliteOptions::new().patience(Duration::from_millis(500));
    let mut client = Client::new(SqliteStore::with(&path, options).unwrap()).await;
    let mut frozen = spawn("busy", &path);
    let _said = ready(&mut frozen);
    std::fs::write(path.with_extension("go"), "").unwrap();
    let (mut held, mut longest) = (0, Duration::ZERO);
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(fastrand::u64(5..25)));
        signal(&frozen, "-STOP");
        let start = Instant::now();
        for _ in 0..20 {
            match client.enqueue(vec![job("q")]).await {
                // It was frozen inside a transaction: the one case in which others wait.
                Err(error) if error.kind() == ErrorKind::Contended => {
                    held += 1;
                    break;
                }
                answer => drop(answer.unwrap()),
            }
        }
        longest = longest.max(start.elapsed());
        signal(&frozen, "-CONT");
    }
    println!("frozen 10 times, {held} times inside a transaction");
    frozen.kill().unwrap();
    frozen.wait().unwrap();
    client.enqueue(vec![job("q")]).await.unwrap();
    if longest >= Duration::from_secs(2) {
        return Err(format!("twenty calls took {longest:?}"));
    }
    Ok(())
}

/// Waits for work that does not come, and says what that cost.
async fn sleeper(path: &Path) {
    let store = SqliteStore::open(path).unwrap();
    let nanos = || -> u64 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let stats = tasks.map(|task| task.unwrap().path().join("schedstat"));
        let stats = stats.filter_map(|path| std::fs::read_to_string(path).ok());
        stats
            .map(|stat| stat.split(' ').next().unwrap().parse::<u64>().unwrap())
            .sum()
    };
    let limit = Duration::from_secs(1);
    // Opening connections is not waiting.
    let warm = Duration::from_millis(300);
    store.wait(&[queue("none")], false, warm).await.unwrap();
    // Who else uses the machine adds to what a second costs, and takes nothing away.
    let mut least = u64::MAX;
    for _ in 0..4 {
        let before = nanos();
        store.wait(&[queue("none")], false, limit).await.unwrap();
        least = least.min(nanos() - before);
    }
    say(format_args!(
        "percent {}",
        least as f64 * 100.0 / limit.as_nanos() as f64
    ));
}

#[test]
fn a_process_that_waits_costs_next_to_nothing() {
    if !Path::new("/proc/self/schedstat").exists() {
        eprintln!("not run: this system does not tell the CPU time of threads");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    drop(SqliteStore::open(&path).unwrap());
    let lines = said(&mut spawn("sleeper", &path));
    let percent = lines
        .iter()
        .find_map(|line| line.split_once("percent "))
        .unwrap()
        .1;
    println!("waiting costs {percent} % of a core");
    assert!(percent.parse::<f64>().unwrap() < 1.0, "{percent} %");
}

/// Enqueues a job that carries the time, now and then, until it is killed.
async fn ticker(path: &Path) {
    let mut client = Client::new(SqliteStore::open(path).unwrap()).await;
    wait_for_go(path);
    loop {
        std::thread::sleep(Duration::from_millis(fastrand::u64(5..40)));
        let mut tick = job("tick");
        tick.payload = SystemClock.now().as_micros().to_le_bytes().to_vec().into();
        client.enqueue(vec![tick]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_of_one_process_wakes_another_at_once() {
    machine::judged(|| async {
        let (median, p99, commit) = woken(true).await;
        let (asking, ..) = woken(false).await;
        println!(
            "started after: median {median:?}, p99 {p99:?}; by asking only {asking:?}; \
             a commit takes {commit:?}"
        );
        if p99 >= Duration::from_millis(50) {
            return Err(format!("woken after {p99:?}"));
        }
        // Two commits, one after the other, are the least. The campaign's disk has nothing else to
        // do; on a slow one, what lies between them may take as long as a third.
        let of_disk = if crowd::in_campaign() {
            Duration::ZERO
        } else {
            3 * commit
        };
        if median > Duration::from_millis(2).max(of_disk) {
            return Err(format!("half of them start after {median:?} or more"));
        }
        if median * 2 > asking {
            return Err(format!("told after {median:?}, by asking after {asking:?}"));
        }
        Ok(())
    })
    .await;
}

/// How long until a job of another process can start here: the middle one, and nearly the longest.
/// And how long an enqueue takes by itself, the middle one. In the control arm nobody is told.
async fn woken(told: bool) -> (Duration, Duration, Duration) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    if !told {
        std::fs::write(dir.path().join("jobs.db-sleepers"), "in their place").unwrap();
    }
    let store = SqliteStore::open(&path).unwrap();
    let mut client = Client::new(store.clone()).await;
    let mut ticker = spawn("ticker", &path);
    std::fs::write(path.with_extension("go"), "").unwrap();
    let mut waits = Vec::new();
    while waits.len() < 100 {
        store
            .wait(&[queue("tick")], false, Duration::from_secs(10))
            .await
            .unwrap();
        let claimed = client.claim("tick", 10).await.unwrap();
        // A handler would start now.
        let now = SystemClock.now().as_micros();
        for lease in claimed.grants.iter().flat_map(|grant| &grant.leases) {
            let sent = u64::from_le_bytes(lease.job.payload[..].try_into().unwrap());
            waits.push(Duration::from_micros(now.saturating_sub(sent)));
        }
        let _ = client.complete(&claimed.grants).await.unwrap();
    }
    ticker.kill().unwrap();
    ticker.wait().unwrap();
    waits.sort();
    let mut commits = Vec::new();
    for _ in 0..50 {
        let begun = Instant::now();
        client.enqueue(vec![job("alone")]).await.unwrap();
        commits.push(begun.elapsed());
    }
    commits.sort();
    let [median, p99] = [50, 99].map(|share| waits[waits.len() * share / 100 - 1]);
    (median, p99, commits[commits.len() / 2])
}

/// What a sleeper leaves behind when it is killed takes no wake-up from others.
#[tokio::test]
async fn what_dead_sleepers_leave_is_taken_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let side = dir.path().join("jobs.db-sleepers");
    let count = || std::fs::read_dir(&side).map_or(0, Iterator::count);
    drop(SqliteStore::open(&path).unwrap());
    let mut dead = spawn("sleeper", &path);
    while count() < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    signal(&dead, "-KILL");
    dead.wait().unwrap();
    assert_eq!(count(), 2, "control arm: a socket and its queue are left");
    let mut client = Client::new(SqliteStore::open(&path).unwrap()).await;
    client.enqueue(vec![job("none")]).await.unwrap();
    assert_eq!(count(), 0);
}

/// Drops a handle with an enqueue under way, while somebody else has the file's write lock for so
/// long. Returns how long the drop took, and how many jobs there are in the end.
async fn dropped_while_locked(held: Duration) -> (Duration, u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let store = SqliteStore::open(&path).unwrap();
    let mut client = Client::new(store.clone()).await;
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let call = tokio::spawn(async move { client.enqueue(vec![job("q")]).await });
    // As long as the calls of a drain have waited when the process ends.
    let waits = held / 5;
    tokio::time::sleep(waits).await;
    call.abort();
    let _ = call.await;
    let holder = std::thread::spawn(move || {
        std::thread::sleep(held.saturating_sub(waits));
        other.execute_batch("COMMIT").unwrap();
    });
    let start = Instant::now();
    drop(store);
    let took = start.elapsed();
    holder.join().unwrap();
    let view = inspect::queues(&SqliteStore::open(&path).unwrap()).await;
    (
        took,
        view.unwrap().first().map_or(0, |queue| queue.counts.ready),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_handle_does_not_wait_for_a_file_that_others_keep_locked() {
    machine::judged(|| async {
        let (took, _) = dropped_while_locked(Duration::from_secs(3)).await;
        if took >= Duration::from_millis(500) {
            return Err(format!("the drop took {took:?}"));
        }
        Ok(())
    })
    .await;
    // The other arm: behind an ordinary turn it waits, and what was called is done when it returns.
    let (_, jobs) = dropped_while_locked(Duration::from_millis(50)).await;
    assert_eq!(jobs, 1);
}

/// Enqueues until it is killed, and says what became of each call.
async fn stubborn(path: &Path) {
    let mut client = Client::new(SqliteStore::open(path).unwrap()).await;
    say(format_args!("ready"));
    loop {
        match client.enqueue(vec![job("q")]).await {
            Ok(_) => say(format_args!("kept")),
            Err(error) => say(format_args!("refused {}", error.kind().as_str())),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The control arm is a connection of the engine alone, which notices nothing.
#[tokio::test]
async fn a_file_that_is_removed_or_replaced_is_not_written_any_more() {
    for replace in [false, true] {
        machine::judged(|| async move {
            let noticed = taken_away(replace).await;
            if noticed >= Duration::from_secs(2) {
                return Err(format!("a short term, and noticed after {noticed:?}"));
            }
            Ok(())
        })
        .await;
    }
}

/// How long until another process notices.
async fn taken_away(replace: bool) -> Duration {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let store = SqliteStore::open(&path).unwrap();
    let mut client = Client::new(store.clone()).await;
    client.enqueue(vec![job("q")]).await.unwrap();
    let control = rusqlite::Connection::open(&path).unwrap();
    control.busy_timeout(Duration::from_secs(10)).unwrap();
    control.execute_batch("CREATE TABLE mine (x)").unwrap();
    let mut other = spawn("stubborn", &path);
    let mut said = ready(&mut other);
    assert!(said.any(|line| line.contains("kept")));

    if replace {
        let copy = dir.path().join("backup.db");
        let into = format!("VACUUM INTO '{}'", copy.display());
        control.execute_batch(&into).unwrap();
        std::fs::rename(&copy, &path).unwrap();
    } else {
        std::fs::remove_file(&path).unwrap();
    }
    let start = Instant::now();
    assert!(said.any(|line| line.contains("refused replaced")));
    let noticed = start.elapsed();
    let then: Vec<_> = said.take(3).collect();
    assert!(then.iter().all(|line| line.contains("refused")), "{then:?}");
    other.kill().unwrap();
    other.wait().unwrap();

    let errors = [
        client.enqueue(vec![job("q")]).await.unwrap_err(),
        client.claim("q", 1).await.unwrap_err(),
        client.claim("none", 1).await.unwrap_err(),
        inspect::queues(&store).await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Replaced, "{error}");
    }
    control
        .execute_batch("INSERT INTO mine VALUES (1)")
        .unwrap();
    drop(client);
    drop(store);
    if replace {
        // What was restored is whole, and what is done in it stays.
        let store = SqliteStore::open(&path).unwrap();
        let mut client = Client::new(store.clone()).await;
        client.enqueue(vec![job("q")]).await.unwrap();
        drop(control);
        drop((client, store));
        let store = SqliteStore::open(&path).unwrap();
        let view = inspect::queues(&store).await.unwrap();
        assert!(view[0].counts.ready >= 2, "{view:?}");
    } else {
        assert!(!path.exists(), "closing brought it back");
    }
    noticed
}
