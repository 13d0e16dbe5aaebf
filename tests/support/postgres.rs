//! Private PostgreSQL servers for tests: started on a free port in a directory of their own,
//! killed, frozen and restarted at will, and gone with the test, however that ends. Where
//! PostgreSQL is not installed, a test that needs it fails.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::clock::Clock;
use leasehold::job::Namespace;
use leasehold::store::{PostgresOptions, PostgresStore};
use rustix::process::{Pid, Signal, kill_process};
use tokio_postgres::{Client, Config, NoTls};

/// The server refuses to run as root: then it runs as nobody.
const NOBODY: u32 = 65_534;
/// How long a server may take to start. Only a hang takes that long.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// How long a server may take to quit before it is killed.
const QUITS_WITHIN: Duration = Duration::from_secs(2);

/// Takes a server away when the input ends. Each of its processes is a group of its own, and may be
/// frozen. One that is asked to quit gives back its shared memory, of which the system has so many
/// pieces only; of one that was killed, the second number of line 7 names it.
const CLEAN: &str = r#"
    cat > /dev/null
    exec 2> /dev/null
    file=$1/data/postmaster.pid
    pid=$(sed -n 1p "$file")
    piece=$(sed -n 7p "$file")
    if grep -qsF "$1" "/proc/$pid/cmdline"; then
        all="$pid $(grep -ls "^PPid:.$pid\$" /proc/[0-9]*/status | cut -d / -f 3)"
        kill -QUIT "$pid"
        kill -CONT $all
        for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$pid" || break; sleep 0.1; done
        kill -KILL $all
        sleep 0.2
    fi
    [ -z "$piece" ] || ipcrm -m "${piece##* }"
    umount -l "$1/small"
    rm -rf "$1"
"#;

/// A running server.
pub struct Server {
    dir: PathBuf,
    bin: PathBuf,
    port: u16,
    settings: Vec<String>,
    /// Once it has answered, it keeps its port: others know its URL.
    answered: bool,
    child: Option<Child>,
    /// Ends when its input does, that is with this process, and takes the server along.
    watch: Option<Child>,
}

/// One server for all tests of a binary that do it no harm.
pub fn shared() -> &'static Server {
    static SHARED: OnceLock<Server> = OnceLock::new();
    SHARED.get_or_init(|| Server::start(&["max_connections=400", "fsync=off"]))
}

fn bin() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten();
    let mut found: Vec<PathBuf> = versions
        .flatten()
        .map(|version| version.path().join("bin"))
        .chain(std::env::split_paths(
            &std::env::var_os("PATH").unwrap_or_default(),
        ))
        .filter(|dir| dir.join("initdb").exists() && dir.join("pg_isready").exists())
        .collect();
    found.sort();
    let newest = found.pop();
    newest.expect("PostgreSQL is not installed here: ./tests/run installs it")
}

/// Below the ports that the system gives to outgoing connections: a server that is down for a while
/// must find its port free again.
pub fn free_port() -> u16 {
    let free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut ports = std::iter::repeat_with(|| fastrand::u16(30_000..32_700));
    ports.find(free).expect("a port")
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A command of the server's, as somebody who may run it.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command.current_dir("/").stdin(Stdio::null());
    command
}

/// A file or a directory for the server alone.
pub fn own(path: &Path) {
    let mode = if path.is_dir() { 0o700 } else { 0o600 };
    let closed = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, closed).expect("to close it");
    give_away(path);
}

/// To the user that the server runs as.
fn give_away(path: &Path) {
    if is_root() {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).expect("to give it away");
    }
}

fn run(command: &mut Command) {
    let done = command.output().expect("a command that starts");
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {text}");
}

/// Copies a directory with all that is in it.
fn copy(from: &Path, to: &Path) {
    run(command(Path::new("cp")).arg("-a").args([from, to]));
}

impl Server {
    /// Starts a fresh server.
    pub fn start(settings: &[&str]) -> Self {
        let mut server = Self::made(settings);
        server.launch();
        server
    }

    /// Starts a fresh server that offers encryption, with the files of a certificate and its key.
    pub fn start_tls(certificate: &Path, key: &Path) -> Self {
        let mut server = Self::made(&["fsync=off", "ssl=on"]);
        for (from, to) in [(certificate, "server.crt"), (key, "server.key")] {
            let to = server.data().join(to);
            std::fs::copy(from, &to).expect("to copy");
            own(&to);
        }
        server.launch();
        server
    }

