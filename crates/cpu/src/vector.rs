//! Sixteen f32 lanes on every machine: one 512-bit register, two 256-bit ones, four 128-bit ones,
//! or an array. Operations other than matmuls are written once over [`Vector`]; [`mod@dispatch`]
//! compiles them for each instruction set.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod dispatch;
mod exp;
mod lanes;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;

pub(crate) use dispatch::dispatch;
pub(crate) use exp::{exp, softplus};
pub(crate) use lanes::{LANES, Vector};
