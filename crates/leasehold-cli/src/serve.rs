//! `leasehold serve`: the dashboard and `/metrics` of a store.

use std::net::SocketAddr;

use super::{Done, Trouble, out};
use leasehold_web::Dashboard;
use leasehold_web::prometheus::Exporter;

/// Serves the dashboard of a store, and its ledger at /metrics, until interrupted. /healthz and
/// /readyz (does the store answer?) are for supervisors.
///
/// Read-only unless --allow-actions. Without authentication it listens on loopback addresses only.
/// It speaks plain HTTP: for others than this machine, put a proxy with TLS before it.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The store; as --url
    #[arg(value_name = "URL")]
    store: Option<String>,

    /// Where to listen; port 0 picks a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,

    /// The path under which everything is found
    #[arg(long, value_name = "PATH", default_value = "/")]
    prefix: String,

    /// Allow force-release, retry, purge, cancel, pause and resume
    #[arg(long)]
    allow_actions: bool,

    /// The environment variable with a token: for `Authorization: Bearer`, or as the password of
    /// any user
    #[arg(long, value_name = "NAME", conflicts_with = "auth_basic_env")]
    auth_token_env: Option<String>,

    /// The environment variable with USER:PASSWORD
    #[arg(long, value_name = "NAME")]
    auth_basic_env: Option<String>,

    /// Show no payloads, checkpoints, results or headers
    #[arg(long)]
    hide_payloads: bool,
}

impl Args {
    /// The URL, if it is given here.
    pub(super) fn store(&self) -> Option<&str> {
        self.store.as_deref()
    }
}

pub(super) async fn run(args: &Args, url: &str) -> Done {
    super::must_exist(url)?;
    let client = super::open(url).await?;
    let mut dashboard = Dashboard::new(client).metrics(Exporter::install()?);
    if args.allow_actions {
        dashboard = dashboard.allow_actions();
    }
    if args.hide_payloads {
        dashboard = dashboard.hide_payloads();
    }
    if let Some(name) = &args.auth_token_env {
        dashboard = dashboard.token(secret(name)?);
    }
    if let Some(name) = &args.auth_basic_env {
        let pair = secret(name)?;
        let (user, password) = pair
            .split_once(':')
            .filter(|(user, password)| !user.is_empty() && !password.is_empty())
            .ok_or_else(|| Trouble::Usage(format!("{name} must hold USER:PASSWORD")))?;
        dashboard = dashboard.basic(user, password);
    }
    let prefix = args.prefix.trim_matches('/').to_owned();
    let ready = |address: SocketAddr| {
        out::note(&format!("dashboard at http://{address}/{prefix}"));
    };
    dashboard
        .serve(
            args.listen,
            &args.prefix,
            ready,
            leasehold::hooks::shutdown_signal(),
        )
        .await?;
    Ok(())
}

/// A secret from the environment: arguments can be read by everybody on the machine.
fn secret(name: &str) -> Result<String, Trouble> {
    match std::env::var(name) {
        Ok(secret) if !secret.trim().is_empty() => Ok(secret.trim().to_owned()),
        _ => Err(Trouble::Usage(format!(
            "the environment variable {name} holds no secret"
        ))),
    }
}
