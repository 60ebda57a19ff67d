//! `cargo xtask conformance`: the acceptance suite on a device that tests cannot count on.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bodkin_backend::{
    Backend, Batch, ExpertBudget, ExpertStore, KvType, Limits, Model, PageTable, Span,
};
use bodkin_conformance as conformance;
use bodkin_cuda::Cuda;
use bodkin_wgpu::Wgpu;

/// Tokens of prompts, and steps after them, of a model's comparison: they cross a KV split's end,
/// give each block of a device several splits, and more splits than are combined at a time.
const PROMPTS: [(usize, usize); 3] = [(120, 20), (4300, 8), (12_400, 8)];
/// Tokens of a prompt that are read in one step, where nothing else is said.
const BATCH: usize = 512;

/// A prompt, and steps after it, whose last chunk has two KV splits of prefill attention, which a
/// block merges where there are many, and the tokens of a chunk so small that blocks share them.
const CHUNKED: (usize, usize) = (2112, 1);
const SMALL_CHUNK: usize = 24;

/// How the bits that are compared were made.
const WITHOUT: &str = "without rewrites";
const ON_ONE: &str = "on one device";
const CACHED: &str = "with cached experts";
const MAPPED: &str = "with mapped experts";
const READ_AHEAD: &str = "with mapped experts, some read ahead";
const TUNED: &str = "with measured launch shapes";

/// Shares of the experts of a layer that have slots on the device: one expert, and half of them.
const CACHED_SHARES: [f64; 2] = [0.0, 0.5];

/// Bytes of the host for mapped experts: for those of about two layers of the models that are
/// compared.
const HOST_BYTES: u64 = 7 << 20;

/// A GPU with slots for some experts, and how. Others are in memory of the host; or in the file,
/// and the host has room for no more than a step needs, or for some that are read ahead.
fn with_few_experts(
    open: impl Fn() -> Result<Cuda>,
) -> impl Iterator<Item = Result<(Cuda, &'static str)>> {
    let stores = [
        (CACHED_SHARES[0], ExpertStore::Auto, CACHED),
        (CACHED_SHARES[1], ExpertStore::Auto, CACHED),
        (CACHED_SHARES[1], ExpertStore::Mmap(Some(0)), MAPPED),
        (CACHED_SHARES[0], ExpertStore::Mmap(Some(HOST_BYTES)), READ_AHEAD),
    ];
    stores.into_iter().map(move |(share, store, how)| {
        let cuda = open()?.with_expert_budget(ExpertBudget::Share(share));
        Ok((cuda.with_expert_store(store, || None), how))
    })
}

/// The tokens of a prompt, and the bits of the logits of each step behind it.
type Rows = (usize, Vec<Vec<u32>>);

/// What to check.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The number of the NVIDIA device, or those of several that share models, divided by commas.
    #[arg(long, default_value = "0", value_delimiter = ',')]
    device: Vec<usize>,
    /// Run the suite on the first device that Vulkan, Metal or DX12 drives
    #[arg(long, conflicts_with_all = ["device", "models"])]
    wgpu: bool,
    /// Only the model files, without the suite, and only behind the shortest prompt
    #[arg(long, requires = "models")]
    brief: bool,
    /// Only the model files, and a prompt's logits in large and in small chunks
    #[arg(long, requires = "models")]
    chunks: bool,
    /// Only multi-step decode of more rows than backends treat as a small step
    #[arg(long, conflicts_with_all = ["models", "case", "wgpu"])]
    many_rows: bool,
    /// Expect that the persistent kernel stalls, as where the emulator loses a result
    #[arg(long, requires = "models")]
    stalls: bool,
    /// The type of keys and values of the model files: `auto`, `f16` or `q8_0`
    #[arg(long, default_value = "auto", requires = "models", value_parser = kv_type)]
    kv_type: KvType,
    /// Only the suite's cases whose names contain this, by each type of keys and values
    #[arg(long)]
    case: Vec<String>,
    /// Also compare with launch shapes that are measured, or read, in this folder
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["wgpu", "chunks", "stalls"])]
    tune: Option<PathBuf>,
    /// Model files whose single-row steps are compared with and without rewrites, and with one
    /// device.
    models: Vec<PathBuf>,
}

/// Parses a type of keys and values.
fn kv_type(name: &str) -> Result<KvType, String> {
    let found = KvType::ALL.into_iter().find(|kv_type| kv_type.name() == name);
    found.ok_or_else(|| format!("`{name}` is no type of keys and values"))
}

