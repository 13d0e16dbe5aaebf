//! The command on a terminal: it asks before it destroys, and gives the terminal back.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcsetwinsize};

use crate::operate::world::{New, Place, job, on_each_store, sqlite};

/// A command whose stdin, stdout and stderr are a terminal of 80 by 24.
pub(crate) struct Terminal {
    child: Child,
    keys: File,
    seen: Arc<Mutex<Vec<u8>>>,
}

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

impl Terminal {
    pub(crate) fn new(mut command: Command) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&master, size).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let open = || -> OwnedFd {
            rustix::fs::open(
                &name,
                OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .unwrap()
        };
        command
            .stdin(open())
            .stdout(open())
            .stderr(open())
            .env("TERM", "xterm-256color");
        let child = command.spawn().unwrap();
        // Its copies of the terminal go, so that the end of the command is the end of the output.
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let keys = File::from(master);
        let mut screen = keys.try_clone().unwrap();
        let seen = Arc::<Mutex<Vec<u8>>>::default();
        let into = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = screen.read(&mut buffer) {
                into.lock().unwrap().extend_from_slice(&buffer[..read]);
            }
        });
        Self { child, keys, seen }
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    pub(crate) fn wait_for(&self, text: &str) {
        let until = Instant::now() + PATIENCE;
        while !self.text().contains(text) {
            assert!(Instant::now() < until, "no {text:?} in {:?}", self.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn end(&mut self) -> ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "still there: {:?}", self.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn purge(place: &Place, answer: &str) -> Option<i32> {
    let mut terminal = Terminal::new(place.command(&["queues", "purge", "day"]));
    terminal.wait_for("purge 1 job (scheduled, ready) of queue day? [y/N]");
    terminal.press(answer);
    terminal.end().code()
}

on_each_store! {
    what_destroys_is_asked_for,
    top_gives_the_terminal_back_when_it_is_quit,
}

async fn what_destroys_is_asked_for(new: New) {
    let place = new();
    let world = place.world().await;
    let id = world.enqueue(job("day", "mail")).await;
    for no in ["\n", "n\n", "what\n", "\x04"] {
        assert_eq!(purge(&place, no), Some(1), "{no:?}");
        assert!(world.client.job(id).await.unwrap().is_some(), "{no:?}");
    }
    assert_eq!(purge(&place, "y\n"), Some(0));
    assert!(world.client.job(id).await.unwrap().is_none());
}

/// `top` on a terminal, up and running.
async fn top(place: &Place) -> Terminal {
    place.world().await.stage().await;
    let terminal = Terminal::new(place.command(&["top"]));
    terminal.wait_for("q quit");
    terminal.wait_for("host-1");
    assert!(!terminal.is_cooked());
    terminal
}

impl Terminal {
    /// Whether the terminal edits lines and shows what is typed, as shells leave it.
    fn is_cooked(&self) -> bool {
        let modes = rustix::termios::tcgetattr(&self.keys).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO)
    }

    fn is_given_back(&mut self) {
        assert_eq!(self.end().code(), Some(0), "{:?}", self.text());
        // It leaves the alternate screen, and shows the cursor again.
        self.wait_for("\x1b[?1049l");
        self.wait_for("\x1b[?25h");
        assert!(self.is_cooked());
    }
}

async fn top_gives_the_terminal_back_when_it_is_quit(new: New) {
    let place = new();
    let mut terminal = top(&place).await;
    terminal.press(" ");
    terminal.wait_for("HELD");
    terminal.press("q");
    terminal.is_given_back();
}

#[tokio::test(flavor = "multi_thread")]
async fn top_gives_the_terminal_back_when_it_is_terminated() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let place = sqlite();
        let mut terminal = top(&place).await;
        rustix::process::kill_process(terminal.pid(), signal).unwrap();
        terminal.is_given_back();
    }
}
