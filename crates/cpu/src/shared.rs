//! Buffers that the threads of a step share. Stages guarantee exclusive access: threads write
//! disjoint parts in a stage, and read parts that were written before a barrier.

use std::ops::Range;

use crate::memory::Number;

/// A slice that several threads read and write in disjoint parts.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: access goes through unsafe methods, whose callers keep parts disjoint.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: likewise.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Lends out `slice` until the step ends.
    pub(crate) fn new(slice: &mut [T]) -> Shared<T> {
        Shared { start: slice.as_mut_ptr(), len: slice.len() }
    }

    /// The number of elements.
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The first element.
    pub(crate) fn start(self) -> *mut T {
        self.start
    }

    /// Reads a part.
    ///
    /// # Safety
    ///
    /// The slice still lives, and no thread writes this part before the next barrier.
    pub(crate) unsafe fn part<'a>(self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part of the buffer");
        // SAFETY: in bounds; the caller rules out writers.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// All bytes.
    ///
    /// # Safety
    ///
    /// The slice still lives, and nothing else accesses it.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8]
    where
        T: Number,
    {
        // SAFETY: the caller's promise; every bit pattern of a number is valid.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), size_of::<T>() * self.len) }
    }

    /// Writes a part.
    ///
    /// # Safety
    ///
    /// The slice still lives, and nothing else accesses this part before the next barrier.
    pub(crate) unsafe fn part_mut<'a>(self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part of the buffer");
        // SAFETY: in bounds; the caller rules out others.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
