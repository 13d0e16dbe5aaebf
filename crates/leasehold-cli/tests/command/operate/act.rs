//! What the commands that change something do, and that they ask first.

use leasehold::job::JobState;

use crate::operate::world::{HOUR, New, Place, World, job, on_each_store};

on_each_store! {
    a_queue_is_paused_and_resumed_on_record,
    a_queue_without_jobs_is_removed,
    a_purge_needs_leave_and_spares_what_is_leased,
    a_revoke_needs_a_reason_and_leave_and_fences_the_holder,
    jobs_are_called_off,
    jobs_run_again,
    dead_jobs_are_retried_and_purged_by_what_they_died_of,
    a_dead_job_whose_unique_key_is_taken_stays_dead,
}

async fn state(world: &World, id: leasehold::JobId) -> Option<JobState> {
    world.client.job(id).await.unwrap().map(|job| job.state)
}

/// The newest command on record.
fn last(place: &Place) -> serde_json::Value {
    place.ndjson(&["audit", "--limit", "1"]).remove(0)
}

async fn a_queue_is_paused_and_resumed_on_record(new: New) {
    let place = new();
    let mut world = place.world().await;
    world.enqueue(job("day", "mail")).await;
    let paused = || place.json(&["queues", "ls"])["queues"][0]["paused"].clone();
    let by = ["--actor", "ann", "--reason", "the relay is down"];
    place.text(&[&["queues", "pause", "day"][..], &by].concat());
    assert_eq!(paused(), true);
    assert!(place.text(&["queues", "ls"]).contains("paused"));
    let record = last(&place);
    assert_eq!(
        (&record["actor"], &record["reason"]),
        (&"ann".into(), &"the relay is down".into())
    );
    assert_eq!(record["command"], "pause queue day");
    place.text(&["queues", "resume", "day"]);
    assert_eq!(paused(), false);
    assert_eq!(last(&place)["actor"], "tester");
    assert_eq!(place.ndjson(&["audit", "--actor", "ann"]).len(), 1);
    world.claim("day", "host-1", HOUR).await;
}

async fn a_queue_without_jobs_is_removed(new: New) {
    let place = new();
    let world = place.world().await;
    world.enqueue(job("day", "mail")).await;
    let names = || place.json(&["queues", "ls"])["queues"].clone();
    place.refused(&["queues", "rm", "day"], 2, "1 ready");
    assert_eq!(names().as_array().map(Vec::len), Some(1));
    place.text(&["queues", "purge", "day", "--yes"]);
    let by = ["--actor", "ann", "--reason", "it is over"];
    let done = place.json(&[&["queues", "rm", "day"][..], &by].concat());
    assert_eq!(
        (&done["command"], &done["done"]),
        (&"remove".into(), &1.into())
    );
    assert_eq!(names().as_array().map(Vec::len), Some(0));
    assert_eq!(last(&place)["command"], "remove queue day");
    world.enqueue(job("day", "mail")).await;
    assert_eq!(names().as_array().map(Vec::len), Some(1));
}

async fn a_purge_needs_leave_and_spares_what_is_leased(new: New) {
    let place = new();
    let mut world = place.world().await;
    let stage = world.stage().await;
    place.refused(&["queues", "purge", "day"], 2, "--yes");
    place.refused(
        &["queues", "purge", "day", "--state", "leased"],
        2,
        "leased",
    );
    assert_eq!(state(&world, stage.ready).await, Some(JobState::Ready));
    let done = place.json(&["queues", "purge", "day", "--yes", "--reason", "old"]);
    assert_eq!(
        (&done["command"], &done["done"]),
        (&"purge".into(), &2.into())
    );
    assert_eq!(state(&world, stage.ready).await, None);
    assert_eq!(state(&world, stage.scheduled).await, None);
    assert_eq!(state(&world, stage.late.id).await, Some(JobState::Leased));
    assert_eq!(state(&world, stage.dead[0]).await, Some(JobState::Dead));
    place.text(&["queues", "purge", "night", "--state", "dead", "-y"]);
    assert_eq!(state(&world, stage.dead[0]).await, None);
}

async fn a_revoke_needs_a_reason_and_leave_and_fences_the_holder(new: New) {
    let place = new();
    let mut world = place.world().await;
    let stage = world.stage().await;
    let id = stage.soon.id.to_string();
    place.refused(&["leases", "revoke", &id, "--yes"], 2, "--reason");
    place.refused(
        &["leases", "revoke", &id, "--reason", "stuck"],
        2,
        "held by host-1 for deploy-7",
    );
    place.refused(
        &["leases", "revoke", "--reason", "stuck", "--yes"],
        2,
        "--owner",
    );
    assert!(world.holds(&stage.soon).await);
    let done = place.json(&["leases", "revoke", &id, "--reason", "stuck", "--yes"]);
    assert_eq!(done["done"], 1);
    assert!(!world.holds(&stage.soon).await);
    assert!(world.holds(&stage.late).await);
    let record = world.record(stage.soon.id).await;
    assert_eq!(
        record.history.last().unwrap().reason.as_deref(),
        Some("stuck")
    );
    assert_eq!(last(&place)["tokens"][0], stage.soon.receipt.token().get());

    place.text(&[
        "leases", "revoke", "--owner", "host-2", "--reason", "gone", "--yes",
    ]);
    assert!(!world.holds(&stage.late).await);
    let again = [
        "leases", "revoke", "--task", "deploy-7", "--reason", "gone", "--yes",
    ];
    place.refused(&again, 3, "deploy-7");
    world.claim("day", "host-3", HOUR).await;
    assert_eq!(place.json(&again)["done"], 1);
}

