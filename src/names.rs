//! Names: of queues, kinds, namespaces, keys and jobs, checked when they are made.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::clock::{Clock as _, SystemClock};
use crate::error::{Error, Result};
use crate::limits;

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $field:literal) => {
        $(#[$doc])*
        ///
        /// 1 to 128 characters out of `A–Z a–z 0–9 _ . -`.
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Text);

        impl $type {
            /// Checks the name.
            pub fn new(name: impl AsRef<str>) -> Result<Self> {
                let name = name.as_ref();
                check_name($field, name)?;
                Ok(Self(Text::Shared(name.into())))
            }

            /// A name that is part of the program, and costs no memory.
            #[allow(dead_code, reason = "not every kind of name is part of a program")]
            pub(crate) fn fixed(name: &'static str) -> Result<Self> {
                check_name($field, name)?;
                Ok(Self::checked(name))
            }

            /// The same, if [`is_name`] has been asked as the program was compiled.
            #[allow(dead_code, reason = "not every kind of name is part of a program")]
            pub(crate) const fn checked(name: &'static str) -> Self {
                Self(Text::Fixed(name))
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $type {
            type Err = Error;
            fn from_str(name: &str) -> Result<Self> {
                Self::new(name)
            }
        }

        impl TryFrom<String> for $type {
            type Error = Error;
            fn try_from(name: String) -> Result<Self> {
                Self::new(name)
            }
        }

        impl TryFrom<&str> for $type {
            type Error = Error;
            fn try_from(name: &str) -> Result<Self> {
                Self::new(name)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> Self {
                (*name.0).to_owned()
            }
        }
    };
}

/// The text of a name.
#[derive(Clone)]
enum Text {
    Fixed(&'static str),
    Shared(Arc<str>),
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Fixed(text) => text,
            Self::Shared(text) => text,
        }
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        // Names that are compared are mostly clones of one.
        std::ptr::eq(&raw const **self, &raw const **other) || **self == **other
    }
}

impl Eq for Text {}

impl PartialOrd for Text {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Text {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for Text {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

name!(
    /// The name of a queue: one line of jobs.
    QueueName, "queue"
);
name!(
    /// The name of a job's type.
    Kind, "kind"
);
name!(
    /// The name of an application's share of a store.
    Namespace, "namespace"
);
name!(
    /// The name of a family: a set of holdings with its own settings and ledger.
    FamilyName, "family"
);

impl Default for QueueName {
    fn default() -> Self {
        Self(Text::Fixed("default"))
    }
}

impl Default for Namespace {
    fn default() -> Self {
        Self(Text::Fixed("leasehold"))
    }
}

const fn is_allowed(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'.' | b'-')
}

/// Whether a text can be a name.
pub(crate) const fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if !is_allowed(bytes[at]) {
            return false;
        }
        at += 1;
    }
    !bytes.is_empty() && bytes.len() <= limits::NAME_BYTES
}

fn check_name(field: &'static str, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > limits::NAME_BYTES {
        let limit = format!("1 to {} bytes", limits::NAME_BYTES);
        return Err(Error::invalid(
            field,
            format!("{} bytes", name.len()),
            limit,
        ));
    }
    if let Some(at) = name.bytes().position(|c| !is_allowed(c)) {
        let found = format!("byte 0x{:02x} at {at}", name.as_bytes()[at]);
        return Err(Error::invalid(field, found, "A-Z a-z 0-9 _ . -"));
    }
    Ok(())
}

/// A unique or exclusive key: any UTF-8, 1 to 256 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(Arc<str>);

impl Key {
    /// Checks the key's length.
    pub fn new(key: impl AsRef<str>) -> Result<Self> {
        let key = key.as_ref();
        if !(1..=limits::KEY_BYTES).contains(&key.len()) {
            let limit = format!("1 to {} bytes", limits::KEY_BYTES);
            return Err(Error::invalid("key", format!("{} bytes", key.len()), limit));
        }
        Ok(Self(key.into()))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Key {
    type Error = Error;
    fn try_from(key: String) -> Result<Self> {
        Self::new(key)
    }
}

impl From<Key> for String {
    fn from(key: Key) -> Self {
        key.0.as_ref().to_owned()
    }
}

/// A job's id: a `UUIDv7` made by the client, so that a repeated enqueue is the same enqueue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(Uuid);

impl JobId {
    /// A new id, in time order with the others of this process.
    pub fn generate() -> Self {
        Self::at(Self::first_of(1))
    }

    /// So many new ids: the clock is read once.
    pub(crate) fn generate_some(count: usize) -> impl ExactSizeIterator<Item = Self> {
        let first = Self::first_of(count as u64);
        (0..count).map(move |n| Self::at(first + n as u64))
    }

    /// The first of so many times that no other id has.
    fn first_of(count: u64) -> u64 {
        /// The time of the last id, in 1/4096 ms: 48 bits of milliseconds and 12 of a fraction, as
        /// they stand at the front of a `UUIDv7`.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let micros = SystemClock.now().as_micros();
        let now = ((micros / 1_000) << 12) | ((micros % 1_000) * 4_096 / 1_000);
        let later = |last: u64| Some(now.max(last + 1) + count.saturating_sub(1));
        let last = LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
        now.max(last.unwrap_or_default() + 1)
    }

    fn at(time: u64) -> Self {
        // An id needs to be unique, not secret: a receipt has its own randomness.
        let random = fastrand::u64(..);
        let version = ((time >> 12) << 16) | 0x7000 | (time & 0xfff);
        let variant = (random >> 2) | 0x8000_0000_0000_0000;
        Self(Uuid::from_u64_pair(version, variant))
    }

    /// The id as 16 bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// An id from its 16 bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl FromStr for JobId {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Uuid::parse_str(text).map(Self).map_err(|_| {
            Error::invalid("job id", format!("{} bytes of text", text.len()), "a UUID")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_name_is_the_same_as_the_program_is_compiled() {
        let longest = "n".repeat(limits::NAME_BYTES);
        let too_long = "n".repeat(limits::NAME_BYTES + 1);
        let mut names: Vec<String> = (0..=255).map(|c: u8| char::from(c).to_string()).collect();
        names.extend(["", "a b", "a.b-c_9", &longest, &too_long].map(String::from));
        for name in &names {
            assert_eq!(is_name(name), Kind::new(name).is_ok(), "{name:?}");
        }
        assert!(is_name(&longest) && !is_name(&too_long) && !is_name(""));
    }

    #[test]
    fn ids_are_version_7_distinct_and_in_order() {
        let ids: Vec<JobId> = (0..10_000).map(|_| JobId::generate()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b));
        let uuid = ids[0].0;
        assert_eq!(uuid.get_version_num(), 7);
        assert_eq!(uuid.get_variant(), uuid::Variant::RFC4122);
        let (seconds, _) = uuid.get_timestamp().unwrap().to_unix();
        let now = SystemClock.now().as_micros() / 1_000_000;
        assert!(now.abs_diff(seconds) < 60);
    }
}
