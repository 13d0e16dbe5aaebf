//! The checker must catch a bad history of every kind, and pass the good ones.

use std::time::Duration;

use leasehold::clock::{ManualClock, Timestamp};
use leasehold::inspect::{AuditView, Ledger, QueueView};
use leasehold::job::{JobState, Key, QueueName};
use leasehold::lease::{Cause, Verdict};
use leasehold::store::{
    Checkpointed, ControlCommand, Controlled, Enqueued, Expiry, LeaseSelect, Renewal, RequestId,
    Select, SessionId,
};
use leasehold::{FencingToken, JobId};
use leasehold_conformance::checker::{Rule, check};
use leasehold_conformance::history::{
    Answer, BeatNote, Ending, Final, GrantNote, History, JobNote, LeaseNote, Op, ReceiptNote,
    SettleNote, What, from_lines,
};

const TERM: Duration = Duration::from_secs(60);
const LIFETIME: Duration = Duration::from_secs(600);
const HELD: Verdict = Verdict::Held {
    late: false,
    cancel: false,
};
const SAVED: Checkpointed = Checkpointed::Saved {
    late: false,
    cancel: false,
};

fn token(number: u64) -> FencingToken {
    FencingToken::new(number)
}

/// Writes a history by hand.
struct Pen {
    history: History,
    clock: ManualClock,
    session: SessionId,
    seq: u64,
    last: Final,
}

impl Pen {
    fn new() -> Self {
        let clock = ManualClock::new(Timestamp::from_micros(1_000_000));
        Self {
            history: History::with_clock(clock.clone()),
            clock,
            session: SessionId::generate(),
            seq: 0,
            last: Final::default(),
        }
    }

    fn request(&mut self) -> RequestId {
        self.seq += 1;
        RequestId {
            session: self.session,
            lane: 0,
            seq: self.seq,
        }
    }

    fn say(&self, op: Op, what: What) {
        let call = self.history.invoke(1, op);
        self.history.end(1, call, what);
    }

    fn job(&mut self, exclusive: Option<&str>) -> JobId {
        let id = JobId::generate();
        let jobs = vec![JobNote {
            id,
            queue: QueueName::default(),
            exclusive: exclusive.map(|key| Key::new(key).unwrap()),
            max_lifetime: None,
        }];
        let request = self.request();
        let answer = Answer::Enqueued(vec![Enqueued::New(id)]);
        self.say(Op::Enqueue { request, jobs }, What::Ok(answer));
        self.last.jobs.push((id, JobState::Ready));
        id
    }

    fn claim_op(&mut self) -> Op {
        Op::Claim {
            request: self.request(),
            owner: "w".into(),
            task: "t".into(),
            queues: vec![(QueueName::default(), LIFETIME)],
        }
    }

    fn claim(&mut self, job: JobId, number: u64, expired: Vec<Expiry>) -> ReceiptNote {
        let op = self.claim_op();
        self.say(op, What::Ok(claimed(job, number, expired)));
        receipt(job, number)
    }

    fn settle_op(&mut self, receipt: &ReceiptNote, ending: Ending) -> Op {
        Op::Settle(SettleNote {
            request: self.request(),
            settlements: vec![(receipt.clone(), ending)],
        })
    }

    fn settle(&mut self, receipt: &ReceiptNote, verdict: Verdict) {
        let op = self.settle_op(receipt, Ending::Surrender);
        self.say(op, What::Ok(Answer::Settled(vec![verdict])));
    }

    fn checkpoint(&mut self, receipt: &ReceiptNote, seq: u64) {
        let request = self.request();
        let checkpoints = vec![(receipt.clone(), seq)];
        let answer = Answer::Checkpointed(vec![SAVED]);
        self.say(
            Op::Checkpoint {
                request,
                checkpoints,
            },
            What::Ok(answer),
        );
    }

    fn renew(&self, receipt: &ReceiptNote, lapse: bool, granted: Duration) {
        let token = vec![receipt.token];
        let (leases, lapse) = if lapse {
            (vec![], token)
        } else {
            (token, vec![])
        };
        let beats = vec![BeatNote {
            queue: receipt.queue.clone(),
            grant: receipt.grant,
            proof: receipt.proof,
            leases,
            lapse,
        }];
        let held = Renewal::Held {
            granted,
            cancel: vec![],
            fenced: vec![],
        };
        self.say(Op::Renew { beats }, What::Ok(Answer::Renewed(vec![held])));
    }

    fn control(&mut self, command: &ControlCommand, done: u64) {
        let op = Op::Control {
            request: self.request(),
            actor: "op".into(),
            reason: "why".into(),
            command: command.clone(),
        };
        let mut did = Controlled::default();
        did.done = done;
        self.say(op, What::Ok(Answer::Controlled(did)));
    }

