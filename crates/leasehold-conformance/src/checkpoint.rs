//! checkpoint: saved state never goes back, and reaches the next claim.

use bytes::Bytes;

use super::driver::{
    Driver, HELD, TERM, bury, complete, job, names_the_field, retry, secs, surrender,
};
use leasehold::job::JobState;
use leasehold::limits;
use leasehold::store::{
    Checkpoint, CheckpointRequest, Checkpointed, ControlCommand, LeaseSelect, Renewal, Select,
};

const SAVED: Checkpointed = Checkpointed::Saved {
    late: false,
    cancel: false,
};

/// The next claim gets what was saved, with the token that wrote it.
pub async fn the_next_claim_gets_it(d: &Driver) {
    let held = d.held(job()).await;
    assert!(held.job.checkpoint.is_none());
    assert_eq!(d.checkpoint(&held, 3, "half").await, SAVED);
    d.settled(&held, surrender()).await;
    let saved = d
        .claim_one()
        .await
        .job
        .checkpoint
        .clone()
        .expect("a checkpoint");
    assert_eq!(
        (saved.token, saved.seq, &saved.bytes[..]),
        (held.token(), 3, &b"half"[..])
    );
}

/// It survives expiry, retry and revoke.
pub async fn it_survives_every_end(d: &Driver) {
    let held = d.held(job()).await;
    assert_eq!(d.checkpoint(&held, 1, "kept").await, SAVED);
    d.expire_all().await;
    let second = d.claim_one().await;
    d.settled(&second, retry(secs(0))).await;
    let third = d.claim_one().await;
    d.control(ControlCommand::Revoke(LeaseSelect::Job(third.id())))
        .await;
    let fourth = d.claim_one().await;
    assert_eq!(
        fourth.job.checkpoint.clone().expect("a checkpoint").token,
        held.token()
    );
    d.settled(&fourth, bury()).await;
    d.control(ControlCommand::RetryDead(Select::Job(held.id())))
        .await;
    let fifth = d.claim_one().await;
    assert_eq!(fifth.job.checkpoint.clone().expect("a checkpoint").seq, 1);
}

/// Under one token the sequence must not fall; the same one may be written again.
pub async fn sequence_never_falls(d: &Driver) {
    let held = d.held(job()).await;
    assert_eq!(d.checkpoint(&held, 5, "five").await, SAVED);
    d.unchanged(async || {
        let behind = Checkpointed::Behind { seq: 5 };
        assert_eq!(d.checkpoint(&held, 4, "four").await, behind);
    })
    .await;
    assert_eq!(d.checkpoint(&held, 5, "again").await, SAVED);
    assert_eq!(d.checkpoint(&held, 6, "six").await, SAVED);
    let saved = d
        .view(held.id())
        .await
        .job
        .checkpoint
        .clone()
        .expect("a checkpoint");
    assert_eq!((saved.seq, &saved.bytes[..]), (6, &b"six"[..]));
}

/// A new token may start its sequence anew.
pub async fn a_new_token_starts_anew(d: &Driver) {
    let held = d.held(job()).await;
    assert_eq!(d.checkpoint(&held, 500, "old").await, SAVED);
    d.settled(&held, surrender()).await;
    let next = d.claim_one().await;
    assert_eq!(d.checkpoint(&next, 0, "new").await, SAVED);
    let saved = d
        .view(held.id())
        .await
        .job
        .checkpoint
        .clone()
        .expect("a checkpoint");
    assert_eq!((saved.token, saved.seq), (next.token(), 0));
}

/// Overdue but unreaped is accepted, and told.
pub async fn late_is_accepted(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(TERM).await;
    let late = Checkpointed::Saved {
        late: true,
        cancel: false,
    };
    assert_eq!(d.checkpoint(&held, 1, "late").await, late);
    assert_eq!(d.renew(held.beat()).await, Renewal::Fenced);
    d.reap(10).await;
    assert_eq!(
        d.claim_one()
            .await
            .job
            .checkpoint
            .clone()
            .expect("saved")
            .seq,
        1
    );
}

/// A cancel is told, and the state is saved all the same.
pub async fn a_cancel_is_told(d: &Driver) {
    let held = d.held(job()).await;
    d.control(ControlCommand::Cancel(Select::Job(held.id())))
        .await;
    let told = Checkpointed::Saved {
        late: false,
        cancel: true,
    };
    assert_eq!(d.checkpoint(&held, 1, "x").await, told);
}

/// A checkpoint is no sign of life: it extends nothing.
pub async fn it_extends_nothing(d: &Driver) {
    let held = d.held(job()).await;
    d.advance(secs(50)).await;
    assert_eq!(d.checkpoint(&held, 1, "x").await, SAVED);
    d.advance(secs(10)).await;
    assert_eq!(d.reap(10).await.len(), 1);
}

/// One answer each, in order; a stale one spoils no other.
pub async fn answers_come_in_order(d: &Driver) {
    d.enqueue_many(2).await;
    let held = d.claim(2).await;
    d.settled(&held[0], complete()).await;
    let point = |at: usize, seq| Checkpoint {
        receipt: held[at].receipt.clone(),
        seq,
        bytes: Bytes::from_static(b"b"),
    };
    let checkpoints = vec![point(0, 1), point(1, 2), point(1, 1), point(1, 3)];
    let request = CheckpointRequest {
        request: d.request(),
        checkpoints,
    };
    let answers = d.store().checkpoint(request).await.expect("checkpoint");
    let behind = Checkpointed::Behind { seq: 2 };
    assert_eq!(answers, [Checkpointed::Fenced, SAVED, behind, SAVED]);
}

