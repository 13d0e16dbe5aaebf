//! How a command ends: the exit codes and the one line of trouble, in one place.

use std::io;
use std::process::ExitCode;

use clap::error::ErrorKind as Clap;

use super::out;
use leasehold::{Error, ErrorKind};

/// The end of `leasehold --help`.
pub(super) const CODES: &str = "\
Exit codes:
  0  done
  1  failed, or an invariant broke, or the answer to a question was no
  2  wrong usage; also: it would destroy something, there is no terminal to ask on, and no --yes
  3  not found (store, queue, job, lease), or the store is unhealthy

Data goes to stdout; progress, questions and trouble go to stderr. NO_COLOR is honoured.";

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Exit code 1.
    Failed(String),
    /// Exit code 2.
    Usage(String),
    /// Exit code 3.
    NotFound(String),
    /// Whoever read the output is gone: there is nobody to tell.
    NobodyReads,
}

/// What every command returns.
pub(super) type Done = Result<(), Trouble>;

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error.kind() {
            ErrorKind::InvalidInput => Self::Usage(text),
            ErrorKind::Unavailable
            | ErrorKind::Contended
            | ErrorKind::Full
            | ErrorKind::Corrupt
            | ErrorKind::ReadOnly
            | ErrorKind::Denied
            | ErrorKind::TooNew
            | ErrorKind::Replaced => Self::NotFound(text),
            _ => Self::Failed(text),
        }
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::NobodyReads;
        }
        Self::Failed(error.to_string())
    }
}

/// The exit code of a command that ran.
pub(super) fn code(done: Done) -> ExitCode {
    match done {
        Ok(()) | Err(Trouble::NobodyReads) => ExitCode::SUCCESS,
        Err(Trouble::Failed(text)) => complain(&text, 1),
        Err(Trouble::Usage(text)) => complain(&text, 2),
        Err(Trouble::NotFound(text)) => complain(&text, 3),
    }
}

/// Help and version as they are; wrong usage in one line.
pub(super) fn refuse(error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        Clap::DisplayHelp | Clap::DisplayVersion | Clap::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        let _ = error.print();
        return ExitCode::from(u8::from(error.use_stderr()) * 2);
    }
    let text = error.to_string();
    let text = text.split("\n\n").next().unwrap_or_default();
    let text = text.strip_prefix("error: ").unwrap_or(text);
    complain(&format!("{text}; try --help"), 2)
}

fn complain(text: &str, code: u8) -> ExitCode {
    out::note(&out::without_secrets(&out::one_line(text)));
    ExitCode::from(code)
}
