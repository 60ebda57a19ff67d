//! Files of log-probabilities in the layout of llama.cpp's `--kl-divergence-base`, little-endian:
//! `_logits_`, the tokens of a window (u32), the vocabulary and the number of windows (i32), the
//! windows' tokens (i32), then a row for each prediction that counts, window after window: a scale
//! and the smallest log-probability (f32), and a 16-bit code for each token of the vocabulary,
//! rounded up to an even number. A log-probability is `scale * code + smallest`; those further than
//! 16 below the largest are held up to there.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::windows::Windows;

const MAGIC: &[u8; 8] = b"_logits_";
/// Logits more than this below the largest are clamped.
const RANGE: f32 = 16.0;
const HEADER_BYTES: u64 = 20;
/// The most tokens of a text, a hundred times those of the usual ones. They are read at once, and
/// a sparse file of their size takes no disk.
const TOKENS_MAX: u128 = 1 << 25;

/// Bytes of a row: two floats, and codes for an even number of tokens.
fn row_bytes(vocabulary: usize) -> usize {
    8 + 2 * vocabulary.next_multiple_of(2)
}

/// Encodes a row of logits in the file's format.
pub fn encode_row(logits: &[f32], log_sum: f64) -> Vec<u8> {
    let (smallest, max) =
        logits.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(smallest, max), &logit| {
            (smallest.min(logit), max.max(logit))
        });
    let smallest = smallest.max(max - RANGE);
    let scale = (max - smallest) / 65535.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let code = |logit: f32| match logit > smallest {
        true => (inverse * (logit - smallest)).round_ties_even() as u16,
        false => 0,
    };
    let mut row = Vec::with_capacity(row_bytes(logits.len()));
    row.extend(scale.to_le_bytes());
    row.extend((smallest - max - log_sum as f32).to_le_bytes());
    row.extend(logits.iter().flat_map(|&logit| code(logit).to_le_bytes()));
    row.resize(row_bytes(logits.len()), 0);
    row
}

/// Writes a file of log-probabilities.
pub struct BaseWriter<W: Write> {
    out: BufWriter<W>,
}

impl<W: Write> BaseWriter<W> {
    /// Writes the header and the tokens.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(out: W, windows: &Windows, vocabulary: usize) -> std::io::Result<BaseWriter<W>> {
        let mut out = BufWriter::with_capacity(1 << 20, out);
        out.write_all(MAGIC)?;
        for number in [windows.size(), vocabulary, windows.count()] {
            out.write_all(&(number as u32).to_le_bytes())?;
        }
        for token in windows.tokens() {
            out.write_all(&token.to_le_bytes())?;
        }
        Ok(BaseWriter { out })
    }

    /// Writes the next row.
    ///
    /// # Errors
    /// The system's error.
    pub fn row(&mut self, encoded: &[u8]) -> std::io::Result<()> {
        self.out.write_all(encoded)
    }

    /// Writes the buffered rows.
    ///
    /// # Errors
    /// The system's error.
    pub fn finish(mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// A file of log-probabilities that is being read.
pub struct Base {
    path: PathBuf,
    file: BufReader<File>,
    vocabulary: usize,
    windows: Windows,
}

/// The stored log-probabilities of one prediction.
#[derive(Clone, Copy, Debug)]
pub struct BaseRow<'a> {
    scale: f32,
    smallest: f32,
    /// `[vocabulary]`, two bytes each.
    codes: &'a [u8],
}

impl BaseRow<'_> {
    /// The log-probabilities of all tokens.
    pub fn log_probabilities(&self) -> impl Iterator<Item = f32> {
        let codes = self.codes.chunks_exact(2).map(|code| u16::from_le_bytes([code[0], code[1]]));
        codes.map(|code| self.scale * f32::from(code) + self.smallest)
    }

    /// The log-probability of a token.
    pub fn log_probability(&self, token: u32) -> f32 {
        let code = &self.codes[2 * token as usize..][..2];
        self.scale * f32::from(u16::from_le_bytes([code[0], code[1]])) + self.smallest
    }
}

