//! The `leasehold` command. Everything it does is in [`leasehold::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    leasehold::cli::main()
}
