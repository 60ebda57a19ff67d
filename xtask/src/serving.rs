//! `cargo xtask serving`: many streams against `bodkin serve` and against llama-server, by the same
//! client, interleaved. Appends rows to `benches/results/serving.jsonl` and rewrites the table of
//! docs/performance.md from that file.

pub(crate) mod client;
mod load;
pub(crate) mod server;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use crate::compare::{append, commit, cpu_name, pull, release_binary};
use crate::{gpu, workspace};
use load::{Load, Measured};
use server::{Server, Setup};

const RESULTS: &str = "benches/results/serving.jsonl";

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Model: a path, or a name that `bodkin pull` knows; without one, only the table is rewritten.
    model: Option<String>,
    /// A llama-server to measure interleaved.
    #[arg(long)]
    peer: Option<PathBuf>,
    /// What the rows call the peer: its version and how it was built.
    #[arg(long, default_value = "llama-server")]
    peer_name: String,
    /// Streams at the same time.
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    streams: Vec<usize>,
    /// Requests of each stream, one after the other.
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Requests are for embeddings of this number of texts, with the tokens of a prompt each.
    #[arg(long, default_value_t = 0, conflicts_with_all = ["shared", "long", "turns", "generate"])]
    texts: usize,
    /// Tokens of a prompt.
    #[arg(short, long, default_value_t = 128)]
    prompt: usize,
    /// Tokens of a prompt that all requests share; they come first, and both servers have read
    /// them before the measurement.
    #[arg(long, default_value_t = 0)]
    shared: usize,
    /// Generated tokens of a request.
    #[arg(short = 'n', long, default_value_t = 128)]
    generate: usize,
    /// Tokens of one long prompt that runs beside the streams.
    #[arg(long, default_value_t = 0)]
    long: usize,
    /// The requests of a stream are the turns of one conversation: each has the prompts before it,
    /// and other tokens in place of the answers.
    #[arg(long)]
    turns: bool,
    /// Further fields of each request, as a JSON object, such as `{"logprobs": 5}`.
    #[arg(long, value_name = "JSON", default_value = "{}", value_parser = fields)]
    request: Map<String, Value>,
    /// Runs of each server.
    #[arg(long, default_value_t = 3)]
    pairs: usize,
    /// CPU threads of both, which then run on the CPU [default: all; a GPU where there is one]
    #[arg(short, long)]
    threads: Option<usize>,
    /// Context of each request.
    #[arg(short, long, default_value_t = 512)]
    ctx_size: usize,
    /// Further arguments of `bodkin serve`.
    #[arg(long, allow_hyphen_values = true, value_delimiter = ' ')]
    serve_args: Vec<String>,
    /// The binary of bodkin; built if there is none.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// The commit that the binary was built from [default: that of the checkout].
    #[arg(long)]
    commit: Option<String>,
    /// The file to append rows to.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

fn fields(text: &str) -> Result<Map<String, Value>, serde_json::Error> {
    serde_json::from_str(text)
}

/// Runs all loads, and rewrites the table.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    if let Some(model) = &args.model {
        measure(root, args, model)?;
    }
    match args.output {
        Some(_) => Ok(()),
        None => table::rewrite(&root.join("docs/performance.md"), &root.join(RESULTS)),
    }
}

fn measure(root: &Path, args: &Args, model: &str) -> Result<()> {
    let binary = release_binary(root, args.binary.as_deref())?;
    ensure!(args.shared < args.prompt, "--shared: expected less than --prompt");
    let turns = if args.turns { args.rounds } else { 1 };
    let longest = args.shared + turns * (args.prompt - args.shared + args.generate);
    let needs = if args.texts > 0 { args.prompt } else { longest };
    ensure!(needs <= args.ctx_size, "--ctx-size: a request needs {needs} tokens");
    let model = pull(root, model)?;
    let revision = args.commit.clone().map_or_else(|| commit(root), Ok)?;
    let gpu = gpu::name().filter(|_| args.threads.is_none());
    let device = gpu.unwrap_or_else(cpu_name);
    for &streams in &args.streams {
        let load = Load {
            streams,
            rounds: args.rounds,
            prompt: args.prompt,
            shared: args.shared,
            generate: if args.texts > 0 { 0 } else { args.generate },
            long: args.long,
            has_turns: args.turns,
            texts: args.texts,
            fields: args.request.clone(),
        };
        let (has_long, context, threads) = (args.long > 0, args.ctx_size, args.threads);
        let embeds = args.texts > 0;
        let setup = Setup { model: &model, streams, has_long, embeds, context, threads };
        let mut servers = vec![Server::bodkin(&binary, &setup, &args.serve_args)?];
        if let Some(peer) = &args.peer {
            servers.push(Server::llama(peer, &args.peer_name, &setup)?);
        }
        if args.shared > 0 {
            servers.iter().try_for_each(|server| load.run_first(server.address))?;
        }
        let mut measured: Vec<Vec<Measured>> = servers.iter().map(|_| Vec::new()).collect();
        for pair in 0..args.pairs {
            for (server, measured) in servers.iter().zip(&mut measured) {
                eprintln!("{}: {}, run {} of {}", server.name, load.name(), pair + 1, args.pairs);
                measured.push(load.run(server.address, pair as u64)?);
            }
        }
        let rows: Vec<Value> = measured.iter().map(|runs| load::medians(runs)).collect();
        for (i, (server, numbers)) in servers.iter().zip(&rows).enumerate() {
            let mut row = json!({
                "commit": revision,
                "device": device,
                "threads": args.threads,
                "file": model.file_name().map(|name| name.to_string_lossy().into_owned()),
                "server": server.name,
                "load": load.name(),
                "ctx_size": args.ctx_size,
            });
            for (name, value) in numbers.as_object().into_iter().flatten() {
                row[name] = value.clone();
            }
            if i == 0 && rows.len() > 1 {
                row["ratio"] = load::ratio(&measured[0], &measured[1]).into();
            }
            let output = args.output.clone().unwrap_or_else(|| workspace::root().join(RESULTS));
            append(&output, &row)?;
            println!("{row}");
        }
    }
    Ok(())
}
