//! inspect: every view, its order, and its pages.

use super::driver::{
    Driver, LIFETIME, TERM, bury, complete, job, names_the_field, queue, queue_named, secs,
    surrender,
};
use leasehold::inspect::{self, LeaseFilter, Page, Query};
use leasehold::job::{JobId, JobState};
use leasehold::limits;
use leasehold::store::{ClaimQueue, ControlCommand, Select};

/// The ids of a view, read in pages of two.
async fn in_pages(d: &Driver, state: JobState) -> Vec<JobId> {
    let mut ids = Vec::new();
    let mut page = Page::first(2);
    loop {
        let view = inspect::jobs(d.store(), queue(), state, page)
            .await
            .expect("jobs");
        assert!(view.rows.len() <= 2);
        assert!(view.next.is_none() || view.rows.len() == 2);
        ids.extend(view.rows.iter().map(|row| row.job.id));
        match view.next {
            None => return ids,
            after => page = Page { after, rows: 2 },
        }
    }
}

/// An empty store shows nothing.
pub async fn an_empty_store_shows_nothing(d: &Driver) {
    let snapshot = d.snapshot().await;
    assert!(snapshot.queues.is_empty() && snapshot.jobs.is_empty());
    assert!(snapshot.leases.is_empty() && snapshot.audit.is_empty());
    let nobody = inspect::job(d.store(), JobId::generate())
        .await
        .expect("a view");
    assert!(nobody.is_none());
    for state in JobState::ALL {
        assert!(in_pages(d, state).await.is_empty());
    }
}

/// Queues come by name, and only those of the store.
pub async fn queues_come_by_name(d: &Driver) {
    for name in ["b", "a", "c", "B"] {
        d.enqueue(job().queue(name).expect("a name")).await;
    }
    let queues = inspect::queues(d.store()).await.expect("queues");
    let names: Vec<_> = queues.iter().map(|view| view.queue.as_str()).collect();
    assert_eq!(names, ["B", "a", "b", "c"]);
}

/// Every key that jobs are parked behind is shown once, with their number, page by page.
pub async fn parked_jobs_are_counted_by_key(d: &Driver) {
    // Keys that begin like others, and with what an encoding might trip over.
    let keys = ["\0", "a", "a\0", "a\0\0b", "ab", "b\u{ff}", "c/7"];
    let mut jobs = Vec::new();
    for (more, key) in keys.iter().enumerate() {
        jobs.extend(vec![job().exclusive(*key).expect("a key"); more + 2]);
    }
    // One job alone is parked behind nobody.
    jobs.push(job().exclusive("alone").expect("a key"));
    d.enqueue_all(jobs).await;
    d.enqueue_many(3).await;
    let parked = async |rows: usize| {
        let (mut seen, mut page) = (Vec::new(), Page::first(rows));
        loop {
            let view = inspect::parked(d.store(), queue(), page).await;
            let view = view.expect("keys");
            assert!(view.rows.len() <= rows);
            let row = |row: inspect::ParkedView| (row.key.as_str().to_owned(), row.jobs);
            seen.extend(view.rows.into_iter().map(row));
            match view.next {
                None => break,
                after => page = Page { after, rows },
            }
        }
        seen.sort();
        seen
    };
    let expected: Vec<(String, u64)> = keys.iter().map(|key| (*key).into()).zip(1..).collect();
    for rows in [1, 2, 7, 100] {
        assert_eq!(parked(rows).await, expected);
    }
    // The head of a line goes, and the next one is no longer parked.
    let held = d.claim(100).await;
    for held in held {
        d.settled(&held, complete()).await;
    }
    let fewer: Vec<(String, u64)> = expected
        .into_iter()
        .filter(|(_, jobs)| *jobs > 1)
        .map(|(key, jobs)| (key, jobs - 1))
        .collect();
    assert_eq!(parked(3).await, fewer);
    let nowhere = inspect::parked(d.store(), queue_named("nowhere"), Page::first(1)).await;
    assert!(nowhere.expect("a view").rows.is_empty());
}

/// The counts of a queue are those of its jobs.
pub async fn counts_are_right(d: &Driver) {
    d.enqueue_all(vec![job().retention(secs(60)); 5]).await;
    d.enqueue(job().delay(secs(60))).await;
    let held = d.claim(4).await;
    d.settled(&held[0], complete()).await;
    d.settled(&held[1], bury()).await;
    d.control(ControlCommand::Cancel(Select::Job(held[2].id())))
        .await;
    assert!(d.settle(&held[2], surrender()).await.is_held());
    let counts = d.queue().await.counts;
    for state in JobState::ALL {
        assert_eq!(counts.of(state), 1, "{state}");
    }
}

