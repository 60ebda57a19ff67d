//! A loaded model that generates text, and the answers that it gives.

use std::sync::{Arc, OnceLock};

use bodkin_backend::{Backend, ExpertStore, PAGE_TOKENS};
use bodkin_engine::{
    Engine, Event, Events, FinishReason, PrefixStore, Reasoning, Request, Template, Timings,
    Tokenizer, Usage,
};
use bodkin_model::Plan;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::backends::backend;
use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::memory::{kv_bytes, recurrent_bytes, total_bytes};
use crate::model_file::ModelFile;
use crate::options::Options;

/// A loaded model that generates text. Several threads may send requests at the same time.
pub struct Model {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    template: OnceLock<Template>,
    request: Request,
    file: ModelFile,
    backend: Box<dyn Backend>,
    context: usize,
    bytes: u64,
    maps_experts: bool,
    /// Of a sequence's recurrent state.
    recurrent_bytes: u64,
    /// Of an element of the KV cache; below 1 for some types.
    kv_element_bytes: f64,
}

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message with this role.
    pub fn new(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    /// A message of the user.
    pub fn user(content: &str) -> Message {
        Message::new("user", content)
    }
}

impl Model {
    /// Loads a model by its name with default options.
    ///
    /// # Errors
    /// Those of [`Builder::load`].
    pub fn load(name: &str) -> Result<Model> {
        Model::builder(name).load()
    }

    /// Begins to set the options of a load.
    pub fn builder(name: &str) -> Builder {
        Builder::new(name)
    }

    /// Loads a model whose file is open.
    ///
    /// # Errors
    /// If it is an encoder, has no usable tokenizer, or does not fit.
    pub fn open(file: ModelFile, options: &Options) -> Result<Model> {
        let file = file.decoder()?;
        let tokenizer = file.tokenizer(options.assume_pre.as_deref())?;
        Model::with_tokenizer(file, tokenizer, options)
    }

    /// As [`Model::open`], with a tokenizer that the caller has.
    ///
    /// # Errors
    /// If it is an encoder, its metadata is not usable, or it does not fit.
    pub fn with_tokenizer(
        file: ModelFile,
        tokenizer: Arc<Tokenizer>,
        options: &Options,
    ) -> Result<Model> {
        let mut file = file.decoder()?.with_memory_limit(options.memory_bytes);
        let request = file.request()?;
        let template = OnceLock::new();
        if let Some(source) = &options.chat_template {
            let wrong = |error| Error::option("chat_template", "a template that parses", error);
            let given = Template::for_tokenizer(source, &tokenizer).map_err(wrong)?;
            template.get_or_init(|| given);
        }
        let backend = backend(options, file.reporter())?;
        let sizes = file.engine_options(options, backend.as_ref())?;
        let limits = sizes.limits(&file.plan);
        let memory = file.memory(backend.as_ref(), &limits);
        if options.expert_budget.is_limit() && memory.expert_slots.is_none() {
            let reason = match file.plan.routed_layers().is_empty() {
                true => "the model has no experts",
                false => "all experts fit, or the device does not cache experts of their format",
            };
            file.reporter().note(&format!("expert-budget changes nothing: {reason}"));
        } else if options.expert_store != ExpertStore::Auto && !memory.maps_experts {
            let reason = match (file.plan.routed_layers().is_empty(), memory.expert_slots) {
                (true, _) => "the model has no experts",
                (_, None) => "all experts fit on the device; expert-budget lets it have fewer",
                (_, Some(_)) => "the device reads experts from the host's memory alone",
            };
            file.reporter().note(&format!("experts mmap changes nothing: {reason}"));
        }
        let bytes = total_bytes(&memory);
        let model = file.load(backend.as_ref(), &limits)?;
        let maps_experts = model.stats().maps_experts;
        let store = match &options.cache_dir {
            None => None,
            Some(folder) => {
                let fingerprint = file.fingerprint(options, backend.as_ref());
                let store = PrefixStore::open(folder, &fingerprint, options.cache_dir_bytes);
                Some(store.map_err(Error::io(folder.display().to_string()))?)
            }
        };
        let engine = Engine::open_with(model, Arc::clone(&tokenizer), sizes, store)
            .map_err(Error::engine(&file.name))?;
        let kv_elements = file.plan.kv_elements(PAGE_TOKENS);
        let kv_bytes = kv_bytes(&file.plan, backend.as_ref(), PAGE_TOKENS);
        Ok(Model {
            engine,
            tokenizer,
            template,
            request,
            context: sizes.context,
            bytes,
            maps_experts,
            recurrent_bytes: recurrent_bytes(&file.plan, backend.as_ref()),
            kv_element_bytes: kv_bytes as f64 / kv_elements.max(1) as f64,
            file,
            backend,
        })
    }

    /// Whether experts stay in the model's file, which must not change then.
    pub fn maps_experts(&self) -> bool {
        self.maps_experts
    }

    /// A request as [`ModelFile::request`] makes it; [`Model::generate`] and [`Model::chat`] add
    /// the prompt.
    pub fn request(&self) -> Request {
        self.request.clone()
    }

    /// Continues a text. The events end with [`Event::Done`] or [`Event::Error`]; dropping them
    /// cancels the request.
    ///
    /// # Errors
    /// If the text is longer than 512 MiB.
    pub fn generate(&self, prompt: &str, request: Request) -> Result<Events> {
        Ok(self.engine.submit(Request { prompt: self.tokenize(prompt)?, ..request })?)
    }

