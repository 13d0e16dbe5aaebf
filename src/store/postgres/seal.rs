//! Where lines start: a claim must not step over all that was taken before it.
//!
//! A job that was taken stays in the index of its line until a vacuum, which may be a minute away, or as
//! far as the oldest transaction of the database is old. The server remembers where each line starts
//! (`schema.sql`), and now and then a claim has it moved up: behind the claim, in a transaction of its
//! own, which nobody waits for.
//!
//! **Invariant (I4).** No start is ahead of a job, nor of one that a transaction still open may bring.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use super::PostgresStore;
use super::tx::{Tx, args};
use crate::rules::order::tier_of;
use crate::store::{ClaimRequest, Claimed};

/// The starts are moved up once in so many jobs taken. What a claim steps over is about twice as many.
const EVERY: usize = 500;

impl PostgresStore {
    /// Follows a claim. What one misses, a later one does.
    pub(super) fn seal(&self, request: &ClaimRequest, claimed: &Claimed) {
        let taken: usize = claimed.grants.iter().map(|grant| grant.leases.len()).sum();
        let base = &self.shared.base;
        if fastrand::usize(..EVERY) >= taken || base.sealing.swap(true, Ordering::Relaxed) {
            return;
        }
        let names = request.queues.iter().map(|queue| queue.queue.to_string());
        let leases = claimed.grants.iter().flat_map(|grant| &grant.leases);
        let lines: BTreeSet<i16> = leases.map(|lease| tier_of(&lease.job) as i16).collect();
        let (names, lines): (Vec<String>, Vec<i16>) =
            (names.collect(), lines.into_iter().collect());
        let store = self.clone();
        tokio::spawn(async move {
            let base = &store.shared.base;
            let _sealing = Sealing(&base.sealing);
            if let Ok(open) = store.connection().await
                && let Ok(db) = open.client()
            {
                let args = args![base.namespace => TEXT, names => TEXT_ARRAY, lines => INT2_ARRAY];
                if Tx::new(db, base, false).run("seal", args).await.is_ok() {
                    open.done();
                }
            }
        });
    }
}

/// One at a time, also after one whose runtime has ended under it.
struct Sealing<'a>(&'a AtomicBool);

impl Drop for Sealing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
