//! What the rules say, as tables: inputs and outcomes in plain data.
//!
//! A store that repeats a rule in a language of its own is tested with these: a test plays each row
//! through the store's verbs, and compares what it sees with what the row says. The rows are made
//! by the functions of this folder, so that there is nothing to keep up to date.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::ends::{self, End, LeaseFacts, Next, Outcome, Settling};
use super::holding::{self, Mode, Scope};
use super::issue::{Issuer, WhenBehind};
use super::order;
use crate::clock::{Timestamp, micros};
use crate::history::{Cause, LeaseEnd};
use crate::job::{JobId, JobRecord, JobState, Kind, NewJob, QueueName};
use crate::limits;
use crate::token::FencingToken;

/// The moment at which the ends of the tables happen: only what passes from it on counts.
const NOW: Timestamp = Timestamp::from_micros(1_000_000_000_000);

/// One end of one lease.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct EndVector {
    /// How long the job is kept once it is completed.
    pub retention: Option<Duration>,
    /// How many of its leases may expire.
    pub max_expiries: u32,
    /// Its failures so far.
    pub failures: u32,
    /// Its expiries so far.
    pub expiries: u32,
    /// How long ago it was declined, if that is how its last lease ended.
    pub declined: Option<Duration>,
    /// Whether a cancel was requested while it was leased.
    pub cancel: bool,
    /// Whether its queue is relaxed.
    pub relaxed: bool,
    /// How the lease ends.
    pub by: EndedBy,
    /// What the store must make of it.
    pub then: Ended,
}

/// How a lease ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[allow(missing_docs, reason = "the words are the glossary's")]
pub enum EndedBy {
    Complete,
    Retry {
        delay: Duration,
    },
    Surrender {
        delay: Duration,
        /// The fence's mark, as microseconds ahead of the store's clock.
        mark_ahead: Option<u64>,
    },
    Decline {
        delay: Duration,
    },
    Bury,
    Expire(Cause),
    Revoke,
}

/// What becomes of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Ended {
    /// The counter of the ledger, and the end in the job's history.
    pub counts_as: LeaseEnd,
    /// Its state from now on. None: nothing of it is stored.
    pub state: Option<JobState>,
    /// Its failures from now on, if it is stored.
    pub failures: u32,
    /// Its expiries from now on, if it is stored.
    pub expiries: u32,
    /// For how long it has been declined, if it is stored.
    pub declined: Option<Duration>,
    /// How long it waits, if it is scheduled.
    pub waits: Option<Duration>,
    /// Whether it is claimed before a ready job of the same priority that was there already.
    pub is_next: bool,
    /// Whether the next job of its exclusive key may go.
    pub frees_key: bool,
    /// How long it is kept, if its life is over and it is not kept for good.
    pub kept_for: Option<Duration>,
}

/// The ends of leases.
pub fn ends() -> Vec<EndVector> {
    let delay = Duration::from_secs(90);
    let belief = micros(Issuer::BELIEF);
    let bys = [
        EndedBy::Complete,
        EndedBy::Retry {
            delay: Duration::ZERO,
        },
        EndedBy::Retry { delay },
        surrender(Duration::ZERO, None),
        surrender(delay, None),
        surrender(Duration::ZERO, Some(belief)),
        surrender(Duration::ZERO, Some(belief + 1)),
        surrender(delay, Some(belief + 1)),
        EndedBy::Decline { delay },
        EndedBy::Bury,
        EndedBy::Expire(Cause::Deadline),
        EndedBy::Expire(Cause::Lifetime),
        EndedBy::Expire(Cause::Stalled),
        EndedBy::Revoke,
    ];
    let hour = Duration::from_secs(3600);
    let mut vectors = Vec::new();
    for by in bys {
        for cancel in [false, true] {
            for retention in [None, Some(hour), Some(48 * hour)] {
                vectors.push(end(by, retention, cancel, false, Before::default()));
            }
            vectors.push(end(by, None, cancel, true, Before::default()));
        }
        for expiries in 1..MAX_EXPIRIES {
            let before = Before {
                expiries,
                ..Before::default()
            };
            vectors.push(end(by, None, false, false, before));
        }
        let before = Before {
            failures: 2,
            expiries: 1,
            declined: None,
        };
        vectors.push(end(by, Some(hour), true, false, before));
        let before = Before {
            declined: Some(delay),
            ..before
        };
        vectors.push(end(by, Some(hour), false, false, before));
    }
    vectors
}