    /// Answers the last message of a chat. The messages are those of the OpenAI chat format:
    /// [`Message`], or any other value with the fields that the model's template reads. If there is
    /// no system message, the system prompt of [`ModelFile::system`] comes first.
    ///
    /// # Errors
    /// If the model has no chat template, or the template rejects the messages.
    pub fn chat(&self, messages: &[impl Serialize], request: Request) -> Result<Events> {
        let prompt = self.tokenize_chat(messages)?;
        let reasoning = self.reasoning(&prompt)?;
        Ok(self.engine.submit(Request { prompt, reasoning, ..request })?)
    }

    /// The tokens of a chat up to where the model answers, as [`Model::chat`] submits them.
    ///
    /// # Errors
    /// If the model has no chat template, or the template rejects the messages.
    pub fn tokenize_chat(&self, messages: &[impl Serialize]) -> Result<Vec<u32>> {
        let messages: Result<Vec<Value>, _> = messages.iter().map(serde_json::to_value).collect();
        let messages =
            messages.map_err(|error| Error::mismatch("messages", "values that JSON has", error))?;
        let text = self.render_chat(messages, &Map::new(), true)?;
        // The template writes the special tokens itself.
        Ok(self.tokenizer.try_encode(&text, false, true)?)
    }

    /// How the answer to the tokens of a chat may begin with reasoning, as the template marks it.
    ///
    /// # Errors
    /// If the model has no chat template.
    pub fn reasoning(&self, prompt: &[u32]) -> Result<Option<Reasoning>> {
        // The last tokens of the longest marker, and white space behind it.
        let tail = &prompt[prompt.len().saturating_sub(64)..];
        let tail = self.tokenizer.decode(tail, true);
        Ok(Reasoning::of(self.template()?.source(), &String::from_utf8_lossy(&tail)))
    }

    /// The text of a chat, with the model's own system prompt if the messages have none. Their tool
    /// calls are as OpenAI's interface has them. `variables` are further variables of the template,
    /// `tools` among them.
    ///
    /// # Errors
    /// If the model has no chat template, or the template rejects the messages.
    pub fn render_chat(
        &self,
        mut messages: Vec<Value>,
        variables: &Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<String> {
        if let Some(system) = self.file.system().filter(|_| !has_system(&messages)) {
            messages.insert(0, json!({"role": "system", "content": system}));
        }
        let template = self.template()?;
        let tools = variables.get("tools").filter(|tools| tools.get(0).is_some());
        let messages = template.with_tools(messages, tools)?;
        Ok(template.render(&messages.into(), None, add_generation_prompt, variables)?)
    }

    /// The tokens of a text, with those that mark its start and end, and with special tokens
    /// parsed.
    ///
    /// # Errors
    /// If the text is longer than 512 MiB.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.try_encode(text, true, true)?)
    }

    /// The text of tokens, without special tokens.
    pub fn detokenize(&self, tokens: &[u32]) -> String {
        String::from_utf8_lossy(&self.tokenizer.decode(tokens, false)).into_owned()
    }

    /// The chat template: that of the options, or of the file.
    ///
    /// # Errors
    /// If the file has none, or it does not parse.
    pub fn template(&self) -> Result<&Template> {
        if self.template.get().is_none() {
            let no_template = || Error::NoTemplate { model: self.file.name.clone() };
            let template = self.file.template(&self.tokenizer)?.ok_or_else(no_template)?;
            // Another thread may have set the same template meanwhile.
            let _ = self.template.set(template);
        }
        Ok(self.template.get().expect("it is set above"))
    }

    /// The most tokens of a sequence, prompt and answer together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The bytes that it holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that its steps had to read since it was loaded, of weights and of the state of
    /// sequences, by the plan's cost: what the memory bandwidth is used for.
    pub fn read_bytes(&self) -> u64 {
        let stats = self.engine.stats();
        let state = stats.sequences.saturating_mul(self.recurrent_bytes);
        let kv = stats.kv_elements as f64 * self.kv_element_bytes;
        stats.weight_bytes.saturating_add(state).saturating_add(kv as u64)
    }

    /// The operations of the model.
    pub fn plan(&self) -> &Plan {
        &self.file.plan
    }

    /// The device that runs it.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// The engine, for requests with token ids and for statistics.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

fn has_system(messages: &[Value]) -> bool {
    messages.first().is_some_and(|first| first["role"] == "system")
}

impl Builder {
    /// Loads a model that generates text.
    ///
    /// # Errors
    /// If the model is not found, is an encoder, or does not fit.
    pub fn load(self) -> Result<Model> {
        Model::open(self.find()?, &self.options)
    }
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The text, without the stop string that ended it.
    pub text: String,
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// The reason why it ended.
    pub finish: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// Durations.
    pub timings: Timings,
}

impl Answer {
    /// Reads the events of a request to their end.
    ///
    /// # Errors
    /// If the request fails.
    pub fn read(events: Events) -> Result<Answer> {
        Answer::read_with(events, |_| Ok(()))
    }

    /// As [`Answer::read`], and calls `on_text` with each piece of text as it arrives. `events` are
    /// [`Events`], or an iterator over them that also uses them in another way.
    ///
    /// # Errors
    /// If the request or `on_text` fails.
    pub fn read_with<E: From<Error>>(
        events: impl IntoIterator<Item = Event>,
        mut on_text: impl FnMut(&str) -> Result<(), E>,
    ) -> Result<Answer, E> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for event in events {
            match event {
                Event::Prefill { .. } | Event::PromptToken { .. } => (),
                Event::Token { id, text: new, .. } => {
                    tokens.push(id);
                    text.push_str(&new);
                    on_text(&new)?;
                }
                Event::Done { reason: finish, text: rest, usage, timings } => {
                    text.push_str(&rest);
                    on_text(&rest)?;
                    return Ok(Answer { text, tokens, finish, usage, timings });
                }
                Event::Error(error) => return Err(Error::from(error).into()),
            }
        }
        Err(Error::EngineStopped.into())
    }
}