/// States that are saved by one call are kept apart, to the last byte.
pub async fn each_state_of_a_call_is_its_own(d: &Driver) {
    d.enqueue_many(2).await;
    let held = d.claim(2).await;
    let point = |at: usize, state| Checkpoint {
        receipt: held[at].receipt.clone(),
        seq: 1,
        bytes: Bytes::from_static(state),
    };
    let request = CheckpointRequest {
        request: d.request(),
        checkpoints: vec![point(0, b"the first"), point(1, b"and the next")],
    };
    let answers = d.store().checkpoint(request).await.expect("checkpoint");
    assert_eq!(answers, [SAVED, SAVED]);
    d.advance(TERM).await;
    for (held, state) in held.iter().zip(["the first", "and the next"]) {
        let again = d.claim_one().await;
        assert_eq!(again.id(), held.id());
        let saved = again.job.checkpoint.clone().expect("a checkpoint");
        assert_eq!(saved.bytes, state.as_bytes());
    }
}

/// Empty state is state.
pub async fn empty_state_is_state(d: &Driver) {
    let held = d.held(job().retention(secs(9))).await;
    assert_eq!(d.checkpoint(&held, 0, "").await, SAVED);
    assert_eq!(d.settle(&held, complete()).await, HELD);
    let view = d.view(held.id()).await;
    assert_eq!(view.state, JobState::Completed);
    assert!(
        view.job
            .checkpoint
            .clone()
            .expect("a checkpoint")
            .bytes
            .is_empty()
    );
}

/// Checkpoints over the limits are refused, and nothing is saved.
pub async fn limits_are_checked(d: &Driver) {
    let held = d.held(job()).await;
    let before = d.snapshot().await;
    let point = |bytes: usize| Checkpoint {
        receipt: held.receipt.clone(),
        seq: 1,
        bytes: vec![0; bytes].into(),
    };
    let most = limits::CHECKPOINT_BYTES;
    let calls = [
        ("checkpoint", vec![point(1), point(most + 1)]),
        ("checkpoints", vec![point(1); limits::CALL_ITEMS + 1]),
        (
            "checkpoints",
            vec![point(most); limits::CALL_BYTES / most + 1],
        ),
    ];
    for (field, checkpoints) in calls {
        let request = CheckpointRequest {
            request: d.request(),
            checkpoints,
        };
        let error = d.store().checkpoint(request).await.expect_err(field);
        names_the_field(&error, field);
    }
    assert_eq!(d.snapshot().await, before);
}

/// The same sequence is written over: a repeat after a lost answer may say more.
pub async fn the_same_sequence_is_written_over(d: &Driver) {
    let held = d.held(job()).await;
    for state in ["one", "two", ""] {
        assert_eq!(d.checkpoint(&held, 5, state).await, SAVED);
        let saved = d.view(held.id()).await.job.checkpoint.clone();
        let saved = saved.expect("a checkpoint");
        assert_eq!((saved.seq, &saved.bytes[..]), (5, state.as_bytes()));
    }
}

/// Sequences are compared as whole numbers, up to the largest.
pub async fn sequences_are_whole_numbers(d: &Driver) {
    let held = d.held(job()).await;
    let mut last = None;
    let seqs = [
        0,
        1,
        255,
        256,
        (1 << 32) - 1,
        1 << 32,
        (1 << 32) + 1,
        1 << 53,
        (1 << 53) + 1,
        (1 << 63) - 1,
        1 << 63,
        u64::MAX - 1,
        u64::MAX,
    ];
    for seq in seqs {
        assert_eq!(d.checkpoint(&held, seq, "x").await, SAVED, "{seq}");
        if let Some(last) = last {
            let behind = Checkpointed::Behind { seq };
            assert_eq!(d.checkpoint(&held, last, "y").await, behind, "{last}");
        }
        last = Some(seq);
    }
    d.settled(&held, surrender()).await;
    let saved = d.claim_one().await.job.checkpoint.clone();
    assert_eq!(saved.expect("a checkpoint").seq, u64::MAX);
}

/// What is noted of a lease goes with it, and nothing of its siblings or of other grants.
pub async fn an_ended_lease_takes_only_its_own_along(d: &Driver) {
    d.enqueue_many(9).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.extend(d.claim(3).await);
    }
    let states = ["0", "1", "2", "3", "4", "5", "6", "7", "8"];
    for (held, state) in held.iter().zip(states) {
        assert_eq!(d.checkpoint(held, 1, state).await, SAVED);
    }
    for ended in [4, 3, 5, 6, 2] {
        d.settled(&held[ended], complete()).await;
    }
    assert_eq!(d.expire_all().await.len(), 4);
    let saved = d.claim(9).await;
    let mut saved: Vec<_> = saved
        .iter()
        .filter_map(|held| Some(held.job.checkpoint.as_ref()?.bytes.clone()))
        .collect();
    saved.sort();
    assert_eq!(saved, ["0", "1", "7", "8"]);
}

/// What a lease saves is its own: its siblings have theirs, or none.
pub async fn each_lease_saves_its_own(d: &Driver) {
    d.enqueue_many(3).await;
    let held = d.claim(3).await;
    assert_eq!(d.checkpoint(&held[2], 9, "two").await, SAVED);
    assert_eq!(d.checkpoint(&held[0], 1, "zero").await, SAVED);
    for held in &held {
        d.settled(held, surrender()).await;
    }
    let saved: Vec<_> = d
        .claim(3)
        .await
        .iter()
        .map(|held| {
            let saved = held.job.checkpoint.as_ref()?;
            Some((saved.token, saved.seq, saved.bytes.clone()))
        })
        .collect();
    let zero = (held[0].token(), 1, Bytes::from_static(b"zero"));
    let two = (held[2].token(), 9, Bytes::from_static(b"two"));
    // Each surrender goes ahead of the one before.
    assert_eq!(saved, [Some(two), None, Some(zero)]);
}
