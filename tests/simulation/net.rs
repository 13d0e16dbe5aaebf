//! The network and the time of a simulated world: one thread, nothing random but the seed.
//!
//! Hosts run in turn, each on a runtime of its own, for [`LATENCY`] of virtual time. No message
//! arrives sooner than that, so none is missed by a host that has already run.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold::clock::{Clock, Timestamp};
use leasehold::{Error, ErrorKind, Result, Store};

use crate::plan::Quality;

/// The least time that a message takes, and how far a host runs at a time.
pub(crate) const LATENCY: Duration = Duration::from_millis(50);
/// How long a caller waits for an answer.
pub(crate) const PATIENCE: Duration = Duration::from_millis(600);

type Arrival = Box<dyn FnOnce() + Send>;

/// What is between the hosts.
pub(crate) struct Net {
    now: AtomicU64,
    inner: Mutex<Inner>,
}

struct Inner {
    random: fastrand::Rng,
    quality: Quality,
    cuts: Vec<Cut>,
    under_way: BTreeMap<(Duration, u64), Arrival>,
    sent: u64,
}

/// A host that is cut off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) host: usize,
    pub(crate) requests: bool,
    pub(crate) replies: bool,
    pub(crate) until: Duration,
}

/// What becomes of one call.
pub(crate) struct Passage {
    /// When its copies arrive, from now. The first one is answered.
    arrivals: Vec<Duration>,
    /// How long the answer takes. None: it is lost.
    reply: Option<Duration>,
    /// When the caller hears that its connection is gone, if the call or its answer is lost.
    reset: Duration,
    /// How often the caller is put behind the others before it goes on.
    yields: u8,
}

