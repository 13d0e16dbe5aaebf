//! enqueue: jobs are stored as they were given, together or not at all.

use bytes::Bytes;

use super::driver::{Driver, HELD, Held, bury, complete, job, queue_named, secs};
use leasehold::RetryPolicy;
use leasehold::clock::Timestamp;
use leasehold::job::{JobState, Key, Kind, NewJob, QueueName};
use leasehold::limits;
use leasehold::store::{ControlCommand, Enqueued, Select};

/// A job without a delay is ready, one with a delay is scheduled.
pub async fn due_is_ready_and_later_is_scheduled(d: &Driver) {
    let now = d.enqueue(job()).await;
    let later = d.enqueue(job().delay(secs(5))).await;
    assert_eq!(d.state(now).await, Some(JobState::Ready));
    assert_eq!(d.state(later).await, Some(JobState::Scheduled));
    let counts = d.queue().await.counts;
    assert_eq!((counts.ready, counts.scheduled), (1, 1));
    assert_eq!(d.ledger().await.enqueued, 2);
}

/// Everything said about a job is stored with it, and reaches the claim.
pub async fn everything_given_reaches_the_claim(d: &Driver) {
    let mut new = job()
        .priority(2)
        .header("traceparent", "00-ab")
        .header("", "");
    new = new
        .unique("u\u{0}ü")
        .expect("a key")
        .exclusive("\u{0}")
        .expect("a key");
    new.payload = Bytes::from_static(&[0, 255, 1]);
    new.version = 3;
    new.options.term = Some(secs(7));
    new.options.max_lifetime = Some(secs(70));
    new.options.runs.timeout = Some(secs(8));
    new.options.runs.stall_limit = Some(secs(9));
    new.options.runs.max_failures = Some(11);
    new.options.max_expiries = 12;
    new.options.runs.retry = Some(RetryPolicy::constant(secs(13)));
    new.options.retention = Some(secs(14));
    let held = d.held(new.clone()).await;
    let got = &*held.job;
    assert_eq!((&got.kind, &got.payload), (&new.kind, &new.payload));
    assert_eq!((&got.headers, &got.options), (&new.headers, &new.options));
    assert_eq!((got.version, got.declined_since), (3, None));
    assert_eq!(got.unique.as_deref(), new.unique.as_ref());
    assert_eq!(got.exclusive, new.exclusive);
    assert_eq!((got.failures, got.expiries, got.attempt()), (0, 0, 1));
    assert_eq!(d.view(held.id()).await.job, held.job);
}

/// The delay counts on the store's clock, from the enqueue.
pub async fn run_at_is_the_stores_now_plus_the_delay(d: &Driver) {
    let id = d.enqueue(job().delay(secs(5))).await;
    let job = d.view(id).await.job;
    assert!(job.enqueued_at > Timestamp::ZERO);
    assert_eq!(job.run_at, job.enqueued_at.after(secs(5)));
}

/// One answer per job, in order.
pub async fn answers_come_in_order(d: &Driver) {
    let request = d.enqueue_request(vec![job(); 20]);
    let ids: Vec<_> = request
        .jobs
        .iter()
        .map(|(id, _)| Enqueued::New(*id))
        .collect();
    assert_eq!(d.store().enqueue(request).await.expect("enqueue"), ids);
}

/// An empty call is a call.
pub async fn nothing_is_fine(d: &Driver) {
    assert_eq!(d.try_enqueue(Vec::new()).await.expect("enqueue"), []);
}

/// Jobs of several queues can share a call.
pub async fn one_call_serves_many_queues(d: &Driver) {
    let other = job().queue("other").expect("a name");
    d.enqueue_all(vec![job(), other, job()]).await;
    let snapshot = d.snapshot().await;
    let ready: Vec<_> = snapshot.queues.iter().map(|q| q.counts.ready).collect();
    assert_eq!(ready, [2, 1]);
    assert_eq!(snapshot.queues[1].queue, queue_named("other"));
}