/// What became of a job's earlier leases.
#[derive(Clone, Copy, Default)]
struct Before {
    failures: u32,
    expiries: u32,
    declined: Option<Duration>,
}

/// Low enough that a test can reach it.
const MAX_EXPIRIES: u32 = 4;

const fn surrender(delay: Duration, mark_ahead: Option<u64>) -> EndedBy {
    EndedBy::Surrender { delay, mark_ahead }
}

fn end(
    by: EndedBy,
    retention: Option<Duration>,
    cancel: bool,
    relaxed: bool,
    before: Before,
) -> EndVector {
    let Before {
        failures,
        expiries,
        declined,
    } = before;
    let mut job = job();
    job.options.retention = retention;
    job.options.max_expiries = MAX_EXPIRIES;
    (job.failures, job.expiries) = (failures, expiries);
    job.declined_since = declined.map(|ago| NOW.before(ago));
    EndVector {
        retention,
        max_expiries: MAX_EXPIRIES,
        failures,
        expiries,
        declined,
        cancel,
        relaxed,
        by,
        then: ended(&job, by, cancel, relaxed),
    }
}

fn ended(job: &JobRecord, by: EndedBy, cancel: bool, relaxed: bool) -> Ended {
    let reason = || "a reason".to_owned();
    let settle = |outcome: Outcome| {
        let mark = outcome.mark();
        let believed = mark.is_none_or(|mark| Issuer { last: 0, floor: 0 }.raise(mark, NOW));
        let settling = Settling {
            outcome: &outcome,
            cancel,
            believed,
            relaxed,
            now: NOW,
        };
        ends::settle(job, &settling)
    };
    let end = match by {
        EndedBy::Complete => settle(Outcome::Complete { result: None }),
        EndedBy::Retry { delay } => settle(Outcome::Retry {
            delay,
            reason: reason(),
        }),
        EndedBy::Surrender { delay, mark_ahead } => {
            let mark = mark_ahead.map(|ahead| FencingToken::new(NOW.as_micros() + ahead));
            settle(Outcome::Surrender { delay, mark })
        }
        EndedBy::Decline { delay } => settle(Outcome::Decline {
            delay,
            reason: reason(),
        }),
        EndedBy::Bury => settle(Outcome::Bury { reason: reason() }),
        EndedBy::Expire(cause) => ends::expire(job, cause, cancel, NOW),
        EndedBy::Revoke => ends::revoke(job, &reason(), cancel, NOW),
    };
    seen(job, end)
}

/// What can be seen of an end from outside.
fn seen(job: &JobRecord, end: End) -> Ended {
    let (counts_as, next) = (end.counts_as, end.next);
    let mut after = job.clone();
    let facts = LeaseFacts {
        token: FencingToken::new(1),
        owner: Arc::from(""),
        task: Arc::from(""),
        granted_at: NOW,
        renewals: 0,
        progress: None,
        cancel: false,
    };
    end.apply(&mut after, &facts, NOW);
    let (frees_key, keep_until) = match next {
        Next::Front | Next::Back => (false, None),
        Next::Scheduled { keeps_key } => (!keeps_key, None),
        Next::Settled { keep_until, .. } => (true, keep_until),
    };
    let for_good = Timestamp::from_micros(i64::MAX as u64);
    let is_ready = next.state() == JobState::Ready;
    Ended {
        counts_as,
        state: (!next.is_gone()).then(|| next.state()),
        failures: after.failures,
        expiries: after.expiries,
        declined: after.declined_since.map(|since| NOW.since(since)),
        waits: matches!(next, Next::Scheduled { .. }).then(|| after.run_at.since(NOW)),
        is_next: next == Next::Front || (is_ready && after.is_suspect()),
        frees_key,
        kept_for: keep_until
            .filter(|until| *until < for_good)
            .map(|until| until.since(NOW)),
    }
}

fn job() -> JobRecord {
    let kind = Kind::new("work").expect("a good name");
    let new = NewJob::raw(QueueName::default(), kind, "{}");
    JobRecord::new(JobId::from_bytes([7; 16]), new, NOW)
}

/// Claims of one issuer, one after the other. The issuer finds no memory at the first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct IssueVector {
    /// Claims are refused while the clock is behind.
    pub strict: bool,
    /// The claims.
    pub claims: Vec<IssuedClaim>,
}

