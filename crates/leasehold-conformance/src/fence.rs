//! fence: whatever is stale is refused, and changes nothing.

use super::driver::{
    Driver, HELD, Held, TERM, bury, complete, job, queue_named, retry, secs, snooze, surrender,
};
use leasehold::job::JobState;
use leasehold::lease::{FencingToken, Nonce, Receipt, Verdict};
use leasehold::store::{
    Checkpoint, CheckpointRequest, Checkpointed, ControlCommand, LeaseSelect, Renewal, Select,
};

/// Every call of a stale holder is refused, and nothing changes but the count of those that would
/// have changed something.
async fn is_fenced(d: &Driver, held: &Held) {
    let fenced = d
        .snapshot()
        .await
        .queues
        .iter()
        .map(|q| q.ledger.fenced)
        .sum::<u64>();
    d.unchanged(async || {
        for outcome in [
            complete(),
            retry(secs(1)),
            surrender(),
            snooze(secs(1)),
            bury(),
        ] {
            assert!(d.settle(held, outcome).await.is_fenced());
        }
        assert_eq!(d.checkpoint(held, 99, "stale").await, Checkpointed::Fenced);
    })
    .await;
    d.untouched(async || assert_eq!(d.renew(held.beat()).await, Renewal::Fenced))
        .await;
    let after = d
        .snapshot()
        .await
        .queues
        .iter()
        .map(|q| q.ledger.fenced)
        .sum::<u64>();
    assert_eq!(after - fenced, 6, "each is counted, but for the renewal");
}

/// The receipt of an expired lease, before and after the job is granted again.
pub async fn after_expiry(d: &Driver) {
    let held = d.held(job()).await;
    d.expire_all().await;
    is_fenced(d, &held).await;
    let next = d.claim_one().await;
    is_fenced(d, &held).await;
    d.settled(&next, complete()).await;
    is_fenced(d, &held).await;
}

/// The receipt of a settled lease.
pub async fn after_settlement(d: &Driver) {
    for outcome in [
        complete(),
        retry(secs(9)),
        surrender(),
        snooze(secs(9)),
        bury(),
    ] {
        let held = d.held(job().retention(secs(60))).await;
        d.settled(&held, outcome).await;
        is_fenced(d, &held).await;
        d.control(ControlCommand::Purge(Select::Job(held.id())))
            .await;
        is_fenced(d, &held).await;
    }
}

/// The receipt of a revoked lease, at once.
pub async fn after_revoke(d: &Driver) {
    let held = d.held(job()).await;
    d.control(ControlCommand::Revoke(LeaseSelect::Job(held.id())))
        .await;
    is_fenced(d, &held).await;
    let next = d.claim_one().await;
    assert!(next.token() > held.token());
    is_fenced(d, &held).await;
}

/// The receipt of a lapsed lease, while its siblings live.
pub async fn after_lapse(d: &Driver) {
    d.enqueue_many(2).await;
    let held = d.claim(2).await;
    assert!(matches!(
        d.renew(held[0].lapse()).await,
        Renewal::Held { .. }
    ));
    d.unchanged(async || {
        assert!(d.settle(&held[0], complete()).await.is_fenced());
        assert_eq!(
            d.checkpoint(&held[0], 1, "stale").await,
            Checkpointed::Fenced
        );
    })
    .await;
    d.settled(&held[1], complete()).await;
}

/// A receipt is proved by its randomness: knowing everything else gives no right.
pub async fn a_guessed_receipt_is_fenced(d: &Driver) {
    let held = d.held(job()).await;
    let mut bytes = *held.receipt.nonce().as_bytes();
    for at in [0, 7, 15] {
        bytes[at] ^= 1;
        let receipt = Receipt {
            nonce: Nonce::from_bytes(bytes),
            ..held.receipt.clone()
        };
        let guessed = Held {
            receipt,
            ..held.clone()
        };
        is_fenced(d, &guessed).await;
        bytes[at] ^= 1;
    }
    d.settled(&held, complete()).await;
}

