//! What the rules say, played through the stores: every row of [`leasehold::rules::vectors`].
//!
//! Memory and SQLite call the rules; Redis and PostgreSQL repeat them in Lua and PL/pgSQL.
//! A row tells how a lease ends and what must become of its job; the player brings a store there by
//! its public verbs, on a clock that is moved by hand, and looks.

#[cfg(unix)]
use leasehold_support as support;
use leasehold_support::postgres as server;

use std::path::Path;
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::inspect::Ledger;
use leasehold::job::{JobState, Key};
use leasehold::lease::Verdict;
use leasehold::lease::{Cause, LeaseEnd};
use leasehold::rules;
use leasehold::rules::vectors::{
    self, ClaimVector, DueJob, EndVector, Ended, EndedBy, GrantedJobs, IssueVector, KeyVector,
    KeyWanted, TermVector,
};
use leasehold::store::{
    ControlCommand, Enqueued, LeaseSelect, MemoryStore, Outcome, PostgresStore, Renewal, Select,
};
use leasehold::{ErrorKind, FencingToken, NewJob};
use leasehold_conformance::{Driver, Held, ManualFixture, TERM, job, queue};

/// A session without a call ends after ten minutes: a longer wait needs a new one.
const LONG: Duration = Duration::from_secs(300);

#[test]
fn the_tables_are_plain_data_with_every_end_in_them() {
    let ends = vectors::ends();
    let has = |end: LeaseEnd| ends.iter().any(|vector| vector.then.counts_as == end);
    for end in [
        LeaseEnd::Completed,
        LeaseEnd::Retried,
        LeaseEnd::Surrendered,
        LeaseEnd::Buried,
        LeaseEnd::Cancelled,
        LeaseEnd::Expired(Cause::Deadline),
        LeaseEnd::Expired(Cause::Stalled),
        LeaseEnd::Expired(Cause::Lifetime),
        LeaseEnd::Revoked,
    ] {
        assert!(has(end), "{end:?}");
    }
    for state in JobState::ALL {
        let made = ends.iter().any(|vector| vector.then.state == Some(state));
        assert_eq!(made, state != JobState::Leased, "{state:?}");
    }
    assert!(ends.iter().any(|vector| vector.then.state.is_none()));
    let rows = (ends, vectors::issues(), vectors::terms());
    let rows = serde_json::to_value((rows, vectors::claims(), vectors::keys())).unwrap();
    assert!(rows[0][1][0]["claims"][0]["first"].is_u64());
    let rows = vectors::keys();
    assert!(rows.iter().any(|row| row.is_duplicate) && !rows.iter().all(|row| row.is_duplicate));
}

/// Scripts of Redis are given the numbers of the rules by name, so they have none of their own.
#[test]
fn scripts_define_no_number_of_the_rules() {
    let constants = rules::constants();
    // A second; everybody; the largest whole number of Lua.
    let others = [1_000_000, 1_000_000_000, 9_007_199_254_740_992];
    for (file, text) in texts("src/store/redis", "lua") {
        for line in text.lines() {
            let defined = definition(line).map(|(name, _)| name);
            let ours = constants.iter().any(|(name, _)| Some(*name) == defined);
            assert!(!ours, "{file} defines a number of the rules: {line}");
            for number in large_numbers(line) {
                assert!(others.contains(&number), "{number} in {file}: {line}");
            }
        }
    }
    for (name, _) in &constants[..6] {
        let mut scripts = texts("src/store/redis", "lua");
        assert!(scripts.any(|(_, text)| text.contains(name)), "{name}");
    }
}

/// Functions of `PostgreSQL` are given the numbers of the rules by name, too.
#[test]
fn statements_define_no_number_of_the_rules() {
    let constants = rules::constants();
    // A second, in microseconds and nanoseconds; how old the noted use of a session may be before
    // it is noted again; half of a number of 32 bits; for ever.
    let others = [
        1_000_000,
        1_000_000_000,
        60_000_000,
        (1 << 31) - 1,
        1 << 31,
        i64::MAX as u64,
    ];
    for (file, text) in texts("src/store/postgres", "sql") {
        // The numbers of `WITH (…)` are the engine's affair, and so are codes.
        let is_ours = |line: &&str| !["autovacuum", "ERRCODE"].iter().any(|it| line.contains(it));
        for line in text.lines().filter(is_ours) {
            let defined = definition(line).map(|(name, _)| name);
            let ours = constants.iter().any(|(name, _)| Some(*name) == defined);
            assert!(!ours, "{file} defines a number of the rules: {line}");
            for number in large_numbers(line) {
                assert!(others.contains(&number), "{number} in {file}: {line}");
            }
        }
    }
    for (name, _) in &constants[..6] {
        let named = format!("rule.{name}");
        let mut texts = texts("src/store/postgres", "sql");
        assert!(texts.any(|(_, text)| text.contains(&named)), "{name}");
    }
}

