//! Audit: every command on record, newest first.

use super::html::{Html, html, put};
use super::page::{Asked, Shown, Trouble, given};
use super::words::{ago, clip, grouped, now};
use leasehold::inspect::{self, Page};

const ROWS: usize = 50;

pub(super) async fn show(asked: &Asked) -> Result<Shown, Trouble> {
    let page = Page {
        after: given(asked.params.after.as_ref()).map(str::to_owned),
        rows: ROWS,
    };
    let audit = inspect::audit(&**asked.app.client.store(), page).await?;
    if audit.rows.is_empty() {
        let live = html!(
            r#"<div class="empty"><p>Nothing on record.</p><p>Every pause, cancel, force-release, retry and purge is, with who and why.</p></div>"#
        );
        return Ok(Shown::new("Audit", Html::new(), live));
    }
    let mut live = html!(
        r#"<div class="scroll"><table class="rows"><caption>Newest first</caption><thead><tr><th scope="col">When</th><th scope="col">Who</th><th scope="col">What</th><th scope="col">Why</th><th scope="col" class="num">Changed</th><th scope="col">Tokens of ended leases</th></tr></thead><tbody>"#
    );
    for record in &audit.rows {
        let tokens: Vec<String> = record
            .tokens
            .iter()
            .take(4)
            .map(ToString::to_string)
            .collect();
        let more = record.tokens.len().saturating_sub(tokens.len());
        put!(
            live,
            r#"<tr><td data-label="When">{}</td><td data-label="Who"><b>{}</b></td><td class="wide" data-label="What">{}</td><td class="why wide" data-label="Why">{}</td><td class="num" data-label="Changed">{}</td><td class="mono" data-label="Tokens of ended leases">{}{}</td></tr>"#,
            ago(record.at, now()),
            record.actor,
            record.command,
            clip(&record.reason, 400),
            grouped(record.done),
            tokens.join(" "),
            if more > 0 {
                format!(" and {more} more")
            } else {
                String::new()
            }
        );
    }
    put!(
        live,
        "</tbody></table></div>{}",
        asked.pager(audit.next.as_ref(), audit.rows.len(), None)
    );
    Ok(Shown::new("Audit", Html::new(), live))
}
