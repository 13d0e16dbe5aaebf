//! control: operators' commands, each on record.

use super::driver::{
    Driver, Held, LIFETIME, TERM, bury, complete, job, names_the_field, queue, queue_named, retry,
    secs, snooze, surrender,
};
use leasehold::ErrorKind;
use leasehold::clock::Timestamp;
use leasehold::inspect::{self, Page};
use leasehold::job::{JobId, JobState};
use leasehold::lease::{LeaseEnd, Verdict};
use leasehold::limits;
use leasehold::store::{
    ClaimQueue, ControlCommand, Controlled, Enqueued, LeaseSelect, Outcome, Select,
};

const CANCELLED: Verdict = Verdict::Held {
    late: false,
    cancel: true,
};

fn in_state(state: JobState) -> Select {
    Select::State {
        queue: queue(),
        state,
        max: 1_000,
    }
}

fn done(done: u64, skipped: u64) -> Controlled {
    let mut controlled = Controlled::default();
    controlled.done = done;
    controlled.skipped = skipped;
    controlled
}

/// A queue is removed once it has no jobs, and is a new one if it comes again; its tokens go on.
pub async fn an_empty_queue_is_removed(d: &Driver) {
    let remove = || ControlCommand::Remove(queue());
    assert_eq!(d.control(remove()).await.done, 0, "there is none");
    let refused = async |left: &str| {
        let request = d.control_request(remove());
        let answer = d.store().control(request).await;
        let error = answer.expect_err("a queue with jobs");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert_eq!(error.field(), Some("queue"), "{error}");
        assert!(error.to_string().contains(left), "{error} with {left}");
    };
    d.enqueue(job().delay(secs(60))).await;
    refused("1 scheduled").await;
    d.control(ControlCommand::Purge(in_state(JobState::Scheduled)))
        .await;
    d.enqueue(job()).await;
    refused("1 ready").await;
    let held = d.claim_one().await;
    refused("1 leased").await;
    d.settled(&held, bury()).await;
    refused("1 dead").await;
    d.control(ControlCommand::Purge(in_state(JobState::Dead)))
        .await;
    d.settled(&d.held(job().retention(secs(60))).await, complete())
        .await;
    refused("1 completed").await;
    d.control(ControlCommand::Purge(in_state(JobState::Completed)))
        .await;
    let unique = || job().unique_for("once", secs(60)).expect("a key");
    d.settled(&d.held(unique()).await, complete()).await;
    d.control(ControlCommand::Pause(queue())).await;

    let request = d.control_request(remove());
    for _ in 0..2 {
        let removed = d.store().control(request.clone()).await;
        assert_eq!(removed.expect("removed"), done(1, 0));
    }
    let snapshot = d.snapshot().await;
    assert!(snapshot.queues.is_empty(), "{:?}", snapshot.queues);
    let last = snapshot.audit.first().map(|entry| entry.command.clone());
    assert_eq!(last.as_deref(), Some("remove queue default"));
    assert_eq!(d.control(remove()).await.done, 0, "it is gone");
    assert!(d.claim(1).await.is_empty());

    let again = d.held(unique()).await;
    assert!(again.token() > held.token());
    let view = d.queue().await;
    assert!(!view.paused);
    assert_eq!((view.ledger.enqueued, view.ledger.granted), (1, 1));
    d.settled(&again, complete()).await;
    assert!(d.ledger().await.balances());
}

/// A queue that is removed while the clock is behind its tokens, and made again, gives none of them
/// again. A store that would forget them refuses.
pub async fn a_queue_removed_by_a_clock_set_back_gives_no_token_twice(d: &Driver) {
    let hours = secs(7_200);
    let remove = || ControlCommand::Remove(queue());
    d.settled(&d.held(job()).await, complete()).await;
    d.advance(hours).await;
    // A session does not outlive such a jump.
    let ahead = d.other().await;
    let first = ahead.held(job()).await;
    ahead.settled(&first, complete()).await;

    d.set_back(hours).await;
    let behind = d.other().await;
    let request = behind.control_request(remove());
    match behind.store().control(request).await {
        Ok(removed) => assert_eq!(removed, done(1, 0)),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::TokensAhead, "{error}");
            assert_eq!(behind.queue().await.ledger.granted, 2, "it is there");
        }
    }
    let second = behind.held(job()).await;
    assert!(second.token() > first.token(), "given before");
    behind.settled(&second, complete()).await;

    // Once it has caught up, nobody refuses.
    d.advance(hours + secs(1)).await;
    let caught_up = d.other().await;
    assert_eq!(caught_up.control(remove()).await, done(1, 0));
    let third = caught_up.held(job()).await;
    assert!(third.token() > second.token(), "given before");
}

