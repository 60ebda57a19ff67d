//! What macOS says of memory and cores, through `sysctl`.

use std::ffi::CStr;
use std::ptr::null_mut;

/// Free pages, those of files, and those that their owners let the system drop.
pub(super) fn available_memory() -> Option<u64> {
    let pages = [
        number(c"vm.page_free_count")?,
        number(c"vm.page_pageable_external_count").unwrap_or(0),
        number(c"vm.page_purgeable_count").unwrap_or(0),
    ];
    Some(pages.iter().sum::<u64>() * number(c"hw.pagesize")?)
}

pub(super) fn total_memory() -> Option<u64> {
    number(c"hw.memsize")
}

/// Cores of the fastest kind; an Intel Mac has one kind and does not say.
pub(super) fn performance_cores() -> Option<usize> {
    number(c"hw.perflevel0.physicalcpu").map(|cores| cores as usize)
}

/// A number of the system, which has four or eight bytes.
fn number(name: &CStr) -> Option<u64> {
    let (mut bytes, mut len) = ([0_u8; 8], 8);
    // SAFETY: the name ends with a zero, `len` is the size of `bytes`, and nothing is set.
    let status = unsafe {
        libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut len, null_mut(), 0)
    };
    (status == 0 && (len == 4 || len == 8)).then(|| u64::from_le_bytes(bytes))
}
