//! Loops that are unrolled at compile time, for accumulators that must stay in registers.

/// Runs a block once for each index below `$count` (at most 16). The optimiser may leave a `for`
/// loop rolled, and arrays indexed by it then live in memory.
macro_rules! unrolled {
    ($count:expr, $index:ident => $body:block) => {
        unrolled!(@ $count, $index, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $count:expr, $index:ident, $body:block, $($value:literal)*) => {
        $(if $value < $count { let $index = $value; $body })*
    };
}
pub(crate) use unrolled;
