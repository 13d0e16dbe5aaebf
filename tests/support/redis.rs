//! Private Redis servers: standalone, a Sentinel set, a cluster of six.
//!
//! Each server is a real `redis-server` on a port and in a directory of its own. It can be killed,
//! frozen, cut off from its peers, and started again in the same place. It ends with its guard; if the test
//! process is killed, a watchdog that reads a pipe from it sees the end of the pipe and kills it.
//!
//! All of it blocks: servers are other processes, and a test has nothing else to do meanwhile.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ::redis::{Client, Connection, FromRedisValue, RedisResult, Value};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long a server may take for what it is waited for. Only a hang takes that long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// Every write is on disk before it is answered.
pub(crate) const AOF: &[&str] = &["appendonly yes", "appendfsync always"];

/// Snapshots only, and none unless asked for: a killed server forgets what came after the last.
pub(crate) const RDB_ONLY: &[&str] = &["save 86400 1"];

/// The name under which the sentinels know the primary.
pub(crate) const SERVICE: &str = "jobs";

/// Peers log in under names of their own, so that they can be shut out while clients are let in.
const PEERS: &[&str] = &[
    "user replica on >replica ~* &* +@all",
    "user sentinel on >sentinel ~* &* +@all",
    "masteruser replica",
    "masterauth replica",
];

/// Nobody gets in without a name: a shut-out peer would go on as the default user.
const BY_NAME: &[&str] = &["user default off", "user admin on >admin ~* &* +@all"];

/// How [`BY_NAME`] lets the test in.
const ADMIN: &str = "admin:admin@";

/// Waits for a fact. `what` is called until it gives something.
pub(crate) fn until<T>(what: &str, mut fact: impl FnMut() -> Option<T>) -> T {
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

/// One server: its place on disk, its port, and the process while there is one.
pub(crate) struct Server {
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
            conf += &format!("cluster-port {}\n", bus.number);
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
        let mut command = Command::new("redis-server");
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

    pub(crate) fn port(&self) -> u16 {
        self.port.number
    }

    /// `127.0.0.1:PORT`
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }

    /// Its directory: dump, append-only file, configuration, log.
    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// The last lines of its log, for messages.
    pub(crate) fn log(&self) -> String {
        let log = fs::read(self.place.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(20)..].join("\n");
        format!("--- log of {}\n{tail}\n---", self.address())
    }

    /// A connection for the test itself, with all rights, past any proxy.
    pub(crate) fn connection(&self) -> RedisResult<Connection> {
        let url = format!("redis://{}{}", self.login, self.address());
        let limit = Duration::from_secs(5);
        let connection = Client::open(url)?.get_connection_with_timeout(limit)?;
        connection.set_read_timeout(Some(limit))?;
        connection.set_write_timeout(Some(limit))?;
        Ok(connection)
    }

    /// Sends one command on a connection of its own.
    pub(crate) fn ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let mut command = ::redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut self.connection()?)
    }

    /// As `ask`; trouble stops the test.
    pub(crate) fn tell<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.ask(words)
            .unwrap_or_else(|error| panic!("{words:?}: {error}\n{}", self.log()))
    }

    /// One field of `INFO`, or of `CLUSTER INFO`.
    pub(crate) fn info(&self, section: &[&str], field: &str) -> Option<String> {
        let text: String = self.ask(section).ok()?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
        Some(line.trim().to_owned())
    }

    pub(crate) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// SIGKILL. When it returns, the process is gone.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it again on the same port and directory. Kills it before, if it runs.
    pub(crate) fn restart(&mut self) {
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
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
        let id = self
            .process
            .as_ref()
            .map_or(0, |process| process.child.id());
        until("the server stands still", || is_stopped(id).then_some(()));
    }

    /// SIGCONT.
    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Cuts the server off from replicas and sentinels, while clients still reach it: what they
    /// write from now on is lost if another takes over.
    pub(crate) fn cut_off(&self) {
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
    pub(crate) fn heal(&self) {
        for peer in ["replica", "sentinel"] {
            self.tell::<()>(&["ACL", "SETUSER", peer, "on"]);
        }
    }
}

fn owned(groups: &[&[&str]]) -> Vec<String> {
    groups.concat().into_iter().map(str::to_owned).collect()
}

/// One server on its own.
pub(crate) struct Standalone {
    pub(crate) server: Server,
    url: String,
    _root: TempDir,
}

