//! A small model of the protocol, every state of it visited.
//!
//! Two workers, one job, one issuer, one fenced resource, and time in steps. A worker claims, may
//! be paused anywhere, renews, opens the resource, reads it, writes back what it read and its own
//! mark, and settles; its messages arrive at once, which is no loss: a message under way is a
//! worker that was paused before sending it. The issuer may lose everything it knew. All
//! interleavings are walked, breadth first, so that a counterexample is a shortest one.
//!
//! The walk is forty lines here; a model checker as a dependency would bring a web server and some
//! thirty crates for the same breadth-first search.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;

const WORKERS: usize = 2;
/// The last step of time, and how often each thing may happen: what makes the space finite.
const TIME: u8 = 6;
const TERM: u8 = 2;
const CLAIMS: u8 = 3;
const WRITES: usize = 3;
const ROLLBACKS: u8 = 1;

/// What is left out of the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Protocol {
    Whole,
    /// The resource checks tokens on writes, and is read without being opened.
    NoOpenBeforeRead,
    /// Tokens are counted, and the count is lost with the issuer's memory.
    CounterToken,
    /// A settlement names its job and shows no receipt.
    SettleByJobId,
    /// A renewal asks only whether the lease is there, and not whether its time has passed.
    RenewalResurrects,
}

