//! One run: hosts, a network, a store, and what happens to them.

use std::sync::Arc;
use std::time::Duration;

use leasehold::inspect;
use leasehold::worker::DrainReport;
use leasehold::{Result, Store};
use leasehold_conformance::RecordingStore;
use leasehold_conformance::checker::check;
use leasehold_conformance::history::{Event, Final, History};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::broken::{Broken, FromReply, Variant};
use crate::engine::{Disk, Engine};
use crate::link::Link;
use crate::net::{Cut, LATENCY, Net, Port, Server, StoreClock, at_once};
use crate::oversee::Overseer;
use crate::plan::{AFTERMATH, HEALED, Plan, Trouble};
use crate::program::{Hands, produce, work};
use crate::resource::Resource;
use crate::trace::{Seen, fingerprint};

/// What a run is to show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Goal {
    /// Troubles to the end: nothing forbidden happens.
    Safety,
    /// The troubles end: the backlog drains (I13).
    Liveness,
}

/// How long after the troubles the backlog may take, on a clock that was never set back: the
/// longest retry, expiry and outage add up to less than a tenth of it.
const DRAIN_LIMIT: Duration = Duration::from_secs(120);

/// What a run left.
pub(crate) struct Outcome {
    pub(crate) violations: Vec<String>,
    pub(crate) fingerprint: u64,
    pub(crate) events: Vec<Event>,
    pub(crate) seen: Seen,
}

struct Host {
    runtime: Runtime,
    started: Duration,
    epoch: Instant,
    drain: Option<oneshot::Sender<()>>,
    done: JoinHandle<Result<Option<DrainReport>>>,
    frozen_until: Option<Duration>,
}

impl Host {
    /// Runs the host's program until its clock shows `until`.
    fn run(&self, until: Duration) {
        let wake = self.epoch + (until - self.started);
        self.runtime
            .block_on(async { tokio::time::sleep_until(wake).await });
    }
}

struct World {
    net: Arc<Net>,
    clock: StoreClock,
    server: Arc<Server>,
    disk: Disk,
    history: History,
    overseer: Arc<Overseer>,
    resource: Arc<Resource>,
    variant: Variant,
    /// The producer, then the workers. None while one is down.
    hosts: Vec<Option<Host>>,
    /// When a host comes back.
    boots: Vec<(Duration, usize)>,
    /// When the store comes back.
    up_at: Option<Duration>,
    processes: u32,
    violations: Vec<String>,
}

/// Runs a plan.
pub(crate) fn run(plan: &Plan, goal: Goal, engine: Engine, variant: Variant) -> Outcome {
    // It may have to be made, and draw a name or a port for that.
    let disk = Disk::new(engine, plan.seed);
    // The runtime's own jitter: everything runs on this thread, and draws in the same order.
    fastrand::seed(plan.seed);
    let mut world = World::new(plan, disk, variant);
    world.live(plan, goal);
    world.end(plan)
}

impl World {
    fn new(plan: &Plan, disk: Disk, variant: Variant) -> Self {
        let net = Net::new(plan.seed, plan.faults.quality);
        let clock = StoreClock::new(&net);
        let history = History::with_clock(clock.clone());
        let resource = Resource::new(history.clone(), variant != Variant::FenceOff);
        let mut world = Self {
            net,
            clock,
            server: Arc::default(),
            disk,
            history,
            overseer: Arc::default(),
            resource,
            variant,
            hosts: (0..=plan.workers).map(|_| None).collect(),
            boots: Vec::new(),
            up_at: None,
            processes: 0,
            violations: Vec::new(),
        };
        world.start_store();
        world.boot_producer(plan);
        for worker in 1..=plan.workers {
            world.boot(worker);
        }
        world
    }

    fn start_store(&mut self) {
        let mut store = self.disk.open(&self.clock);
        if self.variant != Variant::Sound {
            store = Arc::new(Broken::new(store, self.variant));
        }
        self.server.set(Some(store));
    }

