//! Receipts: the opaque, unguessable proof of one lease.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};
use crate::names::{FamilyName, JobId, QueueName};
use crate::token::FencingToken;

/// 128 bits of the client's OS randomness, drawn for one claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce([u8; 16]);

impl Nonce {
    /// Draws from the operating system.
    pub fn draw() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| {
            Error::new(
                ErrorKind::Unavailable,
                format!("the operating system gave no randomness: {e}"),
            )
        })?;
        Ok(Self(bytes))
    }

    /// A nonce from its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The nonce's bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// A nonce from 32 hexadecimal digits.
    fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 32 || !text.bytes().all(|c| c.is_ascii_hexdigit()) {
            return None;
        }
        let mut bytes = [0; 16];
        for (byte, at) in bytes.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// Equal, in a time that does not tell where they differ.
    pub fn matches(&self, other: &Self) -> bool {
        self.0
            .iter()
            .zip(other.0)
            .fold(0, |acc, (a, b)| acc | (a ^ b))
            == 0
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(…)")
    }
}

/// Opaque, unguessable proof of one lease.
///
/// It names its lease by queue, grant, token and job, and proves it by the claim's randomness,
/// which the store compares. `Debug` hides the proof; [`Display`](fmt::Display) writes it out, to
/// be handed to another process.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Receipt {
    #[doc(hidden)]
    pub queue: QueueName,
    #[doc(hidden)]
    pub partition: u16,
    #[doc(hidden)]
    pub grant: FencingToken,
    #[doc(hidden)]
    pub token: FencingToken,
    #[doc(hidden)]
    pub job: JobId,
    #[doc(hidden)]
    pub nonce: Nonce,
}

impl Receipt {
    /// The queue of the lease.
    pub fn queue(&self) -> &QueueName {
        &self.queue
    }

    /// The partition of the queue.
    pub fn partition(&self) -> u16 {
        self.partition
    }

    /// The first token of the lease's grant, which names the grant.
    pub fn grant(&self) -> FencingToken {
        self.grant
    }

    /// The token of the lease.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// The job of the lease.
    pub fn job(&self) -> JobId {
        self.job
    }

    /// The proof.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Receipt({} {} token {} …)",
            self.queue, self.job, self.token
        )
    }
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `/` is in no name, number or id, so the parts cannot run into each other.
        let Self {
            queue,
            partition,
            grant,
            token,
            job,
            nonce,
        } = self;
        write!(f, "{queue}/{partition}/{grant}/{token}/{job}/")?;
        nonce.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Receipt {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let malformed = || {
            let found = format!("{} bytes of text", text.len());
            Error::invalid("receipt", found, "queue/partition/grant/token/job/proof")
        };
        let parts: Vec<&str> = text.split('/').collect();
        let [queue, partition, grant, token, job, proof] = parts[..] else {
            return Err(malformed());
        };
        let receipt = Self {
            queue: QueueName::new(queue)?,
            partition: partition.parse().map_err(|_| malformed())?,
            grant: grant.parse()?,
            token: token.parse()?,
            job: job.parse()?,
            nonce: Nonce::from_hex(proof).ok_or_else(malformed)?,
        };
        // One receipt has one text: leading zeros, signs and capitals are not its own.
        if receipt.to_string() != text {
            return Err(malformed());
        }
        Ok(receipt)
    }
}

/// Opaque, unguessable proof of one holding.
///
/// It names the holding by family, partition and token, and proves it by the ask's randomness,
/// which the store compares. `Debug` hides the proof; [`Display`](fmt::Display) writes it out, to
/// be handed to another process.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct HoldingReceipt {
    #[doc(hidden)]
    pub family: FamilyName,
    #[doc(hidden)]
    pub partition: u16,
    #[doc(hidden)]
    pub token: FencingToken,
    #[doc(hidden)]
    pub nonce: Nonce,
}

impl HoldingReceipt {
    /// The family of the holding.
    pub fn family(&self) -> &FamilyName {
        &self.family
    }

