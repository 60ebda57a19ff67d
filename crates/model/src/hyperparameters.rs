//! The hyperparameters of a model, from metadata: keys without their prefix, defaults in one place,
//! and a check of every number before it is a divisor or a size.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use bodkin_gguf::{Array, Metadata, Value, quoted};

use crate::error::{Error, Result};
use crate::op::{Gating, Routing};
use crate::pooling::Pooling;
use crate::rope::{Rope, RopeScaling, RopeStyle};

/// Far above every layer count, head count and width of real models.
const PLAUSIBLE_MAX: u32 = 1 << 24;

/// Typed and checked reads of the metadata keys of one architecture.
pub struct HyperParameters<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
    /// The prefix of its keys.
    prefix: &'a str,
    /// The keys read so far that the file has, without the architecture's prefix.
    read: RefCell<BTreeSet<String>>,
    /// The keys asked for so far that the file has not, without the architecture's prefix.
    absent: RefCell<BTreeSet<String>>,
    /// Whether the file has the blocks for multi-token prediction that its metadata counts.
    has_mtp: Cell<bool>,
    /// Tokens of the longest sequence, if not the model's context length.
    context: Option<usize>,
    /// How texts are pooled, if not as the metadata says.
    pooling: Option<Pooling>,
}

impl<'a> HyperParameters<'a> {
    /// Reads `general.architecture`.
    pub fn new(metadata: &'a Metadata) -> Result<HyperParameters<'a>> {
        let architecture = metadata.architecture()?;
        Ok(HyperParameters {
            metadata,
            architecture,
            prefix: architecture,
            read: RefCell::default(),
            absent: RefCell::default(),
            has_mtp: Cell::new(true),
            context: None,
            pooling: None,
        })
    }

    /// Has the file read as one of another architecture, under its own keys.
    pub(crate) fn read_as(self, architecture: &'a str) -> HyperParameters<'a> {
        HyperParameters { architecture, ..self }
    }

    /// Notes keys that an architecture's files have, and that change nothing.
    pub(crate) fn ignore(&self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.key(name)));
    }

    /// The keys read so far that the file has, without the architecture's prefix.
    pub(crate) fn read(&self) -> BTreeSet<String> {
        self.read.borrow().clone()
    }

    /// How many keys were asked for so far that the file has not.
    pub(crate) fn absent(&self) -> usize {
        self.absent.borrow().len()
    }

