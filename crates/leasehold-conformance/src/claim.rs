//! claim: expire what is overdue, promote what is due, grant, in this order.

use super::driver::{
    Driver, HELD, Held, LIFETIME, TERM, bury, complete, job, names_the_field, queue, queue_named,
    retry, secs, surrender,
};
use leasehold::ErrorKind;
use leasehold::job::JobState;
use leasehold::lease::{FencingToken, Verdict};
use leasehold::limits;
use leasehold::store::{
    ClaimQueue, ClaimRequest, ControlCommand, LeaseSelect, Outcome, Renewal, Select,
};

/// First come, first served.
pub async fn serves_in_order_of_arrival(d: &Driver) {
    let ids = d.enqueue_many(5).await;
    assert_eq!(d.claim_ids(3).await, ids[..3]);
    assert_eq!(d.claim_ids(3).await, ids[3..]);
    assert!(d.claim_ids(3).await.is_empty());
}

/// Priority 0 first, 7 last, arrival within.
pub async fn serves_by_priority(d: &Driver) {
    let mut ids = Vec::new();
    for priority in [7, 0, 4, 0, 1] {
        ids.push(d.enqueue(job().priority(priority)).await);
    }
    let order = [1, 3, 4, 2, 0].map(|at: usize| ids[at]);
    assert_eq!(d.claim_ids(9).await, order);
}

/// Expired jobs go ahead of everything in their priority, in token order.
pub async fn expired_jobs_go_to_the_front_in_token_order(d: &Driver) {
    let old = d.enqueue_many(3).await;
    let held = d.claim(3).await;
    let new = d.enqueue_many(2).await;
    d.advance(secs(30)).await;
    // The first grant is renewed, so that it expires after the second.
    d.advance(secs(1)).await;
    let late = d.claim(1).await;
    assert!(matches!(
        d.renew(held[0].beat()).await,
        Renewal::Held { .. }
    ));
    d.advance(TERM).await;
    let got = d.claim_ids(9).await;
    assert_eq!(got[..3], old[..]);
    assert_eq!(got[3], late[0].id());
    assert_eq!(got[4..], new[1..]);
}

/// A surrendered job goes to the front, several of one step in token order.
pub async fn surrendered_jobs_go_to_the_front_in_token_order(d: &Driver) {
    let ids = d.enqueue_many(4).await;
    let held = d.claim(3).await;
    let back = vec![(&held[2], surrender()), (&held[0], surrender())];
    let verdicts = d.store().settle(d.settle_request(back)).await;
    assert_eq!(verdicts.expect("settle"), [HELD, HELD]);
    assert_eq!(d.claim_ids(9).await, [ids[0], ids[2], ids[3]]);
}

/// Each later step goes ahead of the earlier ones.
pub async fn the_last_step_is_first_at_the_front(d: &Driver) {
    let ids = d.enqueue_many(3).await;
    let held = d.claim(3).await;
    for held in &held {
        d.settled(held, surrender()).await;
    }
    assert_eq!(d.claim_ids(9).await, [ids[2], ids[1], ids[0]]);
}

/// The front is the front of the job's own priority.
pub async fn the_front_is_within_the_priority(d: &Driver) {
    let low = d.held(job().priority(5)).await;
    let high = d.enqueue(job().priority(1)).await;
    let peer = d.enqueue(job().priority(5)).await;
    d.settled(&low, surrender()).await;
    assert_eq!(d.claim_ids(9).await, [high, low.id(), peer]);
}

/// Retried jobs wait, and then go to the back.
pub async fn retried_jobs_go_to_the_back(d: &Driver) {
    let first = d.held(job()).await;
    let second = d.enqueue(job()).await;
    d.settled(&first, retry(secs(1))).await;
    assert_eq!(d.state(first.id()).await, Some(JobState::Scheduled));
    d.advance(secs(1)).await;
    assert_eq!(d.claim_ids(9).await, [second, first.id()]);
}

/// Due jobs are promoted by (run-at, sequence).
pub async fn promotes_by_due_time(d: &Driver) {
    let mut ids = Vec::new();
    for delay in [3, 1, 2, 1] {
        ids.push(d.enqueue(job().delay(secs(delay))).await);
    }
    d.advance(secs(2)).await;
    assert_eq!(d.claim_ids(9).await, [ids[1], ids[3], ids[2]]);
    d.advance(secs(1)).await;
    assert_eq!(d.claim_ids(9).await, [ids[0]]);
}

/// A job is due at its time, and not a microsecond before.
pub async fn promotes_at_the_exact_time(d: &Driver) {
    let id = d.enqueue(job().delay(secs(5))).await;
    let instant = std::time::Duration::from_micros(1);
    d.advance(secs(5) - instant).await;
    assert!(d.claim_ids(1).await.is_empty());
    d.advance(instant).await;
    assert_eq!(d.claim_ids(1).await, [id]);
}

