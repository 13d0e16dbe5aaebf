//! A private PostgreSQL server: started in a directory of its own, stopped, killed, started again.
//!
//! It ends with its guard. If the test process is killed, a watchdog that reads a pipe from it sees
//! the end of the pipe and stops the server. The server refuses to run as root: then it runs as
//! another user.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::disallowed_methods, reason = "it waits on the real time")]

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getuid, kill_process};
use tempfile::TempDir;

/// How long a server may take for what it is waited for. Only a hang takes that long.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Postgres {
    bin: PathBuf,
    port: u16,
    durable: bool,
    process: Option<(Child, Child)>,
    dir: TempDir,
}

impl Postgres {
    /// Starts a new server. None if there is none on this machine and nobody requires one.
    ///
    /// Commits do not wait for the disk: for tests of order, which keep nothing.
    pub(crate) fn start() -> Option<Self> {
        Self::with(false)
    }

    /// The same, with commits that wait for the disk.
    pub(crate) fn start_durable() -> Option<Self> {
        Self::with(true)
    }

    fn with(durable: bool) -> Option<Self> {
        let Some(bin) = programs() else {
            let required = std::env::var("LEASEHOLD_REQUIRE").unwrap_or_default();
            let required = required.split(',').any(|name| name == "postgres");
            assert!(!required, "PostgreSQL is required, and not installed");
            eprintln!("no PostgreSQL here: ./tests/run installs it");
            return None;
        };
        let dir = tempfile::tempdir().unwrap();
        // Another user has to find the way in.
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).unwrap();
        for part in ["data", "socket"] {
            std::fs::create_dir(dir.path().join(part)).unwrap();
            if getuid().is_root() {
                let owner = Command::new("chown")
                    .arg("postgres")
                    .arg(dir.path().join(part))
                    .status();
                assert!(owner.unwrap().success());
            }
        }
        let mut server = Self {
            bin,
            port: 0,
            durable,
            process: None,
            dir,
        };
        let mut initdb = server.program("initdb");
        initdb
            .args([
                "-U",
                "leasehold",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
                "-D",
            ])
            .arg(server.path("data"));
        let made = initdb.stdout(Stdio::null()).output().unwrap();
        assert!(
            made.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        server.launch();
        Some(server)
    }

    fn path(&self, part: &str) -> PathBuf {
        self.dir.path().join(part)
    }

    /// A program of the server, as a user under whom it agrees to run.
    fn program(&self, name: &str) -> Command {
        let program = self.bin.join(name);
        let mut command = if getuid().is_root() {
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid=postgres", "--regid=postgres", "--clear-groups"])
                .arg(program);
            command
        } else {
            Command::new(program)
        };
        // The test's own directory may be closed to that user.
        command.current_dir("/").stdin(Stdio::null());
        command
    }

    /// Starts the server in its place, again if it was stopped or killed.
    pub(crate) fn launch(&mut self) {
        for _ in 0..10 {
            let free = TcpListener::bind("127.0.0.1:0").unwrap();
            self.port = free.local_addr().unwrap().port();
            drop(free);
            if self.try_launch() {
                return;
            }
        }
        let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        panic!("PostgreSQL does not start: {log}");
    }

    fn try_launch(&mut self) -> bool {
        let settings: &[&str] = if self.durable {
            &[]
        } else {
            &[
                "fsync=off",
                "synchronous_commit=off",
                "full_page_writes=off",
            ]
        };
        let log = std::fs::File::create(self.path("log")).unwrap();
        let child = self
            .program("postgres")
            .arg("-D")
            .arg(self.path("data"))
            .arg("-k")
            .arg(self.path("socket"))
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-N", "100"])
            .args(settings.iter().flat_map(|setting| ["-c", *setting]))
            .args(["-c", "shared_buffers=16MB", "-c", "jit=off"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let watchdog = Command::new("sh")
            .args(["-c", "cat >/dev/null; kill -QUIT \"$0\""])
            .arg(child.id().to_string())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some((child, watchdog));
        let start = Instant::now();
        while !self.is_ready() {
            let (child, watchdog) = self.process.as_mut().unwrap();
            if child.try_wait().unwrap().is_some() {
                let _ = watchdog.kill();
                let _ = watchdog.wait();
                self.process = None;
                return false;
            }
            assert!(start.elapsed() < PATIENCE, "PostgreSQL does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    fn is_ready(&self) -> bool {
        let ready = self
            .program("pg_isready")
            .args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()])
            .status();
        ready.unwrap().success()
    }

    /// How to reach it over TCP.
    pub(crate) fn url(&self) -> String {
        format!("postgres://leasehold@127.0.0.1:{}/postgres", self.port)
    }

    /// How to reach it over its socket.
    pub(crate) fn socket(&self) -> String {
        let dir = self.path("socket");
        format!(
            "host={} port={} user=leasehold dbname=postgres",
            dir.display(),
            self.port
        )
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if let Some((child, _)) = &self.process {
            kill_process(Pid::from_child(child), signal).unwrap();
        }
    }

    /// SIGKILL to the server's first process; the others notice and go.
    pub(crate) fn kill(&mut self) {
        self.end(Signal::KILL);
    }

    /// Stops it in order.
    pub(crate) fn stop(&mut self) {
        self.end(Signal::INT);
    }

    fn end(&mut self, signal: Signal) {
        self.signal(signal);
        if let Some((mut child, mut watchdog)) = self.process.take() {
            // First the watchdog: the number it would signal is about to be free for others.
            let _ = watchdog.kill();
            let _ = watchdog.wait();
            let _ = child.wait();
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.end(Signal::QUIT);
    }
}

/// Where the server's programs are: the newest version in the usual places, or in the path.
fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten();
    let bins = versions.flatten().map(|version| version.path().join("bin"));
    let newest = bins.filter(|bin| bin.join("initdb").is_file()).max();
    newest.or_else(|| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).find(|bin| Path::new(bin).join("initdb").is_file())
    })
}
