//! A resource that handlers write to under a fence: whole lists, read, changed and written back, so
//! that a stale write loses what others wrote.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use leasehold::FencingToken;
use leasehold_conformance::history::History;

pub(crate) struct Resource {
    history: History,
    /// Off in the control arm.
    fenced: bool,
    cells: Mutex<BTreeMap<String, Cell>>,
}

#[derive(Default)]
struct Cell {
    mark: Option<FencingToken>,
    values: Vec<String>,
}

impl Resource {
    pub(crate) fn new(history: History, fenced: bool) -> Arc<Self> {
        Arc::new(Self {
            history,
            fenced,
            cells: Mutex::default(),
        })
    }

    /// Raises the mark and reads. Refused with the mark if it is higher.
    pub(crate) fn open(
        &self,
        process: u32,
        scope: &str,
        token: FencingToken,
    ) -> Result<Vec<String>, FencingToken> {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = cells.entry(scope.to_owned()).or_default();
        let answer = match cell.mark {
            Some(mark) if self.fenced && token < mark => Err(mark),
            mark => {
                cell.mark = mark.max(Some(token));
                Ok(cell.values.clone())
            }
        };
        self.history.open(process, scope, token, answer.is_ok());
        answer
    }

    /// Replaces the values by `seen` and `value`, unless the mark is higher.
    pub(crate) fn write(
        &self,
        process: u32,
        scope: &str,
        token: FencingToken,
        seen: &[String],
        value: &str,
    ) -> Result<(), FencingToken> {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = cells.entry(scope.to_owned()).or_default();
        let answer = match cell.mark {
            Some(mark) if self.fenced && token < mark => Err(mark),
            _ => {
                cell.values = seen.to_vec();
                cell.values.push(value.to_owned());
                Ok(())
            }
        };
        self.history
            .write(process, scope, token, value, answer.is_ok());
        answer
    }

    pub(crate) fn contents(&self) -> BTreeMap<String, Vec<String>> {
        let cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        let cells = cells.iter();
        cells
            .map(|(scope, cell)| (scope.clone(), cell.values.clone()))
            .collect()
    }
}
