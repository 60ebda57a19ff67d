//! Weights as the kernels read them: tiles of 16 rows, cut into chunks of 64 columns. A chunk is
//! one record of codes, in the order of a warp's lanes, and of scales (`kernels/packed.cuh`). This
//! module must not know the device.

mod dense;
mod formats;
mod layout;
mod pack;
mod shape;
mod two_four;

pub(crate) use layout::{MmaLayout, PackedLayout};
pub(crate) use pack::pack;
pub(crate) use shape::{Shape, Shard};
