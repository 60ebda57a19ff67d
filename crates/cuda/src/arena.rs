//! Where values lie in the device's memory: those whose lifetimes do not meet share it. Lifetimes
//! are those of stages, which may read earlier values and write later ones than single operations.

use crate::lower::{Program, Value};

/// All addresses are multiples of it: what the widest loads and every cache line need.
const ALIGNMENT: u64 = 256;

/// The place of every value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arena {
    /// Bytes from the start.
    pub(crate) offsets: Vec<u64>,
    /// Of all values together.
    pub(crate) bytes: u64,
}

/// A value's memory and the stages at which it is in use.
#[derive(Clone, Copy)]
struct Life {
    first: usize,
    last: usize,
    start: u64,
    end: u64,
}

/// Gives every value a place for steps of so many tokens and outputs: the lowest that is free.
pub(crate) fn arrange(program: &Program, tokens: usize, outputs: usize) -> Arena {
    let count = program.values.len();
    let (mut first, mut last) = (vec![usize::MAX; count], vec![0; count]);
    for (i, stage) in program.stages.iter().enumerate() {
        stage.values(&mut |Value(v)| {
            first[v] = first[v].min(i);
            last[v] = last[v].max(i);
        });
    }
    // The output is read after the last stage.
    last[program.output.0] = program.stages.len();
    let mut order: Vec<usize> = (0..count).filter(|&v| first[v] != usize::MAX).collect();
    order.sort_by_key(|&v| first[v]);
    let mut lives: Vec<Life> = Vec::new();
    let mut arena = Arena { offsets: vec![0; count], bytes: 0 };
    for v in order {
        let bytes = program.values[v].bytes(tokens, outputs).next_multiple_of(ALIGNMENT);
        let mut busy: Vec<(u64, u64)> = lives
            .iter()
            .filter(|life| life.last >= first[v] && life.first <= last[v])
            .map(|life| (life.start, life.end))
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
        lives.push(Life { first: first[v], last: last[v], start, end });
        // Of lives that are over only those matter that a longer one could still meet.
        lives.retain(|life| life.last >= first[v]);
        arena.offsets[v] = start;
        arena.bytes = arena.bytes.max(end);
    }
    arena
}