/// One claim, and the tokens that it gets. Moments and tokens count in microseconds from the first
/// claim's moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct IssuedClaim {
    /// The store's clock.
    pub at: i64,
    /// How many leases are asked for, of as many jobs or more.
    pub wanted: u64,
    /// How many fit. With none, the claim is refused.
    pub granted: u64,
    /// The first token, if any fits.
    pub first: u64,
    /// How far the clock is behind what was given before, if by more than speed can explain.
    pub clock_behind: Option<Duration>,
}

/// What an issuer gives.
pub fn issues() -> Vec<IssueVector> {
    let programs: [&[(i64, u64)]; 7] = [
        // In step with the clock.
        &[(0, 1), (1_000_000, 3), (1_000_001, 1), (1_000_002, 5)],
        // Faster than the clock, up to the lead.
        &[(1, 1), (1, 1_000), (1, 999), (1, 1_000)],
        // The clock is set back, and catches up.
        &[
            (5_000_000, 2),
            (4_000_000, 2),
            (5_000_001, 1),
            (6_000_000, 1),
        ],
        // Far back, and again before it has caught up.
        &[(50_000_000, 1), (0, 1), (49_990_000, 1), (60_000_000, 2)],
        &[
            (500_000_000, 3),
            (0, 5),
            (0, 1_000),
            (1_000_000, 1),
            (500_000_900, 1),
            (560_000_000, 1),
        ],
        &[(0, 1_000), (20_000, 1), (40_000, 1_000), (40_001, 1_000)],
        &[(0, 1), (0, 0), (20_001, 1)],
    ];
    let modes = [WhenBehind::GoOn, WhenBehind::Refuse];
    let vectors = modes.map(|mode| programs.map(|program| issue(program, mode)));
    vectors.into_iter().flatten().collect()
}

fn issue(program: &[(i64, u64)], when_behind: WhenBehind) -> IssueVector {
    let base = NOW.as_micros();
    let at = |offset: i64| Timestamp::from_micros(base.saturating_add_signed(offset));
    let first = program.first().map_or(0, |(at, _)| *at);
    let mut issuer = Issuer::without_memory(at(first));
    let claims = program.iter().filter(|(_, wanted)| *wanted > 0);
    let claims = claims.map(|&(offset, wanted)| {
        let now = at(offset);
        let clock_behind = issuer.clock_behind(now);
        let granted = issuer.room(now, when_behind).min(wanted);
        let token = (granted > 0).then(|| issuer.issue(granted, now).get());
        IssuedClaim {
            at: offset - first,
            wanted,
            granted,
            first: token.map_or(0, |token| token - at(first).as_micros()),
            clock_behind,
        }
    });
    IssueVector {
        strict: when_behind == WhenBehind::Refuse,
        claims: claims.collect(),
    }
}

/// One grant: when it is renewed, and when and why it is over.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TermVector {
    /// The term of its claim.
    pub term: Duration,
    /// Its maximum lifetime.
    pub max_lifetime: Duration,
    /// What the claim gives.
    pub granted: Duration,
    /// Renewals: how long after the claim, and what each gives.
    pub renewals: Vec<(Duration, Duration)>,
    /// Why it expires, once nobody renews it.
    pub cause: Cause,
}

/// Grants until they are over.
pub fn terms() -> Vec<TermVector> {
    let second = Duration::from_secs(1);
    let programs: [(Duration, Duration, &[u32]); 6] = [
        (10 * second, 60 * second, &[]),
        (10 * second, 60 * second, &[1, 9, 15]),
        (10 * second, 10 * second, &[]),
        (10 * second, 4 * second, &[]),
        (10 * second, 25 * second, &[9, 14]),
        (10 * second, 25 * second, &[9, 15, 24]),
    ];
    let programs = programs.into_iter();
    programs
        .map(|(term, max_lifetime, renewals)| {
            let deadline = |now| order::deadline(now, term, NOW, max_lifetime);
            let renewals: Vec<_> = renewals
                .iter()
                .map(|seconds| {
                    let now = NOW.after(*seconds * second);
                    (*seconds * second, deadline(now).since(now))
                })
                .collect();
            let last = renewals.last().map_or(Duration::ZERO, |(at, _)| *at);
            TermVector {
                term,
                max_lifetime,
                granted: deadline(NOW).since(NOW),
                cause: order::overdue_cause(deadline(NOW.after(last)), NOW, max_lifetime),
                renewals,
            }
        })
        .collect()
}

