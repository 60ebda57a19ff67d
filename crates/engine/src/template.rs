//! Chat templates: a conversation as the text that a model was trained on. Templates are written
//! for Jinja2 as transformers sets it up; this sets up minijinja the same way. They come with
//! models, so they are not trusted: each rendering has a budget of instructions, time and memory
//! and runs on a large stack, and there is nothing that a template can reach. It must not know
//! HTTP or tokens.

mod budget;
mod builtins;
mod calls;
mod described;
mod errors;
mod filters;
mod json;
mod methods;
mod operators;
mod program;
mod renderer;

use std::sync::{Arc, OnceLock};

use bodkin_gguf::Metadata;
use jiff::civil::DateTime;
use minijinja::machinery::CompiledTemplate;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, State, Value, machinery};
use serde_json::{Map, Value as Json, json};

use self::budget::Budget;
use self::calls::CallStyle;
use self::errors::{error, template};
use self::renderer::Renderers;
pub use self::renderer::TEMPLATE_THREAD;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use crate::tools::ToolFormat;

/// The most instructions of one rendering: dozens of times what a long conversation takes.
const FUEL: u64 = 10_000_000;

/// The longest format of a time, in bytes.
const TIME_FORMAT_MAX: usize = 1000;

/// A chat template, ready to render.
#[derive(Debug)]
pub struct Template {
    renderers: Renderers,
    bos_token: String,
    eos_token: String,
    /// The time that templates see; the current one without it.
    time: Option<DateTime>,
    /// How messages have tool calls, from the first that has some.
    calls: OnceLock<Option<CallStyle>>,
    /// Whether it writes system messages, where that was asked.
    writes_system: OnceLock<bool>,
}

impl Template {
    /// The template in a model's metadata, or None if there is none.
    pub fn from_metadata(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Option<Template>> {
        let source = metadata.str("tokenizer.chat_template")?;
        source.map(|source| Template::for_tokenizer(source, tokenizer)).transpose()
    }

    /// Compiles a template for the special tokens of a model.
    ///
    /// # Errors
    /// If it does not parse.
    pub fn for_tokenizer(source: &str, tokenizer: &Tokenizer) -> Result<Template> {
        let text = |id: Option<u32>| {
            let piece = id.map(|id| tokenizer.piece(id, true)).unwrap_or_default();
            String::from_utf8_lossy(&piece).into_owned()
        };
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
        Template::new(source, &bos, &eos)
    }

    /// Compiles a template. Fails if it does not parse.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Template> {
        let renderers = Renderers::new(source)?;
        let (bos_token, eos_token) = (bos_token.to_owned(), eos_token.to_owned());
        let (calls, writes_system) = (OnceLock::new(), OnceLock::new());
        Ok(Template { renderers, bos_token, eos_token, time: None, calls, writes_system })
    }

    /// Stops the clock that templates see at a local time such as `2025-01-15T12:00:00`.
    pub fn at(mut self, time: &str) -> Result<Template> {
        let time = time.parse().map_err(|e: jiff::Error| template(e.to_string()))?;
        self.time = Some(time);
        Ok(self)
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        self.renderers.source()
    }

    /// Messages as OpenAI's interface has them, with their tool calls in the form that this
    /// template reads, which is found by a trial, once. Where it writes no calls, they become
    /// content, as the model wrote them.
    pub fn with_calls(&self, messages: Vec<Json>) -> Vec<Json> {
        let has_calls = |message: &Json| message.get("tool_calls").is_some_and(Json::is_array);
        if !messages.iter().any(has_calls) {
            return messages;
        }
        let tools = CallStyle::trial_tools();
        let style =
            self.call_style(|style| self.render(&style.trial(), Some(&tools), false, &Map::new()));
        match style {
            Some(style) => style.rewrite(messages),
            None => calls::as_content(messages, ToolFormat::of(self.source())),
        }
    }

