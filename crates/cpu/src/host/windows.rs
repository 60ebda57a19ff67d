//! What Windows says of memory.

/// `MEMORYSTATUSEX` of the Windows API.
#[repr(C)]
#[derive(Default)]
struct MemoryStatus {
    length: u32,
    load: u32,
    total_physical: u64,
    available_physical: u64,
    /// Page files, the address space and its extension: total and available bytes of each but the
    /// last.
    others: [u64; 5],
}

#[link(name = "kernel32")]
unsafe extern "system" {
    fn GlobalMemoryStatusEx(status: *mut MemoryStatus) -> i32;
}

fn status() -> Option<MemoryStatus> {
    let length = size_of::<MemoryStatus>() as u32;
    let mut status = MemoryStatus { length, ..MemoryStatus::default() };
    // SAFETY: the structure is the one that the function fills, and says its own length.
    let filled = unsafe { GlobalMemoryStatusEx(&mut status) };
    (filled != 0).then_some(status)
}

pub(super) fn available_memory() -> Option<u64> {
    status().map(|status| status.available_physical)
}

pub(super) fn total_memory() -> Option<u64> {
    status().map(|status| status.total_physical)
}

/// Not asked for.
pub(super) fn performance_cores() -> Option<usize> {
    None
}
