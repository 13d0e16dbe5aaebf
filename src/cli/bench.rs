use super::{Cli, Done};
/// x
#[derive(Debug, clap::Args)]
pub(super) struct Args {}
pub(super) async fn run(_args: &Args, _cli: &Cli, _json: bool) -> Done {
    Ok(())
}
