//! Weights as the kernels read them: tiles of 16 rows, cut into chunks of 64 columns. A chunk is
//! one record of codes, in the order of a warp's lanes, and of scales (`kernels/packed.cuh`). This
//! module must not know the device.
//!
//! Codes come before scales. Lane `4 (r % 8) + c` has columns `16 c`
//! to `16 c + 15` of rows `r` and `r + 8`. Scales are `[group of columns][r % 8][r / 8]`.
//!
//! ```text
//! layout   bytes  codes                                      scales of a group
//! F16       2048  halves [r / 8][column / 8 of 2][lane][8]   none
//! S8        1088  code + 128, bytes [r / 8][lane][16]        half, of 32 columns
//! S6x16      896  code + 32, as U4; two bits [lane][r / 8]   half, of 16 columns
//! U5         768  as U4; fifth bits [lane]                   half and minimum, of 32 columns
//! U4         640  nibbles [lane][r / 8][16], in pairs        half and minimum, of 32 columns
//! S4x16      640  code + 8, as U4                            half, of 16 columns
//! U2x16      512  pairs of two bits [lane][r / 8][16]        half and minimum, of 16 columns
//! Iq4        576  nibbles [lane][r / 8][16]                  half, of 32 columns
//! Codebook   672  the same; numbers + 64 behind the scales   half, of 16 columns
//! Fp4        544  sign and magnitude as halves have them     upper byte of a half, of 32 columns
//! ```

mod codes;
mod dense;
mod formats;
mod layout;
mod pack;
mod shape;
mod two_four;

pub(crate) use layout::{MmaLayout, PackedLayout};
pub(crate) use pack::pack;
pub(crate) use shape::{Shape, Shard};