/// Every command leaves a record: who, when, why, what.
pub async fn every_command_is_on_record(d: &Driver) {
    let held = d.held(job()).await;
    let id = held.id();
    let commands = [
        ControlCommand::Pause(queue()),
        ControlCommand::Resume(queue()),
        ControlCommand::Configure {
            queue: queue(),
            relaxed: true,
        },
        ControlCommand::Cancel(Select::Job(id)),
        ControlCommand::Revoke(LeaseSelect::Job(id)),
        ControlCommand::RetryDead(in_state(JobState::Dead)),
        ControlCommand::Reschedule {
            jobs: Select::Job(id),
            delay: secs(1),
        },
        ControlCommand::Purge(Select::Job(id)),
    ];
    let mut answers = Vec::new();
    for command in &commands {
        answers.push(d.control(command.clone()).await.done);
        d.advance(secs(1)).await;
    }
    let page = Page::first(100);
    let mut audit = inspect::audit(d.store(), page).await.expect("audit").rows;
    audit.reverse();
    assert_eq!(audit.len(), commands.len());
    for ((record, command), done) in audit.iter().zip(&commands).zip(answers) {
        assert_eq!((&*record.actor, &*record.reason), ("operator", "a test"));
        assert_eq!((&record.command, record.done), (&command.to_string(), done));
        assert!(record.at > Timestamp::ZERO);
    }
    assert!(
        audit
            .iter()
            .map(|record| record.at)
            .is_sorted_by(|a, b| a < b)
    );
    assert_eq!(audit[4].tokens, [held.token()]);
}

/// A command that changes nothing is on record too.
pub async fn a_command_in_vain_is_on_record(d: &Driver) {
    let nowhere = JobId::generate();
    assert_eq!(
        d.control(ControlCommand::Purge(Select::Job(nowhere))).await,
        done(0, 0)
    );
    assert_eq!(
        d.control(ControlCommand::Revoke(LeaseSelect::Job(nowhere)))
            .await,
        done(0, 0)
    );
    assert_eq!(d.snapshot().await.audit.len(), 2);
}

