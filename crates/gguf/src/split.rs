//! The names of the parts of a split file: `PREFIX-00001-of-00003.gguf`. It must not read them.

use std::path::{Path, PathBuf};

/// The parsed name of one part.
pub(crate) struct PartName {
    folder: PathBuf,
    prefix: String,
    /// Counted from 1.
    pub(crate) number: u32,
    /// The number of parts.
    pub(crate) count: u32,
}

impl PartName {
    /// Parses the name of a part; None if the name has another form.
    pub(crate) fn parse(path: &Path) -> Option<PartName> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        Some(PartName {
            folder: path.parent()?.to_path_buf(),
            prefix: prefix.to_string(),
            number: five_digits(number)?,
            count: five_digits(count)?,
        })
    }

    /// The path of another part of the same file, counted from 1.
    pub(crate) fn path_of(&self, number: u32) -> PathBuf {
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}

/// The name of a model's file without `.gguf`; that of a part is the prefix of all parts.
pub fn stem(path: &Path) -> String {
    if let Some(part) = PartName::parse(path) {
        return part.prefix;
    }
    let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { path.file_stem() } else { path.file_name() };
    name.unwrap_or_default().to_string_lossy().into_owned()
}

fn five_digits(text: &str) -> Option<u32> {
    let digits = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}