/// Each part of a receipt counts: the token, the job, the grant, the queue, the partition.
pub async fn a_mixed_receipt_is_fenced(d: &Driver) {
    d.enqueue_many(2).await;
    d.enqueue(job().queue("other").expect("a name")).await;
    let pair = d.claim(2).await;
    let (a, b) = (&pair[0].receipt, &pair[1].receipt);
    let mixed = [
        Receipt {
            token: b.token,
            ..a.clone()
        },
        Receipt {
            job: b.job,
            ..a.clone()
        },
        Receipt {
            grant: b.token,
            ..a.clone()
        },
        Receipt {
            queue: queue_named("other"),
            ..a.clone()
        },
        Receipt {
            partition: 1,
            ..a.clone()
        },
        Receipt {
            token: FencingToken::new(a.token.get() - 1),
            ..a.clone()
        },
        Receipt {
            token: FencingToken::new(b.token.get() + 1),
            ..a.clone()
        },
    ];
    for receipt in mixed {
        d.unchanged(async || {
            assert!(
                d.settle_receipt(&receipt, complete()).await.is_fenced(),
                "{receipt}"
            );
            let forged = Held {
                receipt: receipt.clone(),
                ..pair[0].clone()
            };
            assert_eq!(
                d.checkpoint(&forged, 1, "stale").await,
                Checkpointed::Fenced
            );
        })
        .await;
    }
    d.settled(&pair[0], complete()).await;
    d.settled(&pair[1], complete()).await;
}

/// A receipt for a queue that is not there.
pub async fn a_receipt_of_nowhere_is_fenced(d: &Driver) {
    let held = d.held(job()).await;
    let receipt = Receipt {
        queue: queue_named("nowhere"),
        ..held.receipt.clone()
    };
    d.unchanged(async || assert!(d.settle_receipt(&receipt, complete()).await.is_fenced()))
        .await;
}

/// A receipt for a partition that is not there.
pub async fn a_receipt_of_no_partition_is_fenced(d: &Driver) {
    let held = d.held(job()).await;
    let mut elsewhere = held.clone();
    elsewhere.receipt.partition = 9;
    is_fenced(d, &elsewhere).await;
    d.settled(&held, complete()).await;
}

/// The zombie of one job cannot touch its exclusive key or its unique key.
pub async fn a_zombie_frees_no_key(d: &Driver) {
    let new = job()
        .unique("u")
        .expect("a key")
        .exclusive("e")
        .expect("a key");
    let zombie = d.held(new.clone()).await;
    let parked = d.enqueue(job().exclusive("e").expect("a key")).await;
    d.expire_all().await;
    let next = d.claim_one().await;
    assert_eq!(next.id(), zombie.id());
    is_fenced(d, &zombie).await;
    assert!(d.view(parked).await.parked);
    assert!(d.claim_ids(9).await.is_empty());
    let again = d.try_enqueue(vec![new]).await.expect("enqueue");
    assert_eq!(again, [leasehold::store::Enqueued::Duplicate(zombie.id())]);
}

/// A zombie's checkpoint does not replace its successor's.
pub async fn a_zombie_saves_no_checkpoint(d: &Driver) {
    let zombie = d.held(job()).await;
    assert!(matches!(
        d.checkpoint(&zombie, 5, "old").await,
        Checkpointed::Saved { .. }
    ));
    d.expire_all().await;
    let next = d.claim_one().await;
    assert!(matches!(
        d.checkpoint(&next, 1, "new").await,
        Checkpointed::Saved { .. }
    ));
    is_fenced(d, &zombie).await;
    let saved = d
        .view(next.id())
        .await
        .job
        .checkpoint
        .clone()
        .expect("a checkpoint");
    assert_eq!(
        (saved.token, saved.seq, &saved.bytes[..]),
        (next.token(), 1, &b"new"[..])
    );
}

/// The holder's own receipt survives its text.
pub async fn a_receipt_survives_its_text(d: &Driver) {
    let held = d.held(job()).await;
    let text = held.receipt.to_string();
    let receipt = text.parse().expect("a receipt");
    assert!(d.settle_receipt(&receipt, complete()).await.is_held());
}

/// A stale receipt stays stale when the clock is set back before its deadline.
pub async fn setting_the_clock_back_revives_nothing(d: &Driver) {
    let held = d.held(job()).await;
    d.expire_all().await;
    d.set_back(TERM).await;
    is_fenced(d, &held).await;
}

