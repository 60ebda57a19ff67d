//! Where the binary runs: a home and a cache of its own, and models made for one test. It must not
//! know what the commands do.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use bodkin_gguf::{File, Metadata, Writer};
use serde_json::Value;
use tempfile::TempDir;

/// The path of a tiny model of the parity data.
pub(crate) fn model(name: &str) -> String {
    format!("{}/../../tests/parity/models/{name}.gguf", env!("CARGO_MANIFEST_DIR"))
}

/// What the parity data say of that model.
pub(crate) fn reference(name: &str) -> Value {
    let path = PathBuf::from(model(name)).with_extension("json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A machine without models, and a folder for files.
pub(crate) struct Place {
    root: TempDir,
}

impl Place {
    pub(crate) fn new() -> Place {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("home")).unwrap();
        Place { root }
    }

    /// A path in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// The names of the files in the folder.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The binary, to be started in the folder.
    pub(crate) fn bodkin(&self, args: &[&str]) -> Command {
        let home = self.path("home");
        let mut command = Command::new(env!("CARGO_BIN_EXE_bodkin"));
        command
            .args(args)
            .current_dir(self.root.path())
            .env("HOME", &home)
            .env("XDG_DATA_HOME", home.join("data"))
            .env("BODKIN_CACHE", home.join("cache"))
            .env("OLLAMA_MODELS", home.join("ollama"))
            // Nothing listens on this port.
            .env("OLLAMA_REGISTRY", "http://127.0.0.1:9")
            .env_remove("BODKIN_CPU")
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.bodkin(args).output().unwrap()
    }

    /// The same where no file can be longer than some KiB, as if the disk were full. The signal
    /// that such a file causes is ignored.
    #[cfg(unix)]
    pub(crate) fn limited(&self, kilobytes: u32, args: &[&str]) -> Output {
        let script = format!("trap '' XFSZ; ulimit -f {kilobytes}; exec \"$@\"");
        let command = self.bodkin(args);
        let mut limited = Command::new("bash");
        limited.args(["-c", &script, "bash"]).arg(command.get_program()).args(command.get_args());
        let variables = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
        limited.envs(variables).current_dir(self.root.path()).stdin(Stdio::null());
        limited.output().unwrap()
    }

    /// What a successful command prints.
    pub(crate) fn text(&self, args: &[&str]) -> String {
        printed(self.run(args))
    }

    /// What a successful command prints, as JSON.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.text(args)).unwrap()
    }

    /// What a successful command prints that reads `input`.
    pub(crate) fn text_of(&self, args: &[&str], input: &[u8]) -> String {
        let mut command = self.bodkin(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        printed(child.wait_with_output().unwrap())
    }

    /// A copy of a tiny model with changed metadata.
    pub(crate) fn variant(&self, of: &str, change: impl FnOnce(&mut Metadata)) -> String {
        self.copy(of, change, |_, _| ())
    }

    /// A copy of a tiny model with another value in front of a tensor of floats.
    pub(crate) fn with_first_value(&self, of: &str, tensor: &str, value: f32) -> String {
        let change = |name: &str, data: &mut [u8]| {
            if name == tensor {
                data[..4].copy_from_slice(&value.to_le_bytes());
            }
        };
        self.copy(of, |_| (), change)
    }

    /// A copy of a tiny model with changed metadata and tensors.
    fn copy(
        &self,
        of: &str,
        change: impl FnOnce(&mut Metadata),
        change_tensor: impl Fn(&str, &mut [u8]),
    ) -> String {
        let file = File::open(model(of)).unwrap();
        let mut metadata = file.metadata().clone();
        change(&mut metadata);
        let path = self.path("variant.gguf");
        let mut writer = Writer::new(&path, &metadata).unwrap();
        for tensor in file.tensors() {
            let mut data = file.data(tensor).to_vec();
            change_tensor(&tensor.name, &mut data);
            let write = move |out: &mut dyn Write| out.write_all(&data);
            writer.tensor_with(&tensor.name, tensor.format, &tensor.shape, write).unwrap();
        }
        writer.save().unwrap();
        path.into_os_string().into_string().unwrap()
    }
}

/// What a successful command printed.
pub(crate) fn printed(output: Output) -> String {
    assert!(output.status.success(), "{:?}: {}", output.status, stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The one line that a failed command says, having printed nothing.
#[track_caller]
pub(crate) fn failure(output: &Output) -> String {
    let text = stderr(output);
    assert!(output.stdout.is_empty());
    let is_of_flag = text.starts_with("error: --");
    assert_eq!(output.status.code(), Some(if is_of_flag { 2 } else { 1 }), "{text}");
    let line = text.strip_prefix("error: ").and_then(|text| text.strip_suffix('\n'));
    let line = line.unwrap_or_else(|| panic!("an error on a line of its own, found {text:?}"));
    assert!(!line.contains('\n'), "{text}");
    line.to_owned()
}
