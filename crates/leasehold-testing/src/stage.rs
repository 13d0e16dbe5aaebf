//! The stage: one queue in memory on a clock that is moved by hand, and handlers that are polled by
//! hand under its leases.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;

use super::run::Ended;
use leasehold::clock::ManualClock;
use leasehold::error::Verb;
use leasehold::hooks::{HandlerEnd, HeldByHand, Notes, polling};
use leasehold::observe::Event;
use leasehold::store::MemoryStore;
use leasehold::store::{ControlCommand, Enqueued, Select};
use leasehold::{Client, Error, ErrorKind, NewJob, Result, Store, Worker};

/// Something to be shared by the handlers of one stage.
type Locked<T> = Arc<Mutex<T>>;

pub(super) fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One queue, and everybody who works on it.
pub(super) struct Stage {
    store: Arc<dyn Store>,
    clock: ManualClock,
    owners: AtomicUsize,
    enqueued: Locked<Vec<NewJob>>,
    /// Rises with every poll.
    pulse: Arc<AtomicU64>,
}

impl Stage {
    pub(super) fn new(pulse: Arc<AtomicU64>) -> Self {
        let clock = ManualClock::default();
        Self {
            store: Arc::new(MemoryStore::with_clock(clock.clone())),
            clock,
            owners: AtomicUsize::new(1),
            enqueued: Locked::default(),
            pulse,
        }
    }

    pub(super) async fn enqueue(&self, mut job: NewJob) -> Result<()> {
        job.delay = Duration::ZERO;
        Client::new(Arc::clone(&self.store)).enqueue(job).await?;
        Ok(())
    }

    /// Claims the job that is there, for a worker of its own: in real life its successor lives in
    /// another process.
    pub(super) async fn claim(&self, handle: impl FnOnce(Worker) -> Worker) -> Result<Actor> {
        let (ended, enqueued) = (
            Locked::<Option<Ended>>::default(),
            Arc::clone(&self.enqueued),
        );
        let client = Client::new(Arc::clone(&self.store)).observer(move |event: &Event<'_>| {
            if let Event::Enqueued {
                jobs,
                enqueued: answers,
            } = event
            {
                let rows = jobs.iter().zip(*answers);
                let new = rows.filter(|(_, answer)| matches!(answer, Enqueued::New(_)));
                lock(&enqueued).extend(new.map(|((_, job), _)| job.clone()));
            }
        });
        let end = Arc::clone(&ended);
        let number = self.owners.fetch_add(1, Ordering::Relaxed);
        let worker = client.worker().slots(1).prefetch(0);
        let worker = worker.owner(format!("worker-{number}")).task("testing");
        let worker = worker.observer(move |event: &Event<'_>| {
            if let Event::Finished { outcome, .. } = event {
                *lock(&end) = Some(Ended::of(*outcome));
            }
        });
        let Some(held) = HeldByHand::claim(handle(worker)).await? else {
            let why = "there is no job to claim: its lease was settled by its own handler";
            return Err(Error::new(ErrorKind::Unexpected, why).during(Verb::Claim));
        };
        Ok(Actor {
            running: held.run(),
            ran: None,
            held,
            points: 0,
            notes: Arc::default(),
            woken: Arc::default(),
            pulse: Arc::clone(&self.pulse),
            ended,
        })
    }

    /// The lease of a handler that stands still runs out.
    pub(super) fn expire(&self, actor: &Actor) {
        self.clock
            .advance(actor.held.term() + Duration::from_secs(1));
    }

    /// The job of a handler that stands still is given up: it ends with its lease.
    pub(super) async fn cancel(&self, actor: &Actor) -> Result<()> {
        let client = Client::new(Arc::clone(&self.store));
        let job = actor.held.job();
        client
            .operator("testing")
            .because("its successor is another job")
            .command(ControlCommand::Cancel(Select::Job(job)))
            .await?;
        Ok(())
    }

    /// What the handlers have enqueued.
    pub(super) fn enqueued(&self) -> Vec<NewJob> {
        lock(&self.enqueued).clone()
    }
}

/// A handler under a lease, polled by hand.
pub(super) struct Actor {
    running: Pin<Box<dyn Future<Output = HandlerEnd> + Send>>,
    ran: Option<HandlerEnd>,
    held: HeldByHand,
    /// Await points that it has reached.
    points: usize,
    notes: Arc<Notes>,
    woken: Arc<Woken>,
    pulse: Arc<AtomicU64>,
    ended: Locked<Option<Ended>>,
}

/// Where an actor stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// At the await point it was to go to.
    There,
    /// It has returned.
    Returned,
}

impl Actor {
    /// Polls it until it has reached its await point number `point`, and no further.
    pub(super) async fn go_to(&mut self, point: usize) -> Step {
        poll_fn(|cx| {
            self.woken.tell(cx.waker());
            // A wake-up that is meant for somebody else is no await point of this one.
            if self.ran.is_none() && self.points < point && self.woken.take() {
                let waker = Waker::from(Arc::clone(&self.woken));
                let mut cx = std::task::Context::from_waker(&waker);
                self.pulse.fetch_add(1, Ordering::Relaxed);
                match polling(&self.notes, || self.running.as_mut().poll(&mut cx)) {
                    Poll::Ready(ran) => self.ran = Some(ran),
                    Poll::Pending => self.points += 1,
                }
            }
            if self.ran.is_some() {
                Poll::Ready(Step::Returned)
            } else if self.points >= point {
                Poll::Ready(Step::There)
            } else {
                Poll::Pending
            }
        })
        .await
    }

    pub(super) fn points(&self) -> usize {
        self.points
    }

    pub(super) fn has_returned(&self) -> bool {
        self.ran.is_some()
    }

    /// Fences that it has opened.
    pub(super) fn opened(&self) -> usize {
        self.notes.opened()
    }

    /// Wakes up and believes that it still has time: a pause can fall after any look at the clock.
    pub(super) fn thaw(&self) {
        self.held.believe_renewed();
    }

    /// Settles the lease of a handler that has returned, and tells how.
    pub(super) async fn settle(&mut self) -> Option<Ended> {
        self.held.settle(self.ran.take()?).await;
        lock(&self.ended).take()
    }

    /// What it has saved, as the store has it.
    pub(super) async fn checkpoint(&self) -> Result<Option<Bytes>> {
        let job = leasehold::inspect::job(&**self.held.store(), self.held.job()).await?;
        let saved = job.as_ref().and_then(|view| view.job.checkpoint.as_ref());
        Ok(saved.map(|saved| saved.bytes.clone()))
    }

    /// What it leaves behind.
    pub(super) fn result(&self) -> Option<Bytes> {
        self.held.result()
    }
}

/// Whether an actor was woken, and whom to tell.
struct Woken {
    set: AtomicBool,
    driver: Mutex<Option<Waker>>,
}

impl Default for Woken {
    fn default() -> Self {
        Self {
            // The first poll needs no wake-up.
            set: AtomicBool::new(true),
            driver: Mutex::default(),
        }
    }
}

impl Woken {
    fn tell(&self, driver: &Waker) {
        *lock(&self.driver) = Some(driver.clone());
    }

    fn take(&self) -> bool {
        self.set.swap(false, Ordering::SeqCst)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.set.store(true, Ordering::SeqCst);
        let driver = lock(&self.driver).clone();
        if let Some(driver) = driver {
            driver.wake();
        }
    }
}