    /// The partition of the family.
    pub fn partition(&self) -> u16 {
        self.partition
    }

    /// The token of the holding.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// The proof.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }
}

impl fmt::Debug for HoldingReceipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HoldingReceipt({} token {} …)", self.family, self.token)
    }
}

impl fmt::Display for HoldingReceipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            partition,
            token,
            nonce,
        } = self;
        write!(f, "{family}/{partition}/{token}/")?;
        nonce.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for HoldingReceipt {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let malformed = || {
            let found = format!("{} bytes of text", text.len());
            Error::invalid("receipt", found, "family/partition/token/proof")
        };
        let parts: Vec<&str> = text.split('/').collect();
        let [family, partition, token, proof] = parts[..] else {
            return Err(malformed());
        };
        let receipt = Self {
            family: FamilyName::new(family)?,
            partition: partition.parse().map_err(|_| malformed())?,
            token: token.parse()?,
            nonce: Nonce::from_hex(proof).ok_or_else(malformed)?,
        };
        // One receipt has one text: leading zeros, signs and capitals are not its own.
        if receipt.to_string() != text {
            return Err(malformed());
        }
        Ok(receipt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nonce_matches_itself_alone() {
        let nonce = Nonce([0x5a; 16]);
        assert!(nonce.matches(&Nonce([0x5a; 16])));
        for (byte, bit) in (0..16).flat_map(|byte| (0..8).map(move |bit| (byte, bit))) {
            let mut other = nonce.0;
            other[byte] ^= 1 << bit;
            assert!(!nonce.matches(&Nonce(other)), "bit {bit} of byte {byte}");
            // Two equal differences do not make up for each other.
            other[(byte + 1) % 16] ^= 1 << bit;
            assert!(
                !nonce.matches(&Nonce(other)),
                "bit {bit} of {byte} and next"
            );
        }
    }

    #[test]
    fn a_receipt_survives_its_text_and_hides_its_proof() {
        let (queue, job) = (QueueName::new("mail").unwrap(), JobId::generate());
        let receipt = Receipt {
            queue: queue.clone(),
            partition: 3,
            grant: FencingToken::new(17),
            token: FencingToken::new(19),
            job,
            nonce: Nonce([0xab; 16]),
        };
        assert_eq!((receipt.queue(), receipt.partition()), (&queue, 3));
        assert_eq!((receipt.grant().get(), receipt.token().get()), (17, 19));
        assert_eq!((receipt.job(), receipt.nonce()), (job, &Nonce([0xab; 16])));
        let text = receipt.to_string();
        assert_eq!(text.parse::<Receipt>().unwrap(), receipt);
        let (parts, proof) = text.rsplit_once('/').unwrap();
        for proof in [
            &proof[1..],
            &format!("{proof}ab"),
            &format!("+b{}", &proof[2..]),
        ] {
            let wrong = format!("{parts}/{proof}").parse::<Receipt>().unwrap_err();
            assert_eq!(wrong.field(), Some("receipt"), "{proof}");
        }
        assert!(!format!("{receipt:?}").contains("abab"));
        assert!("a/b/c".parse::<Receipt>().is_err());
        let holding = HoldingReceipt {
            family: FamilyName::new("merge").unwrap(),
            partition: 2,
            token: FencingToken::new(23),
            nonce: Nonce([0xab; 16]),
        };
        let of_holding = holding.to_string();
        assert_eq!(of_holding.parse::<HoldingReceipt>().unwrap(), holding);
        assert!(!format!("{holding:?}").contains("abab"));
        for wrong in ["", "merge/2/23/", "merge/2/+23/ab", &of_holding[1..]] {
            let read = wrong.parse::<HoldingReceipt>();
            assert_ne!(read.ok(), Some(holding.clone()), "{wrong}");
        }
        let capitals = text.to_uppercase().replace("MAIL", "mail");
        assert!(capitals.parse::<Receipt>().is_err());
    }
}