    /// A server that has not been started.
    fn made(settings: &[&str]) -> Self {
        let server = Self::empty(settings);
        copy(&Self::fresh().data(), &server.data());
        server
    }

    /// What every server starts from, made once: that takes longer than all else about a server.
    fn fresh() -> &'static Self {
        static FRESH: OnceLock<Server> = OnceLock::new();
        FRESH.get_or_init(|| {
            let server = Self::empty(&[]);
            run(command(&server.bin.join("initdb"))
                .args(["-U", "postgres", "-A", "trust", "-E", "UTF8"])
                .args(["--locale=C", "-N", "-D"])
                .arg(server.data()));
            server
        })
    }

    /// A place for a server, without data.
    fn empty(settings: &[&str]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("leasehold-pg-")
            .tempdir()
            .expect("a directory")
            .keep();
        give_away(&dir);
        let watch = Command::new("sh")
            .args(["-c", CLEAN, "sh"])
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("a watch");
        Self {
            dir,
            bin: bin(),
            port: free_port(),
            settings: settings.iter().map(ToString::to_string).collect(),
            answered: false,
            child: None,
            watch: Some(watch),
        }
    }

    /// Somebody else's server, known by its URL.
    pub fn elsewhere(url: &str) -> Self {
        let config: Config = url.parse().expect("a good URL");
        Self {
            dir: PathBuf::new(),
            bin: PathBuf::new(),
            port: config.get_ports()[0],
            settings: Vec::new(),
            answered: true,
            child: None,
            watch: None,
        }
    }

    /// Stops, copies all data, and goes on.
    pub fn back_up(&mut self) {
        self.stop();
        self.copy("data", "backup");
        self.launch();
    }

    /// Loses its data, and goes on from the copy.
    pub fn restore(&mut self) {
        self.kill();
        self.copy("backup", "data");
        self.launch();
    }

    fn copy(&self, from: &str, to: &str) {
        let to = self.dir.join(to);
        let _ = std::fs::remove_dir_all(&to);
        copy(&self.dir.join(from), &to);
    }

    /// A standby that follows this server.
    pub fn standby(&self) -> Self {
        let mut standby = Self::empty(&["fsync=off"]);
        let port = self.port.to_string();
        run(command(&self.bin.join("pg_basebackup"))
            .args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres"])
            .args(["-R", "-X", "stream", "-c", "fast", "--no-sync", "-D"])
            .arg(standby.data()));
        standby.launch();
        standby
    }

    /// The standby hears no more of its primary.
    pub async fn cut_off(&self) {
        let db = self.client().await;
        db.batch_execute("ALTER SYSTEM SET primary_conninfo = ''")
            .await
            .expect("to cut it off");
        db.batch_execute("SELECT pg_reload_conf()")
            .await
            .expect("to cut it off");
        let receives = "SELECT count(*) FROM pg_stat_wal_receiver";
        while db
            .query_one(receives, &[])
            .await
            .expect("a count")
            .get::<_, i64>(0)
            > 0
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn promote(&self) {
        let db = self.client().await;
        let done = db.query_one("SELECT pg_promote(true, 60)", &[]).await;
        assert!(done.expect("to promote it").get::<_, bool>(0));
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// Where its files are. What is mounted there as `small` goes with them.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts the server on its data, and waits until it answers.
    pub fn launch(&mut self) {
        let began = Instant::now();
        loop {
            let log = std::fs::File::options()
                .create(true)
                .append(true)
                .open(self.dir.join("log"))
                .expect("a log");
            let mut server = command(&self.bin.join("postgres"));
            server.arg("-D").arg(self.data()).arg("-k").arg(&self.dir);
            server.args(["-p", &self.port.to_string()]);
            server.args(["-c", "listen_addresses=127.0.0.1", "-c", "timezone=UTC"]);
            for setting in &self.settings {
                server.args(["-c", setting]);
            }
            server.stdout(log.try_clone().expect("a log")).stderr(log);
            server.process_group(0);
            self.child = Some(server.spawn().expect("a server"));
            // After a kill the shared memory of the last one may still be in use: then again.
            while self.alive() && began.elapsed() < READY_WITHIN {
                let mut ready = command(&self.bin.join("pg_isready"));
                ready.args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()]);
                if ready.status().is_ok_and(|status| status.success()) {
                    self.answered = true;
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            let log = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            assert!(began.elapsed() < READY_WITHIN, "no server: {log}");
            self.kill();
            if !self.answered {
                // Somebody else may have taken the port.
                self.port = free_port();
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn alive(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_some_and(|child| child.try_wait().is_ok_and(|ended| ended.is_none()))
    }

    pub fn pid(&self) -> Pid {
        let child = self.child.as_ref().expect("a running server");
        Pid::from_raw(child.id().cast_signed()).expect("a process")
    }

    /// CPU time of all its processes, those that have ended included.
    pub fn cpu(&self) -> Duration {
        let spent = self.processes().into_iter().filter_map(|pid| {
            let fields = stat(pid)?;
            // utime, stime, and the same of children that have ended.
            let spent = fields.get(11..15)?.iter();
            Some(spent.filter_map(|n| n.parse::<u64>().ok()).sum::<u64>())
        });
        Duration::from_millis(spent.sum::<u64>() * 10)
    }

    /// Its first process, and all that this one has started: each is a group of its own.
    fn processes(&self) -> Vec<Pid> {
        let first = self.pid();
        let parent = first.as_raw_nonzero().get().to_string();
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let all = all.filter_map(|process| process.file_name().to_str()?.parse().ok());
        let mut found = vec![first];
        found.extend(all.filter_map(Pid::from_raw).filter(|pid| {
            let fields = stat(*pid).unwrap_or_default();
            fields.get(1) == Some(&parent)
        }));
        found
    }

    /// Freezes all of it.
    pub fn pause(&self) {
        let moves = |pid: &Pid| stat(*pid).is_some_and(|fields| !["T", "Z"].contains(&&*fields[0]));
        loop {
            let mut moving = self.processes();
            moving.retain(moves);
            if moving.is_empty() {
                return;
            }
            // Until the first process stands still, it may start others.
            for pid in moving {
                let _ = kill_process(pid, Signal::STOP);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn resume(&self) {
        for pid in self.processes() {
            let _ = kill_process(pid, Signal::CONT);
        }
    }

    /// Kills all of it at once, as the loss of its machine would: nobody is left to end what was
    /// begun.
    pub fn kill(&mut self) {
        if self.alive() {
            self.pause();
            for pid in self.processes() {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops it in order, and starts it again.
    pub fn restart(&mut self) {
        self.stop();
        self.launch();
    }

    /// Ends it at once, but gives back its shared memory.
    fn quit(&mut self) {
        if self.alive() {
            let _ = kill_process(self.pid(), Signal::QUIT);
            self.resume();
            let asked = Instant::now();
            while self.alive() && asked.elapsed() < QUITS_WITHIN {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.kill();
    }

    fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let pid = Pid::from_raw(child.id().cast_signed()).expect("a process");
            kill_process(pid, Signal::INT).expect("to stop the server");
            child.wait().expect("its end");
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// How to reach it over its socket.
    pub fn socket(&self) -> String {
        format!(
            "host={} port={} user=postgres dbname=postgres",
            self.dir.display(),
            self.port
        )
    }

    pub fn config(&self) -> Config {
        self.url().parse().expect("a good URL")
    }

    /// A connection of the test's own.
    pub async fn client(&self) -> Client {
        let (client, connection) = self.config().connect(NoTls).await.expect("a connection");
        tokio::spawn(async move {
            // It ends when the client or the server does.
            let _ = connection.await;
        });
        client
    }

    /// A store in a namespace that nobody else has, on a clock of the test's.
    pub async fn store(&self, clock: impl Clock) -> PostgresStore {
        let options = Self::options().connections(4).clock(clock);
        PostgresStore::with(self.config(), options)
            .await
            .expect("a store")
    }

    /// Options with a namespace that nobody else has.
    pub fn options() -> PostgresOptions {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("case-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        PostgresOptions::new().namespace(Namespace::new(name).expect("a good name"))
    }
}

/// What the system says of a process, behind its name: its state, its parent, …
fn stat(pid: Pid) -> Option<Vec<String>> {
    let pid = pid.as_raw_nonzero();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields = stat.rsplit_once(") ")?.1.split(' ');
    Some(fields.map(ToOwned::to_owned).collect())
}

impl Drop for Server {
    fn drop(&mut self) {
        self.quit();
        if let Some(mut watch) = self.watch.take() {
            drop(watch.stdin.take());
            let _ = watch.wait();
        }
    }
}
