//! Suspects: jobs whose leases have expired so often that they may be what kills their workers.
//!
//! A process works one suspect at a time, whatever the number of its pools: if the process dies, it
//! is clear which job did it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Lets one suspect into a process at a time.
#[derive(Debug, Default)]
pub(crate) struct SuspectGate {
    is_taken: AtomicBool,
}

impl SuspectGate {
    /// The permit to claim a suspect, unless another one is out.
    pub(crate) fn permit(self: &Arc<Self>) -> Option<SuspectPermit> {
        let was_taken = self.is_taken.swap(true, Ordering::AcqRel);
        (!was_taken).then(|| SuspectPermit(Some(Arc::clone(self))))
    }

    /// The suspect's lease has ended, or its claim brought none.
    pub(crate) fn release(&self) {
        self.is_taken.store(false, Ordering::Release);
    }

    pub(crate) fn is_free(&self) -> bool {
        !self.is_taken.load(Ordering::Acquire)
    }
}

/// The permit to claim a suspect. Released when it is dropped, also with an unanswered claim.
pub(crate) struct SuspectPermit(Option<Arc<SuspectGate>>);

impl SuspectPermit {
    /// The claim brought a suspect: the permit is released with its lease.
    pub(crate) fn hold_until_lease_ends(mut self) {
        self.0 = None;
    }
}

impl Drop for SuspectPermit {
    fn drop(&mut self) {
        if let Some(gate) = &self.0 {
            gate.release();
        }
    }
}
