//! Reading a file and writing it again gives the same bytes.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use bodkin_gguf::{File, Writer};

fn models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|end| end == "gguf")).collect()
}

fn rewrite(file: &File) -> Vec<u8> {
    let writer = Writer::new(file.path(), file.metadata()).unwrap();
    let mut writer = writer.version(file.version()).unwrap();
    for tensor in file.tensors() {
        writer.tensor(&tensor.name, tensor.format, &tensor.shape, file.data(tensor)).unwrap();
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    bytes
}

#[test]
fn every_model_survives() {
    let models = models();
    assert_eq!(models.len(), 24);
    for path in models {
        let file = File::open(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(rewrite(&file) == bytes, "{}", path.display());
        let owned = File::from_bytes("buffer", bytes).unwrap();
        assert_eq!(owned.tensors(), file.tensors());
        assert_eq!(owned.metadata(), file.metadata());
    }
}