/// A zero byte is in no name and in no reason: not every engine can store it.
pub async fn zero_bytes_are_refused(d: &Driver) {
    let owner = |name: &str| ControlCommand::Revoke(LeaseSelect::Owner(name.into()));
    let task = ControlCommand::Revoke(LeaseSelect::Task("a\0b".into()));
    let cases = [
        ("actor", "a\0b", "why", ControlCommand::Pause(queue())),
        ("reason", "who", "a\0b", ControlCommand::Pause(queue())),
        ("owner", "who", "why", owner("a\0b")),
        ("task", "who", "why", task),
    ];
    for (field, actor, reason, command) in cases {
        let mut request = d.control_request(command);
        request.actor = actor.into();
        request.reason = reason.into();
        let error = d.store().control(request).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert!(d.snapshot().await.audit.is_empty());
}

/// Commands without an actor, and revokes without a reason, are refused and not on record.
pub async fn anonymous_commands_are_refused(d: &Driver) {
    let held = d.held(job()).await;
    let before = d.snapshot().await;
    let revoke = ControlCommand::Revoke(LeaseSelect::Job(held.id()));
    let cases = [
        ("actor", "", "why", revoke.clone()),
        ("reason", "who", "", revoke.clone()),
        ("actor", "", "why", ControlCommand::Pause(queue())),
    ];
    for (field, actor, reason, command) in cases {
        let mut request = d.control_request(command);
        request.actor = actor.into();
        request.reason = reason.into();
        let error = d.store().control(request).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert_eq!(d.snapshot().await, before);
}

/// Commands over the limits are refused.
pub async fn limits_are_checked(d: &Driver) {
    d.enqueue(job()).await;
    let before = d.snapshot().await;
    let select = |max| Select::State {
        queue: queue(),
        state: JobState::Ready,
        max,
    };
    let over = limits::DURATION_MAX + secs(1);
    let mut long_actor = d.control_request(ControlCommand::Purge(select(1)));
    long_actor.actor = "a".repeat(limits::OWNER_BYTES + 1);
    let mut long_reason = d.control_request(ControlCommand::Purge(select(1)));
    long_reason.reason = "r".repeat(limits::REASON_BYTES + 1);
    let requests = [
        ("actor", long_actor),
        ("reason", long_reason),
        ("max", d.control_request(ControlCommand::Purge(select(0)))),
        (
            "max",
            d.control_request(ControlCommand::Cancel(select(limits::CALL_ITEMS + 1))),
        ),
        (
            "max",
            d.control_request(ControlCommand::RetryDead(select(0))),
        ),
        (
            "delay",
            d.control_request(ControlCommand::Reschedule {
                jobs: select(1),
                delay: over,
            }),
        ),
    ];
    for (field, request) in requests {
        let error = d.store().control(request).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert_eq!(d.snapshot().await, before);
}

/// Pausing stops one queue only; both commands can be repeated.
pub async fn pause_stops_one_queue(d: &Driver) {
    d.enqueue(job()).await;
    let other = d.enqueue(job().queue("other").expect("a name")).await;
    d.control(ControlCommand::Pause(queue())).await;
    d.control(ControlCommand::Pause(queue())).await;
    let mut request = d.claim_request(9);
    let term = TERM;
    request.queues.push(ClaimQueue {
        queue: queue_named("other"),
        term,
        max_lifetime: LIFETIME,
    });
    let claimed = d.claim_as(request).await;
    assert_eq!(claimed.grants.len(), 1);
    assert_eq!(claimed.grants[0].leases[0].job.id, other);
}

/// A queue can be paused before its first job.
pub async fn pause_comes_before_the_first_job(d: &Driver) {
    d.control(ControlCommand::Pause(queue())).await;
    d.enqueue(job()).await;
    assert!(d.claim(1).await.is_empty());
    assert!(d.queue().await.paused);
}

/// Leases of a paused queue can be renewed and settled.
pub async fn holders_do_not_notice_a_pause(d: &Driver) {
    let held = d.held(job()).await;
    d.control(ControlCommand::Pause(queue())).await;
    assert!(matches!(
        d.renew(held.beat()).await,
        leasehold::store::Renewal::Held { .. }
    ));
    d.settled(&held, complete()).await;
}

/// Cancelling a pending job makes it cancelled.
pub async fn cancel_of_a_pending_job(d: &Driver) {
    let ready = d.enqueue(job()).await;
    let scheduled = d.enqueue(job().delay(secs(5))).await;
    for id in [ready, scheduled] {
        assert_eq!(
            d.control(ControlCommand::Cancel(Select::Job(id))).await,
            done(1, 0)
        );
        assert_eq!(d.state(id).await, Some(JobState::Cancelled));
        assert_eq!(
            d.control(ControlCommand::Cancel(Select::Job(id))).await,
            done(0, 1)
        );
    }
    d.advance(secs(5)).await;
    assert!(d.claim(9).await.is_empty());
    assert_eq!(d.ledger().await.cancelled, 0, "no lease ended");
}

/// A job that is gone is not cancelled, also where others of its grant are still there.
pub async fn cancel_of_a_job_that_is_gone(d: &Driver) {
    d.enqueue_many(4).await;
    let held = d.claim(4).await;
    d.settled(&held[1], complete()).await;
    let cancel = |held: &Held| ControlCommand::Cancel(Select::Job(held.id()));
    assert_eq!(d.control(cancel(&held[1])).await.done, 0);
    assert_eq!(d.control(cancel(&held[2])).await.done, 1);
}

/// Cancelling a leased job only sets a flag: the lease stays valid.
pub async fn cancel_of_a_leased_job_is_a_flag(d: &Driver) {
    let held = d.held(job()).await;
    assert_eq!(
        d.control(ControlCommand::Cancel(Select::Job(held.id())))
            .await,
        done(1, 0)
    );
    assert_eq!(
        d.control(ControlCommand::Cancel(Select::Job(held.id())))
            .await,
        done(0, 1)
    );
    let view = d.view(held.id()).await;
    assert_eq!(view.state, JobState::Leased);
    assert!(view.lease.expect("a lease").cancel);
    assert!(d.claim(9).await.is_empty());
}

/// After a cancel, complete and bury win.
pub async fn complete_and_bury_win_over_cancel(d: &Driver) {
    for (outcome, state) in [(complete(), JobState::Completed), (bury(), JobState::Dead)] {
        let held = d.held(job().retention(secs(60))).await;
        d.control(ControlCommand::Cancel(Select::Job(held.id())))
            .await;
        assert_eq!(d.settle(&held, outcome).await, CANCELLED);
        assert_eq!(d.state(held.id()).await, Some(state));
    }
    let ledger = d.ledger().await;
    assert_eq!(
        (ledger.completed, ledger.buried, ledger.cancelled),
        (1, 1, 0)
    );
}

/// After a cancel, retry and surrender make the job cancelled, and count as that.
pub async fn retry_and_surrender_end_in_cancelled(d: &Driver) {
    let mark = Some(leasehold::FencingToken::new(u64::MAX >> 12));
    let broken = Outcome::Surrender {
        delay: secs(0),
        mark,
    };
    for outcome in [retry(secs(1)), surrender(), snooze(secs(1)), broken] {
        let held = d.held(job()).await;
        d.control(ControlCommand::Cancel(Select::Job(held.id())))
            .await;
        assert_eq!(d.settle(&held, outcome).await, CANCELLED);
        let view = d.view(held.id()).await;
        assert_eq!(view.state, JobState::Cancelled);
        assert_eq!(view.job.history[0].end, LeaseEnd::Cancelled);
    }
    assert_eq!(d.ledger().await.cancelled, 4);
}

/// After a cancel, expiry makes the job cancelled, and counts as expired.
pub async fn expiry_ends_in_cancelled(d: &Driver) {
    let held = d.held(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(held.id())))
        .await;
    let expiry = d.expire_all().await.remove(0);
    assert_eq!(expiry.state, JobState::Cancelled);
    assert_eq!(d.state(held.id()).await, Some(JobState::Cancelled));
    let lapsed = d.held(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(lapsed.id())))
        .await;
    let _ = d.renew(lapsed.lapse()).await;
    assert_eq!(d.state(lapsed.id()).await, Some(JobState::Cancelled));
    let ledger = d.ledger().await;
    assert_eq!(
        (
            ledger.expired_deadline,
            ledger.expired_stalled,
            ledger.cancelled
        ),
        (1, 1, 0)
    );
}

/// After a cancel, revoke makes the job cancelled, and counts as revoked.
pub async fn revoke_ends_in_cancelled(d: &Driver) {
    let held = d.held(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(held.id())))
        .await;
    d.control(ControlCommand::Revoke(LeaseSelect::Job(held.id())))
        .await;
    assert_eq!(d.state(held.id()).await, Some(JobState::Cancelled));
    let ledger = d.ledger().await;
    assert_eq!((ledger.revoked, ledger.cancelled), (1, 0));
}

