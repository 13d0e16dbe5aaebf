//! Workers: who holds leases, as far as the leases tell.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::App;
use super::html::{Html, html, put, query};
use super::leases::{LeaseHealth, share};
use super::page::{Asked, Shown, Trouble};
use super::words::{ago, count, grouped, now, percent, short};
use leasehold::Result;
use leasehold::clock::Timestamp;
use leasehold::inspect::{self, LeaseFilter, Page};
use leasehold::limits;

/// Leases that are looked at.
const LOOKED_AT: usize = 10_000;
/// Workers on the page.
const SHOWN: usize = 200;

#[derive(Debug)]
pub(super) struct Fleet {
    workers: Vec<Worker>,
    looked_at: u64,
    more: bool,
}

/// One owner, serving one task.
#[derive(Debug)]
struct Worker {
    owner: Arc<str>,
    task: Arc<str>,
    leases: u64,
    queues: BTreeSet<String>,
    worst: LeaseHealth,
    least: f64,
    silence: Duration,
    since: Timestamp,
    renewals: u64,
}

async fn fleet(app: &App) -> Result<Fleet> {
    let store = &**app.client.store();
    let mut workers: BTreeMap<(Arc<str>, Arc<str>), Worker> = BTreeMap::new();
    let (mut looked_at, mut after) = (0, None);
    loop {
        let page = Page {
            after,
            rows: limits::PAGE_ROWS,
        };
        let leases = inspect::leases(store, LeaseFilter::default(), page).await?;
        looked_at += leases.rows.len();
        for lease in &leases.rows {
            // A renewal sets the time left to the term: what is gone of it is the silence since.
            let silence = lease.term.saturating_sub(lease.time_left);
            let key = (Arc::clone(&lease.owner), Arc::clone(&lease.task));
            let worker = workers.entry(key).or_insert_with(|| Worker {
                owner: Arc::clone(&lease.owner),
                task: Arc::clone(&lease.task),
                leases: 0,
                queues: BTreeSet::new(),
                worst: LeaseHealth::Well,
                least: 1.0,
                silence,
                since: lease.granted_at,
                renewals: 0,
            });
            worker.leases += 1;
            worker.queues.insert(lease.queue.to_string());
            if share(lease) < worker.least {
                worker.least = share(lease);
                worker.worst = LeaseHealth::of(lease);
            }
            worker.silence = worker.silence.min(silence);
            worker.since = worker.since.min(lease.granted_at);
            worker.renewals += u64::from(lease.renewals);
        }
        after = leases.next;
        if after.is_none() || looked_at >= LOOKED_AT {
            break;
        }
    }
    let mut workers: Vec<Worker> = workers.into_values().collect();
    workers.sort_by(|a, b| a.least.total_cmp(&b.least));
    Ok(Fleet {
        workers,
        looked_at: looked_at as u64,
        more: after.is_some(),
    })
}

pub(super) async fn show(asked: &Asked) -> std::result::Result<Shown, Trouble> {
    let app = &asked.app;
    let fleet = app.fleet.get(async || fleet(app).await).await?;
    if fleet.workers.is_empty() {
        let live = html!(
            r#"<div class="empty"><p>No worker holds a lease.</p><p>The store knows workers by their leases: an idle one is not seen here.</p></div>"#
        );
        return Ok(Shown::new("Workers", Html::new(), live));
    }
    let mut live = html!(
        r#"<p class="lead">{} {} {}; the one nearest to losing a lease is on top.</p>"#,
        count(fleet.workers.len() as u64, "worker"),
        if fleet.workers.len() == 1 {
            "holds"
        } else {
            "hold"
        },
        count(fleet.looked_at, "lease")
    );
    if fleet.more {
        put!(
            live,
            r#"<p class="note">From the {} leases that expire first.</p>"#,
            grouped(fleet.looked_at)
        );
    }
    put!(
        live,
        r#"<div class="scroll"><table class="rows"><thead><tr><th scope="col">Owner</th><th scope="col">Task</th><th scope="col">State</th><th scope="col" class="num">Leases</th><th scope="col">Queues</th><th scope="col" class="num">Last heard</th><th scope="col" class="num">Least margin</th><th scope="col">Oldest lease</th><th scope="col"><span class="sr">Actions</span></th></tr></thead><tbody>"#
    );
    for worker in fleet.workers.iter().take(SHOWN) {
        put!(live, "{}", row(asked, worker));
    }
    put!(live, "</tbody></table></div>");
    if fleet.workers.len() > SHOWN {
        put!(
            live,
            r#"<p class="note">The first {} of {}.</p>"#,
            SHOWN,
            fleet.workers.len()
        );
    }
    Ok(Shown::new("Workers", Html::new(), live))
}

fn row(asked: &Asked, worker: &Worker) -> Html {
    let state = match worker.worst {
        LeaseHealth::Well => ("s-released", "renewing"),
        LeaseHealth::Late => ("s-late", "late"),
        LeaseHealth::Silent => ("s-expired", "not heard from"),
    };
    let leases = format!(
        "/leases?owner={}&task={}",
        query(&worker.owner),
        query(&worker.task)
    );
    let queues: Vec<&str> = worker.queues.iter().take(4).map(String::as_str).collect();
    html!(
        r#"<tr data-key="{}/{}" class="{}"><th scope="row"><a href="{}">{}</a></th><td data-label="Task">{}</td><td data-label="State"><span class="chip {}">{}</span></td><td class="num" data-label="Leases">{}</td><td data-label="Queues">{}</td><td class="num" data-label="Last heard">{} ago</td><td class="num" data-label="Least margin">{}</td><td data-label="Oldest lease">{}</td><td class="acts">{}</td></tr>"#,
        worker.owner,
        worker.task,
        worker.worst.class(),
        asked.to(&leases),
        worker.owner,
        worker.task,
        state.0,
        state.1,
        grouped(worker.leases),
        queues.join(", "),
        short(worker.silence),
        percent(worker.least),
        ago(worker.since, now()),
        asked.action(
            "Release all",
            "danger",
            &[("do", "revoke"), ("owner", &worker.owner)]
        )
    )
}