/// Runs the suite, also with keys and values in half precision where the weights are in f32 and as
/// bytes, and compares the bits with and without rewrites of the plan, and of several devices with
/// those of the first alone.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.wgpu {
        return check_wgpu(&args.case);
    }
    if args.stalls {
        return args.models.iter().try_for_each(|path| check_stall(&args.device, path));
    }
    if args.chunks {
        return args.models.iter().try_for_each(|path| check_chunks(args, path));
    }
    if args.many_rows {
        return check_many_rows(args);
    }
    if !args.case.is_empty() {
        return args.case.iter().try_for_each(|case| check_cases(args, case));
    }
    let prompts = if args.brief { &PROMPTS[..1] } else { &PROMPTS };
    args.models.iter().try_for_each(|path| check_model(args, path, prompts))?;
    if args.brief {
        return Ok(());
    }
    let cuda = Cuda::open_all(&args.device)?;
    let mut failures = conformance::check(&cuda);
    let fused = conformance::logits(&cuda)?;
    let plain = conformance::logits(&cuda.fusing(false))?;
    compare(&fused, &plain, WITHOUT, &mut failures);
    if args.device.len() > 1 {
        let one = conformance::logits(&Cuda::open(args.device[0])?)?;
        compare(&fused, &one, ON_ONE, &mut failures);
    }
    for cached in with_few_experts(|| Ok(Cuda::open_all(&args.device)?)) {
        let (cuda, how) = cached?;
        compare(&fused, &conformance::logits(&cuda)?, how, &mut failures);
    }
    if args.tune.is_some() {
        let cuda = Cuda::open_all(&args.device)?.with_tuning(args.tune.clone());
        compare(&fused, &conformance::logits(&cuda)?, TUNED, &mut failures);
    }
    for kv_type in [KvType::F16, KvType::Q8_0] {
        let open = || Ok::<Cuda, anyhow::Error>(Cuda::open_all(&args.device)?.keeping(kv_type));
        let mut found = conformance::check(&open()?);
        let fused = conformance::logits(&open()?)?;
        let plain = conformance::logits(&open()?.fusing(false))?;
        compare(&fused, &plain, WITHOUT, &mut found);
        if args.device.len() > 1 {
            let one = conformance::logits(&Cuda::open(args.device[0])?.keeping(kv_type))?;
            compare(&fused, &one, ON_ONE, &mut found);
        }
        failures.extend(found.iter().map(|failure| format!("{}: {failure}", kv_type.name())));
    }
    failures.iter().for_each(|failure| println!("FAILED: {failure}"));
    ensure!(failures.is_empty(), "{} failures", failures.len());
    println!("conformance: {} cases, none failed", fused.len());
    Ok(())
}

/// Compares the bits of a model's single-row steps.
fn check_model(args: &Args, path: &Path, prompts: &[(usize, usize)]) -> Result<()> {
    let name = path.display();
    let file = bodkin_model::open(path).with_context(|| name.to_string())?;
    let plan = bodkin_model::plan(file.metadata(), file.tensors())?;
    let has_experts = !plan.routed_layers().is_empty();
    let open = || Ok::<Cuda, anyhow::Error>(Cuda::open_all(&args.device)?.keeping(args.kv_type));
    let fused = single_rows(&open()?, path, prompts)?;
    let plain = single_rows(&open()?.fusing(false), path, prompts)?;
    count_same(&name, WITHOUT, &fused, &plain)?;
    if args.device.len() > 1 {
        let one = Cuda::open(args.device[0])?.keeping(args.kv_type);
        let one = single_rows(&one, path, prompts)?;
        count_same(&name, ON_ONE, &fused, &one)?;
    }
    for cached in with_few_experts(open).filter(|_| has_experts) {
        let (cuda, how) = cached?;
        count_same(&name, how, &fused, &single_rows(&cuda, path, prompts)?)?;
    }
    if args.tune.is_some() {
        let tuned = open()?.with_tuning(args.tune.clone());
        count_same(&name, TUNED, &fused, &single_rows(&tuned, path, prompts)?)?;
    }
    Ok(())
}

