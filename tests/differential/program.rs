//! Random programs of verbs. A step names things by number, so that it means the same in each
//! store.

use proptest::collection::vec;
use proptest::prelude::*;

/// One call, or a move of the clock.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// What a step shrinks to.
    Nothing,
    Enqueue(Vec<JobSpec>),
    Claim(ClaimSpec),
    Renew(Vec<BeatSpec>),
    Settle(Vec<(ReceiptSpec, End)>),
    Checkpoint(Vec<(ReceiptSpec, u64)>),
    Reap(usize),
    Control(ControlSpec),
    Prune(u64),
    Advance(u64),
    Back(u64),
    /// Sends an earlier request again, counted from the last.
    Repeat(usize),
}

#[derive(Clone, Debug)]
pub(crate) struct JobSpec {
    pub(crate) queue: usize,
    pub(crate) priority: u8,
    pub(crate) delay: u64,
    pub(crate) unique: Option<(u8, Option<u64>)>,
    pub(crate) exclusive: Option<u8>,
    pub(crate) term: Option<u64>,
    pub(crate) max_lifetime: Option<u64>,
    pub(crate) max_expiries: u32,
    pub(crate) retention: Option<u64>,
    pub(crate) bytes: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct ClaimSpec {
    pub(crate) queues: usize,
    pub(crate) max: usize,
    pub(crate) suspect: bool,
    pub(crate) owner: u8,
}

/// A receipt out of those ever given, as it is or tampered with.
#[derive(Clone, Debug)]
pub(crate) struct ReceiptSpec {
    /// Counted from the last one given.
    pub(crate) back: usize,
    pub(crate) tamper: Tamper,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Tamper {
    Not,
    Nonce,
    Token,
    Job,
    Queue,
}

#[derive(Clone, Debug)]
pub(crate) enum End {
    Complete(bool),
    Retry(u64),
    Surrender(u64),
    /// Surrendered with a mark this many hours ahead of the clock.
    Marked(u64),
    Decline(u64),
    Bury,
}

#[derive(Clone, Debug)]
pub(crate) struct BeatSpec {
    /// Counted from the last grant.
    pub(crate) back: usize,
    /// Which of its leases lapse, and which are left out of the beat: bit by bit.
    pub(crate) lapse: u8,
    pub(crate) omit: u8,
    pub(crate) progress: bool,
    pub(crate) tamper: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum ControlSpec {
    Pause(usize),
    Resume(usize),
    Configure(usize, bool),
    Cancel(SelectSpec),
    RevokeJob(usize),
    RevokeOwner(u8),
    RevokeTask(u8),
    RetryDead(SelectSpec),
    Purge(SelectSpec),
    Reschedule(SelectSpec, u64),
}

#[derive(Clone, Debug)]
pub(crate) enum SelectSpec {
    /// One of the jobs ever enqueued.
    Job(usize),
    State {
        queue: usize,
        state: usize,
        max: usize,
    },
}

fn job() -> impl Strategy<Value = JobSpec> {
    let keys = (
        prop::option::weighted(0.3, (0..3u8, prop::option::of(1..200u64))),
        prop::option::weighted(0.4, 0..3u8),
    );
    let terms = (
        prop::option::weighted(0.2, 5..100u64),
        prop::option::weighted(0.3, 10..80u64),
        prop_oneof![1 => Just(1), 4 => 3..5u32],
        prop::option::weighted(0.5, 0..60u64),
    );
    let plain = (0..2usize, 0..4u8, prop_oneof![3 => Just(0), 1 => 1..120u64]);
    (plain, keys, terms, 0..40usize).prop_map(|(plain, keys, terms, bytes)| JobSpec {
        queue: plain.0,
        priority: plain.1 * 2,
        delay: plain.2,
        unique: keys.0,
        exclusive: keys.1,
        term: terms.0,
        max_lifetime: terms.1,
        max_expiries: terms.2,
        retention: terms.3,
        bytes,
    })
}

fn receipt() -> impl Strategy<Value = ReceiptSpec> {
    let tamper = prop_oneof![
        12 => Just(Tamper::Not),
        1 => Just(Tamper::Nonce),
        1 => Just(Tamper::Token),
        1 => Just(Tamper::Job),
        1 => Just(Tamper::Queue),
    ];
    (0..10usize, tamper).prop_map(|(back, tamper)| ReceiptSpec { back, tamper })
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        3 => any::<bool>().prop_map(End::Complete),
        2 => (0..60u64).prop_map(End::Retry),
        2 => prop_oneof![Just(0), 1..60u64].prop_map(End::Surrender),
        1 => prop_oneof![Just(1), Just(30)].prop_map(End::Marked),
        1 => (0..60u64).prop_map(End::Decline),
        1 => Just(End::Bury),
    ]
}

fn select() -> impl Strategy<Value = SelectSpec> {
    prop_oneof![
        (0..30usize).prop_map(SelectSpec::Job),
        (0..2usize, 0..6usize, 1..5usize).prop_map(|(queue, state, max)| SelectSpec::State {
            queue,
            state,
            max
        }),
    ]
}

fn control() -> impl Strategy<Value = ControlSpec> {
    prop_oneof![
        1 => (0..2usize).prop_map(ControlSpec::Pause),
        2 => (0..2usize).prop_map(ControlSpec::Resume),
        1 => (0..2usize, any::<bool>()).prop_map(|(queue, relaxed)| ControlSpec::Configure(queue, relaxed)),
        3 => select().prop_map(ControlSpec::Cancel),
        4 => (0..2usize).prop_map(|queue| {
            let leased = SelectSpec::State { queue, state: 2, max: 9 };
            ControlSpec::Cancel(leased)
        }),
        2 => (0..30usize).prop_map(ControlSpec::RevokeJob),
        1 => (0..2u8).prop_map(ControlSpec::RevokeOwner),
        1 => (0..2u8).prop_map(ControlSpec::RevokeTask),
        3 => select().prop_map(ControlSpec::RetryDead),
        2 => select().prop_map(ControlSpec::Purge),
        3 => (select(), prop_oneof![Just(0), 1..90u64])
            .prop_map(|(jobs, delay)| ControlSpec::Reschedule(jobs, delay)),
    ]
}

fn claim() -> impl Strategy<Value = ClaimSpec> {
    (0..4usize, 1..8usize, any::<bool>(), 0..2u8).prop_map(|(queues, max, suspect, owner)| {
        ClaimSpec {
            queues,
            max,
            suspect,
            owner,
        }
    })
}

fn beat() -> impl Strategy<Value = BeatSpec> {
    let bits = prop_oneof![2 => Just(0u8), 1 => any::<u8>()];
    (
        0..5usize,
        bits.clone(),
        bits,
        any::<bool>(),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(back, lapse, omit, progress, tamper)| BeatSpec {
            back,
            lapse,
            omit,
            progress,
            tamper,
        })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => Just(Step::Nothing),
        8 => vec(job(), 1..5).prop_map(Step::Enqueue),
        9 => claim().prop_map(Step::Claim),
        3 => vec(beat(), 1..3).prop_map(Step::Renew),
        6 => vec((receipt(), end()), 1..4).prop_map(Step::Settle),
        2 => vec((receipt(), 0..4u64), 1..3).prop_map(Step::Checkpoint),
        2 => (1..6usize).prop_map(Step::Reap),
        5 => control().prop_map(Step::Control),
        2 => prop_oneof![Just(0), 1..50u64].prop_map(Step::Prune),
        6 => prop_oneof![1..20u64, 20..100u64].prop_map(Step::Advance),
        1 => Just(Step::Advance(700)),
        1 => (1..30u64).prop_map(Step::Back),
        3 => (0..4usize).prop_map(Step::Repeat),
    ]
}

/// Programs of up to `steps` steps. They are long, and shrink step by step to nothing.
pub(crate) fn programs(steps: usize) -> impl Strategy<Value = Vec<Step>> {
    vec(step(), steps).prop_map(|program| {
        let steps = program.into_iter();
        steps
            .filter(|step| !matches!(step, Step::Nothing))
            .collect()
    })
}

/// For a store whose issuers are its queues: where tokens of several queues could meet a clock that
/// goes back, or a mark from the future, their order is nobody's promise.
pub(crate) fn on_one_queue(mut program: Vec<Step>) -> Vec<Step> {
    for step in &mut program {
        match step {
            Step::Enqueue(jobs) => jobs.iter_mut().for_each(|job| job.queue = 0),
            Step::Claim(claim) => claim.queues = 0,
            Step::Control(
                ControlSpec::Pause(queue)
                | ControlSpec::Resume(queue)
                | ControlSpec::Configure(queue, _)
                | ControlSpec::Cancel(SelectSpec::State { queue, .. })
                | ControlSpec::RetryDead(SelectSpec::State { queue, .. })
                | ControlSpec::Purge(SelectSpec::State { queue, .. })
                | ControlSpec::Reschedule(SelectSpec::State { queue, .. }, _),
            ) => *queue = 0,
            _ => {}
        }
    }
    program
}

/// Two queues, and none of the steps that only one issuer can order. Both issuers are as old as the
/// program: a new one starts 20 ms ahead of the clock, where another may not follow it yet.
pub(crate) fn with_time_in_order(rest: Vec<Step>) -> Vec<Step> {
    let mut program = vec![
        Step::Control(ControlSpec::Resume(0)),
        Step::Control(ControlSpec::Resume(1)),
        Step::Advance(1),
    ];
    program.extend(rest);
    program.retain(|step| !matches!(step, Step::Back(_)));
    for step in &mut program {
        let Step::Settle(ends) = step else { continue };
        for (_, end) in ends {
            if matches!(end, End::Marked(_)) {
                *end = End::Surrender(0);
            }
        }
    }
    program
}