/// Expired jobs of a claim go ahead of the ready ones, promoted ones behind them.
pub async fn expires_then_promotes_then_grants(d: &Driver) {
    let expired = d.held(job()).await.id();
    let due = d.enqueue(job().delay(secs(10))).await;
    let ready = d.enqueue(job()).await;
    d.advance(TERM).await;
    let claimed = d.claim_as(d.claim_request(9)).await;
    let got: Vec<_> = Held::all(&claimed).iter().map(Held::id).collect();
    assert_eq!(got, [expired, ready, due]);
    assert_eq!(claimed.expired.len(), 1);
}

/// One claim expires at most 1,000 leases, the oldest first.
pub async fn expires_a_thousand_in_a_step(d: &Driver) {
    d.enqueue_many(1_100).await;
    let first = d.claim(100).await;
    d.advance(secs(1)).await;
    d.claim(1_000).await;
    d.advance(TERM).await;
    let claimed = d.claim_as(d.claim_request(1)).await;
    assert_eq!(claimed.expired.len(), limits::STEP_JOBS);
    let tokens: Vec<_> = claimed.expired.iter().map(|e| e.token).collect();
    assert!(tokens.is_sorted() && tokens[0] == first[0].token());
    let claimed = d.claim_as(d.claim_request(1)).await;
    assert_eq!(claimed.expired.len(), 100);
}

/// One claim promotes at most 1,000 jobs.
pub async fn promotes_a_thousand_in_a_step(d: &Driver) {
    d.enqueue_all(vec![job().delay(secs(1)); 1_100]).await;
    d.advance(secs(1)).await;
    let claimed = d.claim_as(d.claim_request(1)).await;
    assert_eq!(d.queue().await.counts.scheduled, 100);
    assert_eq!(claimed.next_due, Some(secs(0)));
    d.claim(1).await;
    assert_eq!(d.queue().await.counts.scheduled, 0);
}

/// A claim is given what it asked for at most.
pub async fn gives_no_more_than_asked(d: &Driver) {
    d.enqueue_many(1_010).await;
    assert_eq!(d.claim(10).await.len(), 10);
    assert_eq!(d.claim(1_000).await.len(), 1_000);
}

/// Queues are served in the order in which the claim names them.
pub async fn visits_queues_in_order(d: &Driver) {
    let plain = d.enqueue(job()).await;
    let other = d.enqueue(job().queue("other").expect("a name")).await;
    let mut request = d.claim_request(9);
    let mut wanted = request.queues[0].clone();
    wanted.queue = queue_named("other");
    wanted.term = secs(5);
    request.queues.insert(0, wanted);
    let claimed = d.claim_as(request).await;
    let got: Vec<_> = Held::all(&claimed).iter().map(Held::id).collect();
    assert_eq!(got, [other, plain]);
    assert_eq!(claimed.grants.len(), 2);
    assert_eq!(
        (claimed.grants[0].granted, claimed.grants[1].granted),
        (secs(5), TERM)
    );
}

/// A queue nobody ever used is no error.
pub async fn unknown_queues_are_empty(d: &Driver) {
    assert!(d.claim(1).await.is_empty());
    assert!(d.snapshot().await.queues.is_empty());
}

/// A paused queue expires and promotes, and grants nothing.
pub async fn a_paused_queue_grants_nothing(d: &Driver) {
    let held = d.held(job()).await;
    let due = d.enqueue(job().delay(secs(1))).await;
    d.control(ControlCommand::Pause(queue())).await;
    assert!(d.queue().await.paused);
    d.advance(TERM).await;
    let claimed = d.claim_as(d.claim_request(9)).await;
    assert!(claimed.grants.is_empty());
    assert_eq!(claimed.expired.len(), 1);
    assert_eq!(d.state(due).await, Some(JobState::Ready));
    d.control(ControlCommand::Resume(queue())).await;
    assert_eq!(d.claim_ids(9).await, [held.id(), due]);
}