/// A cancel flag belongs to the lease: a job that completes a later life is not cancelled.
pub async fn a_dead_jobs_cancel_does_not_follow_it(d: &Driver) {
    let held = d.held(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(held.id())))
        .await;
    assert_eq!(d.settle(&held, bury()).await, CANCELLED);
    d.control(ControlCommand::RetryDead(Select::Job(held.id())))
        .await;
    let next = d.claim_one().await;
    d.settled(&next, surrender()).await;
    assert_eq!(d.state(held.id()).await, Some(JobState::Ready));
}

/// Many can be cancelled by state, up to a number, in the order of their line.
pub async fn cancel_by_state(d: &Driver) {
    let ids = d.enqueue_many(5).await;
    let select = Select::State {
        queue: queue(),
        state: JobState::Ready,
        max: 3,
    };
    assert_eq!(d.control(ControlCommand::Cancel(select)).await, done(3, 0));
    assert_eq!(d.jobs(JobState::Cancelled).await, ids[..3]);
    d.claim(9).await;
    let leased = ControlCommand::Cancel(in_state(JobState::Leased));
    assert_eq!(d.control(leased).await, done(2, 0));
}

/// Revoke ends the lease now: job ready, nothing charged, reason on record.
pub async fn revoke_by_job(d: &Driver) {
    let held = d.held(job()).await;
    let behind = d.enqueue(job()).await;
    assert_eq!(
        d.control(ControlCommand::Revoke(LeaseSelect::Job(held.id())))
            .await,
        done(1, 0)
    );
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.job.attempt()), (JobState::Ready, 1));
    assert_eq!(view.job.history[0].end, LeaseEnd::Revoked);
    assert_eq!(view.job.history[0].reason.as_deref(), Some("a test"));
    assert_eq!(d.ledger().await.revoked, 1);
    let next = d.claim(9).await;
    assert_eq!(
        (next[0].id(), next[1].id()),
        (behind, held.id()),
        "to the back"
    );
    assert!(next[1].token() > held.token());
}

