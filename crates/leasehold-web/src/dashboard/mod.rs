//! The web dashboard: who holds what, until when, and why leases expire.
//!
//! A router for any axum application, under any prefix, or a server of its own. The pages are made
//! on the server and paged by it; a page that is open is kept current by server-sent events. It
//! needs no files besides the binary, and loads nothing from other sites.
//!
//! ```no_run
//! # async fn example(client: leasehold::Client) -> leasehold::Result<()> {
//! use leasehold_web::Dashboard;
//!
//! let dashboard = Dashboard::new(client).allow_actions();
//! let app = axum::Router::<()>::new().nest("/leases", dashboard.router());
//! # Ok(()) }
//! ```
//!
//! A page that is open does not hold up a graceful shutdown of your server: it asks again every
//! [`refresh`](Dashboard::refresh), and keeps no request open in between.
//!
//! **Safe unless told otherwise.** It is read-only without
//! [`allow_actions`](Dashboard::allow_actions). [`serve`](Dashboard::serve) binds loopback
//! addresses only, unless there is authentication, and without it answers to loopback names only.
//! Commands from other sites are refused, nothing in a page runs but our own script, and every
//! name, payload and error is escaped. Inside your own application, its server decides who reaches
//! the router: give the router a [`token`](Dashboard::token), or protect its prefix.
//!
//! | file | what is there |
//! |---|---|
//! | `guard` | who may ask for what |
//! | `page`, `live` | a screen as a page, and as a stream of its changes |
//! | `watch` | the last hour, sampled |
//! | `overview`, `leases`, `queues`, `jobs`, `job`, `dead`, `workers`, `expiry`, `audit` | the screens |
//! | `probe` | `/healthz` and `/readyz`, for supervisors |
//! | `act` | what an operator can do |
//! | `scale` | `/api/scale`: what waits, as JSON for autoscalers |
//! | `html`, `words`, `chart` | escaping, numbers, pictures |

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use tokio::sync::Semaphore;

use crate::prometheus::Exporter;
use crate::server;
use leasehold::Client;
use leasehold::Result;

mod act;
mod assets;
mod audit;
mod chart;
mod dead;
mod expiry;
mod guard;
mod html;
mod job;
mod jobs;
mod leases;
mod live;
mod overview;
mod page;
mod probe;
mod queues;
mod scale;
mod watch;
mod words;
mod workers;

use guard::Auth;
use page::Screen;
use watch::{Cached, Watch};

/// Pages that can be kept current at a time.
const STREAMS: usize = 64;
/// Bytes in a form.
const FORM_BYTES: usize = 16 * 1024;

/// Describes a dashboard. Clones describe the same one.
#[derive(Clone)]
pub struct Dashboard {
    client: Client,
    auth: Auth,
    actions: bool,
    hide_payloads: bool,
    refresh: Duration,
    own_hosts_only: bool,
    exporter: Option<Exporter>,
}