    /// Messages as OpenAI's interface has them, for a conversation with `tools`, an array as
    /// there. Where the template shows no tools, a message describes them, and calls and their
    /// results are text; else they are as in [`Template::with_calls`].
    ///
    /// # Errors
    /// If a trial of the template does not run.
    pub fn with_tools(&self, messages: Vec<Json>, tools: Option<&Json>) -> Result<Vec<Json>> {
        if ToolFormat::shows_tools(self.source()) {
            return Ok(self.with_calls(messages));
        }
        if tools.is_none() && !described::have_calls(&messages) {
            return Ok(messages);
        }
        let format = ToolFormat::described(self.source());
        Ok(described::as_text(messages, tools, format, self.writes_system()?))
    }

    /// Whether a conversation may begin with a system message, by a trial, once.
    fn writes_system(&self) -> Result<bool> {
        if let Some(&writes_system) = self.writes_system.get() {
            return Ok(writes_system);
        }
        let trial = json!([
            { "role": "system", "content": "trial_text" },
            { "role": "user", "content": "a" },
        ]);
        let writes_system = match self.render(&trial, None, true, &Map::new()) {
            Ok(text) => text.contains("trial_text"),
            Err(error @ Error::Thread(_)) => return Err(error),
            Err(_) => false,
        };
        Ok(*self.writes_system.get_or_init(|| writes_system))
    }

    /// The form of calls, by a trial of `render` if there was none.
    fn call_style(&self, render: impl Fn(&CallStyle) -> Result<String>) -> Option<CallStyle> {
        if let Some(style) = self.calls.get() {
            return *style;
        }
        let mut has_failed = false;
        let style = CallStyle::candidates(self.source()).find(|style| match render(style) {
            Ok(text) => CallStyle::is_written(&text),
            // For want of memory, say: what the template does with the style is not known.
            Err(Error::Thread(_)) => {
                has_failed = true;
                false
            }
            Err(_) => false,
        });
        match has_failed {
            true => style,
            false => *self.calls.get_or_init(|| style),
        }
    }

    /// Renders a conversation. `messages` and `tools` are arrays as OpenAI's interface has them;
    /// `extra` are further variables, such as `enable_thinking`. Fails if the template does, which
    /// includes conversations that it refuses.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<String> {
        let input_bytes = messages.to_string().len()
            + tools.map_or(0, |tools| tools.to_string().len())
            + extra.values().map(|json| json.to_string().len()).sum::<usize>();
        let token = |text: &String| Value::from(text.as_str());
        let mut context: Vec<(&str, Value)> = vec![
            ("bos_token", token(&self.bos_token)),
            ("eos_token", token(&self.eos_token)),
            ("messages", value(messages)),
            ("tools", tools.map_or(Value::from(()), value)),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        context.extend(extra.iter().map(|(key, json)| (key.as_str(), value(json))));
        let context = Value::from_pairs(context);
        let time = self.time;
        let run = move |program: &CompiledTemplate<'_>| {
            let budget = Budget::new(input_bytes);
            let environment = environment(&budget, time);
            let mut text = String::new();
            machinery::eval(
                &environment,
                &program.instructions,
                context,
                &program.blocks,
                &mut machinery::make_string_output(&mut text),
                minijinja::AutoEscape::None,
            )?;
            budget.check_output(text.len())?;
            Ok(text)
        };
        self.renderers.run(move |program| run(program).map_err(error))
    }
}

