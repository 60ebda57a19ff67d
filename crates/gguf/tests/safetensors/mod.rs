//! Just enough of the safetensors format to read the reference blocks: eight bytes of length, a
//! JSON header, and the tensors' bytes.

use std::path::{Path, PathBuf};

/// Where the reference blocks lie.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/quants")
}

pub(crate) struct Safetensors {
    header: serde_json::Value,
    data: Vec<u8>,
}

impl Safetensors {
    pub(crate) fn open(name: &str) -> Safetensors {
        let bytes = std::fs::read(folder().join(name)).unwrap();
        let (length, rest) = bytes.split_first_chunk().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        Safetensors { header: serde_json::from_slice(header).unwrap(), data: data.to_vec() }
    }

    pub(crate) fn u8s(&self, name: &str) -> &[u8] {
        self.tensor(name, "U8")
    }

    pub(crate) fn f32s(&self, name: &str) -> Vec<f32> {
        let chunks = self.tensor(name, "F32").as_chunks().0;
        chunks.iter().map(|&chunk| f32::from_le_bytes(chunk)).collect()
    }

    pub(crate) fn f64s(&self, name: &str) -> Vec<f64> {
        let chunks = self.tensor(name, "F64").as_chunks().0;
        chunks.iter().map(|&chunk| f64::from_le_bytes(chunk)).collect()
    }

    fn tensor(&self, name: &str, dtype: &str) -> &[u8] {
        let about = &self.header[name];
        assert_eq!(about["dtype"], dtype, "{name}");
        let offset = |end: usize| about["data_offsets"][end].as_u64().unwrap() as usize;
        &self.data[offset(0)..offset(1)]
    }
}
