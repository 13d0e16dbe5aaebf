//! A file under a fence.

use std::path::{Path, PathBuf};

use leasehold::fence::file::{FencedFile, OpenFile};
use leasehold::fence::{Fence as _, FenceError, Scope};
use leasehold::{FencingToken, async_trait};
use leasehold_conformance::resource::{Holder, Subject};
use tempfile::TempDir;

use crate::conforms;

/// The content is text, `scope value` in each line.
struct OneFile(FencedFile, PathBuf);

struct FileHolder {
    file: FencedFile,
    scope: Scope,
    token: FencingToken,
    opened: Option<OpenFile>,
}

impl FileHolder {
    fn opened(&mut self) -> &mut OpenFile {
        self.opened.as_mut().unwrap()
    }

    /// Appends a line, and drops those of scopes that are no longer looked at: the file stays
    /// small.
    fn append(&self, value: u64) -> impl FnOnce(Vec<u8>) -> Vec<u8> + Send + use<> {
        let line = format!("{}\t{value}\n", self.scope);
        move |content| {
            let text = String::from_utf8(content).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            let recent = &lines[lines.len().saturating_sub(64)..];
            let mut text = recent.join("\n");
            text.push_str(if recent.is_empty() { "" } else { "\n" });
            text.push_str(&line);
            text.into_bytes()
        }
    }
}

fn values(content: &[u8], scope: &Scope) -> Vec<u64> {
    let text = std::str::from_utf8(content).unwrap();
    text.lines()
        .filter_map(|line| line.strip_prefix(scope.as_str())?.strip_prefix('\t'))
        .map(|value| value.parse().unwrap())
        .collect()
}

#[async_trait]
impl Subject for OneFile {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        Box::new(FileHolder {
            file: self.0.clone(),
            scope: scope.clone(),
            token,
            opened: None,
        })
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        values(&std::fs::read(&self.1).unwrap_or_default(), scope)
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        self.0.prune(below).await
    }
}

#[async_trait]
impl Holder for FileHolder {
    async fn open(&mut self) -> Result<(), FenceError> {
        self.opened = Some(self.file.open(&self.scope, self.token).await?);
        Ok(())
    }

    async fn read(&mut self) -> Result<Vec<u64>, FenceError> {
        let content = self.opened().read().await?;
        Ok(values(&content, &self.scope))
    }

    async fn write(&mut self, value: u64) -> Result<(), FenceError> {
        let append = self.append(value);
        self.opened().write(append).await
    }

    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError> {
        let append = self.append(value);
        self.opened().write_once(operation, append).await
    }
}

/// Waiting for the disk twice in each of many thousand operations shows nothing more about the
/// fence: where there is one, a directory in memory.
fn quick_dir() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        return TempDir::new_in(memory).unwrap();
    }
    tempfile::tempdir().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_conforms() {
    let dir = quick_dir();
    let path = dir.path().join("list");
    let subject = OneFile(FencedFile::new(&path), path);
    conforms("file", &subject).await;
}

fn scope() -> Scope {
    Scope::parse("registry/default/k:tle").unwrap()
}

/// All files of a directory, as a crash leaves them.
fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[tokio::test]
async fn a_named_operation_survives_a_crash_at_any_step_with_its_effect_or_not_at_all() {
    let (dir, crashed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = dir.path().join("tle");
    let file = FencedFile::new(&path);
    let token = FencingToken::new(7);
    let mut opened = file.open(&scope(), token).await.unwrap();
    opened.write(|_| b"old".to_vec()).await.unwrap();
    copy(dir.path(), crashed.path());
    let next = crashed.path().join("tle.fence-next-1");

    // The content is on disk, and the operation is not: it has not happened.
    std::fs::write(&next, b"new").unwrap();
    let again = FencedFile::new(crashed.path().join("tle"));
    let mut reopened = again.open(&scope(), token).await.unwrap();
    assert_eq!(reopened.read().await.unwrap(), b"old");
    assert!(
        reopened
            .write_once("merge", |_| b"newer".to_vec())
            .await
            .unwrap()
    );
    assert_eq!(reopened.read().await.unwrap(), b"newer");

    // The operation is on disk, and the content has not got its name: it has happened.
    assert!(
        opened
            .write_once("merge", |_| b"new".to_vec())
            .await
            .unwrap()
    );
    std::fs::rename(&path, dir.path().join("tle.fence-next-1")).unwrap();
    std::fs::write(&path, b"old").unwrap();
    let recovered = FencedFile::new(&path);
    let mut opened = recovered.open(&scope(), token).await.unwrap();
    assert_eq!(opened.read().await.unwrap(), b"new");
    assert!(
        !opened
            .write_once("merge", |_| b"twice".to_vec())
            .await
            .unwrap()
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

#[tokio::test]
async fn trouble_with_the_file_is_no_refusal() {
    let dir = tempfile::tempdir().unwrap();
    let lost = FencedFile::new(dir.path().join("no/such/dir"));
    let error = lost.open(&scope(), FencingToken::new(1)).await.unwrap_err();
    assert!(error.stale().is_none(), "{error}");
    let path = dir.path().join("tle");
    std::fs::write(dir.path().join("tle.fence"), b"nonsense").unwrap();
    let error = FencedFile::new(path)
        .open(&scope(), FencingToken::new(1))
        .await
        .unwrap_err();
    let FenceError::Trouble(error) = error else {
        panic!("{error}")
    };
    assert_eq!(error.kind(), leasehold::ErrorKind::Corrupt);
}
