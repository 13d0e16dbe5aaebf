//! The contract of a fence as a test, for any resource.
//!
//! Show your resource as a [`Subject`]: a list of numbers for each scope. [`check`] runs a few
//! written cases and thousands of random interleavings on it, half of them step by step against
//! [`Marks`], half with all holders at once. Everything follows from the seed.
//!
//! What it looks for: an operation accepted behind a mark, one refused that is not, a refusal with
//! the wrong mark, a write that is lost or lands behind a larger token, a read that a smaller token
//! changes afterwards, a named operation applied twice by one token, a pruned token let back in.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use fastrand::Rng;
use tokio::task::JoinSet;

use leasehold::fence::{FenceError, Marks, Scope, Stale};
use leasehold::job::{Namespace, QueueName};
use leasehold::lease::FencingToken;

/// A resource under test: an empty list of numbers for each scope.
#[async_trait]
pub trait Subject: Send + Sync {
    /// Somebody with a token, who has opened nothing yet.
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder>;

    /// What has landed, in order, past the fence.
    async fn landed(&self, scope: &Scope) -> Vec<u64>;

    /// Prunes marks below `below`.
    async fn prune(&self, below: FencingToken) -> Result<(), FenceError>;
}

/// Somebody with a token.
///
/// Where the fence is part of the caller's transaction, each of these is a transaction of its own
/// that opens first.
#[async_trait]
pub trait Holder: Send {
    /// Opens the resource.
    async fn open(&mut self) -> Result<(), FenceError>;

    /// Reads the list. Called only after a successful `open`, like the others.
    async fn read(&mut self) -> Result<Vec<u64>, FenceError>;

    /// Appends a number.
    async fn write(&mut self, value: u64) -> Result<(), FenceError>;

    /// Appends a number, once per token and operation; false if it was there before.
    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError>;
}

/// How much was tried.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Figures {
    /// Random interleavings.
    pub interleavings: usize,
    /// Operations that were accepted.
    pub accepted: usize,
    /// Operations that were refused as stale.
    pub refused: usize,
    /// Named operations that had been applied before.
    pub repeated: usize,
}

/// What a resource did wrong, and how to see it again.
pub struct Breach {
    seed: u64,
    interleaving: Option<usize>,
    what: String,
    trace: Vec<String>,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (seed {}", self.what, self.seed)?;
        if let Some(at) = self.interleaving {
            write!(f, ", interleaving {at}")?;
        }
        f.write_str(")")?;
        self.trace
            .iter()
            .try_for_each(|step| write!(f, "\n  {step}"))
    }
}

impl fmt::Debug for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Runs the cases and this many random interleavings. Returns what was tried, or the first breach.
///
/// # Errors
/// If the resource does not keep the contract, or answers with trouble: it should have none here.
pub async fn check(
    subject: &dyn Subject,
    seed: u64,
    interleavings: usize,
) -> Result<Figures, Breach> {
    let mut run = Run {
        subject,
        seed,
        base: 0,
        figures: Figures::default(),
        trace: Vec::new(),
    };
    run.cases().await.map_err(|what| run.breach(None, what))?;
    for at in 0..interleavings {
        let mut rng = Rng::with_seed(seed.wrapping_add(at as u64));
        let ran = if at % 2 == 0 {
            run.step_by_step(&mut rng).await
        } else {
            run.all_at_once(&mut rng).await
        };
        ran.map_err(|what| run.breach(Some(at), what))?;
        run.figures.interleavings += 1;
    }
    let Figures {
        accepted,
        refused,
        repeated,
        ..
    } = run.figures;
    if interleavings >= 100 && accepted.min(refused).min(repeated) == 0 {
        let what = format!("nothing was shown by {:?}", run.figures);
        return Err(run.breach(None, what));
    }
    Ok(run.figures)
}

/// Tokens of one program lie this close together; the next program's are all larger.
const SPAN: u64 = 64;
const OPERATIONS: [&str; 3] = ["a", "b", ""];

struct Run<'s> {
    subject: &'s dyn Subject,
    seed: u64,
    /// Everything that was pruned or opened before is below this.
    base: u64,
    figures: Figures,
    trace: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Open,
    Read,
    Write(u64),
    Once(&'static str, u64),
}

/// What a step was answered with.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Said {
    Done,
    Before,
    List(Vec<u64>),
    Stale(FencingToken),
}

