//! The picture of `leasehold top`: what is known, and how it is drawn. No I/O.

use std::collections::VecDeque;
use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, Table};
use tokio::time::Instant;

use super::{out, stats};
use leasehold::inspect::{LATE, LeaseView, Ledger, QueueView, SILENT};

/// What the store said, and when it was asked.
pub(super) struct Snapshot {
    pub(super) at: Instant,
    pub(super) queues: Vec<QueueView>,
    /// By deadline; the first page.
    pub(super) leases: Vec<LeaseView>,
    pub(super) more: bool,
}

impl Snapshot {
    fn ledger(&self) -> Ledger {
        let ledgers = self.queues.iter().map(|view| &view.ledger);
        ledgers.fold(Ledger::default(), |sum, ledger| sum.plus(ledger))
    }
}

/// How far back the rates look.
const WINDOW: Duration = Duration::from_secs(60);

/// Everything that is shown.
pub(super) struct Top {
    store: &'static str,
    now: Snapshot,
    /// The ledger at each look of the last minute.
    past: VecDeque<(Instant, Ledger)>,
    error: Option<String>,
    scrolled: usize,
    held: bool,
}

const KEYS: &str = "q quit   space hold   ↑ ↓ PgUp PgDn Home move";

impl Top {
    pub(super) fn new(store: &'static str, first: Snapshot) -> Self {
        let mut top = Self {
            store,
            past: VecDeque::new(),
            now: first,
            error: None,
            scrolled: 0,
            held: false,
        };
        top.remember();
        top
    }

    fn remember(&mut self) {
        self.past.push_back((self.now.at, self.now.ledger()));
        while self.past.len() > 2 && self.now.at - self.past[0].0 > WINDOW {
            self.past.pop_front();
        }
    }

    /// Takes in what the store said.
    pub(super) fn see(&mut self, snapshot: Snapshot) {
        self.error = None;
        if self.held {
            return;
        }
        self.now = snapshot;
        self.scrolled = self.scrolled.min(self.now.leases.len().saturating_sub(1));
        self.remember();
    }

    /// The store did not answer: what is shown grows old.
    pub(super) fn fail(&mut self, error: &str) {
        self.error = Some(error.to_owned());
    }

    /// Holds the picture, or lets it go.
    pub(super) fn hold(&mut self) {
        self.held = !self.held;
    }