    fn rules(&self) -> Vec<Rule> {
        let text = self.history.to_lines();
        let events = from_lines(&text).unwrap();
        assert_eq!(events, self.history.events(), "a history survives its text");
        let mut rules: Vec<_> = check(&events, Some(&self.last))
            .into_iter()
            .map(|violation| {
                assert!(!violation.to_string().is_empty());
                violation.rule
            })
            .collect();
        rules.dedup();
        rules
    }
}

fn receipt(job: JobId, number: u64) -> ReceiptNote {
    ReceiptNote {
        queue: QueueName::default(),
        grant: token(number),
        token: token(number),
        job,
        proof: number,
    }
}

fn claimed(job: JobId, number: u64, expired: Vec<Expiry>) -> Answer {
    Answer::Claimed {
        grants: vec![GrantNote {
            queue: QueueName::default(),
            id: token(number),
            proof: number,
            term: TERM,
            granted: TERM,
            leases: vec![LeaseNote {
                token: token(number),
                job,
                checkpoint: None,
            }],
        }],
        expired,
    }
}

fn expiry(job: JobId, number: u64) -> Expiry {
    Expiry {
        queue: QueueName::default(),
        job,
        kind: leasehold::job::Kind::new("k").unwrap(),
        token: token(number),
        owner: "w".into(),
        task: "t".into(),
        cause: Cause::Deadline,
        progress: None,
        expiries: 1,
        state: JobState::Ready,
    }
}

fn queue_view(ledger: Ledger) -> QueueView {
    let mut view = QueueView::new(QueueName::default());
    view.ledger = ledger;
    view
}

#[test]
fn a_plain_life_is_good() {
    let mut pen = Pen::new();
    let job = pen.job(Some("k"));
    let a = pen.claim(job, 10, vec![]);
    pen.checkpoint(&a, 1);
    pen.renew(&a, false, TERM);
    pen.settle(&a, HELD);
    pen.settle(&a, Verdict::Fenced);
    let op = pen.claim_op();
    let Answer::Claimed { mut grants, .. } = claimed(job, 11, vec![]) else {
        unreachable!()
    };
    grants[0].leases[0].checkpoint = Some((token(10), 1));
    let answer = Answer::Claimed {
        grants,
        expired: vec![],
    };
    pen.say(op, What::Ok(answer));
    let mut ledger = Ledger::default();
    ledger.granted = 2;
    ledger.surrendered = 1;
    ledger.live = 1;
    pen.last.queues = vec![queue_view(ledger)];
    assert_eq!(pen.rules(), []);
}

#[test]
fn i1_a_counter_that_was_rolled_back() {
    let mut pen = Pen::new();
    let (a, b) = (pen.job(None), pen.job(None));
    pen.claim(a, 503, vec![]);
    pen.claim(b, 4, vec![]);
    assert_eq!(pen.rules(), [Rule::TokenWentBack]);
}

#[test]
fn i1_a_token_given_twice() {
    let mut pen = Pen::new();
    let (a, b) = (pen.job(None), pen.job(None));
    let first = pen.claim_op();
    let second = pen.claim_op();
    // Concurrent claims: no order is required, but the tokens must differ.
    let one = pen.history.invoke(1, first);
    let two = pen.history.invoke(2, second);
    pen.history.end(1, one, What::Ok(claimed(a, 7, vec![])));
    pen.history.end(2, two, What::Ok(claimed(b, 7, vec![])));
    assert_eq!(pen.rules(), [Rule::TokenIssuedTwice]);
}

#[test]
fn i1_concurrent_claims_may_be_answered_in_any_order() {
    let mut pen = Pen::new();
    let (a, b) = (pen.job(None), pen.job(None));
    let (first, second) = (pen.claim_op(), pen.claim_op());
    let one = pen.history.invoke(1, first);
    let two = pen.history.invoke(2, second);
    pen.history.end(1, one, What::Ok(claimed(a, 8, vec![])));
    pen.history.end(2, two, What::Ok(claimed(b, 7, vec![])));
    assert_eq!(pen.rules(), []);
}

#[test]
fn i2_a_zombies_write_after_the_open() {
    let mut pen = Pen::new();
    pen.history.open(1, "r", token(1), true);
    pen.history.write(1, "r", token(1), "a", true);
    pen.history.open(2, "r", token(2), true);
    pen.history.write(1, "r", token(1), "b", false);
    pen.last
        .resources
        .insert("r".into(), vec!["a".into(), "c".into()]);
    assert_eq!(pen.rules(), []);
    pen.history.write(1, "r", token(1), "c", true);
    assert_eq!(pen.rules(), [Rule::StaleTokenAccepted]);
}

#[test]
fn i3_an_accepted_write_that_is_gone() {
    let mut pen = Pen::new();
    pen.history.open(1, "r", token(1), true);
    pen.history.write(1, "r", token(1), "a", true);
    pen.last.resources.insert("r".into(), vec!["b".into()]);
    assert_eq!(pen.rules(), [Rule::WriteLost]);
}

