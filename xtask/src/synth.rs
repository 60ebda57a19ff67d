//! `cargo xtask synth`: a model of a given shape with random weights, for measuring speed and
//! memory without a download. The values mean nothing, but every block is valid, activations keep
//! an ordinary size, and the file has a whole tokenizer, so that other engines load it too.

mod blocks;
mod shape;
mod tokenizer;

use std::cell::Cell;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bodkin_gguf::{Format, Writer};

use blocks::Blocks;
use shape::{Fill, Shape, Size};

/// What to make.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The model's size.
    #[arg(value_enum)]
    shape: Size,
    /// How every matrix is stored, such as Q4_K.
    format: String,
    /// The file to write.
    out: PathBuf,
    /// Another seed gives other weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Writes the file.
pub(crate) fn run(args: &Args) -> Result<()> {
    let format = Format::from_name(&args.format)
        .with_context(|| format!("`{}` is no format; expected one such as Q4_K", args.format))?;
    ensure!(blocks::holds_weights(format), "{} holds no weights", format.name());
    let name = format!("synthetic {:?} {}", args.shape, format.name());
    write(&args.shape.shape(), format, args.seed, &name, &args.out)
}

fn write(shape: &Shape, format: Format, seed: u64, name: &str, out: &Path) -> Result<()> {
    let matrices = Blocks::new(format, seed);
    // Token tables are kept more precisely than the rest, as in most files.
    let table_format = if format.block_elements() == 1 { format } else { Format::Q8_0 };
    let tables = Blocks::new(table_format, seed);
    let precise = Blocks::new(Format::F32, seed);

    let progress = Progress::default();
    let metadata = shape.metadata(name);
    let mut writer = Writer::new(out, &metadata)?;
    for (i, tensor) in shape.tensors().into_iter().enumerate() {
        let dimensions: Vec<u64> = tensor.shape.iter().map(|&n| n.into()).collect();
        let elements: u64 = dimensions.iter().product();
        let blocks = match tensor.fill {
            Fill::Weights => &matrices,
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
        let bytes = blocks.bytes(elements);
        progress.expect(bytes);
        let source = move |out: &mut dyn Write| -> io::Result<()> {
            blocks.write(number, bytes, out)?;
            progress.advance(bytes);
            Ok(())
        };
        writer.tensor_with(&tensor.name, blocks.format, &dimensions, source)?;
    }
    writer.save()?;
    progress.finish();
    Ok(())
}

/// Tells on stderr how far the file is.
#[derive(Default)]
struct Progress {
    done: Cell<u64>,
    total: Cell<u64>,
}

impl Progress {
    fn expect(&self, bytes: u64) {
        self.total.set(self.total.get() + bytes);
    }

    fn advance(&self, bytes: u64) {
        self.done.set(self.done.get() + bytes);
        eprint!("\r{} of {} MB", self.done.get() / 1_000_000, self.total.get() / 1_000_000);
    }

    fn finish(&self) {
        eprintln!();
    }
}

#[cfg(test)]
mod tests;
