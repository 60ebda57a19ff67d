//! The tokenizer of a model file.

use std::sync::{Arc, OnceLock};

use bodkin_engine::Tokenizer;
use bodkin_gguf::File;

use crate::error::{Error, Result};
use crate::options::Options;

/// The tokenizer of a file whose weights may be absent or of any architecture. `assume_pre` names
/// a pre-tokenizer to use instead of the file's own.
///
/// # Errors
/// If the file has no tokenizer, or one that the engine does not have.
pub fn tokenizer(file: &File, assume_pre: Option<&str>) -> Result<Arc<Tokenizer>> {
    let model = file.path().display().to_string();
    let tokenizer = match assume_pre {
        Some(name) => Tokenizer::from_metadata_assuming(file.metadata(), name),
        None => Tokenizer::from_metadata(file.metadata()),
    };
    tokenizer.map(Arc::new).map_err(|source| match source {
        bodkin_engine::Error::UnknownPreTokenizer { found, known } => match assume_pre {
            Some(_) => Error::option("assume_pre", format!("one of {known}"), format!("`{found}`")),
            None => Error::PreTokenizer { model, found, known },
        },
        source => Error::engine(&model)(source),
    })
}

/// The tokenizer of a model that may be used without one: it is built when it is first needed.
pub(crate) struct LazyTokenizer {
    file: Arc<File>,
    assume_pre: Option<String>,
    tokenizer: OnceLock<Arc<Tokenizer>>,
}

impl LazyTokenizer {
    pub(crate) fn new(file: &Arc<File>, options: &Options) -> LazyTokenizer {
        let (file, assume_pre) = (Arc::clone(file), options.assume_pre.clone());
        LazyTokenizer { file, assume_pre, tokenizer: OnceLock::new() }
    }

    pub(crate) fn get(&self) -> Result<&Tokenizer> {
        if self.tokenizer.get().is_none() {
            // Another thread may have set the same tokenizer meanwhile.
            let _ = self.tokenizer.set(tokenizer(&self.file, self.assume_pre.as_deref())?);
        }
        Ok(self.tokenizer.get().expect("it is set above"))
    }
}