/// Jobs of one queue, and what one claim gets of them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ClaimVector {
    /// The jobs, in the order in which they fall due. They are due when the claim comes.
    pub jobs: Vec<DueJob>,
    /// The term and the maximum lifetime of jobs that bring none of their own.
    pub terms: (Duration, Duration),
    /// How many leases the claim asks for.
    pub max: usize,
    /// Whether one of them may be a suspect.
    pub admit_suspect: bool,
    /// What it gets, in order.
    pub grants: Vec<GrantedJobs>,
}

/// A job that a claim finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct DueJob {
    /// Its priority.
    pub priority: u8,
    /// Its expiries so far.
    pub expiries: u32,
    /// Bytes of its payload.
    pub bytes: usize,
    /// Its own term.
    pub term: Option<Duration>,
    /// Its own maximum lifetime.
    pub max_lifetime: Option<Duration>,
}

/// One grant of a claim.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct GrantedJobs {
    /// Which of the jobs, in token order.
    pub jobs: Vec<usize>,
    /// How long each renewal extends their leases.
    pub term: Duration,
    /// What the claim gives.
    pub granted: Duration,
}

/// What claims get.
pub fn claims() -> Vec<ClaimVector> {
    let plain = |priority| DueJob {
        priority,
        expiries: 0,
        bytes: 2,
        term: None,
        max_lifetime: None,
    };
    let expired = |priority, expiries| DueJob {
        expiries,
        ..plain(priority)
    };
    let heavy = |bytes| DueJob { bytes, ..plain(4) };
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    let own = |priority, term, max_lifetime| DueJob {
        term,
        max_lifetime,
        ..plain(priority)
    };
    let most = limits::PAYLOAD_BYTES;
    let in_grant = limits::GRANT_BYTES / most;
    let in_call = limits::CALL_BYTES / most;

    let priorities = [4, 0, 7, 4, 1, 0].map(plain);
    let suspects = [
        plain(7),
        expired(7, 2),
        plain(4),
        expired(4, 1),
        expired(4, 2),
        expired(4, 3),
        plain(0),
    ];
    let first_a_suspect = [plain(5), expired(5, 2), plain(0), expired(0, 2)];
    let terms = [
        plain(4),
        own(4, seconds(10), None),
        own(4, seconds(10), None),
        own(4, seconds(10), seconds(5)),
        own(4, seconds(60), None),
        own(4, None, seconds(5)),
        plain(4),
    ];
    // Neighbours in the order of the claim, not in that in which they fell due.
    let apart = [
        own(4, seconds(10), None),
        plain(7),
        own(4, seconds(10), None),
        plain(0),
    ];
    let mut full = vec![heavy(most); in_grant - 1];
    full.extend([heavy(most - 1), heavy(1), heavy(1)]);
    let mut over = vec![heavy(most); in_grant - 1];
    over.extend([heavy(most - 1), heavy(2), heavy(1)]);
    vec![
        claim(&priorities, 10, false),
        claim(&priorities, 3, true),
        claim(&suspects, 10, false),
        claim(&suspects, 10, true),
        claim(&first_a_suspect, 10, true),
        claim(&first_a_suspect, 1, true),
        claim(&terms, 10, false),
        claim(&apart, 10, false),
        claim(&full, 100, false),
        claim(&over, 100, false),
        claim(&vec![heavy(most); in_call + 2], 100, false),
    ]
}

fn claim(jobs: &[DueJob], max: usize, admit_suspect: bool) -> ClaimVector {
    let terms = (Duration::from_secs(60), Duration::from_secs(3600));
    let records: Vec<_> = jobs.iter().map(due).collect();
    let (mut claimed, mut bytes, mut suspect) = (Vec::new(), 0, admit_suspect);
    for tier in 0..order::TIERS {
        let is_suspects = order::is_suspects(tier);
        let in_tier = |at: &usize| order::tier_of(&records[*at]) == tier;
        for at in (0..records.len()).filter(in_tier) {
            if claimed.len() < max && bytes < limits::CALL_BYTES && (suspect || !is_suspects) {
                suspect &= !is_suspects;
                bytes += records[at].weight();
                claimed.push(at);
            }
        }
    }
    let spans = order::grant_spans(claimed.iter().map(|at| &records[*at]), terms);
    let grants = spans.into_iter().map(|span| GrantedJobs {
        jobs: claimed[span.jobs].to_vec(),
        term: span.term,
        granted: order::deadline(NOW, span.term, NOW, span.max_lifetime).since(NOW),
    });
    ClaimVector {
        jobs: jobs.to_vec(),
        terms,
        max,
        admit_suspect,
        grants: grants.collect(),
    }
}

