//! The state of sequences as blocks that can be copied: pages of the KV cache and state slots,
//! within a model, and between it and the host, which is the caller's memory.

/// The unit in which a model stores the state of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateBlock {
    /// The same page of every KV slot with this window.
    Page {
        /// An index into [`bodkin_model::Plan::windows`].
        window_index: usize,
        /// The page's number.
        page: u32,
    },
    /// The state slot of this number: one sequence's recurrent state of all layers.
    StateSlot(u32),
}

impl StateBlock {
    /// Its number among the blocks of its kind.
    pub fn number(self) -> usize {
        match self {
            StateBlock::Page { page, .. } => page as usize,
            StateBlock::StateSlot(slot) => slot as usize,
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
    /// From the model to the host.
    Read {
        /// The block to read.
        from: StateBlock,
        /// Its bytes are appended here.
        to: &'a mut Vec<u8>,
    },
    /// From the host to the model.
    Write {
        /// Begins with the bytes of a block.
        from: &'a [u8],
        /// The block to replace.
        to: StateBlock,
    },
}

impl Transfer<'_> {
    /// A block of the model: its kind and window are those of the whole transfer.
    pub fn block(&self) -> StateBlock {
        match *self {
            Transfer::Copy { from, .. } | Transfer::Read { from, .. } => from,
            Transfer::Write { to, .. } => to,
        }
    }

    /// The same transfer with other blocks, for a part of a model. It appends to the same `Read`
    /// buffer, but has its own copy of the `Write` cursor: call [`Transfer::skip`] on `self` with
    /// the bytes that the part has moved.
    pub fn map(&mut self, block: impl Fn(StateBlock) -> StateBlock) -> Transfer<'_> {
        match self {
            Transfer::Copy { from, to } => Transfer::Copy { from: block(*from), to: block(*to) },
            Transfer::Read { from, to } => Transfer::Read { from: block(*from), to },
            Transfer::Write { from, to } => Transfer::Write { from, to: block(*to) },
        }
    }

    /// Advances a [`Transfer::Write`] by `bytes`; no effect on the others.
    pub fn skip(&mut self, bytes: usize) {
        if let Transfer::Write { from, .. } = self {
            *from = &from[bytes..];
        }
    }

    /// Copies the blocks' part that is in `memory`, `[blocks, bytes]`, for a model on the CPU. A
    /// [`Transfer::Write`] advances by what it has read. Returns `bytes`.
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
