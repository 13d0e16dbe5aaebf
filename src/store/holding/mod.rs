//! Holdings: a lease on a name, a path or a range, asked for by what it is on.
//!
//! Everything that is true of a job's lease is true of a holding: the store's clock, a token that
//! grows, an unguessable receipt, owner and task, renewal, expiry by the passage of time alone,
//! revocation on record, a ledger. It has no payload, no attempts and no retry. What conflicts with
//! what is decided in [`rules::holding`](crate::rules::holding).

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{ReapRequest, SessionId};
use crate::error::Result;
use crate::job::Namespace;

mod call;
mod view;

pub use call::{
    AcquireRequest, Acquired, Acquisition, Ask, BlockedBy, Busy, Check, Checked, CommitRequest,
    Committed, FamilySettings, GrantedHolding, HoldingBeat, HoldingCommand, HoldingControlRequest,
    HoldingExpiry, HoldingRenewal, HoldingSelect, HoldingState, Missing, Reaped, Refusal, Release,
    ReleaseBy, ReleaseRequest, Released, Save, SaveRequest, SavedState, TicketName,
};
pub use view::{
    ContendedView, EndedHolding, FamilyView, HoldingEnd, HoldingFilter, HoldingLedger,
    HoldingQuery, HoldingView, HoldingViews, ScopeView, TicketView,
};