/// Checks all cases, or some, on a GPU that is not NVIDIA's alone.
fn check_wgpu(names: &[String]) -> Result<()> {
    let mut failures = Vec::new();
    let is_chosen: &dyn Fn(&str) -> bool =
        &|case| names.is_empty() || names.iter().any(|name| case.contains(name));
    // Cases with experts say so in their names.
    let has_experts: &dyn Fn(&str) -> bool = &|case| is_chosen(case) && case.contains("expert");
    for kv_type in KvType::ALL {
        let gpu = Wgpu::open(0)?.keeping(kv_type);
        let mut found = match names {
            [] => conformance::check(&gpu),
            _ => conformance::check_named(&gpu, is_chosen),
        };
        let single = Wgpu::open(0)?.keeping(kv_type).fusing(false);
        let logits = [conformance::logits_named, conformance::generated_logits_named];
        for logits in logits {
            compare(&logits(&gpu, is_chosen)?, &logits(&single, is_chosen)?, WITHOUT, &mut found);
            let usual = logits(&gpu, has_experts)?;
            ensure!(!usual.is_empty() || !names.is_empty(), "no case has experts");
            for share in CACHED_SHARES {
                let cached = gpu.clone().with_expert_budget(ExpertBudget::Share(share));
                compare(&usual, &logits(&cached, has_experts)?, CACHED, &mut found);
            }
        }
        failures.extend(found.iter().map(|failure| format!("{}: {failure}", kv_type.name())));
    }
    failures.iter().for_each(|failure| println!("FAILED: {failure}"));
    ensure!(failures.is_empty(), "{} failures", failures.len());
    println!("conformance: none failed on {}", Wgpu::open(0)?.name());
    Ok(())
}

fn check_many_rows(args: &Args) -> Result<()> {
    let cuda = Cuda::open_all(&args.device)?.with_tuning(args.tune.clone());
    let failures = conformance::check_many_rows(&cuda);
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    println!("conformance: multi-step decode of many rows, none failed");
    Ok(())
}

/// Checks some cases, and compares their bits with and without rewrites.
fn check_cases(args: &Args, case: &str) -> Result<()> {
    let mut failures = Vec::new();
    let mut count = 0;
    let is_chosen = |name: &str| name.contains(case);
    for kv_type in [KvType::Auto, KvType::F16, KvType::Q8_0] {
        let open = || Ok::<Cuda, anyhow::Error>(Cuda::open_all(&args.device)?.keeping(kv_type));
        let mut found = conformance::check_named(&open()?, is_chosen);
        let fused = conformance::logits_named(&open()?, is_chosen)?;
        let plain = conformance::logits_named(&open()?.fusing(false), is_chosen)?;
        compare(&fused, &plain, WITHOUT, &mut found);
        // Cases with experts say so in their names.
        let has_experts = fused.iter().any(|(name, _)| name.contains("expert"));
        for cached in with_few_experts(open).filter(|_| has_experts) {
            let (cuda, how) = cached?;
            compare(&fused, &conformance::logits_named(&cuda, is_chosen)?, how, &mut found);
        }
        if args.tune.is_some() {
            let cuda = open()?.with_tuning(args.tune.clone());
            compare(&fused, &conformance::logits_named(&cuda, is_chosen)?, TUNED, &mut found);
        }
        failures.extend(found.iter().map(|failure| format!("{}: {failure}", kv_type.name())));
        count += fused.len();
    }
    failures.iter().for_each(|failure| println!("FAILED: {failure}"));
    ensure!(failures.is_empty(), "{} failures", failures.len());
    ensure!(count > 0, "no case's name contains `{case}`");
    println!("conformance: {count} cases with `{case}`, none failed");
    Ok(())
}

/// Where the first result of the persistent kernel is lost, a step of one row has to end with an
/// error that names the stage that waits for it, and so has every later step.
fn check_stall(device: &[usize], path: &Path) -> Result<()> {
    let mut model = load(&Cuda::open_all(device)?, path, &PROMPTS[..1])?;
    let (prompt, steps) = PROMPTS[0];
    for what in ["the step that stalls", "a later step"] {
        let error = match rows_behind(model.as_mut(), prompt, steps, BATCH) {
            Ok(_) => bail!("{}: expected an error of {what}", path.display()),
            Err(error) => error.to_string(),
        };
        println!("{}: {what}: {error}", path.display());
        let stage = "no progress for 2 s in stage 1 (attn_q + attn_k + attn_v)";
        ensure!(error.contains(stage), "{what}: expected `{stage}` in its error");
    }
    Ok(())
}

