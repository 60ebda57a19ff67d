//! `cargo xtask soak`: `bodkin serve` under mixed traffic and faults, also of its machine. At the
//! end the server must be healthy, hold no pages and no more memory than after its warm-up, answer
//! as a server that does nothing else, survive `kill -9`, a cut model file and a full disk, and
//! drain on SIGTERM. Appends a row to a file of results.

mod faults;
mod machine;
mod traffic;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::compare::{append, commit, cpu_name, pull, release_binary};
use crate::serving::client;
use crate::serving::server::{Server, Setup};
use faults::FAULTS;
use machine::Machine;
use traffic::{Outcome, Random};

const RESULTS: &str = "benches/results/soak.jsonl";

/// Prompts whose answers are known.
const CANARIES: usize = 8;

/// Memory that may be added after the warm-up.
const GROWTH_BYTES: u64 = 64 << 20;

/// How long requests that run at the end may take.
const DRAIN: Duration = Duration::from_secs(60);

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Model: a path, or a name that `bodkin pull` knows.
    model: String,
    /// Minutes of traffic; a quarter of them, 5 at most, is the warm-up.
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// Clients at the same time; up to 4 faulty ones come on top.
    #[arg(long, default_value_t = 8)]
    clients: usize,
    /// Threads of the server.
    #[arg(short, long, default_value_t = 2)]
    threads: usize,
    /// What random choices follow from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The binary of bodkin; built if there is none.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// The file to append rows to.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

/// What happened.
#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    refused: AtomicU64,
    canaries: AtomicU64,
    slowest_health_ms: AtomicU64,
    faults: Mutex<BTreeMap<&'static str, u64>>,
    /// The first failure, which ends the traffic.
    failure: Mutex<Option<anyhow::Error>>,
    is_over: AtomicBool,
}

impl Counts {
    /// Runs one client until the traffic is over.
    fn repeat(&self, mut step: impl FnMut() -> Result<()>) {
        while !self.is_over.load(Relaxed) {
            self.end_if_failed(step());
        }
    }

    /// Makes a fault that lasts until the traffic is over.
    fn hold(&self, name: &'static str, fault: impl FnOnce() -> Result<u64>) {
        self.end_if_failed(self.count(name, fault));
    }

    /// Adds how often a fault was made.
    fn count(&self, name: &'static str, fault: impl FnOnce() -> Result<u64>) -> Result<()> {
        let times = fault().with_context(|| format!("fault `{name}`"))?;
        *self.faults.lock().expect("no panic").entry(name).or_default() += times;
        Ok(())
    }

    fn end_if_failed(&self, result: Result<()>) {
        if let Err(error) = result {
            self.is_over.store(true, Relaxed);
            self.failure.lock().expect("no panic").get_or_insert(error);
        }
    }
}