/// A lease as the issuer knows it. The token stands for the receipt: nobody else knows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Lease {
    token: u8,
    deadline: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Step {
    #[default]
    Idle,
    Claimed,
    Opened,
    /// It knows what was in the resource then.
    Read {
        count: u8,
    },
    Written,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Worker {
    step: Step,
    token: u8,
    paused: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct State {
    now: u8,
    lease: Option<Lease>,
    /// The job is done.
    settled: bool,
    /// The last token given, as far as the issuer remembers.
    last: u8,
    /// Claims so far, and the largest token of them: known to the one who checks, not to the
    /// issuer.
    claims: u8,
    largest: u8,
    rollbacks: u8,
    workers: [Worker; WORKERS],
    /// The resource: its mark, and the tokens that wrote, as a list that each write replaces.
    mark: u8,
    values: Vec<u8>,
    /// All lists that were ever read, by their place in the worker's step.
    seen: Vec<Vec<u8>>,
    /// The writes that were accepted.
    accepted: Vec<u8>,
    wrong: Option<Wrong>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Wrong {
    /// I1
    TokenWentBack,
    /// I2
    StaleTokenAccepted,
    /// I3
    WriteLost,
    /// I5
    ForeignLeaseSettled,
    /// I6
    TwoLiveLeases,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Tick,
    Claim(usize),
    Renew(usize),
    Pause(usize),
    Resume(usize),
    Expire,
    Open(usize),
    Read(usize),
    Write(usize),
    Settle(usize),
    RestartWithRollback,
}

impl State {
    /// Everything that can happen next.
    fn next(&self, protocol: Protocol) -> Vec<(Action, State)> {
        let mut all = Vec::new();
        let mut add = |action, state: Option<State>| all.extend(state.map(|state| (action, state)));
        add(Action::Tick, self.tick());
        add(Action::Expire, self.expire());
        add(Action::RestartWithRollback, self.restart());
        for worker in 0..WORKERS {
            if self.workers[worker].paused {
                add(Action::Resume(worker), self.pause(worker, false));
                continue;
            }
            add(Action::Pause(worker), self.pause(worker, true));
            add(Action::Claim(worker), self.claim(worker, protocol));
            add(Action::Renew(worker), self.renew(worker, protocol));
            add(Action::Open(worker), self.open(worker, protocol));
            add(Action::Read(worker), self.read(worker));
            add(Action::Write(worker), self.write(worker));
            add(Action::Settle(worker), self.settle(worker, protocol));
        }
        all
    }

    fn tick(&self) -> Option<Self> {
        let mut next = self.clone();
        next.now += 1;
        (self.now < TIME).then_some(next)
    }

    /// The store expires what is overdue, in one step with the look at its deadline.
    fn expire(&self) -> Option<Self> {
        self.lease.filter(|lease| lease.deadline <= self.now)?;
        let mut next = self.clone();
        next.lease = None;
        Some(next)
    }

    /// The issuer loses its memory, and takes a step of time over it.
    fn restart(&self) -> Option<Self> {
        if self.rollbacks == ROLLBACKS || self.now == TIME {
            return None;
        }
        let mut next = self.clone();
        next.rollbacks += 1;
        next.now += 1;
        next.last = 0;
        next.lease = None;
        next.settled = false;
        Some(next)
    }

    fn pause(&self, worker: usize, paused: bool) -> Option<Self> {
        // One that holds nothing might as well not be there.
        if self.workers[worker].step == Step::Idle {
            return None;
        }
        let mut next = self.clone();
        next.workers[worker].paused = paused;
        Some(next)
    }

    fn claim(&self, worker: usize, protocol: Protocol) -> Option<Self> {
        let busy = self.workers[worker].step != Step::Idle;
        let overdue = self.lease.is_some_and(|lease| lease.deadline <= self.now);
        if busy || self.settled || self.claims == CLAIMS || (self.lease.is_some() && !overdue) {
            return None;
        }
        let mut next = self.clone();
        // The hybrid clock: above the last one, and above the time. A step of time has room for all
        // the claims that can fall into it.
        let token = match protocol {
            Protocol::CounterToken => self.last + 1,
            _ => (self.last + 1).max(self.now * (CLAIMS + 1) + 1),
        };
        if self.claims > 0 && token <= self.largest {
            next.wrong = Some(Wrong::TokenWentBack);
        }
        next.last = token;
        next.largest = self.largest.max(token);
        next.claims += 1;
        next.lease = Some(Lease {
            token,
            deadline: self.now + TERM,
        });
        next.workers[worker] = Worker {
            step: Step::Claimed,
            token,
            paused: false,
        };
        Some(next)
    }

    fn holds(&self, worker: usize) -> Option<Lease> {
        let token = self.workers[worker].token;
        self.lease.filter(|lease| lease.token == token)
    }

    fn renew(&self, worker: usize, protocol: Protocol) -> Option<Self> {
        let Worker { step, token, .. } = self.workers[worker];
        if step == Step::Idle {
            return None;
        }
        let mut next = self.clone();
        match self.lease {
            // It believes that it still holds what it was given, and gets it back.
            other if protocol == Protocol::RenewalResurrects => {
                let live = |lease: &Lease| lease.deadline > self.now && lease.token != token;
                if other.is_some_and(|lease| live(&lease)) {
                    next.wrong = Some(Wrong::TwoLiveLeases);
                }
                next.lease = Some(Lease {
                    token,
                    deadline: self.now + TERM,
                });
            }
            Some(lease) if lease.token == token && lease.deadline > self.now => {
                let deadline = self.now + TERM;
                next.lease = Some(Lease { token, deadline });
            }
            // Fenced: it stops.
            _ => next.workers[worker] = Worker::default(),
        }
        Some(next)
    }

    fn open(&self, worker: usize, protocol: Protocol) -> Option<Self> {
        let Worker { step, token, .. } = self.workers[worker];
        if step != Step::Claimed {
            return None;
        }
        let mut next = self.clone();
        next.workers[worker].step = Step::Opened;
        if protocol == Protocol::NoOpenBeforeRead {
            return Some(next);
        }
        if token < self.mark {
            next.workers[worker] = Worker::default();
        } else {
            next.mark = token;
        }
        Some(next)
    }

    fn read(&self, worker: usize) -> Option<Self> {
        if self.workers[worker].step != Step::Opened {
            return None;
        }
        let mut next = self.clone();
        let known = self.seen.iter().position(|seen| *seen == self.values);
        let place = known.unwrap_or_else(|| {
            next.seen.push(self.values.clone());
            next.seen.len() - 1
        });
        next.workers[worker].step = Step::Read { count: place as u8 };
        Some(next)
    }

    fn write(&self, worker: usize) -> Option<Self> {
        let Worker { step, token, .. } = self.workers[worker];
        let Step::Read { count } = step else {
            return None;
        };
        let mut next = self.clone();
        if token < self.mark {
            next.workers[worker] = Worker::default();
            return Some(next);
        }
        if self.accepted.len() == WRITES {
            return None;
        }
        next.workers[worker].step = Step::Written;
        next.mark = token;
        next.values.clone_from(&self.seen[usize::from(count)]);
        next.values.push(token);
        if self.accepted.iter().any(|before| *before > token) {
            next.wrong = Some(Wrong::StaleTokenAccepted);
        } else if self
            .accepted
            .iter()
            .any(|write| !next.values.contains(write))
        {
            next.wrong = Some(Wrong::WriteLost);
        }
        next.accepted.push(token);
        Some(next)
    }

    fn settle(&self, worker: usize, protocol: Protocol) -> Option<Self> {
        if self.workers[worker].step != Step::Written {
            return None;
        }
        let mut next = self.clone();
        next.workers[worker] = Worker::default();
        let own = self.holds(worker).is_some();
        let accepted = own || (protocol == Protocol::SettleByJobId && self.lease.is_some());
        if accepted {
            next.lease = None;
            next.settled = true;
            if !own {
                next.wrong = Some(Wrong::ForeignLeaseSettled);
            }
        }
        Some(next)
    }
}

/// What a walk found.
struct Walked {
    states: usize,
    /// What went wrong first, and how it came to that.
    wrong: Option<(Wrong, Vec<Action>)>,
}

/// Visits every state that can be reached, nearest first, until something is wrong.
fn walk(protocol: Protocol) -> Walked {
    let start = State::default();
    let mut from: HashMap<State, Option<(State, Action)>> = HashMap::new();
    let mut waiting = VecDeque::from([start.clone()]);
    from.insert(start, None);
    while let Some(state) = waiting.pop_front() {
        if let Some(wrong) = state.wrong {
            let wrong = Some((wrong, way_to(&state, &from)));
            let states = from.len();
            return Walked { states, wrong };
        }
        for (action, next) in state.next(protocol) {
            if !from.contains_key(&next) {
                from.insert(next.clone(), Some((state.clone(), action)));
                waiting.push_back(next);
            }
        }
    }
    let states = from.len();
    Walked {
        states,
        wrong: None,
    }
}

fn way_to<S: Eq + Hash, A: Copy>(state: &S, from: &HashMap<S, Option<(S, A)>>) -> Vec<A> {
    let mut way = Vec::new();
    let mut at = state;
    while let Some(Some((before, action))) = from.get(at) {
        way.push(*action);
        at = before;
    }
    way.reverse();
    way
}

#[test]
fn the_whole_protocol_has_no_counterexample() {
    let walked = walk(Protocol::Whole);
    println!("{} states", walked.states);
    assert_eq!(walked.wrong, None);
    assert!(walked.states > 50_000, "only {} states", walked.states);
}

/// The shortest way to break a mutant, and what breaks.
fn breaks(protocol: Protocol, expected: Wrong) {
    let Walked { states, wrong } = walk(protocol);
    let (wrong, way) = wrong.unwrap_or_else(|| panic!("{protocol:?} holds in {states} states"));
    println!("{protocol:?}: {wrong:?} after {way:?}");
    assert_eq!(wrong, expected);
}

#[test]
fn without_open_before_read_a_write_is_lost() {
    breaks(Protocol::NoOpenBeforeRead, Wrong::WriteLost);
}

#[test]
fn a_counted_token_goes_back() {
    breaks(Protocol::CounterToken, Wrong::TokenWentBack);
}

#[test]
fn settling_by_job_id_ends_another_lease() {
    breaks(Protocol::SettleByJobId, Wrong::ForeignLeaseSettled);
}

#[test]
fn a_renewal_that_resurrects_makes_two_owners() {
    breaks(Protocol::RenewalResurrects, Wrong::TwoLiveLeases);
}
