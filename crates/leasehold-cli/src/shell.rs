//! `leasehold completions` and `leasehold man`: what belongs to an installed command.

use std::path::PathBuf;

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Cli, Done, Trouble, out};

/// Prints a script that completes the command's words.
#[derive(Debug, clap::Args)]
pub(super) struct Completions {
    /// The shell
    shell: Shell,
}

/// Prints the manual page, or writes one for each command into a directory.
#[derive(Debug, clap::Args)]
pub(super) struct Man {
    /// Write `leasehold.1`, `leasehold-stats.1` and so on there
    #[arg(long, value_name = "DIRECTORY")]
    dir: Option<PathBuf>,
}

pub(super) fn completions(args: &Completions) -> Done {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "leasehold", &mut script);
    out::data(&String::from_utf8_lossy(&script))?;
    Ok(())
}

pub(super) fn man(args: &Man) -> Done {
    if let Some(dir) = &args.dir {
        let trouble = |error| Trouble::Failed(format!("{}: {error}", dir.display()));
        std::fs::create_dir_all(dir).map_err(trouble)?;
        return clap_mangen::generate_to(Cli::command(), dir).map_err(trouble);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page)?;
    out::data(&String::from_utf8_lossy(&page))?;
    Ok(())
}