/// Runs the command.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let binary = release_binary(root, args.binary.as_deref())?;
    let file = pull(root, &args.model)?;
    let machine = Machine::new()?;
    let model = machine.copy_of(&file)?;
    let start_with = |binary: &Path, pages: &Path| {
        let setup = Setup {
            model: &model,
            streams: args.clients,
            has_long: false,
            embeds: false,
            context: 1024,
            threads: Some(args.threads),
        };
        let folder = pages.to_string_lossy();
        let more = ["--queue=32", "--max-body=1M", "--drain=300s", "--cache-dir", &folder];
        Server::bodkin(binary, &setup, &more.map(str::to_owned))
    };
    let (program, pages) = (machine.with_clock(&binary)?, machine.folder("pages")?);
    let start = || start_with(&program, &pages);
    let server = start()?;
    let wanted = canaries(server.address)?;
    let time = Duration::from_secs_f64(args.minutes * 60.0);
    let warm_up = (time / 4).min(Duration::from_secs(300));
    let counts = Counts::default();
    traffic(server.address, &counts, args, (&wanted, &machine), warm_up)?;
    settle(server.address)?;
    let memory = resident_bytes(server.process())?;
    println!("warm: {} MB", memory >> 20);
    traffic(server.address, &counts, args, (&wanted, &machine), time - warm_up)?;
    settle(server.address)?;
    let memory_end = resident_bytes(server.process())?;
    ensure!(canaries(server.address)? == wanted, "after the traffic canaries differ");
    println!("at the end: {} MB", memory_end >> 20);
    let server = damaged(killed(server, start)?, &model, &wanted)?;
    let drained = drained(server, args.clients)?;
    let small = machine.folder("small-disk")?;
    let server = start_with(&machine.with_full_disk(&binary, &small)?, &small)?;
    for _ in 0..3 {
        ensure!(canaries(server.address)? == wanted, "with a full disk canaries differ");
    }
    let count = |count: &AtomicU64| count.load(Relaxed);
    let row = json!({
        "commit": commit(root)?,
        "cpu": cpu_name(),
        "threads": args.threads,
        "file": file.file_name().map(|name| name.to_string_lossy().into_owned()),
        "minutes": args.minutes,
        "clients": args.clients,
        "requests": count(&counts.requests),
        "refused": count(&counts.refused),
        "canaries": count(&counts.canaries),
        "faults": *counts.faults.lock().expect("no panic"),
        "health_ms": count(&counts.slowest_health_ms),
        "warm_mb": memory >> 20,
        "end_mb": memory_end >> 20,
        "drained": drained,
        "at_the_end": ["kill -9", "model cut", "model replaced", "SIGTERM", "full disk"],
    });
    append(&args.output.clone().unwrap_or_else(|| root.join(RESULTS)), &row)?;
    println!("{row}");
    ensure!(
        memory_end < memory + GROWTH_BYTES,
        "memory grew from {} to {} MB",
        memory >> 20,
        memory_end >> 20
    );
    Ok(())
}