/// Every lease has a token of its own, larger than any before.
pub async fn tokens_grow(d: &Driver) {
    d.enqueue_many(30).await;
    let mut tokens = Vec::new();
    for n in 1..6 {
        tokens.extend(d.claim(n).await.iter().map(Held::token));
        d.advance(secs(1)).await;
    }
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

/// Tokens follow the clock: an issuer that forgets what it gave is above it all the same.
pub async fn tokens_follow_the_clock(d: &Driver) {
    let before = d.held(job()).await.token();
    d.advance(secs(500)).await;
    let after = d.claim_one().await.token();
    assert!(after.get() - before.get() > 499_000_000, "{before} {after}");
}

/// A clock that was two hours ahead, and is right again, stops no claim: tokens grow from the last
/// one, and every answer says how far the clock is behind until it has caught up.
pub async fn claims_go_on_when_the_clock_is_set_back(d: &Driver) {
    let hours = secs(7_200);
    d.settled(&d.held(job()).await, complete()).await;
    d.advance(hours).await;
    // A session does not outlive such a jump.
    let ahead = d.other().await;
    ahead.enqueue(job()).await;
    let claimed = ahead.claim_as(ahead.claim_request(1)).await;
    assert_eq!(claimed.clock_behind, None);
    let mut last = claimed.grants[0].id;

    d.set_back(hours).await;
    let behind = d.other().await;
    for _ in 0..3 {
        behind.enqueue_many(2).await;
        let claimed = behind.claim_as(behind.claim_request(2)).await;
        let told = claimed.clock_behind.expect("the clock is behind");
        assert!(told >= hours && told < hours + secs(1), "{told:?}");
        let tokens: Vec<_> = Held::all(&claimed).iter().map(Held::token).collect();
        let next = last.get() + 1;
        assert_eq!(tokens, [next, next + 1].map(FencingToken::new));
        last = tokens[1];
    }
    let nothing = behind.claim_as(behind.claim_request(1)).await;
    assert!(nothing.grants.is_empty() && nothing.clock_behind.is_some());
    assert!(behind.queue().await.clock_behind.is_some());

    d.advance(hours + secs(1)).await;
    let caught_up = d.other().await;
    let claimed = caught_up.claim_as(caught_up.claim_request(9)).await;
    assert_eq!(claimed.clock_behind, None);
    assert!(claimed.grants[0].id > last, "expired, and granted again");
    assert_eq!(caught_up.queue().await.clock_behind, None);
}

/// Tokens grow across the queues and sessions of one issuer.
pub async fn tokens_grow_across_sessions(d: &Driver) {
    let mut last = FencingToken::new(0);
    for name in ["a", "b", "a", "c"] {
        let driver = d.other().await;
        driver.enqueue(job().queue(name).expect("a name")).await;
        let mut request = driver.claim_request(1);
        request.queues[0].queue = queue_named(name);
        let token = driver.claim_as(request).await.grants[0].id;
        assert!(token > last, "{token} after {last}");
        last = token;
    }
}

/// A claimed job is leased to the owner and task that the claim names.
pub async fn names_owner_and_task(d: &Driver) {
    let held = d.held(job()).await;
    let lease = d.view(held.id()).await.lease.expect("a lease");
    assert_eq!((&*lease.owner, &*lease.task), ("worker-1", "run-1"));
    assert_eq!(lease.token, held.token());
    assert_eq!(
        (lease.time_left, lease.term, lease.attempt),
        (TERM, TERM, 1)
    );
}

/// What is granted is the term, cut by the maximum lifetime.
pub async fn grants_the_term_cut_by_the_lifetime(d: &Driver) {
    assert_eq!(d.held(job()).await.granted, TERM);
    d.enqueue(job()).await;
    let mut request = d.claim_request(1);
    request.queues[0].max_lifetime = secs(20);
    let claimed = d.claim_as(request).await;
    assert_eq!(claimed.grants[0].granted, secs(20));
    assert_eq!(claimed.grants[0].term, TERM);
}

/// A job's own term and lifetime go before the queue's.
pub async fn a_jobs_own_terms_win(d: &Driver) {
    let mut new = job();
    new.options.term = Some(secs(9));
    new.options.max_lifetime = Some(secs(7));
    let held = d.held(new).await;
    assert_eq!((held.term, held.granted), (secs(9), secs(7)));
}

/// A grant never mixes terms or lifetimes.
pub async fn grants_never_mix_terms(d: &Driver) {
    let mut jobs = vec![job(); 5];
    jobs[1].options.term = Some(secs(9));
    jobs[2].options.term = Some(secs(9));
    jobs[3].options.max_lifetime = Some(secs(50));
    let ids = d.enqueue_all(jobs).await;
    let claimed = d.claim_as(d.claim_request(9)).await;
    let got: Vec<_> = Held::all(&claimed).iter().map(Held::id).collect();
    assert_eq!(got, ids);
    for grant in &claimed.grants {
        let terms = grant.leases.iter().map(|lease| {
            let options = &lease.job.options;
            (options.term, options.max_lifetime)
        });
        let mut terms: Vec<_> = terms.collect();
        terms.dedup();
        assert_eq!(terms.len(), 1);
        assert_eq!(grant.id, grant.leases[0].token);
    }
}

/// A grant is at most 4 MiB.
pub async fn grants_are_at_most_four_mebibytes(d: &Driver) {
    let mut big = job();
    big.payload = vec![1; limits::PAYLOAD_BYTES].into();
    d.enqueue_all(vec![big; 20]).await;
    let claimed = d.claim_as(d.claim_request(20)).await;
    assert_eq!(Held::all(&claimed).len(), 20);
    for grant in &claimed.grants {
        let bytes: usize = grant.leases.iter().map(|lease| lease.job.weight()).sum();
        assert!(bytes <= limits::GRANT_BYTES, "{bytes}");
    }
}

/// What is remembered of a job's ended leases counts against the limit of its grant.
pub async fn histories_weigh_too(d: &Driver) {
    const JOBS: usize = 150;
    let reason = "x".repeat(limits::REASON_BYTES);
    d.enqueue_many(JOBS).await;
    for _ in 0..limits::HISTORY {
        let held = d.claim(JOBS).await;
        assert_eq!(held.len(), JOBS);
        let again = |held| {
            let (delay, reason) = (secs(0), reason.clone());
            (held, Outcome::Retry { delay, reason })
        };
        let request = d.settle_request(held.iter().map(again).collect());
        d.store().settle(request).await.expect("settle");
    }
    let claimed = d.claim_as(d.claim_request(JOBS)).await;
    assert_eq!(Held::all(&claimed).len(), JOBS);
    for grant in &claimed.grants {
        let ended = grant.leases.iter().flat_map(|lease| &lease.job.history);
        let reasons = ended.filter_map(|ended| ended.reason.as_ref());
        let bytes: usize = reasons.map(String::len).sum();
        assert!(bytes <= limits::GRANT_BYTES, "{bytes}");
    }
}

/// The answer tells when the next job is due and when the next lease would expire.
pub async fn tells_what_comes_next(d: &Driver) {
    d.enqueue(job().delay(secs(30))).await;
    d.enqueue(job().delay(secs(20))).await;
    let claimed = d.claim_as(d.claim_request(1)).await;
    assert_eq!(
        (claimed.next_due, claimed.next_deadline),
        (Some(secs(20)), None)
    );
    d.enqueue(job()).await;
    d.advance(secs(5)).await;
    let claimed = d.claim_as(d.claim_request(2)).await;
    assert_eq!(
        (claimed.next_due, claimed.next_deadline),
        (Some(secs(15)), Some(TERM))
    );
    // What has fallen due is not what comes next.
    d.advance(secs(15)).await;
    let claimed = d.claim_as(d.claim_request(2)).await;
    assert_eq!(
        (claimed.next_due, claimed.next_deadline),
        (Some(secs(10)), Some(TERM - secs(15)))
    );
}

/// Of several queues it tells what comes first in any of them.
pub async fn tells_what_comes_first_of_several_queues(d: &Driver) {
    let from = |names: [&str; 2]| {
        let mut request = d.claim_request(1);
        let first = request.queues[0].clone();
        let named = names.iter().map(|name| ClaimQueue {
            queue: queue_named(name),
            ..first.clone()
        });
        request.queues = named.collect();
        request
    };
    for (name, delay) in [("a", 30), ("b", 50)] {
        let new = job().queue(name).expect("a name");
        d.enqueue_all(vec![new.clone(), new.delay(secs(delay))])
            .await;
        d.claim_as(from([name, name])).await;
        d.advance(secs(10)).await;
    }
    for names in [["a", "b"], ["b", "a"]] {
        let claimed = d.claim_as(from(names)).await;
        assert_eq!(claimed.next_due, Some(secs(10)), "{names:?}");
        assert_eq!(claimed.next_deadline, Some(TERM - secs(20)), "{names:?}");
    }
}

/// A suspect is granted only if the claim admits one.
pub async fn suspects_are_granted_on_request_only(d: &Driver) {
    let suspect = suspect(d).await;
    assert!(d.claim_ids(9).await.is_empty());
    assert_eq!(d.claim_one().await.id(), suspect.id());
}

/// A claim gets one suspect at most.
pub async fn a_claim_gets_one_suspect(d: &Driver) {
    for _ in 0..3 {
        suspect(d).await;
    }
    let plain = d.enqueue(job()).await;
    let mut request = d.claim_request(9);
    request.admit_suspect = true;
    let held = Held::all(&d.claim_as(request).await);
    assert_eq!(held.iter().filter(|h| h.job.is_suspect()).count(), 1);
    assert_eq!(held.len(), 2);
    assert_eq!(held[1].id(), plain);
}

/// One suspect at most is that of all queues of a claim, wherever it is.
pub async fn one_suspect_of_several_queues(d: &Driver) {
    let of = |name: &str| job().queue(name).expect("a name");
    let from = |names: &[&str]| {
        let mut request = d.claim_request(9);
        let first = request.queues[0].clone();
        let named = names.iter().map(|name| ClaimQueue {
            queue: queue_named(name),
            ..first.clone()
        });
        request.queues = named.collect();
        request
    };
    for name in ["a", "b"] {
        d.enqueue(of(name)).await;
        for _ in 0..2 {
            let held = Held::all(&d.claim_as(from(&[name])).await);
            assert_eq!(d.renew(held[0].lapse()).await, Renewal::Fenced);
        }
    }
    d.enqueue(of("c")).await;
    let mut suspects: Vec<Vec<_>> = Vec::new();
    for names in [["a", "b"], ["c", "b"]] {
        let mut request = from(&names);
        request.admit_suspect = true;
        let held = Held::all(&d.claim_as(request).await);
        let held = held.iter().filter(|held| held.job.is_suspect());
        suspects.push(held.map(|held| held.receipt.queue().clone()).collect());
    }
    let one = |name: &str| vec![queue_named(name)];
    assert_eq!(suspects, [one("a"), one("b")]);
}

/// Suspects are served first within their priority, and not before a better one.
pub async fn suspects_are_first_within_their_priority(d: &Driver) {
    let suspect = suspect_of(d, job().priority(3)).await;
    let last = d.enqueue(job().priority(4)).await;
    let peer = d.enqueue(job().priority(3)).await;
    let high = d.enqueue(job().priority(0)).await;
    let mut request = d.claim_request(9);
    request.admit_suspect = true;
    let got: Vec<_> = Held::all(&d.claim_as(request).await)
        .iter()
        .map(Held::id)
        .collect();
    assert_eq!(got, [high, suspect.id(), peer, last]);
}

/// A revoked or surrendered suspect is still a suspect.
pub async fn a_suspect_stays_one(d: &Driver) {
    suspect(d).await;
    let held = d.claim_one().await;
    d.settled(&held, surrender()).await;
    assert!(d.claim_ids(1).await.is_empty());
    let held = d.claim_one().await;
    d.control(ControlCommand::Revoke(LeaseSelect::Job(held.id())))
        .await;
    assert!(d.claim_ids(1).await.is_empty());
    let held = d.claim_one().await;
    d.settled(&held, complete()).await;
}

/// A claim that names a queue twice gives each lease once.
pub async fn a_queue_named_twice_is_one_queue(d: &Driver) {
    let ids = d.enqueue_many(3).await;
    let mut request = d.claim_request(9);
    request.queues.push(request.queues[0].clone());
    let again = request.clone();
    let given = Held::all(&d.claim_as(request).await);
    assert_eq!(given.iter().map(Held::id).collect::<Vec<_>>(), ids);
    let given_again = Held::all(&d.claim_as(again).await);
    assert_eq!(given_again.iter().map(Held::id).collect::<Vec<_>>(), ids);
}

/// A zero byte is in no name of a holder: not every engine can store it.
pub async fn zero_bytes_are_refused(d: &Driver) {
    d.enqueue(job()).await;
    let before = d.snapshot().await;
    for field in ["owner", "task"] {
        let mut request = d.claim_request(1);
        match field {
            "owner" => request.owner = "a\0b".into(),
            _ => request.task = "a\0b".into(),
        }
        let error = d.store().claim(request).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert_eq!(d.snapshot().await, before);
}

/// Claims over the limits are refused, and grant nothing.
pub async fn limits_are_checked(d: &Driver) {
    d.enqueue(job()).await;
    let before = d.snapshot().await;
    let long: std::sync::Arc<str> = "x".repeat(limits::OWNER_BYTES + 1).into();
    let mut bad = Vec::new();
    for field in [
        "max",
        "max",
        "owner",
        "task",
        "queues",
        "queues",
        "term",
        "max_lifetime",
    ] {
        let mut request = d.claim_request(1);
        match (field, bad.len()) {
            ("max", 0) => request.max = 0,
            ("max", _) => request.max = limits::GRANT_LEASES + 1,
            ("owner", _) => request.owner = long.clone(),
            ("task", _) => request.task = long.clone(),
            ("queues", 4) => request.queues.clear(),
            ("queues", _) => {
                request.queues = vec![request.queues[0].clone(); limits::GRANT_LEASES + 1];
            }
            ("term", _) => request.queues[0].term = secs(0),
            _ => request.queues[0].max_lifetime = limits::DURATION_MAX + secs(1),
        }
        bad.push((field, request));
    }
    for (field, request) in bad {
        let error = d.store().claim(request).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert_eq!(d.snapshot().await, before);
}

/// Two claimers never get the same job.
pub async fn no_job_goes_to_two_claimers(d: &Driver) {
    d.enqueue_many(100).await;
    let other = d.other().await;
    let (a, b) = tokio::join!(d.claim_ids(60), other.claim_ids(60));
    let mut all: Vec<_> = a.into_iter().chain(b).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 100);
}

/// A mark that a fence has seen raises the floor: the next token is above it.
pub async fn a_surrenders_mark_raises_the_floor(d: &Driver) {
    let held = d.held(job()).await;
    let mark = FencingToken::new(held.token().get() + 3_600_000_000);
    let outcome = Outcome::Surrender {
        delay: secs(0),
        mark: Some(mark),
    };
    d.settled(&held, outcome).await;
    let again = d.claim_one().await;
    assert!(again.token() > mark);
    assert_eq!(again.job.failures, 0);
}

/// Tokens raised by a mark in one queue do not keep another queue's jobs from their workers.
pub async fn a_mark_stops_no_other_queue(d: &Driver) {
    let held = d.held(job()).await;
    let mark = FencingToken::new(held.token().get() + 3_600_000_000);
    let outcome = Outcome::Surrender {
        delay: secs(0),
        mark: Some(mark),
    };
    d.settled(&held, outcome).await;
    assert!(d.claim_one().await.token() > mark);

    let id = d.enqueue(job().queue("other").expect("a name")).await;
    let mut request = d.claim_request(1);
    request.queues[0].queue = queue_named("other");
    let held = Held::all(&d.claim_as(request).await);
    assert_eq!(held.iter().map(Held::id).collect::<Vec<_>>(), [id]);
}

/// The claim's terms are those of its own request, not of an earlier one.
pub async fn each_claim_brings_its_terms(d: &Driver) {
    d.enqueue_many(2).await;
    let mut request = d.claim_request(1);
    request.queues = vec![ClaimQueue {
        queue: queue(),
        term: secs(3),
        max_lifetime: LIFETIME,
    }];
    assert_eq!(d.claim_as(request).await.grants[0].granted, secs(3));
    assert_eq!(d.claim_one().await.granted, TERM);
}

/// A claim expires all that is overdue, whether that fits into a step of the store or does not
/// quite.
pub async fn expires_all_that_is_overdue(d: &Driver) {
    for count in [49, 50, 51] {
        let ids = d.enqueue_many(count).await;
        assert_eq!(d.claim(count).await.len(), count);
        d.advance(TERM).await;
        let claimed = d.claim_as(d.claim_request(count)).await;
        let expired: Vec<_> = claimed.expired.iter().map(|end| end.job).collect();
        assert_eq!(expired, ids);
        let again = Held::all(&claimed);
        assert_eq!(again.iter().map(Held::id).collect::<Vec<_>>(), ids);
        let ends = again.iter().map(|held| (held, complete())).collect();
        let verdicts = d.store().settle(d.settle_request(ends)).await;
        assert_eq!(verdicts.expect("settle"), vec![HELD; count]);
    }
}

/// As many as asked in all, from several queues: the first gives what it has, the next the rest.
pub async fn as_many_as_asked_of_several_queues(d: &Driver) {
    let of = |name: &str| job().queue(name).expect("a name");
    let mut ids = d.enqueue_all(vec![of("a"); 3]).await;
    ids.extend(d.enqueue_all(vec![of("b"); 9]).await);
    let mut request = d.claim_request(7);
    let wanted = |name: &str| ClaimQueue {
        queue: queue_named(name),
        ..request.queues[0].clone()
    };
    // Named twice, which is no plain claim.
    request.queues = vec![wanted("a"), wanted("b"), wanted("a")];
    let got = Held::all(&d.claim_as(request).await);
    assert_eq!(got.iter().map(Held::id).collect::<Vec<_>>(), ids[..7]);
}

/// A claim that would find nothing needs no token: it is answered also while the clock is behind
/// the last one. One that would find something gets it, or is told to wait.
pub async fn finding_nothing_needs_no_token(d: &Driver) {
    // A new issuer starts above the clock of that time, and so could not fall behind it.
    d.settled(&d.held(job()).await, complete()).await;
    d.advance(secs(400)).await;
    let held = d.held(job()).await;
    let due = d.enqueue(job().delay(secs(10))).await;
    d.set_back(secs(300)).await;
    // A queue that is named twice is one queue, and no plain claim.
    let twice = || {
        let mut request = d.claim_request(1);
        request.queues.push(request.queues[0].clone());
        request
    };
    let nothing = async || {
        for request in [d.claim_request(1), twice()] {
            let claimed = d.store().claim(request).await;
            assert!(claimed.expect("an answer").grants.is_empty());
        }
    };
    // Neither is the lease overdue nor the job due.
    nothing().await;
    d.control(ControlCommand::Pause(queue())).await;
    let ready = d.enqueue(job()).await;
    nothing().await;
    d.control(ControlCommand::Resume(queue())).await;
    let something = async |id, request| match d.store().claim(request).await {
        Ok(claimed) => {
            let got = Held::all(&claimed);
            assert_eq!(got.iter().map(Held::id).collect::<Vec<_>>(), [id]);
            d.settled(&got[0], complete()).await;
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::TokensAhead, "{error}");
            let gone = d.control(ControlCommand::Cancel(Select::Job(id))).await;
            assert_eq!(gone.done, 1);
        }
    };
    something(ready, twice()).await;
    nothing().await;
    // What is due is something, also where no other visit of the queue sees it.
    for again in [false, true] {
        let soon = d.enqueue(job().delay(secs(2))).await;
        d.advance(secs(2)).await;
        let request = if again { twice() } else { d.claim_request(1) };
        something(soon, request).await;
        nothing().await;
    }
    d.advance(secs(356)).await;
    assert_eq!(d.claim_ids(9).await, [held.id(), due]);
}

/// What is overdue is something to find, too: a claim that cannot grant it is told to wait.
pub async fn overdue_is_work_while_the_clock_is_behind(d: &Driver) {
    // More than one claim expires, and all that it does expire is granted again.
    d.enqueue_many(limits::STEP_JOBS + 1).await;
    d.claim(limits::STEP_JOBS).await;
    let last = d.claim_ids(1).await;
    d.advance(secs(400)).await;
    assert_eq!(d.claim(limits::STEP_JOBS).await.len(), limits::STEP_JOBS);
    // To the very moment of its deadline.
    d.set_back(secs(400) - TERM).await;
    match d.store().claim(d.claim_request(9)).await {
        Ok(claimed) => {
            let got: Vec<_> = Held::all(&claimed).iter().map(Held::id).collect();
            assert_eq!(got, last);
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::TokensAhead, "{error}");
            d.advance(secs(400) - TERM).await;
            assert_eq!(d.claim_ids(9).await, last);
        }
    }
}

