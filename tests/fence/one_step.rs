//! Effect and settlement in one script, on a real Redis server and on a cluster.

use std::sync::Arc;
use std::time::Duration;

use leasehold::atomic_redis::RedisContext as _;
use leasehold::clock::ManualClock;
use leasehold::fence::redis::Commands;
use leasehold::job::{JobState, Namespace};
use leasehold::lease::Verdict;
use leasehold::store::MemoryStore;
use leasehold::store::{
    Checkpoint, Checkpointed, ControlCommand, LeaseSelect, Outcome, RedisOptions, RedisStore,
    RequestId, Select, acl_rule,
};
use leasehold::{Client, Context, Error, ErrorKind, Failure, NewJob, Result};
use leasehold_conformance::{Driver, Held, ManualFixture, TERM, job, queue};

use crate::assert_completed_in_doubt;
use crate::paying::{Pay, run};
use leasehold_support::proxy::{Mode, Proxy};

use crate::redis_server::{Cluster, STEADY, Server, Standalone};

/// A store whose clock goes by hand, and the hand.
async fn driven(url: &str) -> (RedisStore, Driver) {
    let clock = ManualClock::default();
    let options = RedisOptions::new(url).clock(clock.clone());
    let store = RedisStore::open(options).unwrap();
    let fixture = ManualFixture::new(store.clone(), clock);
    (store, Driver::new(Arc::new(fixture)).await)
}

fn text(server: &Server, key: &str) -> Option<String> {
    server.tell(&["GET", key])
}

