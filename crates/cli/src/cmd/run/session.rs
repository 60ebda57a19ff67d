//! A conversation with a loaded model: its messages, its answers, and how they are cut.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bodkin::{Answer, FinishReason, Message, Model, ModelFile, Request};
use bodkin_engine::{Constraint, Event, Sampler};
use bodkin_gguf::kind_of_file;
use serde_json::{Value, json};

use super::arguments::{Args, Settings, UNLIMITED};
use super::interruptible::InterruptibleEvents;
use super::sampling;
use super::screen::Screen;
use crate::arguments::describe;
use crate::terminal::say;
use crate::{output, text};

/// The name of a setting that is on or off, and needs a chat template.
pub(super) const CONTEXT_SHIFT: &str = "context-shift";
const NO_SYSTEM: &str = "the model takes no system prompt";

/// A loaded model and a conversation with it.
pub(super) struct Session {
    model: Model,
    /// Architecture, size and file type.
    described: String,
    /// Whether the chat template is used; without it, the model continues each text.
    is_chat: bool,
    /// Whether a user reads along and types commands.
    is_interactive: bool,
    /// Whether the oldest turns are dropped when the context is full.
    shifts: bool,
    /// What the model file and its source recommend.
    recommended: Request,
    pub(super) settings: Settings,
    /// The options of every request.
    request: Request,
    messages: Vec<Message>,
    /// The last prompt that was answered.
    last_prompt: Option<String>,
    /// The last answer.
    pub(super) last: Option<Answer>,
}

impl Session {
    pub(super) fn open(
        file: ModelFile,
        args: &Args,
        constraint: Option<Arc<Constraint>>,
        is_interactive: bool,
    ) -> Result<Session> {
        let recommended = file.request()?;
        let sampling = args.settings.sampling.options(&recommended.sampling)?;
        let tokenizer = args.tokenizer.open(&file.file)?;
        // Invalid options fail before the weights are read.
        Sampler::new(sampling.clone(), &tokenizer)
            .map_err(|error| sampling::of_flag(error, &sampling, &recommended.sampling))?;
        let is_chat = !args.raw && file.template(&tokenizer)?.is_some();
        if args.system.is_some() && !is_chat {
            bail!("{}: {}", file.name, without_template(NO_SYSTEM));
        }
        let described = format!("{} ({})", file.name, describe(&file));
        let model = Model::with_tokenizer(file, tokenizer, &args.machine.options())?;
        let mut session = Session {
            model,
            described,
            is_chat,
            is_interactive,
            shifts: args.context_shift && is_chat,
            recommended,
            settings: args.settings.clone(),
            request: Request { ignore_end: args.ignore_eos, constraint, ..Request::default() },
            messages: Vec::new(),
            last_prompt: None,
            last: None,
        };
        session.apply(args.settings.clone())?;
        if let Some(system) = &args.system {
            session.set_system(system)?;
        }
        Ok(session)
    }

    /// Uses these settings from now on, if they are valid.
    pub(super) fn apply(&mut self, settings: Settings) -> Result<()> {
        let sampling = settings.sampling.options(&self.recommended.sampling)?;
        Sampler::new(sampling.clone(), self.model.engine().tokenizer())
            .map_err(|error| sampling::of_flag(error, &sampling, &self.recommended.sampling))?;
        self.request.sampling = sampling;
        self.request.max_tokens =
            settings.max_tokens.and_then(|limit| limit.0).map(NonZeroUsize::get);
        self.request.stop = [&self.recommended.stop[..], &settings.stop].concat();
        self.settings = settings;
        Ok(())
    }

    /// Starts a new conversation with this system prompt; with none if it is empty.
    pub(super) fn set_system(&mut self, text: &str) -> Result<()> {
        ensure!(self.is_chat, without_template(NO_SYSTEM));
        self.messages.clear();
        if !text.is_empty() {
            self.messages.push(Message::new("system", text));
        }
        Ok(())
    }

    /// Sets from `on` or `off` whether the oldest turns are dropped when the context is full.
    pub(super) fn set_context_shift(&mut self, value: &str) -> Result<()> {
        ensure!(self.is_chat, without_template("there are no turns to drop"));
        self.shifts = match value {
            "on" => true,
            "off" => false,
            _ => bail!("{CONTEXT_SHIFT}: expected on or off, found `{value}`"),
        };
        Ok(())
    }

    /// Starts a new conversation with the same system prompt.
    pub(super) fn clear(&mut self) {
        self.messages.retain(|message| message.role == "system");
        self.last_prompt = None;
    }

