//! Routing traces: which experts each token chose in each layer with experts. Recorded from a
//! model or generated, they drive the simulation of expert caches and synthetic models.
//!
//! A file is the line `bodkin routing 1`, then little-endian integers without padding:
//!
//! | type | count | what |
//! | --- | --- | --- |
//! | u32 | 4 | experts of a layer, experts that a token chooses, layers, tokens |
//! | u32 | layers | the numbers of the layers in the model, ascending |
//! | u16 | tokens × layers × chosen | expert numbers, the most probable first |

mod policy;
mod record;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use crate::error::{Error, Result};

pub use policy::{Outcome, Policy};
pub use record::Recorder;

/// The first line: the magic, and the version of the format.
const MAGIC: &[u8; 17] = b"bodkin routing 1\n";
/// No file has more experts in a layer, since their numbers are u16.
const MAX_EXPERTS: u32 = 1 << 16;
/// No file has more layers.
const MAX_LAYERS: u32 = 1 << 12;
/// No file has more tokens.
const MAX_TOKENS: u32 = 1 << 24;
/// No file has more choices: 512 MB of them.
const MAX_CHOICES: u64 = 1 << 28;

/// The experts that tokens chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingTrace {
    /// Experts of each layer.
    experts: usize,
    /// Experts that a token chooses in a layer.
    used: usize,
    /// The numbers of the layers.
    layers: Vec<usize>,
    /// `[tokens, layers, used]`.
    choices: Vec<u16>,
}

impl RoutingTrace {
    /// A trace of `choices`, `[tokens, layers, used]`.
    ///
    /// # Errors
    /// What contradicts the format, for the file `name`.
    pub fn new(
        name: &Path,
        [experts, used]: [usize; 2],
        layers: Vec<usize>,
        choices: Vec<u16>,
    ) -> Result<RoutingTrace> {
        let tokens = choices.len() / (used * layers.len()).max(1);
        let counts = [experts, used, layers.len(), tokens];
        let counts = counts.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        check_counts(name, counts)?;
        if choices.len() != tokens * layers.len() * used {
            let expected = format!("whole tokens of {} choices", layers.len() * used);
            return Err(invalid(name, "choices", expected, choices.len()));
        }
        let trace = RoutingTrace { experts, used, layers, choices };
        trace.check(name)?;
        Ok(trace)
    }

    /// Reads a file. No more memory is allocated than the file has bytes.
    ///
    /// # Errors
    /// If it cannot be read, or contradicts the format.
    pub fn read(path: &Path) -> Result<RoutingTrace> {
        let failed = |source| Error::Io { file: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        let mut head = Vec::new();
        let len = MAGIC.len() as u64 + 16;
        Read::by_ref(&mut file).take(len).read_to_end(&mut head).map_err(failed)?;
        let Some(counts) = head.strip_prefix(MAGIC) else {
            let expected = "the line `bodkin routing 1`".to_owned();
            let text = String::from_utf8_lossy(&head);
            let line = text.lines().next().unwrap_or_default().escape_debug().to_string();
            return Err(invalid(path, "first line", expected, format!("`{line}`")));
        };
        let counts: Vec<u32> = counts.chunks_exact(4).map(number).collect();
        let Ok(counts) = <[u32; 4]>::try_from(counts) else {
            let expected = format!("{len} bytes at least");
            return Err(invalid(path, "size", expected, head.len()));
        };
        let choices = check_counts(path, counts)?;
        let [experts, used, layers, _] = counts.map(|n| n as usize);
        let wanted = 4 * layers as u64 + 2 * choices;
        let mut data = Vec::new();
        // One byte more shows that the file is too long.
        file.take(wanted + 1).read_to_end(&mut data).map_err(failed)?;
        if data.len() as u64 != wanted {
            let found = match data.len() as u64 > wanted {
                true => "more".to_owned(),
                false => (len + data.len() as u64).to_string(),
            };
            return Err(invalid(path, "size", format!("{} bytes", len + wanted), found));
        }
        let (numbers, choices) = data.split_at(4 * layers);
        let layers = numbers.chunks_exact(4).map(|bytes| number(bytes) as usize).collect();
        let choices = choices.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let trace = RoutingTrace { experts, used, layers, choices: choices.collect() };
        trace.check(path)?;
        Ok(trace)
    }

    /// Writes what [`RoutingTrace::read`] reads.
    ///
    /// # Errors
    /// That of `out`.
    pub fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        out.write_all(MAGIC)?;
        let counts = [self.experts, self.used, self.layers.len(), self.tokens()];
        for number in counts.iter().chain(&self.layers) {
            out.write_all(&(*number as u32).to_le_bytes())?;
        }
        let data: Vec<u8> = self.choices.iter().flat_map(|e| e.to_le_bytes()).collect();
        out.write_all(&data)
    }

    /// Experts of each layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Experts that a token chooses in a layer.
    pub fn used(&self) -> usize {
        self.used
    }

    /// The numbers of the layers in the model.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.choices.len() / (self.layers.len() * self.used)
    }

    /// The experts that a token chose in the `layer`-th of the layers, the most probable first.
    pub fn chosen(&self, token: usize, layer: usize) -> &[u16] {
        &self.choices[(token * self.layers.len() + layer) * self.used..][..self.used]
    }

    /// Checks the layers' order, and that each token chose different experts of those there are.
    fn check(&self, name: &Path) -> Result<()> {
        let Some(&last) = self.layers.last() else { return Ok(()) };
        if !self.layers.is_sorted_by(|a, b| a < b) || last > u32::MAX as usize {
            let found = format!("{:?}", self.layers);
            return Err(invalid(name, "layers", "ascending numbers".to_owned(), found));
        }
        // The last choice of each expert: a number of experts of one layer and token.
        let mut seen = vec![usize::MAX; self.experts];
        for (i, chosen) in self.choices.chunks_exact(self.used).enumerate() {
            for &expert in chosen {
                let Some(last) = seen.get_mut(usize::from(expert)) else {
                    let expected = format!("less than {}", self.experts);
                    return Err(invalid(name, "number of an expert", expected, expert));
                };
                if *last == i {
                    let (token, expected) = (i / self.layers.len(), "different experts");
                    let found = format!("expert {expert} twice for token {token}");
                    return Err(invalid(name, "choices", expected.to_owned(), found));
                }
                *last = i;
            }
        }
        Ok(())
    }
}

/// Checks the counts of experts, chosen ones, layers and tokens; returns that of choices.
fn check_counts(name: &Path, [experts, used, layers, tokens]: [u32; 4]) -> Result<u64> {
    for (item, found, most) in [
        ("experts of a layer", experts, MAX_EXPERTS),
        ("experts that a token chooses", used, experts),
        ("layers", layers, MAX_LAYERS),
        ("tokens", tokens, MAX_TOKENS),
    ] {
        if !(1..=most).contains(&found) {
            return Err(invalid(name, item, format!("1 to {most}"), found));
        }
    }
    // Three factors of 2^16, 2^12 and 2^24 at most.
    let choices = u64::from(used) * u64::from(layers) * u64::from(tokens);
    if choices > MAX_CHOICES {
        return Err(invalid(name, "choices", format!("at most {MAX_CHOICES}"), choices));
    }
    Ok(choices)
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

fn invalid(
    name: &Path,
    item: &'static str,
    expected: String,
    found: impl std::fmt::Display,
) -> Error {
    Error::Routing { file: name.to_owned(), item, expected, found: found.to_string() }
}

#[cfg(test)]
mod tests;
