//! `bodkin plan`: where the bytes of a model go on this machine, what speed they allow, and what
//! would fit if it does not.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, anyhow, ensure};
use bodkin::memory::{human_bytes, total_bytes};
use bodkin::{Error, ExpertSlots, Options, Placement};
use bodkin_backend::{Backend, DeviceKind, EXPERT_SCORE_DECAY};
use bodkin_eval::{Policy, RoutingTrace};
use bodkin_model::{Part, Plan};
use serde_json::json;

use crate::arguments::{self, Machine, describe, find_decoder};

const AFTER: &str = "\
The speed is the upper bound for one sequence at the measured bandwidths: bytes per token read from
device memory, and experts missing from the cache read over PCIe. On a CPU those come from the file
and are not counted. The hit rate depends on the text; without --routing it is that of a trace with
the locality of Qwen 3 30B-A3B.";

/// Arguments of `plan`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    #[command(flatten)]
    machine: Machine,
    /// Slots: requests that run at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    parallel: usize,
    /// Memory limit of the model, such as 24G [default: what is free]
    #[arg(long, value_name = "BYTES", alias = "budget", value_parser = arguments::device_bytes)]
    memory: Option<u64>,
    /// Take the hit rate of the expert cache from this trace of `bench --record-routing`
    #[arg(long, value_name = "FILE")]
    routing: Option<PathBuf>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

/// Percent of a layer's experts that have slots, and percent of choices that hit one, by the
/// policy that runs on devices: the table of docs/experts.md.
const HITS: [(f64, f64); 9] = [
    (0.0, 0.0),
    (5.0, 42.6),
    (10.0, 65.8),
    (15.0, 76.6),
    (25.0, 87.9),
    (40.0, 93.1),
    (50.0, 94.8),
    (75.0, 97.6),
    (100.0, 100.0),
];

/// The speed of one sequence.
struct Speed {
    /// The share of chosen experts that have slots.
    hit_rate: f64,
    /// Bytes a second of the device, and over the bus.
    bandwidth: f64,
    host_bandwidth: Option<f64>,
    /// Of contexts without tokens, and full ones.
    at: [SpeedAt; 2],
}

/// The speed behind some tokens.
struct SpeedAt {
    /// Bytes that a token reads on the device, and of the host.
    bytes: (u64, u64),
    tokens_per_second: f64,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut file = find_decoder(&args.model)?.with_memory_limit(args.memory);
    let machine = args.machine.options();
    let options = Options { parallel: args.parallel, memory_bytes: args.memory, ..machine };
    let backend = bodkin::backend(&options, file.reporter())?;
    let placement = file.placement(&options, backend.as_ref())?;
    let trace = args.routing.as_deref().map(RoutingTrace::read).transpose()?;
    ensure!(
        trace.is_none() || placement.expert_slots.is_some(),
        "--routing: expected a model whose experts do not all fit on the device, found none"
    );
    let hit_rate = match placement.expert_slots {
        Some(slots) => hit_rate(slots, trace.as_ref())?,
        None => 1.0,
    };
    let speed = Speed::new(&file.plan, backend.as_ref(), &placement, hit_rate)?;
    let alternatives = match placement.fits() {
        true => Vec::new(),
        false => file.alternatives(&options, backend.as_ref(), &placement)?,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let value = json_of(backend.as_ref(), &placement, &speed, &alternatives);
        writeln!(out, "{value:#}")?;
    } else {
        writeln!(out, "{}: {}", file.name, describe(&file))?;
        print(&mut out, &file.plan, backend.as_ref(), &placement)?;
        print_speed(&mut out, &placement, &speed)?;
    }
    if placement.fits() {
        return Ok(());
    }
    if !args.json {
        writeln!(out, "\nwould fit:")?;
        let none = ["nothing with this device and this file".to_owned()];
        let lines = if alternatives.is_empty() { &none[..] } else { &alternatives };
        lines.iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    }
    // As text, it has no advice to ask `plan`.
    Err(anyhow!("{}", refusal(file.name, &placement)))
}

/// The error of loading the model.
fn refusal(model: String, placement: &Placement) -> Error {
    let &Placement { memory, available_bytes, host_available_bytes, .. } = placement;
    if total_bytes(&memory) > available_bytes {
        return Error::OutOfMemory { model, memory, available_bytes };
    }
    let host_expert_bytes = memory.host_expert_bytes;
    Error::HostMemory { model, host_expert_bytes, available_bytes: host_available_bytes }
}

