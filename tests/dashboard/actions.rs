//! What an operator can do, and what is left on record.

use std::time::Duration;

use leasehold::dashboard::Dashboard;
use leasehold::inspect::{LeaseFilter, Page};
use leasehold::job::{JobState, QueueName};

use crate::http::{get, post, send};
use crate::scene::{abandon, job, memory, play, serve};

#[tokio::test]
async fn a_force_release_needs_a_reason_and_goes_on_record() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    abandon(
        &**client.store(),
        "worker-1",
        "q",
        Duration::from_secs(600),
        1,
    )
    .await;
    let lease = client
        .leases(LeaseFilter::default(), Page::first(1))
        .await
        .unwrap()
        .rows
        .remove(0);
    let dashboard = Dashboard::new(client.clone())
        .allow_actions()
        .basic("ada", "s3cret");
    let at = serve(dashboard, "/").await;
    let ada = "Authorization: Basic YWRhOnMzY3JldA==";

    let ask = format!("/confirm?do=revoke&job={}&back=%2Fleases", lease.job);
    let form = send(at, "GET", &ask, &[ada], "").await;
    assert_eq!(form.status, 200);
    assert!(
        form.body.contains("name=\"reason\" required"),
        "{}",
        form.body
    );

    let headers = [
        ada,
        "Content-Type: application/x-www-form-urlencoded",
        "Sec-Fetch-Site: same-origin",
    ];
    let act = format!("do=revoke&job={}&back=%2Fleases", lease.job);
    for reason in ["", "&reason=", "&reason=%20"] {
        let answer = send(at, "POST", "/act", &headers, &format!("{act}{reason}")).await;
        assert_eq!(answer.status, 400, "{reason}");
    }
    assert_eq!(client.ledger().await.unwrap().revoked, 0);

    let answer = send(
        at,
        "POST",
        "/act",
        &headers,
        &format!("{act}&reason=it+hangs"),
    )
    .await;
    assert_eq!(
        answer.header("location"),
        Some("/leases?done=revoke&n=1&skipped=0")
    );
    let ledger = client.ledger().await.unwrap();
    assert_eq!((ledger.revoked, ledger.live), (1, 0));
    let record = client.audit(Page::first(1)).await.unwrap().rows.remove(0);
    assert_eq!(
        (record.actor.as_str(), record.reason.as_str()),
        ("ada", "it hangs")
    );
    assert_eq!(record.tokens, [lease.token]);
    let page = send(at, "GET", "/leases?done=revoke&n=1", &[ada], "").await;
    assert!(
        page.body.contains("1 lease force-released."),
        "{}",
        page.body
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_of_dead_letters_is_retried_or_purged_and_no_other() {
    let client = memory();
    play(&client).await.stop().await;
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    let imports = QueueName::new("imports").unwrap();
    let dead = |client: leasehold::Client, queue: QueueName| async move {
        client
            .jobs(queue, JobState::Dead, Page::first(50))
            .await
            .unwrap()
            .rows
    };
    let retry = "do=retry&queue=imports&kind=import_feed&error=connection+to+%23.%23.%23.%23+refused&reason=the+feed+is+back&back=%2Fdead";
    let answer = post(at, "/act", retry).await;
    assert_eq!(
        answer.header("location"),
        Some("/dead?done=retry&n=12&skipped=0"),
        "{}",
        answer.body
    );
    let left = dead(client.clone(), imports.clone()).await;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].job.kind.as_str(), "sanitize");
    // Nothing matches any more, and another kind with the same error is another group.
    assert!(
        post(at, "/act", retry)
            .await
            .header("location")
            .unwrap()
            .contains("n=0")
    );

    let id = left[0].job.id;
    let answer = post(
        at,
        "/act",
        &format!("do=purge&job={id}&reason=rubbish&back=%2Fdead"),
    )
    .await;
    assert_eq!(answer.status, 303);
    assert!(dead(client.clone(), imports).await.is_empty());
    assert_eq!(client.ledger().await.unwrap().purged, 1);
    assert!(get(at, "/dead").await.body.contains("No dead letters"));
}

#[tokio::test]
async fn forms_that_make_no_sense_change_nothing() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    for form in [
        "",
        "do=",
        "do=explode&reason=x",
        "do=pause&reason=x",
        "do=pause&queue=no/queue&reason=x",
        "do=revoke&reason=x",
        "do=revoke&job=nonsense&reason=x",
        "do=retry&queue=q&reason=x",
        "do=pause&do=resume&queue=q&reason=x",
        "%ff%fe=%00",
    ] {
        let answer = post(at, "/act", form).await;
        assert_eq!(answer.status, 400, "{form:?}");
    }
    assert!(client.audit(Page::first(5)).await.unwrap().rows.is_empty());
}

#[tokio::test]
async fn all_leases_of_a_worker_are_released_and_no_others() {
    let client = memory();
    let jobs = (0..6).map(|_| job("q", "step", "{}"));
    client.enqueue_many(jobs).await.unwrap();
    let store = &**client.store();
    abandon(store, "gone & lost", "q", Duration::from_secs(600), 4).await;
    abandon(store, "alive", "q", Duration::from_secs(600), 2).await;
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    let page = get(at, "/workers").await;
    assert!(
        page.body.contains("owner=gone%20%26%20lost"),
        "{}",
        page.body
    );
    let answer = post(
        at,
        "/act",
        "do=revoke&owner=gone+%26+lost&reason=dead&back=%2Fworkers",
    )
    .await;
    assert_eq!(
        answer.header("location"),
        Some("/workers?done=revoke&n=4&skipped=0")
    );
    let left = client
        .leases(LeaseFilter::default(), Page::first(10))
        .await
        .unwrap()
        .rows;
    assert!(left.len() == 2 && left.iter().all(|lease| &*lease.owner == "alive"));
}
