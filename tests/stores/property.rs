//! What holds for every receipt, name, key, token, policy and term, and for bytes that are none.

#[path = "../../fuzz/src/lib.rs"]
#[allow(
    unreachable_pub,
    clippy::missing_panics_doc,
    reason = "shared with fuzz/"
)]
mod bodies;

use std::time::Duration;

use leasehold::clock::Timestamp;
use leasehold::job::{Key, Kind, Namespace, QueueName};
use leasehold::lease::Receipt;
use leasehold::limits;
use leasehold::rules::issue::{Issuer, WhenBehind};
use leasehold::{ErrorKind, FencingToken, JobId, LeaseTerms, RetryPolicy};
use proptest::prelude::*;

fn any_duration() -> impl Strategy<Value = Duration> {
    prop_oneof![
        (0..10_000_u64).prop_map(Duration::from_millis),
        (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(s, n)| Duration::new(s, n)),
        Just(Duration::ZERO),
        Just(Duration::MAX),
        Just(limits::DURATION_MAX),
    ]
}

fn receipt_text() -> impl Strategy<Value = String> {
    (
        "[A-Za-z0-9_.-]{1,128}",
        any::<u16>(),
        any::<(u64, u64)>(),
        any::<[u8; 16]>(),
        "[0-9a-f]{32}",
    )
        .prop_map(|(queue, partition, (grant, token), job, proof)| {
            let job = JobId::from_bytes(job);
            format!("{queue}/{partition}/{grant}/{token}/{job}/{proof}")
        })
}

proptest! {
    #[test]
    fn a_receipt_survives_its_text(text in receipt_text()) {
        let receipt: Receipt = text.parse().unwrap();
        prop_assert_eq!(receipt.to_string(), text);
    }

    #[test]
    fn a_flipped_bit_makes_another_receipt_or_none(text in receipt_text()) {
        let receipt: Receipt = text.parse().unwrap();
        for bit in 0..text.len() * 8 {
            let mut bytes = text.clone().into_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let Ok(other) = String::from_utf8(bytes) else { continue };
            if let Ok(other) = other.parse::<Receipt>() {
                prop_assert_ne!(&other, &receipt);
            }
        }
    }

    #[test]
    fn names_are_their_text_or_refused(text in any::<String>()) {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        let good = (1..=limits::NAME_BYTES).contains(&text.len()) && text.chars().all(allowed);
        prop_assert_eq!(QueueName::new(&text).is_ok(), good);
        prop_assert_eq!(Kind::new(&text).is_ok(), good);
        match Namespace::new(&text) {
            Ok(name) => prop_assert_eq!(name.as_str(), text),
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::InvalidInput);
                prop_assert_eq!(error.field(), Some("namespace"));
            }
        }
    }

    #[test]
    fn keys_are_their_text_up_to_the_limit(text in "(?s).{0,300}") {
        let key = Key::new(&text);
        prop_assert_eq!(key.is_ok(), (1..=limits::KEY_BYTES).contains(&text.len()));
        if let Ok(key) = key {
            prop_assert_eq!(key.as_str(), text);
        }
    }

    #[test]
    fn tokens_only_grow(
        start in 0..1_u64 << 52,
        steps in proptest::collection::vec((any::<i32>(), 1..1_000_u64, any::<bool>()), 1..60),
        when_behind in prop_oneof![Just(WhenBehind::GoOn), Just(WhenBehind::Refuse)],
    ) {
        let mut clock = start;
        let mut issuer = Issuer::without_memory(Timestamp::from_micros(clock));
        let mut highest = 0;
        for (jump, wanted, lost) in steps {
            clock = clock.saturating_add_signed(i64::from(jump)).min(1 << 53);
            let now = Timestamp::from_micros(clock);
            let room = issuer.room(now, when_behind);
            if lost {
                // As long as the clock is not behind what it has given, nothing is given twice.
                if clock + Issuer::LEAD > highest {
                    issuer = Issuer::without_memory(now);
                }
                continue;
            }
            let count = wanted.min(room);
            if count > 0 {
                let base = issuer.issue(count, now).get();
                prop_assert!(base > highest, "{} after {}", base, highest);
                highest = base + count - 1;
            }
        }
    }

    #[test]
    fn a_token_survives_its_text(number in any::<u64>()) {
        let token = FencingToken::new(number);
        prop_assert_eq!(token.to_string().parse::<FencingToken>().unwrap(), token);
    }

    #[test]
    fn a_retry_waits_no_longer_than_its_bound(
        (base, cap) in (any_duration(), any_duration()),
        factor in prop_oneof![any::<f64>(), 0.0..10.0],
        failures in any::<u32>(),
        jitter in prop_oneof![0.0..=1.0, Just(1.0), any::<f64>()],
    ) {
        let mut policy = RetryPolicy::exponential(base, cap);
        policy.factor = factor;
        let (bound, delay) = (policy.bound(failures), policy.delay(failures, jitter));
        prop_assert!(bound <= cap && delay <= bound);
    }

    #[test]
    fn terms_that_pass_have_a_margin_and_others_name_a_number(
        (term, every, lifetime) in (any_duration(), any_duration(), any_duration()),
        (clock, network, pause) in (any_duration(), any_duration(), any_duration()),
    ) {
        let terms = LeaseTerms::of_term(term)
            .renew_every(every)
            .max_lifetime(lifetime)
            .allowances(clock, network, pause);
        match terms.validate() {
            Ok(()) => prop_assert!(terms.margin().is_some() && lifetime >= term),
            Err(error) => prop_assert!(error.field().is_some()),
        }
    }

    #[test]
    fn times_neither_wrap_nor_panic(at in any::<u64>(), by in any_duration()) {
        let at = Timestamp::from_micros(at);
        prop_assert!(at.after(by) >= at && at.before(by) <= at);
        prop_assert!(at.after(by).since(at) <= by);
    }
}

