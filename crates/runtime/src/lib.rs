//! Language models from Rust. A model's name becomes a file, a plan, a choice of backend, sizes
//! that fit, and a loaded model. This crate holds the only list of backends. It must not print,
//! parse arguments or serve requests: errors are typed, and progress goes to a callback.
//!
//! [`Model`] generates text, [`Encoder`] embeds texts, and [`Scorer`] computes the logits of given
//! tokens. Each loads by a name: a path to a GGUF file, a known name such as `smollm2`, an Ollama
//! name such as `qwen3:8b`, `hf:owner/repo[:QUANT or file]` or `pip:package`.
//!
//! ```no_run
//! use bodkin::{Answer, Message, Model};
//!
//! let model = Model::load("smollm2")?;
//! let events = model.chat(&[Message::user("Why is the sky blue?")], model.request())?;
//! println!("{}", Answer::read(events)?.text);
//! # Ok::<(), bodkin::Error>(())
//! ```
//!
//! Options are methods of the [`Builder`], and a request has limits and sampling parameters of its
//! own. Events arrive while the model runs:
//!
//! ```
//! use bodkin::{Event, KvType, Model, Request};
//!
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models/llama.gguf");
//! let builder = Model::builder(path).device("cpu").ctx_size(128).kv_type(KvType::Q8_0);
//! let model = builder.on_progress(|progress| eprintln!("{progress:?}")).load()?;
//! let request = Request { max_tokens: Some(4), ..model.request() };
//! for event in model.generate("Hello", request)? {
//!     match event {
//!         Event::Prefill { done, total } => println!("{done} of {total} tokens"),
//!         Event::PromptToken { .. } => (),
//!         Event::Token { id, text, .. } => println!("{id}: {text}"),
//!         Event::Done { usage, .. } => assert!(usage.generated_tokens <= 4),
//!         Event::Error(error) => return Err(error.into()),
//!     }
//! }
//! # Ok::<(), bodkin::Error>(())
//! ```
//!
//! Embeddings and logits:
//!
//! ```
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
//! # let bert = &format!("{folder}/bert.gguf");
//! # let llama = &format!("{folder}/llama.gguf");
//! let encoder = bodkin::Encoder::load(bert)?;
//! let embeddings = encoder.embed(&["one text", "another"])?;
//! assert_eq!(embeddings.len(), 2);
//!
//! let mut scorer = bodkin::Scorer::load(llama)?;
//! let tokens = scorer.tokenize("Hello world")?;
//! assert_eq!(scorer.logits(&tokens)?.len(), tokens.len());
//! # Ok::<(), bodkin::Error>(())
//! ```

#![forbid(unsafe_code)]

mod activation_sparsity;
mod backends;
mod builder;
pub mod cleanup;
mod embeddings;
mod encoder;
mod error;
pub mod memory;
mod model;
mod model_file;
mod options;
mod placement;
mod progress;
mod read_ahead;
mod scorer;
pub mod source;
mod tokenizers;

pub use backends::{Device, backend, device_lines, devices, limit_threads};
pub use builder::Builder;
pub use embeddings::{EmbeddingOptions, Embeddings, Submitted};
pub use encoder::Encoder;
pub use error::{Error, Result};
pub use model::{Answer, Message, Model};
pub use model_file::ModelFile;
pub use options::{MAX_BATCH_TOKENS, MAX_TOKENS, Options, within};
pub use placement::{ExpertSlots, Placement};
pub use progress::{Phase, Progress, Reporter};
pub use scorer::Scorer;
pub use tokenizers::tokenizer;

pub use bodkin_backend::{DeviceKind, ExpertBudget, ExpertStore, KvType};
pub use bodkin_cpu::{MAX_THREADS, Sparse};
pub use bodkin_engine::{
    Canceller, Event, Events, FinishReason, Logprobs, Request, SamplerOptions, TEMPLATE_THREAD,
    Timings, Usage,
};
pub use bodkin_model::Pooling;