/// So is what was surrendered just before.
pub async fn a_surrender_is_work_while_the_clock_is_behind(d: &Driver) {
    d.settled(&d.held(job()).await, complete()).await;
    d.advance(secs(400)).await;
    let held = d.held(job()).await;
    d.set_back(secs(300)).await;
    d.settled(&held, surrender()).await;
    match d.store().claim(d.claim_request(1)).await {
        Ok(claimed) => {
            let got: Vec<_> = Held::all(&claimed).iter().map(Held::id).collect();
            assert_eq!(got, [held.id()]);
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::TokensAhead, "{error}");
            assert_eq!(d.state(held.id()).await, Some(JobState::Ready));
        }
    }
}

/// Once a claim has what it asked for, the queues that it names behind are none of its business.
pub async fn visits_no_queue_in_vain(d: &Driver) {
    let of = |name: &str| job().queue(name).expect("a name");
    let wanted = |request: &mut ClaimRequest, names: &[&str]| {
        let first = request.queues[0].clone();
        let named = names.iter().map(|name| ClaimQueue {
            queue: queue_named(name),
            ..first.clone()
        });
        request.queues = named.collect();
    };
    d.enqueue_all(vec![of("b"), of("b").delay(TERM)]).await;
    let mut request = d.claim_request(1);
    wanted(&mut request, &["b"]);
    let overdue = Held::all(&d.claim_as(request).await);
    d.advance(TERM).await;
    // Named twice, which is no plain claim.
    for names in [&["a", "b"][..], &["a", "b", "a"]] {
        let first = d.enqueue(of("a")).await;
        let mut request = d.claim_request(1);
        wanted(&mut request, names);
        let claimed = d.claim_as(request).await;
        let got: Vec<_> = Held::all(&claimed).iter().map(Held::id).collect();
        assert_eq!((got, claimed.expired), (vec![first], Vec::new()));
        assert_eq!(d.state(overdue[0].id()).await, Some(JobState::Leased));
    }
    let mut request = d.claim_request(9);
    wanted(&mut request, &["a", "b"]);
    let claimed = d.claim_as(request).await;
    assert_eq!((Held::all(&claimed).len(), claimed.expired.len()), (2, 1));
}