async fn take(holder: &mut dyn Holder, step: Step) -> Result<Said, String> {
    let said = match step {
        Step::Open => holder.open().await.map(|()| Said::Done),
        Step::Read => holder.read().await.map(Said::List),
        Step::Write(value) => holder.write(value).await.map(|()| Said::Done),
        Step::Once(operation, value) => {
            let fresh = holder.write_once(operation, value).await;
            fresh.map(|fresh| if fresh { Said::Done } else { Said::Before })
        }
    };
    match said {
        Ok(said) => Ok(said),
        Err(FenceError::Stale(stale)) => Ok(Said::Stale(stale.mark())),
        Err(FenceError::Trouble(error)) => Err(format!("trouble at {step:?}: {error}")),
    }
}

/// What a right resource would say.
fn expected(
    marks: &mut Marks,
    list: &mut Vec<u64>,
    scope: &Scope,
    token: FencingToken,
    step: Step,
) -> Said {
    let stale = |stale: Stale| Said::Stale(stale.mark());
    match step {
        Step::Open => marks.open(scope, token).map_or_else(stale, |()| Said::Done),
        Step::Read => marks
            .read(scope, token)
            .map_or_else(stale, |()| Said::List(list.clone())),
        Step::Write(value) => marks.write(scope, token).map_or_else(stale, |()| {
            list.push(value);
            Said::Done
        }),
        Step::Once(operation, value) => match marks.write_once(scope, token, operation) {
            Ok(true) => {
                list.push(value);
                Said::Done
            }
            Ok(false) => Said::Before,
            Err(FenceError::Stale(refused)) => stale(refused),
            Err(FenceError::Trouble(error)) => unreachable!("a short name: {error}"),
        },
    }
}