/// The share of chosen experts that have one of a layer's slots.
fn hit_rate(slots: ExpertSlots, trace: Option<&RoutingTrace>) -> Result<f64> {
    if let Some(trace) = trace {
        let (expected, found) = (slots.experts, trace.experts());
        ensure!(
            found == expected,
            "--routing: expected a trace of {expected} experts, found {found}"
        );
        return Ok(Policy::Lrfu(EXPERT_SCORE_DECAY.into())
            .run_all(trace, slots.slots)
            .hits_percent()
            / 100.0);
    }
    let share = 100.0 * slots.slots as f64 / slots.experts as f64;
    let next = HITS.iter().position(|(x, _)| *x >= share).unwrap_or(HITS.len() - 1).max(1);
    let ((x, y), (to_x, to_y)) = (HITS[next - 1], HITS[next]);
    Ok((y + (share - x) / (to_x - x) * (to_y - y)) / 100.0)
}

impl Speed {
    fn new(
        plan: &Plan,
        backend: &dyn Backend,
        placement: &Placement,
        hit_rate: f64,
    ) -> Result<Speed> {
        let bandwidth = backend.measure_bandwidth()?;
        // Nobody knows how many of the others are in the file.
        let host_bandwidth = match placement.expert_slots {
            Some(_) if !placement.memory.maps_experts => backend.measure_host_bandwidth()?,
            _ => None,
        };
        let at = |tokens| {
            let bytes = placement.bytes_per_token(plan, backend, tokens, hit_rate);
            let host = host_bandwidth.map_or(0.0, |bandwidth| bytes.1 as f64 / bandwidth);
            let tokens_per_second = 1.0 / (bytes.0 as f64 / bandwidth + host);
            SpeedAt { bytes, tokens_per_second }
        };
        let at = [at(0), at(placement.context)];
        Ok(Speed { hit_rate, bandwidth, host_bandwidth, at })
    }
}

fn print(
    out: &mut dyn Write,
    plan: &Plan,
    backend: &dyn Backend,
    placement: &Placement,
) -> Result<()> {
    let Placement { context, parallel, memory, available_bytes, .. } = *placement;
    let how = match context.cmp(&plan.context_length) {
        std::cmp::Ordering::Equal => "all that the model was trained for".to_owned(),
        _ => format!("trained for {}", plan.context_length),
    };
    writeln!(out, "device   {}, {} free", backend.name(), human_bytes(available_bytes))?;
    writeln!(out, "context  {context} tokens ({how}), requests at a time: {parallel}\n")?;
    let mut row = |what: &str, bytes: u64| writeln!(out, "  {what:<40} {:>10}", human_bytes(bytes));
    for &(part, bytes) in &placement.parts {
        match placement.expert_slots.filter(|_| part == Part::Experts) {
            Some(ExpertSlots { slots, experts, layers }) => row(
                &format!("experts, {slots} of {experts} in {layers} layers"),
                memory.cached_expert_bytes,
            )?,
            None => row(part.name(), bytes)?,
        }
    }
    match placement.packing() {
        0 => {}
        bytes if bytes > 0 => row("added by packing", bytes.unsigned_abs())?,
        bytes => row("saved by packing", bytes.unsigned_abs())?,
    }
    for (window, bytes) in &placement.kv {
        match window {
            None => row("KV cache", *bytes)?,
            Some(window) => row(&format!("KV cache, windows of {window} tokens"), *bytes)?,
        }
    }
    if placement.recurrent_bytes > 0 {
        row("recurrent state", placement.recurrent_bytes)?;
    }
    row("scratch", memory.scratch_bytes)?;
    row("total, without tokenizer and program", total_bytes(&memory))?;
    if let Some(in_use) = in_use(backend) {
        row("in use by the driver and others", in_use)?;
    }
    if memory.host_expert_bytes > 0 {
        let which = if memory.maps_experts { "some" } else { "all" };
        row(&format!("{which} experts, in memory of the host"), memory.host_expert_bytes)?;
    }
    if memory.maps_experts {
        row("all experts, in the file", placement.part(Part::Experts))?;
    }
    Ok(())
}

/// What the driver and other programs have taken of the memory of GPUs, if the driver tells.
fn in_use(backend: &dyn Backend) -> Option<u64> {
    let devices = backend.devices();
    let gpus = devices.iter().filter(|device| device.kind != DeviceKind::Cpu);
    let in_use: Option<Vec<u64>> =
        gpus.map(|gpu| Some(gpu.total_bytes?.saturating_sub(gpu.free_bytes?))).collect();
    in_use.filter(|gpus| !gpus.is_empty()).map(|gpus| gpus.iter().sum())
}

