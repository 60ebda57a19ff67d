//! `bodkin devices`: what `--device` can name.

use std::io::{Write, stdout};

use anyhow::Result;
use bodkin::memory::human_bytes;
use bodkin::{Device, Options, Reporter};
use bodkin_backend::Backend;

/// Runs the command. A device that cannot be used is listed with the reason.
pub(crate) fn run() -> Result<()> {
    for Device { option, name } in bodkin::devices() {
        let options = Options { device: option.clone(), ..Options::default() };
        // Of a device alone there is nothing to note but what its name says.
        let backend = bodkin::backend(&options, &Reporter::default());
        let found = match backend.and_then(|backend| memory(backend.as_ref())) {
            Ok(memory) => memory,
            Err(error) => error.to_string(),
        };
        writeln!(stdout(), "{option:<8} {name}: {found}")?;
    }
    Ok(())
}

/// The memory of a backend with one device: its bytes, the free ones, and their bandwidth.
fn memory(backend: &dyn Backend) -> bodkin::Result<String> {
    let bandwidth = format!("{:.1} GB/s", backend.bandwidth()? / 1e9);
    let device = backend.devices().into_iter().next();
    let total = device.as_ref().and_then(|device| device.total_bytes);
    let total = total.map(|bytes| format!("{}, ", human_bytes(bytes)));
    let free = device.and_then(|device| device.free_bytes);
    let free = free.map(|bytes| format!("{} free, ", human_bytes(bytes)));
    Ok([total.unwrap_or_default(), free.unwrap_or_default(), bandwidth].concat())
}