type Body = fn(&[u8]);

/// What the fuzzers run, on bytes made here: random ones, and good ones with a few bytes changed.
#[test]
fn bytes_that_are_none_of_ours_are_refused() {
    use leasehold::NewJob;
    use leasehold::hooks::record_of;
    use leasehold::job::JobRecord;

    let mut dice = fastrand::Rng::with_seed(7);
    let new = NewJob::raw(QueueName::default(), Kind::new("k").unwrap(), vec![1; 40])
        .header("traceparent", "00-1")
        .exclusive("key")
        .unwrap()
        .unique("other")
        .unwrap();
    let job = JobRecord::new(JobId::generate(), new, Timestamp::from_micros(1));
    let receipt = format!("default/0/17/19/{}/{}", JobId::generate(), "ab".repeat(16));
    let good: [(Body, Vec<u8>); 5] = [
        (bodies::receipt, receipt.into_bytes()),
        (bodies::record, record_of(&job)),
        (
            bodies::url,
            b"memory:?namespace=app&synchronous=full".to_vec(),
        ),
        (
            bodies::url,
            b"redis://user:correct-horse-battery@host:6379/0".to_vec(),
        ),
        (
            bodies::url,
            b"postgres://u:correct?horse=battery&staple@host/db".to_vec(),
        ),
    ];
    let rounds = match std::env::var_os("LEASEHOLD_CAMPAIGN") {
        Some(_) => 2_000_000,
        None => 10_000,
    };
    let good = good.into_iter();
    // What a script says to a renewal, and to a claim that found nothing.
    let good = good.chain([
        (
            bodies::answer as Body,
            [&[2, 1][..], &[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]].concat(),
        ),
        (bodies::answer, vec![0; 60]),
    ]);
    for (body, good) in good {
        let good = &good;
        body(good);
        for _ in 0..rounds {
            body(&damaged(good, &mut dice));
            let random: Vec<u8> = (0..dice.usize(0..80)).map(|_| dice.u8(..)).collect();
            body(&random);
        }
    }
}

/// The same with a few bytes changed.
fn damaged(good: &[u8], dice: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..dice.usize(1..4) {
        let at = dice.usize(0..bytes.len());
        match dice.u8(0..4) {
            0 => bytes[at] = dice.u8(..),
            1 => bytes[at] ^= 1 << dice.u8(0..8),
            2 => bytes.insert(at, dice.u8(..)),
            _ => bytes.truncate(at.max(1)),
        }
    }
    bytes
}

/// Requests: paths, queries, headers and forms of the dashboard, and the headers of the HTTP fence.
mod requests {
    use super::*;
    use bodies::http::{TAG, dashboard, fence};

    /// Words that mean something to the dashboard, and some that should mean nothing.
    const WORDS: &[&str] = &[
        "",
        "default",
        "ready",
        "dead",
        "pause",
        "resume",
        "cancel",
        "revoke",
        "retry",
        "purge",
        "kind-0",
        "00000000-0000-0000-0000-000000000000",
        "0",
        "-1",
        "18446744073709551616",
        TAG,
        "%3Czq%3E",
        "%00",
        "%ff",
        "%",
        "+",
        "/",
        "//evil.example",
        "\\evil.example",
        "..",
        "%2e%2e%2f",
        "1h",
        "\u{202e}",
        "'\"><zq onload=1>",
    ];
    const PATHS: &[&str] = &[
        "/",
        "/leases",
        "/queues",
        "/jobs",
        "/jobs/",
        "/dead",
        "/workers",
        "/expiry",
        "/audit",
        "/confirm",
        "/act",
        "/assets/app.js",
        "/assets/",
        "/metrics",
        "/nowhere",
    ];
    const FIELDS: &[&str] = &[
        "queue", "state", "owner", "task", "after", "window", "done", "n", "skipped", "do", "job",
        "kind", "error", "reason", "back",
    ];
    const HEADERS: &[&str] = &[
        "accept",
        "authorization",
        "content-type",
        "cookie",
        "host",
        "last-event-id",
        "origin",
        "sec-fetch-site",
        "x-leasehold-action",
        "x-forwarded-for",
    ];
    const VALUES: &[&str] = &[
        "text/event-stream",
        "text/html",
        "application/x-www-form-urlencoded",
        "application/json",
        "Bearer wrong",
        "Bearer",
        "leasehold_theme=dark",
        "leasehold_theme=<zq",
        "localhost",
        "same-origin",
        "cross-site",
        "none",
        "null",
        "1",
        "",
        "<zq",
        "\u{fffd}",
    ];