/// A place that grants holdings.
///
/// # Contract
///
/// **Time** is the store's. A holding is live until its deadline on the store's clock, exactly;
/// from then on it is *overdue*, and no method treats it as live, whether or not its expiry has
/// been recorded. The same goes for tickets.
///
/// **Steps.** The asks of one call on one family partition are served in one atomic step, in their
/// order, each seeing what those before it did. A step records at most 1,000 expiries.
///
/// **Issuer.** Tokens grow within a partition of a family, whatever is asked for. Which partition a
/// scope belongs to is decided by [`Scope::partition`](crate::rules::holding::Scope::partition).
///
/// **Errors.** An `Err` from a mutating method means *unknown* unless its kind
/// [is certain](crate::ErrorKind::is_certain): repeat the same request until it answers. `renew`
/// carries no request id; it is evaluated anew each time. What a family's settings rule out is an
/// answer to that one ask, not an error of the call: callers share calls.
///
/// **Repeats.** As in [`Store`](super::Store): a request whose id is the last of its lane is
/// answered with the first answer and applied once. An older one, or one of a session that is not
/// open, is refused with [`SessionLost`](crate::ErrorKind::SessionLost) and not applied.
///
/// **Cancellation.** Dropping the future of a call is the same as an error: the call may have been
/// applied.
#[async_trait]
pub trait HoldingStore: Send + Sync + 'static {
    /// One word for errors, labels and people, as [`Store::name`](super::Store::name).
    fn name(&self) -> &'static str;

    /// The application's share of the store, as [`Store::namespace`](super::Store::namespace).
    fn namespace(&self) -> Namespace {
        Namespace::default()
    }

    /// A handle to the same store for another runtime, as
    /// [`Store::dedicated`](super::Store::dedicated): holdings are renewed on a thread of their
    /// own.
    ///
    /// # Errors
    /// Any that opening the store can give.
    async fn dedicated(&self) -> Result<Arc<dyn HoldingStore>>;

    /// Opens a session, under which calls can be repeated: one of the store's, good for both
    /// traits.
    ///
    /// # Errors
    /// On an error no session is open; call again.
    async fn open_session(&self) -> Result<SessionId>;

    /// Asks for holdings. One answer per ask, in order.
    ///
    /// # Atomicity
    /// Of one ask: expires what is overdue and conflicts with it; grants all its scopes under one
    /// token if nothing live, nothing resting and no earlier live ticket conflicts; else grants
    /// nothing. After its asks the step expires the oldest overdue by (deadline, token), up to
    /// 1,000 with those before. If more than that conflict with an ask, it is
    /// [busy](Acquired::Busy) with nothing left to wait for: `again_in` is zero.
    ///
    /// # Tickets
    /// A busy ask that waits leaves a ticket, or refreshes the one it has for another
    /// [`TICKET_TERM`](crate::limits::TICKET_TERM); its place stays. A ticket is never granted by
    /// anybody else's call, and no later ask that conflicts with it is granted before it. An ask
    /// that does not wait leaves none, and takes back the one it has.
    ///
    /// # The nonce names the ask
    /// There is at most one ticket or holding per nonce. Asking again with it answers that holding,
    /// with its deadline as it is, or refreshes that ticket.
    ///
    /// # Repeats
    /// A repeat gets the first answer, with the time originally granted; where the holding has
    /// ended since or is overdue, [`Acquired::Ended`].
    ///
    /// # Errors
    /// `InvalidInput`: nothing was granted. `TokensAhead` if no token fits: certain, and transient.
    /// Others: unknown.
    async fn acquire(&self, request: AcquireRequest) -> Result<Acquisition>;

    /// Extends holdings, each by its term from now, never beyond its maximum lifetime or the grace
    /// of a recall. One answer per beat, in order.
    ///
    /// # Fencing
    /// Past its deadline a holding is gone: renewal never resurrects it. A beat that lapses makes a
    /// live holding expire now, with the cause `stalled`, and is answered with `Fenced`.
    ///
    /// # Errors
    /// Unknown. Evaluated anew on repeat, never replayed.
    async fn renew(&self, beats: Vec<HoldingBeat>) -> Result<Vec<HoldingRenewal>>;

    /// Ends holdings, or takes back tickets. One answer per release, in order.
    ///
    /// # Fencing
    /// A holding is released by its receipt, or by a scope and the nonce of its ask, also past its
    /// deadline as long as its expiry has not been recorded (`late`). Anything else is
    /// [`Released::Fenced`], and changes nothing. State that comes along is saved as by
    /// [`save`](Self::save), in the same step.
    ///
    /// # Wake-ups
    /// Every end, that of a ticket included, wakes the tickets that can be granted because of it,
    /// 64 at most. Every grant wakes what is left of them.
    ///
    /// # Errors
    /// `InvalidInput`: nothing was released. Others: unknown.
    async fn release(&self, request: ReleaseRequest) -> Result<Vec<Released>>;

    /// Saves state under holdings, for the next holder. One answer per save, in order.
    ///
    /// State belongs to the first scope of the ask, and is given to the next holder whose first
    /// scope is that one, with the token that wrote it.
    ///
    /// # Fencing
    /// Accepted only with the current receipt (overdue but not expired included), and never back in
    /// (token, seq).
    ///
    /// # Errors
    /// `InvalidInput`: nothing was saved. Others: unknown.
    async fn save(&self, request: SaveRequest) -> Result<Vec<SavedState>>;

    /// Ends holdings of units, and the units are used up. One answer per receipt, in order.
    ///
    /// # Fencing
    /// Past the deadline the answer is [`Committed::Fenced`], whether or not the expiry has been
    /// recorded, and nothing changes.
    ///
    /// # Errors
    /// `InvalidInput`: nothing was used up. Others: unknown.
    async fn commit(&self, request: CommitRequest) -> Result<Vec<Committed>>;

    /// Tells by the clock whether receipts are good for scopes. One answer per check, in order.
    ///
    /// This protects what the caller itself keeps, and only if it acts on the answer in the same
    /// step. A holder can be replaced between the check and an effect elsewhere: that takes a
    /// [fence](crate::fence).
    ///
    /// # Errors
    /// Any; nothing is changed.
    async fn check(&self, checks: Vec<Check>) -> Result<Vec<Checked>>;

    /// Records what time has done, for families that nobody asks: expires overdue holdings by
    /// (deadline, token), deletes overdue tickets, and forgets scopes past their retention, at most
    /// `max` of each.
    ///
    /// # Errors
    /// Unknown.
    async fn reap(&self, request: ReapRequest) -> Result<Reaped>;

    /// Sleeps until one of the tickets may be granted, at most for `limit`.
    ///
    /// Returns at once if one can be granted now or is gone. Does not wake for the passing of time:
    /// the caller has [`Busy::again_in`] for that, and must ask again well within the ticket's
    /// term. May wake for nothing; a lost wake-up costs at most one second.
    ///
    /// # Errors
    /// Any; the caller should fall back to sleeping.
    async fn wait(&self, tickets: &[TicketName], limit: Duration) -> Result<()>;

    /// Carries out an operator's command, and leaves an audit record: who, when, why. Answers how
    /// many holdings, tickets, families or units it changed.
    ///
    /// # Errors
    /// `InvalidInput`: nothing was changed. Others: unknown.
    async fn control(&self, request: HoldingControlRequest) -> Result<u64>;

    /// Answers a question. Never blocks the hot path; paged; scans nothing.
    ///
    /// # Errors
    /// Any; nothing is changed.
    async fn inspect(&self, query: HoldingQuery) -> Result<HoldingViews>;
}
