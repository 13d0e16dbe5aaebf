//! What a run left, in forms that can be compared and counted.

use std::collections::HashMap;

use leasehold::lease::Verdict;
use leasehold::store::{Checkpointed, Renewal};
use leasehold_conformance::history::{Answer, Event, What};

/// A number for a history. Ids and proofs are drawn anew in each run, so that only their first
/// place counts; everything else must be equal.
pub(crate) fn fingerprint(events: &[Event]) -> u64 {
    let mut names: HashMap<Vec<u8>, u64> = HashMap::new();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut line = Vec::new();
    for event in events {
        line.clear();
        serde_json::to_writer(&mut line, event).expect("an event encodes");
        let mut at = 0;
        while at < line.len() {
            let drawn = drawn(&line[at..]);
            if drawn > 0 {
                let next = names.len() as u64;
                let name = *names.entry(line[at..at + drawn].to_vec()).or_insert(next);
                hash = mix(hash, name);
                at += drawn;
            } else {
                hash = mix(hash, line[at].into());
                at += 1;
            }
        }
    }
    hash
}

fn mix(hash: u64, value: u64) -> u64 {
    (hash ^ value).wrapping_mul(0x0100_0000_01b3)
}

/// How many bytes at the front are an id or a proof.
fn drawn(text: &[u8]) -> usize {
    const PROOF: &[u8] = b"\"proof\":";
    if text[0] != b'"' {
        return 0;
    }
    if text.starts_with(PROOF) {
        let digits = text[PROOF.len()..].iter();
        return PROOF.len() + digits.take_while(|c| c.is_ascii_digit()).count();
    }
    let is_id = text.len() > 37
        && text[37] == b'"'
        && [9, 14, 19, 24].into_iter().all(|at| text[at] == b'-');
    if is_id { 38 } else { 0 }
}

/// How often something was seen, over many runs: tables whose troubles never strike prove nothing.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Seen {
    pub(crate) runs: u64,
    pub(crate) events: u64,
    pub(crate) grants: u64,
    pub(crate) renewals: u64,
    pub(crate) renewals_fenced: u64,
    pub(crate) settled: u64,
    pub(crate) settled_late: u64,
    pub(crate) settle_fenced: u64,
    pub(crate) expired: u64,
    pub(crate) saved: u64,
    pub(crate) save_fenced: u64,
    pub(crate) writes: u64,
    pub(crate) writes_refused: u64,
    pub(crate) commands: u64,
    pub(crate) duplicates: u64,
    pub(crate) unknown: u64,
    pub(crate) sessions_lost: u64,
    pub(crate) unended: u64,
    pub(crate) steps: u64,
}

impl Seen {
    pub(crate) fn of(events: &[Event], steps: u64) -> Self {
        let mut seen = Self {
            runs: 1,
            events: events.len() as u64,
            steps,
            ..Self::default()
        };
        for event in events {
            match &event.what {
                What::Invoke(_) => seen.unended += 1,
                What::Fail(kind) => seen.sessions_lost += u64::from(kind == "session_lost"),
                What::Unknown(_) => seen.unknown += 1,
                What::Ok(answer) => seen.count(answer),
            }
            if !matches!(event.what, What::Invoke(_)) {
                seen.unended -= 1;
            }
        }
        seen
    }

    fn count(&mut self, answer: &Answer) {
        match answer {
            Answer::Claimed { grants, expired } => {
                let leases = grants.iter().map(|grant| grant.leases.len() as u64);
                self.grants += leases.sum::<u64>();
                self.expired += expired.len() as u64;
            }
            Answer::Settled(verdicts) => self.verdicts(verdicts),
            Answer::Renewed(renewals) => {
                for renewal in renewals {
                    match renewal {
                        Renewal::Held { .. } => self.renewals += 1,
                        Renewal::Fenced => self.renewals_fenced += 1,
                    }
                }
            }
            Answer::Checkpointed(answers) => {
                for answer in answers {
                    match answer {
                        Checkpointed::Fenced => self.save_fenced += 1,
                        _ => self.saved += 1,
                    }
                }
            }
            Answer::Reaped(expired) => self.expired += expired.len() as u64,
            Answer::Controlled(_) => self.commands += 1,
            Answer::Fence { accepted: true } => self.writes += 1,
            Answer::Fence { accepted: false } => self.writes_refused += 1,
            Answer::Enqueued(answers) => {
                let duplicate =
                    |answer: &&_| matches!(answer, leasehold::store::Enqueued::Duplicate(_));
                self.duplicates += answers.iter().filter(duplicate).count() as u64;
            }
            Answer::Done | Answer::Pruned(_) => {}
        }
    }

    fn verdicts(&mut self, verdicts: &[Verdict]) {
        for verdict in verdicts {
            match verdict {
                Verdict::Held { late, .. } => {
                    self.settled += 1;
                    self.settled_late += u64::from(*late);
                }
                Verdict::Fenced => self.settle_fenced += 1,
            }
        }
    }

    fn parts(&mut self) -> [(&'static str, &mut u64); 19] {
        [
            ("runs", &mut self.runs),
            ("events", &mut self.events),
            ("grants", &mut self.grants),
            ("renewals", &mut self.renewals),
            ("renewals fenced", &mut self.renewals_fenced),
            ("settled", &mut self.settled),
            ("settled late", &mut self.settled_late),
            ("settle fenced", &mut self.settle_fenced),
            ("expired", &mut self.expired),
            ("checkpoints", &mut self.saved),
            ("checkpoints fenced", &mut self.save_fenced),
            ("resource calls", &mut self.writes),
            ("resource refusals", &mut self.writes_refused),
            ("commands", &mut self.commands),
            ("duplicates", &mut self.duplicates),
            ("unknown", &mut self.unknown),
            ("sessions lost", &mut self.sessions_lost),
            ("never ended", &mut self.unended),
            ("handler steps", &mut self.steps),
        ]
    }

    pub(crate) fn add(&mut self, mut other: Self) {
        for ((_, sum), (_, part)) in self.parts().into_iter().zip(other.parts()) {
            *sum += *part;
        }
    }

    /// What has never happened.
    pub(crate) fn missing(mut self) -> Vec<&'static str> {
        let parts = self.parts().into_iter();
        parts
            .filter(|(_, count)| **count == 0)
            .map(|(name, _)| name)
            .collect()
    }
}