    /// Whether messages form a conversation, or the model continues each text.
    pub(super) fn is_chat(&self) -> bool {
        self.is_chat
    }

    /// Answers `prompt`. Ctrl-C ends the answer, or the reading of the prompt.
    pub(super) fn answer(&mut self, prompt: &str, screen: &mut Screen) -> Result<Answer> {
        self.messages.push(Message::user(prompt));
        let answer = self.generate(prompt, screen);
        match &answer {
            Ok(answer) if self.is_chat && !answer.tokens.is_empty() => {
                self.messages.push(Message::new("assistant", &answer.text));
            }
            // A prompt without an answer does not stay in the conversation.
            _ => drop(self.messages.pop()),
        }
        match answer {
            Ok(answer) => {
                if !answer.tokens.is_empty() {
                    self.last_prompt = Some(prompt.to_owned());
                    self.last = Some(answer.clone());
                }
                Ok(answer)
            }
            Err(error) => {
                let of_engine = match error.downcast_ref() {
                    Some(bodkin::Error::Request(error)) => Some(error),
                    _ => error.downcast_ref::<bodkin_engine::Error>(),
                };
                match of_engine {
                    Some(&bodkin_engine::Error::PromptTooLong { tokens, limit }) => {
                        Err(self.too_long(prompt, tokens, limit)?)
                    }
                    _ => Err(error),
                }
            }
        }
    }

    /// The error of a prompt that the context has no room for. A user of a chat knows nothing of
    /// the prompt that the whole conversation makes.
    fn too_long(&self, prompt: &str, tokens: usize, limit: usize) -> Result<anyhow::Error> {
        let context = self.model.context();
        if !(self.is_chat && self.is_interactive) {
            let (error, help) = (
                bodkin_engine::Error::PromptTooLong { tokens, limit },
                self.help_with_context(true),
            );
            return Ok(anyhow!("{error}{help}"));
        }
        let system = self.messages.iter().take_while(|message| message.role == "system");
        let alone = system.cloned().chain([Message::new("user", prompt)]).collect::<Vec<_>>();
        let alone = self.model.tokenize_chat(&alone)?.len();
        let what = match alone > limit {
            true => format!("the prompt alone has {alone} tokens"),
            false => format!("the conversation has {tokens} tokens with this prompt"),
        };
        let help = self.help_with_context(alone <= limit);
        Ok(anyhow!("{what}, the context of {context} has room for {limit}{help}"))
    }

    /// Takes the last prompt and its answer back, so that it can be answered again.
    pub(super) fn take_last_prompt(&mut self) -> Option<String> {
        let prompt = self.last_prompt.take()?;
        if self.is_chat {
            self.messages.truncate(self.messages.len().saturating_sub(2));
        }
        Some(prompt)
    }

    /// Whether an answer to the same prompt is the same again.
    pub(super) fn repeats_itself(&self) -> bool {
        let sampling = &self.request.sampling;
        sampling.temperature <= 0.0 || sampling.seed.is_some()
    }

    /// Generates an answer. With context shift, an answer that the context cuts goes on after
    /// the oldest turns are dropped, unless a schema says what the whole of it is.
    fn generate(&mut self, prompt: &str, screen: &mut Screen) -> Result<Answer> {
        let mut answer = self.generate_part(prompt, None, screen)?;
        while answer.finish == FinishReason::Context
            && self.shifts
            && self.request.constraint.is_none()
            && self.drop_turns(&answer.tokens, screen)?
        {
            answer = self.generate_part(prompt, Some(answer), screen)?;
        }
        Ok(answer)
    }

    /// Generates an answer, or what comes after the `start` of one.
    fn generate_part(
        &mut self,
        prompt: &str,
        start: Option<Answer>,
        screen: &mut Screen,
    ) -> Result<Answer> {
        let started = start.as_ref().map_or(&[][..], |answer| &answer.tokens);
        let mut tokens = match self.is_chat {
            true => self.model.tokenize_chat(&self.messages)?,
            false => self.model.tokenize(prompt)?,
        };
        if self.shifts
            && tokens.len() >= self.model.context()
            && self.drop_turns(started, screen)?
        {
            tokens = self.model.tokenize_chat(&self.messages)?;
        }
        tokens.extend(started);
        let max_tokens = self.request.max_tokens.map(|max| max - started.len());
        let reasoning = if self.is_chat { self.model.reasoning(&tokens)? } else { None };
        let request = Request { prompt: tokens, max_tokens, reasoning, ..self.request.clone() };
        let events = InterruptibleEvents::submit(self.model.engine(), request)?;
        let Screen { prefill, text } = screen;
        let prefill = prefill.as_ref();
        let events = events.inspect(|event| match event {
            Event::Prefill { done, total } => prefill.iter().for_each(|p| p.set(*done, *total)),
            _ => prefill.iter().for_each(|p| p.end()),
        });
        let part = Answer::read_with(events, |piece| Ok::<_, anyhow::Error>(text.push(piece)?))?;
        Ok(match start {
            Some(start) => joined(start, part),
            None => part,
        })
    }

