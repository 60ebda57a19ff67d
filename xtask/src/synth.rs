//! `cargo xtask synth`: a model of a given shape with random weights, for measuring speed and
//! memory without a download. The values mean nothing, but every block is valid, activations keep
//! an ordinary size, and the file has a whole tokenizer, so that other engines load it too.

mod blocks;
mod metadata;
mod pruned;
mod routed;
mod shape;
mod size;
mod tokenizer;

use std::cell::Cell;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bodkin_eval::RoutingTrace;
use bodkin_gguf::{Format, Writer};

use blocks::Blocks;
use pruned::PrunedRows;
use routed::Routed;
use shape::{Fill, Shape};
pub(crate) use size::Size;

/// What to make.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The model's size.
    #[arg(value_enum)]
    pub(crate) shape: Size,
    /// How every matrix is stored, such as Q4_K, BITMAP_Q8_0 or S24_Q4_0.
    pub(crate) format: String,
    /// The file to write.
    pub(crate) out: PathBuf,
    /// Another seed gives other weights.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// The share of every matrix that is zero, but for the token table and the head. 2:4 formats
    /// have half whatever it says.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) sparsity: f64,
    /// A routing trace that greedy decoding follows, as `bodkin bench --record-routing` or `cargo
    /// xtask expert-trace` write it. Token id v chooses the experts of its step v, in turn: of the
    /// first 2048 steps if embeddings have 2048 columns, and so on.
    #[arg(long, value_name = "FILE")]
    pub(crate) routing: Option<PathBuf>,
}

/// Writes the file.
pub(crate) fn run(args: &Args) -> Result<()> {
    let format = Format::from_name(&args.format)
        .with_context(|| format!("`{}` is no format; expected one such as Q4_K", args.format))?;
    ensure!(blocks::holds_weights(format), "{} holds no weights", format.name());
    ensure!((0.0..=1.0).contains(&args.sparsity), "--sparsity: expected 0 <= x <= 1");
    let name = match args.sparsity {
        0.0 => format!("synthetic {:?} {}", args.shape, format.name()),
        share => format!("synthetic {:?} {} {:.0} %", args.shape, format.name(), 100.0 * share),
    };
    let mut shape = args.shape.shape();
    let routing = args.routing.as_deref().map(RoutingTrace::read).transpose()?;
    // The head says which step is next, the token table which this one is.
    shape.tied &= routing.is_none();
    let routed = routing.map(|trace| Routed::new(trace, &shape, args.seed)).transpose()?;
    write((&shape, routed.as_ref()), format, args.sparsity, args.seed, &name, &args.out)
}

fn write(
    (shape, routed): (&Shape, Option<&Routed>),
    format: Format,
    sparsity: f64,
    seed: u64,
    name: &str,
    out: &Path,
) -> Result<()> {
    let base = format.base().unwrap_or(format);
    // Token tables are more precise than the rest, as in most files.
    let table_format = if base.block_elements() == 1 { base } else { Format::Q8_0 };
    let tables = Blocks::new(table_format, 0.0, seed);
    let precise = Blocks::new(Format::F32, 0.0, seed);
    let is_matrix = |t: &&shape::Tensor| t.fill == Fill::Weights;
    let tensors = shape.tensors();
    let widths = tensors.iter().filter(is_matrix).map(|t| t.shape[0] as usize);
    let pruned = format.has_index().then(|| PrunedRows::new(format, sparsity, seed, widths));
    let pruned = pruned.transpose()?;
    let matrices = match pruned {
        None => Blocks::new(format, sparsity, seed),
        Some(_) => Blocks::new(base, 0.0, seed),
    };
    // What `bodkin quantize` takes for rows that are not whole blocks of 256 in Q4_K.
    let partial = Blocks::new(Format::Q5_0, sparsity, seed);

    let progress = Progress::default();
    let metadata = shape.metadata(name);
    let mut writer = Writer::new(out, &metadata)?;
    for (i, tensor) in tensors.into_iter().enumerate() {
        let dimensions: Vec<u64> = tensor.shape.iter().map(|&n| n.into()).collect();
        let elements: u64 = dimensions.iter().product();
        let source = routed.map(|r| r.tensor(&tensor.name, table_format, shape.vocabulary));
        if let Some((format, source)) = source.transpose()?.flatten() {
            writer.tensor_with(&tensor.name, format, &dimensions, source)?;
            continue;
        }
        let blocks = match tensor.fill {
            Fill::Weights if !matrices.fill(tensor.shape[0]) => &partial,
            Fill::Weights | Fill::Rows => &matrices,
            Fill::Table => &tables,
            Fill::Precise => &precise,
            Fill::Constant(value) => {
                let data = value.to_le_bytes().repeat(elements as usize);
                let source = move |out: &mut dyn Write| out.write_all(&data);
                writer.tensor_with(&tensor.name, Format::F32, &dimensions, source)?;
                continue;
            }
        };
        let (number, progress) = (i as u64, &progress);
        if let Some(pruned) = pruned.as_ref().filter(|_| tensor.fill == Fill::Weights) {
            let (cols, rows) = (dimensions[0] as usize, (elements / dimensions[0]) as usize);
            let bytes = pruned.bytes(number, rows, cols);
            let source = move |out: &mut dyn Write| out.write_all(&pruned.data(number, rows, cols));
            let source = progress.of(bytes, source);
            writer.tensor_with_bytes(&tensor.name, format, &dimensions, bytes, source)?;
            continue;
        }
        let bytes = blocks.bytes(elements);
        let source = move |out: &mut dyn Write| blocks.write(number, bytes, out);
        let source = progress.of(bytes, source);
        writer.tensor_with(&tensor.name, blocks.format, &dimensions, source)?;
    }
    writer.save()?;
    progress.finish();
    Ok(())
}

/// Prints progress on stderr.
#[derive(Default)]
struct Progress {
    done: Cell<u64>,
    total: Cell<u64>,
}

impl Progress {
    /// Expects `bytes` bytes, and prints when `source` has written them.
    fn of<'a>(
        &'a self,
        bytes: u64,
        source: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a,
    ) -> impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a {
        self.total.set(self.total.get() + bytes);
        move |out| {
            source(out)?;
            self.done.set(self.done.get() + bytes);
            eprint!("\r{} of {} MB", self.done.get() / 1_000_000, self.total.get() / 1_000_000);
            Ok(())
        }
    }

    fn finish(&self) {
        eprintln!();
    }
}

#[cfg(test)]
mod tests;
