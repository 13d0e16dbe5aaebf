//! Where the Redis store's state is: a namespace of the test's own server, one for each world.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use leasehold::Store;
use leasehold::job::Namespace;
use leasehold::store::{RedisOptions, RedisStore};
use redis::Connection;

use crate::apart::Apart;
use crate::net::StoreClock;
use crate::redis_server::Standalone;

static SERVER: OnceLock<Standalone> = OnceLock::new();
static WORLDS: AtomicU64 = AtomicU64::new(0);

fn shared() -> &'static Standalone {
    SERVER.get_or_init(|| Standalone::start(&[]))
}

pub(crate) struct Server {
    namespace: String,
    seed: u64,
    /// Every key of the world, and what the server writes of it.
    kept: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl Server {
    pub(crate) fn new(seed: u64) -> Self {
        // Starts the server, if nobody has yet: that throws dice, and the world's come after.
        shared();
        Self {
            namespace: format!("world-{}", WORLDS.fetch_add(1, Ordering::Relaxed)),
            seed,
            kept: Mutex::default(),
        }
    }

    pub(crate) fn open(&self, clock: &StoreClock) -> Arc<dyn Store> {
        let namespace = Namespace::new(&self.namespace).expect("a good name");
        let options = RedisOptions::new(shared().url())
            .namespace(namespace)
            .clock(clock.clone());
        Arc::new(Apart::open(self.seed, async move {
            Arc::new(RedisStore::open(options).expect("a store")) as Arc<dyn Store>
        }))
    }

    /// A copy of all keys, as a snapshot has it.
    pub(crate) fn keep(&self) {
        let mut db = connection();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.clear();
        for key in self.keys(&mut db) {
            let dump = redis::cmd("DUMP").arg(&key).query(&mut db);
            kept.insert(key, dump.expect("a dump"));
        }
    }

    /// The store has stopped: all keys are as they were when a copy was kept.
    pub(crate) fn roll_back(&self) {
        let mut db = connection();
        self.delete(&mut db);
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, dump) in &*kept {
            let mut restore = redis::cmd("RESTORE");
            restore.arg(key).arg(0).arg(dump);
            restore.exec(&mut db).expect("it is put back");
        }
    }

    fn keys(&self, db: &mut Connection) -> Vec<Vec<u8>> {
        let mut keys = Vec::new();
        for pattern in ["{NS}:*", "{NS:*"] {
            let pattern = pattern.replace("NS", &self.namespace);
            let found = redis::cmd("KEYS").arg(pattern).query::<Vec<_>>(db);
            keys.extend(found.expect("its keys"));
        }
        keys
    }

    fn delete(&self, db: &mut Connection) {
        for key in self.keys(db) {
            redis::cmd("DEL").arg(key).exec(db).expect("it is gone");
        }
    }
}

fn connection() -> Connection {
    shared().server.connection().expect("the server answers")
}

impl Drop for Server {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.delete(&mut connection());
        }
    }
}
