//! Packs weights column-major.

use super::groups::ColumnGroups;
use super::layout::ColumnLayout;
use crate::linear::layout::PackedLayout;
use crate::linear::source::SourceRows;
use crate::linear::weight::PackedWeight;

/// Whether a layout exists column-major.
pub fn has_columns(layout: PackedLayout) -> bool {
    ColumnLayout::of(layout).is_some()
}

/// Packs rows of any format column-major, with the arithmetic of `layout`; on this thread.
///
/// # Panics
/// If `layout` does not exist column-major, or if the source has other rows.
pub fn pack_columns(
    layout: PackedLayout,
    source: SourceRows<'_>,
    rows: usize,
    cols: usize,
) -> PackedWeight {
    let columns = ColumnLayout::of(layout);
    let columns = columns.unwrap_or_else(|| panic!("{layout:?} does not exist column-major"));
    source.check(layout, rows, cols);
    let groups = ColumnGroups::pack((layout, columns), source, rows, cols);
    PackedWeight::of_columns(layout, rows, cols, groups)
}