    /// A new process on a host: its runtime, its door to the network, and its view of the store.
    fn process(&mut self, host: usize) -> (Runtime, Port, Arc<dyn Store>, u32) {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let port = runtime.block_on(async { Port::new(&self.net, host) });
        self.processes += 1;
        let link = Link::new(port.clone(), &self.server, &self.overseer);
        let recorded = RecordingStore::new(Arc::new(link), self.history.clone(), self.processes);
        let mut store: Arc<dyn Store> = Arc::new(recorded);
        if self.variant == Variant::DeadlineFromReply {
            store = Arc::new(FromReply::new(store, port.clone()));
        }
        (runtime, port, store, self.processes)
    }

    fn settle_in(
        &mut self,
        host: usize,
        runtime: Runtime,
        drain: Option<oneshot::Sender<()>>,
        done: JoinHandle<Result<Option<DrainReport>>>,
    ) {
        let epoch = runtime.block_on(async { Instant::now() });
        self.hosts[host] = Some(Host {
            runtime,
            started: self.net.now(),
            epoch,
            drain,
            done,
            frozen_until: None,
        });
    }

    fn boot_producer(&mut self, plan: &Plan) {
        let (runtime, port, store, _) = self.process(0);
        let script = plan.script.clone();
        let done = runtime.spawn(async move {
            produce(store, port, script).await;
            Ok(None)
        });
        self.settle_in(0, runtime, None, done);
    }

    fn boot(&mut self, host: usize) {
        let (runtime, port, store, process) = self.process(host);
        let hands = Hands {
            port,
            process,
            overseer: Arc::clone(&self.overseer),
            resource: Arc::clone(&self.resource),
        };
        let (drain, draining) = oneshot::channel();
        let done = runtime.spawn(async move { work(store, hands, draining).await.map(Some) });
        self.settle_in(host, runtime, Some(drain), done);
    }

    fn live(&mut self, plan: &Plan, goal: Goal) {
        let limit = match goal {
            Goal::Safety => HEALED + AFTERMATH,
            // Claims and deadlines wait for a clock to catch up with where it has been.
            Goal::Liveness => HEALED + DRAIN_LIMIT + plan.set_back(),
        };
        let mut troubles = plan.troubles.iter().peekable();
        let mut healed = false;
        let (mut now, mut turns) = (Duration::ZERO, 0_u32);
        while now < limit {
            while let Some((_, trouble)) = troubles.next_if(|(at, _)| *at <= now) {
                self.strike(*trouble, now);
            }
            if goal == Goal::Liveness && !healed && now >= HEALED {
                healed = true;
                self.heal();
            }
            self.recover(now);
            let next = now + LATENCY;
            self.net.deliver(next);
            for host in self.hosts.iter().flatten() {
                if host.frozen_until.is_none() {
                    host.run(next);
                }
            }
            now = next;
            turns += 1;
            if turns.is_multiple_of(16) && troubles.peek().is_none() && self.is_drained() {
                return;
            }
        }
        if goal == Goal::Liveness {
            let store = self.server.store().expect("it is up");
            let left = at_once(inspect::queues(&*store));
            let text = format!("I13 BacklogLeft after {:?}: {left:?}", limit - HEALED);
            self.violations.push(text);
        }
    }

    fn strike(&mut self, trouble: Trouble, now: Duration) {
        match trouble {
            Trouble::Freeze(host, lasts) => {
                if let Some(host) = &mut self.hosts[host] {
                    host.frozen_until = Some(now + lasts);
                }
            }
            Trouble::Crash(host, lasts) => {
                // The runtime goes, and with it everything that was awaited, where it stood.
                if self.hosts[host].take().is_some() {
                    self.boots.push((now + lasts, host));
                }
            }
            Trouble::Drain(host, lasts) => {
                if let Some(running) = &mut self.hosts[host]
                    && let Some(drain) = running.drain.take()
                {
                    let _ = drain.send(());
                    self.boots.push((now + lasts, host));
                }
            }
            Trouble::Cut {
                host,
                requests,
                replies,
                lasts,
            } => self.net.cut(Cut {
                host,
                requests,
                replies,
                until: now + lasts,
            }),
            Trouble::Jump(millis) => self.clock.jump(millis),
            Trouble::Restart(lasts) => self.stop_store(now + lasts),
            Trouble::Keep => self.disk.keep(),
            Trouble::Rollback(lasts) => {
                self.stop_store(now + lasts);
                self.disk.roll_back();
            }
        }
    }

