//! What sentence-transformers' files say of a model: how its hidden states become a vector, and the
//! prompts before texts. It must not know families.

use bodkin_gguf::{Array, Metadata, Value};
use serde_json::Value as Json;

use crate::error::{Error, Result};
use crate::source::Source;

/// The last words of the types of modules that a GGUF has a place for. Vectors are normalised
/// unless a user asks for others.
const KNOWN: [&str; 3] = ["Transformer", "Pooling", "Normalize"];

/// The longest prompt, and the most of them.
const PROMPT_BYTES_MAX: usize = 10_000;
const PROMPTS_MAX: usize = 1000;

/// The modules of a model.
pub(crate) struct Modules {
    /// The id of the pooling, if the files name one.
    pub(crate) pooling: Option<u32>,
    /// Prompts with their names, in the file's order.
    prompts: Vec<(String, String)>,
}

impl Modules {
    /// Reads the files, if there are any.
    pub(crate) fn read(source: &Source) -> Result<Modules> {
        Ok(Modules { pooling: pooling(source)?, prompts: prompts(source)? })
    }

    /// Writes the prompts, if there are any.
    pub(crate) fn write_prompts(&self, metadata: &mut Metadata) {
        if self.prompts.is_empty() {
            return;
        }
        let names = self.prompts.iter().map(|(name, _)| name.as_bytes().into()).collect();
        let texts = self.prompts.iter().map(|(_, text)| text.as_bytes().into()).collect();
        metadata.insert("bodkin.prompt.names", Value::Array(Array::String(names)));
        metadata.insert("bodkin.prompt.texts", Value::Array(Array::String(texts)));
    }
}

/// The id of the pooling. Fails if a module is of a kind that would be left out.
fn pooling(source: &Source) -> Result<Option<u32>> {
    let name = "modules.json";
    let Some(modules) = source.json(name)? else { return Ok(None) };
    let text = |module: &Json, key: &str| Some(module.get(key)?.as_str()?.to_owned());
    let kind = |module: &Json| text(module, "type").unwrap_or_default();
    let is_known = |module: &Json| KNOWN.iter().any(|known| kind(module).ends_with(known));
    let modules = modules.as_array().map(Vec::as_slice).unwrap_or_default();
    if let Some(module) = modules.iter().find(|module| !is_known(module)) {
        let expected = format!("modules of {}", KNOWN.join(", "));
        return Err(Error::invalid(source.shown(name), expected, kind(module)));
    }
    let module = modules.iter().find(|module| kind(module).ends_with("Pooling"));
    let Some(folder) = module.and_then(|module| text(module, "path")) else { return Ok(None) };
    let name = format!("{folder}/config.json");
    let expected = "the pooling of the model's sentence-transformers modules";
    let missing = || Error::invalid(source.shown(&name), expected, "no file");
    let pooling = source.json(&name)?.ok_or_else(missing)?;
    let flags = pooling.as_object().into_iter().flatten();
    let flags = flags.filter(|(_, value)| value.as_bool() == Some(true));
    let mut modes: Vec<String> =
        flags.filter_map(|(key, _)| Some(key.strip_prefix("pooling_mode_")?.to_owned())).collect();
    if modes.is_empty() {
        modes.extend(text(&pooling, "pooling_mode"));
    }
    match modes.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["mean_tokens" | "mean"] => Ok(Some(1)),
        ["cls_token" | "cls"] => Ok(Some(2)),
        ["lasttoken"] => Ok(Some(3)),
        _ => {
            let found = if modes.is_empty() { "none".to_owned() } else { modes.join(" and ") };
            Err(Error::invalid(source.shown(&name), "mean, cls or lasttoken alone", found))
        }
    }
}

/// The prompts that are not empty.
fn prompts(source: &Source) -> Result<Vec<(String, String)>> {
    let name = "config_sentence_transformers.json";
    let config = source.json(name)?.unwrap_or_default();
    let prompts = config.get("prompts").and_then(Json::as_object);
    let prompts = prompts.into_iter().flatten();
    let prompts =
        prompts.filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_owned())));
    let prompts: Vec<_> = prompts.filter(|(_, text)| !text.is_empty()).collect();
    let is_long = |text: &String| text.len() > PROMPT_BYTES_MAX;
    if prompts.len() > PROMPTS_MAX || prompts.iter().any(|(a, b)| is_long(a) || is_long(b)) {
        let expected = format!("at most {PROMPTS_MAX} prompts of {PROMPT_BYTES_MAX} bytes");
        return Err(Error::invalid(source.shown(name), expected, "more"));
    }
    Ok(prompts)
}
