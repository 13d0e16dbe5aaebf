//! What the demo shows while it runs: headlines, and below them a live table of workers.
//!
//! On a terminal the table is redrawn in place. Elsewhere only the headlines are printed, with the
//! time, so that a log stays a log.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::Instant;

use super::demo_stage::{DemoSnapshot, WorkerState};
use super::out::{self, Paint};
use leasehold::hooks::monotonic;
use leasehold::inspect::LeaseView;
use leasehold::job::JobId;

pub(super) struct View {
    began: Instant,
    live: Option<Live>,
    paint: Paint,
}

struct Live {
    multi: MultiProgress,
    rows: Vec<ProgressBar>,
}

impl View {
    pub(super) fn new(workers: usize) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let live = terminal.then(|| {
            let multi = MultiProgress::new();
            let style = ProgressStyle::with_template("{msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            // A blank line, one for each worker, one for the queue.
            let rows = (0..workers + 2).map(|_| {
                let row = multi.add(ProgressBar::new(0));
                row.set_style(style.clone());
                row
            });
            Live {
                rows: rows.collect(),
                multi,
            }
        });
        Self {
            began: monotonic(),
            live,
            paint: Paint::new(terminal),
        }
    }

    pub(super) fn paint(&self) -> Paint {
        self.paint
    }

    /// A step of the story.
    pub(super) fn headline(&self, text: &str) {
        let at = format!("{:5.1} s", self.began.elapsed().as_secs_f64());
        self.print(&format!(
            "{}  {}",
            self.paint.dim(&at),
            self.paint.bold(text)
        ));
    }

    /// What follows from it.
    pub(super) fn detail(&self, text: &str) {
        self.print(&format!("         {text}"));
    }

    fn print(&self, line: &str) {
        // Nobody may be looking.
        let _ = match &self.live {
            Some(table) => table.multi.println(line),
            None => writeln!(std::io::stderr(), "{line}"),
        };
    }

    pub(super) fn draw(&self, seen: &DemoSnapshot, workers: &[WorkerState], term: Duration) {
        let Some(table) = &self.live else { return };
        for (number, state) in workers.iter().enumerate() {
            let line = self.row(number + 1, *state, seen, term);
            table.rows[number + 1].set_message(line);
        }
        let (counts, ledger) = (&seen.counts, &seen.ledger);
        let queue = format!(
            "  queue     {} ready   {} leased   {} completed   {} expired   {} refused",
            counts.ready,
            counts.leased,
            ledger.completed,
            ledger.expired(),
            ledger.fenced,
        );
        table.rows[workers.len() + 1].set_message(self.paint.dim(&queue));
    }

    fn row(
        &self,
        number: usize,
        state: WorkerState,
        seen: &DemoSnapshot,
        term: Duration,
    ) -> String {
        let word = match state {
            WorkerState::Working => self.paint.good("working"),
            WorkerState::Killed => self.paint.bad("killed "),
            WorkerState::Frozen => self.paint.cold("frozen "),
        };
        let leases: Vec<String> = seen
            .of(number)
            .map(|lease| self.lease(lease, term))
            .collect();
        let leases = if leases.is_empty() {
            self.paint.dim("no leases")
        } else {
            leases.join("   ")
        };
        format!("  worker {number}  {word}  {leases}")
    }

    /// A lease as its job and a bar of the time it has left.
    fn lease(&self, lease: &LeaseView, term: Duration) -> String {
        const CELLS: usize = 6;
        let share = lease.time_left.as_secs_f64() / term.as_secs_f64();
        let full = ((share * CELLS as f64).ceil() as usize).min(CELLS);
        let bar = format!("{}{}", "█".repeat(full), "·".repeat(CELLS - full));
        let bar = match share {
            share if share < 0.4 => self.paint.bad(&bar),
            _ => self.paint.good(&bar),
        };
        format!(
            "{} {bar} {:>6}",
            short_id(lease.job),
            out::short(lease.time_left)
        )
    }

    /// Takes the table away: what follows is the result.
    pub(super) fn close(&mut self) {
        if let Some(live) = self.live.take() {
            for row in &live.rows {
                row.finish_and_clear();
            }
            let _ = live.multi.clear();
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.close();
    }
}

/// The end of an id, which differs where its beginning is the time.
pub(super) fn short_id(id: JobId) -> String {
    let text = id.to_string();
    format!("…{}", &text[text.len() - 4..])
}
