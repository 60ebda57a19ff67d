//! `bodkin man`: manual pages, one for each command.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// Arguments of `man`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder to write bodkin.1 and bodkin-COMMAND.1 to
    folder: PathBuf,
}

/// Writes the pages; `cli` is the whole command line.
pub(crate) fn run(args: &Args, cli: clap::Command) -> Result<()> {
    let failed = || format!("cannot write manual pages to {}", args.folder.display());
    std::fs::create_dir_all(&args.folder).with_context(failed)?;
    clap_mangen::generate_to(cli, &args.folder).with_context(failed)
}
