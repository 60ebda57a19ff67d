//! The type of the KV cache.

/// The type of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Half precision; single precision where all matrices of the file are single.
    #[default]
    Auto,
    /// Half precision.
    F16,
    /// Signed bytes: each block of [`KvType::BLOCK`] elements of a head, the last one maybe
    /// shorter, has a scale in half precision and is rounded as by `Q8_0`.
    Q8_0,
}

impl KvType {
    /// Every type, in the order in which they are listed.
    pub const ALL: [KvType; 3] = [KvType::Auto, KvType::F16, KvType::Q8_0];
    /// Elements of a head that share a scale.
    pub const BLOCK: usize = 32;

    /// The name in flags and tables.
    pub fn name(self) -> &'static str {
        match self {
            KvType::Auto => "auto",
            KvType::F16 => "f16",
            KvType::Q8_0 => "q8_0",
        }
    }
}