async fn jobs_are_called_off(new: New) {
    let place = new();
    let mut world = place.world().await;
    let stage = world.stage().await;
    let (ready, leased) = (stage.ready.to_string(), stage.late.id.to_string());
    place.refused(&["jobs", "cancel", &ready], 2, "--yes");
    let done = place.json(&["jobs", "cancel", &ready, &leased, "--yes"]);
    assert_eq!((&done["done"], &done["skipped"]), (&2.into(), &0.into()));
    // A cancelled job without a retention may be gone at once.
    assert_ne!(state(&world, stage.ready).await, Some(JobState::Ready));
    let lease = world
        .client
        .job(stage.late.id)
        .await
        .unwrap()
        .unwrap()
        .lease
        .unwrap();
    assert!(lease.cancel);
    assert!(place.text(&["leases", "ls"]).contains("(cancel)"));
    let dead = stage.dead[0].to_string();
    place.refused(&["jobs", "cancel", &dead, "--yes"], 1, "nothing to cancel");
}

async fn jobs_run_again(new: New) {
    let place = new();
    let mut world = place.world().await;
    let stage = world.stage().await;
    let (dead, scheduled) = (stage.dead[0].to_string(), stage.scheduled.to_string());
    let done = place.json(&["jobs", "retry", &dead, &scheduled]);
    assert_eq!(done["done"], 2);
    assert_eq!(state(&world, stage.dead[0]).await, Some(JobState::Ready));
    assert_eq!(state(&world, stage.scheduled).await, Some(JobState::Ready));
    assert_eq!(world.record(stage.dead[0]).await.failures, 0);
    place.refused(&["jobs", "retry", &dead], 1, "is ready");
}

async fn dead_jobs_are_retried_and_purged_by_what_they_died_of(new: New) {
    let place = new();
    let mut world = place.world().await;
    let stage = world.stage().await;
    place.refused(&["dead", "retry"], 2, "--match");
    let done = place.json(&["dead", "retry", "--match", "timeout after # ms"]);
    assert_eq!(
        (&done["command"], &done["done"]),
        (&"retry".into(), &2.into())
    );
    for id in &stage.dead[..2] {
        assert_eq!(state(&world, *id).await, Some(JobState::Ready));
    }
    place.refused(
        &["dead", "purge", "--match", "mailbox"],
        2,
        "purge 1 dead job: pass --yes",
    );
    place.refused(
        &["dead", "purge", &stage.dead[0].to_string(), "--yes"],
        1,
        "not dead",
    );
    assert_eq!(state(&world, stage.dead[2]).await, Some(JobState::Dead));
    assert_eq!(
        place.json(&["dead", "purge", "--match", "mailbox", "--yes"])["done"],
        1
    );
    assert_eq!(state(&world, stage.dead[2]).await, None);
    assert_eq!(
        place.json(&["dead", "purge", "--match", "mailbox", "--yes"])["done"],
        0
    );

    let one = world.dead("mail", "a").await.to_string();
    for reason in ["b", "c", "d"] {
        world.dead("mail", reason).await;
    }
    assert_eq!(place.json(&["dead", "purge", &one, "--yes"])["done"], 1);
    assert_eq!(
        place.json(&["dead", "retry", "--all", "--queue", "day"])["done"],
        0
    );
    assert_eq!(place.json(&["dead", "retry", "--all"])["done"], 3);
}

async fn a_dead_job_whose_unique_key_is_taken_stays_dead(new: New) {
    let place = new();
    let mut world = place.world().await;
    let unique = || job("night", "mail").unique("one").unwrap();
    let dead = world.enqueue(unique()).await;
    let held = world.claim("night", "host-1", HOUR).await;
    let reason = "no".to_owned();
    world
        .settle(held, leasehold::store::Outcome::Bury { reason })
        .await;
    let holder = world.enqueue(unique()).await;
    let done = place.json(&["dead", "retry", "--all"]);
    assert_eq!(
        (&done["done"], done["duplicates"].as_array().unwrap().len()),
        (&0.into(), 1)
    );
    assert_eq!(done["duplicates"][0]["job"], dead.to_string());
    let output = place.run(&["jobs", "retry", &dead.to_string()]);
    assert!(crate::operate::world::stderr(&output).contains(&holder.to_string()));
}