impl Base {
    /// Opens a file and reads its header and tokens. `first_token` is the model's BOS token, which
    /// the file does not store.
    ///
    /// # Errors
    /// One line if it is no such file, or shorter than it says.
    pub fn open(path: &Path, first_token: Option<u32>) -> Result<Base> {
        let failed = |source| Error::Io { file: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut header = [0; HEADER_BYTES as usize];
        let invalid = |item, expected: &str, found: String| {
            let (file, expected) = (path.to_owned(), expected.to_owned());
            Error::Base { file, item, expected, found }
        };
        if bytes < HEADER_BYTES {
            return Err(invalid("header", "20 bytes", format!("{bytes} bytes")));
        }
        file.read_exact(&mut header).map_err(failed)?;
        if &header[..8] != MAGIC {
            let found = header[..8].escape_ascii().to_string();
            return Err(invalid("magic", "_logits_", found));
        }
        let number = |i: usize| {
            let bytes = &header[8 + 4 * i..][..4];
            u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        let [size, vocabulary, count] = [number(0), number(1), number(2)];
        // A product of three 32-bit numbers fits into 128 bits.
        let [wide_size, wide_count] = [u128::from(size), u128::from(count)];
        let rows = wide_count * (wide_size - wide_size / 2).saturating_sub(1);
        let row = 8 + 2 * u128::from(vocabulary).next_multiple_of(2);
        let expected = u128::from(HEADER_BYTES) + 4 * wide_size * wide_count + rows * row;
        if u128::from(bytes) != expected || count == 0 || vocabulary == 0 {
            let expected = format!(
                "{expected} bytes for {count} windows of {size} tokens out of {vocabulary}"
            );
            return Err(invalid("size", &expected, format!("{bytes} bytes")));
        }
        let all = wide_size * wide_count;
        if all > TOKENS_MAX {
            return Err(invalid("tokens", &format!("at most {TOKENS_MAX}"), all.to_string()));
        }
        let mut tokens = vec![0; 4 * size as usize * count as usize];
        file.read_exact(&mut tokens).map_err(failed)?;
        let words = tokens.chunks_exact(4);
        let tokens: Vec<u32> =
            words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
        if let Some(token) = tokens.iter().find(|&&token| token >= vocabulary) {
            let expected = format!("token ids below {vocabulary}");
            return Err(invalid("tokens", &expected, token.to_string()));
        }
        let windows = Windows::new(tokens, size as usize, first_token)?;
        Ok(Base { path: path.to_owned(), file, vocabulary: vocabulary as usize, windows })
    }

    /// The windows that were read.
    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    /// Fails unless the model has this vocabulary.
    ///
    /// # Errors
    /// A line with both numbers.
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        if vocabulary == self.vocabulary {
            return Ok(());
        }
        Err(Error::Base {
            file: self.path.clone(),
            item: "vocabulary",
            expected: format!("the model's {vocabulary} tokens"),
            found: self.vocabulary.to_string(),
        })
    }

    /// Reads the rows of the next window into `rows`.
    ///
    /// # Errors
    /// If the file cannot be read, or a number is not finite.
    pub fn read_window(&mut self, rows: &mut Vec<u8>) -> Result<()> {
        rows.resize(self.windows.scored().len() * row_bytes(self.vocabulary), 0);
        let failed = |source| Error::Io { file: self.path.clone(), source };
        self.file.read_exact(rows).map_err(failed)?;
        for i in 0..self.windows.scored().len() {
            let BaseRow { scale, smallest, .. } = self.row(rows, i);
            if !(scale.is_finite() && smallest.is_finite()) {
                return Err(Error::Base {
                    file: self.path.clone(),
                    item: "row",
                    expected: "finite numbers".to_owned(),
                    found: format!("scale {scale}, smallest {smallest}"),
                });
            }
        }
        Ok(())
    }

    /// One of the rows that [`Base::read_window`] read.
    pub fn row<'a>(&self, rows: &'a [u8], index: usize) -> BaseRow<'a> {
        let row = &rows[index * row_bytes(self.vocabulary)..][..row_bytes(self.vocabulary)];
        let float =
            |at: usize| f32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
        BaseRow { scale: float(0), smallest: float(4), codes: &row[8..8 + 2 * self.vocabulary] }
    }
}
