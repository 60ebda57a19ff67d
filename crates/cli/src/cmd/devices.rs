//! `bodkin devices`: what `--device` can name.

use std::io::{Write, stdout};

use anyhow::Result;
use bodkin::{Device, Options, Reporter};

/// Runs the command. A device that cannot be used is listed with the reason.
pub(crate) fn run() -> Result<()> {
    for Device { option, name } in bodkin::devices() {
        let options = Options { device: option.clone(), ..Options::default() };
        // Of a device alone there is nothing to note but what its name says.
        let bandwidth = bodkin::backend(&options, &Reporter::default())
            .and_then(|backend| backend.bandwidth().map_err(Into::into));
        let bandwidth = match bandwidth {
            Ok(bytes) => format!("{:.1} GB/s", bytes / 1e9),
            Err(error) => error.to_string(),
        };
        writeln!(stdout(), "{option:<8} {name}: {bandwidth}")?;
    }
    Ok(())
}
