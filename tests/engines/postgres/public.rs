//! The functions and views that every language can use, and what a role may do with them.

use std::sync::Arc;
use std::time::Duration;

use leasehold::job::{JobState, Kind, QueueName};
use leasehold::lease::{Nonce, Receipt, Verdict};
use leasehold::store::{Outcome, PostgresOptions, PostgresStore, SettleRequest};
use leasehold::{Client, NewJob, Store as _};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Config, NoTls, SimpleQueryMessage};

use super::{Caller, complete, server};

/// A database of the test's own, with a store in it.
struct Place {
    config: Config,
    db: tokio_postgres::Client,
    store: PostgresStore,
}

pub(super) async fn connect(config: &Config) -> tokio_postgres::Client {
    let (db, connection) = config.connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    db
}

/// An empty database.
pub(super) async fn database(name: &str) -> Config {
    let server = server::shared();
    let admin = server.client().await;
    let made = format!("CREATE DATABASE {name}");
    admin.batch_execute(&made).await.unwrap();
    let mut config = server.config();
    config.dbname(name);
    config
}

impl Place {
    async fn new(name: &str) -> Self {
        let config = database(name).await;
        let options = PostgresOptions::new().connections(4).migrate();
        let store = PostgresStore::with(config.clone(), options).await.unwrap();
        let db = connect(&config).await;
        Self { config, db, store }
    }

    /// The first column of the only row.
    async fn one(&self, sql: &str) -> String {
        one(&self.db, sql).await.unwrap()
    }

    async fn count(&self, sql: &str) -> i64 {
        self.one(&format!("SELECT count(*) FROM {sql}"))
            .await
            .parse()
            .unwrap()
    }

    async fn refusal(&self, sql: &str) -> tokio_postgres::Error {
        one(&self.db, sql).await.expect_err(sql)
    }
}

pub(super) async fn one(
    db: &tokio_postgres::Client,
    sql: &str,
) -> Result<String, tokio_postgres::Error> {
    let rows = db.simple_query(sql).await?;
    let row = rows.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(ToOwned::to_owned),
        _ => None,
    });
    Ok(row.unwrap_or_default())
}

fn stale() -> SqlState {
    SqlState::from_code("LH001")
}