/// A late settlement ends one lease of an overdue grant; the others expire in the next claim.
pub async fn siblings_of_a_late_settlement_expire(d: &Driver) {
    let ids = d.enqueue_many(3).await;
    let held = d.claim(3).await;
    d.advance(TERM).await;
    let late = Verdict::Held {
        late: true,
        cancel: false,
    };
    assert_eq!(d.settle(&held[1], complete()).await, late);
    let claimed = d.claim_as(d.claim_request(9)).await;
    let expired: Vec<_> = claimed.expired.iter().map(|end| end.job).collect();
    assert_eq!(expired, [ids[0], ids[2]]);
    let got: Vec<_> = Held::all(&claimed).iter().map(Held::id).collect();
    assert_eq!(got, [ids[0], ids[2]]);
    let ledger = d.ledger().await;
    assert_eq!((ledger.completed, ledger.late, ledger.live), (1, 1, 2));
}

/// Tokens run 20 ms ahead of the clock at most: a claim is given what fits, and none if nothing
/// does. Memory has no such limit.
pub async fn as_many_tokens_as_fit(d: &Driver) {
    let instant = std::time::Duration::from_micros(1);
    let lead = instant * 20_000;
    // A new issuer starts above the clock of that time.
    d.settled(&d.held(job()).await, complete()).await;
    d.advance(secs(9)).await;
    let last = d.held(job()).await.token().get();
    let (ids, mut given) = (d.enqueue_many(12).await, Vec::new());
    d.set_back(lead - instant * 5).await;
    // One after the other, and then as many as there are.
    for (asked, fit) in [(1, 1), (9, 4)] {
        let held = d.claim(asked).await;
        if d.store().name() != "memory" {
            assert_eq!(held.len(), fit, "of {asked}");
        }
        given.extend(held);
    }
    if d.store().name() != "memory" {
        let ahead = d.store().claim(d.claim_request(9)).await;
        let kind = ahead.expect_err("nothing fits").kind();
        assert_eq!(kind, ErrorKind::TokensAhead);
        d.advance(instant * 2).await;
        given.extend(d.claim(9).await);
        assert_eq!(given.len(), 7);
    }
    let follow = |(at, held): (usize, &Held)| held.token().get() == last + 1 + at as u64;
    assert!(given.iter().enumerate().all(follow), "{given:?} {last}");
    let got: Vec<_> = given.iter().map(Held::id).collect();
    assert_eq!(got, ids[..given.len()]);
}