fn due(due: &DueJob) -> JobRecord {
    let mut job = job();
    job.payload = vec![b' '; due.bytes].into();
    job.options.priority = due.priority;
    job.options.term = due.term;
    job.options.max_lifetime = due.max_lifetime;
    job.expiries = due.expiries;
    job
}

/// A job that holds a unique key, and another that wants it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct KeyVector {
    /// For how long the holder has it. None: until its life is over.
    pub window: Option<Duration>,
    /// How long after the holder's enqueue the key is wanted.
    pub after: Duration,
    /// Who wants it.
    pub wanted_by: KeyWanted,
    /// Whether it is refused.
    pub is_duplicate: bool,
}

/// Who wants a unique key that a job holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum KeyWanted {
    /// A new job.
    Enqueued,
    /// A dead job that is given another life.
    Revived,
    /// The holder: it is dead, and is given another life.
    Itself,
}

/// Who gets a unique key.
pub fn keys() -> Vec<KeyVector> {
    let length = Duration::from_secs(30);
    let almost = Duration::from_micros(29_999_999);
    let [job, holder] = [1, 2].map(|n| JobId::from_bytes([n; 16]));
    let mut vectors = Vec::new();
    for window in [None, Some(length)] {
        for after in [Duration::ZERO, almost, length] {
            for wanted_by in [KeyWanted::Enqueued, KeyWanted::Revived, KeyWanted::Itself] {
                let wants = if wanted_by == KeyWanted::Itself {
                    holder
                } else {
                    job
                };
                let until = window.map(|window| NOW.after(window));
                vectors.push(KeyVector {
                    window,
                    after,
                    wanted_by,
                    is_duplicate: order::is_duplicate(wants, holder, until, NOW.after(after)),
                });
            }
        }
    }
    vectors
}

/// Two asks, and whether the first is in the way of the second.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ConflictVector {
    /// How many units the family gives each name.
    pub units: u32,
    /// What is held, or waited for.
    pub first: (Vec<Scope>, Mode),
    /// What is asked for then.
    pub second: (Vec<Scope>, Mode),
    /// Whether a live holding of the first keeps the second away.
    pub holding_blocks: bool,
    /// Whether an earlier ticket of the first does.
    pub ticket_blocks: bool,
    /// Whether everything of the second is within something of the first.
    pub covers: bool,
}

/// What conflicts with what: all pairs of some scopes and modes.
///
/// # Panics
/// Never: the scopes are good ones.
pub fn conflicts() -> Vec<ConflictVector> {
    const UNITS: u32 = 3;
    let texts: [&[&str]; 16] = [
        &["name:a"],
        &["name:b"],
        &["name:a", "name:b"],
        &["name:/a"],
        &["name:a", "path:/a/b"],
        &["path:/"],
        &["path:/a"],
        &["path:/a/b"],
        &["path:/a/b/c", "path:/d"],
        &["path:/a."],
        &["path:/ab"],
        &["range:0..10:a"],
        &["range:9..11:a"],
        &["range:10..20:a"],
        &["range:0..9007199254740992:a"],
        &["range:0..10:/a"],
    ];
    let mut asks = Vec::new();
    for texts in texts {
        let scopes = texts.iter().map(|text| text.parse().expect("a good scope"));
        let scopes: Vec<Scope> = scopes.collect();
        let modes = [Mode::Exclusive, Mode::Shared];
        let units = (1..=UNITS).map(Mode::Units);
        let modes = modes.into_iter().chain(units);
        let modes = modes.filter(|mode| holding::check_ask(&scopes, *mode).is_ok());
        asks.extend(modes.map(|mode| (scopes.clone(), mode)));
    }
    let pairs = asks.iter().flat_map(|a| asks.iter().map(move |b| (a, b)));
    let vectors = pairs.map(|(first, second)| {
        let (a, b) = ((&first.0[..], first.1), (&second.0[..], second.1));
        let free = holding::free_units(UNITS, 0, first.1.units());
        let is_short = first.1.units() > 0 && free < second.1.units();
        let within = |part: &Scope| first.0.iter().any(|scope| scope.covers(part));
        ConflictVector {
            units: UNITS,
            first: first.clone(),
            second: second.clone(),
            holding_blocks: holding::conflict(a, b)
                || (is_short && holding::overlap(&first.0, &second.0)),
            ticket_blocks: holding::ticket_conflict(a, b),
            covers: second.0.iter().all(within),
        }
    });
    vectors.collect()
}