impl Net {
    pub(crate) fn new(seed: u64, quality: Quality) -> Arc<Self> {
        let inner = Inner {
            random: fastrand::Rng::with_seed(seed),
            quality,
            cuts: Vec::new(),
            under_way: BTreeMap::new(),
            sent: 0,
        };
        Arc::new(Self {
            now: AtomicU64::new(0),
            inner: Mutex::new(inner),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now(&self) -> Duration {
        Duration::from_micros(self.now.load(Ordering::Relaxed))
    }

    fn set(&self, now: Duration) {
        self.now.store(now.as_micros() as u64, Ordering::Relaxed);
    }

    pub(crate) fn at(&self, when: Duration, arrival: Arrival) {
        let mut inner = self.lock();
        inner.sent += 1;
        let place = (when, inner.sent);
        inner.under_way.insert(place, arrival);
    }

    /// Lets everything arrive that is due before `until`, in order.
    pub(crate) fn deliver(&self, until: Duration) {
        loop {
            let mut inner = self.lock();
            let Some(first) = inner.under_way.first_entry() else {
                break;
            };
            if first.key().0 >= until {
                break;
            }
            let ((when, _), arrival) = first.remove_entry();
            drop(inner);
            self.set(when);
            arrival();
        }
        self.set(until);
    }

    pub(crate) fn cut(&self, cut: Cut) {
        self.lock().cuts.push(cut);
    }

    /// From now on nothing is lost and nobody is cut off. What is under way still arrives.
    pub(crate) fn heal(&self) {
        let mut inner = self.lock();
        inner.quality = Quality::CALM;
        inner.cuts.clear();
    }

    /// Forgets what is under way: the world ends.
    pub(crate) fn clear(&self) {
        let gone = std::mem::take(&mut self.lock().under_way);
        drop(gone);
    }

    /// How long a wait lasts: wake-ups for nothing are allowed.
    pub(crate) fn sleep_time(&self, limit: Duration) -> Duration {
        let share = self.lock().random.f64();
        LATENCY.max(limit.mul_f64(share))
    }

    /// Draws what becomes of a call that a host sends now.
    pub(crate) fn passage(&self, host: usize, now: Duration) -> Passage {
        let mut inner = self.lock();
        inner.cuts.retain(|cut| cut.until > now);
        let cut = |replies: bool| {
            let of_host = |cut: &&Cut| cut.host == host;
            let mut cuts = inner.cuts.iter().filter(of_host);
            cuts.any(|cut| if replies { cut.replies } else { cut.requests })
        };
        let (no_requests, no_replies) = (cut(false), cut(true));
        let quality = inner.quality;
        let random = &mut inner.random;
        let mut hits = |percent: u8| random.u8(0..100) < percent;
        let lost = hits(quality.lose_request) || no_requests;
        let unanswered = hits(quality.lose_reply) || no_replies;
        let (late, twice, slow) = (
            hits(quality.late),
            hits(quality.duplicate),
            hits(quality.slow),
        );
        let most = if slow { 900 } else { 80 };
        let mut arrivals = Vec::new();
        if !lost {
            let within = if late { 600..5_000 } else { 0..most };
            arrivals.push(LATENCY + Duration::from_millis(random.u64(within)));
            if twice {
                arrivals.push(LATENCY + Duration::from_millis(random.u64(0..5_000)));
            }
        }
        let back = LATENCY + Duration::from_millis(random.u64(0..most));
        Passage {
            arrivals,
            reply: (!unanswered).then_some(back),
            reset: Duration::from_millis(random.u64(1..600)),
            yields: random.u8(0..3),
        }
    }
}

/// A host's door to the network.
#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) net: Arc<Net>,
    pub(crate) host: usize,
    /// When the host was started, and its clock then.
    started: Duration,
    epoch: tokio::time::Instant,
}

impl Port {
    /// To be made on the host's runtime.
    pub(crate) fn new(net: &Arc<Net>, host: usize) -> Self {
        Self {
            net: Arc::clone(net),
            host,
            started: net.now(),
            epoch: tokio::time::Instant::now(),
        }
    }

    /// The time, as the host's monotonic clock shows it.
    pub(crate) fn now(&self) -> Duration {
        self.started + self.epoch.elapsed()
    }

    /// Has `work` done at the other end, once for each copy that arrives.
    pub(crate) async fn carry<T: Send + 'static>(
        &self,
        work: impl Fn() -> Result<T> + Send + Sync + 'static,
    ) -> Result<T> {
        let sent = self.now();
        let passage = self.net.passage(self.host, sent);
        let (reply, answered) = tokio::sync::oneshot::channel();
        let mut reply = passage.reply.map(|back| (reply, back));
        let work = Arc::new(work);
        for delay in passage.arrivals {
            let (net, work, reply) = (Arc::clone(&self.net), Arc::clone(&work), reply.take());
            let arrive = move || {
                let result = work();
                if let Some((reply, back)) = reply {
                    let answer = Box::new(move || drop(reply.send(result)));
                    net.at(net.now() + back, answer);
                }
            };
            self.net.at(sent + delay, Box::new(arrive));
        }
        drop(reply);
        let lost = |why| Err(Error::new(ErrorKind::Unavailable, why));
        let answer = match tokio::time::timeout(PATIENCE, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => {
                tokio::time::sleep(passage.reset).await;
                lost("connection reset")
            }
            Err(_) => lost("no answer"),
        };
        for _ in 0..passage.yields {
            tokio::task::yield_now().await;
        }
        answer
    }
}

/// The store's clock: follows the world's time, and jumps when told to.
#[derive(Clone)]
pub(crate) struct StoreClock {
    net: Arc<Net>,
    offset: Arc<AtomicI64>,
}

impl StoreClock {
    pub(crate) fn new(net: &Arc<Net>) -> Self {
        Self {
            net: Arc::clone(net),
            offset: Arc::default(),
        }
    }

    pub(crate) fn jump(&self, millis: i64) {
        self.offset.fetch_add(millis * 1_000, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for StoreClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StoreClock({})", self.now())
    }
}

impl Clock for StoreClock {
    fn now(&self) -> Timestamp {
        const START: u64 = 1_700_000_000_000_000;
        let passed = self.net.now().as_micros() as u64;
        let offset = self.offset.load(Ordering::Relaxed);
        Timestamp::from_micros((START + passed).saturating_add_signed(offset))
    }
}

/// The store at the other end of the network. It may be down.
#[derive(Default)]
pub(crate) struct Server(Mutex<Option<Arc<dyn Store>>>);

impl Server {
    pub(crate) fn set(&self, store: Option<Arc<dyn Store>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = store;
    }

    pub(crate) fn store(&self) -> Option<Arc<dyn Store>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn serve<T, F: Future<Output = Result<T>>>(
        &self,
        call: impl FnOnce(Arc<dyn Store>) -> F,
    ) -> Result<T> {
        match self.store() {
            Some(store) => at_once(call(store)),
            None => Err(Error::new(ErrorKind::Unavailable, "connection refused")),
        }
    }
}

/// The result of a future that waits for nothing.
pub(crate) fn at_once<T>(work: impl Future<Output = T>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("a store on virtual time waited for something"),
    }
}