/// minijinja as transformers sets up Jinja2.
fn environment(budget: &Arc<Budget>, time: Option<DateTime>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    builtins::add_filters(&mut environment, budget);
    operators::add_filters(&mut environment, budget);
    let own = Arc::clone(budget);
    environment.set_unknown_method_callback(
        move |state: &mut State, value: &Value, method: &str, arguments: &[Value]| {
            builtins::check(&own, method, value, arguments)?;
            methods::call(state, value, method, arguments)
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(
        "tojson",
        move |value: &Value, indent: Option<Value>, options: Kwargs| {
            json::filter(&own, value, indent, options)
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(
        "indent",
        move |text: &str,
              width: Option<Value>,
              first: Option<bool>,
              blank: Option<bool>,
              options: Kwargs| {
            let text = filters::indent(&own, text, width, first, blank, options)?;
            own.admit(Value::from(text))
        },
    );
    environment.add_test("iterable", filters::is_iterable);
    environment.add_test("divisibleby", filters::is_divisible);
    // Jinja2 has no such function and no such filters.
    environment.remove_global("debug");
    for name in ["bool", "chain", "lines", "split", "zip"] {
        environment.remove_filter(name);
    }
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", move |format: &str| {
        strftime(format, time.unwrap_or_else(|| jiff::Zoned::now().datetime()))
    });
    environment
}

fn value(json: &Json) -> Value {
    Value::from(Serde(json))
}

fn raise_exception(message: &str) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

fn strftime(format: &str, time: DateTime) -> std::result::Result<String, minijinja::Error> {
    if format.len() > TIME_FORMAT_MAX {
        return Err(budget::exceeded("the format of a time is too long"));
    }
    jiff::fmt::strtime::format(format, time)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String> {
        let template = Template::new(source, "<s>", "</s>")?.at("2025-01-15T12:34:56")?;
        let messages = json!([
            {"role": "user", "content": " Hi <b>& \"é\" "},
            {"role": "assistant", "content": null, "tool_calls": [
                {"name": "f", "arguments": {"b": 1, "a": [true, null, 1.5, 1e20]}},
            ]},
        ]);
        template.render(&messages, None, true, &Map::new())
    }

    fn rendered(source: &str) -> String {
        render(source).unwrap()
    }

    #[test]
    fn special_tokens_come_from_the_tokenizer() {
        use bodkin_gguf::{Array, Value};
        let text = |text: &str| Value::String(text.as_bytes().into());
        let texts = ["<unk>", "<s>", "</s>"].map(|text| Box::from(text.as_bytes()));
        let mut metadata = Metadata::new();
        metadata.insert("tokenizer.ggml.model", text("llama"));
        metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(texts.to_vec())));
        let kinds = Value::Array(Array::I32(vec![2, 3, 3]));
        metadata.insert("tokenizer.ggml.token_type", kinds);
        let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
        assert!(Template::from_metadata(&metadata, &tokenizer).unwrap().is_none());
        let source = "{{ bos_token }}{{ x }}{{ eos_token }}{{ tools }}";
        metadata.insert("tokenizer.chat_template", text(source));
        let template = Template::from_metadata(&metadata, &tokenizer).unwrap().unwrap();
        let extra = [("x".to_owned(), json!(1))].into_iter().collect();
        let found = template.render(&json!([]), None, false, &extra).unwrap();
        assert_eq!(found, "<s>1</s>None");
    }

    #[test]
    fn white_space_goes_as_in_transformers() {
        let source = concat!(
            "{{ bos_token }}\n{% for m in messages %}\n  {% if loop.first %}\n",
            "[{{ m.role }}]\n  {%- endif %}\n{% endfor %}\nend\n"
        );
        assert_eq!(rendered(source), "<s>\n[user]end");
    }

    #[test]
    fn json_is_python_s() {
        let source = "{{ messages[1].tool_calls[0].arguments | tojson }}";
        assert_eq!(rendered(source), r#"{"b": 1, "a": [true, null, 1.5, 1e+20]}"#);
        assert_eq!(rendered("{{ messages[0].content | tojson }}"), r#"" Hi <b>& \"é\" ""#);
        assert_eq!(rendered("{{ [1, {}] | tojson(indent=2) }}"), "[\n  1,\n  {}\n]");
        assert_eq!(
            rendered("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}"),
            r#"{"b":1,"a":2}"#
        );
        assert_eq!(
            rendered("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"),
            r#"{"a": 2, "b": 1}"#
        );
        assert!(render("{{ nothing | tojson }}").is_err());
    }

    #[test]
    fn values_print_as_in_python() {
        assert_eq!(
            rendered("{{ true }} {{ none }} {{ 1.0 }} {{ 'a' ~ none }}"),
            "True None 1.0 aNone"
        );
        assert_eq!(rendered("{{ messages[0].content.strip().split(' ')[0] }}"), "Hi");
        assert_eq!(
            rendered("{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}"),
            "b1a2"
        );
        assert_eq!(rendered("{{ {'a': 1}.get('x', 'y') }}{{ 'abc'.startswith('ab') }}"), "yTrue");
    }

    #[test]
    fn slices_are_python_s() {
        let source = concat!(
            "{{ ''[::-1] }}|{{ 'abc'[::-1] }}|{{ 'abcdef'[4:1:-2] }}|{{ 'abc'[-2:] }}|",
            "{{ 'abc'[:-5] }}|{{ 'abc'[5:] }}|{{ 'abc'[-9:9:2] }}|{{ 'abc'[1::-1] }}|",
            "{{ 'abc'[:0:-1] }}|{{ 'abc'[::-9223372036854775808] }}|{{ [][::-1] }}|",
            "{{ [1, 2, 3][1:] }}|{{ (messages[::-1])[0].role }}",
        );
        let expected = "|cba|ec|bc|||ac|ba|cb|c|[]|[2, 3]|assistant";
        assert_eq!(rendered(source), expected);
        assert!(render("{{ 'abc'[::0] }}").is_err());
        assert!(render("{{ {}[1:] }}").is_err());
    }

    #[test]
    fn a_trial_that_did_not_run_is_repeated() {
        let template = Template::new("", "", "").unwrap();
        let no_thread = || Err(Error::Thread(std::io::ErrorKind::OutOfMemory.into()));
        let written = || Ok("trial_call trial_value".to_owned());
        assert_eq!(template.call_style(|_| no_thread()), None);
        // The second one is found, but the first may be the right one.
        let second = CallStyle::candidates("").nth(1);
        let found = template.call_style(|style| match Some(*style) == second {
            true => written(),
            false => no_thread(),
        });
        assert_eq!(found, second);
        let first = CallStyle::candidates("").next();
        assert_eq!(template.call_style(|_| written()), first);
        assert_eq!(template.call_style(|_| no_thread()), first);
    }

    #[test]
    fn generation_tags_do_nothing() {
        let source = "a\n{%- generation -%}\n b {% endgeneration %}\nc";
        assert_eq!(rendered(source), "ab c");
        assert_eq!(rendered("{{ '{% generation' }}"), "{% generation");
    }

    #[test]
    fn sums_with_safe_text_are_escaped() {
        let source = "{{ '<'|safe + messages[0].role + '<' + [\"'\"]|tojson }}";
        assert_eq!(rendered(source), "<user&lt;[&#34;&#39;&#34;]");
        let source = "{% set x = '<'|safe %}{{ '>' + x + '>' }}{{ x }}{{ '<' + '>' }}";
        assert_eq!(rendered(source), "&gt;<&gt;<<>");
    }

    #[test]
    fn time_stands_still() {
        assert_eq!(rendered("{{ strftime_now('%d %b %Y') }}"), "15 Jan 2025");
        assert!(render("{{ strftime_now('%!') }}").is_err());
    }

    #[test]
    fn failures_are_errors_of_one_line() {
        let error = render("{{ raise_exception('No\nway') }}").unwrap_err().to_string();
        assert!(error.contains("No way") && !error.contains('\n'), "{error}");
        assert!(render("{% if %}").is_err());
        assert!(render("{{ nothing.at_all }}").is_err());
    }

    #[test]
    fn endless_templates_end() {
        let source = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
        assert!(render(source).is_err());
        let range = "{% for i in range(9999) %}";
        let loops = format!("{}{}", range.repeat(3), "{% endfor %}".repeat(3));
        assert!(render(&loops).is_err());
    }
}
