//! Every format that can hold weights: as a token table, as a matrix of odd shapes, as the head.

use bodkin_gguf::Format;
use bodkin_model::{EmbedBy, Op};

use super::case::{BFLOAT, Case, FLOAT, INTEGER, Maker, VOCABULARY};

const ROWS: [usize; 4] = [1, 5, 17, 40];
const COLS: [usize; 7] = [32, 96, 256, 512, 1, 7, 33];

/// Enough for a tile of tokens and a rest.
const TOKENS: usize = 19;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for &format in Format::all().iter().filter(|&&format| holds_weights(format)) {
        let sources: &[Source] = match quantizer(format) {
            true if is_float(format) || format.has_index() => &[Source::Quantized],
            true => &[Source::Quantized, Source::Random],
            false => &[Source::Random],
        };
        for &source in sources {
            for cols in COLS.into_iter().filter(|cols| cols.is_multiple_of(format.block_elements()))
            {
                cases.extend(ROWS.map(|rows| linear(format, source, rows, cols)));
            }
            cases.push(table(format, source));
            cases.push(head(format, source));
        }
    }
    cases
}

/// Where blocks come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// Normal values.
    Quantized,
    /// Random bits.
    Random,
}

/// Whether files hold matrices in it. The others are integers, or blocks of activations.
fn holds_weights(format: Format) -> bool {
    use Format::{I8, I16, I32, I64, Q8_1, Q8_K};
    !matches!(format, I8 | I16 | I32 | I64 | Q8_1 | Q8_K)
}

fn is_float(format: Format) -> bool {
    format.base().unwrap_or(format).block_elements() == 1
}

fn quantizer(format: Format) -> bool {
    let cols = format.block_elements();
    format.encode(&vec![0.0; cols], cols).is_ok()
}

fn tolerance(format: Format) -> f64 {
    match format {
        Format::BF16 => BFLOAT,
        _ if is_float(format) => FLOAT,
        _ => INTEGER,
    }
}

fn weight(
    maker: &mut Maker,
    format: Format,
    source: Source,
    rows: usize,
    cols: usize,
) -> bodkin_model::WeightId {
    match source {
        Source::Quantized => maker.matrix(format, rows, cols),
        Source::Random => {
            let data = maker.random.blocks(format, rows * cols);
            maker.stored(format, rows, cols, data)
        }
    }
}

fn linear(format: Format, source: Source, rows: usize, cols: usize) -> Case {
    let name = format!("linear {} {source:?} [{rows}, {cols}]", format.name());
    let (mut maker, input) = Maker::start(name, cols);
    let weight = weight(&mut maker, format, source, rows, cols);
    let out = maker.push(Op::Linear { input, weight, bias: None }, rows);
    maker.logits(out);
    maker.finish(tolerance(format), TOKENS)
}

/// Rows of a table are read as they are, whatever the format.
fn table(format: Format, source: Source) -> Case {
    let cols = 2 * format.block_elements().max(32);
    let mut maker = Maker::empty(format!("embed {} {source:?} width {cols}", format.name()));
    let table = weight(&mut maker, format, source, VOCABULARY, cols);
    let value = maker.push(Op::Embed { table, by: EmbedBy::Token }, cols);
    maker.logits(value);
    maker.finish(FLOAT, TOKENS)
}

/// The head, with its table shared: tied embeddings.
fn head(format: Format, source: Source) -> Case {
    let cols = format.block_elements().max(32);
    let mut maker = Maker::empty(format!("tied logits {} {source:?} width {cols}", format.name()));
    let table = weight(&mut maker, format, source, VOCABULARY, cols);
    let input = maker.push(Op::Embed { table, by: EmbedBy::Token }, cols);
    maker.push(Op::Logits { input, weight: table, bias: None }, VOCABULARY);
    maker.finish(tolerance(format), TOKENS)
}