async fn complete(
    store: &RedisStore,
    request: RequestId,
    held: &Held,
    commands: Commands,
) -> Result<Verdict> {
    store
        .complete_with(request, &held.receipt, None, &commands)
        .await
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_stale_owner_is_refused_and_writes_nothing() {
    let server = Standalone::start(&[]);
    let (store, d) = driven(server.url()).await;
    let balance = store.data_key(&queue(), 0, "balance");
    let debit = || {
        Commands::new()
            .incr_by(&balance, -10)
            .rpush(format!("{balance}:log"), "x")
    };

    // Overdue and not replaced: nobody else was granted.
    let late = d.held(job()).await;
    d.advance(TERM * 2).await;
    let verdict = complete(&store, d.request(), &late, debit()).await.unwrap();
    assert_eq!(
        verdict,
        Verdict::Held {
            late: true,
            cancel: false
        }
    );

    // Replaced.
    let old = d.held(job()).await;
    d.advance(TERM * 2).await;
    let new = d.claim_one().await;
    assert_eq!(new.id(), old.id());
    d.unchanged(async || {
        let verdict = complete(&store, d.request(), &old, debit()).await.unwrap();
        assert_eq!(verdict, Verdict::Fenced);
    })
    .await;
    // A receipt of a partition that is not there is nobody's either.
    let mut other = new.clone();
    other.receipt = elsewhere(&new);
    let key = store.data_key(&queue(), 7, "balance");
    let set = Commands::new().set(&key, "x");
    let verdict = complete(&store, d.request(), &other, set).await.unwrap();
    assert_eq!(
        (verdict, text(&server.server, &key)),
        (Verdict::Fenced, None)
    );
    assert_eq!(text(&server.server, &balance).as_deref(), Some("-10"));

    let verdict = complete(&store, d.request(), &new, debit()).await.unwrap();
    assert!(verdict.is_held());
    assert_eq!(text(&server.server, &balance).as_deref(), Some("-20"));
    let ledger = d.ledger().await;
    assert_eq!((ledger.completed, ledger.late, ledger.live), (2, 1, 0));
    assert!(ledger.balances(), "{ledger:?}");
}

/// The same receipt, of a partition that the queue does not have.
fn elsewhere(held: &Held) -> leasehold::lease::Receipt {
    let text = held.receipt.to_string();
    text.replacen("/0/", "/7/", 1).parse().unwrap()
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_repeat_by_its_request_id_is_applied_once() {
    let server = Standalone::start(&[]);
    let (store, d) = driven(server.url()).await;
    let n = store.data_key(&queue(), 0, "n");
    let count = || Commands::new().incr_by(&n, 1);
    let held = d.held(job()).await;
    let request = d.request();
    for _ in 0..3 {
        let verdict = complete(&store, request, &held, count()).await.unwrap();
        assert!(verdict.is_held());
    }
    assert_eq!(text(&server.server, &n).as_deref(), Some("1"));
    // Under another id it is a call with a receipt that has been used.
    let verdict = complete(&store, d.request(), &held, count()).await.unwrap();
    assert_eq!(verdict, Verdict::Fenced);
    assert_eq!(text(&server.server, &n).as_deref(), Some("1"));
    let overtaken = complete(&store, request, &held, count()).await.unwrap_err();
    assert_eq!(overtaken.kind(), ErrorKind::SessionLost);

    // A refusal is an answer too: the same call gets it again, whatever has changed meanwhile.
    let held = d.held(job()).await;
    let request = d.request();
    server.server.tell::<()>(&["SET", &n, "text"]);
    let refused = complete(&store, request, &held, count()).await.unwrap_err();
    server.server.tell::<()>(&["SET", &n, "5"]);
    let again = complete(&store, request, &held, count()).await.unwrap_err();
    assert_eq!(refused.to_string(), again.to_string());
    assert_eq!(text(&server.server, &n).as_deref(), Some("5"));
    let verdict = complete(&store, d.request(), &held, count()).await.unwrap();
    assert!(verdict.is_held());
    assert_eq!(text(&server.server, &n).as_deref(), Some("6"));
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn what_would_fail_is_refused_before_the_first_write_and_the_lease_is_still_held() {
    let server = Standalone::start(&[]);
    let (store, d) = driven(server.url()).await;
    let key = |name: &str| store.data_key(&queue(), 0, name);
    let [touched, list, name] = ["touched", "list", "name"].map(key);
    server.server.tell::<()>(&["RPUSH", &list, "a"]);
    server.server.tell::<()>(&["SET", &name, "hello"]);
    let held = d.held(job()).await;
    let touch = || Commands::new().set(&touched, "x");
    for (wrong, field, commands) in [
        ("a list is no number", "commands", touch().incr_by(&list, 1)),
        ("a text is no number", "commands", touch().incr_by(&name, 1)),
        ("a text is no set", "commands", touch().sadd(&name, "a")),
        (
            "gone by then",
            "commands",
            touch().del(&list).rpush(&list, "b"),
        ),
        ("an answer for nobody", "commands", touch().get(&name)),
        ("another slot", "key", touch().set("{other}:key", "x")),
        (
            "another partition",
            "key",
            touch().set(store.data_key(&queue(), 1, "n"), "x"),
        ),
        ("no tag", "key", touch().set("key", "x")),
        (
            "the queue's own",
            "key",
            touch().del("{leasehold:default:0}:meta"),
        ),
        (
            "a session's",
            "key",
            touch().del("{leasehold:default:0}:s:1"),
        ),
        (
            "too many",
            "commands",
            (0..1_000).fold(touch(), |all, _| all.del(&list)),
        ),
    ] {
        let refused: Error = complete(&store, d.request(), &held, commands)
            .await
            .unwrap_err();
        assert_eq!(
            refused.kind(),
            ErrorKind::InvalidInput,
            "{wrong}: {refused}"
        );
        assert_eq!(refused.field(), Some(field), "{wrong}: {refused}");
        assert_eq!(text(&server.server, &touched), None, "{wrong}");
        assert_eq!(d.state(held.id()).await, Some(JobState::Leased), "{wrong}");
    }
    // A key anywhere in the slot will do.
    let mine = "orders:{leasehold:default:0}:7";
    let all = touch()
        .set(mine, "x")
        .del(&list)
        .expire(&name, Duration::from_secs(60));
    let verdict = complete(&store, d.request(), &held, all).await.unwrap();
    assert!(verdict.is_held());
    assert!(text(&server.server, &touched).is_some() && text(&server.server, mine).is_some());
    assert_eq!(server.server.tell::<i64>(&["EXISTS", &list]), 0);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_command_that_the_user_may_not_run_or_the_server_cannot_hold_writes_nothing() {
    let rule = acl_rule(&Namespace::default());
    let server = Standalone::with_acl(&format!("{rule} +type +incrby"));
    let (store, d) = driven(server.url()).await;
    let [n, set] = ["n", "set"].map(|name| store.data_key(&queue(), 0, name));
    let held = d.held(job()).await;
    let both = Commands::new().incr_by(&n, 1).sadd(&set, "a");
    let refused = complete(&store, d.request(), &held, both)
        .await
        .unwrap_err();
    assert_eq!(refused.field(), Some("commands"), "{refused}");
    assert!(refused.to_string().contains("may not"), "{refused}");
    assert_eq!(text(&server.server, &n), None);

    let count = || Commands::new().incr_by(&n, 1);
    let memory = |limit| {
        server
            .server
            .tell::<()>(&["CONFIG", "SET", "maxmemory", limit]);
    };
    memory("1");
    let full = complete(&store, d.request(), &held, count())
        .await
        .unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Full, "{full}");
    memory("0");
    assert_eq!(text(&server.server, &n), None);
    let verdict = complete(&store, d.request(), &held, count()).await.unwrap();
    assert!(verdict.is_held());
    assert_eq!(text(&server.server, &n).as_deref(), Some("1"));
}

/// A checkpoint of that number.
fn state(held: &Held, seq: u64) -> Checkpoint {
    Checkpoint {
        receipt: held.receipt.clone(),
        seq,
        bytes: format!("{{\"done\":{seq}}}").into(),
    }
}

const SAVED: Checkpointed = Checkpointed::Saved {
    late: false,
    cancel: false,
};

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_checkpoint_is_saved_with_its_commands_or_neither_is() {
    let server = Standalone::start(&[]);
    let (store, d) = driven(server.url()).await;
    let [n, name] = ["n", "name"].map(|name| store.data_key(&queue(), 0, name));
    let count = || Commands::new().incr_by(&n, 1);
    let old = d.held(job()).await;
    let save = async |held: &Held, request, seq, commands: Commands| {
        let state = state(held, seq);
        store.checkpoint_with(request, &state, &commands).await
    };

    // A repeat by its id, and the same number under another id, run nothing more.
    let request = d.request();
    for _ in 0..2 {
        assert_eq!(save(&old, request, 1, count()).await.unwrap(), SAVED);
    }
    assert_eq!(save(&old, d.request(), 1, count()).await.unwrap(), SAVED);
    assert_eq!(text(&server.server, &n).as_deref(), Some("1"));
    assert_eq!(save(&old, d.request(), 5, count()).await.unwrap(), SAVED);
    let behind = save(&old, d.request(), 4, count()).await.unwrap();
    assert_eq!(behind, Checkpointed::Behind { seq: 5 });
    assert_eq!(text(&server.server, &n).as_deref(), Some("2"));

    // What would fail saves nothing, and the lease is still held.
    server.server.tell::<()>(&["SET", &name, "text"]);
    let wrong = count().incr_by(&name, 1);
    let refused = save(&old, d.request(), 6, wrong).await.unwrap_err();
    assert_eq!(refused.field(), Some("commands"), "{refused}");
    assert_eq!(text(&server.server, &n).as_deref(), Some("2"));

    // The next owner starts from what was saved, and the old one writes nothing more.
    d.advance(TERM * 2).await;
    let new = d.claim_one().await;
    let saved = d.view(new.id()).await.job.checkpoint.clone().unwrap();
    assert_eq!((saved.seq, saved.token), (5, old.token()));
    d.unchanged(async || {
        let stale = save(&old, d.request(), 7, count()).await.unwrap();
        assert_eq!(stale, Checkpointed::Fenced);
    })
    .await;
    assert_eq!(text(&server.server, &n).as_deref(), Some("2"));
    assert_eq!(save(&new, d.request(), 1, count()).await.unwrap(), SAVED);
    assert_eq!(text(&server.server, &n).as_deref(), Some("3"));
}

/// The type of key that a command takes, and the command.
type Write = (&'static str, fn(Commands, &str) -> Commands);

/// Values that only look like numbers, and keys of every type: what the script lets through, the
/// server carries out. A command that failed half-way would leave the ones before it behind.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_step_is_done_as_a_whole_or_not_at_all() {
    let server = Standalone::start(&[]);
    let tell = |words: &[&str]| server.server.tell::<redis::Value>(words);
    let (store, d) = driven(server.url()).await;
    let key = |name: &str| store.data_key(&queue(), 0, name);
    let (list, n, h) = (key("list"), key("n"), key("h"));
    let numbers = ["0", "-1", "41", "4503599627370496"];
    let others = [
        "007",
        "-0",
        "00",
        "+1",
        "",
        " 1",
        "1 ",
        "1.0",
        "1e3",
        "0x10",
        "-",
        "4503599627370497",
        "9223372036854775807",
        "-9223372036854775808",
        "1\0",
    ];
    let run = async |commands: &dyn Fn(Commands) -> Commands| {
        tell(&["DEL", &list]);
        let held = d.held(job()).await;
        let step = commands(Commands::new().lpush(&list, "x"));
        let completed = complete(&store, d.request(), &held, step).await;
        let pushed: u64 = server.server.tell(&["LLEN", &list]);
        match completed {
            Ok(verdict) => {
                assert!(verdict.is_held());
                assert_eq!(pushed, 1);
                true
            }
            Err(error) => {
                assert_eq!(error.field(), Some("commands"), "{error}");
                assert_eq!(pushed, 0, "{error}");
                d.settled(&held, Outcome::Complete { result: None }).await;
                false
            }
        }
    };
    let all = numbers.iter().map(|value| (*value, true));
    for (value, is_number) in all.chain(others.iter().map(|value| (*value, false))) {
        for by in [1, -1, i64::MAX, i64::MIN] {
            let is_fine = is_number && by.unsigned_abs() == 1;
            tell(&["SET", &n, value]);
            assert_eq!(run(&|c| c.incr_by(&n, by)).await, is_fine, "{value:?} {by}");
            tell(&["HSET", &h, "f", value]);
            let counted = run(&|c| c.hincr_by(&h, "f", by)).await;
            assert_eq!(counted, is_fine, "{value:?} {by} in a hash");
        }
    }
    // Each command on a key of each type, and on none.
    let made: [(&str, &[&str]); 6] = [
        ("none", &["DEL", "k"]),
        ("string", &["SET", "k", "1"]),
        ("hash", &["HSET", "k", "f", "1"]),
        ("list", &["RPUSH", "k", "1"]),
        ("set", &["SADD", "k", "1"]),
        ("zset", &["ZADD", "k", "1", "1"]),
    ];
    let writes: [Write; 12] = [
        ("any", |c, k| c.set(k, "v")),
        ("any", |c, k| c.del(k)),
        ("any", |c, k| c.expire(k, Duration::MAX)),
        ("string", |c, k| c.incr_by(k, 1)),
        ("hash", |c, k| c.hset(k, "f", "v")),
        ("hash", |c, k| c.hdel(k, "f").hset(k, "f", "v")),
        ("hash", |c, k| c.hincr_by(k, "f", 1)),
        ("list", |c, k| c.rpush(k, "v")),
        ("set", |c, k| c.sadd(k, "v").srem(k, "v")),
        ("set", |c, k| c.srem(k, "1").sadd(k, "1")),
        ("zset", |c, k| c.zadd(k, i64::MAX, "v")),
        ("zset", |c, k| c.zrem(k, "1").zadd(k, 1, "1")),
    ];
    let k = key("k");
    for (kind, make) in made {
        for (at, (wants, write)) in writes.iter().enumerate() {
            tell(&["DEL", &k]);
            let words: Vec<&str> = make
                .iter()
                .map(|word| if *word == "k" { &*k } else { word })
                .collect();
            tell(&words);
            let is_fine = kind == "none" || *wants == "any" || *wants == kind;
            assert_eq!(
                run(&|c| write(c, &k)).await,
                is_fine,
                "write {at} on a {kind}"
            );
        }
    }
}

/// What is said of the lease, what is counted, and what a repeat gets.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_checkpoint_with_commands_is_answered_as_any_other() {
    let server = Standalone::start(&[]);
    let (store, d) = driven(server.url()).await;
    let n = store.data_key(&queue(), 0, "n");
    let save = async |held: &Held, request, seq| {
        let (state, count) = (state(held, seq), Commands::new().incr_by(&n, 1));
        store.checkpoint_with(request, &state, &count).await
    };
    let told = |late, cancel| Checkpointed::Saved { late, cancel };
    let held = d.held(job()).await;
    let instant = Duration::from_micros(1);
    d.advance(TERM.checked_sub(instant).unwrap()).await;
    let saved = save(&held, d.request(), 1).await.unwrap();
    assert_eq!(saved, told(false, false));
    d.advance(instant).await;
    let saved = save(&held, d.request(), 2).await.unwrap();
    assert_eq!(saved, told(true, false));
    // A number that is saved already tells as much.
    let saved = save(&held, d.request(), 2).await.unwrap();
    assert_eq!(saved, told(true, false));
    d.control(ControlCommand::Cancel(Select::Job(held.id())))
        .await;
    let saved = save(&held, d.request(), 3).await.unwrap();
    assert_eq!(saved, told(true, true));
    assert_eq!(text(&server.server, &n).as_deref(), Some("3"));

    // A refusal is an answer too, whatever has changed meanwhile.
    let request = d.request();
    server.server.tell::<()>(&["SET", &n, "text"]);
    let refused = save(&held, request, 4).await.unwrap_err();
    server.server.tell::<()>(&["SET", &n, "5"]);
    let again = save(&held, request, 4).await.unwrap_err();
    assert_eq!(refused.to_string(), again.to_string());
    assert_eq!(text(&server.server, &n).as_deref(), Some("5"));

    d.reap(9).await;
    let fenced = d.ledger().await.fenced;
    let request = d.request();
    for _ in 0..2 {
        let stale = save(&held, request, 5).await.unwrap();
        assert_eq!(stale, Checkpointed::Fenced);
    }
    assert_eq!(d.ledger().await.fenced, fenced + 1, "counted once");
    assert_eq!(text(&server.server, &n).as_deref(), Some("5"));
}

/// A partition that has forgotten the session may have run the commands before: it runs none.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_partition_that_forgot_runs_no_commands() {
    let server = Standalone::start(&[]);
    let (store, d) = driven(server.url()).await;
    let n = store.data_key(&queue(), 0, "n");
    let count = || Commands::new().incr_by(&n, 1);
    let held = d.held(job()).await;
    let memory: Vec<String> = server.server.tell(&["KEYS", "{*:default:0}:s:*"]);
    assert_eq!(memory.len(), 1, "{memory:?}");
    server.server.tell::<()>(&["DEL", &memory[0]]);
    let state = state(&held, 1);
    let saved = store.checkpoint_with(d.request(), &state, &count()).await;
    assert_eq!(saved.unwrap_err().kind(), ErrorKind::SessionLost);
    let done = complete(&store, d.request(), &held, count()).await;
    assert_eq!(done.unwrap_err().kind(), ErrorKind::SessionLost);
    assert_eq!(text(&server.server, &n), None);
    assert_eq!(d.view(held.id()).await.job.checkpoint, None);

    // Control arm: in a session of its own the same holder gets it done.
    let other = d.other().await;
    let saved = store
        .checkpoint_with(other.request(), &state, &count())
        .await;
    assert_eq!(saved.unwrap(), SAVED);
    let done = complete(&store, other.request(), &held, count()).await;
    assert!(done.unwrap().is_held());
    assert_eq!(text(&server.server, &n).as_deref(), Some("2"));
}

fn client(url: &str, partitions: u16) -> Client {
    let options = RedisOptions::new(url).partitions(partitions);
    Client::new(Arc::new(RedisStore::open(options).unwrap()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_handler_completes_with_its_commands_and_nothing_else_settles_it() {
    let server = Standalone::start(&[]);
    let client = client(server.url(), 1);
    let jobs = (0..200).map(|n| NewJob::of(&Pay { n }).unwrap());
    let jobs = client.enqueue_many(jobs).await.unwrap();
    let handler = |job: Pay, ctx: Context, run: usize| async move {
        ctx.set_result(&job.n)?;
        let paid = Commands::new().hincr_by(ctx.data_key("paid")?, job.n.to_string(), 1);
        ctx.complete_with(paid).await?;
        // Whatever comes after that, the job is completed.
        if run.is_multiple_of(2) {
            Ok(())
        } else {
            Err(Failure::from("too late"))
        }
    };
    let ledger = run(&client, 8, handler, |ledger| ledger.completed == 200).await;
    let ends = (ledger.granted, ledger.retried, ledger.fenced);
    assert_eq!(ends, (200, 0, 0));
    let key = "{leasehold:default:0}:data:paid";
    let paid: Vec<u64> = server.server.tell(&["HVALS", key]);
    assert_eq!(paid, [1; 200]);
    let view = client.job(jobs[7].id()).await.unwrap().unwrap();
    assert_eq!(view.state, JobState::Completed);
    assert_eq!(view.job.result.as_ref().unwrap(), "7");
    // The lanes are used again: the partition remembers no more calls than there were slots, and
    // the pool's own.
    let sessions: Vec<String> = server.server.tell(&["KEYS", "{leasehold:default:0}:s:*"]);
    for session in sessions {
        let lanes: usize = server.server.tell(&["HLEN", &session]);
        assert!(lanes < 20, "{lanes} lanes for 8 slots");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_handler_whose_lease_is_somebody_elses_ends_as_lost_and_a_wrong_command_as_a_failure() {
    let server = Standalone::start(&[]);
    let client = client(server.url(), 1);
    let id = client.enqueue(&Pay { n: 1 }).await.unwrap().id();
    let control = client.clone();
    let handler = move |job: Pay, ctx: Context, run: usize| {
        let client = control.clone();
        async move {
            let key = ctx.data_key(job.n)?;
            let paid = Commands::new().incr_by(&key, 1);
            match run {
                0 => {
                    let revoke = ControlCommand::Revoke(LeaseSelect::Job(id));
                    client
                        .operator("test")
                        .because("stale")
                        .command(revoke)
                        .await?;
                    let completed = ctx.complete_with(paid).await;
                    assert!(completed.as_ref().is_err_and(Failure::is_lost));
                    completed
                }
                1 => {
                    let completed = ctx.complete_with(paid.set("{b}", "x")).await;
                    assert!(completed.as_ref().is_err_and(|failure| !failure.is_lost()));
                    completed
                }
                _ => ctx.complete_with(paid).await,
            }
        }
    };
    let ledger = run(&client, 8, handler, |ledger| ledger.completed == 1).await;
    let ends = (ledger.granted, ledger.revoked, ledger.retried);
    assert_eq!((ends, ledger.fenced), ((3, 1, 1), 1));
    let paid = text(&server.server, "{leasehold:default:0}:data:1");
    assert_eq!(paid.as_deref(), Some("1"));
}

/// The server completes the job, its answer is lost, and then it forgets the session: the repeat is
/// refused, and nobody can tell any more whose completion it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_completion_whose_answer_is_lost_for_good_is_in_doubt_and_no_stale_holders() {
    let server = Arc::new(Standalone::start(&[]));
    let proxy = Arc::new(Proxy::start(server.server.port()).await);
    let client = client(&format!("redis://127.0.0.1:{}", proxy.port()), 1);
    client.enqueue(&Pay { n: 1 }).await.unwrap();
    let (redis, way) = (Arc::clone(&server), Arc::clone(&proxy));
    let handler = move |_: Pay, ctx: Context| {
        let (redis, proxy) = (Arc::clone(&redis), Arc::clone(&way));
        async move {
            let key = ctx.data_key("n")?;
            proxy.set(Mode::DropReplies);
            let forget = async {
                while text(&redis.server, &key).is_none() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let sessions: Vec<String> = redis.server.tell(&["KEYS", "*}:s:*"]);
                for session in sessions {
                    redis.server.tell::<()>(&["DEL", &session]);
                }
                proxy.set(Mode::Pass);
            };
            let complete = ctx.complete_with(Commands::new().incr_by(&key, 1));
            let (completed, ()) = tokio::join!(complete, forget);
            let failure = completed.unwrap_err();
            assert!(!failure.is_lost(), "it is not known to be lost");
            let said = format!("{failure:?}");
            assert!(said.contains("may or may not"), "{said}");
            Err::<(), Failure>(failure)
        }
    };
    assert_completed_in_doubt(&client, client.worker().handle(handler)).await;
    let n = text(&server.server, "{leasehold:default:0}:data:n");
    assert_eq!(n.as_deref(), Some("1"));
}

/// How often each of six steps was done by a job that loses its lease twice, amid a step. In one
/// step with its checkpoint, or before it.
async fn steps_done(together: bool) -> Vec<u64> {
    let server = Arc::new(Standalone::start(&[]));
    let client = client(server.url(), 1);
    let id = client.enqueue(&Pay { n: 1 }).await.unwrap().id();
    let (control, redis) = (client.clone(), Arc::clone(&server));
    let handler = move |_: Pay, ctx: Context, run: usize| {
        let (client, redis) = (control.clone(), Arc::clone(&redis));
        async move {
            let paid = ctx.data_key("paid")?;
            let done: usize = ctx.last_checkpoint()?.unwrap_or_default();
            for step in done..6 {
                let field = step.to_string();
                if !together {
                    let pay = ["HINCRBY", &paid, &field, "1"];
                    redis.server.tell::<i64>(&pay);
                }
                let lost = run < 2 && step == 2 * (run + 1);
                if lost {
                    let revoke = ControlCommand::Revoke(LeaseSelect::Job(id));
                    client
                        .operator("test")
                        .because("stale")
                        .command(revoke)
                        .await?;
                }
                let saved = if together {
                    let pay = Commands::new().hincr_by(&paid, field, 1);
                    ctx.save_checkpoint_with(&(step + 1), pay).await
                } else {
                    ctx.save_checkpoint(&(step + 1)).await
                };
                assert_eq!(saved.is_err(), lost);
                saved?;
            }
            Ok(())
        }
    };
    let ledger = run(&client, 8, handler, |ledger| ledger.completed == 1).await;
    assert_eq!((ledger.granted, ledger.revoked, ledger.retried), (3, 2, 0));
    let paid = (0..6).map(|step| {
        let field = step.to_string();
        let read = ["HGET", "{leasehold:default:0}:data:paid", &field];
        server.server.tell(&read)
    });
    paid.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_long_job_does_each_of_its_steps_once_though_it_loses_its_lease() {
    assert_eq!(steps_done(true).await, [1; 6]);
    // The control arm: what is saved after it was done is done again.
    assert_eq!(steps_done(false).await, [1, 1, 2, 1, 2, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn on_a_cluster_the_data_of_each_partition_is_in_its_slot() {
    let cluster = Cluster::start(STEADY);
    let client = client(&cluster.url(), 4);
    let jobs = (0..80).map(|n| {
        let job = NewJob::of(&Pay { n }).unwrap();
        job.exclusive(format!("account {}", n % 8)).unwrap()
    });
    client.enqueue_many(jobs).await.unwrap();
    let handler = |job: Pay, ctx: Context, _: usize| async move {
        let paid = ctx.data_key("paid")?;
        ctx.complete_with(Commands::new().hincr_by(paid, job.n.to_string(), 1))
            .await
    };
    let ledger = run(&client, 8, handler, |ledger| ledger.completed == 80).await;
    assert_eq!((ledger.granted, ledger.fenced), (80, 0));
    let (mut paid, mut partitions) = (Vec::<u64>::new(), 0);
    for partition in 0..4 {
        let key = format!("{{leasehold:default:{partition}}}:data:paid");
        let node = &cluster.nodes[cluster.owner_of(&key)];
        let here: Vec<u64> = node.tell(&["HVALS", &key]);
        partitions += usize::from(!here.is_empty());
        paid.extend(here);
    }
    assert_eq!(paid, [1; 80]);
    assert!(partitions > 1, "all in one partition");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_store_than_redis_has_no_such_step() {
    let client = Client::new(Arc::new(MemoryStore::new()));
    client.enqueue(&Pay { n: 1 }).await.unwrap();
    let handler = |_: Pay, ctx: Context, run: usize| async move {
        if run > 0 {
            return Ok(());
        }
        assert!(ctx.data_key("n").is_err());
        let completed = ctx.complete_with(Commands::new().set("n", "1")).await;
        assert!(!completed.as_ref().unwrap_err().is_lost());
        completed
    };
    let ledger = run(&client, 8, handler, |ledger| ledger.completed == 1).await;
    assert_eq!((ledger.granted, ledger.retried), (2, 1));
}
