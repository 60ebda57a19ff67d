//! Systems that are not asked for memory and cores.

pub(super) fn available_memory() -> Option<u64> {
    None
}

pub(super) fn total_memory() -> Option<u64> {
    None
}

pub(super) fn performance_cores() -> Option<usize> {
    None
}
