//! `cargo xtask conformance`: the acceptance suite on a device that tests cannot count on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bodkin_backend::{Backend, Batch, KvType, Limits, PageTable, Span, conformance};
use bodkin_cuda::Cuda;

/// Tokens of the prompt, and steps after it, of a model's comparison: they cross a segment's end.
const PROMPT: usize = 100;
const STEPS: usize = 60;

/// What to check.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The number of the NVIDIA device.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Model files, of which steps of one row are compared with and without rewrites.
    models: Vec<PathBuf>,
}

/// Runs the suite, also with keys and values in half precision where the weights are in f32 and as
/// bytes, and compares the bits with and without rewrites of the plan.
pub(crate) fn run(args: &Args) -> Result<()> {
    for path in &args.models {
        let fused = single_rows(&Cuda::open(args.device)?, path)?;
        let plain = single_rows(&Cuda::open(args.device)?.fusing(false), path)?;
        let same = fused.iter().zip(&plain).filter(|(a, b)| a == b).count();
        println!("{}: {same} of {} steps have the same bits", path.display(), fused.len());
        ensure!(same == fused.len(), "{}: other bits without rewrites", path.display());
    }
    let cuda = Cuda::open(args.device)?;
    let mut failures = conformance::check(&cuda);
    let fused = conformance::logits(&cuda)?;
    let plain = conformance::logits(&cuda.fusing(false))?;
    compare(&fused, &plain, &mut failures);
    for kv_type in [KvType::F16, KvType::Q8_0] {
        let open = || Ok::<Cuda, anyhow::Error>(Cuda::open(args.device)?.keeping(kv_type));
        let mut found = conformance::check(&open()?);
        let fused = conformance::logits(&open()?)?;
        let plain = conformance::logits(&open()?.fusing(false))?;
        compare(&fused, &plain, &mut found);
        failures.extend(found.iter().map(|failure| format!("{}: {failure}", kv_type.name())));
    }
    failures.iter().for_each(|failure| println!("FAILED: {failure}"));
    ensure!(failures.is_empty(), "{} failures", failures.len());
    println!("conformance: {} cases, none failed", fused.len());
    Ok(())
}

/// Adds the cases whose bits differ without rewrites.
fn compare(fused: &[(String, Vec<f32>)], plain: &[(String, Vec<f32>)], failures: &mut Vec<String>) {
    for ((name, fused), (_, plain)) in fused.iter().zip(plain) {
        if !fused.iter().map(|x| x.to_bits()).eq(plain.iter().map(|x| x.to_bits())) {
            failures.push(format!("{name}: other bits without rewrites"));
        }
    }
}

/// The bits of the logits of single steps after a prompt.
fn single_rows(cuda: &Cuda, path: &Path) -> Result<Vec<Vec<u32>>> {
    let file = Arc::new(bodkin_model::open(path).with_context(|| path.display().to_string())?);
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors())?);
    let windows = plan.windows().len();
    let limits = Limits { tokens: PROMPT, outputs: 1, pages: vec![8; windows], states: 1 };
    let mut model = cuda.load(Arc::clone(&plan), &file, &limits, &|_, _| {})?;
    let mut rows = Vec::new();
    let mut logits = vec![0.0; plan.output_width()];
    let table = PageTable { skipped: 0, pages: (0..8).collect() };
    for step in 0..=STEPS {
        let (position, len) = if step == 0 { (0, PROMPT) } else { (PROMPT + step - 1, 1) };
        let pages = (position + len).div_ceil(bodkin_backend::PAGE_TOKENS);
        let table = PageTable { pages: table.pages[..pages].to_vec(), ..table.clone() };
        let span =
            Span { len, position, tables: vec![table; windows], state: 0, is_prompt: step == 0 };
        let tokens = (position..position + len).map(|i| (i * 7919 % 997) as u32).collect();
        let batch =
            Batch { tokens, spans: vec![span], outputs: vec![len as u32 - 1], ..Batch::default() };
        model.forward(&batch, &mut logits)?;
        rows.push(logits.iter().map(|x| x.to_bits()).collect());
    }
    Ok(rows)
}
