//! Special tokens, which of them are added around a text, and the chat template. Several files say
//! so; they are read in the order of llama.cpp's converter, where the first says an id and the
//! post-processor what is added.

use bodkin_gguf::{Array, Metadata, Value};
use serde_json::{Map, Value as Json};

use super::files::{Files, SETTINGS};
use crate::error::{Error, Result};

/// The roles of special tokens with their names in GGUF, where CLS has none: BOS stands for it.
const ROLES: [(&str, &str); 9] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("cls", ""),
    ("mask", "mask"),
    ("eot", "eot"),
    ("eom", "eom"),
];
/// The roles that every model may have.
const COMMON_ROLES: usize = 7;

/// What the files say.
#[derive(Default)]
struct Special {
    /// Roles with their ids, in the order of their discovery.
    ids: Vec<(&'static str, u32)>,
    /// Roles with whether their token is added.
    added: Vec<(&'static str, bool)>,
    template: Option<Json>,
    lowercase: Option<bool>,
    strip_accents: Option<bool>,
}

/// Writes special tokens and the chat template. `count` bounds the ids where the vocabulary's end
/// is certain.
pub(super) fn write(
    files: &Files<'_>,
    metadata: &mut Metadata,
    count: Option<usize>,
) -> Result<()> {
    Special::read(files, count)?.write(metadata);
    Ok(())
}

impl Special {
    /// Reads all files. Ids from `count` on are no tokens.
    fn read(files: &Files<'_>, count: Option<usize>) -> Result<Special> {
        let mut special = Special::default();
        let mut roles = ROLES[..COMMON_ROLES].iter().map(|(role, _)| *role).collect::<Vec<_>>();
        let mut settings = files.settings.clone();
        if let Some(tokenizer) = &files.tokenizer {
            special.normalizer(tokenizer.get("normalizer").unwrap_or(&Json::Null), 0);
            let mut tokens = Tokens::new(settings.as_mut(), &mut roles);
            let processor = tokenizer.get("post_processor").unwrap_or(&Json::Null);
            let nested = processor.get("processors").and_then(Json::as_array);
            for processor in nested.map_or(std::slice::from_ref(processor), Vec::as_slice) {
                special.processor(processor, &mut tokens);
            }
        }
        if let Some(settings) = &settings {
            special.template = read_template(files, settings)?;
            for role in &roles {
                special.read_settings(files, settings, role, count)?;
            }
        }
        for role in &roles {
            let id = files.config.get(&[&format!("{role}_token_id")]).and_then(Json::as_u64);
            special.set_id(role, id, count);
        }
        Ok(special)
    }

    /// Writes the keys.
    fn write(self, metadata: &mut Metadata) {
        for (role, id) in &self.ids {
            let name = ROLES.iter().find(|(other, _)| other == role).map_or("", |it| it.1);
            if name.is_empty() {
                continue;
            }
            metadata.insert(format!("tokenizer.ggml.{name}_token_id"), Value::U32(*id));
        }
        let handled = |role: &str| ["bos", "eos", "sep"].contains(&role);
        for (role, is_added) in self.added.iter().filter(|(role, _)| handled(role)) {
            let key = format!("tokenizer.ggml.add_{role}_token");
            metadata.insert(key, Value::Bool(*is_added));
        }
        if let Some(template) = &self.template {
            write_template(template, metadata);
        }
        for (name, flag) in [("lowercase", self.lowercase), ("strip_accents", self.strip_accents)] {
            if let Some(flag) = flag {
                let key = format!("tokenizer.ggml.normalizer.{name}");
                metadata.insert(key, Value::Bool(flag));
            }
        }
    }

    fn set_id(&mut self, role: &'static str, id: Option<u64>, count: Option<usize>) {
        let Some(id) = id.and_then(|id| u32::try_from(id).ok()) else { return };
        let is_token = count.is_none_or(|count| (id as usize) < count);
        if is_token && !self.ids.iter().any(|(other, _)| *other == role) {
            self.ids.push((role, id));
        }
    }

    /// Sets whether a role's token is added, in place of what was said before.
    fn set_added(&mut self, role: &'static str, is_added: bool) {
        match self.added.iter_mut().find(|(other, _)| *other == role) {
            Some(entry) => entry.1 = is_added,
            None => self.added.push((role, is_added)),
        }
    }

    fn is_known(&self, role: &str) -> bool {
        self.added.iter().any(|(other, _)| *other == role)
    }

    /// Reads the flags of a normalizer, or of those in a sequence.
    fn normalizer(&mut self, normalizer: &Json, depth: usize) {
        let flag = |key: &str| normalizer.get(key).and_then(Json::as_bool);
        match normalizer.get("type").and_then(Json::as_str) {
            Some("Lowercase") => self.lowercase = Some(true),
            Some("StripAccents") => self.strip_accents = Some(true),
            Some("BertNormalizer") => {
                self.lowercase = flag("lowercase").or(self.lowercase);
                self.strip_accents = flag("strip_accents").or(self.strip_accents);
            }
            Some("Sequence") if depth < 8 => {
                let nested = normalizer.get("normalizers").and_then(Json::as_array);
                for normalizer in nested.into_iter().flatten() {
                    self.normalizer(normalizer, depth + 1);
                }
            }
            _ => {}
        }
    }

    /// Reads what a post-processor adds.
    fn processor(&mut self, processor: &Json, tokens: &mut Tokens<'_>) {
        match processor.get("type").and_then(Json::as_str) {
            Some("ByteLevel") => {
                for role in ["bos", "eos"] {
                    if !self.is_known(role) {
                        self.set_added(role, false);
                    }
                }
            }
            Some("RobertaProcessing") => {
                ["bos", "eos", "sep"].into_iter().for_each(|role| self.set_added(role, true));
                for (role, other) in [("cls", "bos"), ("sep", "eos")] {
                    if tokens.is_missing(role) {
                        let own = processor.get(role).and_then(|pair| pair.get(0)).cloned();
                        let token = own.or_else(|| tokens.get(other)).unwrap_or(Json::Null);
                        tokens.set(role, token);
                    }
                }
            }
            Some("TemplateProcessing") => self.processing_template(processor, tokens),
            _ => {}
        }
    }

    /// Reads which tokens stand around one text, and between two.
    fn processing_template(&mut self, processor: &Json, tokens: &mut Tokens<'_>) {
        let parts = |key: &str| processor.get(key).and_then(Json::as_array).map(Vec::as_slice);
        let single = parts("single").unwrap_or_default();
        let (mut first, mut last) = (None, None);
        if let [start, .., end] = single {
            (first, last) = (special_of(start), special_of(end));
        }
        if let Some(first) = &first {
            tokens.set_first(first);
            let is_added = [tokens.get("bos"), tokens.get("cls")].contains(&Some(first.clone()));
            self.set_added("bos", is_added);
        }
        if let Some(last) = &last {
            tokens.set_last(last);
            let is_added = tokens.get("eos").as_ref() == Some(last);
            self.set_added("eos", is_added);
        }
        let mut pair = parts("pair").unwrap_or_default();
        if let Some((start, rest)) = pair.split_first()
            && first.is_some()
            && special_of(start) == first
        {
            pair = rest;
        }
        if let Some((end, rest)) = pair.split_last()
            && last.is_some()
            && special_of(end) == last
        {
            pair = rest;
        }
        let [a, between @ .., b] = pair else { return };
        if (sequence_of(a), sequence_of(b)) != (Some("A"), Some("B")) || between.is_empty() {
            return;
        }
        let separates = |part: &Json| {
            let token = special_of(part);
            token.is_some() && [tokens.get("sep"), tokens.get("eos")].contains(&token)
        };
        let is_added = separates(&between[0]) && last.is_none()
            || between.len() == 2 && separates(&between[1]);
        self.set_added("sep", is_added);
        if is_added && tokens.is_missing("sep") {
            let eos = tokens.get("eos").unwrap_or(Json::Null);
            tokens.set("sep", eos);
        }
    }

    /// Reads a role's token and whether it is added from `tokenizer_config.json`.
    fn read_settings(
        &mut self,
        files: &Files<'_>,
        settings: &Map<String, Json>,
        role: &'static str,
        count: Option<usize>,
    ) -> Result<()> {
        let is_added = settings.get(&format!("add_{role}_token")).and_then(Json::as_bool);
        if let Some(is_added) = is_added.filter(|_| !self.is_known(role)) {
            self.set_added(role, is_added);
        }
        let token = settings.get(&format!("{role}_token"));
        let text = token.and_then(|token| token.get("content").unwrap_or(token).as_str());
        if let (Some(text), Some(_)) = (text, &files.tokenizer) {
            let tokens = files.added_tokens()?;
            let id = tokens.iter().find(|(_, other, _)| *other == text).map(|(id, ..)| *id);
            self.set_id(role, id, count);
        }
        Ok(())
    }
}

/// The special tokens of `tokenizer_config.json`, which a post-processor completes.
struct Tokens<'a> {
    /// None without the file: then the tokens are not written anywhere.
    settings: Option<&'a mut Map<String, Json>>,
    roles: &'a mut Vec<&'static str>,
    /// The tokens if there is no such file.
    own: Map<String, Json>,
}

impl<'a> Tokens<'a> {
    fn new(
        settings: Option<&'a mut Map<String, Json>>,
        roles: &'a mut Vec<&'static str>,
    ) -> Tokens<'a> {
        let mut tokens = Tokens { settings, roles, own: Map::new() };
        for (role, other) in [("bos", "cls"), ("eos", "sep")] {
            if tokens.is_missing(role)
                && let Some(token) = tokens.get(other)
            {
                tokens.set(role, token);
            }
        }
        tokens
    }

