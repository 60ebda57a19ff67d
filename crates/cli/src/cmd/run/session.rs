//! A conversation with a loaded model: its messages, its answers, and what they cost.

use std::cell::OnceCell;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::{Result, bail};
use bodkin_backend::Backend;
use bodkin_engine::{
    Engine, Event, Finish, Request, Sampler, SamplerOptions, Template, Timings, Tokenizer, Usage,
};
use bodkin_model::Plan;
use serde_json::{Map, Value, json};

use super::Args;
use crate::interrupt;
use bodkin::ModelFile;
use bodkin::memory::{kv_bytes, recurrent_bytes};

const NO_TEMPLATE: &str = "this model has no chat template, so it takes no system message";

/// A loaded model and what has been said.
pub(crate) struct Session {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    template: Option<Template>,
    meter: Meter,
    sampling: SamplerOptions,
    max_tokens: Option<usize>,
    stop: Vec<String>,
    ignore_end: bool,
    messages: Vec<Value>,
}

/// What an answer's speed is compared with.
pub(crate) struct Meter {
    backend: Box<dyn Backend>,
    plan: Arc<Plan>,
    /// Bytes a second, measured when first asked for.
    bandwidth: OnceCell<Option<f64>>,
}

/// One answer and what it took.
pub(crate) struct Answer {
    pub(crate) text: String,
    ids: Vec<u32>,
    reason: Finish,
    usage: Usage,
    timings: Timings,
}

impl Session {
    pub(crate) fn open(opened: &mut ModelFile, args: &Args) -> Result<Session> {
        let sampling = args.sampling.options(opened.file.metadata())?;
        let tokenizer = args.tokenizer.open(&opened.file)?;
        // What makes no sense is said before the weights are read.
        Sampler::new(sampling.clone(), &tokenizer)?;
        let template = match args.raw {
            true => None,
            false => Template::from_metadata(opened.file.metadata(), &tokenizer)?,
        };
        if args.system.is_some() && template.is_none() {
            bail!("{}: {NO_TEMPLATE}", opened.name);
        }
        let backend = args.machine.backend()?;
        let options = opened.engine_options(&args.machine.options(), backend.as_ref())?;
        let model = opened.load(backend.as_ref(), &options.limits(&opened.plan))?;
        let engine = Engine::open(model, Arc::clone(&tokenizer), options)?;
        let mut session = Session {
            engine,
            tokenizer,
            template,
            meter: Meter { backend, plan: Arc::clone(&opened.plan), bandwidth: OnceCell::new() },
            sampling,
            max_tokens: args.max_tokens.map(NonZeroUsize::get),
            stop: args.stop.clone(),
            ignore_end: args.ignore_eos,
            messages: Vec::new(),
        };
        if let Some(system) = &args.system {
            session.set_system(system)?;
        }
        Ok(session)
    }

    /// Forgets the conversation and starts one with this system message; none if it is empty.
    pub(crate) fn set_system(&mut self, text: &str) -> Result<()> {
        if self.template.is_none() {
            bail!(NO_TEMPLATE);
        }
        self.messages.clear();
        if !text.is_empty() {
            self.messages.push(json!({"role": "system", "content": text}));
        }
        Ok(())
    }

    /// Forgets the conversation but for the system message.
    pub(crate) fn clear(&mut self) {
        self.messages.retain(|m| m["role"] == "system");
    }

    /// Whether what is said is a conversation, or one text that the model goes on with.
    pub(crate) fn is_chat(&self) -> bool {
        self.template.is_some()
    }

    /// Answers `prompt`, passing text on as it comes. Ctrl-C ends the answer.
    pub(crate) fn answer(
        &mut self,
        prompt: &str,
        mut say: impl FnMut(&str) -> std::io::Result<()>,
    ) -> Result<Answer> {
        self.messages.push(json!({"role": "user", "content": prompt}));
        let answer = self.generate(prompt, &mut say);
        match &answer {
            Ok(answer) if self.is_chat() => {
                self.messages.push(json!({"role": "assistant", "content": answer.text}));
            }
            // What could not be answered was not said.
            _ => drop(self.messages.pop()),
        }
        answer
    }