    /// Moves through the leases.
    pub(super) fn scroll(&mut self, by: isize) {
        let last = self.now.leases.len().saturating_sub(1);
        self.scrolled = self.scrolled.saturating_add_signed(by).min(last);
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>, now: Instant) {
        // Held, the time left stands still too.
        let age = if self.held {
            Duration::ZERO
        } else {
            now - self.now.at
        };
        let queues = (self.now.queues.len() + 1).clamp(2, 7) as u16;
        let [title, ratio, _, lines, _, leases, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Length(queues),
            Constraint::Length(1),
            Constraint::Min(2),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        self.draw_title(frame, title);
        self.draw_ratio(frame, ratio);
        self.draw_queues(frame, lines);
        self.draw_leases(frame, leases, age);
        self.draw_foot(frame, foot, now);
    }

    fn draw_title(&self, frame: &mut Frame<'_>, area: Rect) {
        let ledger = self.now.ledger();
        let [released, failed, expired] =
            [Ledger::released, Ledger::failed, Ledger::expired].map(|of| self.rate(of));
        let line = Line::from(vec![
            Span::from("leasehold top").bold(),
            Span::from(format!("  {}  live {}  ", self.store, ledger.live)),
            Span::from(format!("released {released:.1}/s ")).green(),
            Span::from(format!(" failed {failed:.1}/s ")).magenta(),
            Span::from(format!(" expired {expired:.1}/s ")).red(),
            Span::from(format!(" fenced {}", ledger.fenced)),
        ]);
        frame.render_widget(line, area);
    }

    /// Per second, over the last minute.
    fn rate(&self, of: fn(&Ledger) -> u64) -> f64 {
        let (Some(first), Some(last)) = (self.past.front(), self.past.back()) else {
            return 0.0;
        };
        let seconds = (last.0 - first.0).as_secs_f64();
        if seconds <= 0.0 {
            return 0.0;
        }
        of(&last.1).saturating_sub(of(&first.1)) as f64 / seconds
    }

    /// The shares in figures, and as a bar in which one failure or expiry is never too small to be
    /// seen.
    fn draw_ratio(&self, frame: &mut Frame<'_>, area: Rect) {
        let ledger = self.now.ledger();
        let figures = format!(
            "failed {}  released : expired  {}  ",
            stats::failed(&ledger),
            stats::ratio(&ledger)
        );
        let room = usize::from(area.width).saturating_sub(figures.chars().count());
        let all = ledger.released() + ledger.expired();
        let cells = |count: u64| (room as f64 * count as f64 / all.max(1) as f64).ceil() as usize;
        let red = cells(ledger.expired()).min(room);
        let magenta = cells(ledger.failed()).min(room - red);
        let green = if all == 0 { 0 } else { room - red - magenta };
        let line = Line::from(vec![
            Span::from(figures).bold(),
            Span::from("█".repeat(green)).green(),
            Span::from("▓".repeat(magenta)).magenta(),
            Span::from("▒".repeat(red)).red(),
        ]);
        frame.render_widget(line, area);
    }

    fn draw_queues(&self, frame: &mut Frame<'_>, area: Rect) {
        let header = [
            "queue", "ready", "leased", "sched.", "dead", "oldest", "failed", "ratio",
        ];
        let rows = self.now.queues.iter().map(|view| {
            let counts = &view.counts;
            let paused = if view.paused { " (paused)" } else { "" };
            let dead = Cell::from(counts.dead.to_string());
            let failed = Cell::from(stats::failed(&view.ledger));
            Row::new([
                Cell::from(format!("{}{paused}", view.queue)),
                Cell::from(counts.ready.to_string()),
                Cell::from(counts.leased.to_string()),
                Cell::from(counts.scheduled.to_string()),
                if counts.dead > 0 { dead.red() } else { dead },
                Cell::from(view.oldest_ready.map_or("-".to_owned(), out::short)),
                match view.ledger.failed() {
                    0 => failed,
                    _ => failed.magenta(),
                },
                Cell::from(stats::ratio(&view.ledger)),
            ])
        });
        let widths = [
            Constraint::Fill(1),
            Constraint::Length(9),
            Constraint::Length(7),
            Constraint::Length(7),
            Constraint::Length(6),
            Constraint::Length(7),
            Constraint::Length(7),
            Constraint::Length(12),
        ];
        let table = Table::new(rows, widths).header(Row::new(header).bold());
        frame.render_widget(table, area);
    }

    fn draw_leases(&self, frame: &mut Frame<'_>, area: Rect, age: Duration) {
        // What is needed to act comes first; a wide terminal shows the rest.
        let columns: &[(&str, Constraint)] = &[
            ("time left", Constraint::Length(9)),
            ("job", Constraint::Length(36)),
            ("kind", Constraint::Fill(2)),
            ("owner", Constraint::Fill(3)),
            ("task", Constraint::Fill(2)),
            ("attempt", Constraint::Length(7)),
            ("renewals", Constraint::Length(8)),
            ("token", Constraint::Length(16)),
        ];
        let shown = match area.width {
            ..100 => 4,
            100..130 => 6,
            _ => columns.len(),
        };
        let columns = &columns[..shown];
        let rows = self.now.leases.iter().skip(self.scrolled).map(|lease| {
            let left = lease.time_left.saturating_sub(age);
            let cells = [
                Cell::from(time_left(left)).style(urgency(left, lease.term)),
                Cell::from(lease.job.to_string()),
                Cell::from(out::one_line(lease.kind.as_str())),
                Cell::from(out::one_line(&lease.owner)),
                Cell::from(out::one_line(&lease.task)),
                Cell::from(lease.attempt.to_string()),
                Cell::from(lease.renewals.to_string()),
                Cell::from(lease.token.to_string()),
            ];
            Row::new(cells.into_iter().take(shown))
        });
        let header = Row::new(columns.iter().map(|(name, _)| *name)).bold();
        let table = Table::new(rows, columns.iter().map(|(_, width)| *width)).header(header);
        frame.render_widget(table, area);
    }

    fn draw_foot(&self, frame: &mut Frame<'_>, area: Rect, now: Instant) {
        if let Some(error) = &self.error {
            let old = out::short(now - self.now.at);
            frame.render_widget(Line::from(format!("{old} old: {error}")).red(), area);
            return;
        }
        let held = if self.held { "   HELD" } else { "" };
        let (first, leases) = (self.scrolled + 1, self.now.leases.len());
        let more = if self.now.more { " and more" } else { "" };
        let place = match leases {
            0 => "no leases".to_owned(),
            _ => format!("lease {first} of {leases}{more}"),
        };
        frame.render_widget(Line::from(format!("{KEYS}   {place}{held}")).dim(), area);
    }
}

fn time_left(left: Duration) -> String {
    match left.as_secs() {
        _ if left.is_zero() => "overdue".to_owned(),
        ..10 => format!("{:.1} s", left.as_secs_f64()),
        seconds @ ..120 => format!("{seconds} s"),
        _ => out::short(left),
    }
}

/// The same as on the dashboard.
fn urgency(left: Duration, term: Duration) -> Style {
    match left.as_secs_f64() / term.as_secs_f64().max(1e-6) {
        share if share < SILENT => Style::new().red().bold(),
        share if share < LATE => Style::new().yellow(),
        _ => Style::new().green(),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::style::Color;

    use super::*;
    use leasehold::clock::Timestamp;
    use leasehold::hooks::monotonic;
    use leasehold::job::{JobId, JobRecord, Kind, NewJob, QueueName};
    use leasehold::lease::FencingToken;

    fn lease(owner: &str, left: u64) -> LeaseView {
        let queue = QueueName::default();
        let new = NewJob::raw(queue.clone(), Kind::new("mail").unwrap(), vec![]);
        let mut job = JobRecord::new(JobId::from_bytes([7; 16]), new, Timestamp::ZERO);
        job.failures = 1;
        let token = FencingToken::new(1_800_000_000_000_000);
        let mut lease = LeaseView::new(queue, &job, token, owner.into(), "deploy-7".into());
        lease.time_left = Duration::from_secs(left);
        lease.term = Duration::from_secs(60);
        lease.renewals = 3;
        lease
    }

    fn snapshot(at: Instant, completed: u64, expired: u64) -> Snapshot {
        let mut queue = QueueView::new(QueueName::default());
        queue.paused = true;
        queue.counts.ready = 1_234;
        queue.counts.leased = 2;
        queue.counts.dead = 5;
        queue.ledger.completed = completed;
        queue.ledger.expired_deadline = expired;
        queue.ledger.live = 2;
        queue.oldest_ready = Some(Duration::from_secs(42));
        let leases = vec![lease("host\x1b[2J-1", 12), lease("host-2", 58)];
        Snapshot {
            at,
            queues: vec![queue],
            leases,
            more: false,
        }
    }

    fn drawn(top: &Top, now: Instant, width: u16) -> (Vec<String>, ratatui::buffer::Buffer) {
        let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
        terminal.draw(|frame| top.draw(frame, now)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let lines = buffer.content().chunks(usize::from(width)).map(|cells| {
            cells
                .iter()
                .map(ratatui::buffer::Cell::symbol)
                .collect::<String>()
        });
        (lines.collect(), buffer)
    }

    #[test]
    fn everything_fits_a_terminal_of_80_by_24() {
        let at = monotonic();
        let mut top = Top::new("sqlite", snapshot(at, 10, 0));
        top.see(snapshot(at + Duration::from_secs(10), 40, 10));
        let (lines, _) = drawn(&top, at + Duration::from_secs(10), 80);
        let text = lines.join("\n");
        for part in [
            "sqlite  live 2",
            "released 3.0/s",
            "failed 0.0/s",
            "expired 1.0/s",
            "failed 0 %  released : expired  4.0 : 1",
            "default (paused)",
            "1234",
            "42 s",
            "12 s",
            "07070707-0707-0707-0707-070707070707",
            "host-2",
            "q quit",
            "lease 1 of 2",
        ] {
            assert!(text.contains(part), "{part}:\n{text}");
        }
        // Four of five leases were released, and so is four fifths of the bar, or one cell less.
        let green = lines[1].matches('█').count();
        let red = lines[1].matches('▒').count();
        assert!(red > 0 && green.abs_diff(4 * red) <= 4, "{green} {red}");
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn what_fails_is_not_green() {
        let at = monotonic();
        let mut seen = snapshot(at, 0, 0);
        (seen.queues[0].ledger.retried, seen.queues[0].ledger.buried) = (240, 120);
        let (lines, buffer) = drawn(&Top::new("sqlite", seen), at, 80);
        assert!(lines[1].contains("failed 100 %  released : expired  360 : 0"));
        assert!(
            lines[1].contains('▓') && !lines[1].contains('█'),
            "{}",
            lines[1]
        );
        let row = lines
            .iter()
            .position(|line| line.starts_with("default (paused)"));
        let row = row.unwrap();
        let (before, _) = lines[row].split_once("100 %").unwrap();
        let column = before.chars().count() as u16;
        assert_eq!(buffer[(column, row as u16)].fg, Color::Magenta);
    }

    #[test]
    fn the_time_left_counts_down_between_two_answers() {
        let at = monotonic();
        let mut top = Top::new("sqlite", snapshot(at, 1, 0));
        let second = Duration::from_secs(1);
        let row = |top: &Top, now| {
            let (lines, buffer) = drawn(top, now, 80);
            let at = lines
                .iter()
                .position(|line| line.contains("host [2J-1"))
                .unwrap();
            (lines[at][..9].trim().to_owned(), buffer[(0, at as u16)].fg)
        };
        assert_eq!(row(&top, at), ("12 s".to_owned(), Color::Yellow));
        assert_eq!(row(&top, at + 5 * second), ("7.0 s".to_owned(), Color::Red));
        assert_eq!(row(&top, at + 30 * second).0, "overdue");
        top.hold();
        assert_eq!(row(&top, at + 30 * second).0, "12 s");
        top.see(snapshot(at + 31 * second, 1, 0));
        let (lines, _) = drawn(&top, at + 31 * second, 80);
        assert!(lines[23].contains("HELD"), "{}", lines[23]);
    }

    #[test]
    fn a_lease_that_is_well_is_green() {
        let at = monotonic();
        let top = Top::new("sqlite", snapshot(at, 1, 0));
        let (lines, buffer) = drawn(&top, at, 140);
        let row = lines
            .iter()
            .position(|line| line.contains("host-2"))
            .unwrap();
        assert_eq!(buffer[(0, row as u16)].fg, Color::Green);
        for part in ["deploy-7", "1800000000000000", "attempt", "renewals"] {
            assert!(lines.join("\n").contains(part), "{part}");
        }
    }

    #[test]
    fn it_moves_through_the_leases_and_says_when_the_store_is_gone() {
        let at = monotonic();
        let mut top = Top::new("sqlite", snapshot(at, 1, 0));
        top.scroll(1);
        let (lines, _) = drawn(&top, at, 80);
        let text = lines.join("\n");
        assert!(
            text.contains("lease 2 of 2") && !text.contains("host [2J-1"),
            "{text}"
        );
        top.scroll(10);
        top.scroll(isize::MIN);
        assert!(drawn(&top, at, 80).0.join("\n").contains("lease 1 of 2"));
        top.fail("connection refused");
        let (lines, _) = drawn(&top, at + Duration::from_secs(9), 80);
        assert!(
            lines[23].contains("9.00 s old: connection refused"),
            "{}",
            lines[23]
        );
    }

    #[test]
    fn nothing_at_all_is_drawn_too() {
        let empty = Snapshot {
            at: monotonic(),
            queues: Vec::new(),
            leases: Vec::new(),
            more: false,
        };
        let at = empty.at;
        let top = Top::new("memory", empty);
        for width in [1, 20, 80] {
            drawn(&top, at, width);
        }
        assert!(drawn(&top, at, 80).0.join("\n").contains("no leases"));
    }
}