/// The numbers from 10,000 in a line of code.
fn large_numbers(line: &str) -> impl Iterator<Item = u64> {
    let code = line.split("--").next().unwrap_or_default();
    let words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let numbers = words.filter_map(|word| word.parse::<u64>().ok());
    numbers.filter(|number| *number >= 10_000)
}

fn texts(folder: &str, ending: &'static str) -> impl Iterator<Item = (String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let files = std::fs::read_dir(folder).into_iter().flatten();
    let paths = files.map(|file| file.unwrap().path());
    let paths = paths.filter(move |path| path.extension().is_some_and(|of| of == ending));
    paths.map(|path| {
        let text = std::fs::read_to_string(&path).unwrap();
        (path.display().to_string(), text)
    })
}

/// `local NAME = 12` of Lua, `NAME constant bigint := 12` of PL/pgSQL.
fn definition(line: &str) -> Option<(&str, u64)> {
    let line = line.trim().trim_start_matches("local ");
    let (left, right) = line.split_once('=')?;
    let name = left.trim_end_matches(':').split_whitespace().next()?;
    let value = right.trim().trim_end_matches(';');
    Some((name, value.parse().ok()?))
}

// --- the player --------------------------------------------------------------------------------

async fn play_end(d: &Driver, vector: &EndVector) {
    if vector.relaxed {
        let (queue, relaxed) = (queue(), true);
        d.control(ControlCommand::Configure { queue, relaxed })
            .await;
    }
    let mut subject = keyed();
    subject.options.retention = vector.retention;
    subject.options.max_expiries = vector.max_expiries;
    let id = d.enqueue(subject).await;
    for _ in 0..vector.failures {
        let reason = "before".to_owned();
        let delay = Duration::ZERO;
        let held = d.claim_one().await;
        d.settled(&held, Outcome::Retry { delay, reason }).await;
    }
    for _ in 0..vector.expiries {
        d.claim_one().await;
        assert_eq!(d.expire_all().await.len(), 1);
    }
    if let Some(delay) = vector.declined {
        let reason = "before".to_owned();
        let held = d.claim_one().await;
        d.settled(&held, Outcome::Decline { delay, reason }).await;
        d.advance(delay).await;
    }
    let mut request = d.claim_request(1);
    request.admit_suspect = true;
    if vector.by == EndedBy::Expire(Cause::Lifetime) {
        request.queues[0].max_lifetime = TERM / 2;
    }
    let held = Held::all(&d.claim_as(request).await).remove(0);
    assert_eq!(held.id(), id);
    let follower = d.enqueue(keyed()).await;
    let rival = d.enqueue(job()).await;
    if vector.cancel {
        let done = d
            .control(ControlCommand::Cancel(Select::Job(id)))
            .await
            .done;
        assert_eq!(done, 1, "the cancel");
    }
    let before = d.ledger().await;
    end(d, &held, vector).await;
    let counts_as = counted(&before, &d.ledger().await);

    let then = vector.then;
    let state = d.state(id).await;
    let mut seen = Ended {
        counts_as,
        state,
        // Nothing is left to look at.
        failures: then.failures,
        expiries: then.expiries,
        declined: then.declined,
        waits: None,
        is_next: false,
        frees_key: !d.view(follower).await.parked,
        // Found out below: it takes time.
        kept_for: then.kept_for,
    };
    if state.is_some() {
        let job = d.view(id).await.job;
        let last = job.history.last().expect("a history");
        assert_eq!(last.end, counts_as, "the history");
        seen.failures = job.failures;
        seen.expiries = job.expiries;
        let since = job.declined_since;
        seen.declined = since.map(|since| last.ended_at.since(since));
        let waits = state == Some(JobState::Scheduled);
        seen.waits = waits.then(|| job.run_at.since(last.ended_at));
    }
    if state == Some(JobState::Ready) {
        let next = d.claim_one().await.id();
        assert!(next == id || next == rival);
        seen.is_next = next == id;
    }
    assert_eq!(seen, then);
    if state.is_some_and(JobState::is_settled) {
        kept(d, vector, id).await;
    }
}

