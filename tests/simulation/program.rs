//! What the hosts run: the real client and the real worker, and handlers that do as they are told.

use std::sync::Arc;
use std::time::Duration;

use leasehold::store::{ControlCommand, LeaseSelect, Select};
use leasehold::worker::DrainReport;
use leasehold::worker::executor::SameRuntime;
use leasehold::{Client, Context, Error, Failure, FencingToken, JobId, Result, RetryPolicy, Store};

use crate::net::Port;
use crate::oversee::Overseer;
use crate::plan::{Act, Order, Style, TERMS, Work};
use crate::resource::Resource;

/// What a handler can reach.
#[derive(Clone)]
pub(crate) struct Hands {
    pub(crate) port: Port,
    pub(crate) process: u32,
    pub(crate) overseer: Arc<Overseer>,
    pub(crate) resource: Arc<Resource>,
}

/// Runs a worker until it is told to drain.
pub(crate) async fn work(
    store: Arc<dyn Store>,
    hands: Hands,
    drain: tokio::sync::oneshot::Receiver<()>,
) -> Result<DrainReport> {
    let host = hands.port.host;
    let handler = move |work: Work, ctx: Context| {
        let hands = hands.clone();
        async move { handle(work, ctx, hands).await }
    };
    Client::new(store)
        .worker()
        .handle(handler)
        .executor(SameRuntime)
        .owner(format!("w{host}"))
        .task("simulation")
        .slots(2)
        .terms(TERMS)
        .retry(RetryPolicy::exponential(
            Duration::from_millis(100),
            Duration::from_secs(1),
        ))
        .grace(Duration::from_millis(200))
        .drain_grace(Duration::from_millis(600))
        .run_until(async move { drop(drain.await) })
        .await
}

async fn handle(work: Work, ctx: Context, hands: Hands) -> Result<(), Failure> {
    match work.style {
        Style::Plain => hands.steps(&ctx, 1..4, true).await,
        Style::Slow => hands.steps(&ctx, 10..40, true).await,
        Style::Deaf => hands.steps(&ctx, 5..30, false).await,
        Style::Stalls => hands.steps(&ctx, 1..30, false).await,
        Style::Fails => {
            hands.steps(&ctx, 1..3, true).await?;
            if ctx.job().failures < 2 && work.n.is_multiple_of(2) {
                return Err("it failed".into());
            }
            Ok(())
        }
        Style::Buries => Err(Failure::bury("hopeless")),
        Style::Snoozes => {
            if ctx.job().history.is_empty() {
                return Err(Failure::snooze(Duration::from_millis(300)));
            }
            hands.steps(&ctx, 1..3, true).await
        }
        Style::Checkpoints => {
            let done: u32 = ctx.last_checkpoint()?.unwrap_or_default();
            for part in done..4 {
                hands.steps(&ctx, 1..6, true).await?;
                ctx.progress(part.into(), 4, "parts");
                ctx.save_checkpoint(&(part + 1)).await?;
            }
            Ok(())
        }
        Style::Fenced => {
            hands.steps(&ctx, 0..3, true).await?;
            let seen = hands.open(&work.scope, ctx.token()).await?;
            hands.steps(&ctx, 0..8, true).await?;
            let value = format!("{} under {}", work.n, ctx.token());
            hands.write(&work.scope, ctx.token(), seen, value).await
        }
    }
}

impl Hands {
    /// Works for a while. Every now and then the overseer looks.
    async fn steps(
        &self,
        ctx: &Context,
        steps: std::ops::Range<u32>,
        heeds: bool,
    ) -> Result<(), Failure> {
        for _ in 0..fastrand::u32(steps) {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(5..120))).await;
            let (host, now) = (self.port.host, self.port.now());
            self.overseer
                .step(host, ctx.token(), now, ctx.is_cancelled());
            if heeds && ctx.is_cancelled() {
                return Err("told to stop".into());
            }
        }
        Ok(())
    }

    async fn open(&self, scope: &str, token: FencingToken) -> Result<Vec<String>, Failure> {
        let (resource, process, scope) =
            (Arc::clone(&self.resource), self.process, scope.to_owned());
        let opened = self
            .port
            .carry(move || Ok(resource.open(process, &scope, token)))
            .await?;
        opened.map_err(Failure::fenced)
    }

    async fn write(
        &self,
        scope: &str,
        token: FencingToken,
        seen: Vec<String>,
        value: String,
    ) -> Result<(), Failure> {
        let (resource, process, scope) =
            (Arc::clone(&self.resource), self.process, scope.to_owned());
        let write = move || Ok(resource.write(process, &scope, token, &seen, &value));
        self.port.carry(write).await?.map_err(Failure::fenced)
    }
}

/// Enqueues and commands as the script says.
pub(crate) async fn produce(store: Arc<dyn Store>, port: Port, script: Vec<(Duration, Act)>) {
    let client = Client::new(store);
    let mut known: Vec<JobId> = Vec::new();
    for (at, act) in script {
        tokio::time::sleep(at.saturating_sub(port.now())).await;
        match act {
            Act::Enqueue(jobs) => {
                // Unknown: the history says so.
                let enqueued = client.enqueue_many(jobs).await.unwrap_or_default();
                known.extend(enqueued.iter().map(|answer| answer.id()));
            }
            Act::Order(order) => carry_out(&client, order, &known).await,
        }
    }
}

async fn carry_out(client: &Client, order: Order, known: &[JobId]) {
    let one = fastrand::choice(known).copied();
    let command = match (order, one) {
        (Order::PauseAndResume, _) => {
            let queue = leasehold::job::QueueName::default();
            let pause = ControlCommand::Pause(queue.clone());
            let _ = client
                .operator("operator")
                .because("a pause")
                .command(pause)
                .await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            // A queue that stays paused would never drain.
            while let Err(error) = client
                .operator("operator")
                .because("no more")
                .command(ControlCommand::Resume(queue.clone()))
                .await
            {
                assert_transient(&error);
            }
            return;
        }
        (Order::RevokeOwner, _) => ControlCommand::Revoke(LeaseSelect::Owner("w1".into())),
        (_, None) => return,
        (Order::Cancel, Some(id)) => ControlCommand::Cancel(Select::Job(id)),
        (Order::RevokeJob, Some(id)) => ControlCommand::Revoke(LeaseSelect::Job(id)),
        (Order::Reschedule, Some(id)) => ControlCommand::Reschedule {
            jobs: Select::Job(id),
            delay: Duration::from_millis(400),
        },
    };
    // Unknown: the history says so.
    let _ = client
        .operator("operator")
        .because("a test")
        .command(command)
        .await;
}

fn assert_transient(error: &Error) {
    let kind = error.kind();
    let known = [
        leasehold::ErrorKind::Unknown,
        leasehold::ErrorKind::Unavailable,
        leasehold::ErrorKind::SessionLost,
    ];
    assert!(known.contains(&kind), "a command was refused: {error}");
}
