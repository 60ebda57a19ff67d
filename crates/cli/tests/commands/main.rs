//! The commands from the outside: the real binary on the tiny models of `tests/parity`, held
//! against results that no part of bodkin produced.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bench;
#[cfg(unix)]
mod chat;
mod check;
mod command_line;
mod compress;
mod convert;
mod embed;
#[cfg(target_os = "linux")]
mod hostile;
mod inspect;
mod logits;
mod nonfinite;
mod perplexity;
mod place;
mod plan;
mod quantize;
mod run;
#[cfg(unix)]
mod terminal;
mod tokens;
#[cfg(unix)]
mod truncated;
#[cfg(unix)]
mod typing;
mod wrong;