impl Run<'_> {
    fn breach(&mut self, interleaving: Option<usize>, what: String) -> Breach {
        Breach {
            seed: self.seed,
            interleaving,
            what,
            trace: std::mem::take(&mut self.trace),
        }
    }

    fn begin(&mut self) {
        self.trace.clear();
        self.base += SPAN;
    }

    fn scope(&self, name: &str) -> Scope {
        let text = format!("{:x} {} {name}", self.seed, self.base);
        let (namespace, queue) = (Namespace::default(), QueueName::default());
        Scope::named(&namespace, &queue, &text).expect("a short name")
    }

    fn token(&self, n: u64) -> FencingToken {
        FencingToken::new(self.base + n)
    }

    fn count(&mut self, said: &Said) {
        match said {
            Said::Done | Said::List(_) => self.figures.accepted += 1,
            Said::Before => self.figures.repeated += 1,
            Said::Stale(_) => self.figures.refused += 1,
        }
    }

    /// The written cases, each against the model.
    async fn cases(&mut self) -> Result<(), String> {
        use Step::{Once, Open, Read, Write};
        type Case = (&'static str, &'static [(u64, Step)]);
        const CASES: [Case; 7] = [
            (
                "opened for a larger token before the smaller has written",
                &[(1, Open), (2, Open), (1, Write(1)), (1, Read), (1, Open)],
            ),
            (
                "opened again by the same token",
                &[
                    (1, Open),
                    (1, Write(1)),
                    (1, Open),
                    (1, Write(2)),
                    (1, Read),
                ],
            ),
            (
                "a named operation, twice by one token",
                &[(1, Open), (1, Once("a", 1)), (1, Once("a", 2)), (1, Read)],
            ),
            (
                "a named operation, again after opening again",
                &[(1, Open), (1, Once("a", 1)), (1, Open), (1, Once("a", 2))],
            ),
            (
                "a named operation, again by the next token",
                &[(1, Open), (1, Once("a", 1)), (2, Open), (2, Once("a", 2))],
            ),
            (
                "two named operations",
                &[(1, Open), (1, Once("a", 1)), (1, Once("", 2)), (1, Read)],
            ),
            (
                "the smaller token comes after all is done",
                &[(9, Open), (9, Write(1)), (3, Open), (9, Read)],
            ),
        ];
        for (name, steps) in CASES {
            self.begin();
            self.trace.push(format!("case: {name}"));
            let scope = self.scope("");
            let mut program = Program::new(self.subject, &[scope]);
            for (token, step) in steps {
                let said = program.step(0, self.token(*token), *step).await;
                self.trace.push(format!("{token}: {step:?}"));
                self.count(&said?);
            }
            program.compare_landed().await?;
        }
        self.pruning().await
    }

    /// A pruned token stays out, of scopes that had a mark and of those that never had.
    async fn pruning(&mut self) -> Result<(), String> {
        self.begin();
        self.trace.push("case: pruned".to_owned());
        let scopes = [self.scope("seen"), self.scope("kept"), self.scope("unseen")];
        let mut program = Program::new(self.subject, &scopes);
        for (at, token) in [(0, 3), (1, 9)] {
            for step in [Step::Open, Step::Once("a", 1)] {
                program.step(at, self.token(token), step).await?;
            }
        }
        program.prune(self.token(6)).await?;
        for (at, token) in [(0, 3), (2, 5), (2, 6), (0, 6), (1, 8), (1, 9)] {
            program.step(at, self.token(token), Step::Open).await?;
        }
        program.step(1, self.token(9), Step::Once("a", 2)).await?;
        // Pruning less than before takes nothing back.
        program.prune(self.token(2)).await?;
        program.step(2, self.token(5), Step::Open).await?;
        program.compare_landed().await
    }

    async fn step_by_step(&mut self, rng: &mut Rng) -> Result<(), String> {
        self.begin();
        let scopes = [self.scope("one"), self.scope("two")];
        let mut program = Program::new(self.subject, &scopes[..rng.usize(1..=2)]);
        // Few tokens, so that holders share one now and then.
        let tokens: Vec<u64> = (0..rng.usize(2..=4)).map(|_| rng.u64(1..=6)).collect();
        for value in 1..=rng.u64(3..=8) {
            if rng.usize(..12) == 0 {
                let below = rng.u64(1..=6);
                self.trace.push(format!("prune below {below}"));
                program.prune(self.token(below)).await?;
                continue;
            }
            let at = rng.usize(..program.scopes.len());
            let token = tokens[rng.usize(..tokens.len())];
            let step = any_step(rng, program.is_open(at, self.token(token)), value);
            self.trace.push(format!("{token} in {at}: {step:?}"));
            let said = program.step(at, self.token(token), step).await?;
            self.count(&said);
        }
        program.compare_landed().await
    }

    async fn all_at_once(&mut self, rng: &mut Rng) -> Result<(), String> {
        self.begin();
        let scope = self.scope("all");
        let clock = Arc::new(AtomicU64::new(0));
        let mut holders = JoinSet::new();
        for number in 0..rng.u64(2..=4) {
            let token = self.token(rng.u64(1..=6));
            let mut holder = self.subject.holder(&scope, token).await;
            let steps: Vec<Step> = (0..rng.u64(2..=4))
                .map(|n| any_step(rng, n > 0, 100 * number + n))
                .collect();
            self.trace.push(format!("{token}: {steps:?}"));
            let (clock, naps) = (Arc::clone(&clock), rng.usize(..3));
            holders.spawn(async move {
                let mut seen = Vec::new();
                for _ in 0..naps {
                    tokio::task::yield_now().await;
                }
                for step in steps {
                    let from = clock.fetch_add(1, Ordering::SeqCst);
                    let said = take(&mut *holder, step).await?;
                    let to = clock.fetch_add(1, Ordering::SeqCst);
                    let refused = matches!(said, Said::Stale(_));
                    seen.push(Seen {
                        token,
                        step,
                        said,
                        from,
                        to,
                    });
                    if refused {
                        break;
                    }
                }
                Ok::<_, String>(seen)
            });
        }
        let mut seen: Vec<Seen> = Vec::new();
        while let Some(holder) = holders.join_next().await {
            let holder = holder.map_err(|e| format!("a holder panicked: {e}"))?;
            seen.extend(holder?);
        }
        seen.sort_by_key(|seen| seen.from);
        self.trace = seen.iter().map(|seen| format!("{seen:?}")).collect();
        for seen in &seen {
            self.count(&seen.said);
        }
        let landed = self.subject.landed(&scope).await;
        self.trace.push(format!("landed: {landed:?}"));
        judge(&seen, &landed)
    }
}

fn any_step(rng: &mut Rng, open: bool, value: u64) -> Step {
    match rng.usize(..8) {
        _ if !open => Step::Open,
        0 => Step::Open,
        1 | 2 => Step::Read,
        3 | 4 => Step::Write(value),
        _ => Step::Once(OPERATIONS[rng.usize(..OPERATIONS.len())], value),
    }
}