    /// Drops the oldest turns, so that the rest and `started` tokens of an answer take at most half
    /// of the context, and says so. Drops none if the last turn alone is too long. Returns whether
    /// any were dropped.
    fn drop_turns(&mut self, started: &[u32], screen: &mut Screen) -> Result<bool> {
        let context = self.model.context();
        let first = usize::from(self.messages.first().is_some_and(|m| m.role == "system"));
        let mut messages = self.messages.clone();
        let (mut dropped, mut tokens) = (0, context);
        while tokens > context / 2 {
            let is_user = |message: &Message| message.role == "user";
            let after_first = messages.get(first + 1..).unwrap_or_default();
            let Some(turn) = after_first.iter().position(is_user) else { break };
            messages.drain(first..=first + turn);
            dropped += 1;
            tokens = self.model.tokenize_chat(&messages)?.len() + started.len();
        }
        if tokens >= context {
            return Ok(false);
        }
        self.messages = messages;
        if dropped > 0 {
            screen.break_line()?;
            let turns = match dropped {
                1 => "oldest turn".to_owned(),
                n => format!("{n} oldest turns"),
            };
            say(&format!("[the context of {context} tokens is full: dropped the {turns}]"));
        }
        Ok(dropped > 0)
    }

    /// Why the answer is cut short, if it is.
    pub(super) fn cut(&self, answer: &Answer) -> Option<String> {
        match answer.finish {
            FinishReason::Length => {
                let tokens = text::count(answer.tokens.len(), "token");
                let limit = if self.is_interactive { "max-tokens" } else { "-n" };
                Some(format!("[answer cut: {limit} allows {tokens}]"))
            }
            FinishReason::Context => {
                let context = self.model.context();
                let help = self.help_with_context(true);
                Some(format!("[answer cut: the context of {context} tokens is full{help}]"))
            }
            _ => None,
        }
    }

    /// What helps when the context is full, after a semicolon. What helps at once comes first;
    /// `turns` if fewer of them help.
    fn help_with_context(&self, turns: bool) -> String {
        let (context, plan) = (self.model.context(), self.model.plan());
        let has_turns = self.is_interactive && turns;
        let can_shift = self.is_chat && !self.shifts;
        let at_start = if self.is_interactive { " at the next start" } else { "" };
        // Positions that the model was not trained for work, with a warning.
        let trained = match plan.context_length {
            trained if context < trained => String::new(),
            trained => format!(" than the {trained} tokens that the model was trained for"),
        };
        let larger = format!("-c N{at_start} sets a larger context{trained}");
        let help = [
            (has_turns, "/clear begins a new conversation"),
            (has_turns && can_shift, "/set context-shift on drops the oldest turns"),
            (context < plan.max_positions(), &larger),
        ];
        let help: Vec<&str> =
            help.iter().filter(|(helps, _)| *helps).map(|(_, text)| *text).collect();
        if help.is_empty() { String::new() } else { format!("; {}", help.join(", ")) }
    }

    /// The model, the conversation and the settings, one line each.
    pub(super) fn describe(&self) -> Result<String> {
        let tokens = match self.is_chat && !self.messages.is_empty() {
            // With what the template adds for the next answer it may be more than the context.
            true => self.model.tokenize_chat(&self.messages)?.len().min(self.model.context()),
            false => 0,
        };
        let system = self.messages.first().filter(|message| message.role == "system");
        let turns = self.messages.iter().filter(|message| message.role == "user").count();
        let turns = text::count(turns, "turn");
        let rows = [
            ("model", self.described.clone()),
            ("device", self.model.backend().name()),
            ("context", format!("{tokens} of {} tokens, {turns}", self.model.context())),
            ("system", system.map_or("none".to_owned(), |message| message.content.clone())),
        ];
        let rows = rows.into_iter().map(|(name, value)| format!("{name:<20} {value}"));
        Ok(rows.chain(self.setting_lines(None)).collect::<Vec<_>>().join("\n"))
    }