    fn get(&self, role: &str) -> Option<Json> {
        let all = self.settings.as_deref().unwrap_or(&self.own);
        all.get(&format!("{role}_token")).cloned()
    }

    fn set(&mut self, role: &str, token: Json) {
        let all = self.settings.as_deref_mut().unwrap_or(&mut self.own);
        all.insert(format!("{role}_token"), token);
    }

    fn is_missing(&self, role: &str) -> bool {
        matches!(self.get(role), None | Some(Json::Null))
    }

    /// Takes the token before a text for BOS and CLS where these are not named.
    fn set_first(&mut self, first: &Json) {
        if self.settings.is_none() {
            return self.set("bos", first.clone());
        }
        if ![self.get("bos"), self.get("cls")].contains(&Some(first.clone())) {
            for role in ["bos", "cls"] {
                if self.is_missing(role) {
                    self.set(role, first.clone());
                }
            }
        }
    }

    /// Takes the token behind a text for EOS; another one that is named so ends a turn.
    fn set_last(&mut self, last: &Json) {
        let named = self.get("eos");
        let is_other = self.settings.is_some() && named.as_ref() != Some(last);
        let free = ["eot", "eom"].into_iter().find(|role| !self.roles.contains(role));
        if let Some(role) = free.filter(|_| is_other) {
            self.roles.push(role);
            self.set(role, named.unwrap_or(Json::Null));
        }
        self.set("eos", last.clone());
    }
}

