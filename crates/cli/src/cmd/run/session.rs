//! A conversation with a loaded model: its messages, its answers, and their speed.

use std::cell::OnceCell;
use std::fmt::Write;
use std::num::NonZeroUsize;

use anyhow::{Result, bail};
use bodkin::memory::{kv_bytes, recurrent_bytes};
use bodkin::{Answer, Finish, Message, Model, ModelFile, Request};
use bodkin_backend::Backend;
use bodkin_engine::Sampler;
use bodkin_model::Plan;
use serde_json::{Value, json};

use super::arguments::Args;
use crate::interrupt;

const NO_TEMPLATE: &str = "this model has no chat template, so it takes no system prompt";

/// A loaded model and a conversation with it.
pub(crate) struct Session {
    model: Model,
    /// Whether the chat template is used; without it, the model continues each text.
    is_chat: bool,
    /// The options of every request.
    request: Request,
    messages: Vec<Message>,
    /// Bytes per second, measured when first needed.
    bandwidth: OnceCell<Option<f64>>,
}

impl Session {
    pub(crate) fn open(file: ModelFile, args: &Args) -> Result<Session> {
        let recommended = file.request()?;
        let sampling = args.sampling.options(recommended.sampling)?;
        let tokenizer = args.tokenizer.open(&file.file)?;
        // Invalid options fail before the weights are read.
        Sampler::new(sampling.clone(), &tokenizer)?;
        let is_chat = !args.raw && file.template(&tokenizer)?.is_some();
        if args.system.is_some() && !is_chat {
            bail!("{}: {NO_TEMPLATE}", file.name);
        }
        let model = Model::with_tokenizer(file, tokenizer, &args.machine.options())?;
        let request = Request {
            sampling,
            max_tokens: args.max_tokens.map(NonZeroUsize::get),
            stop: [recommended.stop, args.stop.clone()].concat(),
            ignore_end: args.ignore_eos,
            ..Request::default()
        };
        let (messages, bandwidth) = (Vec::new(), OnceCell::new());
        let mut session = Session { model, is_chat, request, messages, bandwidth };
        if let Some(system) = &args.system {
            session.set_system(system)?;
        }
        Ok(session)
    }

    /// Starts a new conversation with this system prompt; with none if it is empty.
    pub(crate) fn set_system(&mut self, text: &str) -> Result<()> {
        if !self.is_chat {
            bail!(NO_TEMPLATE);
        }
        self.messages.clear();
        if !text.is_empty() {
            self.messages.push(Message::new("system", text));
        }
        Ok(())
    }

    /// Starts a new conversation with the same system prompt.
    pub(crate) fn clear(&mut self) {
        self.messages.retain(|message| message.role == "system");
    }

    /// Whether messages form a conversation, or the model continues each text.
    pub(crate) fn is_chat(&self) -> bool {
        self.is_chat
    }

    /// Answers `prompt` and passes text on as it arrives. Ctrl-C ends the answer.
    pub(crate) fn answer(
        &mut self,
        prompt: &str,
        mut on_text: impl FnMut(&str) -> std::io::Result<()>,
    ) -> Result<Answer> {
        self.messages.push(Message::user(prompt));
        let answer = self.generate(prompt, &mut on_text);
        match &answer {
            Ok(answer) if self.is_chat => {
                self.messages.push(Message::new("assistant", &answer.text));
            }
            // A prompt without an answer does not stay in the conversation.
            _ => drop(self.messages.pop()),
        }
        answer
    }

    fn generate(
        &self,
        prompt: &str,
        on_text: &mut dyn FnMut(&str) -> std::io::Result<()>,
    ) -> Result<Answer> {
        let request = self.request.clone();
        let events = match self.is_chat {
            true => self.model.chat(&self.messages, request)?,
            false => self.model.generate(prompt, request)?,
        };
        let canceller = events.canceller();
        let _catch = interrupt::catch(move || canceller.cancel());
        Answer::read_with(events, |text| Ok(on_text(text)?))
    }

    /// Tokens and speeds of an answer.
    pub(crate) fn stats(&self, answer: &Answer) -> String {
        stats(answer, self.model.plan(), self.model.backend(), &self.bandwidth)
    }

    /// As [`Session::stats`], after the weights are freed.
    pub(crate) fn into_stats(self, answer: &Answer) -> String {
        let (plan, backend) = self.model.unload();
        stats(answer, &plan, backend.as_ref(), &self.bandwidth)
    }
}

/// Tokens, speeds, and the fraction of the memory bandwidth that generation reached.
fn stats(
    answer: &Answer,
    plan: &Plan,
    backend: &dyn Backend,
    bandwidth: &OnceCell<Option<f64>>,
) -> String {
    let Answer { usage, timings, .. } = answer;
    let prefilled = usage.prompt_tokens - usage.cached_tokens;
    let mut text = format!(
        "prompt {} tokens ({} cached), {:.1} tok/s; answer {} tokens",
        usage.prompt_tokens,
        usage.cached_tokens,
        rate(prefilled, timings.prompt_ms),
        usage.generated_tokens,
    );
    // Prefill samples the first token.
    let steps = usage.generated_tokens.saturating_sub(1);
    if steps > 0 && timings.generate_ms > 0.0 {
        let context = usage.prompt_tokens + usage.generated_tokens / 2;
        let state = kv_bytes(plan, backend, context) + recurrent_bytes(plan, backend);
        let speed = rate(steps, timings.generate_ms);
        let read = (plan.cost().step_weight_bytes + state) as f64 * speed;
        let _ = write!(text, ", {speed:.1} tok/s, {:.1} GB/s", read / 1e9);
        // Without a measurement the fraction is left out.
        if let Some(bandwidth) = bandwidth.get_or_init(|| backend.bandwidth().ok()) {
            let (percent, gb_s) = (100.0 * read / bandwidth, bandwidth / 1e9);
            let _ = write!(text, ", {percent:.0} % of {gb_s:.1} GB/s memory bandwidth");
        }
    }
    text
}

fn rate(count: usize, ms: f64) -> f64 {
    if ms > 0.0 { count as f64 * 1e3 / ms } else { 0.0 }
}

/// An answer for scripts.
pub(crate) fn json(answer: &Answer) -> Value {
    let reason = match answer.finish {
        Finish::End => "end",
        Finish::Stop(_) => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "interrupted",
    };
    json!({
        "text": answer.text,
        "tokens": answer.tokens,
        "reason": reason,
        "prompt_tokens": answer.usage.prompt_tokens,
        "cached_tokens": answer.usage.cached_tokens,
        "generated_tokens": answer.usage.generated_tokens,
        "prompt_ms": answer.timings.prompt_ms,
        "generate_ms": answer.timings.generate_ms,
    })
}
