//! Wake-ups between processes: one job wakes one sleeper, in whichever process it sleeps.
//!
//! Next to the database is a directory (`<db>-sleepers`). A process whose workers sleep has a
//! socket in it, and an empty file for each queue that they sleep on. A process that has made jobs
//! ready removes as many of these files as there are jobs, and sends a byte to the socket of each.
//! The first process that finds a socket without a listener removes what the dead one left behind.
//!
//! It is an optimisation, not a promise: where it is not available (another system, a path too long
//! for a socket, a full disk), sleepers find out by [polling](super::wait).

#[cfg(unix)]
mod system {
    use std::collections::HashMap;
    use std::fs::{self, File};
    use std::hash::{DefaultHasher, Hash, Hasher};
    use std::io::ErrorKind;
    use std::os::unix::fs::FileTypeExt as _;
    use std::os::unix::net::UnixDatagram;
    use std::path::{Path, PathBuf};
    use std::sync::{Mutex, PoisonError};
    use std::time::Duration;

    use super::super::migrate::beside;
    use crate::job::{Namespace, QueueName};

    /// Who sleeps on more queues than this is not woken.
    const QUEUES: usize = 32;

    /// The processes that sleep on a file, for one namespace.
    #[derive(Clone, Debug)]
    pub(in super::super) struct Sleepers {
        dir: PathBuf,
        namespace: Namespace,
    }

    /// The socket of a process that sleeps now and then.
    #[derive(Debug)]
    pub(in super::super) struct Sleeper {
        socket: UnixDatagram,
        name: String,
        all: Sleepers,
        /// How many sleep on each queue, by its file.
        asleep: Mutex<HashMap<PathBuf, usize>>,
    }

    impl Sleepers {
        pub(in super::super) fn of(db: &Path, namespace: &Namespace) -> Self {
            Self {
                dir: beside(db, "-sleepers"),
                namespace: namespace.clone(),
            }
        }

        /// Makes this process one of them. None: here it cannot be.
        pub(in super::super) fn join(&self) -> Option<Sleeper> {
            match fs::create_dir(&self.dir) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return None,
                _ => self.sweep(),
            }
            let name = format!("{:016x}", fastrand::u64(..));
            let socket = UnixDatagram::bind(self.dir.join(&name)).ok()?;
            Some(Sleeper {
                socket,
                name,
                all: self.clone(),
                asleep: Mutex::default(),
            })
        }

        /// Wakes as many sleepers of a queue as there are jobs.
        pub(in super::super) fn wake(&self, queue: &QueueName, jobs: usize) {
            let Ok(entries) = fs::read_dir(&self.dir) else {
                return;
            };
            let (mark, mut left) = (self.mark(queue), jobs);
            for entry in entries.flatten() {
                let file = entry.file_name();
                let Some(name) = file.to_str().and_then(|file| file.strip_prefix(&mark)) else {
                    continue;
                };
                // Who takes the file away is the one who wakes it.
                if fs::remove_file(entry.path()).is_ok() && is_woken(&self.dir.join(name)) {
                    left -= 1;
                }
                if left == 0 {
                    return;
                }
            }
        }

        /// What the files of a queue's sleepers begin with. Two queues that share it cost a look.
        fn mark(&self, queue: &QueueName) -> String {
            let mut hasher = DefaultHasher::new();
            (self.namespace.as_str(), queue.as_str()).hash(&mut hasher);
            format!("{:016x}-", hasher.finish())
        }

