//! One module per command: an `Args` struct, and `run`, which does the work.

pub(crate) mod bench;
pub(crate) mod check;
mod chunks;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod detokenize;
pub(crate) mod devices;
pub(crate) mod embed;
pub(crate) mod imatrix;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod logits;
pub(crate) mod man;
pub(crate) mod perplexity;
pub(crate) mod plan;
pub(crate) mod prune;
pub(crate) mod pull;
pub(crate) mod quantize;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod search;
pub(crate) mod serve;
pub(crate) mod tokenize;