#[test]
fn i4_an_acknowledged_job_that_is_gone() {
    let mut pen = Pen::new();
    pen.job(None);
    pen.last.jobs.clear();
    assert_eq!(pen.rules(), [Rule::JobLost]);
}

#[test]
fn i4_a_job_may_go_by_completion_purge_or_prune() {
    let mut pen = Pen::new();
    let (done, purged) = (pen.job(None), pen.job(None));
    pen.last.jobs.clear();
    let held = pen.claim(done, 5, vec![]);
    let op = pen.settle_op(&held, Ending::Complete);
    pen.say(op, What::Unknown("unavailable".into()));
    let purge = ControlCommand::Purge(Select::Job(purged));
    pen.control(&purge, 1);
    pen.last.audit.push(record(&purge, 1));
    assert_eq!(pen.rules(), []);
}

#[test]
fn i4_a_job_that_nobody_enqueued() {
    let mut pen = Pen::new();
    pen.claim(JobId::generate(), 5, vec![]);
    assert_eq!(pen.rules(), [Rule::JobFromNowhere]);
}

#[test]
fn i5_a_forged_receipt() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let mut held = pen.claim(job, 5, vec![]);
    held.proof = 6;
    pen.settle(&held, Verdict::Fenced);
    assert_eq!(pen.rules(), []);
    pen.settle(&held, HELD);
    assert_eq!(pen.rules(), [Rule::ForeignReceiptAccepted]);
}

#[test]
fn i5_a_receipt_that_was_overtaken() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let zombie = pen.claim(job, 5, vec![]);
    pen.claim(job, 6, vec![expiry(job, 5)]);
    pen.checkpoint(&zombie, 1);
    assert_eq!(pen.rules(), [Rule::AcceptedAfterEnd]);
}

#[test]
fn i5_a_current_receipt_that_is_refused() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    pen.settle(&held, Verdict::Fenced);
    assert_eq!(pen.rules(), [Rule::CurrentReceiptFenced]);
    // A reaper whose answer was lost may have expired it.
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    let request = pen.request();
    pen.say(Op::Reap { request }, What::Unknown("unavailable".into()));
    pen.settle(&held, Verdict::Fenced);
    assert_eq!(pen.rules(), []);
}

#[test]
fn i6_two_leases_of_one_job() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    pen.claim(job, 5, vec![]);
    pen.claim(job, 6, vec![]);
    assert_eq!(pen.rules(), [Rule::TwoLeasesOfAJob]);
}

#[test]
fn i6_an_end_that_is_unknown_excuses() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    let op = pen.settle_op(&held, Ending::Retry);
    pen.history.invoke(1, op);
    pen.claim(job, 6, vec![]);
    let revoke = ControlCommand::Revoke(LeaseSelect::Owner("w".into()));
    pen.control(&revoke, 1);
    pen.last.audit.push(record(&revoke, 1));
    pen.claim(job, 7, vec![]);
    assert_eq!(pen.rules(), []);
}

#[test]
fn i6_two_leases_of_one_exclusive_key() {
    let mut pen = Pen::new();
    let (a, b) = (pen.job(Some("k")), pen.job(Some("k")));
    let first = pen.claim(a, 5, vec![]);
    pen.settle(&first, HELD);
    pen.claim(b, 6, vec![]);
    assert_eq!(pen.rules(), []);
    let (c, d) = (pen.job(Some("l")), pen.job(Some("l")));
    pen.claim(c, 7, vec![]);
    pen.claim(d, 8, vec![]);
    assert_eq!(pen.rules(), [Rule::TwoLeasesOfAKey]);
}

#[test]
fn i9_a_lease_that_ended_twice() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    pen.claim(job, 5, vec![]);
    for _ in 0..2 {
        let request = pen.request();
        let answer = Answer::Reaped(vec![expiry(job, 5)]);
        pen.say(Op::Reap { request }, What::Ok(answer));
    }
    assert_eq!(pen.rules(), [Rule::EndedTwice]);
}

#[test]
fn i9_a_ledger_that_is_off() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    pen.claim(job, 5, vec![]);
    let mut ledger = Ledger::default();
    ledger.granted = 1;
    ledger.live = 1;
    pen.last.queues = vec![queue_view(ledger)];
    assert_eq!(pen.rules(), []);
    ledger.expired_deadline = 1;
    pen.last.queues = vec![queue_view(ledger)];
    assert_eq!(pen.rules(), [Rule::LedgerOff]);
    // It balances, and counts an expiry that nobody was told of.
    ledger.live = 0;
    pen.last.queues = vec![queue_view(ledger)];
    assert_eq!(pen.rules(), [Rule::LedgerOff]);
}