const CLAIM: &str = "SELECT receipt FROM leasehold.claim(ARRAY['mail'], 1, 'psql')";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn both_sides_enqueue_claim_and_complete_for_each_other() {
    let place = Place::new("both_sides").await;
    let id = place
        .one(r#"SELECT id FROM leasehold.enqueue('default', 'work', '{"to": "ann"}', '{"priority": 2, "retention": "1 hour"}')"#)
        .await;
    let mut caller = Caller::new(place.store.clone()).await;
    let grants = caller.claim(10, Duration::from_secs(60)).await;
    let lease = &grants[0].leases[0];
    assert_eq!(lease.job.id.to_string(), id);
    assert_eq!(&lease.job.payload[..], br#"{"to": "ann"}"#);
    assert_eq!(lease.job.options.priority, 2);
    assert_eq!(lease.job.options.retention, Some(Duration::from_secs(3600)));
    // The worker's receipt is good for a program in another language.
    let receipt = grants[0].receipt(lease).to_string();
    place
        .one(&format!("SELECT leasehold.complete('{receipt}', '[1]')"))
        .await;
    let shown = format!("SELECT state || ' ' || result FROM leasehold.job('{id}')");
    assert_eq!(place.one(&shown).await, "completed [1]");

    // And the other way round.
    caller.enqueue(1).await;
    let claim = "SELECT receipt FROM leasehold.claim(ARRAY['default'], 5, 'psql', '20 seconds')";
    let receipt: Receipt = place.one(claim).await.parse().unwrap();
    let request = caller.request();
    let settlements = vec![complete(receipt)];
    let settle = SettleRequest {
        request,
        settlements,
    };
    let verdicts = place.store.settle(settle).await.unwrap();
    assert!(
        matches!(verdicts[..], [Verdict::Held { .. }]),
        "{verdicts:?}"
    );
    assert_eq!(place.count("leasehold.leases").await, 0);
}

/// A program that names its own wait does not run a broken job for ever.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_failure_with_a_wait_of_its_own_counts_toward_the_limit() {
    let place = Place::new("own_wait").await;
    for (limit, state) in [(1, "dead"), (2, "scheduled")] {
        let enqueue = format!(
            "SELECT id FROM leasehold.enqueue('mail', 'work', '1', '{{\"max_failures\": {limit}}}')"
        );
        place.one(&enqueue).await;
        let receipt = place.one(CLAIM).await;
        let fail = format!("SELECT leasehold.fail('{receipt}', 'broken', '1 hour')");
        assert_eq!(place.one(&fail).await, state);
    }
}

/// Workers write "found nothing" without waiting for the disk. What a program does in the
/// transaction in which it looks for a job is as durable as it was.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_claim_of_nothing_leaves_its_transaction_as_durable() {
    let mut place = Place::new("durable").await;
    let tx = place.db.transaction().await.unwrap();
    let found = tx.query(CLAIM, &[]).await.unwrap();
    assert!(found.is_empty());
    let row = tx.query_one("SHOW synchronous_commit", &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "on");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_stale_owner_cannot_commit() {
    let place = Place::new("stale_owner").await;
    place
        .db
        .batch_execute("CREATE TABLE account (balance int); INSERT INTO account VALUES (0)")
        .await
        .unwrap();
    place
        .one("SELECT id FROM leasehold.enqueue('mail', 'work', '1')")
        .await;
    let first = place.one(CLAIM).await;
    let revoked = "SELECT leasehold.surrender((SELECT '%'))".replace('%', &first);
    place.one(&revoked).await;
    let second = place.one(CLAIM).await;
    for call in [
        "leasehold.complete('%')",
        "leasehold.fail('%', 'broken')",
        "leasehold.fail('%', 'broken', bury => true)",
        "leasehold.surrender('%')",
        "leasehold.snooze('%', '1 minute')",
        "leasehold.checkpoint('%', 1, '{}')",
        "leasehold.begin('%')",
    ] {
        let call = format!("SELECT {}", call.replace('%', &first));
        place
            .db
            .batch_execute("BEGIN; UPDATE account SET balance = balance + 1")
            .await
            .unwrap();
        let error = place.refusal(&call).await;
        assert_eq!(error.code(), Some(&stale()), "{call}: {error:?}");
        // Whatever the program does with the error: the server keeps nothing.
        place.db.batch_execute("COMMIT").await.unwrap();
        assert_eq!(
            place.one("SELECT balance FROM account").await,
            "0",
            "{call}"
        );
    }
    let held = format!("SELECT held FROM leasehold.renew(ARRAY['{first}', '{second}'])");
    let held: Vec<String> = rows(&place.db, &held).await;
    assert_eq!(held, ["f", "t"]);
    // The control: without the call the zombie's update lands.
    place
        .db
        .batch_execute("BEGIN; UPDATE account SET balance = balance + 1; COMMIT")
        .await
        .unwrap();
    assert_eq!(place.one("SELECT balance FROM account").await, "1");
    place
        .one(&format!("SELECT leasehold.complete('{second}')"))
        .await;
}

async fn rows(db: &tokio_postgres::Client, sql: &str) -> Vec<String> {
    let messages = db.simple_query(sql).await.unwrap();
    let texts = messages.iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => {
            let cells = (0..row.len()).map(|at| row.get(at).unwrap_or_default());
            Some(cells.collect::<Vec<_>>().join(" "))
        }
        _ => None,
    });
    texts.collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_fence_refuses_whoever_has_been_replaced() {
    let place = Place::new("sql_fence").await;
    place
        .one("SELECT id FROM leasehold.enqueue('mail', 'work', '1', '{\"exclusive\": \"ann\"}')")
        .await;
    let claim = "SELECT token || ' ' || scope || ' ' || receipt FROM leasehold.claim(ARRAY['mail'], 1, 'psql')";
    let first = place.one(claim).await;
    let [token, scope, receipt]: [&str; 3] =
        first.split(' ').collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(scope, "leasehold/mail/k:ann");
    place
        .one(&format!("SELECT leasehold.open_fence('{scope}', {token})"))
        .await;
    place
        .one(&format!("SELECT leasehold.surrender('{receipt}')"))
        .await;
    let second = place.one(claim).await;
    let newer = second.split(' ').next().unwrap();
    place
        .one(&format!("SELECT leasehold.open_fence('{scope}', {newer})"))
        .await;
    let error = place
        .refusal(&format!("SELECT leasehold.open_fence('{scope}', {token})"))
        .await;
    assert_eq!(error.code(), Some(&stale()));
    for bad in ["", "mail", "leasehold/mail/x:ann", "lease hold/mail/k:ann"] {
        let error = place
            .refusal(&format!("SELECT leasehold.open_fence('{bad}', 1)"))
            .await;
        assert_eq!(
            error.code(),
            Some(&SqlState::INVALID_PARAMETER_VALUE),
            "{bad}"
        );
    }
}