/// The limits themselves are allowed.
pub async fn limits_are_inclusive(d: &Driver) {
    let name = "n".repeat(limits::NAME_BYTES);
    let mut new = NewJob::raw(
        QueueName::new(&name).expect("a name"),
        Kind::new(&name).expect("a name"),
        vec![7; limits::PAYLOAD_BYTES],
    );
    let key = "ü".repeat(limits::KEY_BYTES / 2);
    new = new
        .unique(&key)
        .expect("a key")
        .exclusive(&key)
        .expect("a key");
    new = new
        .delay(limits::DURATION_MAX)
        .retention(limits::DURATION_MAX);
    for n in 0..limits::HEADERS {
        new = new.header(format!("{n:03}"), "v".repeat(limits::HEADER_BYTES / 64 - 3));
    }
    new.options.priority = limits::PRIORITY_MAX;
    new.options.max_expiries = limits::EXPIRIES_MIN;
    new.options.term = Some(limits::DURATION_MAX);
    let id = d.enqueue(new).await;
    assert_eq!(d.view(id).await.job.payload.len(), limits::PAYLOAD_BYTES);
}

/// A payload over the limit names its field.
pub async fn payload_over_the_limit_is_refused(d: &Driver) {
    let mut new = job();
    new.payload = vec![0; limits::PAYLOAD_BYTES + 1].into();
    d.refuses(vec![job(), new], "payload").await;
}

/// Too many headers, or too long ones.
pub async fn headers_over_the_limit_are_refused(d: &Driver) {
    let mut many = job();
    for n in 0..=limits::HEADERS {
        many = many.header(n.to_string(), "");
    }
    d.refuses(vec![many], "headers").await;
    let long = job().header("h", "x".repeat(limits::HEADER_BYTES));
    d.refuses(vec![long], "headers").await;
}

/// Versions of payloads count from 1.
pub async fn a_version_under_one_is_refused(d: &Driver) {
    d.refuses(vec![job().version(0)], "version").await;
}

/// Priorities end at 7.
pub async fn priority_over_the_limit_is_refused(d: &Driver) {
    d.refuses(vec![job().priority(8)], "priority").await;
}

/// An expiry limit below three would bury a job before it can be a suspect.
pub async fn expiry_limit_under_three_is_refused(d: &Driver) {
    let mut new = job();
    new.options.max_expiries = 2;
    d.refuses(vec![new], "max_expiries").await;
}

/// Each duration has the same limit, and terms are not zero.
pub async fn durations_over_the_limit_are_refused(d: &Driver) {
    let over = limits::DURATION_MAX + secs(1);
    d.refuses(vec![job().delay(over)], "delay").await;
    d.refuses(vec![job().retention(over)], "retention").await;
    let windowed = job().unique_for("k", over).expect("a key");
    d.refuses(vec![windowed], "unique window").await;
    let mut new = job();
    new.options.term = Some(secs(0));
    d.refuses(vec![new.clone()], "term").await;
    new.options.term = None;
    new.options.max_lifetime = Some(over);
    d.refuses(vec![new], "max_lifetime").await;
}

/// At most 10,000 jobs in a call.
pub async fn jobs_over_the_limit_are_refused(d: &Driver) {
    d.refuses(vec![job(); limits::CALL_ITEMS + 1], "jobs").await;
}

/// At most 16 MiB in a call.
pub async fn bytes_over_the_limit_are_refused(d: &Driver) {
    let mut new = job();
    new.payload = vec![0; limits::PAYLOAD_BYTES].into();
    let fits = limits::CALL_BYTES / limits::PAYLOAD_BYTES;
    d.refuses(vec![new; fits + 1], "jobs").await;
}

