//! What a zombie test found.

use std::fmt;

/// Where a handler was frozen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FrozenAt {
    /// At its n-th await point, counted from 1.
    Await(usize),
    /// When it had returned, and before its lease was settled.
    Return,
}

impl fmt::Display for FrozenAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Await(point) => write!(f, "at await point {point}"),
            Self::Return => write!(f, "after its return"),
        }
    }
}

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum FaultKind {
    /// An effect of the zombie was accepted after its successor had opened its fences, or had
    /// ended; or after it had begun, if it opens none.
    Accepted,
    /// An effect of the zombie was accepted before its successor opened the fence, and its
    /// successor went on as if it had not been: it had read before it opened.
    OpenedLate,
    /// The end is another than without a zombie: what the first run had done was done again, or got
    /// lost.
    Repeated,
    /// The successor did not complete the job.
    Failed,
    /// The successor waits for something that the frozen run has, such as a lock that is held
    /// across an await, or for something outside of this process.
    Blocked,
    /// A poll did not return: it waits for something that the other run has, and does not await it.
    Hung,
    /// The handler does not complete its job even if nobody disturbs it, so that nothing was tried.
    NotCompleted,
    /// Nothing is watched, and the handler enqueues nothing, so that nothing could be found.
    NothingWatched,
    /// There is no await point at which the handler could be frozen, so that nothing was tried.
    NoAwaitPoint,
}

impl FaultKind {
    fn words(self) -> &'static str {
        match self {
            Self::Accepted => "an effect of the zombie was accepted",
            Self::OpenedLate => "the successor opened its fence after it had read",
            Self::Repeated => "the end is another than without a zombie",
            Self::Failed => "the successor did not complete the job",
            Self::Blocked => "the successor waits for something that the frozen run has",
            Self::Hung => "a poll does not return: it blocks its thread",
            Self::NotCompleted => "undisturbed, the handler does not complete its job",
            Self::NothingWatched => "nothing is watched: nothing was tried",
            Self::NoAwaitPoint => "the handler has no await point: nothing was tried",
        }
    }
}

/// One fault, where it first showed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Fault {
    /// What is wrong.
    pub kind: FaultKind,
    /// Where the zombie was frozen, if it was.
    pub frozen: Option<FrozenAt>,
    /// The watched resource, if it is about one.
    pub resource: Option<String>,
    /// The facts, for people.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(frozen) = self.frozen {
            write!(f, "frozen {frozen}: ")?;
        }
        if let Some(resource) = &self.resource {
            write!(f, "{resource}: ")?;
        }
        f.write_str(self.kind.words())?;
        if !self.detail.is_empty() {
            write!(f, " ({})", self.detail)?;
        }
        Ok(())
    }
}

/// What a zombie test tried, and what it found.
#[derive(Clone, Debug)]
#[must_use = "a report says nothing until it is looked at"]
pub struct Report {
    pub(super) points: usize,
    pub(super) runs: usize,
    pub(super) faults: Vec<Fault>,
}

impl Report {
    /// How many await points the handler has when nobody disturbs it.
    pub fn await_points(&self) -> usize {
        self.points
    }

    /// How many times a zombie was made and watched.
    pub fn runs(&self) -> usize {
        self.runs
    }

    /// What is wrong, in the order of the await points.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Whether nothing is wrong.
    pub fn is_safe(&self) -> bool {
        self.faults.is_empty()
    }

    /// Prints how much was tried.
    ///
    /// # Panics
    /// If anything is wrong, with all that is.
    #[track_caller]
    #[expect(
        clippy::print_stdout,
        reason = "a test's own count, shown with its output"
    )]
    pub fn assert_safe(&self) {
        assert!(self.is_safe(), "{self}");
        println!("{self}");
    }

    pub(super) fn note(&mut self, fault: Fault) {
        let known = |other: &Fault| {
            (other.kind, other.frozen, &other.resource)
                == (fault.kind, fault.frozen, &fault.resource)
        };
        if !self.faults.iter().any(known) {
            self.faults.push(fault);
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            points,
            runs,
            faults,
        } = self;
        write!(
            f,
            "{points} await points, {runs} zombies, {} faults",
            faults.len()
        )?;
        for fault in faults {
            write!(f, "\n  {fault}")?;
        }
        Ok(())
    }
}