impl Standalone {
    /// With lines for its configuration, such as [`AOF`], [`RDB_ONLY`] or `maxmemory 8mb`. Without
    /// any it keeps nothing on disk.
    pub(crate) fn start(lines: &[&str]) -> Self {
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
    pub(crate) fn with_acl(rule: &str) -> Self {
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
    pub(crate) fn with_tls(certificate: &Path, key: &Path) -> Self {
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
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// A primary, two replicas, and three sentinels that watch them.
pub(crate) struct SentinelSet {
    pub(crate) servers: Vec<Server>,
    pub(crate) sentinels: Vec<Server>,
    _root: TempDir,
}

impl SentinelSet {
    /// All up: replicas in sync, sentinels know the replicas and each other.
    pub(crate) fn start(lines: &[&str]) -> Self {
        let root = TempDir::new().unwrap();
        let primary = Server::start(root.path(), ADMIN, &owned(&[BY_NAME, PEERS, lines]));
        let follow = format!("replicaof 127.0.0.1 {}", primary.port());
        let mut servers = vec![primary];
        for _ in 0..2 {
            let lines = owned(&[BY_NAME, PEERS, lines, &[&follow]]);
            servers.push(Server::start(root.path(), ADMIN, &lines));
        }
        let watch = [
            format!(
                "sentinel monitor {SERVICE} 127.0.0.1 {} 2",
                servers[0].port()
            ),
            format!("sentinel auth-user {SERVICE} sentinel"),
            format!("sentinel auth-pass {SERVICE} sentinel"),
            format!("sentinel down-after-milliseconds {SERVICE} 2000"),
            format!("sentinel failover-timeout {SERVICE} 10000"),
            format!("sentinel parallel-syncs {SERVICE} 2"),
        ];
        let sentinels = (0..3).map(|_| sentinel(root.path(), &watch)).collect();
        let set = Self {
            servers,
            sentinels,
            _root: root,
        };
        set.settled();
        set
    }

    /// Waits until every replica is in sync and every sentinel knows all of its peers.
    pub(crate) fn settled(&self) {
        for replica in &self.servers[1..] {
            until("the replica is in sync", || {
                let status = replica.info(&["INFO", "replication"], "master_link_status")?;
                (status == "up").then_some(())
            });
        }
        for sentinel in &self.sentinels {
            until("the sentinel knows its peers", || {
                let known = |field| sentinel_count(sentinel, field);
                (known("num-slaves")? == 2 && known("num-other-sentinels")? == 2).then_some(())
            });
        }
    }

    /// `redis+sentinel://USER:PASSWORD@h1,h2,h3/SERVICE`
    pub(crate) fn url(&self) -> String {
        let hosts: Vec<String> = self.sentinels.iter().map(Server::address).collect();
        format!("redis+sentinel://{ADMIN}{}/{SERVICE}", hosts.join(","))
    }

    /// The port that a majority of the sentinels gives for the primary.
    pub(crate) fn primary(&self) -> Option<u16> {
        let ask = |sentinel: &Server| {
            let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE];
            let (_, port): (String, u16) = sentinel.ask(&words).ok()?;
            Some(port)
        };
        let answers: Vec<Option<u16>> = self.sentinels.iter().map(ask).collect();
        let agreed = |port: &&u16| answers.iter().filter(|a| **a == Some(**port)).count() >= 2;
        answers.iter().flatten().find(agreed).copied()
    }

    /// Waits until a server other than that on `old` is primary, and gives its index.
    pub(crate) fn failed_over(&self, old: u16) -> usize {
        until("another server is primary", || {
            let new = self.primary().filter(|port| *port != old)?;
            let at = self
                .servers
                .iter()
                .position(|server| server.port() == new)?;
            let role = self.servers[at].info(&["INFO", "replication"], "role")?;
            (role == "master").then_some(at)
        })
    }
}

fn sentinel(root: &Path, lines: &[String]) -> Server {
    for _ in 0..10 {
        let mut server = Server::make(root, "", lines, true);
        if server.launch() {
            return server;
        }
    }
    panic!("ten ports in a row were taken by others");
}

fn sentinel_count(sentinel: &Server, field: &str) -> Option<u64> {
    let words = ["SENTINEL", "MASTER", SERVICE];
    let answer: Vec<String> = sentinel.ask(&words).ok()?;
    let at = answer.iter().position(|word| word == field)?;
    answer.get(at + 1)?.parse().ok()
}

/// Three primaries, each with a replica: node `i + 3` follows node `i`.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Server>,
    _root: TempDir,
}

impl Cluster {
    /// All up: every node says that the cluster is, and the replicas are in sync.
    pub(crate) fn start(lines: &[&str]) -> Self {
        const CLUSTER: &[&str] = &[
            "cluster-enabled yes",
            "cluster-node-timeout 2000",
            "cluster-replica-validity-factor 0",
            "cluster-allow-replica-migration no",
        ];
        let root = TempDir::new().unwrap();
        let lines = owned(&[PEERS, CLUSTER, lines]);
        let node = |_| Server::start(root.path(), "", &lines);
        let nodes: Vec<Server> = (0..6).map(node).collect();
        let cluster = Self { nodes, _root: root };
        cluster.join();
        cluster
    }

    fn join(&self) {
        let slots = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];
        for (at, node) in self.nodes.iter().enumerate() {
            node.tell::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]);
            if let Some((first, last)) = slots.get(at) {
                node.tell::<()>(&["CLUSTER", "ADDSLOTSRANGE", first, last]);
            }
        }
        for node in &self.nodes[1..] {
            let port = node.port().to_string();
            let bus = node.bus.as_ref().map_or(0, |bus| bus.number).to_string();
            self.nodes[0].tell::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        }
        for node in &self.nodes {
            self.says(node, "cluster_known_nodes", "6");
        }
        for (replica, primary) in self.nodes[3..].iter().zip(&self.nodes) {
            let id: String = primary.tell(&["CLUSTER", "MYID"]);
            // Refused until gossip has told the replica that its primary is one.
            until("the replica follows", || {
                replica.ask::<()>(&["CLUSTER", "REPLICATE", &id]).ok()
            });
        }
        self.settled();
    }

    fn says(&self, node: &Server, field: &str, value: &str) {
        until(&format!("{field}:{value} on {}", node.address()), || {
            let found = node.info(&["CLUSTER", "INFO"], field)?;
            (found == value).then_some(())
        });
    }

    /// Waits until every running node says that all slots are served, and by whom is agreed; and
    /// until every running replica is in sync.
    pub(crate) fn settled(&self) {
        let running: Vec<&Server> = self.nodes.iter().filter(|n| n.is_running()).collect();
        for node in &running {
            self.says(node, "cluster_state", "ok");
            self.says(node, "cluster_slots_ok", "16384");
            until("the replica is in sync", || {
                let replication = |field| node.info(&["INFO", "replication"], field);
                let role = replication("role")?;
                (role == "master" || replication("master_link_status")? == "up").then_some(())
            });
        }
        until("the nodes agree on the primaries", || {
            let owners: Option<Vec<_>> = running.iter().map(|node| owners(node)).collect();
            owners?
                .windows(2)
                .all(|pair| pair[0] == pair[1])
                .then_some(())
        });
    }

    /// `redis+cluster://h1,h2,…`
    pub(crate) fn url(&self) -> String {
        let hosts: Vec<String> = self.nodes.iter().map(Server::address).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// The node that serves the slot of this key, as the first that runs sees it.
    pub(crate) fn owner_of(&self, key: &str) -> usize {
        let asked = self
            .nodes
            .iter()
            .find(|node| node.is_running())
            .expect("one runs");
        let slot: u16 = asked.tell(&["CLUSTER", "KEYSLOT", key]);
        let owners = owners(asked).expect("it knows the slots");
        let port = owners
            .iter()
            .find(|(first, last, _)| (*first..=*last).contains(&slot));
        let port = port.expect("all slots are served").2;
        self.nodes
            .iter()
            .position(|node| node.port() == port)
            .expect("one of ours")
    }

    /// Waits until another node than `old` serves the slot of this key, and gives its index.
    pub(crate) fn failed_over(&self, key: &str, old: usize) -> usize {
        let replica = (old + 3) % 6;
        until("the replica has taken over", || {
            let role = self.nodes[replica].info(&["INFO", "replication"], "role")?;
            (role == "master").then_some(())
        });
        self.settled();
        let new = self.owner_of(key);
        assert_ne!(new, old, "the slots have another owner");
        new
    }
}

/// Which port serves which slots: first, last, port; in order.
fn owners(node: &Server) -> Option<Vec<(u16, u16, u16)>> {
    let answer: Vec<Vec<Value>> = node.ask(&["CLUSTER", "SLOTS"]).ok()?;
    let row = |row: &Vec<Value>| {
        let number = |value: &Value| u16::from_redis_value(value.clone()).ok();
        let Value::Array(primary) = row.get(2)? else {
            return None;
        };
        Some((
            number(row.first()?)?,
            number(row.get(1)?)?,
            number(primary.get(1)?)?,
        ))
    };
    let mut rows = answer.iter().map(row).collect::<Option<Vec<_>>>()?;
    rows.sort_unstable();
    Some(rows)
}
