//! The servers that a queue can be on, and what can be done to them.

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold::store::PostgresStore;

use crate::postgres_server::{self, Server};
use crate::support::proxy::Proxy;
use crate::support::proxy::Speech;
use crate::support::redis::{AOF, Standalone};

#[derive(Clone, Copy)]
pub(crate) enum Engine {
    Redis,
    Postgres,
}

/// A place for a queue: a server of its own, or a share of one that is left in peace.
pub(crate) enum Host {
    Redis(Standalone),
    Postgres {
        /// None: the one that all share.
        server: Option<Server>,
        namespace: String,
    },
}

impl Engine {
    /// For those who do the server no harm.
    pub(crate) fn share(self) -> Host {
        tokio::task::block_in_place(|| match self {
            Self::Redis => Host::Redis(Standalone::start(&[])),
            Self::Postgres => Host::postgres(None),
        })
    }

    /// A server of its own.
    pub(crate) fn own(self) -> Host {
        match self {
            Self::Redis => self.share(),
            Self::Postgres => Self::tuned(&["fsync=off"]),
        }
    }

    /// A server of its own that has on disk what it has answered.
    pub(crate) fn durable(self) -> Host {
        match self {
            Self::Redis => Host::Redis(tokio::task::block_in_place(|| Standalone::start(AOF))),
            Self::Postgres => Self::tuned(&[]),
        }
    }

    /// A server of its own that answers first, and writes later.
    pub(crate) fn forgetful(self) -> Host {
        match self {
            Self::Redis => self.share(),
            Self::Postgres => Self::tuned(&["synchronous_commit=off", "wal_writer_delay=10s"]),
        }
    }

    fn tuned(settings: &[&str]) -> Host {
        Host::postgres(Some(tokio::task::block_in_place(|| {
            Server::start(settings)
        })))
    }
}

impl Host {
    fn postgres(server: Option<Server>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let namespace = format!("case-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Self::Postgres { server, namespace }
    }

    pub(crate) fn url(&self) -> String {
        self.url_by(self.port())
    }

    /// The way to it by a proxy.
    pub(crate) fn url_by(&self, port: u16) -> String {
        match self {
            Self::Redis(_) => format!("redis://127.0.0.1:{port}"),
            Self::Postgres { namespace, .. } => format!(
                "postgres://postgres@127.0.0.1:{port}/postgres?sslmode=disable&namespace={namespace}"
            ),
        }
    }

    fn port(&self) -> u16 {
        match self {
            Self::Redis(server) => server.server.port(),
            Self::Postgres { .. } => self.server().port(),
        }
    }

    pub(crate) fn server(&self) -> &Server {
        match self {
            Self::Redis(_) => unreachable!("nobody asks Redis"),
            Self::Postgres { server, .. } => {
                server.as_ref().unwrap_or_else(|| postgres_server::shared())
            }
        }
    }

    pub(crate) async fn proxy(&self) -> Proxy {
        match self {
            Self::Redis(_) => Proxy::start(self.port()).await,
            Self::Postgres { .. } => Proxy::speaking(Speech::Postgres, self.port()).await,
        }
    }

    /// The tables are there, and on disk: what a crash takes is what comes after.
    pub(crate) async fn keeps_its_tables(&self) {
        if let Self::Postgres { .. } = self {
            let url = format!("{}&migrate=true", self.url());
            PostgresStore::open(&url).await.unwrap();
            let db = self.server().client().await;
            db.batch_execute("CHECKPOINT").await.unwrap();
        }
    }

    /// `kill -9` of the server, and a new start.
    pub(crate) fn crash(&mut self) {
        tokio::task::block_in_place(|| match self {
            Self::Redis(server) => server.server.restart(),
            Self::Postgres { server, .. } => {
                let server = server.as_mut().expect("a server of its own");
                server.kill();
                server.launch();
            }
        });
    }

    /// `kill -9` of the server.
    pub(crate) fn kill(&mut self) {
        tokio::task::block_in_place(|| match self {
            Self::Redis(server) => server.server.kill(),
            Self::Postgres { server, .. } => server.as_mut().expect("a server of its own").kill(),
        });
    }

    /// SIGSTOP.
    pub(crate) fn pause(&self) {
        tokio::task::block_in_place(|| match self {
            Self::Redis(server) => server.server.pause(),
            Self::Postgres { server, .. } => {
                let server = server.as_ref().expect("a server of its own");
                server.pause();
            }
        });
    }

    /// SIGCONT.
    pub(crate) fn resume(&self) {
        match self {
            Self::Redis(server) => server.server.resume(),
            Self::Postgres { .. } => self.server().resume(),
        }
    }
}