        /// Takes away the sockets of the dead.
        fn sweep(&self) {
            let Ok(entries) = fs::read_dir(&self.dir) else {
                return;
            };
            for path in entries.flatten().map(|entry| entry.path()) {
                let is_socket =
                    fs::symlink_metadata(&path).is_ok_and(|file| file.file_type().is_socket());
                let probe = UnixDatagram::unbound().and_then(|probe| probe.connect(&path));
                if is_socket && probe.is_err_and(|error| is_dead(&error)) {
                    let _ = fs::remove_file(path);
                }
            }
        }
    }

    impl Sleeper {
        /// Waits to be woken, for at most this long. Whether it was.
        pub(in super::super) fn wait(&self, limit: Duration) -> bool {
            let waits = self.socket.set_read_timeout(Some(limit));
            waits.is_ok() && self.socket.recv(&mut [0]).is_ok()
        }

        /// Somebody sleeps on these queues, until the answer is dropped.
        pub(in super::super) fn sleep(&self, queues: &[QueueName]) -> Asleep<'_> {
            let all = &self.all;
            let few = queues.iter().filter(|_| queues.len() <= QUEUES);
            let asleep = Asleep {
                sleeper: self,
                files: few
                    .map(|queue| all.dir.join(all.mark(queue) + &self.name))
                    .collect(),
            };
            let mut counts = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
            for file in &asleep.files {
                *counts.entry(file.clone()).or_default() += 1;
            }
            drop(counts);
            asleep.again();
            asleep
        }

        /// Nobody here wants to be woken any more.
        pub(in super::super) fn remove(&self) {
            // What stays is swept by the next, and a directory that others use is not empty.
            let _ = fs::remove_file(self.all.dir.join(&self.name));
            let _ = fs::remove_dir(&self.all.dir);
        }
    }

    /// Somebody who sleeps, and wants to be woken.
    #[derive(Debug)]
    pub(in super::super) struct Asleep<'a> {
        sleeper: &'a Sleeper,
        files: Vec<PathBuf>,
    }

    impl Asleep<'_> {
        /// To be called after a wake-up that was not for this one: who gives it takes the file.
        pub(in super::super) fn again(&self) {
            for file in &self.files {
                // Without it, this one has to ask.
                let _ = File::create(file);
            }
        }
    }

    impl Drop for Asleep<'_> {
        fn drop(&mut self) {
            let counts = &self.sleeper.asleep;
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            for file in &self.files {
                let left = counts.get_mut(file).map(|count| {
                    *count -= 1;
                    *count
                });
                if left == Some(0) {
                    counts.remove(file);
                    // Usually the process that woke it has removed it.
                    let _ = fs::remove_file(file);
                }
            }
        }
    }

    fn is_woken(socket: &Path) -> bool {
        let sender = UnixDatagram::unbound().and_then(|sender| {
            sender.set_nonblocking(true)?;
            sender.send_to(&[1], socket)
        });
        match sender {
            Err(error) if is_dead(&error) => {
                // Its process is dead.
                let _ = fs::remove_file(socket);
                false
            }
            // Its buffer is full of wake-ups that it has yet to read.
            Err(error) => error.kind() == ErrorKind::WouldBlock,
            Ok(_) => true,
        }
    }

    /// Whether the socket has no listener any more.
    fn is_dead(error: &std::io::Error) -> bool {
        error.kind() == ErrorKind::ConnectionRefused
    }
}

#[cfg(not(unix))]
mod system {
    use std::path::Path;
    use std::time::Duration;

    use crate::job::{Namespace, QueueName};

    /// No process can wake another here.
    #[derive(Clone, Debug)]
    pub(in super::super) struct Sleepers;

    #[derive(Debug)]
    pub(in super::super) enum Sleeper {}

    #[derive(Debug)]
    pub(in super::super) enum Asleep {}

    impl Sleepers {
        pub(in super::super) fn of(_: &Path, _: &Namespace) -> Self {
            Self
        }

        pub(in super::super) fn join(&self) -> Option<Sleeper> {
            None
        }

        pub(in super::super) fn wake(&self, _: &QueueName, _: usize) {}
    }

    impl Sleeper {
        pub(in super::super) fn wait(&self, _: Duration) -> bool {
            match *self {}
        }

        pub(in super::super) fn sleep(&self, _: &[QueueName]) -> Asleep {
            match *self {}
        }

        pub(in super::super) fn remove(&self) {
            match *self {}
        }
    }

    impl Asleep {
        pub(in super::super) fn again(&self) {
            match *self {}
        }
    }
}

pub(super) use system::{Sleeper, Sleepers};