/// Tokens that one process is given grow across its queues, as long as they fit.
pub async fn tokens_grow_across_queues(d: &Driver) {
    let instant = std::time::Duration::from_micros(1);
    let claim = async |name: &str| {
        let job = job().queue(name).expect("a name");
        d.enqueue(job).await;
        let mut request = d.claim_request(1);
        request.queues[0].queue = queue_named(name);
        d.claim_as(request).await.grants[0].id.get()
    };
    // Neither is new.
    let first = claim("a").await;
    assert!(claim("b").await > first);
    d.advance(secs(9)).await;
    let last = claim("a").await;
    d.set_back(instant * 19_999).await;
    assert_eq!(claim("b").await, last + 1);
}

/// A claim takes jobs until its bytes are used up, from all its queues together, and each grant is
/// full to the byte.
pub async fn bytes_are_counted_to_the_last(d: &Driver) {
    let of = |name: &str| job().queue(name).expect("a name");
    let big = |name: &str| {
        let mut big = of(name);
        big.payload = vec![1; limits::PAYLOAD_BYTES].into();
        big
    };
    // Sixteen make a grant, and sixty-four a call.
    d.enqueue_all(vec![big("a"); 60]).await;
    let rest = [vec![big("b"); 4], vec![of("b"); 2]].concat();
    let rest = d.enqueue_all(rest).await;
    let claim = async || {
        let mut request = d.claim_request(limits::GRANT_LEASES);
        let wanted = |name: &str| ClaimQueue {
            queue: queue_named(name),
            ..request.queues[0].clone()
        };
        request.queues = vec![wanted("a"), wanted("b")];
        d.claim_as(request).await
    };
    let claimed = claim().await;
    let leases: Vec<_> = claimed
        .grants
        .iter()
        .map(|grant| grant.leases.len())
        .collect();
    assert_eq!(leases, [16, 16, 16, 12, 4]);
    let left: Vec<_> = Held::all(&claim().await).iter().map(Held::id).collect();
    assert_eq!(left, rest[4..]);
}

