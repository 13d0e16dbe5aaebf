//! A child process: this test binary again, with a role.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use leasehold::clock::{Clock as _, SystemClock, Timestamp};
use rustix::process::{Pid, Signal, kill_process};

use crate::roles::{ROLE, Role};

/// How long a child may take for what it is waited for. Only a hang takes that long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A running child. It ends with its guard, frozen or not.
pub(crate) struct Process {
    child: Child,
    said: Receiver<String>,
}

/// When a process was killed: between these two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Killed {
    pub(crate) not_before: Timestamp,
    pub(crate) not_after: Timestamp,
}

impl Process {
    pub(crate) fn start(role: &Role) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["roles::play", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, serde_json::to_string(role).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A group of its own: if the test is killed while this one is frozen, the kernel hangs
            // it up and wakes it.
            .process_group(0)
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (say, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = say.send(line);
            }
        });
        Self { child, said }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// SIGKILL. When it returns, the process is gone.
    pub(crate) fn kill(&mut self) -> Killed {
        let not_before = SystemClock.now();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        Killed {
            not_before,
            not_after: SystemClock.now(),
        }
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it ends of itself.
    pub(crate) async fn ends(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "the child does not end");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The next line that starts with this word.
    pub(crate) fn hear(&self, word: &str) -> String {
        loop {
            let line = self.said.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("the child never said {word:?}"));
            if line.split(' ').next() == Some(word) {
                return line;
            }
        }
    }

    /// The same, for a supervisor with more than one thing to do.
    pub(crate) async fn hears(&mut self, word: &str) -> String {
        let start = Instant::now();
        loop {
            match self.overhear() {
                Some(line) if line.split(' ').next() == Some(word) => return line,
                Some(_) => {}
                None => {
                    assert!(start.elapsed() < PATIENCE, "the child never said {word:?}");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        }
    }

    /// The next line, if it has said one.
    pub(crate) fn overhear(&self) -> Option<String> {
        self.said.try_recv().ok()
    }

    /// Gives it the word that it waits for, and wakes it up.
    pub(crate) fn thaw(&mut self) {
        self.tell(1);
        self.signal(Signal::CONT);
    }

    /// Gives it the word that it waits for, so many times.
    pub(crate) fn tell(&mut self, times: usize) {
        let word = self.child.stdin.as_mut().unwrap();
        word.write_all(&vec![b'!'; times]).unwrap();
    }

    /// Everything that an ended child has said and nobody heard.
    pub(crate) fn last_words(self) -> Vec<String> {
        self.said.iter().collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL ends a stopped process, too. One that has ended is only collected.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