/// Sends requests and makes faults for some time.
fn traffic(
    address: SocketAddr,
    counts: &Counts,
    args: &Args,
    (wanted, machine): (&[Value], &Machine),
    time: Duration,
) -> Result<()> {
    counts.is_over.store(false, Relaxed);
    let seed = counts.requests.load(Relaxed) << 16 ^ args.seed;
    std::thread::scope(|scope| {
        for client in 0..args.clients as u64 {
            let mut random = Random(seed << 8 | client);
            scope.spawn(move || counts.repeat(|| good(address, counts, wanted, &mut random)));
        }
        for client in 0..args.clients.min(4) as u64 {
            let mut random = Random(!(seed << 8 | client));
            scope.spawn(move || {
                counts.repeat(|| {
                    let (name, fault) = FAULTS[random.below(FAULTS.len() as u64) as usize];
                    counts.count(name, || fault(address, &mut random).map(|()| 1))
                });
            });
        }
        let is_over = || counts.is_over.load(Relaxed);
        let idle = move || machine::hold_idle(address, is_over);
        scope.spawn(move || counts.hold("idle connection", idle));
        let clock = move || machine.turn_clock(is_over);
        scope.spawn(move || counts.hold("clock set back or forth", clock));
        scope.spawn(|| {
            counts.repeat(|| {
                let (status, time) = client::get(address, "/health")?;
                ensure!(status == 200, "/health says {status}");
                counts.slowest_health_ms.fetch_max(time.as_millis() as u64, Relaxed);
                std::thread::sleep(Duration::from_millis(100));
                Ok(())
            });
        });
        let start = Instant::now();
        while start.elapsed() < time && !counts.is_over.load(Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
        }
        counts.is_over.store(true, Relaxed);
    });
    match counts.failure.lock().expect("no panic").take() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// A request, or a canary.
fn good(address: SocketAddr, counts: &Counts, wanted: &[Value], random: &mut Random) -> Result<()> {
    if random.below(4) > 0 {
        let outcome = traffic::request(address, random)?;
        let is_refused = outcome == Outcome::Refused;
        counts.requests.fetch_add(1, Relaxed);
        counts.refused.fetch_add(u64::from(is_refused), Relaxed);
        return Ok(());
    }
    let index = random.below(wanted.len() as u64) as usize;
    if let Some(tokens) = traffic::canary(address, index)? {
        ensure!(tokens == wanted[index], "canary {index}: {tokens}, alone {}", wanted[index]);
        counts.canaries.fetch_add(1, Relaxed);
    }
    Ok(())
}

/// The answers of all canaries, one after the other.
fn canaries(address: SocketAddr) -> Result<Vec<Value>> {
    let one = |index| traffic::canary(address, index)?.context("an idle server refuses a request");
    (0..CANARIES).map(one).collect()
}

/// Waits until no request runs; then all pages must be free or cached.
fn settle(address: SocketAddr) -> Result<()> {
    let start = Instant::now();
    let metric = |name: &str| metric(address, name);
    while metric("bodkin_requests_running")? + metric("bodkin_requests_waiting")? > 0.0 {
        ensure!(start.elapsed() < DRAIN, "requests whose clients have gone still run");
        std::thread::sleep(Duration::from_millis(50));
    }
    let (total, free) = (metric("bodkin_kv_pages")?, metric("bodkin_kv_pages_free")?);
    let cached = metric("bodkin_kv_pages_cached")?;
    ensure!(free + cached == total, "{free} pages free, {cached} cached, of {total}");
    Ok(())
}

/// A number of `/metrics`.
fn metric(address: SocketAddr, name: &str) -> Result<f64> {
    let text = client::text(address, "/metrics")?;
    let line = text
        .lines()
        .find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.with_context(|| format!("no metric {name}"))
}

/// Kills a server under load, and starts it again with the pages that it left on the disk.
fn killed(mut server: Server, start: impl Fn() -> Result<Server>) -> Result<Server> {
    let address = server.address;
    std::thread::scope(|scope| {
        for client in 0..4 {
            // These requests fail.
            scope.spawn(move || while traffic::request(address, &mut Random(client)).is_ok() {});
        }
        std::thread::sleep(Duration::from_millis(500));
        server.signal("KILL")?;
        server.wait(DRAIN)
    })?;
    start()
}

/// Cuts and replaces the model of a server that has been killed and started again.
fn damaged(server: Server, model: &Path, wanted: &[Value]) -> Result<Server> {
    let check = |after: &str| -> Result<()> {
        ensure!(canaries(server.address)? == wanted, "after {after} canaries differ");
        Ok(())
    };
    check("kill -9")?;
    machine::cut_model(server.address, model)?;
    check("the model was cut")?;
    machine::replace_model(server.address, model)?;
    check("the model was replaced")?;
    Ok(server)
}

/// Sends SIGTERM to a server that streams. Returns how many streams there were: all must end whole.
fn drained(mut server: Server, clients: usize) -> Result<usize> {
    let address = server.address;
    let body = json!({
        "prompt": [21, 22, 23], "max_tokens": 900, "ignore_eos": true, "stream": true,
    });
    std::thread::scope(|scope| {
        let streams: Vec<_> =
            (0..clients).map(|_| scope.spawn(|| client::stream(address, &body))).collect();
        let begun = Instant::now();
        while metric(address, "bodkin_requests_running")? < clients as f64 {
            ensure!(begun.elapsed() < DRAIN, "streams do not begin");
        }
        server.signal("TERM")?;
        for stream in streams {
            let tokens = stream.join().expect("no panic").context("SIGTERM cut a stream")?.tokens;
            ensure!(tokens == 900, "SIGTERM ended a stream after {tokens} tokens");
        }
        let status = server.wait(DRAIN)?;
        if !status.success() {
            bail!("after SIGTERM the server ended with {status}");
        }
        Ok(clients)
    })
}

/// Memory of a process that is in use.
fn resident_bytes(process: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/statm"))?;
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.context("/proc/PID/statm has no second number")? * 4096)
}