/// Waits as long as the job is kept, and sees it go; or a century, if it is kept for good.
async fn kept(d: &Driver, vector: &EndVector, id: leasehold::JobId) {
    let moment = Duration::from_micros(1);
    let until = vector.then.kept_for;
    assert_eq!(until.is_none(), vector.then.state == Some(JobState::Dead));
    d.advance(until.map_or(100 * 365 * 24 * 12 * LONG, |until| until - moment))
        .await;
    let d = d.other().await;
    d.prune(1_000).await;
    assert_eq!(d.state(id).await, vector.then.state, "pruned too early");
    if until.is_some() {
        d.advance(moment).await;
        d.prune(1_000).await;
        assert_eq!(d.state(id).await, None, "not pruned");
    }
}

async fn end(d: &Driver, held: &Held, vector: &EndVector) {
    let reason = || "a reason".to_owned();
    let outcome = match vector.by {
        EndedBy::Complete => Outcome::Complete { result: None },
        EndedBy::Retry { delay } => Outcome::Retry {
            delay,
            reason: reason(),
        },
        EndedBy::Surrender { delay, mark_ahead } => {
            // A manual clock stands still: the grant's moment is now.
            let now = d.view(held.id()).await.lease.expect("a lease").granted_at;
            let mark = mark_ahead.map(|ahead| FencingToken::new(now.as_micros() + ahead));
            Outcome::Surrender { delay, mark }
        }
        EndedBy::Decline { delay } => Outcome::Decline {
            delay,
            reason: reason(),
        },
        EndedBy::Bury => Outcome::Bury { reason: reason() },
        EndedBy::Revoke => {
            let revoke = ControlCommand::Revoke(LeaseSelect::Job(held.id()));
            assert_eq!(d.control(revoke).await.done, 1);
            return;
        }
        EndedBy::Expire(Cause::Stalled) => {
            assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
            return;
        }
        EndedBy::Expire(cause) => {
            d.advance(held.granted).await;
            let expired = d.reap(10).await;
            assert_eq!(expired.len(), 1);
            assert_eq!(expired[0].cause, cause);
            return;
        }
    };
    let verdict = d.settle(held, outcome).await;
    let (late, cancel) = (false, vector.cancel);
    assert_eq!(verdict, Verdict::Held { late, cancel });
}

fn keyed() -> NewJob {
    let mut job = job();
    job.exclusive = Some(Key::new("key").unwrap());
    job
}

/// The one end by which a ledger grew.
fn counted(before: &Ledger, after: &Ledger) -> LeaseEnd {
    let of = |ledger: &Ledger| {
        [
            (LeaseEnd::Completed, ledger.completed),
            (LeaseEnd::Retried, ledger.retried),
            (LeaseEnd::Surrendered, ledger.surrendered),
            (LeaseEnd::Buried, ledger.buried),
            (LeaseEnd::Cancelled, ledger.cancelled),
            (LeaseEnd::Expired(Cause::Deadline), ledger.expired_deadline),
            (LeaseEnd::Expired(Cause::Stalled), ledger.expired_stalled),
            (LeaseEnd::Expired(Cause::Lifetime), ledger.expired_lifetime),
            (LeaseEnd::Revoked, ledger.revoked),
        ]
    };
    let grown: Vec<_> = of(before)
        .into_iter()
        .zip(of(after))
        .filter(|((_, before), (_, after))| after > before)
        .map(|((end, before), (_, after))| (end, after - before))
        .collect();
    assert_eq!(grown.len(), 1, "{grown:?}");
    assert_eq!(grown[0].1, 1, "{grown:?}");
    grown[0].0
}

