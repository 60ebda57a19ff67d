//! `bodkin devices`: what `--device` can name.

use std::io::{Write, stdout};

use anyhow::Result;
use bodkin::memory::human_bytes;
use bodkin::{Device, Options, Reporter};
use serde_json::json;

/// Arguments of `devices`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// Memory of a device in bytes, as far as its driver tells, and bytes per second that it reads.
struct Memory {
    total: Option<u64>,
    free: Option<u64>,
    bandwidth: f64,
}

/// Runs the command. A device that cannot be used is listed with the reason.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut values = Vec::new();
    for Device { option, name } in bodkin::devices() {
        let memory = memory(&option);
        if !args.json {
            let found = memory.map_or_else(|error| error.to_string(), |memory| in_words(&memory));
            writeln!(stdout(), "{option:<8} {name}: {found}")?;
            continue;
        }
        values.push(match memory {
            Ok(Memory { total, free, bandwidth }) => json!({
                "device": option, "name": name, "total_bytes": total, "free_bytes": free,
                "bandwidth_bytes_per_second": bandwidth,
            }),
            Err(error) => json!({ "device": option, "name": name, "error": error.to_string() }),
        });
    }
    if args.json {
        writeln!(stdout(), "{:#}", json!(values))?;
    }
    Ok(())
}

fn memory(option: &str) -> bodkin::Result<Memory> {
    let options = Options { device: option.to_owned(), ..Options::default() };
    // Of a device alone there is nothing to note but what its name says.
    let backend = bodkin::backend(&options, &Reporter::default())?;
    let device = backend.devices().into_iter().next();
    let total = device.as_ref().and_then(|device| device.total_bytes);
    let free = device.and_then(|device| device.free_bytes);
    Ok(Memory { total, free, bandwidth: backend.measure_bandwidth()? })
}

fn in_words(memory: &Memory) -> String {
    let total = memory.total.map(|bytes| format!("{}, ", human_bytes(bytes)));
    let free = memory.free.map(|bytes| format!("{} free, ", human_bytes(bytes)));
    let bandwidth = format!("{:.1} GB/s", memory.bandwidth / 1e9);
    [total.unwrap_or_default(), free.unwrap_or_default(), bandwidth].concat()
}