fn print_speed(out: &mut dyn Write, placement: &Placement, speed: &Speed) -> Result<()> {
    let Speed { hit_rate, bandwidth, host_bandwidth, at: [empty, full] } = speed;
    let (context, [first, last]) =
        (placement.context, [empty, full].map(|at| at.tokens_per_second));
    let per_second = |bandwidth: f64| human_bytes(bandwidth as u64);
    writeln!(out, "\nat most {first:.1} tokens a second, {last:.1} behind {context} tokens")?;
    let (device, host) = empty.bytes;
    write!(out, "a token reads {} at {}/s", human_bytes(device), per_second(*bandwidth))?;
    if placement.expert_slots.is_some() {
        let (host, percent) = (human_bytes(host), 100.0 * hit_rate);
        match host_bandwidth.map(per_second) {
            Some(speed) => write!(out, ", and {host} of the host at {speed}/s")?,
            None => write!(out, ", and {host} of the file, not counted in the speed")?,
        }
        write!(out, " ({percent:.1} % hits)")?;
    }
    Ok(writeln!(out)?)
}

fn json_of(
    backend: &dyn Backend,
    placement: &Placement,
    speed: &Speed,
    alternatives: &[String],
) -> serde_json::Value {
    let Placement { context, parallel, memory, available_bytes, .. } = placement;
    let parts = placement.parts.iter().map(|(part, bytes)| (part.name().to_owned(), json!(bytes)));
    let kv = placement.kv.iter().map(|(window, bytes)| json!({"window": window, "bytes": bytes}));
    let slots = placement.expert_slots.map(
        |slots| json!({"slots": slots.slots, "experts": slots.experts, "layers": slots.layers}),
    );
    let [empty, full] = &speed.at;
    json!({
        "backend": backend.name(),
        "context": context,
        "parallel": parallel,
        "file_bytes": parts.collect::<serde_json::Map<_, _>>(),
        "weight_bytes": memory.weight_bytes,
        "cached_expert_bytes": memory.cached_expert_bytes,
        "host_expert_bytes": memory.host_expert_bytes,
        "maps_experts": memory.maps_experts,
        "expert_slots": slots,
        "kv_bytes": kv.collect::<Vec<_>>(),
        "recurrent_bytes": placement.recurrent_bytes,
        "scratch_bytes": memory.scratch_bytes,
        "total_bytes": total_bytes(memory),
        "available_bytes": available_bytes,
        "in_use_bytes": in_use(backend),
        "fits": placement.fits(),
        "would_fit": alternatives,
        "bandwidth": speed.bandwidth,
        "host_bandwidth": speed.host_bandwidth,
        "hit_rate": speed.hit_rate,
        "bytes_read_per_token": empty.bytes.0,
        "host_bytes_read_per_token": empty.bytes.1,
        "tokens_per_second": empty.tokens_per_second,
        "tokens_per_second_full": full.tokens_per_second,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_those_of_the_documents() {
        let text = include_str!("../../../../docs/experts.md");
        let rows = text.lines().skip_while(|line| !line.starts_with("| hits, % of choices"));
        let row = |label: &str| {
            let mut rows = rows.clone().take_while(|line| line.starts_with('|'));
            let found = rows.find(|line| line.contains(label)).expect(label);
            let cells = found
                .split('|')
                .filter_map(|cell| cell.trim_end_matches([' ', '%']).trim().parse().ok());
            cells.collect::<Vec<f64>>()
        };
        let policy = row(&format!("LRFU {EXPERT_SCORE_DECAY} "));
        let documented = row("hits").into_iter().zip(policy);
        let ends = [(0.0, 0.0), (100.0, 100.0)];
        let all = ends[..1].iter().copied().chain(documented).chain(ends[1..].iter().copied());
        assert_eq!(all.collect::<Vec<_>>(), HITS);
    }

    #[test]
    fn hits_lie_between_those_of_the_table() {
        let rate =
            |slots, experts| hit_rate(ExpertSlots { slots, experts, layers: 1 }, None).unwrap();
        assert!((rate(32, 128) - 0.879).abs() < 1e-9);
        assert!((rate(128, 128) - 1.0).abs() < 1e-9);
        assert!((rate(1, 40) - 0.213).abs() < 1e-9);
        assert!((1..128).all(|slots| rate(slots, 128) < rate(slots + 1, 128)));
    }
}
