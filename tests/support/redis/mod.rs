//! Private Redis servers: standalone, a Sentinel set, a cluster of six.
//!
//! Each server is a real `redis-server` on a port and in a directory of its own. It can be killed,
//! frozen, cut off from its peers, and started again in the same place. It ends with its guard; if
//! the test process is killed, a watchdog that reads a pipe from it sees the end of the pipe and
//! kills it.
//!
//! All of it blocks: servers are other processes, and a test has nothing else to do meanwhile.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ::redis::{Client, Connection, FromRedisValue, RedisResult};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

mod sets;

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub use sets::{Cluster, SentinelSet};

/// How long a server may take for what it is waited for. Only a hang takes that long.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Every write is on disk before it is answered.
pub const AOF: &[&str] = &["appendonly yes", "appendfsync always"];

/// Snapshots only, and none unless asked for: a killed server forgets what came after the last.
pub const RDB_ONLY: &[&str] = &["save 86400 1"];

/// For a cluster that is not to fail over: a busy machine keeps a node from answering for seconds,
/// and what its replica has not heard of by then would be lost. That is no bug of the store, and
/// has tests of its own.
pub const STEADY: &[&str] = &["cluster-node-timeout 60000"];

/// Nobody gets in without a name: a shut-out peer would go on as the default user.
const BY_NAME: &[&str] = &["user default off", "user admin on >admin ~* &* +@all"];

/// How [`BY_NAME`] lets the test in.
const ADMIN: &str = "admin:admin@";

/// Waits for a fact. `what` is called until it gives something.
pub fn until<T>(what: &str, mut fact: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = fact() {
            return found;
        }
        assert!(
            start.elapsed() < PATIENCE,
            "{what}: not within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A port that no other fixture of this machine takes while it lives, in any process: the server
/// can be down for a while and find it free again. Below the range that the system gives to
/// outgoing connections.
struct Port {
    number: u16,
    _held: File,
}

impl Port {
    fn take() -> Self {
        let locks = std::env::temp_dir().join("leasehold-ports");
        fs::create_dir_all(&locks).unwrap();
        for _ in 0..1_000 {
            let number = fastrand::u16(10_000..30_000);
            let Ok(held) = File::create(locks.join(number.to_string())) else {
                continue;
            };
            if held.try_lock().is_ok() && TcpListener::bind(("127.0.0.1", number)).is_ok() {
                return Self {
                    number,
                    _held: held,
                };
            }
        }
        panic!("no free port between 10000 and 30000");
    }
}

/// A running process, and the one that kills it if this one dies.
struct Process {
    child: Child,
    watchdog: Child,
}

impl Process {
    fn spawn(command: &mut Command) -> Self {
        let program = command.get_program().display().to_string();
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{program} cannot be started: {error}; ./tests/run installs it")
            });
        let watchdog = Command::new("sh")
            .args([
                "-c",
                "cat >/dev/null; kill -KILL \"$0\"",
                &child.id().to_string(),
            ])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, watchdog }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // First the watchdog: the number it would kill is about to be free for others.
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
        // SIGKILL ends a stopped process, too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process is stopped by a signal.
fn is_stopped(id: u32) -> bool {
    if let Ok(stat) = fs::read_to_string(format!("/proc/{id}/stat")) {
        return stat
            .rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('T'));
    }
    let state = Command::new("ps")
        .args(["-o", "state=", "-p", &id.to_string()])
        .output();
    state.unwrap().stdout.starts_with(b"T")
}

