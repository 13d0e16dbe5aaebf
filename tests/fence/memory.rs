//! The memory cell.

use std::collections::HashMap;
use std::sync::Arc;

use leasehold::fence::memory::{Cell, OpenCell};
use leasehold::fence::{Fence as _, FenceError, Scope};
use leasehold::{FencingToken, async_trait};
use leasehold_conformance::resource::{Holder, Subject};

use crate::conforms;

/// One cell for all scopes: what landed, by the scope it landed under. Shared, because a read
/// copies it.
type Lists = Arc<HashMap<Scope, Vec<u64>>>;

#[derive(Default)]
struct Memory(Cell<Lists>);

struct MemoryHolder {
    cell: Cell<Lists>,
    scope: Scope,
    token: FencingToken,
    opened: Option<OpenCell<Lists>>,
}

impl MemoryHolder {
    fn opened(&mut self) -> &mut OpenCell<Lists> {
        self.opened.as_mut().unwrap()
    }
}

#[async_trait]
impl Subject for Memory {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        Box::new(MemoryHolder {
            cell: self.0.clone(),
            scope: scope.clone(),
            token,
            opened: None,
        })
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        self.0
            .look(|lists| lists.get(scope).cloned().unwrap_or_default())
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        self.0.prune(below);
        Ok(())
    }
}

#[async_trait]
impl Holder for MemoryHolder {
    async fn open(&mut self) -> Result<(), FenceError> {
        self.opened = Some(self.cell.open(&self.scope, self.token).await?);
        Ok(())
    }

    async fn read(&mut self) -> Result<Vec<u64>, FenceError> {
        let scope = self.scope.clone();
        let lists = self.opened().read()?;
        Ok(lists.get(&scope).cloned().unwrap_or_default())
    }

    async fn write(&mut self, value: u64) -> Result<(), FenceError> {
        let scope = self.scope.clone();
        let written = self.opened().write(|lists| append(lists, scope, value));
        Ok(written?)
    }

    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError> {
        let scope = self.scope.clone();
        let append = |lists: &mut Lists| append(lists, scope, value);
        Ok(self.opened().write_once(operation, append)?.is_some())
    }
}

fn append(lists: &mut Lists, scope: Scope, value: u64) {
    let lists = Arc::make_mut(lists);
    lists.entry(scope).or_default().push(value);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_cell_conforms() {
    conforms("memory", &Memory::default()).await;
}