/// Names and keys are checked before any store sees them.
pub async fn names_and_keys_are_checked(d: &Driver) {
    for bad in ["", "a b", "ä", "a/b", "a{b}", "a:b", &"n".repeat(129)] {
        assert_eq!(QueueName::new(bad).expect_err(bad).field(), Some("queue"));
        assert_eq!(Kind::new(bad).expect_err(bad).field(), Some("kind"));
    }
    let long = "k".repeat(limits::KEY_BYTES + 1);
    assert_eq!(Key::new(long).expect_err("long").field(), Some("key"));
    assert!(d.snapshot().await.queues.is_empty());
}

/// The id of a job that is gone is as good as new: whether it went alone or with others.
pub async fn an_id_is_free_once_its_job_is_gone(d: &Driver) {
    let mut request = d.enqueue_request(vec![job(); 4]);
    let ids: Vec<_> = request.jobs.iter().map(|(id, _)| *id).collect();
    let new: Vec<_> = ids.iter().copied().map(Enqueued::New).collect();
    for together in [true, false] {
        let stored = d.store().enqueue(request.clone()).await;
        assert_eq!(stored.expect("enqueue"), new);
        let held = d.claim(9).await;
        assert_eq!(held.iter().map(Held::id).collect::<Vec<_>>(), ids);
        if together {
            let ends = held.iter().map(|held| (held, complete())).collect();
            let verdicts = d.store().settle(d.settle_request(ends)).await;
            assert_eq!(verdicts.expect("settle"), [HELD; 4]);
        } else {
            for held in &held {
                d.settled(held, complete()).await;
            }
        }
        request.request = d.request();
    }
}

/// The client's id is the job: one that is there, wherever it stands, is not stored again. Its
/// neighbours in the call are.
pub async fn an_id_that_is_there_is_a_duplicate(d: &Driver) {
    let kept = d.held(job().retention(secs(3_600))).await;
    d.settled(&kept, complete()).await;
    let dead = d.held(job()).await;
    d.settled(&dead, bury()).await;
    let mut there = vec![kept.id(), dead.id()];
    // Alone in a grant, and the first, one between and the last of several.
    there.push(d.held(job()).await.id());
    there.extend(d.enqueue_many(3).await);
    assert_eq!(d.claim_ids(3).await, there[3..]);
    there.push(d.enqueue(job().delay(secs(60))).await);
    // By its id: a store that cannot do that cannot tell what is there either.
    let cancelled = d.enqueue(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(cancelled)))
        .await;
    there.extend([cancelled, d.enqueue(job()).await]);
    for id in &there {
        let mut request = d.enqueue_request(vec![job()]);
        request.jobs = vec![(*id, job())].into();
        d.unchanged(async || {
            let answers = d.store().enqueue(request).await.expect("enqueue");
            assert_eq!(answers, [Enqueued::Duplicate(*id)]);
        })
        .await;
        let mut request = d.enqueue_request(vec![job(); 2]);
        let new = request.jobs[1].0;
        request.jobs = vec![(new, job()), (*id, job())].into();
        let answers = d.store().enqueue(request).await.expect("enqueue");
        assert_eq!(answers, [Enqueued::New(new), Enqueued::Duplicate(*id)]);
    }
    assert_eq!(d.queue().await.counts.ready, 1 + there.len() as u64);
}

/// So is the second of two in one call.
pub async fn an_id_twice_in_a_call_is_stored_once(d: &Driver) {
    // By its id, as above. Its queue stays.
    let gone = d.enqueue(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(gone))).await;
    let mut request = d.enqueue_request(vec![job(); 2]);
    let [a, b] = [request.jobs[0].0, request.jobs[1].0];
    request.jobs = vec![(a, job()), (b, job()), (a, job())].into();
    let answers = d.store().enqueue(request).await.expect("enqueue");
    let told = [Enqueued::New(a), Enqueued::New(b), Enqueued::Duplicate(a)];
    assert_eq!(answers, told);
    assert_eq!(d.claim_ids(9).await, [a, b]);
}
