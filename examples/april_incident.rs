//! The April incident: two processes, one registry file, one pause.
//!
//! Run it: `cargo run --example april_incident`
//!
//! An instance reads the registry and is frozen (SIGSTOP) before it writes. Its lease expires,
//! another takes over, and the first is thawed: before or after its successor has written. Whoever
//! was told "stored" must find its update in the file. Three arms: no fence, a token that is
//! checked on writes only, and leasehold's fence, which is opened before the first read.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;
use std::{env, fs};

use anyhow::Context as _;
use leasehold::fence::file::FencedFile;
use leasehold::{Client, Context, Failure, FencingToken, Job, LeaseTerms};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Merge;

impl Job for Merge {
    const KIND: &'static str = "merge";
}

const ARMS: [&str; 3] = [
    "no fence",
    "token checked on writes only",
    "leasehold's fence",
];

/// One run of the merge: reads, stands still for as long as it is told to, and adds its name.
async fn merge(arm: &str, registry: PathBuf, ctx: &Context) -> Result<(), Failure> {
    let line = format!("merged under token {}\n", ctx.token());
    // The order is the point: the fence is opened before anything is read.
    let mut fenced = None;
    if arm == ARMS[2] {
        fenced = Some(ctx.fence(FencedFile::new(&registry)).await?);
    }
    let mut content = match &fenced {
        Some(opened) => opened.read().await?,
        None => fs::read(&registry)?,
    };
    println!("read");
    tokio::task::spawn_blocking(|| std::io::stdin().read_exact(&mut [0])).await??;

    content.extend(line.as_bytes());
    let stored = match &mut fenced {
        Some(opened) => opened.write(|_| content).await.is_ok(),
        None if arm == ARMS[1] => write_checked(&registry, ctx.token(), &content)?,
        None => fs::write(&registry, content).is_ok(),
    };
    print!("{} {line}", if stored { "stored" } else { "refused" });
    Ok(())
}

/// What is often called fencing: the resource keeps the largest token that has *written*.
fn write_checked(registry: &Path, token: FencingToken, content: &[u8]) -> anyhow::Result<bool> {
    let mark = registry.with_extension("mark");
    let lock = fs::File::create(registry.with_extension("lock"))?;
    lock.lock()?;
    let written: u64 = fs::read_to_string(&mark)
        .unwrap_or_default()
        .parse()
        .unwrap_or(0);
    if token.get() < written {
        return Ok(false);
    }
    fs::write(mark, token.to_string())?;
    fs::write(registry, content)?;
    Ok(true)
}

/// An instance: a worker like any other, which is never dropped for being late.
async fn instance(arm: String, dir: PathBuf) -> anyhow::Result<()> {
    let client = Client::open(&format!("sqlite://{}", dir.join("jobs.db").display())).await?;
    let handler = move |_: Merge, ctx: Context| {
        let (arm, registry) = (arm.clone(), dir.join("registry"));
        async move { merge(&arm, registry, &ctx).await }
    };
    let terms = LeaseTerms::of_term(Duration::from_secs(3));
    let worker = client.worker().handle(handler).slots(1).terms(terms);
    worker.grace(Duration::from_secs(60)).run().await?;
    Ok(())
}

struct Instance {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Instance {
    fn start(arm: &str, dir: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command
            .arg(arm)
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let says = BufReader::new(child.stdout.take().context("it has an output")?);
        Ok(Self { child, says })
    }

    /// Its next line.
    fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.says.read_line(&mut line)?;
        anyhow::ensure!(!line.is_empty(), "the instance ended");
        Ok(line)
    }

    /// Lets it write, and hears what came of it: the line that it was told is stored, if it was.
    fn write(&mut self) -> anyhow::Result<Option<String>> {
        self.child
            .stdin
            .as_mut()
            .context("it has an input")?
            .write_all(b"!")?;
        let said = self.hear()?;
        Ok(said.strip_prefix("stored ").map(str::to_owned))
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One pause. Returns how many updates were said to be stored, and how many of them are lost.
fn incident(arm: &str, thaw_late: bool) -> anyhow::Result<(usize, usize)> {
    let runtime = tokio::runtime::Runtime::new()?;
    let dir = tempfile::tempdir()?;
    fs::write(dir.path().join("registry"), "")?;
    let url = format!("sqlite://{}", dir.path().join("jobs.db").display());
    let client = runtime.block_on(Client::open(&url))?;
    runtime.block_on(client.enqueue(&Merge))?;

    let mut first = Instance::start(arm, dir.path())?;
    first.hear()?; // it has read
    first.signal(Signal::STOP)?;
    while !runtime.block_on(can_write(&client)) {
        // It was frozen amid a renewal, with the queue's file locked. Once more.
        first.signal(Signal::CONT)?;
        std::thread::sleep(Duration::from_millis(20));
        first.signal(Signal::STOP)?;
    }
    let mut second = Instance::start(arm, dir.path())?;
    second.hear()?; // the lease has expired, and the second has read
    let mut told = Vec::new();
    if thaw_late {
        told.extend(second.write()?);
    }
    first.signal(Signal::CONT)?;
    told.extend(first.write()?);
    if !thaw_late {
        told.extend(second.write()?);
    }
    let registry = fs::read_to_string(dir.path().join("registry"))?;
    let lost = told
        .iter()
        .filter(|line| !registry.contains(line.as_str()))
        .count();
    Ok((told.len(), lost))
}

/// Whether the queue's file can be written to.
async fn can_write(client: &Client) -> bool {
    let write = client.store().open_session();
    matches!(
        tokio::time::timeout(Duration::from_secs(1), write).await,
        Ok(Ok(_))
    )
}

fn main() -> anyhow::Result<()> {
    let mut args = env::args().skip(1);
    if let (Some(arm), Some(dir)) = (args.next(), args.next()) {
        let runtime = tokio::runtime::Runtime::new()?;
        return runtime.block_on(instance(arm, dir.into()));
    }
    let run = |arm| move |late| std::thread::spawn(move || incident(arm, late));
    let arms = ARMS.map(|arm| (arm, [false, true].map(run(arm))));
    for (arm, [early, late]) in arms {
        let join = |run: std::thread::JoinHandle<_>| run.join().expect("it does not panic");
        let ((stored, lost), (stored_late, lost_late)) = (join(early)?, join(late)?);
        println!("{arm}: thawed before its successor wrote: {stored} stored, {lost} lost");
        println!("{arm}: thawed after its successor wrote: {stored_late} stored, {lost_late} lost");
    }
    Ok(())
}
