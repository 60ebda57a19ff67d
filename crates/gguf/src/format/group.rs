//! 32 columns of a row in the form that all formats of small codes have in common.

/// 32 columns of a row: `scale * code + min`.
#[derive(Clone, Copy, Default)]
pub struct Group {
    /// Of each 16 columns; where a format has one scale for 32, twice the same.
    pub scales: [f32; 2],
    /// Likewise; 0 in formats without.
    pub mins: [f32; 2],
    /// See [`super::Codes`].
    pub codes: [u8; 32],
}

impl Group {
    /// A group with one scale and minimum.
    pub(super) fn of(scale: f32, min: f32, codes: [u8; 32]) -> Group {
        Group { scales: [scale; 2], mins: [min; 2], codes }
    }
}

/// Passes all groups of a row to a callback, from the first to the last.
pub type GroupReader = fn(row: &[u8], &mut dyn FnMut(Group));