    fn generate(
        &self,
        prompt: &str,
        say: &mut dyn FnMut(&str) -> std::io::Result<()>,
    ) -> Result<Answer> {
        let prompt = match &self.template {
            // The template writes the special tokens itself.
            Some(template) => {
                let messages = Value::Array(self.messages.clone());
                let text = template.render(&messages, None, true, &Map::new())?;
                self.tokenizer.encode(&text, false, true)
            }
            None => self.tokenizer.encode(prompt, true, true),
        };
        let events = self.engine.submit(Request {
            prompt,
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ignore_end: self.ignore_end,
            ..Request::default()
        });
        let canceller = events.canceller();
        let _catch = interrupt::catch(move || canceller.cancel());
        let (mut text, mut ids) = (String::new(), Vec::new());
        for event in events {
            match event {
                Event::Token { id, text: new } => {
                    ids.push(id);
                    text.push_str(&new);
                    say(&new)?;
                }
                Event::Done { reason, text: rest, usage, timings } => {
                    text.push_str(&rest);
                    say(&rest)?;
                    return Ok(Answer { text, ids, reason, usage, timings });
                }
                Event::Error(error) => return Err(error.into()),
            }
        }
        bail!("the engine ended without an answer")
    }

    /// What says how fast answers were.
    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// The same when nothing more will be asked: the model is gone, and its memory free.
    pub(crate) fn into_meter(self) -> Meter {
        self.meter
    }
}

impl Meter {
    /// Tokens, speeds, and the share of the memory bandwidth that generating took.
    pub(crate) fn stats(&self, answer: &Answer) -> String {
        let Answer { usage, timings, .. } = answer;
        let read = usage.prompt_tokens - usage.cached_tokens;
        let mut text = format!(
            "prompt {} tokens ({} from before), {:.1} tok/s; answer {} tokens",
            usage.prompt_tokens,
            usage.cached_tokens,
            rate(read, timings.prompt_ms),
            usage.generated_tokens,
        );
        // The first token comes with the prompt.
        let steps = usage.generated_tokens.saturating_sub(1);
        if steps > 0 && timings.generate_ms > 0.0 {
            let cost = self.plan.cost();
            let context = usage.prompt_tokens + usage.generated_tokens / 2;
            let (plan, backend) = (&self.plan, self.backend.as_ref());
            let kept = kv_bytes(plan, backend, context) + recurrent_bytes(plan, backend);
            let speed = (cost.step_weight_bytes + kept) as f64 * rate(steps, timings.generate_ms);
            let _ = write!(
                text,
                ", {:.1} tok/s, {:.1} GB/s",
                rate(steps, timings.generate_ms),
                speed / 1e9,
            );
            // A device that has no answer to this has none to the next step either.
            let measured = self.bandwidth.get_or_init(|| self.backend.bandwidth().ok());
            if let Some(bandwidth) = measured {
                let (share, gb_s) = (100.0 * speed / bandwidth, bandwidth / 1e9);
                let _ = write!(text, ", {share:.0} % of the {gb_s:.1} GB/s that memory gives");
            }
        }
        text
    }
}

fn rate(count: usize, ms: f64) -> f64 {
    if ms > 0.0 { count as f64 * 1e3 / ms } else { 0.0 }
}

impl Answer {
    /// Whether it ended by itself.
    pub(crate) fn is_whole(&self) -> bool {
        self.reason != Finish::Cancelled
    }

    /// For scripts.
    pub(crate) fn json(&self) -> Value {
        let reason = match self.reason {
            Finish::End => "end",
            Finish::Stop(_) => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "interrupted",
        };
        json!({
            "text": self.text,
            "tokens": self.ids,
            "reason": reason,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "generated_tokens": self.usage.generated_tokens,
            "prompt_ms": self.timings.prompt_ms,
            "generate_ms": self.timings.generate_ms,
        })
    }
}
