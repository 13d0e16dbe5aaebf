//! Lists: read page by page; printed as a table, as one JSON document, or as one JSON line per row.

use std::future::Future;

use serde_json::{Value, json};

use super::{Done, Output, Trouble, out};

use leasehold::inspect::{Page, Paged};
use leasehold::limits;

/// How much of a list.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Limit {
    /// How many rows at most; 0 for all
    #[arg(long, default_value_t = 100, value_name = "ROWS")]
    limit: usize,
}

impl Limit {
    /// As a number.
    pub(super) fn rows(self) -> usize {
        if self.limit == 0 {
            usize::MAX
        } else {
            self.limit
        }
    }
}

/// What became of a row that was read.
pub(super) enum Row {
    /// It counts against the limit.
    Shown,
    /// It was not asked for.
    Skipped,
    /// Neither it nor anything after it was asked for.
    Past,
}

/// Counts rows against the limit, over several lists if need be.
#[derive(Debug)]
pub(super) struct Reader {
    left: usize,
    more: bool,
}

impl Reader {
    pub(super) fn new(limit: Limit) -> Self {
        Self {
            left: limit.rows(),
            more: false,
        }
    }

    /// A reader of whole lists.
    pub(super) fn all() -> Self {
        Self {
            left: usize::MAX,
            more: false,
        }
    }

    /// Whether something was left out because of the limit.
    pub(super) fn more(&self) -> bool {
        self.more
    }

    /// Reads page after page and hands each row on, until the limit or the end.
    pub(super) async fn read<T, F>(
        &mut self,
        mut page: impl FnMut(Page) -> F,
        mut take: impl FnMut(T) -> Result<Row, Trouble>,
    ) -> Done
    where
        F: Future<Output = leasehold::Result<Paged<T>>>,
    {
        let mut after = None;
        while !self.more {
            // One more than asked for tells whether there are more.
            let rows = self.left.saturating_add(1).min(limits::PAGE_ROWS);
            let got = page(Page { after, rows }).await?;
            for row in got.rows {
                if self.left == 0 {
                    self.more = true;
                    return Ok(());
                }
                match take(row)? {
                    Row::Shown => self.left -= 1,
                    Row::Skipped => {}
                    Row::Past => return Ok(()),
                }
            }
            if got.next.is_none() {
                return Ok(());
            }
            after = got.next;
        }
        Ok(())
    }
}

/// Rows on their way to stdout.
pub(super) struct Listing {
    output: Output,
    name: &'static str,
    header: &'static [&'static str],
    /// What people are told if there is none.
    none: String,
    cells: Vec<Vec<String>>,
    objects: Vec<Value>,
}

impl Listing {
    pub(super) fn new(output: Output, name: &'static str, header: &'static [&'static str]) -> Self {
        Self {
            output,
            name,
            header,
            none: format!("no {name}"),
            cells: Vec::new(),
            objects: Vec::new(),
        }
    }

    /// What people are told if there is none, where it is not what programs call it.
    pub(super) fn or_else(mut self, none: &str) -> Self {
        none.clone_into(&mut self.none);
        self
    }

    /// Adds a row: for programs, and for people.
    pub(super) fn row(
        &mut self,
        object: impl FnOnce() -> Value,
        cells: impl FnOnce() -> Vec<String>,
    ) -> Done {
        match self.output {
            Output::Table => {
                let cells = cells().iter().map(|cell| out::one_line(cell)).collect();
                self.cells.push(cells);
            }
            Output::Json => self.objects.push(object()),
            Output::Ndjson => out::data(&object().to_string())?,
        }
        Ok(())
    }

    /// Prints what is not printed yet.
    pub(super) fn end(self, more: bool) -> Done {
        match self.output {
            Output::Table if self.cells.is_empty() => out::data(&self.none)?,
            Output::Table => out::data(&out::table(self.header, &self.cells))?,
            Output::Json => {
                let document = json!({ self.name: self.objects, "more": more });
                out::data(&document.to_string())?;
            }
            Output::Ndjson => {}
        }
        if more && self.output != Output::Json {
            out::note("there are more; --limit shows them");
        }
        Ok(())
    }
}
