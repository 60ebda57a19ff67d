//! `bodkin completions`: scripts that complete the command line in a shell.

use std::io::{Write, stdout};

use anyhow::Result;
use clap_complete::{Shell, generate};

const AFTER: &str = "\
For bash:  bodkin completions bash > ~/.local/share/bash-completion/completions/bodkin
For zsh:   bodkin completions zsh > a folder of $fpath, as _bodkin
For fish:  bodkin completions fish > ~/.config/fish/completions/bodkin.fish";

/// Arguments of `completions`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

/// Prints the script; `cli` is the whole command line.
pub(crate) fn run(args: &Args, mut cli: clap::Command) -> Result<()> {
    let mut script = Vec::new();
    generate(args.shell, &mut cli, "bodkin", &mut script);
    Ok(stdout().write_all(&script)?)
}
