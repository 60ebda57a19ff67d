//! The tensors of the new file, each made from one of the source or from several, when it is
//! written. It must not know families.

use std::collections::{BTreeMap, HashMap};

use bodkin_gguf::{Format, Tensor};

use crate::change::{Change, to_bytes};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, rope_divisors};
use crate::safetensors::Weights;

/// The tensors of a new file.
pub(crate) struct Tensors {
    pub(crate) all: Vec<Tensor>,
    made_from: HashMap<String, Parts>,
}

/// What a tensor is made from.
enum Parts {
    Values(Vec<f32>),
    /// Indices of tensors of the source, whose data follow one another.
    Stored(Vec<usize>, Change),
}

/// The experts of a layer by projection and number, with the indices of their tensors.
type Experts = BTreeMap<String, BTreeMap<u64, usize>>;

impl Tensors {
    /// Plans all tensors, in the order of the source's names.
    pub(crate) fn plan(family: &Family, config: &Config, weights: &Weights) -> Result<Tensors> {
        let mut tensors = Tensors { all: Vec::new(), made_from: HashMap::new() };
        if let Some(divisors) = rope_divisors(config)? {
            let shape = [divisors.len() as u64];
            tensors.add("rope_freqs.weight", Format::F32, &shape, Parts::Values(divisors))?;
        }
        let count = config.u32(&["num_local_experts", "num_experts"])?.unwrap_or(0) as usize;
        let mut layers: BTreeMap<&str, Experts> = BTreeMap::new();
        for (index, stored) in weights.tensors.iter().enumerate() {
            let plan = Plan { family, config, weights };
            if let Some((stem, expert, projection)) = expert_of(&stored.name) {
                let experts = layers.entry(stem).or_default();
                experts.entry(projection.to_owned()).or_default().insert(expert, index);
                let found: usize = experts.values().map(BTreeMap::len).sum();
                if experts.len() == 3 && found == 3 * count {
                    let experts = layers.remove(stem).unwrap_or_default();
                    plan.merge(&mut tensors, stem, &experts, count)?;
                }
                continue;
            }
            let stem = stored.name.strip_suffix(".weight").unwrap_or(&stored.name);
            if let Some(stem) = stem.strip_suffix(".experts.gate_up_proj") {
                for (projection, second) in [("gate", false), ("up", true)] {
                    let name = format!("{stem}.experts.{projection}_proj.weight");
                    let change = Change::HalfOfExperts { second };
                    plan.add(&mut tensors, &name, vec![index], Some(change))?;
                }
            } else if stem.ends_with(".experts.down_proj") {
                plan.add(&mut tensors, &format!("{stem}.weight"), vec![index], None)?;
            } else {
                plan.add(&mut tensors, &stored.name, vec![index], None)?;
            }
        }
        match layers.first_key_value() {
            Some((stem, experts)) => {
                let found: usize = experts.values().map(BTreeMap::len).sum();
                let expected = format!("3 matrices of each of {count} experts");
                Err(Error::invalid(*stem, expected, format!("{found} matrices")))
            }
            None => Ok(tensors),
        }
    }

    /// Adds a tensor. `shape` has rows first.
    fn add(&mut self, name: &str, format: Format, shape: &[u64], parts: Parts) -> Result<()> {
        let shape: Vec<u64> = shape.iter().rev().copied().collect();
        if shape.is_empty() || shape.len() > 4 || shape.contains(&0) {
            let expected = "1 to 4 dimensions, none of them zero";
            return Err(Error::invalid(name, expected, format!("{shape:?}")));
        }
        let size = format.block_bytes().unwrap_or_default() as u64;
        let bytes = shape.iter().product::<u64>() * size;
        if self.made_from.insert(name.to_owned(), parts).is_some() {
            return Err(Error::invalid(name, "one tensor of this name", "a second one"));
        }
        let (name, offset, shard) = (name.to_owned(), 0, 0);
        self.all.push(Tensor { name, format, shape, offset, bytes, shard });
        Ok(())
    }