/// A suspect that was cancelled while it was first in line takes nothing from the one behind it.
pub async fn a_suspect_that_is_gone_is_in_nobodys_way(d: &Driver) {
    let behind = suspect(d).await;
    // What expires goes to the front.
    let gone = suspect(d).await;
    d.control(ControlCommand::Cancel(Select::Job(gone.id())))
        .await;
    assert_eq!(d.claim_one().await.id(), behind.id());
}

/// A job that has expired twice, ready again.
pub(super) async fn suspect(d: &Driver) -> Held {
    suspect_of(d, job()).await
}

async fn suspect_of(d: &Driver, new: leasehold::NewJob) -> Held {
    let id = d.enqueue(new).await;
    for _ in 0..2 {
        let held = d.claim(1).await.remove(0);
        assert_eq!(held.id(), id, "another job was in the way");
        assert_eq!(d.renew(held.lapse()).await, Renewal::Fenced);
        if d.view(id).await.job.is_suspect() {
            return held;
        }
    }
    panic!("two expiries make a suspect");
}

/// What comes next is told of the queues that were asked for, whether there was something to grant
/// or not.
pub async fn tells_nothing_of_other_queues(d: &Driver) {
    let of = |name: &str| job().queue(name).expect("a name");
    for (name, seconds) in [("early", 10), ("late", 30)] {
        d.enqueue_all(vec![of(name).delay(secs(seconds)), of(name)])
            .await;
    }
    let claim = async |name: &str, term: u64| {
        let mut request = d.claim_request(9);
        request.queues[0].queue = queue_named(name);
        request.queues[0].term = secs(term);
        let claimed = d.claim_as(request).await;
        let next = (claimed.next_due, claimed.next_deadline);
        (Held::all(&claimed).len(), next)
    };
    let next = |due, deadline| (Some(secs(due)), Some(secs(deadline)));
    assert_eq!(claim("early", 20).await, (1, next(10, 20)));
    assert_eq!(claim("late", 40).await, (1, next(30, 40)));
    assert_eq!(claim("late", 40).await, (0, next(30, 40)));
    assert_eq!(claim("early", 20).await, (0, next(10, 20)));
    // A dead job waits for nothing.
    d.enqueue(job()).await;
    d.settled(&d.claim_one().await, bury()).await;
    let claimed = d.claim_as(d.claim_request(1)).await;
    assert_eq!((claimed.next_due, claimed.next_deadline), (None, None));
}

