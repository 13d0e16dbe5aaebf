//! How arguments and answers are packed: little-endian numbers, texts behind their length.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::{Timestamp, micros};
use crate::error::{Error, ErrorKind, Result};
use crate::job::{JobId, JobRecord};
use crate::store::codec::{self, Kinds};

/// Arguments being packed.
#[derive(Default)]
pub(super) struct Out(pub(super) Vec<u8>);

impl Out {
    pub(super) fn u8(&mut self, n: u8) -> &mut Self {
        self.0.push(n);
        self
    }

    pub(super) fn u16(&mut self, n: usize) -> &mut Self {
        self.raw(&(n as u16).to_le_bytes())
    }

    pub(super) fn u32(&mut self, n: usize) -> &mut Self {
        self.raw(&(n as u32).to_le_bytes())
    }

    pub(super) fn u64(&mut self, n: u64) -> &mut Self {
        self.raw(&n.to_le_bytes())
    }

    pub(super) fn micros(&mut self, duration: Duration) -> &mut Self {
        self.u64(micros(duration))
    }

    pub(super) fn text(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(bytes.len()).raw(bytes)
    }

    pub(super) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// A term as it goes to the store and comes back: seconds and nanoseconds.
pub(super) fn exact(duration: Duration) -> [u8; 12] {
    let mut raw = [0; 12];
    raw[..8].copy_from_slice(&duration.as_secs().to_le_bytes());
    raw[8..].copy_from_slice(&duration.subsec_nanos().to_le_bytes());
    raw
}

/// An answer being read.
#[derive(Clone)]
pub(super) struct In {
    bytes: Bytes,
    at: usize,
}

impl In {
    pub(super) fn new(bytes: Bytes) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// All that is left.
    pub(super) fn rest(&mut self) -> Bytes {
        let rest = self.bytes.slice(self.at..);
        self.at = self.bytes.len();
        rest
    }

    pub(super) fn raw(&mut self, length: usize) -> Result<Bytes> {
        let end = self.at.checked_add(length);
        let end = end.filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(garbled)?;
        let raw = self.bytes.slice(self.at..end);
        self.at = end;
        Ok(raw)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let slice = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk);
        let array = *slice.ok_or_else(garbled)?;
        self.at += N;
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(super) fn u16(&mut self) -> Result<usize> {
        Ok(u16::from_le_bytes(self.array()?).into())
    }

    pub(super) fn u32(&mut self) -> Result<usize> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A grant's id: sorts as bytes.
    pub(super) fn grant(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    pub(super) fn time(&mut self) -> Result<Timestamp> {
        Ok(Timestamp::from_micros(self.u64()?))
    }

    pub(super) fn micros(&mut self) -> Result<Duration> {
        Ok(Duration::from_micros(self.u64()?))
    }

    pub(super) fn maybe_micros(&mut self) -> Result<Option<Duration>> {
        let there = self.u8()? == 1;
        let duration = self.micros()?;
        Ok(there.then_some(duration))
    }

    pub(super) fn exact(&mut self) -> Result<Duration> {
        let (seconds, nanos) = (self.u64()?, u32::from_le_bytes(self.array()?));
        // Whole seconds of nanoseconds would be carried, and the longest duration cannot take them.
        if nanos >= 1_000_000_000 {
            return Err(garbled());
        }
        Ok(Duration::new(seconds, nanos))
    }

    pub(super) fn id(&mut self) -> Result<JobId> {
        Ok(JobId::from_bytes(self.array()?))
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes> {
        let length = self.u32()?;
        self.raw(length)
    }

    pub(super) fn text(&mut self) -> Result<Arc<str>> {
        let bytes = self.bytes()?;
        Ok(std::str::from_utf8(&bytes).map_err(|_| garbled())?.into())
    }

    /// Jobs whose records are laid end to end.
    pub(super) fn records(&mut self, kinds: &mut Kinds) -> Result<Vec<JobRecord>> {
        let mut records = self.bytes()?;
        let mut jobs = Vec::new();
        while !records.is_empty() {
            let record = records.split_to(codec::length(&records)?);
            jobs.push(codec::decode(&record, kinds)?);
        }
        Ok(jobs)
    }
}

pub(super) fn garbled() -> Error {
    Error::new(ErrorKind::Corrupt, "an answer of the server cannot be read")
}