/// With `bounded`, tokens may run only so far ahead of the clock.
async fn play_issue(d: &Driver, vector: &IssueVector, bounded: bool) {
    d.enqueue_many(6_000).await;
    let mut at = 0;
    let mut start = None;
    for claim in &vector.claims {
        let by = Duration::from_micros(claim.at.abs_diff(at));
        if claim.at < at {
            d.set_back(by).await;
        } else {
            d.advance(by).await;
        }
        at = claim.at;
        let request = d.claim_request(usize::try_from(claim.wanted).unwrap());
        let answer = d.store().claim(request).await;
        if claim.granted < claim.wanted && !bounded {
            return;
        }
        let grants = match answer {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::TokensAhead, "{error}");
                assert_eq!(claim.granted, 0, "{claim:?}");
                continue;
            }
            Ok(claimed) => {
                assert_eq!(claimed.clock_behind, claim.clock_behind, "{claim:?}");
                claimed.grants
            }
        };
        let granted: usize = grants.iter().map(|grant| grant.leases.len()).sum();
        assert_eq!(granted as u64, claim.granted, "{claim:?}");
        let start = *start.get_or_insert_with(|| grants[0].granted_at.as_micros());
        assert_eq!(grants[0].id.get() - start, claim.first, "{claim:?}");
    }
}

async fn play_term(d: &Driver, vector: &TermVector) {
    d.enqueue_many(1).await;
    let mut request = d.claim_request(1);
    request.queues[0].term = vector.term;
    request.queues[0].max_lifetime = vector.max_lifetime;
    let held = Held::all(&d.claim_as(request).await).remove(0);
    assert_eq!(held.granted, vector.granted);
    let (mut at, mut left) = (Duration::ZERO, held.granted);
    for (when, gives) in &vector.renewals {
        d.advance(*when - at).await;
        at = *when;
        left = *gives;
        match d.renew(held.beat()).await {
            Renewal::Held { granted, .. } => assert_eq!(granted, *gives),
            Renewal::Fenced => panic!("fenced after {when:?}"),
        }
    }
    d.advance(left - Duration::from_micros(1)).await;
    assert!(d.reap(10).await.is_empty(), "before its time");
    d.advance(Duration::from_micros(1)).await;
    let expired = d.reap(10).await;
    assert_eq!(expired[0].cause, vector.cause);
}

async fn play_claim(d: &Driver, vector: &ClaimVector) {
    // Each is brought to its expiries while it is the only one that is ready, and then put off
    // until all of them fall due, one after the other.
    let mut until_due = 12 * LONG;
    let mut ids = Vec::new();
    for job in &vector.jobs {
        let id = d.enqueue(described(job)).await;
        for _ in 0..job.expiries {
            d.claim_one().await;
            assert_eq!(d.expire_all().await.len(), 1);
            until_due -= TERM;
        }
        let (jobs, delay) = (Select::Job(id), until_due);
        let put_off = ControlCommand::Reschedule { jobs, delay };
        assert_eq!(d.control(put_off).await.done, 1);
        d.advance(Duration::from_micros(1)).await;
        ids.push(id);
    }
    d.advance(until_due).await;
    let d = d.other().await;
    let mut request = d.claim_request(vector.max);
    request.admit_suspect = vector.admit_suspect;
    (request.queues[0].term, request.queues[0].max_lifetime) = vector.terms;
    let at = |id| ids.iter().position(|known| *known == id).expect("a job");
    let claimed = d.claim_as(request).await;
    let grants = claimed.grants.iter().map(|grant| GrantedJobs {
        jobs: grant.leases.iter().map(|lease| at(lease.job.id)).collect(),
        term: grant.term,
        granted: grant.granted,
    });
    assert_eq!(grants.collect::<Vec<_>>(), vector.grants);
    let leases = claimed.grants.iter().flat_map(|grant| &grant.leases);
    let tokens: Vec<_> = leases.map(|lease| lease.token).collect();
    assert!(tokens.is_sorted(), "{tokens:?}");
}

fn described(due: &DueJob) -> NewJob {
    let mut job = job().priority(due.priority);
    job.payload = vec![b' '; due.bytes].into();
    job.options.term = due.term;
    job.options.max_lifetime = due.max_lifetime;
    job
}

