//! The table of sparse formats and their layouts.

use bodkin_gguf::Format;

use super::bitmap;
use super::layout::{SparseFloat, SparseInteger};
use super::pattern::{Bitmap, TwoFour};
use super::two_four;

/// A sparsity pattern over a dense layout.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum SparseFormat {
    BitmapF16,
    BitmapQ8_0,
    BitmapQ4_0,
    TwoFourF16,
    TwoFourQ8_0,
    TwoFourQ4_0,
    CsrF16,
}

/// A computation that is generic over the layout: see [`SparseFormat::visit`].
pub(crate) trait VisitSparse {
    /// The result.
    type Output;
    /// For an integer layout.
    fn integer<K: SparseInteger>(self) -> Self::Output;
    /// For a float layout.
    fn float<K: SparseFloat>(self) -> Self::Output;
    /// For CSR.
    fn csr(self) -> Self::Output;
}

impl SparseFormat {
    /// The GGUF format's entry; `None` if it is dense.
    pub(crate) fn of(format: Format) -> Option<SparseFormat> {
        Some(match format {
            Format::BITMAP_F16 => SparseFormat::BitmapF16,
            Format::BITMAP_Q8_0 => SparseFormat::BitmapQ8_0,
            Format::BITMAP_Q4_0 => SparseFormat::BitmapQ4_0,
            Format::S24_F16 => SparseFormat::TwoFourF16,
            Format::S24_Q8_0 => SparseFormat::TwoFourQ8_0,
            Format::S24_Q4_0 => SparseFormat::TwoFourQ4_0,
            Format::CSR_F16 => SparseFormat::CsrF16,
            _ => return None,
        })
    }

    /// Calls the visitor with the format's layout.
    pub(crate) fn visit<V: VisitSparse>(self, visitor: V) -> V::Output {
        match self {
            SparseFormat::BitmapF16 => visitor.float::<bitmap::F16<Bitmap>>(),
            SparseFormat::BitmapQ8_0 => visitor.integer::<bitmap::Q8_0>(),
            SparseFormat::BitmapQ4_0 => visitor.integer::<bitmap::Q4_0>(),
            SparseFormat::TwoFourF16 => visitor.float::<bitmap::F16<TwoFour>>(),
            SparseFormat::TwoFourQ8_0 => visitor.integer::<two_four::Q8_0>(),
            SparseFormat::TwoFourQ4_0 => visitor.integer::<two_four::Q4_0>(),
            SparseFormat::CsrF16 => visitor.csr(),
        }
    }
}