/// A prompt's logits have to be the same however it is chunked.
fn check_chunks(args: &Args, path: &Path) -> Result<()> {
    let (prompt, steps) = CHUNKED;
    let cuda = Cuda::open_all(&args.device)?.keeping(args.kv_type);
    let mut model = load(&cuda, path, &[CHUNKED])?;
    let mut rows = |chunk| -> Result<Vec<Rows>> {
        Ok(vec![(prompt, rows_behind(model.as_mut(), prompt, steps, chunk)?)])
    };
    let (large, small) = (rows(BATCH)?, rows(SMALL_CHUNK)?);
    count_same(path.display(), "in small chunks", &large, &small)
}

/// Adds the cases whose bits differ where they are computed otherwise.
fn compare(
    usual: &[(String, Vec<f32>)],
    other: &[(String, Vec<f32>)],
    how: &str,
    failures: &mut Vec<String>,
) {
    for ((name, usual), (_, other)) in usual.iter().zip(other) {
        if !usual.iter().map(|x| x.to_bits()).eq(other.iter().map(|x| x.to_bits())) {
            failures.push(format!("{name}: other bits {how}"));
        }
    }
}

/// Counts the steps of a model that have the same bits where they are computed otherwise.
fn count_same(name: impl Display, how: &str, usual: &[Rows], other: &[Rows]) -> Result<()> {
    for ((prompt, usual), (_, other)) in usual.iter().zip(other) {
        let (same, all) = (usual.iter().zip(other).filter(|(a, b)| a == b).count(), usual.len());
        println!("{name}: {same} of {all} steps behind {prompt} tokens have the same bits {how}");
        ensure!(same == all, "{name}: other bits {how}");
    }
    Ok(())
}

/// The bits of the logits after each prompt that a model has the positions for, and of single steps
/// behind it.
fn single_rows(cuda: &Cuda, path: &Path, prompts: &[(usize, usize)]) -> Result<Vec<Rows>> {
    let mut model = load(cuda, path, prompts)?;
    let positions = model.plan().max_positions();
    let fitting = prompts.iter().filter(|(prompt, steps)| prompt + steps <= positions);
    let rows = fitting
        .map(|&(prompt, steps)| Ok((prompt, rows_behind(model.as_mut(), prompt, steps, BATCH)?)));
    rows.collect()
}

/// Loads a model for the longest of the prompts that it has the positions for.
fn load(cuda: &Cuda, path: &Path, prompts: &[(usize, usize)]) -> Result<Box<dyn Model>> {
    let file = Arc::new(bodkin_model::open(path).with_context(|| path.display().to_string())?);
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors())?);
    let lengths = prompts.iter().map(|(prompt, steps)| prompt + steps);
    let longest = lengths.filter(|&len| len <= plan.max_positions()).max();
    let longest = longest.with_context(|| format!("{}: too few positions", path.display()))?;
    let pages = vec![longest.div_ceil(bodkin_backend::PAGE_TOKENS); plan.windows().len()];
    let limits = Limits { tokens: BATCH, outputs: 1, pages, state_slots: 1 };
    Ok(cuda.load(plan, &file, &limits, &|_, _| {})?)
}

/// Those after one prompt, of which a step reads at most `chunk` tokens.
fn rows_behind(
    model: &mut dyn Model,
    prompt: usize,
    steps: usize,
    chunk: usize,
) -> Result<Vec<Vec<u32>>> {
    let windows = model.plan().windows().len();
    let mut rows = Vec::new();
    let mut logits = vec![0.0; model.plan().output_width()];
    let mut position = 0;
    while position < prompt + steps {
        let is_prefill = position < prompt;
        let len = if is_prefill { chunk.min(prompt - position) } else { 1 };
        let pages = (position + len).div_ceil(bodkin_backend::PAGE_TOKENS);
        let table = PageTable { skipped: 0, pages: (0..pages as u32).collect() };
        let span = Span { len, position, tables: vec![table; windows], state_slot: 0, is_prefill };
        let tokens = (position..position + len).map(|i| (i * 7919 % 997) as u32).collect();
        let batch =
            Batch { tokens, spans: vec![span], outputs: vec![len as u32 - 1], ..Batch::default() };
        model.forward(&batch, &mut logits)?;
        position += len;
        if position >= prompt {
            rows.push(logits.iter().map(|x| x.to_bits()).collect());
        }
    }
    Ok(rows)
}