async fn play_key(d: &Driver, vector: &KeyVector) {
    let unique = |window: Option<Duration>| match window {
        None => job().unique("key").unwrap(),
        Some(window) => job().unique_for("key", window).unwrap(),
    };
    let bury = async |job: NewJob| {
        let held = d.held(job).await;
        let reason = "a reason".to_owned();
        d.settled(&held, Outcome::Bury { reason }).await;
        held.id()
    };
    let is_duplicate = match vector.wanted_by {
        KeyWanted::Enqueued => {
            let holder = d.enqueue(unique(vector.window)).await;
            d.advance(vector.after).await;
            let answer = d.try_enqueue(vec![unique(None)]).await.unwrap()[0];
            answer == Enqueued::Duplicate(holder)
        }
        KeyWanted::Revived => {
            let dead = bury(unique(None)).await;
            let holder = d.enqueue(unique(vector.window)).await;
            d.advance(vector.after).await;
            revived(d, dead, holder).await
        }
        KeyWanted::Itself => {
            let dead = bury(unique(vector.window)).await;
            d.advance(vector.after).await;
            revived(d, dead, dead).await
        }
    };
    assert_eq!(is_duplicate, vector.is_duplicate);
}

/// Gives a dead job another life. True if it is refused, because of this holder of its key.
async fn revived(d: &Driver, dead: leasehold::JobId, holder: leasehold::JobId) -> bool {
    let retry = ControlCommand::RetryDead(Select::Job(dead));
    let answer = d.control(retry).await;
    let is_refused = answer.duplicates == [(dead, holder)];
    assert_eq!(answer.done, u64::from(!is_refused), "{answer:?}");
    is_refused
}

/// The fixture is told whether its clock is strict.
async fn play_all(fixture: impl AsyncFn(bool) -> ManualFixture, bounded: bool) {
    for vector in vectors::ends() {
        // A failed assertion says where; this says for which row.
        println!("{vector:?}");
        leasehold_conformance::run(fixture(false).await, async |d| play_end(d, &vector).await)
            .await;
    }
    for vector in vectors::issues() {
        println!("{vector:?}");
        leasehold_conformance::run(fixture(vector.strict).await, async |d| {
            play_issue(d, &vector, bounded).await;
        })
        .await;
    }
    for vector in vectors::terms() {
        println!("{vector:?}");
        leasehold_conformance::run(fixture(false).await, async |d| play_term(d, &vector).await)
            .await;
    }
    for vector in vectors::claims() {
        println!("{:?} {:?}", vector.jobs, vector.grants);
        leasehold_conformance::run(fixture(false).await, async |d| play_claim(d, &vector).await)
            .await;
    }
    for vector in vectors::keys() {
        println!("{vector:?}");
        leasehold_conformance::run(fixture(false).await, async |d| play_key(d, &vector).await)
            .await;
    }
}

// --- the stores --------------------------------------------------------------------------------

#[tokio::test]
async fn memory() {
    let fixture = async |_strict| {
        let clock = ManualClock::default();
        ManualFixture::new(MemoryStore::with_clock(clock.clone()), clock)
    };
    play_all(fixture, false).await;
}

#[tokio::test]
async fn sqlite() {
    use leasehold::store::{SqliteOptions, SqliteStore};

    let fixture = async |strict| {
        let clock = ManualClock::default();
        let dir = tempfile::tempdir().unwrap();
        let options = SqliteOptions::new().clock(clock.clone());
        let mut options = options.synchronous_normal();
        if strict {
            options = options.strict_clock();
        }
        let store = SqliteStore::with(dir.path().join("jobs.db"), options).unwrap();
        ManualFixture::new(store, clock).keep(dir)
    };
    play_all(fixture, true).await;
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn postgres() {
    let fixture = async |strict| {
        let clock = ManualClock::default();
        let server = server::shared();
        let mut options = server::Server::options().clock(clock.clone());
        if strict {
            options = options.strict_clock();
        }
        let store = PostgresStore::with(server.config(), options).await;
        let store = store.unwrap();
        ManualFixture::new(store, clock)
    };
    play_all(fixture, true).await;
}

#[cfg(unix)]
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn redis() {
    use leasehold::job::Namespace;
    use leasehold::store::{RedisOptions, RedisStore};
    use support::redis::Standalone;

    let server = Standalone::start(&[]);
    let fixture = async |strict| {
        let clock = ManualClock::default();
        let namespace = Namespace::new(format!("case-{:016x}", fastrand::u64(..))).unwrap();
        let mut options = RedisOptions::new(format!("{}?timeout=60s", server.url()))
            .namespace(namespace)
            .clock(clock.clone());
        if strict {
            options = options.strict_clock();
        }
        ManualFixture::new(RedisStore::open(options).unwrap(), clock)
    };
    play_all(fixture, true).await;
}