impl Dashboard {
    /// A read-only dashboard of a client's store.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            auth: Auth::Open,
            actions: false,
            hide_payloads: false,
            refresh: Duration::from_secs(2),
            own_hosts_only: false,
            exporter: None,
        }
    }

    /// Only for those who have this token: as `Authorization: Bearer`, or in a browser as the
    /// password of any user name. The name goes on record with that user's commands.
    #[must_use]
    pub fn token(mut self, token: impl AsRef<str>) -> Self {
        self.auth = Auth::Token(token.as_ref().into());
        self
    }

    /// Only for one user with a password.
    #[must_use]
    pub fn basic(mut self, user: impl AsRef<str>, password: impl AsRef<str>) -> Self {
        self.auth = Auth::Basic {
            user: user.as_ref().into(),
            password: password.as_ref().into(),
        };
        self
    }

    /// Lets those who may look also act: force-release, retry, purge, cancel, pause, resume.
    #[must_use]
    pub fn allow_actions(mut self) -> Self {
        self.actions = true;
        self
    }

    /// Shows no payload, checkpoint, result or header of a job.
    #[must_use]
    pub fn hide_payloads(mut self) -> Self {
        self.hide_payloads = true;
        self
    }

    /// How often the store is asked while somebody looks, and for the history. 2 s unless changed;
    /// at least 0.1 s.
    #[must_use]
    pub fn refresh(mut self, every: Duration) -> Self {
        self.refresh = every.max(Duration::from_millis(100));
        self
    }

    /// Serves this exporter's scrape at `/metrics`. If it is the process's own, the screens also
    /// show what the workers of this process measure.
    #[must_use]
    pub fn metrics(mut self, exporter: Exporter) -> Self {
        self.exporter = Some(exporter);
        self
    }

    /// The dashboard as a router, to be nested under any prefix.
    ///
    /// Inside a tokio runtime its history begins now, otherwise with the first request.
    pub fn router(&self) -> Router {
        let app = Arc::new(App {
            client: self.client.clone(),
            auth: self.auth.clone(),
            actions: self.actions,
            hide_payloads: self.hide_payloads,
            refresh: self.refresh,
            own_hosts_only: self.own_hosts_only,
            exporter: self.exporter.clone(),
            watch: Watch::new(self.refresh),
            streams: Arc::new(Semaphore::new(STREAMS)),
            fleet: Cached::new(self.refresh * 2),
            dead: Cached::new(self.refresh * 2),
            study: Cached::new(self.refresh * 5),
            parked: Cached::new(self.refresh * 5),
        });
        app.start();
        let screen = |screen: Screen| get(move |asked: page::Asked| page::page(screen, asked));
        let router = Router::new()
            .route("/", screen(Screen::Overview))
            .route("/leases", screen(Screen::Leases))
            .route("/queues", screen(Screen::Queues))
            .route("/jobs", screen(Screen::Jobs))
            .route("/jobs/{id}", screen(Screen::Job))
            .route("/dead", screen(Screen::Dead))
            .route("/workers", screen(Screen::Workers))
            .route("/expiry", screen(Screen::Expiry))
            .route("/audit", screen(Screen::Audit))
            .route("/confirm", get(act::confirm))
            .route("/act", post(act::act))
            .route("/assets/{name}", get(assets::asset));
        let router = router
            .route("/metrics", get(page::metrics))
            .route("/api/scale", get(scale::scale));
        router
            .fallback(page::missing)
            .layer(DefaultBodyLimit::max(FORM_BYTES))
            .layer(axum::middleware::from_fn_with_state(
                Arc::clone(&app),
                guard::guard,
            ))
            // A supervisor has no password, and learns nothing from them.
            .route("/healthz", get(probe::alive))
            .route("/readyz", get(probe::ready))
            .with_state(app)
    }

    /// Serves the dashboard under `prefix` (`/` for none) until `until` is done. Calls `ready` with
    /// the address once it listens.
    ///
    /// # Errors
    /// `InvalidInput` for an address that others can reach, without authentication, and for a
    /// prefix that is no path. `Unavailable` if the address cannot be bound.
    pub async fn serve(
        mut self,
        address: SocketAddr,
        prefix: &str,
        ready: impl FnOnce(SocketAddr),
        until: impl Future<Output = ()>,
    ) -> Result<()> {
        let guarded = self.auth != Auth::Open;
        self.own_hosts_only = !guarded;
        let router = page::under(prefix, self.router())?;
        let listener = server::bind(address, guarded).await?;
        ready(listener.local_addr().unwrap_or(address));
        server::serve(listener, router, until).await;
        Ok(())
    }
}

impl fmt::Debug for Dashboard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dashboard")
            .field("client", &self.client)
            .field("auth", &self.auth)
            .field("actions", &self.actions)
            .finish_non_exhaustive()
    }
}

/// A dashboard at work.
struct App {
    client: Client,
    auth: Auth,
    actions: bool,
    hide_payloads: bool,
    refresh: Duration,
    own_hosts_only: bool,
    exporter: Option<Exporter>,
    watch: Watch,
    streams: Arc<Semaphore>,
    fleet: Cached<workers::Fleet>,
    dead: Cached<dead::Groups>,
    study: Cached<expiry::Study>,
    parked: Cached<queues::Parked>,
}

impl App {
    /// Starts the history, if there is a runtime and it has not been started.
    fn start(self: &Arc<Self>) {
        if tokio::runtime::Handle::try_current().is_ok() && self.watch.begin() {
            // Ends with the router: nobody else holds the app.
            tokio::spawn(watch::run(Arc::downgrade(self)));
        }
    }
}
