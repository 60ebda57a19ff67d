//! The kit's blocks of every format: values bit for bit, and products of the rows with a vector.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use bodkin_gguf::Format;
use serde_json::Value;

use super::kit::{Report, Selection, read_json};

/// The most that a product in single precision may be off, relative to the sum of its absolute
/// terms.
const DOT: f64 = 1e-5;

/// Compares all formats of the kit.
pub(crate) fn run(kit: &Path, _: &Selection) -> Result<Report> {
    let folder = kit.join("quants");
    let index = read_json(&folder.join("index.json"))?;
    let mut report = Report::default();
    for entry in index["types"].as_array().context("quants/index.json: no `types`")? {
        let text = |key: &str| entry[key].as_str().with_context(|| format!("no `{key}`"));
        let name = text("name")?;
        let Some(format) = Format::from_name(name) else {
            report.not_covered.push(format!("{name}: unknown format"));
            continue;
        };
        let file = Safetensors::open(&folder.join(text("file")?))?;
        for prefix in ["", "random_"] {
            compare(format, &file, prefix, &mut report)
                .with_context(|| format!("{name}: {prefix}q"))?;
        }
    }
    Ok(report)
}

fn compare(format: Format, file: &Safetensors, prefix: &str, report: &mut Report) -> Result<()> {
    let name = |part: &str| format!("{prefix}{part}");
    let blocks = file.bytes(&name("q"), "U8")?;
    let wanted = file.f32s(&name("dequant"))?;
    let block_bytes = format.block_bytes().context("blocks of one size")?;
    ensure!(blocks.len() % block_bytes == 0, "no whole blocks");
    let mut found = vec![0.0; blocks.len() / block_bytes * format.block_elements()];
    format.dequantize(blocks, &mut found);
    ensure!(found.len() == wanted.len(), "{} values, not {}", found.len(), wanted.len());
    let different =
        found.iter().zip(&wanted).position(|(found, wanted)| found.to_bits() != wanted.to_bits());
    report.check(different.is_none(), || {
        let i = different.unwrap_or_default();
        format!("{} {prefix}[{i}]: {}, not {}", format.name(), found[i], wanted[i])
    });

    let x = file.f32s("x")?;
    let (dots, sizes) = (file.f64s(&name("dot"))?, file.f64s(&name("absdot"))?);
    ensure!(found.len() == x.len() * dots.len() && dots.len() == sizes.len(), "rows");
    for (row, (wanted, size)) in found.chunks(x.len()).zip(dots.into_iter().zip(sizes)) {
        let dot: f32 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
        let error = (f64::from(dot) - wanted).abs();
        let relative = if error == 0.0 { 0.0 } else { error / size };
        report.worst("dot products", "the definition", DOT, relative);
        report.check(relative <= DOT, || {
            format!("{} {prefix}dot: {dot}, not {wanted}", format.name())
        });
    }
    Ok(())
}

/// As much of the safetensors format as the kit needs: eight bytes of length, a JSON header, and
/// the tensors' bytes.
struct Safetensors {
    header: Value,
    data: Vec<u8>,
}

impl Safetensors {
    fn open(path: &Path) -> Result<Safetensors> {
        let context = || path.display().to_string();
        let bytes = std::fs::read(path).with_context(context)?;
        let (length, rest) =
            bytes.split_first_chunk().context("no header").with_context(context)?;
        let length = usize::try_from(u64::from_le_bytes(*length))?;
        let (header, data) =
            rest.split_at_checked(length).context("a cut header").with_context(context)?;
        let header = serde_json::from_slice(header).with_context(context)?;
        Ok(Safetensors { header, data: data.to_vec() })
    }

    fn f32s(&self, name: &str) -> Result<Vec<f32>> {
        let (chunks, _) = self.bytes(name, "F32")?.as_chunks();
        Ok(chunks.iter().map(|&chunk| f32::from_le_bytes(chunk)).collect())
    }

    fn f64s(&self, name: &str) -> Result<Vec<f64>> {
        let (chunks, _) = self.bytes(name, "F64")?.as_chunks();
        Ok(chunks.iter().map(|&chunk| f64::from_le_bytes(chunk)).collect())
    }

    fn bytes(&self, name: &str, dtype: &str) -> Result<&[u8]> {
        let about = &self.header[name];
        ensure!(about["dtype"] == dtype, "`{name}` is no tensor of {dtype}");
        let offset = |end: usize| about["data_offsets"][end].as_u64().map(|at| at as usize);
        let (start, end) = offset(0).zip(offset(1)).with_context(|| format!("`{name}`: where?"))?;
        self.data.get(start..end).with_context(|| format!("`{name}` lies outside of the file"))
    }
}
