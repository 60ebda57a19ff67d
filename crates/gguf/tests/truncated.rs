//! A file that is truncated while it is mapped ends the process with one line, whether the process
//! reads its data or writes them to another file.
#![cfg(unix)]

use std::env;
use std::fs;
use std::process::{Command, Stdio};

use bodkin_gguf::{File, Format, Metadata, Writer, exit_on_truncation};

/// The variable that makes the test a process that uses a truncated file.
const CHILD: &str = "BODKIN_TEST_TRUNCATED";
/// The variable that makes that process write a copy here.
const COPY: &str = "BODKIN_TEST_COPY";
/// Of the file's tensor: more than a writer buffers.
const BYTES: u64 = 4 << 20;

#[test]
fn a_truncated_map_names_its_file() {
    if let Some(path) = env::var_os(CHILD) {
        exit_on_truncation(|| ());
        drop(File::open(&path).expect("a whole file"));
        let file = File::open(&path).expect("a whole file");
        let truncated = fs::OpenOptions::new().write(true).open(&path);
        truncated.and_then(|file| file.set_len(4096)).expect("a writable file");
        let data = file.data(&file.tensors()[0]);
        if let Some(path) = env::var_os(COPY) {
            let mut writer = Writer::new(path, file.metadata()).expect("valid metadata");
            writer.tensor("x", Format::I8, &[BYTES], data).expect("a valid tensor");
            panic!("copied a truncated file: {:?}", writer.save());
        }
        let sum: u64 = data.iter().map(|&byte| u64::from(byte)).sum();
        panic!("read {sum} from a truncated file");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let (metadata, data) = (Metadata::new(), vec![1; BYTES as usize]);
    let expected =
        format!("error: {}: truncated by another process while in use\n", path.display());
    for copy in [None, Some(folder.path().join("copy.gguf"))] {
        let mut writer = Writer::new(&path, &metadata).expect("valid metadata");
        writer.tensor("x", Format::I8, &[BYTES], &data).expect("a valid tensor");
        writer.save().expect("a writable folder");
        let child = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "a_truncated_map_names_its_file", "--nocapture"])
            .env(CHILD, &path)
            .envs(copy.map(|copy| (COPY, copy)))
            .stdout(Stdio::null())
            .output()
            .expect("a process");
        assert_eq!(String::from_utf8_lossy(&child.stderr), expected);
        assert_eq!(child.status.code(), Some(1));
    }
}