    /// The settings that `/set` changes, one line each: all, or that of a name.
    pub(super) fn setting_lines(&self, name: Option<&str>) -> Vec<String> {
        let max_tokens =
            self.request.max_tokens.map_or(UNLIMITED.to_owned(), |max| max.to_string());
        let mut rows = vec![("max-tokens", max_tokens)];
        let stop = self.request.stop.iter().map(|text| json!(text).to_string());
        rows.push(("stop", sampling::list(stop)));
        rows.extend(sampling::values(&self.request.sampling));
        let shift = if self.shifts { "on" } else { "off" };
        rows.extend(self.is_chat.then(|| (CONTEXT_SHIFT, shift.to_owned())));
        rows.retain(|(of_row, _)| name.is_none_or(|name| name == *of_row));
        rows.into_iter().map(|(name, value)| format!("{name:<20} {value}")).collect()
    }

    /// Writes the messages to a file, as JSON that [`Session::load`] reads.
    pub(super) fn save(&self, path: &Path) -> Result<usize> {
        ensure!(!self.messages.is_empty(), "there is nothing to save yet");
        if path.exists() {
            read_messages(path).context("/save replaces nothing but a saved conversation")?;
        }
        output::write(path, |out| {
            serde_json::to_writer_pretty(&mut *out, &self.messages)?;
            Ok(writeln!(out)?)
        })?;
        Ok(self.messages.len())
    }

    /// Continues the conversation of a file.
    pub(super) fn load(&mut self, path: &Path) -> Result<usize> {
        ensure!(self.is_chat, without_template("no conversation is continued"));
        self.messages = read_messages(path)?;
        self.last_prompt = match &self.messages[..] {
            [.., user, assistant] if user.role == "user" && assistant.role == "assistant" => {
                Some(user.content.clone())
            }
            _ => None,
        };
        Ok(self.messages.len())
    }
}

/// What does not work because a model has no chat template, or `--raw` ignores it.
fn without_template(what: &str) -> String {
    format!("no chat template is in use, so {what}")
}

/// The messages of a saved conversation.
fn read_messages(path: &Path) -> Result<Vec<Message>> {
    let expected = || {
        let expected = "a JSON array of messages with `role` and `content`";
        format!("{}: expected {expected}", path.display())
    };
    // Before it is opened: that of a pipe would wait for a writer.
    if let Ok(found) = path.metadata().map(|metadata| metadata.file_type())
        && !found.is_file()
    {
        let (path, found) = (path.display(), kind_of_file(found));
        bail!("cannot read a conversation from {path}: expected a file, found {found}");
    }
    let text = text::read(path, "a conversation")?;
    let messages: Vec<Message> = serde_json::from_str(&text).with_context(expected)?;
    let known = ["system", "user", "assistant"];
    let unknown = messages.iter().find(|message| !known.contains(&message.role.as_str()));
    if let Some(Message { role, .. }) = unknown {
        bail!("{}: expected the role {}, found `{role}`", path.display(), known.join(", "));
    }
    Ok(messages)
}

/// An answer in two parts as one.
fn joined(start: Answer, part: Answer) -> Answer {
    let mut usage = start.usage;
    usage.generated_tokens += part.usage.generated_tokens;
    let mut timings = start.timings;
    timings.generate_ms += part.timings.prompt_ms + part.timings.generate_ms;
    Answer {
        text: start.text + &part.text,
        tokens: [start.tokens, part.tokens].concat(),
        finish: part.finish,
        usage,
        timings,
    }
}

/// Tokens and speeds of an answer.
pub(super) fn stats(answer: &Answer) -> String {
    let Answer { usage, timings, .. } = answer;
    let prefilled = usage.prompt_tokens - usage.cached_tokens;
    // Prefill samples the first token.
    let steps = usage.generated_tokens.saturating_sub(1);
    format!(
        "prompt {} ({} cached), {:.1} tok/s; answer {}, {:.1} tok/s",
        text::count(usage.prompt_tokens, "token"),
        usage.cached_tokens,
        rate(prefilled, timings.prompt_ms),
        text::count(usage.generated_tokens, "token"),
        rate(steps, timings.generate_ms),
    )
}

fn rate(count: usize, ms: f64) -> f64 {
    if ms > 0.0 { count as f64 * 1e3 / ms } else { 0.0 }
}

/// An answer for scripts.
pub(super) fn json(answer: &Answer) -> Value {
    let reason = match answer.finish {
        FinishReason::End => "end",
        FinishReason::Stop(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::Context => "context",
        FinishReason::Cancelled => "interrupted",
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