/// How long the next job in line has been due.
pub async fn oldest_ready_tells_the_wait(d: &Driver) {
    let held = d.held(job()).await;
    assert_eq!(d.queue().await.oldest_ready, None);
    d.enqueue(job()).await;
    d.advance(secs(7)).await;
    assert_eq!(d.queue().await.oldest_ready, Some(secs(7)));
    d.settled(&held, complete()).await;
}

/// Ready jobs are listed in the order in which they are served.
pub async fn ready_jobs_in_order(d: &Driver) {
    let mut ids = Vec::new();
    for priority in [5, 2, 5, 2, 0] {
        ids.push(d.enqueue(job().priority(priority)).await);
    }
    let listed = in_pages(d, JobState::Ready).await;
    assert_eq!(listed, [4, 1, 3, 0, 2].map(|at: usize| ids[at]));
    assert_eq!(d.claim_ids(9).await, listed);
}

/// Surrendered jobs are listed at the front.
pub async fn the_front_is_listed_first(d: &Driver) {
    let ids = d.enqueue_many(3).await;
    let held = d.claim(2).await;
    d.settled(&held[1], surrender()).await;
    d.settled(&held[0], surrender()).await;
    assert_eq!(in_pages(d, JobState::Ready).await, ids);
}

/// Parked jobs are listed with the ready ones, and marked.
pub async fn parked_jobs_are_listed(d: &Driver) {
    let keyed = job().exclusive("k").expect("a key");
    let ids = d
        .enqueue_all(vec![keyed.clone(), keyed.clone(), keyed])
        .await;
    let listed = in_pages(d, JobState::Ready).await;
    assert_eq!(listed, ids);
    assert!(!d.view(ids[0]).await.parked && d.view(ids[2]).await.parked);
}

/// Scheduled jobs are listed by due time.
pub async fn scheduled_jobs_by_due_time(d: &Driver) {
    let mut ids = Vec::new();
    for delay in [30, 10, 20, 10] {
        ids.push(d.enqueue(job().delay(secs(delay))).await);
    }
    let listed = in_pages(d, JobState::Scheduled).await;
    assert_eq!(listed, [1, 3, 2, 0].map(|at: usize| ids[at]));
}

/// Leased jobs are listed, each with its lease.
pub async fn leased_jobs_with_their_lease(d: &Driver) {
    let ids = d.enqueue_many(5).await;
    let held = d.claim(5).await;
    assert_eq!(in_pages(d, JobState::Leased).await, ids);
    for held in held {
        let lease = d.view(held.id()).await.lease.expect("a lease");
        assert_eq!((lease.token, lease.job), (held.token(), held.id()));
    }
}

/// Settled jobs are listed in the order in which they were settled.
pub async fn settled_jobs_in_order_of_their_end(d: &Driver) {
    let ids = d.enqueue_all(vec![job().retention(secs(60)); 6]).await;
    let held = d.claim(6).await;
    for at in [4, 1, 3] {
        d.settled(&held[at], complete()).await;
    }
    d.advance(secs(1)).await;
    d.settled(&held[0], complete()).await;
    d.settled(&held[5], bury()).await;
    d.settled(&held[2], bury()).await;
    let completed = in_pages(d, JobState::Completed).await;
    assert_eq!(completed, [4, 1, 3, 0].map(|at: usize| ids[at]));
    assert_eq!(in_pages(d, JobState::Dead).await, [ids[5], ids[2]]);
}

/// Live leases are listed by deadline, overdue ones with no time left.
pub async fn leases_by_deadline(d: &Driver) {
    d.enqueue_many(4).await;
    let first = d.claim(2).await;
    d.advance(secs(10)).await;
    let second = d.claim(2).await;
    let _ = d.renew(first[0].beat()).await;
    d.advance(secs(1)).await;
    let _ = d.renew(second[0].beat()).await;
    let listed = d.snapshot().await.leases;
    let tokens: Vec<_> = listed.iter().map(|lease| lease.token).collect();
    let wanted = [&first[0], &first[1], &second[0], &second[1]].map(super::Held::token);
    assert_eq!(tokens, wanted);
    assert_eq!(listed[0].time_left, secs(59));
    d.advance(TERM * 2).await;
    assert_eq!(d.snapshot().await.leases[0].time_left, secs(0));
}