/// One sequential program, beside its model.
struct Program<'s> {
    subject: &'s dyn Subject,
    scopes: Vec<(Scope, Vec<u64>)>,
    marks: Marks,
    open: Vec<(usize, FencingToken, Box<dyn Holder>)>,
}

impl<'s> Program<'s> {
    fn new(subject: &'s dyn Subject, scopes: &[Scope]) -> Self {
        Self {
            subject,
            scopes: scopes.iter().map(|s| (s.clone(), Vec::new())).collect(),
            marks: Marks::default(),
            open: Vec::new(),
        }
    }

    fn is_open(&self, at: usize, token: FencingToken) -> bool {
        let mut open = self.open.iter();
        open.any(|(scope, opened, _)| (*scope, *opened) == (at, token))
    }

    async fn step(&mut self, at: usize, token: FencingToken, step: Step) -> Result<Said, String> {
        let (scope, list) = &mut self.scopes[at];
        let right = expected(&mut self.marks, list, scope, token, step);
        let known = self
            .open
            .iter_mut()
            .find(|(scope, opened, _)| (*scope, *opened) == (at, token));
        let said = if let Some((.., holder)) = known {
            take(&mut **holder, step).await?
        } else {
            let mut holder = self.subject.holder(scope, token).await;
            let said = take(&mut *holder, step).await?;
            if said == Said::Done {
                self.open.push((at, token, holder));
            }
            said
        };
        if said == right {
            return Ok(said);
        }
        Err(format!("{step:?} with {token}: {said:?}, not {right:?}"))
    }

    async fn prune(&mut self, below: FencingToken) -> Result<(), String> {
        self.marks.prune(below);
        let pruned = self.subject.prune(below).await;
        pruned.map_err(|e| format!("prune: {e}"))
    }

    async fn compare_landed(&self) -> Result<(), String> {
        for (scope, list) in &self.scopes {
            let landed = self.subject.landed(scope).await;
            if landed != *list {
                return Err(format!("{landed:?} landed in {scope}, not {list:?}"));
            }
        }
        Ok(())
    }
}

/// One operation among others at the same time.
#[derive(Debug)]
struct Seen {
    token: FencingToken,
    step: Step,
    said: Said,
    from: u64,
    to: u64,
}

impl Seen {
    fn value(&self) -> Option<u64> {
        match self.step {
            Step::Write(value) | Step::Once(_, value) => Some(value),
            Step::Open | Step::Read => None,
        }
    }
}

/// Judges operations whose order nobody knows exactly.
fn judge(seen: &[Seen], landed: &[u64]) -> Result<(), String> {
    let accepted = |seen: &&Seen| !matches!(seen.said, Said::Stale(_));
    let author = |value: u64| seen.iter().find(|seen| seen.value() == Some(value));
    for one in seen.iter().filter(accepted) {
        let higher = |other: &&Seen| other.token > one.token && other.to < one.from;
        if let Some(higher) = seen.iter().filter(accepted).find(higher) {
            return Err(format!("{one:?} was accepted after {higher:?}"));
        }
    }
    for one in seen.iter().filter(|seen| seen.value().is_some()) {
        let times = landed.iter().filter(|v| Some(**v) == one.value()).count();
        let right = usize::from(one.said == Said::Done);
        if times != right {
            return Err(format!("{one:?} landed {times} times"));
        }
    }
    let mut highest = FencingToken::new(0);
    let mut once = Vec::new();
    for value in landed {
        let Some(write) = author(*value) else {
            return Err(format!("{value} landed, and nobody wrote it"));
        };
        if write.token < highest {
            return Err(format!("{write:?} landed behind the token {highest}"));
        }
        highest = write.token;
        if let Step::Once(operation, _) = write.step {
            if once.contains(&(write.token, operation)) {
                return Err(format!("{write:?} was applied a second time"));
            }
            once.push((write.token, operation));
        }
    }
    for reader in seen {
        let Said::List(list) = &reader.said else {
            continue;
        };
        if !landed.starts_with(list) {
            return Err(format!("{reader:?} is not how it was"));
        }
        let late = landed[list.len()..]
            .iter()
            .filter_map(|value| author(*value))
            .find(|write| write.token < reader.token);
        if let Some(late) = late {
            return Err(format!("{late:?} changed what {reader:?} had read"));
        }
    }
    Ok(())
}
