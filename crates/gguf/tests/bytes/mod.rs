//! A small GGUF file put together by hand, byte by byte and apart from the writer under test, so
//! that every field can be made wrong.

#![allow(dead_code)] // Each test uses its part of this.

/// Type ids of metadata values.
pub(crate) const U32: u32 = 4;
pub(crate) const BOOL: u32 = 7;
pub(crate) const STRING: u32 = 8;
pub(crate) const ARRAY: u32 = 9;

/// The pieces of a file, in the order of the file.
#[derive(Clone)]
pub(crate) struct Parts {
    pub(crate) magic: Vec<u8>,
    pub(crate) version: u32,
    /// In place of the true number of tensors.
    pub(crate) tensor_count: Option<u64>,
    /// In place of the true number of entries.
    pub(crate) entry_count: Option<u64>,
    pub(crate) entries: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Vec<u8>>,
    pub(crate) alignment: usize,
    pub(crate) data: Vec<u8>,
}

impl Parts {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.clone();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        out.extend(self.entries.concat());
        out.extend(self.tensors.concat());
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A valid file: six entries and three tensors, F32 `a` [4, 2], Q4_0 `b` [32] and F16 `c` [3].
pub(crate) fn small() -> Parts {
    let list = [U32.to_le_bytes().to_vec(), count(2), vec![1, 0, 0, 0, 2, 0, 0, 0]].concat();
    let words = [STRING.to_le_bytes().to_vec(), count(2), string(b"x"), string(b"yz")].concat();
    let entries = vec![
        entry("general.architecture", STRING, &string(b"llama")),
        entry("general.alignment", U32, &32u32.to_le_bytes()),
        entry("flag", BOOL, &[1]),
        entry("list", ARRAY, &list),
        entry("words", ARRAY, &words),
        entry("last", 12, &1.5f64.to_le_bytes()),
    ];
    let tensors =
        vec![tensor("a", &[4, 2], 0, 0), tensor("b", &[32], 2, 32), tensor("c", &[3], 1, 64)];
    let padding = |at: u8| (50..64).contains(&at) || at >= 70;
    let data = (0..96).map(|at| if padding(at) { 0 } else { at }).collect();
    Parts {
        magic: b"GGUF".to_vec(),
        version: 3,
        tensor_count: None,
        entry_count: None,
        entries,
        tensors,
        alignment: 32,
        data,
    }
}

pub(crate) fn count(count: u64) -> Vec<u8> {
    count.to_le_bytes().to_vec()
}

pub(crate) fn string(bytes: &[u8]) -> Vec<u8> {
    [count(bytes.len() as u64), bytes.to_vec()].concat()
}

pub(crate) fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [string(key.as_bytes()), kind.to_le_bytes().to_vec(), value.to_vec()].concat()
}

/// An array entry with a true or false count.
pub(crate) fn array(key: &str, element: u32, length: u64, items: &[u8]) -> Vec<u8> {
    let value = [element.to_le_bytes().to_vec(), count(length), items.to_vec()].concat();
    entry(key, ARRAY, &value)
}

pub(crate) fn tensor(name: &str, shape: &[u64], id: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name.as_bytes());
    out.extend((shape.len() as u32).to_le_bytes());
    out.extend(shape.iter().flat_map(|dim| dim.to_le_bytes()));
    out.extend(id.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}
