//! Fencing tokens: numbers that only grow.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A number larger than any its issuer gave before. Show it to whatever the handler writes to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FencingToken(u64);

impl FencingToken {
    /// A token from its number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The token's number. Fits a SQL `BIGINT` and a double.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The token `n` places after this one in a grant.
    #[must_use]
    pub(crate) const fn plus(self, n: u64) -> Self {
        Self(self.0 + n)
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl FromStr for FencingToken {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let number = text.parse().map_err(|_| {
            Error::invalid(
                "token",
                format!("{} bytes of text", text.len()),
                "a whole number",
            )
        })?;
        Ok(Self(number))
    }
}