    /// The data of a tensor.
    pub(crate) fn read(&self, tensor: &Tensor, weights: &Weights) -> Result<Vec<u8>> {
        let (parts, change) = match self.made_from.get(&tensor.name) {
            Some(Parts::Stored(parts, change)) => (parts, change),
            Some(Parts::Values(values)) => return Ok(to_bytes(values)),
            None => return Err(Error::invalid(&tensor.name, "a planned tensor", "another")),
        };
        let mut stored = parts.iter().map(|&index| &weights.tensors[index]);
        let Some(first) = stored.next() else { return Ok(Vec::new()) };
        let mut bytes = weights.read(first)?;
        for next in stored {
            bytes.extend(weights.read(next)?);
        }
        Ok(change.apply(first, bytes))
    }
}

/// What the planning of each tensor needs.
struct Plan<'a> {
    family: &'a Family,
    config: &'a Config,
    weights: &'a Weights,
}

impl Plan<'_> {
    /// Adds a tensor, unless the family leaves it out.
    fn add(
        &self,
        tensors: &mut Tensors,
        old_name: &str,
        parts: Vec<usize>,
        change: Option<Change>,
    ) -> Result<()> {
        let renamed = self.family.rename(old_name);
        let renamed = renamed.map_err(|expected| Error::invalid("tensor", expected, old_name))?;
        let Some(name) = renamed else { return Ok(()) };
        let first = &self.weights.tensors[parts[0]];
        let invalid = |expected: &str, found: &str| Error::invalid(&first.name, expected, found);
        let format = first.format.ok_or_else(|| invalid("F32, F16 or BF16", &first.dtype))?;
        let change = match change {
            Some(change) => change,
            None => self.family.change(self.config, &name, &first.shape)?,
        };
        let mut shape = first.shape.clone();
        if parts.len() > 1 {
            shape.insert(0, parts.len() as u64);
        }
        let format = match &change {
            Change::AddOne => Format::F32,
            Change::NegativeExp(new) => {
                shape.clone_from(new);
                Format::F32
            }
            _ => format,
        };
        match &change {
            Change::Shape(new) => shape.clone_from(new),
            Change::WithoutRows(rows) => match shape[..] {
                [all, cols] if all > *rows => shape = vec![all - rows, cols],
                _ => return Err(invalid(&format!("more than {rows} rows"), &format!("{shape:?}"))),
            },
            Change::HalfOfExperts { .. } => match shape[..] {
                [experts, rows, cols] if rows.is_multiple_of(2) => {
                    shape = vec![experts, rows / 2, cols];
                }
                _ => return Err(invalid("experts of two halves", &format!("{shape:?}"))),
            },
            _ => {}
        }
        tensors.add(&name, format, &shape, Parts::Stored(parts, change))
    }

    /// Adds the three matrices of a layer's experts, each of all experts.
    fn merge(
        &self,
        tensors: &mut Tensors,
        stem: &str,
        experts: &Experts,
        count: usize,
    ) -> Result<()> {
        for (projection, experts) in experts {
            let name = format!("{stem}.{projection}");
            let last = experts.last_key_value().map_or(0, |(&last, _)| last);
            if experts.len() != count || last.checked_add(1) != Some(count as u64) {
                let found = format!("{} up to number {last}", experts.len());
                return Err(Error::invalid(name, format!("experts 0 to {}", count - 1), found));
            }
            let parts: Vec<usize> = experts.values().copied().collect();
            let first = &self.weights.tensors[parts[0]];
            for &index in &parts {
                let other = &self.weights.tensors[index];
                if (&other.shape, other.format) != (&first.shape, first.format) {
                    let expected = format!("{} of shape {:?}", first.dtype, first.shape);
                    let found = format!("{} of shape {:?}", other.dtype, other.shape);
                    return Err(Error::invalid(&other.name, expected, found));
                }
            }
            self.add(tensors, &name, parts, None)?;
        }
        Ok(())
    }
}

/// Splits `STEM.experts.7.PROJECTION` into the stem with `.experts`, the number and the projection.
fn expert_of(name: &str) -> Option<(&str, u64, &str)> {
    let at = name.find(".experts.")? + ".experts".len();
    let (number, projection) = name[at + 1..].split_once('.')?;
    Some((&name[..at], number.parse().ok()?, projection))
}