    fn word() -> impl Strategy<Value = String> {
        prop_oneof![
            3 => proptest::sample::select(WORDS).prop_map(str::to_owned),
            1 => "[ -~]{0,20}",
            1 => any::<String>(),
        ]
    }

    fn form() -> impl Strategy<Value = String> {
        let field = (proptest::sample::select(FIELDS), word());
        proptest::collection::vec(field, 0..6).prop_map(|fields| {
            let fields = fields.iter().map(|(name, value)| format!("{name}={value}"));
            fields.collect::<Vec<_>>().join("&")
        })
    }

    fn request() -> impl Strategy<Value = String> {
        let value = prop_oneof![
            4 => proptest::sample::select(VALUES).prop_map(str::to_owned),
            1 => word(),
        ];
        let header = (proptest::sample::select(HEADERS), value);
        (
            proptest::sample::select(&["GET", "GET", "POST", "POST", "HEAD", "PUT", "DELETE"][..]),
            proptest::sample::select(PATHS),
            prop_oneof![2 => Just(String::new()), 1 => word()],
            form(),
            proptest::collection::vec(header, 0..5),
            form(),
        )
            .prop_map(|(method, path, rest, query, headers, body)| {
                // Blanks and controls cannot stand in an address; the parser would stop there.
                let query = query.replace(|c: char| c.is_ascii_control() || c == ' ', "+");
                let mut text = format!("{method} {path}{rest}?{query}\n");
                for (name, value) in headers {
                    text.extend([name, ": ", &value, "\n"]);
                }
                text + "\n" + &body
            })
    }

    /// Scopes, good and bad, so few that tokens meet in them.
    fn fenced_request() -> impl Strategy<Value = String> {
        let scope = prop_oneof![
            4 => proptest::sample::select(&["app/q/k:a", "app/q/k:b", "app/q/k:%C3%BC"][..])
                .prop_map(str::to_owned),
            1 => "app/q/[kjnx]:[%0-9A-Fa-f+]{0,6}",
            1 => word(),
        ];
        let token = prop_oneof![
            4 => (0..50_u64).prop_map(|token| token.to_string()),
            1 => any::<u64>().prop_map(|token| token.to_string()),
            1 => word(),
        ];
        let operation = proptest::option::of(word());
        (scope, token, operation).prop_map(|(scope, token, operation)| {
            let mut text = format!("POST /\nfencing-scope: {scope}\nfencing-token: {token}\n");
            if let Some(operation) = operation {
                text.extend(["fencing-operation: ", &operation, "\n"]);
            }
            text
        })
    }

    proptest! {
        #[test]
        fn the_dashboard_answers_whatever_it_is_asked(text in request()) {
            dashboard(text.as_bytes());
        }

        #[test]
        fn the_fence_lets_nothing_stale_through(
            texts in proptest::collection::vec(fenced_request(), 1..20),
        ) {
            for text in &texts {
                fence(text.as_bytes());
            }
        }
    }

    #[test]
    fn damaged_requests_harm_nobody() {
        let mut dice = fastrand::Rng::with_seed(7);
        let good: [(Body, &str); 4] = [
            (
                dashboard,
                "GET /jobs?queue=default&state=ready&after=x\ncookie: leasehold_theme=dark\n",
            ),
            (
                dashboard,
                "POST /act\ncontent-type: application/x-www-form-urlencoded\nsec-fetch-site: \
                 same-origin\n\ndo=pause&queue=default&reason=%3Czq&back=/queues",
            ),
            (
                dashboard,
                "GET /queues\nauthorization: Basic YWRhOnMzY3JldA==\naccept: text/event-stream\n",
            ),
            (
                fence,
                "POST /\nfencing-token: 17\nfencing-scope: app/q/k:%C3%BC\nfencing-operation: a%20b\n",
            ),
        ];
        let rounds = match std::env::var_os("LEASEHOLD_CAMPAIGN") {
            Some(_) => 100_000,
            None => 1_000,
        };
        for (body, good) in good {
            for _ in 0..rounds {
                body(&damaged(good.as_bytes(), &mut dice));
            }
        }
    }
}
