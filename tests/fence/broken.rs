//! The control arm: fences that are wrong in one way each, and that the suite must catch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use leasehold::fence::{FenceError, Marks, Scope};
use leasehold::{FencingToken, async_trait};
use leasehold_conformance::resource::{Holder, Subject, check};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flaw {
    None,
    /// The token is checked when something is written, and opening raises nothing.
    WritesOnly,
    /// Something can slip between the check and the effect.
    NotAtomic,
    /// A named operation is applied as often as it is asked for.
    AppliesTwice,
    /// The same, and says that it was not.
    AppliesTwiceAndDenies,
    /// Reads are not checked.
    UncheckedReads,
    /// Pruning leaves no floor.
    NoFloor,
    /// An equal token does not pass.
    Strict,
    /// All scopes share one mark.
    OneMark,
    /// Opening again forgets which operations were applied.
    ForgetsOnOpen,
}

struct Broken {
    flaw: Flaw,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    marks: Marks,
    lists: HashMap<Scope, Vec<u64>>,
}

struct BrokenHolder {
    flaw: Flaw,
    state: Arc<Mutex<State>>,
    scope: Scope,
    token: FencingToken,
}

impl Broken {
    fn new(flaw: Flaw) -> Self {
        let state = Arc::default();
        Self { flaw, state }
    }
}

#[async_trait]
impl Subject for Broken {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        Box::new(BrokenHolder {
            flaw: self.flaw,
            state: Arc::clone(&self.state),
            scope: scope.clone(),
            token,
        })
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        let state = self.state.lock().unwrap();
        state.lists.get(scope).cloned().unwrap_or_default()
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        let mut state = self.state.lock().unwrap();
        state.marks.prune(below);
        if self.flaw == Flaw::NoFloor {
            state.marks = Marks::default();
        }
        Ok(())
    }
}

impl BrokenHolder {
    fn scope(&self) -> Scope {
        if self.flaw == Flaw::OneMark {
            return Scope::parse("all/of/n:them").unwrap();
        }
        self.scope.clone()
    }

    fn append(&self, value: u64) {
        let mut state = self.state.lock().unwrap();
        let list = state.lists.entry(self.scope.clone()).or_default();
        list.push(value);
    }
}

#[async_trait]
impl Holder for BrokenHolder {
    async fn open(&mut self) -> Result<(), FenceError> {
        let scope = self.scope();
        let mut state = self.state.lock().unwrap();
        match self.flaw {
            Flaw::WritesOnly => return Ok(()),
            Flaw::Strict => {
                let next = FencingToken::new(self.token.get() + 1);
                state.marks.open(&scope, self.token)?;
                state.marks.open(&scope, next)?;
                return Ok(());
            }
            Flaw::ForgetsOnOpen if state.marks.mark(&scope) == self.token => {
                state.marks = Marks::default();
            }
            _ => {}
        }
        Ok(state.marks.open(&scope, self.token)?)
    }

    async fn read(&mut self) -> Result<Vec<u64>, FenceError> {
        let scope = self.scope();
        let mut state = self.state.lock().unwrap();
        if self.flaw != Flaw::UncheckedReads {
            state.marks.read(&scope, self.token)?;
        }
        Ok(state.lists.get(&self.scope).cloned().unwrap_or_default())
    }

    async fn write(&mut self, value: u64) -> Result<(), FenceError> {
        let scope = self.scope();
        let admitted = self.state.lock().unwrap().marks.write(&scope, self.token);
        admitted?;
        if self.flaw == Flaw::NotAtomic {
            tokio::task::yield_now().await;
        }
        self.append(value);
        Ok(())
    }

    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError> {
        let scope = self.scope();
        let fresh = {
            let mut state = self.state.lock().unwrap();
            state.marks.write_once(&scope, self.token, operation)?
        };
        let twice = matches!(self.flaw, Flaw::AppliesTwice | Flaw::AppliesTwiceAndDenies);
        if fresh || twice {
            self.append(value);
        }
        Ok(fresh || self.flaw == Flaw::AppliesTwice)
    }
}

#[tokio::test]
async fn every_broken_fence_is_caught_and_a_right_one_is_not() {
    check(&Broken::new(Flaw::None), 1, 2_000).await.unwrap();
    for flaw in [
        Flaw::WritesOnly,
        Flaw::NotAtomic,
        Flaw::AppliesTwice,
        Flaw::AppliesTwiceAndDenies,
        Flaw::UncheckedReads,
        Flaw::NoFloor,
        Flaw::Strict,
        Flaw::OneMark,
        Flaw::ForgetsOnOpen,
    ] {
        let caught = check(&Broken::new(flaw), 1, 2_000).await;
        let breach = caught.map_or_else(|breach| breach, |all| panic!("{flaw:?} passes: {all:?}"));
        println!("{flaw:?}: {breach}");
    }
}
