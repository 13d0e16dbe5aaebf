//! What a check-up found: the form in which each store answers `leasehold doctor`.

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    Fine,
    /// Nothing is at risk, but it may be worth knowing.
    Note,
    /// It could not be looked at.
    Unseen,
    Risk,
}

impl Level {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Note => "note",
            Self::Unseen => "unseen",
            Self::Risk => "risk",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Where: a server, a file. Empty if there is only one place.
    pub place: String,
    pub check: &'static str,
    pub level: Level,
    /// What is the case.
    pub found: String,
    /// What that means, and what to set.
    pub advice: String,
}

impl Finding {
    pub fn new(
        check: &'static str,
        level: Level,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            place: String::new(),
            check,
            level,
            found: found.into(),
            advice: advice.into(),
        }
    }

    pub fn fine(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Fine, found, "")
    }

    pub fn note(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new(check, Level::Note, found, advice)
    }

    pub fn risk(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new(check, Level::Risk, found, advice)
    }

    /// What the tokens given say of the clock, which is `behind` them.
    #[cfg(any(feature = "sqlite", feature = "redis", feature = "postgres"))]
    pub(crate) fn tokens(behind: Option<std::time::Duration>) -> Self {
        const CHECK: &str = "tokens";
        let Some(behind) = behind else {
            return Self::fine(CHECK, "not ahead of the clock");
        };
        let found = format!("{behind:.1?} ahead of the clock, which catches up in as long");
        let advice = "the clock was ahead and has been set back, or a fence has shown a mark of the \
                      future. Claims go on, unless the URL says clock=strict; until the clock has \
                      caught up, lose no data of the store and restore no backup";
        Self::risk(CHECK, found, advice)
    }

    /// Whether the ledger counts as many live leases as there are.
    #[cfg(any(feature = "sqlite", feature = "redis", feature = "postgres"))]
    pub(crate) fn ledger(counted: u64, leases: u64) -> Self {
        const CHECK: &str = "ledger";
        let found = format!("{counted} live leases by the ledger, {leases} there");
        if counted == leases {
            return Self::fine(CHECK, found);
        }
        let advice = "data of the store was lost or deleted by hand: those leases never end, and \
                      their jobs never run again. Find out who did it, and restore a backup";
        Self::risk(CHECK, found, advice)
    }

    pub fn unseen(check: &'static str, right: &str) -> Self {
        let advice = format!("ask with a user that has {right}");
        Self::new(check, Level::Unseen, "could not be looked at", advice)
    }
}