/// The token of a part of a template.
fn special_of(part: &Json) -> Option<Json> {
    part.get("SpecialToken")?.get("id").cloned()
}

/// The text of a part of a template.
fn sequence_of(part: &Json) -> Option<&str> {
    part.get("Sequence")?.get("id")?.as_str()
}

/// The chat template: of `tokenizer_config.json`, or of a file of its own.
fn read_template(files: &Files<'_>, settings: &Map<String, Json>) -> Result<Option<Json>> {
    let template = match settings.get("chat_template") {
        Some(template) => Some(template.clone()),
        None => match files.source.text("chat_template.jinja")? {
            Some(text) => Some(Json::String(text)),
            None => {
                let file = files.source.json("chat_template.json")?;
                file.and_then(|file| file.get("chat_template").cloned())
            }
        },
    };
    match template {
        None | Some(Json::Null) => Ok(None),
        Some(template @ (Json::String(_) | Json::Array(_))) => Ok(Some(template)),
        Some(_) => {
            let item = format!("{}: chat_template", files.source.shown(SETTINGS));
            Err(Error::invalid(item, "a template or named templates", "another value"))
        }
    }
}

/// Writes one template, or those with names.
fn write_template(template: &Json, metadata: &mut Metadata) {
    let string = |text: &str| Value::String(text.as_bytes().into());
    if let Json::String(text) = template {
        return metadata.insert("tokenizer.chat_template", string(text));
    }
    let mut names = Vec::new();
    let mut default = None;
    for entry in template.as_array().into_iter().flatten() {
        let text = |key: &str| entry.get(key).and_then(Json::as_str);
        let (Some(name), Some(template)) = (text("name"), text("template")) else { continue };
        let is_plain = |character: char| character.is_ascii_alphanumeric();
        let name = name.replace(|character| !is_plain(character), "_");
        if name == "default" {
            default = Some(template);
        } else if !name.is_empty() {
            metadata.insert(format!("tokenizer.chat_template.{name}"), string(template));
            names.push(name.into_bytes().into_boxed_slice());
        }
    }
    if !names.is_empty() {
        metadata.insert("tokenizer.chat_templates", Value::Array(Array::String(names)));
    }
    if let Some(template) = default {
        metadata.insert("tokenizer.chat_template", string(template));
    }
}