/// What falls due or expires at this very moment is served by this very claim, with what is ready
/// or without.
pub async fn the_moment_itself_counts(d: &Driver) {
    let claim = async || {
        let mut request = d.claim_request(9);
        request.queues[0].term = secs(5);
        let claimed = d.claim_as(request).await;
        (Held::all(&claimed), claimed.expired.len())
    };
    let moment = std::time::Duration::from_micros(1);
    for ready in [0, 2] {
        for (delayed, leased) in [(1, 0), (0, 1), (1, 1)] {
            d.enqueue_many(leased).await;
            assert_eq!(claim().await.0.len(), leased);
            d.enqueue_all(vec![job().delay(secs(5)); delayed]).await;
            d.advance(secs(5) - moment).await;
            d.enqueue_many(ready).await;
            let (mut held, expired) = claim().await;
            assert_eq!((held.len(), expired), (ready, 0));
            d.advance(moment).await;
            d.enqueue_many(ready).await;
            let (more, expired) = claim().await;
            assert_eq!((more.len(), expired), (ready + delayed + leased, leased));
            held.extend(more);
            let ends = held.iter().map(|held| (held, complete())).collect();
            let verdicts = d.store().settle(d.settle_request(ends)).await;
            assert_eq!(verdicts.expect("settle"), vec![HELD; held.len()]);
        }
    }
}