/// The server to start: `LEASEHOLD_REDIS_SERVER`, such as a `valkey-server`, or `redis-server`.
fn program() -> String {
    std::env::var("LEASEHOLD_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

/// One server: its place on disk, its port, and the process while there is one.
pub struct Server {
    place: PathBuf,
    port: Port,
    bus: Option<Port>,
    login: &'static str,
    sentinel: bool,
    process: Option<Process>,
}

impl Server {
    /// Starts a server in a new directory under `root`, on a port that is free.
    fn start(root: &Path, login: &'static str, lines: &[String]) -> Self {
        for _ in 0..10 {
            let mut server = Self::make(root, login, lines, false);
            if server.launch() {
                return server;
            }
        }
        panic!("ten ports in a row were taken by others");
    }

    fn make(root: &Path, login: &'static str, lines: &[String], sentinel: bool) -> Self {
        let port = Port::take();
        let place = root.join(port.number.to_string());
        fs::create_dir(&place).unwrap();
        let cluster = lines.iter().any(|line| line == "cluster-enabled yes");
        let bus = cluster.then(Port::take);
        let mut conf = format!(
            "port {}\nbind 127.0.0.1\ndir {}\nlogfile log\ndaemonize no\n",
            port.number,
            place.display()
        );
        if !sentinel {
            conf += "save \"\"\nappendonly no\nrepl-diskless-sync-delay 0\n";
        }
        if let Some(bus) = &bus {
            let _ = writeln!(conf, "cluster-port {}", bus.number);
        }
        conf += &lines.join("\n");
        fs::write(place.join("redis.conf"), conf + "\n").unwrap();
        Self {
            place,
            port,
            bus,
            login,
            sentinel,
            process: None,
        }
    }

    /// Starts the process and waits until it answers. False if somebody else has the port.
    fn launch(&mut self) -> bool {
        let mut command = Command::new(program());
        command.arg("redis.conf").current_dir(&self.place);
        if self.sentinel {
            command.arg("--sentinel");
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.process = Some(Process::spawn(&mut command));
        let start = Instant::now();
        loop {
            let process = self.process.as_mut().unwrap();
            if let Some(status) = process.child.try_wait().unwrap() {
                self.process = None;
                if self.log().contains("Address already in use") {
                    return false;
                }
                panic!("redis-server ended with {status}\n{}", self.log());
            }
            match self.ask::<String>(&["PING"]) {
                Ok(pong) if pong == "PONG" => return true,
                other => assert!(
                    start.elapsed() < PATIENCE,
                    "redis-server does not answer: {other:?}\n{}",
                    self.log()
                ),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn port(&self) -> u16 {
        self.port.number
    }

    /// `127.0.0.1:PORT`
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }

    /// Its directory: dump, append-only file, configuration, log.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// The last lines of its log, for messages.
    pub fn log(&self) -> String {
        let log = fs::read(self.place.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(20)..].join("\n");
        format!("--- log of {}\n{tail}\n---", self.address())
    }

    /// A connection for the test itself, with all rights, past any proxy.
    pub fn connection(&self) -> RedisResult<Connection> {
        let url = format!("redis://{}{}", self.login, self.address());
        let limit = Duration::from_secs(5);
        let connection = Client::open(url)?.get_connection_with_timeout(limit)?;
        connection.set_read_timeout(Some(limit))?;
        connection.set_write_timeout(Some(limit))?;
        Ok(connection)
    }

    /// Sends one command on a connection of its own.
    pub fn ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let mut command = ::redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut self.connection()?)
    }

    /// As `ask`; trouble stops the test.
    pub fn tell<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.ask(words)
            .unwrap_or_else(|error| panic!("{words:?}: {error}\n{}", self.log()))
    }

    /// One field of `INFO`, or of `CLUSTER INFO`.
    pub fn info(&self, section: &[&str], field: &str) -> Option<String> {
        let text: String = self.ask(section).ok()?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
        Some(line.trim().to_owned())
    }

    /// How often a command has run, in scripts and outside of them.
    pub fn calls(&self, command: &str) -> u64 {
        let stats = self.info(&["INFO", "commandstats"], &format!("cmdstat_{command}"));
        let stats = stats.unwrap_or_default();
        let calls = stats.strip_prefix("calls=").unwrap_or("0");
        calls.split(',').next().unwrap().parse().unwrap()
    }

    /// Waits until this many replicas have everything that this primary has taken. (`WAIT` knows
    /// only what its own connection wrote.)
    pub fn replicated(&self, replicas: usize) {
        let taken = self.info(&["INFO", "replication"], "master_repl_offset");
        let taken: u64 = taken.unwrap().parse().unwrap();
        until("the replicas have caught up", || {
            let text: String = self.ask(&["INFO", "replication"]).ok()?;
            let offsets = text.lines().filter_map(|line| {
                let (_, rest) = line.strip_prefix("slave")?.split_once("offset=")?;
                rest.split(',').next()?.parse::<u64>().ok()
            });
            (offsets.filter(|offset| *offset >= taken).count() >= replicas).then_some(())
        });
    }

    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// SIGKILL. When it returns, the process is gone.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it again on the same port and directory. Kills it before, if it runs.
    pub fn restart(&mut self) {
        self.kill();
        // Ports of this range are not given to anybody, and the lock keeps fixtures away; the
        // kernel may take a moment to let go of a killed server's.
        until("the port is free again", || self.launch().then_some(()));
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("the server runs");
        kill_process(Pid::from_child(&process.child), signal).unwrap();
    }

    /// SIGSTOP: it holds its connections and answers nothing. When it returns, it stands still.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        let id = self
            .process
            .as_ref()
            .map_or(0, |process| process.child.id());
        until("the server stands still", || is_stopped(id).then_some(()));
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Cuts the server off from replicas and sentinels, while clients still reach it: what they
    /// write from now on is lost if another takes over.
    pub fn cut_off(&self) {
        let mut connection = self.connection().unwrap();
        for peer in ["replica", "sentinel"] {
            for words in [
                ["ACL", "SETUSER", peer, "off"],
                ["CLIENT", "KILL", "USER", peer],
            ] {
                let mut command = ::redis::cmd(words[0]);
                command.arg(&words[1..]).exec(&mut connection).unwrap();
            }
        }
    }

    /// Lets the peers in again.
    pub fn heal(&self) {
        for peer in ["replica", "sentinel"] {
            self.tell::<()>(&["ACL", "SETUSER", peer, "on"]);
        }
    }
}

fn owned(groups: &[&[&str]]) -> Vec<String> {
    groups.concat().into_iter().map(str::to_owned).collect()
}

/// One server on its own.
pub struct Standalone {
    pub server: Server,
    url: String,
    _root: TempDir,
}

impl Standalone {
    /// With lines for its configuration, such as [`AOF`], [`RDB_ONLY`] or `maxmemory 8mb`. Without
    /// any it keeps nothing on disk.
    pub fn start(lines: &[&str]) -> Self {
        let root = TempDir::new().unwrap();
        let server = Server::start(root.path(), "", &owned(&[lines]));
        let url = format!("redis://{}", server.address());
        Self {
            server,
            url,
            _root: root,
        }
    }

    /// With a user `app`, password `p@ss/word`, who may do what `rule` says and nothing else.
    pub fn with_acl(rule: &str) -> Self {
        let user = format!("user app on >p@ss/word {rule}");
        let lines = owned(&[BY_NAME, &[&user]]);
        let root = TempDir::new().unwrap();
        let server = Server::start(root.path(), ADMIN, &lines);
        let url = format!("redis://app:p%40ss%2Fword@{}", server.address());
        Self {
            server,
            url,
            _root: root,
        }
    }

    /// With TLS, on a second port: the certificate and key are files in PEM form.
    pub fn with_tls(certificate: &Path, key: &Path) -> Self {
        let root = TempDir::new().unwrap();
        let tls = Port::take();
        let lines = [
            format!("tls-port {}", tls.number),
            format!("tls-cert-file {}", certificate.display()),
            format!("tls-key-file {}", key.display()),
            format!("tls-ca-cert-file {}", certificate.display()),
            "tls-auth-clients no".to_owned(),
        ];
        let mut server = Server::start(root.path(), "", &lines);
        let url = format!("rediss://127.0.0.1:{}", tls.number);
        server.bus = Some(tls);
        Self {
            server,
            url,
            _root: root,
        }
    }

    /// The URL that a client opens.
    pub fn url(&self) -> &str {
        &self.url
    }
}
