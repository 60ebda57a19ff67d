//! The addresses of values in the device's memory: values whose lifetimes do not overlap share it.
//! Lifetimes count stages, which may read earlier values and write later ones than single
//! operations.

use crate::lower::{Program, Value, Work};

/// All addresses are multiples of it, as the widest loads and cache lines need.
const ALIGNMENT: u64 = 256;

/// The place of every value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arena {
    /// Bytes from the start.
    pub(crate) offsets: Vec<u64>,
    /// Of all values together.
    pub(crate) bytes: u64,
}

/// A value's memory, and the last stage at which it is in use.
#[derive(Clone, Copy)]
struct LiveRange {
    last: usize,
    start: u64,
    end: u64,
}

/// Places every value for steps of `tokens` tokens and `outputs` outputs: at the lowest free
/// offset.
pub(crate) fn aliased(program: &Program, tokens: usize, outputs: usize) -> Arena {
    let count = program.values.len();
    let (mut first, mut last) = (vec![usize::MAX; count], vec![0; count]);
    for (i, stage) in program.stages.iter().enumerate() {
        stage.values(&mut |value| {
            let Value(v) = program.base(value);
            first[v] = first[v].min(i);
            last[v] = last[v].max(i);
        });
    }
    // Other devices store into a gathered value as soon as they have passed the gather before.
    let mut gather_before = 0;
    for (i, stage) in program.stages.iter().enumerate() {
        let Work::Gather(gather) = &stage.work else { continue };
        for (value, _) in &gather.results {
            let Value(v) = program.base(*value);
            first[v] = first[v].min(gather_before);
        }
        gather_before = i;
    }
    // The output is read after the last stage.
    last[program.base(program.output).0] = program.stages.len();
    let mut order: Vec<usize> = (0..count).filter(|&v| first[v] != usize::MAX).collect();
    order.sort_by_key(|&v| first[v]);
    let mut live_ranges: Vec<LiveRange> = Vec::new();
    let mut arena = Arena { offsets: vec![0; count], bytes: 0 };
    for v in order {
        let bytes = program.values[v].bytes(tokens, outputs).next_multiple_of(ALIGNMENT);
        let mut busy: Vec<(u64, u64)> = live_ranges
            .iter()
            .filter(|range| range.last >= first[v])
            .map(|range| (range.start, range.end))
            .collect();
        busy.sort_unstable();
        let mut start = 0;
        for (from, to) in busy {
            if start + bytes <= from {
                break;
            }
            start = start.max(to);
        }
        let end = start + bytes;
        live_ranges.push(LiveRange { last: last[v], start, end });
        live_ranges.retain(|range| range.last >= first[v]);
        arena.offsets[v] = start;
        arena.bytes = arena.bytes.max(end);
    }
    arena
}

/// Gives every value memory of its own, for the persistent kernel, whose blocks poll a value until
/// its sentinel is gone. Values that no stage from `last_stage` on uses come first; their bytes,
/// which the last stage resets to sentinels, are returned too.
pub(crate) fn non_aliased(program: &Program, last_stage: usize) -> (Arena, u64) {
    let mut is_late = vec![false; program.values.len()];
    for stage in &program.stages[last_stage..] {
        stage.values(&mut |value| is_late[program.base(value).0] = true);
    }
    let mut arena = Arena { offsets: vec![0; is_late.len()], bytes: 0 };
    let mut reset_bytes = 0;
    for late in [false, true] {
        let has_memory = |&v: &usize| program.values[v].view.is_none();
        for v in (0..is_late.len()).filter(has_memory).filter(|&v| is_late[v] == late) {
            arena.offsets[v] = arena.bytes;
            arena.bytes += program.values[v].bytes(1, 1).next_multiple_of(ALIGNMENT);
        }
        if !late {
            reset_bytes = arena.bytes;
        }
    }
    (arena, reset_bytes)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::lower::lower;

    #[test]
    fn values_in_use_never_share_memory() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
        let mut count = 0;
        for entry in std::fs::read_dir(models).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "gguf") {
                continue;
            }
            let file = bodkin_model::open(&path).unwrap();
            let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
            for fuse in [false, true] {
                check(&lower(&plan, fuse, 1));
                check(&lower(&plan, fuse, 2));
            }
            count += 1;
        }
        assert!(count > 10, "only {count} models");
    }

    fn check(program: &Program) {
        let (tokens, outputs) = (7, 3);
        let arena = aliased(program, tokens, outputs);
        let mut uses = vec![Vec::new(); program.values.len()];
        for (i, stage) in program.stages.iter().enumerate() {
            stage.values(&mut |value| uses[program.base(value).0].push(i));
        }
        uses[program.base(program.output).0].push(program.stages.len());
        let mut gather_before = 0;
        for (i, stage) in program.stages.iter().enumerate() {
            let Work::Gather(gather) = &stage.work else { continue };
            let stored = gather.results.iter().map(|(value, _)| program.base(*value).0);
            stored.for_each(|v| uses[v].insert(0, gather_before));
            gather_before = i;
        }
        let place = |v: usize| {
            let start = arena.offsets[v];
            start..start + program.values[v].bytes(tokens, outputs)
        };
        for a in 0..uses.len() {
            for b in 0..a {
                let (Some(first_a), Some(first_b)) = (uses[a].first(), uses[b].first()) else {
                    continue;
                };
                let overlap =
                    first_a <= uses[b].last().unwrap() && first_b <= uses[a].last().unwrap();
                let disjoint = place(a).end <= place(b).start || place(b).end <= place(a).start;
                assert!(!overlap || disjoint, "{a} and {b} are in use together at {:?}", place(a));
            }
            assert!(place(a).end <= arena.bytes, "within the arena");
        }
    }
}