/// The limits of the contract, each with its field.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn bad_input_is_refused_by_its_field_and_nothing_is_stored() {
    let place = Place::new("bad_input").await;
    let enqueue =
        |options: &str| format!("SELECT leasehold.enqueue('mail', 'work', '1', '{options}')");
    let long = |n: usize| "x".repeat(n);
    let many: Vec<String> = (0..65).map(|n| format!("\"h{n}\": \"\"")).collect();
    let cases = [
        ("queue", "SELECT leasehold.enqueue('ma il', 'work', '1')".to_owned(), "A-Z a-z 0-9"),
        ("queue", format!("SELECT leasehold.enqueue('{}', 'work', '1')", long(129)), "1 to 128 bytes"),
        ("kind", "SELECT leasehold.enqueue('mail', '', '1')".to_owned(), "1 to 128 bytes"),
        ("namespace", enqueue(r#"{"namespace": "a b"}"#), "A-Z a-z 0-9"),
        ("options", enqueue(r#"{"delai": 1}"#), "delay"),
        ("options", "SELECT leasehold.enqueue('mail', 'work', '1', '[]')".to_owned(), "an object"),
        ("payload", format!("SELECT leasehold.enqueue('mail', 'work', to_jsonb('{}'::text))", long(262_144)), "at most 262144 bytes"),
        ("delay", enqueue(r#"{"delay": "soon"}"#), "an interval"),
        ("delay", enqueue(r#"{"delay": "11 years"}"#), "at most 315360000 seconds"),
        ("delay", enqueue(r#"{"delay": -1}"#), "at least 0"),
        ("run_at", enqueue(r#"{"run_at": "noonish"}"#), "a timestamp"),
        ("run_at", enqueue(r#"{"run_at": "2030-01-01", "delay": 1}"#), "one of the two"),
        ("priority", enqueue(r#"{"priority": 8}"#), "0 to 7"),
        ("priority", enqueue(r#"{"priority": "high"}"#), "0 to 7"),
        ("max_expiries", enqueue(r#"{"max_expiries": 2}"#), "from 3"),
        ("max_failures", enqueue(r#"{"max_failures": 0}"#), "from 1"),
        ("version", enqueue(r#"{"version": 0}"#), "from 1"),
        ("unique", enqueue(r#"{"unique": ""}"#), "1 to 256 bytes"),
        ("exclusive", enqueue(&format!(r#"{{"exclusive": "{}"}}"#, long(257))), "1 to 256 bytes"),
        ("unique_for", enqueue(r#"{"unique_for": "1 hour"}"#), "together with unique"),
        ("term", enqueue(r#"{"term": "1 millisecond"}"#), "at least 10000 microseconds"),
        ("max_lifetime", enqueue(r#"{"max_lifetime": 0}"#), "at least 1"),
        ("timeout", enqueue(r#"{"timeout": 0}"#), "at least 1"),
        ("stall_limit", enqueue(r#"{"stall_limit": 0}"#), "at least 1"),
        ("retention", enqueue(r#"{"retention": "-1 day"}"#), "at least 0"),
        ("factor", enqueue(r#"{"retry": {"factor": 0.5}}"#), "from 1"),
        ("headers", enqueue(&format!("{{\"headers\": {{{}}}}}", many.join(","))), "at most 64 headers"),
        ("headers", enqueue(&format!(r#"{{"headers": {{"a": "{}"}}}}"#, long(16_384))), "at most 16384 bytes"),
        ("id", enqueue(r#"{"id": "seven"}"#), "a UUID"),
        ("jobs", "SELECT leasehold.enqueue_many('{}')".to_owned(), "an array"),
        ("payload", r#"SELECT leasehold.enqueue_many('[{"queue": "mail", "kind": "work", "payload": 1}, {"queue": "mail", "kind": "work"}]')"#.to_owned(), "JSON"),
        ("jobs", r#"SELECT leasehold.enqueue_many((SELECT jsonb_agg('{"queue": "mail", "kind": "work", "payload": 1}'::jsonb) FROM generate_series(1, 10001)))"#.to_owned(), "at most 10000 jobs"),
        ("jobs", format!("SELECT leasehold.enqueue_many((SELECT jsonb_agg(jsonb_build_object('queue', 'mail', 'kind', 'work', 'payload', '{}'::text)) FROM generate_series(1, 65)))", long(262_000)), "at most 16777216 bytes"),
        ("receipt", "SELECT leasehold.complete('mail/0/1/1/x')".to_owned(), "queue/partition"),
        ("max", "SELECT leasehold.claim(ARRAY['mail'], 0, 'psql')".to_owned(), "1 to 1000"),
        ("queues", "SELECT leasehold.claim(ARRAY[]::text[], 1, 'psql')".to_owned(), "1 to 1000"),
        ("owner", format!("SELECT leasehold.claim(ARRAY['mail'], 1, '{}')", long(257)), "at most 256 bytes"),
        ("term", "SELECT leasehold.claim(ARRAY['mail'], 1, 'psql', '1 ms')".to_owned(), "at least 10000"),
        ("nonce", r#"SELECT leasehold.claim(ARRAY['mail'], 1, 'psql', options => '{"nonce": "me"}')"#.to_owned(), "32 hex digits"),
    ];
    for (field, sql, allowed) in &cases {
        let error = place.refusal(sql).await;
        let told = error.as_db_error().unwrap();
        assert_eq!(told.code(), &SqlState::INVALID_PARAMETER_VALUE, "{told:?}");
        assert!(
            told.message().starts_with(&format!("{field}: found ")),
            "{field}: {told:?}"
        );
        assert!(
            told.message().contains(allowed),
            "{field}: {}",
            told.message()
        );
        assert_eq!(told.column(), Some(*field), "{told:?}");
    }
    assert_eq!(place.count("leasehold.job").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn views_show_any_payload_and_no_proof() {
    let place = Place::new("sql_views").await;
    let mut caller = Caller::new(place.store.clone()).await;
    let client = Client::new(Arc::new(place.store.clone()));
    let queue = || QueueName::new("mail").unwrap();
    let kind = || Kind::new("work").unwrap();
    for payload in [&b"{\"a\": 1}"[..], b"\xff\x00", b"{", b"\"\\u0000\"", b""] {
        let job = NewJob::raw(queue(), kind(), payload.to_vec());
        client.enqueue(job).await.unwrap();
    }
    let shown = "SELECT coalesce(payload::text, '-') FROM leasehold.jobs ORDER BY enqueued_at, id";
    let mut payloads = rows(&place.db, shown).await;
    payloads.sort_unstable();
    assert_eq!(payloads, ["-", "-", "-", "-", "{\"a\": 1}"]);

    let mut claim = caller.claim_request(3, Duration::from_secs(60));
    claim.queues[0].queue = queue();
    let nonce: Nonce = claim.nonce;
    let grants = place.store.claim(claim).await.unwrap().grants;
    let settlement = |n: usize, outcome: Outcome| leasehold::store::Settlement {
        receipt: grants[0].receipt(&grants[0].leases[n]),
        outcome,
    };
    let request = caller.request();
    let settlements = vec![settlement(
        0,
        Outcome::Bury {
            reason: "no use".into(),
        },
    )];
    place
        .store
        .settle(SettleRequest {
            request,
            settlements,
        })
        .await
        .unwrap();
    assert_eq!(
        place
            .one("SELECT reason || ' ' || last_owner FROM leasehold.dead")
            .await,
        "no use worker"
    );
    assert_eq!(
        place
            .one("SELECT state || owner FROM leasehold.jobs WHERE owner IS NOT NULL LIMIT 1")
            .await,
        "leasedworker"
    );
    assert_eq!(
        place.count("leasehold.leases WHERE deadline > now()").await,
        2
    );
    assert_eq!(
        place
            .one("SELECT ready || ' ' || leased || ' ' || dead FROM leasehold.queues")
            .await,
        "2 2 1"
    );

    let bytes = nonce.as_bytes().iter();
    let hex = bytes.fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
    let hash = place
        .one(&format!("SELECT encode(sha256('\\x{hex}'), 'hex')"))
        .await;
    let views = rows(
        &place.db,
        "SELECT viewname FROM pg_views WHERE schemaname = 'leasehold'",
    )
    .await;
    assert_eq!(views.len(), 4, "{views:?}");
    let finds = async |relation: &str| {
        let all = rows(
            &place.db,
            &format!("SELECT v::text FROM leasehold.{relation} AS v"),
        )
        .await;
        all.iter()
            .any(|row| row.contains(&hex) || row.contains(&hash))
    };
    for view in views {
        assert!(!finds(&view).await, "{view}");
    }
    // The control: the table has the hash, and not the nonce.
    assert!(finds("grants").await);
    let kept = rows(&place.db, "SELECT g::text FROM leasehold.grants AS g").await;
    assert!(!kept.iter().any(|row| row.contains(&hex)));
}

/// A long transaction under a lease that is renewed meanwhile: its limits grow with the lease, and
/// never past the caller's own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn limits_grow_with_a_renewed_lease() {
    let place = Place::new("sql_limits").await;
    place
        .one("SELECT id FROM leasehold.enqueue('mail', 'work', '1')")
        .await;
    let claim = "SELECT receipt FROM leasehold.claim(ARRAY['mail'], 1, 'psql', '3 seconds')";
    let receipt = place.one(claim).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let working = connect(&place.config).await;
    let begin = format!("SELECT scope FROM leasehold.begin('{receipt}')");
    working
        .batch_execute("BEGIN; SET LOCAL lock_timeout = '700ms'")
        .await
        .unwrap();
    let limit = async |name: &str| -> u64 {
        let sql = format!(
            "SELECT (extract(epoch FROM current_setting('{name}')::interval) * 1000)::bigint"
        );
        one(&working, &sql).await.unwrap().parse().unwrap()
    };
    one(&working, &begin).await.unwrap();
    let first = limit("statement_timeout").await;
    assert!(first <= 1_000, "{first} ms");
    let renew = format!("SELECT held FROM leasehold.renew(ARRAY['{receipt}'])");
    assert_eq!(place.one(&renew).await, "t");
    one(&working, &begin).await.unwrap();
    let second = limit("statement_timeout").await;
    assert!(
        second > first + 500 && second <= 3_000,
        "{first} and then {second} ms"
    );
    assert_eq!(limit("lock_timeout").await, 700);
    working.batch_execute("COMMIT").await.unwrap();
    assert_eq!(limit("statement_timeout").await, 0);
}

/// I16 where the first call of a transaction locks the job, and nothing was begun before it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_transaction_that_a_call_begins_ends_if_it_stands_still() {
    let place = Place::new("sql_still").await;
    let working = connect(&place.config).await;
    let limits = "SELECT extract(epoch FROM current_setting('idle_in_transaction_session_timeout')::interval)::int || ' '
                  || (extract(epoch FROM current_setting('statement_timeout')::interval) BETWEEN 1 AND 30)";
    let claim = "SELECT receipt FROM leasehold.claim(ARRAY['mail'], 1, 'psql', '30 seconds')";
    let enqueue = "SELECT id FROM leasehold.enqueue('mail', 'work', '1')";
    for call in [
        "held FROM leasehold.renew(ARRAY['%'])",
        "leasehold.checkpoint('%', 1, '{}')",
        "leasehold.complete('%')",
        "leasehold.fail('%', 'broken')",
        "leasehold.surrender('%')",
        "leasehold.snooze('%', '1 minute')",
    ] {
        place.one(enqueue).await;
        let receipt = place.one(claim).await;
        working.batch_execute("BEGIN").await.unwrap();
        let call = format!("SELECT {}", call.replace('%', &receipt));
        one(&working, &call).await.unwrap();
        assert_eq!(one(&working, limits).await.unwrap(), "30 true", "{call}");
        working.batch_execute("COMMIT").await.unwrap();
        assert_eq!(one(&working, limits).await.unwrap(), "0 false", "{call}");
        place
            .db
            .batch_execute("DELETE FROM leasehold.job")
            .await
            .unwrap();
    }
    // And it does: the successor has the job.
    place.one(enqueue).await;
    let short = claim.replace("30", "1");
    let receipt = place.one(&short).await;
    working.batch_execute("BEGIN").await.unwrap();
    let save = format!("SELECT leasehold.checkpoint('{receipt}', 1, '{{}}')");
    one(&working, &save).await.unwrap();
    let next = async {
        while place.one(&short).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let patience = Duration::from_secs(120);
    tokio::time::timeout(patience, next)
        .await
        .expect("it waits for ever");
    let ended = one(&working, "COMMIT").await.unwrap_err();
    assert!(ended.is_closed() || ended.code().is_some(), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn jobs_of_a_list_are_stored_in_its_order_and_duplicates_are_named() {
    let place = Place::new("sql_many").await;
    let many = r#"SELECT nth, id, is_new FROM leasehold.enqueue_many('[
        {"queue": "mail", "kind": "work", "payload": {"n": 1}},
        {"queue": "bank", "kind": "pay", "payload": 2, "unique": "two", "priority": 1},
        {"queue": "bank", "kind": "pay", "payload": 3, "unique": "two"},
        {"queue": "mail", "kind": "work", "payload": null, "delay": "1 hour"}]')"#;
    let stored = rows(&place.db, many).await;
    let stored: Vec<Vec<&str>> = stored.iter().map(|row| row.split(' ').collect()).collect();
    let [one, two, three, four] = &stored[..] else {
        panic!("{stored:?}")
    };
    let nth: Vec<&str> = stored.iter().map(|row| row[0]).collect();
    assert_eq!(nth, ["1", "2", "3", "4"]);
    assert_eq!((one[2], two[2], three[2], four[2]), ("t", "t", "f", "t"));
    assert_eq!(two[1], three[1], "the job that has the key");
    let shown = "SELECT id || ' ' || queue || ' ' || kind || ' ' || state || ' ' || priority || ' ' || payload
                 FROM leasehold.jobs ORDER BY id";
    let mut expected = [
        format!("{} mail work ready 4 {{\"n\": 1}}", one[1]),
        format!("{} bank pay ready 1 2", two[1]),
        format!("{} mail work scheduled 4 null", four[1]),
    ];
    expected.sort_unstable();
    assert_eq!(rows(&place.db, shown).await, expected);
    let claim = "SELECT id FROM leasehold.claim(ARRAY['mail', 'bank'], 9, 'psql')";
    assert_eq!(rows(&place.db, claim).await, [one[1], two[1]]);
}

/// Two namespaces in one schema: the same names, and nothing that one does or sees is the other's.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn namespaces_never_meet() {
    let place = Place::new("sql_namespaces").await;
    let of = |name: &str, sql: &str| sql.replace('@', &format!("'{{\"namespace\": \"{name}\"}}'"));
    let enqueue = |name: &str| {
        format!(
            r#"SELECT id || ' ' || is_new FROM leasehold.enqueue('mail', 'work', '"{name}"',
               '{{"unique": "u", "exclusive": "e", "namespace": "{name}"}}')"#
        )
    };
    let claim = "SELECT receipt || ' ' || scope || ' ' || token || ' ' || payload
                 FROM leasehold.claim(ARRAY['mail'], 9, 'psql', '1 minute', @)";
    let mut ids = Vec::new();
    let mut held = Vec::new();
    for name in ["one", "two"] {
        let stored = place.one(&enqueue(name)).await;
        let (id, is_new) = stored.split_once(' ').unwrap();
        assert_eq!(is_new, "true", "a unique key belongs to a namespace");
        ids.push(id.to_owned());
        let claimed = rows(&place.db, &of(name, claim)).await;
        assert_eq!(claimed.len(), 1, "so does an exclusive key: {claimed:?}");
        let parts = claimed[0].split(' ').map(ToOwned::to_owned);
        let parts: Vec<String> = parts.collect();
        assert_eq!(parts[1], format!("{name}/mail/k:e"));
        assert_eq!(parts[3], format!("\"{name}\""));
        held.push(parts);
    }
    // A third has nothing, and the default is one like others.
    assert!(rows(&place.db, &of("three", claim)).await.is_empty());
    assert_eq!(place.one(CLAIM).await, "");
    let looked =
        |name: &str, id: &str| of(name, &format!("SELECT state FROM leasehold.job('{id}', @)"));
    assert_eq!(place.one(&looked("one", &ids[0])).await, "leased");
    assert_eq!(place.one(&looked("one", &ids[1])).await, "");
    // A receipt is worth nothing in the other.
    let receipt = &held[1][0];
    for call in [
        "leasehold.complete('%', NULL, @)",
        "leasehold.fail('%', 'broken', options => @)",
        "leasehold.surrender('%', @)",
        "leasehold.snooze('%', '1 minute', @)",
        "leasehold.checkpoint('%', 1, '{}', @)",
        "leasehold.begin('%', @)",
    ] {
        let call = format!("SELECT {}", of("one", &call.replace('%', receipt)));
        let error = place.refusal(&call).await;
        assert_eq!(error.code(), Some(&stale()), "{call}: {error:?}");
    }
    let renew = |name| {
        of(
            name,
            &format!("SELECT held FROM leasehold.renew(ARRAY['{receipt}'], @)"),
        )
    };
    assert_eq!(place.one(&renew("one")).await, "f");
    assert_eq!(place.one(&renew("two")).await, "t");
    // A mark of one stops nobody in the other.
    let open =
        |n: usize, token: &str| format!("SELECT leasehold.open_fence('{}', {token})", held[n][1]);
    place.one(&open(0, &i64::MAX.to_string())).await;
    place.one(&open(1, &held[1][2])).await;
    assert_eq!(
        place.refusal(&open(0, &held[0][2])).await.code(),
        Some(&stale())
    );
    for view in ["jobs", "leases", "queues"] {
        let shown = format!("SELECT namespace FROM leasehold.{view} ORDER BY namespace");
        assert_eq!(rows(&place.db, &shown).await, ["one", "two"], "{view}");
    }
    place
        .one(&of(
            "two",
            &format!("SELECT leasehold.fail('{receipt}', 'no', bury => true, options => @)"),
        ))
        .await;
    let dead = rows(
        &place.db,
        "SELECT namespace || ' ' || id FROM leasehold.dead",
    )
    .await;
    assert_eq!(dead, [format!("two {}", ids[1])]);
    assert_eq!(place.one(&looked("one", &ids[0])).await, "leased");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
#[expect(
    clippy::too_many_lines,
    reason = "each role with what it may and may not do"
)]
async fn a_role_can_do_its_own_work_and_no_other() {
    let place = Place::new("sql_roles").await;
    let roles = PostgresStore::roles("leasehold").unwrap();
    place.db.batch_execute(&roles).await.unwrap();
    place
        .db
        .batch_execute(&roles)
        .await
        .expect("twice does no harm");
    let mut dbs = Vec::new();
    for role in ["producer", "worker", "reader", "operator"] {
        let made = format!("CREATE ROLE one_{role} LOGIN IN ROLE leasehold_{role}");
        place.db.batch_execute(&made).await.unwrap();
        let mut config = place.config.clone();
        config.user(format!("one_{role}"));
        dbs.push(connect(&config).await);
    }
    let [producer, worker, reader, operator] = &dbs[..] else {
        unreachable!()
    };
    let enqueue = r#"SELECT id FROM leasehold.enqueue('mail', 'work', '{"secret": 1}', '{"unique": "u%", "exclusive": "e"}')"#;
    let enqueue_as = async |db, n: &str| one(db, &enqueue.replace('%', n)).await;
    let id = enqueue_as(producer, "1").await.unwrap();
    enqueue_as(worker, "2").await.unwrap();
    let receipt = one(worker, CLAIM).await.unwrap();
    // Something is left that could be claimed.
    one(
        producer,
        "SELECT id FROM leasehold.enqueue('open', 'work', '1')",
    )
    .await
    .unwrap();
    let claim = "SELECT receipt FROM leasehold.claim(ARRAY['open'], 1, 'psql')";
    let reads = [
        "SELECT payload FROM leasehold.jobs",
        "SELECT payload FROM leasehold.job",
        "SELECT owner FROM leasehold.leases",
        "SELECT ready FROM leasehold.queues",
        "SELECT reason FROM leasehold.dead",
    ];
    let complete = format!("SELECT leasehold.complete('{receipt}')");
    let renew = format!("SELECT held FROM leasehold.renew(ARRAY['{receipt}'])");
    let pause = "SELECT leasehold.control_1('leasehold', NULL, NULL, NULL, NULL, 'ann', 'why', \
                 '{\"pause\": \"mail\"}', 'pause queue mail')";
    let raw_pause = "UPDATE leasehold.queue SET paused = true";
    let purge = "DELETE FROM leasehold.job";
    let change = "UPDATE leasehold.job SET payload = '\\x'";
    let denied = async |who: &str, db: &tokio_postgres::Client, sql: &str| {
        let error = one(db, sql).await.expect_err(&format!("{who}: {sql}"));
        assert_eq!(
            error.code(),
            Some(&SqlState::INSUFFICIENT_PRIVILEGE),
            "{who}: {sql}: {error:?}"
        );
    };
    let proof = "SELECT nonce_hash FROM leasehold.grants";
    for sql in reads.into_iter().chain([
        claim, &complete, &renew, pause, raw_pause, purge, change, proof,
    ]) {
        denied("producer", producer, sql).await;
    }
    let write = enqueue.replace('%', "3");
    for sql in [
        &*write, claim, &complete, &renew, pause, purge, change, proof,
    ] {
        denied("reader", reader, sql).await;
    }
    denied("worker", worker, pause).await;
    denied("worker", worker, "SELECT * FROM leasehold.audit").await;
    for sql in reads {
        one(reader, sql).await.expect(sql);
    }
    for (name, db) in [("worker", worker), ("operator", operator)] {
        assert_eq!(one(db, &renew).await.unwrap(), "t", "{name}");
    }
    one(operator, pause).await.unwrap();
    one(worker, &complete).await.unwrap();
    assert_eq!(place.one("SELECT count(*) FROM leasehold.audit").await, "1");
    let gone = format!("leasehold.jobs WHERE id = '{id}'");
    assert_eq!(place.count(&gone).await, 0);

    // The same with the crate: a program of each role does what it is for.
    let as_role = async |role: &str| {
        let mut config = place.config.clone();
        config.user(format!("one_{role}"));
        PostgresStore::with(config, PostgresOptions::new().connections(2))
            .await
            .unwrap()
    };
    let client = Client::new(Arc::new(as_role("producer").await));
    let job = NewJob::raw(
        QueueName::new("two").unwrap(),
        Kind::new("work").unwrap(),
        "1",
    );
    client
        .enqueue(job.unique("a").unwrap().exclusive("b").unwrap())
        .await
        .unwrap();
    assert!(client.queues().await.is_err(), "a producer does not see");
    let client = Client::new(Arc::new(as_role("reader").await));
    assert_eq!(client.queues().await.unwrap().len(), 3);
    let two = QueueName::new("two").unwrap();
    let page = leasehold::inspect::Page::first(10);
    let jobs = client.jobs(two, JobState::Ready, page).await.unwrap();
    assert_eq!(jobs.rows.len(), 1);
    let job = NewJob::raw(QueueName::default(), Kind::new("work").unwrap(), "1");
    assert!(
        client.enqueue(job).await.is_err(),
        "a reader changes nothing"
    );

    // The clock was set back: what is due is due before claims look for it, and whoever adds it
    // says so.
    let ahead = "UPDATE leasehold.head SET drawn_at = leasehold.clock_1(NULL) + 3600000000,
                                           due_from = leasehold.clock_1(NULL) + 3600000000";
    place.db.batch_execute(ahead).await.unwrap();
    let later = "SELECT id FROM leasehold.enqueue('mail', 'later', '1', '{\"delay\": 60, \"priority\": 7}')";
    one(producer, later).await.unwrap();
    let known = "SELECT count(*) FROM leasehold.head WHERE due_from < drawn_at";
    assert_eq!(place.one(known).await, "1");
}
