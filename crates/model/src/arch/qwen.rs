//! Qwen 2 and Qwen 3: as Llama, with the other rotation; the biases of 2 and the head norms of 3
//! follow from the tensors.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::keys::Keys;
use crate::plan::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &Keys<'_>, g: &mut Builder<'_>) -> Result<Value> {
    Decoder::new(m, g, RopeStyle::Neox)?.build(g)
}