/// Leases can be asked for by queue, owner and task, and by all three; in pages.
pub async fn leases_by_queue_owner_and_task(d: &Driver) {
    let calls = [
        ("x", "a", "s", 3),
        ("x", "b", "s", 1),
        ("y", "a", "s", 1),
        ("x", "a", "t", 1),
    ];
    for (name, owner, task, n) in calls {
        d.enqueue_all(vec![job().queue(name).expect("a name"); n])
            .await;
        let mut request = d.claim_request(n);
        request.owner = owner.into();
        request.task = task.into();
        let max_lifetime = LIFETIME;
        let queue = queue_named(name);
        request.queues = vec![ClaimQueue {
            queue,
            term: TERM,
            max_lifetime,
        }];
        d.claim_as(request).await;
    }
    let x = Some(queue_named("x"));
    let filters = [
        (
            LeaseFilter {
                queue: x.clone(),
                ..LeaseFilter::default()
            },
            5,
        ),
        (
            LeaseFilter {
                owner: Some("a".into()),
                ..LeaseFilter::default()
            },
            5,
        ),
        (
            LeaseFilter {
                task: Some("s".into()),
                ..LeaseFilter::default()
            },
            5,
        ),
        (
            LeaseFilter {
                queue: x,
                owner: Some("a".into()),
                task: Some("s".into()),
            },
            3,
        ),
        (
            LeaseFilter {
                owner: Some("nobody".into()),
                ..LeaseFilter::default()
            },
            0,
        ),
    ];
    for (filter, n) in filters {
        let mut tokens = Vec::new();
        let mut page = Page::first(2);
        loop {
            let view = inspect::leases(d.store(), filter.clone(), page)
                .await
                .expect("leases");
            tokens.extend(view.rows.iter().map(|row| row.token));
            let Some(after) = view.next else { break };
            page = Page {
                after: Some(after),
                rows: 2,
            };
        }
        assert!(tokens.is_sorted_by(|a, b| a < b));
        assert_eq!(tokens.len(), n, "{filter:?}");
    }
}

/// The audit trail is read newest first, in pages.
pub async fn audit_newest_first(d: &Driver) {
    for at in 0..5 {
        let mut request = d.control_request(ControlCommand::Pause(queue()));
        request.reason = at.to_string();
        d.store().control(request).await.expect("control");
    }
    let mut reasons = Vec::new();
    let mut page = Page::first(2);
    loop {
        let view = inspect::audit(d.store(), page).await.expect("audit");
        reasons.extend(view.rows.into_iter().map(|row| row.reason));
        let Some(after) = view.next else { break };
        page = Page {
            after: Some(after),
            rows: 2,
        };
    }
    assert_eq!(reasons, ["4", "3", "2", "1", "0"]);
}

/// A page that ends with the last row has no next.
pub async fn a_full_last_page_is_the_last(d: &Driver) {
    d.enqueue_many(4).await;
    assert_eq!(in_pages(d, JobState::Ready).await.len(), 4);
    let page = Page::first(4);
    let view = inspect::jobs(d.store(), queue(), JobState::Ready, page)
        .await
        .expect("jobs");
    assert_eq!((view.rows.len(), view.next), (4, None));
}

/// Page sizes are checked, and cursors that no store gave are refused.
pub async fn limits_are_checked(d: &Driver) {
    d.enqueue(job()).await;
    for rows in [0, limits::PAGE_ROWS + 1] {
        let query = Query::Jobs {
            queue: queue(),
            state: JobState::Ready,
            page: Page::first(rows),
        };
        let error = d.store().inspect(query).await.expect_err("out of bounds");
        names_the_field(&error, "rows");
    }
    let page = Page {
        after: Some("not a cursor'; --".into()),
        rows: 2,
    };
    let error = inspect::audit(d.store(), page)
        .await
        .expect_err("no cursor");
    names_the_field(&error, "page");
}

/// Looking changes nothing: not even what is overdue or due.
pub async fn looking_changes_nothing(d: &Driver) {
    let held = d.held(job()).await;
    let due = d.enqueue(job().delay(secs(1))).await;
    d.advance(TERM * 2).await;
    let first = d.snapshot().await;
    assert_eq!(d.snapshot().await, first);
    assert_eq!(d.state(held.id()).await, Some(JobState::Leased));
    assert_eq!(d.state(due).await, Some(JobState::Scheduled));
}

/// A dedicated handle sees and does the same.
pub async fn a_dedicated_handle_is_the_same_store(d: &Driver) {
    let id = d.enqueue(job()).await;
    let handle = d.store().dedicated().await.expect("a handle");
    assert_eq!(handle.name(), d.store().name());
    let view = inspect::job(&*handle, id)
        .await
        .expect("a view")
        .expect("the job");
    assert_eq!(view.state, JobState::Ready);
    let held = d.claim_one().await;
    assert!(handle.renew(vec![held.beat()]).await.is_ok());
    assert_eq!(d.view(id).await.lease.expect("a lease").renewals, 1);
}
