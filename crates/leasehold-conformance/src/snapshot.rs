//! All views of a store, at one moment.

use leasehold::inspect::{
    self, AuditView, JobView, LeaseFilter, LeaseView, Page, Paged, QueueView,
};
use leasehold::job::JobState;
use leasehold::limits;
use leasehold::store::Store;

/// All views of a store. Two are equal if nothing that can be seen has changed.
#[derive(Clone, PartialEq, Debug)]
pub struct Snapshot {
    /// The queues, by name.
    pub queues: Vec<QueueView>,
    /// The jobs, by queue, state and place.
    pub jobs: Vec<JobView>,
    /// The live leases, by deadline.
    pub leases: Vec<LeaseView>,
    /// The commands on record, newest first.
    pub audit: Vec<AuditView>,
}

impl Snapshot {
    /// Looks at everything.
    pub async fn of(store: &dyn Store) -> Self {
        let queues = inspect::queues(store).await.expect("the queues");
        let mut jobs = Vec::new();
        for queue in &queues {
            for state in JobState::ALL {
                let page = |page| inspect::jobs(store, queue.queue.clone(), state, page);
                jobs.extend(all(page).await);
            }
        }
        Self {
            queues,
            jobs,
            leases: all(|page| inspect::leases(store, LeaseFilter::default(), page)).await,
            audit: all(|page| inspect::audit(store, page)).await,
        }
    }

    /// The same, with the count of refused calls at zero: the one thing that a refused call may
    /// change.
    #[must_use]
    pub fn without_fenced(mut self) -> Self {
        for queue in &mut self.queues {
            queue.ledger.fenced = 0;
        }
        self
    }

    /// Asserts I9, and that every count is the count of the rows.
    pub fn assert_in_order(&self) {
        for view in &self.queues {
            let name = &view.queue;
            assert!(view.ledger.balances(), "I9 in {name}: {:?}", view.ledger);
            let leases = self.leases.iter().filter(|lease| lease.queue == *name);
            assert_eq!(leases.count() as u64, view.ledger.live, "leases of {name}");
            let rows = || self.jobs.iter().filter(|job| job.queue == *name);
            for state in JobState::ALL {
                let found = rows().filter(|job| job.state == state).count() as u64;
                assert_eq!(found, view.counts.of(state), "{state} jobs of {name}");
            }
            let parked = rows().filter(|job| job.parked).count() as u64;
            assert_eq!(parked, view.counts.parked, "parked jobs of {name}");
        }
        for job in &self.jobs {
            let leased = job.state == JobState::Leased;
            assert_eq!(job.lease.is_some(), leased, "lease of {}", job.job.id);
            let settled = job.state.is_settled();
            assert_eq!(job.settled_at.is_some(), settled, "end of {}", job.job.id);
        }
    }
}

/// All rows of a paged view.
pub(super) async fn all<T, F>(mut page: impl FnMut(Page) -> F) -> Vec<T>
where
    F: Future<Output = leasehold::Result<Paged<T>>>,
{
    let mut rows = Vec::new();
    let mut next = Page::first(limits::PAGE_ROWS);
    loop {
        let paged = page(next).await.expect("a page");
        rows.extend(paged.rows);
        match paged.next {
            None => return rows,
            after => {
                next = Page {
                    after,
                    rows: limits::PAGE_ROWS,
                }
            }
        }
    }
}
