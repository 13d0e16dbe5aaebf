//! What a check-up found: the form in which each store answers `leasehold doctor`.

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    Fine,
    /// Nothing is at risk, but somebody may want to know.
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

    pub fn unseen(check: &'static str, right: &str) -> Self {
        let advice = format!("ask with a user that has {right}");
        Self::new(check, Level::Unseen, "could not be looked at", advice)
    }
}