/// Revoke by owner and by task ends all of theirs, and nobody else's.
pub async fn revoke_by_owner_and_task(d: &Driver) {
    d.enqueue_many(6).await;
    d.enqueue(job().queue("other").expect("a name")).await;
    for (owner, task, max) in [("a", "x", 2), ("b", "x", 1), ("a", "y", 1), ("c", "z", 1)] {
        let mut request = d.claim_request(max);
        request.owner = owner.into();
        request.task = task.into();
        let max_lifetime = LIFETIME;
        let queue = queue_named("other");
        request.queues.push(ClaimQueue {
            queue,
            term: TERM,
            max_lifetime,
        });
        d.claim_as(request).await;
    }
    assert_eq!(
        d.control(ControlCommand::Revoke(LeaseSelect::Owner("a".into())))
            .await,
        done(3, 0)
    );
    assert_eq!(
        d.control(ControlCommand::Revoke(LeaseSelect::Owner("a".into())))
            .await,
        done(0, 0)
    );
    assert_eq!(
        d.control(ControlCommand::Revoke(LeaseSelect::Task("x".into())))
            .await,
        done(1, 0)
    );
    assert_eq!(d.ledger().await.live, 1);
    let audit = d.snapshot().await.audit;
    let tokens: Vec<_> = audit.iter().map(|record| record.tokens.len()).collect();
    assert_eq!(tokens, [1, 0, 3]);
    assert!(audit[2].tokens.is_sorted());
}

/// An overdue lease can be revoked, and is not counted as expired then.
pub async fn revoke_of_an_overdue_lease(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(TERM).await;
    assert_eq!(
        d.control(ControlCommand::Revoke(LeaseSelect::Job(held.id())))
            .await,
        done(1, 0)
    );
    assert!(d.reap(9).await.is_empty());
    assert_eq!(d.view(held.id()).await.job.expiries, 0);
}

/// A dead job gets another life: ready, counts at zero, history kept.
pub async fn retry_dead_gives_another_life(d: &Driver) {
    let held = d.held(job()).await;
    d.settled(&held, bury()).await;
    d.advance(secs(5)).await;
    assert_eq!(
        d.control(ControlCommand::RetryDead(Select::Job(held.id())))
            .await,
        done(1, 0)
    );
    let view = d.view(held.id()).await;
    assert_eq!((view.state, view.job.attempt()), (JobState::Ready, 1));
    assert_eq!((view.job.history.len(), view.settled_at), (1, None));
    assert_eq!(d.claim_one().await.id(), held.id());
}

/// A job dead of its expiries starts with none, and is no suspect.
pub async fn retry_dead_clears_the_suspicion(d: &Driver) {
    let mut new = job();
    new.options.max_expiries = 3;
    d.enqueue(new).await;
    for _ in 0..3 {
        let held = d.claim_one().await;
        let _ = d.renew(held.lapse()).await;
    }
    d.control(ControlCommand::RetryDead(in_state(JobState::Dead)))
        .await;
    assert_eq!(d.claim(1).await[0].job.expiries, 0);
}