#[test]
fn i9_a_lease_that_a_repeated_claim_left_out() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    // Its grant of 5 was overdue when the lost answer was asked for again.
    let op = pen.claim_op();
    pen.say(op.clone(), What::Unknown("unavailable".into()));
    let nothing = Answer::Claimed {
        grants: vec![],
        expired: vec![],
    };
    pen.say(op, What::Ok(nothing));
    let mut ledger = Ledger::default();
    ledger.granted = 1;
    ledger.live = 1;
    pen.last.queues = vec![queue_view(ledger)];
    assert_eq!(pen.rules(), [Rule::LedgerOff], "granted out of nothing");
    pen.last.leases = vec![token(5)];
    assert_eq!(pen.rules(), []);
    pen.last.leases.clear();
    let op = pen.claim_op();
    let expired = vec![expiry(job, 5)];
    pen.say(op, What::Ok(claimed(job, 6, expired)));
    ledger.granted = 2;
    ledger.expired_deadline = 1;
    pen.last.queues = vec![queue_view(ledger)];
    assert_eq!(pen.rules(), []);
}

#[test]
fn i10_a_repeat_with_another_answer() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    let op = pen.settle_op(&held, Ending::Surrender);
    pen.say(op.clone(), What::Unknown("unavailable".into()));
    pen.say(op.clone(), What::Ok(Answer::Settled(vec![HELD])));
    pen.say(op.clone(), What::Ok(Answer::Settled(vec![HELD])));
    pen.say(op.clone(), What::Fail("session_lost".into()));
    assert_eq!(pen.rules(), []);
    pen.say(op, What::Ok(Answer::Settled(vec![Verdict::Fenced])));
    assert_eq!(pen.rules(), [Rule::RepeatAnsweredAnew]);
}

#[test]
fn i10_a_repeated_claim_lists_what_is_left() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let op = pen.claim_op();
    pen.say(op.clone(), What::Ok(claimed(job, 5, vec![])));
    let nothing = Answer::Claimed {
        grants: vec![],
        expired: vec![],
    };
    pen.say(op.clone(), What::Ok(nothing));
    assert_eq!(pen.rules(), []);
    pen.say(op, What::Ok(claimed(job, 6, vec![])));
    assert_eq!(pen.rules(), [Rule::RepeatAnsweredAnew]);
}

#[test]
fn i11_a_checkpoint_that_went_back() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    pen.checkpoint(&held, 7);
    pen.checkpoint(&held, 7);
    assert_eq!(pen.rules(), []);
    pen.checkpoint(&held, 6);
    assert_eq!(pen.rules(), [Rule::CheckpointWentBack]);
}

#[test]
fn i11_a_checkpoint_that_did_not_reach_the_next_claim() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    pen.checkpoint(&held, 7);
    pen.settle(&held, HELD);
    pen.claim(job, 6, vec![]);
    assert_eq!(pen.rules(), [Rule::CheckpointLost]);
}

#[test]
fn i12_a_renewal_beyond_the_lifetime() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    pen.clock.advance(LIFETIME - TERM);
    pen.renew(&held, false, TERM);
    assert_eq!(pen.rules(), []);
    pen.clock.advance(Duration::from_secs(1));
    pen.renew(&held, false, TERM);
    assert_eq!(pen.rules(), [Rule::RenewedTooFar]);
}

#[test]
fn i12_a_lapsed_lease_that_lived() {
    let mut pen = Pen::new();
    let job = pen.job(None);
    let held = pen.claim(job, 5, vec![]);
    pen.renew(&held, true, TERM);
    pen.settle(&held, Verdict::Fenced);
    assert_eq!(pen.rules(), []);
    pen.renew(&held, false, TERM);
    assert_eq!(pen.rules(), [Rule::LapsedLeaseLived]);
}

fn record(command: &ControlCommand, done: u64) -> AuditView {
    let command = command.to_string();
    let mut record = AuditView::new(Timestamp::ZERO, "op".into(), "why".into(), command);
    record.done = done;
    record
}

#[test]
fn i14_a_command_that_is_not_on_record() {
    let mut pen = Pen::new();
    let pause = ControlCommand::Pause(QueueName::default());
    pen.control(&pause, 1);
    assert_eq!(pen.rules(), [Rule::CommandNotOnRecord]);
    pen.last.audit.push(record(&pause, 1));
    assert_eq!(pen.rules(), []);
    pen.last.audit.push(record(&pause, 1));
    assert_eq!(pen.rules(), [Rule::RecordFromNowhere]);
}

/// The checker has a bad history for each of its rules in this file.
#[test]
fn every_rule_has_its_invariant() {
    let text = include_str!("checker.rs");
    for invariant in [1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 14] {
        assert!(text.contains(&format!("fn i{invariant}_")), "I{invariant}");
    }
}
