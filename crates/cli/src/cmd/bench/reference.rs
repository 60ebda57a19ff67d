//! A model that is the same for all models of one size. Its speed says how fast the machine is at
//! the moment, with the threads, kernels and memory that other models use.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use bodkin::{ModelFile, Reporter};
use bodkin_gguf::{File, Format, Metadata, Value, Writer};

/// What messages call it.
const NAME: &str = "the reference model";
/// Elements of a head of attention. The width is a multiple of it.
const HEAD: u64 = 64;
/// The largest width, whose layers have 33.6 MB.
const WIDTH_MAX: u64 = 1024;
/// The elements of a layer, in squares of the width: four matrices of attention, and three of the
/// feed-forward network, which is four times as wide.
const SQUARES: u64 = 16;
const VOCABULARY: u64 = 512;
/// The most weights of all layers, in F16 67 MB: more than most cores have of cache.
const WEIGHTS_MAX: u64 = 1 << 25;

/// A model with random weights in F16, of at most `layers` layers, each of about `weights`
/// elements. Threads wait for each other several times in a layer, which takes the longer the more
/// other programs run: so a reference has layers like those of the model that it is compared with.
pub(super) fn model(layers: usize, weights: u64) -> Result<ModelFile> {
    let width = ((weights / SQUARES).isqrt() / HEAD * HEAD).clamp(HEAD, WIDTH_MAX);
    let layers = (layers as u64).min(WEIGHTS_MAX / (SQUARES * width * width)).max(1);
    let file = File::from_bytes(NAME, bytes(layers as u32, width)?)?;
    Ok(ModelFile::from_file(file, &Reporter::default())?)
}

fn bytes(layers: u32, width: u64) -> Result<Vec<u8>> {
    let hidden = 4 * width;
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", Value::String(b"llama".as_slice().into()));
    for (key, value) in [
        ("block_count", layers),
        ("context_length", 1024),
        ("embedding_length", width as u32),
        ("feed_forward_length", hidden as u32),
        ("attention.head_count", (width / HEAD) as u32),
        ("vocab_size", VOCABULARY as u32),
    ] {
        metadata.insert(format!("llama.{key}"), Value::U32(value));
    }
    metadata.insert("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    let mut writer = Writer::new(Path::new(NAME), &metadata)?;
    let mut seed = 1;
    let mut matrix = |writer: &mut Writer<'_>, name: &str, cols: u64, rows: u64| {
        seed += 1;
        let elements = cols * rows;
        writer
            .tensor_with(name, Format::F16, &[cols, rows], move |out| weights(out, seed, elements))
    };
    let norm = |writer: &mut Writer<'_>, name: &str| {
        writer.tensor_with(name, Format::F32, &[width], move |out| {
            (0..width).try_for_each(|_| out.write_all(&1.0_f32.to_le_bytes()))
        })
    };
    matrix(&mut writer, "token_embd.weight", width, VOCABULARY)?;
    norm(&mut writer, "output_norm.weight")?;
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        for part in ["attn_norm", "ffn_norm"] {
            norm(&mut writer, &name(part))?;
        }
        for part in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            matrix(&mut writer, &name(part), width, width)?;
        }
        for part in ["ffn_gate", "ffn_up"] {
            matrix(&mut writer, &name(part), width, hidden)?;
        }
        matrix(&mut writer, &name("ffn_down"), hidden, width)?;
    }
    let mut out = Vec::new();
    writer.write_to(&mut out)?;
    Ok(out)
}

/// Random numbers of F16 between 1/64 and 1/32, of both signs.
fn weights(out: &mut dyn Write, seed: u32, elements: u64) -> io::Result<()> {
    let mut random = seed;
    let mut next = || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let bits = (random >> 16) as u16;
        (bits & 0x8000 | 9 << 10 | bits & 0x3ff).to_le_bytes()
    };
    let row: Vec<u8> = (0..elements).flat_map(|_| next()).collect();
    out.write_all(&row)
}