    fn stop_store(&mut self, until: Duration) {
        self.server.set(None);
        self.up_at = Some(self.up_at.map_or(until, |at| at.max(until)));
    }

    fn recover(&mut self, now: Duration) {
        if self.up_at.is_some_and(|at| at <= now) {
            self.up_at = None;
            self.start_store();
        }
        for (number, host) in self.hosts.iter_mut().enumerate() {
            let Some(host) = host else { continue };
            if host.frozen_until.is_some_and(|until| until <= now) {
                host.frozen_until = None;
                self.overseer.thawed(number, now);
                // The monotonic clock went on while nothing ran: all timers are due at once.
                let shown = host.runtime.block_on(async { host.epoch.elapsed() });
                let missed = now - (host.started + shown);
                host.runtime
                    .block_on(async { tokio::time::advance(missed).await });
            }
        }
        let due: Vec<_> = self.boots.extract_if(.., |(at, _)| *at <= now).collect();
        for (_, number) in due {
            if let Some(stopped) = self.hosts[number].take() {
                self.bury(number, stopped);
            }
            self.boot(number);
        }
    }

    /// A program that has ended must have ended well.
    fn bury(&mut self, number: usize, host: Host) {
        if host.done.is_finished() {
            let ended = host.runtime.block_on(host.done);
            if !matches!(ended, Ok(Ok(_))) {
                let text = format!("host {number} ended badly: {ended:?}");
                self.violations.push(text);
            }
        }
    }

    fn heal(&mut self) {
        self.net.heal();
        self.up_at = self.up_at.map(|_| Duration::ZERO);
        for host in self.hosts.iter_mut().flatten() {
            host.frozen_until = host.frozen_until.map(|_| Duration::ZERO);
        }
        for (at, _) in &mut self.boots {
            *at = Duration::ZERO;
        }
    }

    fn is_drained(&self) -> bool {
        let produced = self.hosts[0]
            .as_ref()
            .is_some_and(|host| host.done.is_finished());
        let Some(store) = self.server.store().filter(|_| produced) else {
            return false;
        };
        let queues = at_once(inspect::queues(&*store)).expect("the queues");
        let left = |queue: &inspect::QueueView| {
            queue.counts.ready + queue.counts.scheduled + queue.counts.leased
        };
        queues.iter().map(left).sum::<u64>() == 0
    }

    fn end(mut self, plan: &Plan) -> Outcome {
        for (number, host) in std::mem::take(&mut self.hosts).into_iter().enumerate() {
            if let Some(host) = host {
                self.bury(number, host);
            }
        }
        self.net.clear();
        if self.server.store().is_none() {
            self.start_store();
        }
        let store = self.server.store().expect("it is up");
        let mut last = at_once(Final::of(&*store));
        last.resources = self.resource.contents();
        let events = self.history.events();
        // A store that was set back keeps I1 to I3; the others hold from the surviving state on.
        let binding = |invariant: u8| plan.faults.rollbacks == 0 || invariant <= 3;
        let found = check(&events, Some(&last)).into_iter();
        let found = found.filter(|violation| binding(violation.rule.invariant()));
        self.violations
            .extend(found.map(|violation| violation.to_string()));
        self.violations.extend(self.overseer.violations());
        Outcome {
            violations: self.violations,
            fingerprint: fingerprint(&events),
            seen: Seen::of(&events, self.overseer.steps()),
            events,
        }
    }
}