/// A forged proof spoils no good one beside it, and is carried by none: in one call, on every side.
pub async fn a_forged_proof_beside_good_ones(d: &Driver) {
    for forged in 0..3 {
        d.enqueue_many(3).await;
        let mut held = d.claim(3).await;
        let good = held[forged].clone();
        let mut bytes = *good.receipt.nonce().as_bytes();
        bytes[15] ^= 1;
        held[forged].receipt.nonce = Nonce::from_bytes(bytes);

        let points = held.iter().map(|held| Checkpoint {
            receipt: held.receipt.clone(),
            seq: 1,
            bytes: "state".into(),
        });
        let request = CheckpointRequest {
            request: d.request(),
            checkpoints: points.collect(),
        };
        let saved = d.store().checkpoint(request).await.expect("checkpoint");
        let fenced: Vec<_> = saved.iter().map(|s| *s == Checkpointed::Fenced).collect();
        assert_eq!(fenced, [0, 1, 2].map(|at| at == forged), "checkpoint");
        assert_eq!(d.view(good.id()).await.job.checkpoint, None);

        let all = held.iter().map(|held| (held, complete())).collect();
        let request = d.settle_request(all);
        let verdicts = d.store().settle(request).await.expect("settle");
        let fenced: Vec<_> = verdicts.iter().map(|v| v.is_fenced()).collect();
        assert_eq!(fenced, [0, 1, 2].map(|at| at == forged), "settle");
        assert_eq!(d.state(good.id()).await, Some(JobState::Leased));
        d.settled(&good, complete()).await;
    }
}

/// The same where nothing but completions is asked for, and nothing is noted of the leases.
pub async fn a_forged_proof_beside_good_completions(d: &Driver) {
    for forged in 0..3 {
        // A store that found a shorter way closed tries it again after a while.
        for _ in 0..4 {
            d.settled(&d.held(job()).await, complete()).await;
        }
        d.enqueue_many(3).await;
        let mut held = d.claim(3).await;
        let good = held[forged].clone();
        held[forged].receipt.nonce = Nonce::from_bytes([9; 16]);
        let all = held.iter().map(|held| (held, complete())).collect();
        let verdicts = d.store().settle(d.settle_request(all)).await;
        let mut expected = [HELD; 3];
        expected[forged] = Verdict::Fenced;
        assert_eq!(verdicts.expect("settle"), expected);
        assert_eq!(d.state(good.id()).await, Some(JobState::Leased));
        d.settled(&good, complete()).await;
    }
}

/// The same for the other parts of a receipt: a job or a token of another lease beside good ones.
pub async fn a_mixed_receipt_beside_good_ones(d: &Driver) {
    d.enqueue_many(4).await;
    let held = d.claim(4).await;
    let mut mixed = held[1].clone();
    mixed.receipt.job = held[3].id();
    let mut moved = held[2].clone();
    moved.receipt.token = held[3].token();
    let all = [&held[0], &mixed, &moved, &held[3]];
    let request = d.settle_request(all.map(|held| (held, complete())).to_vec());
    let verdicts = d.store().settle(request).await.expect("settle");
    assert_eq!(verdicts, [HELD, Verdict::Fenced, Verdict::Fenced, HELD]);
    for held in &held[1..3] {
        assert_eq!(d.state(held.id()).await, Some(JobState::Leased));
        d.settled(held, complete()).await;
    }
}

/// The randomness of one claim proves nothing about another's grant, though both are the caller's.
pub async fn a_proof_is_of_one_claim(d: &Driver) {
    d.enqueue_many(2).await;
    let (a, b) = (d.claim(1).await.remove(0), d.claim(1).await.remove(0));
    let mut crossed = b.clone();
    crossed.receipt.nonce = *a.receipt.nonce();
    is_fenced(d, &crossed).await;
    let all = vec![(&a, complete()), (&crossed, complete())];
    let verdicts = d.store().settle(d.settle_request(all)).await;
    assert_eq!(verdicts.expect("settle"), [HELD, Verdict::Fenced]);
    d.settled(&b, complete()).await;
}

/// A token just below or just above those of a grant is none of its own, however many it has.
pub async fn a_token_beside_its_grant_is_fenced(d: &Driver) {
    for leases in [1, 7, 8, 16] {
        d.enqueue_many(leases).await;
        let held = d.claim(leases).await;
        let (first, last) = (held[0].clone(), held[leases - 1].clone());
        let mut below = first.clone();
        below.receipt.token = FencingToken::new(first.token().get() - 1);
        let mut above = last.clone();
        above.receipt.token = FencingToken::new(last.token().get() + 1);
        for beside in [&below, &above] {
            d.unchanged(async || {
                let verdict = d.settle(beside, complete()).await;
                assert!(verdict.is_fenced(), "{leases}");
                let saved = d.checkpoint(beside, 1, "stale").await;
                assert_eq!(saved, Checkpointed::Fenced);
            })
            .await;
            let told = Renewal::Held {
                granted: TERM,
                cancel: Vec::new(),
                fenced: vec![beside.token()],
            };
            assert_eq!(d.renew(beside.beat()).await, told, "{leases}");
        }
        let ends = held.iter().map(|held| (held, complete())).collect();
        let verdicts = d.store().settle(d.settle_request(ends)).await;
        assert_eq!(verdicts.expect("settle"), vec![HELD; leases]);
    }
}
