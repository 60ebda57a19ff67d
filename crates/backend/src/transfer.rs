//! The state of sequences as blocks that can be copied: pages of the KV cache and slots of
//! recurrent state, within a model, and to and from the host.

/// The unit in which a model stores the state of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateBlock {
    /// One page of every KV slot with this window.
    Page {
        /// An index into [`bodkin_model::Plan::windows`].
        window: usize,
        /// The page's number.
        page: u32,
    },
    /// The recurrent state of all layers in one slot.
    Slot(u32),
}

impl StateBlock {
    /// Its number among the blocks of its kind.
    pub fn number(self) -> usize {
        match self {
            StateBlock::Page { page, .. } => page as usize,
            StateBlock::Slot(slot) => slot as usize,
        }
    }
}

/// A block to copy. Its bytes on the host are in the model's own layout: only a model of the same
/// plan, backend and KV type can read them.
#[derive(Debug)]
pub enum Transfer<'a> {
    /// Within the model; both blocks are of the same kind and window.
    Copy {
        /// The block to read.
        from: StateBlock,
        /// The block to replace.
        to: StateBlock,
    },
    /// To the host.
    Read {
        /// The block to read.
        from: StateBlock,
        /// Its bytes are appended here.
        to: &'a mut Vec<u8>,
    },
    /// From the host.
    Write {
        /// Begins with the bytes of a block.
        from: &'a [u8],
        /// The block to replace.
        to: StateBlock,
    },
}

impl Transfer<'_> {
    /// The block that decides where a model finds the data: any of those of the transfer.
    pub fn block(&self) -> StateBlock {
        match *self {
            Transfer::Copy { from, .. } | Transfer::Read { from, .. } => from,
            Transfer::Write { to, .. } => to,
        }
    }

    /// The same transfer with other blocks.
    pub fn map(&mut self, block: impl Fn(StateBlock) -> StateBlock) -> Transfer<'_> {
        match self {
            Transfer::Copy { from, to } => Transfer::Copy { from: block(*from), to: block(*to) },
            Transfer::Read { from, to } => Transfer::Read { from: block(*from), to },
            Transfer::Write { from, to } => Transfer::Write { from, to: block(*to) },
        }
    }

    /// Goes on behind the first `bytes` of a block that the host has.
    pub fn skip(&mut self, bytes: usize) {
        if let Transfer::Write { from, .. } = self {
            *from = &from[bytes..];
        }
    }

    /// Copies one region of the blocks in host memory: `memory` holds `[blocks, bytes]`. A
    /// [`Transfer::Write`] goes on behind the bytes that it has read. Returns `bytes`.
    pub fn run_region(&mut self, memory: &mut [u8], bytes: usize) -> usize {
        let range = |block: StateBlock| block.number() * bytes..(block.number() + 1) * bytes;
        match self {
            Transfer::Copy { from, to } => memory.copy_within(range(*from), range(*to).start),
            Transfer::Read { from, to } => to.extend_from_slice(&memory[range(*from)]),
            Transfer::Write { from, to } => {
                let (now, rest) = from.split_at(bytes);
                memory[range(*to)].copy_from_slice(now);
                *from = rest;
            }
        }
        bytes
    }
}
