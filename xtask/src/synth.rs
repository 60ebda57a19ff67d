//! `cargo xtask synth`: a Llama model of a given shape with random weights, for measuring speed
//! without a download. The values mean nothing, but every block is valid, activations keep an
//! ordinary size, and the file has a whole tokenizer, so that other engines load it too.

mod blocks;
mod tokenizer;

use std::cell::Cell;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use bodkin_gguf::{Format, Metadata, Value, Writer};

use blocks::Blocks;

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

/// Which model the shape is that of.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Size {
    /// For tests: a megabyte or two.
    Tiny,
    /// That of Llama 3.2 1B.
    #[value(name = "1b")]
    OneB,
    /// That of Llama 3.1 8B.
    #[value(name = "8b")]
    EightB,
}

/// The numbers that make up a Llama.
#[derive(Clone, Copy, Debug)]
struct Shape {
    layers: u32,
    width: u32,
    hidden: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    vocabulary: u32,
    /// Whether the token table is the head too.
    tied: bool,
}

impl Size {
    fn shape(self) -> Shape {
        match self {
            Size::Tiny => Shape {
                layers: 2,
                width: 256,
                hidden: 512,
                heads: 8,
                kv_heads: 4,
                head_dim: 32,
                vocabulary: 512,
                tied: false,
            },
            Size::OneB => Shape {
                layers: 16,
                width: 2048,
                hidden: 8192,
                heads: 32,
                kv_heads: 8,
                head_dim: 64,
                vocabulary: 128_256,
                tied: true,
            },
            Size::EightB => Shape {
                layers: 32,
                width: 4096,
                hidden: 14_336,
                heads: 32,
                kv_heads: 8,
                head_dim: 128,
                vocabulary: 128_256,
                tied: false,
            },
        }
    }
}

/// Writes the file.
pub(crate) fn run(args: &Args) -> Result<()> {
    let format = Format::from_name(&args.format)
        .with_context(|| format!("`{}` is no format; expected one such as Q4_K", args.format))?;
    ensure!(blocks::holds_weights(format), "{} holds no weights", format.name());
    let shape = args.shape.shape();
    let name = format!("synthetic {:?} {}", args.shape, format.name());
    let metadata = metadata(&shape, &name);
    let matrices = Blocks::new(format, args.seed);
    // Token tables are kept more precisely than the rest, as in most files.
    let table_format = if format.block_elements() == 1 { format } else { Format::Q8_0 };
    let tables = Blocks::new(table_format, args.seed);
    let ones: Vec<u8> = (0..shape.width).flat_map(|_| 1f32.to_le_bytes()).collect();

    let progress = Progress::default();
    let mut writer = Writer::new(&args.out, &metadata)?;
    for (i, (name, rows, cols)) in tensors(&shape).into_iter().enumerate() {
        if rows == 1 {
            writer.tensor(&name, Format::F32, &[u64::from(cols)], &ones)?;
            continue;
        }
        let blocks = if name.starts_with("blk.") { &matrices } else { &tables };
        let (tensor, progress) = (i as u64, &progress);
        let elements = u64::from(rows) * u64::from(cols);
        let bytes = blocks.bytes(elements);
        progress.expect(bytes);
        let source = move |out: &mut dyn Write| -> io::Result<()> {
            blocks.write(tensor, bytes, out)?;
            progress.advance(bytes);
            Ok(())
        };
        writer.tensor_with(&name, blocks.format, &[u64::from(cols), u64::from(rows)], source)?;
    }
    writer.save()?;
    progress.finish();
    Ok(())
}

/// Name, rows and columns of every tensor; those of one row are norms.
fn tensors(s: &Shape) -> Vec<(String, u32, u32)> {
    let (q, kv) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
    let mut tensors = vec![("token_embd.weight".to_owned(), s.vocabulary, s.width)];
    for layer in 0..s.layers {
        for (name, rows, cols) in [
            ("attn_norm", 1, s.width),
            ("attn_q", q, s.width),
            ("attn_k", kv, s.width),
            ("attn_v", kv, s.width),
            ("attn_output", s.width, q),
            ("ffn_norm", 1, s.width),
            ("ffn_gate", s.hidden, s.width),
            ("ffn_up", s.hidden, s.width),
            ("ffn_down", s.width, s.hidden),
        ] {
            tensors.push((format!("blk.{layer}.{name}.weight"), rows, cols));
        }
    }
    tensors.push(("output_norm.weight".to_owned(), 1, s.width));
    if !s.tied {
        tensors.push(("output.weight".to_owned(), s.vocabulary, s.width));
    }
    tensors
}

fn metadata(s: &Shape, name: &str) -> Metadata {
    let mut metadata = Metadata::new();
    let string = |text: &str| Value::String(text.as_bytes().into());
    metadata.insert("general.architecture", string("llama"));
    metadata.insert("general.name", string(name));
    metadata.insert("general.quantization_version", Value::U32(2));
    for (key, value) in [
        ("block_count", s.layers),
        ("context_length", 8192),
        ("embedding_length", s.width),
        ("feed_forward_length", s.hidden),
        ("attention.head_count", s.heads),
        ("attention.head_count_kv", s.kv_heads),
        ("rope.dimension_count", s.head_dim),
        ("vocab_size", s.vocabulary),
    ] {
        metadata.insert(format!("llama.{key}"), Value::U32(value));
    }
    metadata.insert("llama.rope.freq_base", Value::F32(500_000.0));
    metadata.insert("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    tokenizer::insert(s.vocabulary, &mut metadata);
    metadata
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