/// Only dead jobs are retried.
pub async fn retry_dead_skips_the_living(d: &Driver) {
    let id = d.enqueue(job()).await;
    assert_eq!(
        d.control(ControlCommand::RetryDead(Select::Job(id))).await,
        done(0, 1)
    );
    assert_eq!(
        d.control(ControlCommand::RetryDead(in_state(JobState::Ready)))
            .await,
        done(0, 1)
    );
    assert_eq!(d.state(id).await, Some(JobState::Ready));
}

/// A retried dead job takes its unique key again, or is told who has it.
pub async fn retry_dead_needs_its_unique_key(d: &Driver) {
    let new = job().unique("k").expect("a key");
    let held = d.held(new.clone()).await;
    d.settled(&held, bury()).await;
    let second = d.enqueue(new.clone()).await;
    let refused = d
        .control(ControlCommand::RetryDead(Select::Job(held.id())))
        .await;
    assert_eq!(refused.duplicates, [(held.id(), second)]);
    assert_eq!(
        (refused.done, d.state(held.id()).await),
        (0, Some(JobState::Dead))
    );
    d.control(ControlCommand::Purge(Select::Job(second))).await;
    assert_eq!(
        d.control(ControlCommand::RetryDead(Select::Job(held.id())))
            .await,
        done(1, 0)
    );
    let again = d.try_enqueue(vec![new]).await.expect("enqueue");
    assert_eq!(again, [Enqueued::Duplicate(held.id())]);
}

/// Purge deletes, and skips what is leased.
pub async fn purge_skips_leased(d: &Driver) {
    let leased = d.held(job()).await;
    let dead = d.held(job()).await;
    d.settled(&dead, bury()).await;
    let ready = d.enqueue(job()).await;
    let scheduled = d.enqueue(job().delay(secs(5))).await;
    for id in [dead.id(), ready, scheduled] {
        assert_eq!(
            d.control(ControlCommand::Purge(Select::Job(id))).await,
            done(1, 0)
        );
        assert_eq!(d.state(id).await, None);
    }
    assert_eq!(
        d.control(ControlCommand::Purge(Select::Job(leased.id())))
            .await,
        done(0, 1)
    );
    let all = ControlCommand::Purge(in_state(JobState::Leased));
    assert_eq!(d.control(all).await, done(0, 1));
    assert_eq!(d.ledger().await.purged, 3);
    d.settled(&leased, complete()).await;
}

/// Reschedule moves pending jobs, and skips what is leased or settled.
pub async fn reschedule_skips_leased(d: &Driver) {
    let leased = d.held(job()).await;
    let ready = d.enqueue(job()).await;
    let scheduled = d.enqueue(job().delay(secs(500))).await;
    let to = |id| ControlCommand::Reschedule {
        jobs: Select::Job(id),
        delay: secs(50),
    };
    assert_eq!(d.control(to(leased.id())).await, done(0, 1));
    assert_eq!(d.control(to(ready)).await, done(1, 0));
    assert_eq!(d.control(to(scheduled)).await, done(1, 0));
    assert_eq!(d.queue().await.counts.scheduled, 2);
    d.settled(&leased, bury()).await;
    assert_eq!(d.control(to(leased.id())).await, done(0, 1));
    d.advance(secs(50)).await;
    assert_eq!(d.claim_ids(9).await, [ready, scheduled]);
}

/// Rescheduled to now is ready at once, at the back.
pub async fn reschedule_to_now(d: &Driver) {
    let later = d.enqueue(job().delay(secs(500))).await;
    let ready = d.enqueue(job()).await;
    let all = in_state(JobState::Scheduled);
    let now = ControlCommand::Reschedule {
        jobs: all,
        delay: secs(0),
    };
    assert_eq!(d.control(now).await, done(1, 0));
    assert_eq!(d.state(later).await, Some(JobState::Ready));
    assert_eq!(d.claim_ids(9).await, [ready, later]);
}