    /// All metadata of the file.
    pub(crate) fn metadata(&self) -> &'a Metadata {
        self.metadata
    }

    /// Sets the longest sequence to `context` tokens.
    pub fn for_context(self, context: usize) -> HyperParameters<'a> {
        HyperParameters { context: Some(context), ..self }
    }

    /// Has texts pooled in a given way instead of the metadata's, if there is one.
    pub fn with_pooling(self, pooling: Option<Pooling>) -> HyperParameters<'a> {
        HyperParameters { pooling, ..self }
    }

    /// The value of `general.architecture`.
    pub fn architecture(&self) -> &'a str {
        self.architecture
    }

    fn key(&self, name: &str) -> String {
        let key = format!("{}.{name}", self.prefix);
        let is_there = self.metadata.get(&key).is_some();
        let names = if is_there { &self.read } else { &self.absent };
        names.borrow_mut().insert(name.to_owned());
        key
    }

    /// An error about the key `name`.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        Error::Key { key: self.key(name), problem: problem.into() }
    }

    /// Whether the file has the key.
    pub fn has(&self, name: &str) -> bool {
        self.metadata.get(&self.key(name)).is_some()
    }

    /// A string that may be absent.
    pub fn str(&self, name: &str) -> Result<Option<&'a str>> {
        Ok(self.metadata.str(&self.key(name))?)
    }

    /// An integer that may be absent.
    pub fn u32(&self, name: &str) -> Result<Option<u32>> {
        Ok(self.metadata.u32(&self.key(name))?)
    }

    /// A bool that may be absent.
    pub fn bool(&self, name: &str) -> Result<Option<bool>> {
        Ok(self.metadata.bool(&self.key(name))?)
    }

    /// A number that may be absent.
    pub fn f32(&self, name: &str) -> Result<Option<f32>> {
        let value = self.metadata.f32(&self.key(name))?;
        match value {
            Some(x) if !x.is_finite() => {
                Err(self.error(name, format!("expected a number, found {x}")))
            }
            _ => Ok(value),
        }
    }

    /// A number for each layer, of which some may be negative infinity; none if the key is absent.
    pub fn thresholds(&self, name: &str, layers: usize) -> Result<Option<Vec<f32>>> {
        let Some(values) = self.metadata.f32s(&self.key(name))? else { return Ok(None) };
        match values.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
            Some(x) => Err(self.error(name, format!("expected numbers, found {x}"))),
            None if values.len() < layers => {
                let problem = format!("expected {layers} values, found {}", values.len());
                Err(self.error(name, problem))
            }
            None => Ok(Some(values)),
        }
    }

    /// A required size, at least 1.
    pub fn size(&self, name: &str) -> Result<usize> {
        let value = self.metadata.need_u32(&self.key(name))?;
        self.plausible(name, value)
    }

    /// A size, at least 1, or `default` if absent.
    pub fn size_or(&self, name: &str, default: usize) -> Result<usize> {
        self.u32(name)?.map_or(Ok(default), |value| self.plausible(name, value))
    }

    /// A size; none if the key is absent or zero.
    pub fn size_or_none(&self, name: &str) -> Result<Option<usize>> {
        let value = self.u32(name)?.filter(|&value| value > 0);
        value.map(|value| self.plausible(name, value)).transpose()
    }

    /// A size for each layer, stored as one number for all or as an array.
    pub fn sizes(&self, name: &str, layers: usize) -> Result<Option<Vec<usize>>> {
        let check = |value| self.plausible(name, value);
        let values = self.layer_values(name, layers)?;
        values.map(|values| values.into_iter().map(check).collect()).transpose()
    }

    /// As [`HyperParameters::sizes`], but the value of a layer may be zero.
    pub fn counts(&self, name: &str, layers: usize) -> Result<Option<Vec<usize>>> {
        let check = |value| if value == 0 { Ok(0) } else { self.plausible(name, value) };
        let values = self.layer_values(name, layers)?;
        values.map(|values| values.into_iter().map(check).collect()).transpose()
    }

    /// A count that may be zero.
    pub fn count(&self, name: &str) -> Result<usize> {
        Ok(self.metadata.need_u32(&self.key(name))? as usize)
    }

    /// A number for each layer, stored as one number for all or as an array, of a key without the
    /// prefix of the architecture.
    pub fn unprefixed_numbers(&self, key: &str, layers: usize) -> Result<Vec<f32>> {
        let error = |problem| Error::Key { key: key.to_owned(), problem };
        let is_there = self.metadata.get(key).is_some();
        let names = if is_there { &self.read } else { &self.absent };
        names.borrow_mut().insert(key.to_owned());
        let mut values = self.metadata.f32s(key)?.ok_or_else(|| error("missing".to_owned()))?;
        match values.len() {
            1 => values = vec![values[0]; layers],
            n if n >= layers => values.truncate(layers),
            n => return Err(error(format!("expected {layers} values, found {n}"))),
        }
        match values.iter().find(|x| !x.is_finite()) {
            Some(x) => Err(error(format!("expected numbers, found {x}"))),
            None => Ok(values),
        }
    }

    fn layer_values(&self, name: &str, layers: usize) -> Result<Option<Vec<u32>>> {
        let Some(mut values) = self.metadata.u32s(&self.key(name))? else { return Ok(None) };
        match values.len() {
            1 => values = vec![values[0]; layers],
            n if n >= layers => values.truncate(layers),
            n => return Err(self.error(name, format!("expected {layers} values, found {n}"))),
        }
        Ok(Some(values))
    }

    /// A number for each layer, stored as one for all or as an array.
    pub fn floats(&self, name: &str, layers: usize) -> Result<Option<Vec<f32>>> {
        let Some(mut values) = self.metadata.f32s(&self.key(name))? else { return Ok(None) };
        match values.len() {
            1 => values = vec![values[0]; layers],
            n if n >= layers => values.truncate(layers),
            n => return Err(self.error(name, format!("expected {layers} values, found {n}"))),
        }
        match values.iter().find(|x| !x.is_finite()) {
            Some(x) => Err(self.error(name, format!("expected numbers, found {x}"))),
            None => Ok(Some(values)),
        }
    }

    /// A bool for each layer; none if the key is absent or no array of bools.
    pub fn bools(&self, name: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        match self.metadata.get(&self.key(name)) {
            Some(Value::Array(Array::Bool(values))) if values.len() < layers => {
                let problem = format!("expected {layers} values, found {}", values.len());
                Err(self.error(name, problem))
            }
            Some(Value::Array(Array::Bool(values))) => Ok(Some(values[..layers].to_vec())),
            _ => Ok(None),
        }
    }

    fn plausible(&self, name: &str, value: u32) -> Result<usize> {
        if value == 0 || value > PLAUSIBLE_MAX {
            return Err(self.error(name, format!("expected 1 to {PLAUSIBLE_MAX}, found {value}")));
        }
        Ok(value as usize)
    }

    /// The number of blocks without those for multi-token prediction (MTP), which are the last of
    /// the file's and take no part in the logits.
    pub fn layers(&self) -> Result<usize> {
        let blocks = self.size("block_count")?;
        if blocks > 4096 {
            return Err(self.error("block_count", format!("expected at most 4096, found {blocks}")));
        }
        let name = "nextn_predict_layers";
        match self.u32(name)?.map_or(0, |n| n as usize) {
            mtp if mtp < blocks => Ok(if self.has_mtp.get() { blocks - mtp } else { blocks }),
            mtp => Err(self.error(name, format!("expected less than {blocks}, found {mtp}"))),
        }
    }

    /// Makes all blocks layers, for a file that has none of the blocks for multi-token prediction
    /// that its metadata counts.
    pub fn ignore_mtp(&self) {
        self.has_mtp.set(false);
    }

    /// The taps of a convolution, at least 2.
    pub fn kernel(&self, name: &str) -> Result<usize> {
        match self.size(name)? {
            1 => Err(self.error(name, "expected at least 2, found 1")),
            kernel => Ok(kernel),
        }
    }

    /// Whether the model has experts (MoE).
    pub fn has_experts(&self) -> Result<bool> {
        Ok(self.u32("expert_count")?.is_some_and(|n| n > 0))
    }

    /// The routing of a layer's tokens to experts. `gating` and `normalize` are the defaults of the
    /// architecture.
    pub fn routing(&self, layer: usize, gating: Gating, normalize: bool) -> Result<Routing> {
        let experts = self.size("expert_count")?;
        let used = self.expert_used(layer, experts)?;
        let gating = match self.u32("expert_gating_func")? {
            None | Some(0) => gating,
            Some(1) => Gating::Softmax,
            Some(2) => Gating::Sigmoid,
            Some(3) => Gating::SoftmaxOfChosen,
            Some(4) => Gating::SqrtSoftplus,
            Some(other) => {
                let problem = format!("expected 1 to 4, found {other}");
                return Err(self.error("expert_gating_func", problem));
            }
        };
        // Zero means no groups in both keys.
        let groups = self.u32("expert_group_count")?.map_or(1, |n| n.max(1) as usize);
        let groups_used = self.u32("expert_group_used_count")?.unwrap_or(0) as usize;
        // Converters write it for models without groups too.
        let groups_used = if groups_used == 0 || groups == 1 { groups } else { groups_used };
        if !experts.is_multiple_of(groups) {
            let problem = format!("{groups} does not divide the {experts} experts");
            return Err(self.error("expert_group_count", problem));
        }
        if groups_used > groups || used > experts / groups * groups_used {
            let problem = format!(
                "expected groups with {used} experts, at most {groups}, found {groups_used}"
            );
            return Err(self.error("expert_group_used_count", problem));
        }
        let normalize = self.bool("expert_weights_norm")?.unwrap_or(normalize);
        let scale = self.f32("expert_weights_scale")?.filter(|&s| s != 0.0).unwrap_or(1.0);
        Ok(Routing { experts, used, gating, groups, groups_used, normalize, scale })
    }

    /// The experts selected for each token in a layer.
    fn expert_used(&self, layer: usize, experts: usize) -> Result<usize> {
        let name = "expert_used_count";
        let values = self.metadata.u32s(&self.key(name))?.unwrap_or_default();
        let used = if values.len() == 1 { values.first() } else { values.get(layer) };
        match used.map(|&used| used as usize) {
            Some(used) if (1..=experts).contains(&used) => Ok(used),
            Some(used) => Err(self.error(name, format!("expected 1 to {experts}, found {used}"))),
            None => Err(self.error(name, format!("no value for layer {layer}"))),
        }
    }

    /// How the rows of a text become its embedding; the mean if nothing says so.
    pub fn pooling(&self) -> Result<Pooling> {
        if let Some(pooling) = self.pooling {
            return Ok(pooling);
        }
        match self.u32("pooling_type")? {
            None | Some(1) => Ok(Pooling::Mean),
            Some(2) => Ok(Pooling::Cls),
            Some(3) => Ok(Pooling::Last),
            Some(4) => Ok(Pooling::Rank),
            Some(other) => {
                let expected = "1 (mean), 2 (first), 3 (last) or 4 (rank)";
                let problem = format!("expected {expected}, found {other}");
                Err(self.error("pooling_type", problem))
            }
        }
    }

    /// The epsilon of the layer norms.
    pub fn layer_eps(&self) -> Result<f32> {
        let name = "attention.layer_norm_epsilon";
        self.f32(name)?.ok_or_else(|| self.error(name, "missing"))
    }

    /// The epsilon of the RMS norms.
    pub fn rms_eps(&self) -> Result<f32> {
        let name = "attention.layer_norm_rms_epsilon";
        self.f32(name)?.ok_or_else(|| self.error(name, "missing"))
    }

    /// The rotary embedding of heads of `head_dim`, with the metadata's scaling, without factors.
    /// Models that see images rotate sections of a head by different positions (M-RoPE), which are
    /// equal for text: they rotate text as NeoX RoPE does.
    pub fn rope(&self, style: RopeStyle, head_dim: usize) -> Result<Rope> {
        let dims = self.rope_dims("rope.dimension_count", head_dim, head_dim)?;
        let style = if self.has_rope_sections()? { RopeStyle::Neox } else { style };
        let base = self.rope_base("rope.freq_base")?.unwrap_or(10_000.0);
        let (scaling, factors, inverse, block) = (self.rope_scaling()?, None, false, 1);
        Ok(Rope { style, dims, base, scaling, factors, inverse, block })
    }

    /// The rotary embedding of sliding-window layers beside that of the others: with dimensions of
    /// its own, if the file has them, with this base if not, and without scaling.
    pub fn sliding_window_rope(&self, rope: Rope, head_dim: usize, base: f32) -> Result<Rope> {
        let dims = self.rope_dims("rope.dimension_count_swa", rope.dims, head_dim)?;
        let base = self.rope_base("rope.freq_base_swa")?.unwrap_or(base);
        Ok(Rope { dims, base, scaling: RopeScaling::None, factors: None, ..rope })
    }

    /// The rotated part of heads of `head_dim`.
    fn rope_dims(&self, name: &str, default: usize, head_dim: usize) -> Result<usize> {
        let dims = self.size_or(name, default)?;
        if dims > head_dim || dims % 2 != 0 {
            let problem = format!("expected an even number up to {head_dim}, found {dims}");
            return Err(self.error(name, problem));
        }
        Ok(dims)
    }

    fn has_rope_sections(&self) -> Result<bool> {
        let name = "rope.dimension_sections";
        match self.metadata.u32s(&self.key(name))?.as_deref() {
            Some([_, _, _, text]) if *text > 0 => {
                Err(self.error(name, format!("expected 0 as the fourth number, found {text}")))
            }
            Some([time, height, ..]) => Ok(*time > 0 && *height > 0),
            _ => Ok(false),
        }
    }

    /// The base (theta) of a rotary embedding, which may be absent.
    pub fn rope_base(&self, name: &str) -> Result<Option<f32>> {
        match self.f32(name)? {
            Some(base) if base <= 1.0 => {
                Err(self.error(name, format!("expected more than 1, found {base}")))
            }
            base => Ok(base),
        }
    }

    fn rope_scaling(&self) -> Result<RopeScaling> {
        let name = "rope.scaling.type";
        let kind = self.metadata.str(&self.key(name))?.unwrap_or("linear");
        let factor = match self.f32("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.f32("rope.scale_linear")?,
        };
        // Some converters write zero for no scaling.
        let factor = factor.filter(|&f| f != 0.0).unwrap_or(1.0);
        if factor < 0.0 {
            let problem = format!("expected a positive number, found {factor}");
            return Err(self.error("rope.scaling.factor", problem));
        }
        let attn_factor = self.f32("rope.scaling.attn_factor")?.unwrap_or(1.0);
        match kind {
            "none" => Ok(RopeScaling::None),
            "longrope" => Ok(RopeScaling::Long { attn_factor }),
            // Phi's converter leaves the type out.
            "linear" if factor == 1.0 && attn_factor != 1.0 => {
                Ok(RopeScaling::Long { attn_factor })
            }
            "linear" if factor == 1.0 => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor }),
            "yarn" => Ok(RopeScaling::Yarn {
                factor,
                original_context: self.original_context()? as u32,
                beta_fast: self.f32("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: self.f32("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                attn_factor,
            }),
            other => {
                let problem =
                    format!("expected none, linear, yarn or longrope, found {}", quoted(other));
                Err(self.error(name, problem))
            }
        }
    }

    /// The bound of a soft cap; zero means none.
    pub fn cap(&self, name: &str) -> Result<Option<f32>> {
        match self.f32(name)? {
            Some(cap) if cap < 0.0 => {
                Err(self.error(name, format!("expected a positive number, found {cap}")))
            }
            cap => Ok(cap.filter(|&cap| cap > 0.0)),
        }
    }

    /// The model's context length.
    pub fn context_length(&self) -> Result<usize> {
        self.size("context_length")
    }

    /// The longest sequence of the plan.
    pub fn context(&self) -> Result<usize> {
        self.context.map_or_else(|| self.context_length(), Ok)
    }

    /// The context length of the first training, before context extension.
    pub fn original_context(&self) -> Result<usize> {
        self.size_or("rope.scaling.original_context_length", self.context_length()?)
    }

    /// Whether each layer has sliding-window attention. The key is an array of bools, or a period
    /// of layers, of which the last has global attention, or zero if none has; `period` is the
    /// default.
    pub fn local_layers(&self, period: usize) -> Result<Vec<bool>> {
        self.layer_pattern(period, 1)
    }

    /// As [`HyperParameters::local_layers`]; the first layer of a period has global attention.
    pub fn local_layers_after_global(&self, period: usize) -> Result<Vec<bool>> {
        self.layer_pattern(period, 0)
    }

    fn layer_pattern(&self, period: usize, offset: usize) -> Result<Vec<bool>> {
        let (name, layers) = ("attention.sliding_window_pattern", self.layers()?);
        if let Some(local) = self.bools(name, layers)? {
            return Ok(local);
        }
        let period = self.u32(name)?.map_or(period, |p| p as usize);
        Ok((offset..layers + offset).map(|i| period == 0 || i % period != 0).collect())
    }

    /// The tokens of the sliding window; none if the key is absent or zero.
    pub fn sliding_window(&self) -> Result<Option<usize>> {
        Ok(self.u32("attention.sliding_window")?.filter(|&w| w > 0).map(|w| w as usize))
    }
}
