//! What an answer must be: a JSON schema, a regular expression or a grammar becomes the set of
//! tokens that may come next (its mask), by the library llguidance. It must not know models,
//! sampling or HTTP.
//!
//! Schemas come from strangers. Each is checked and compiled on the thread that submits it, with
//! limits on its size, its depth and the work per token, so that it is refused before the first
//! token, and one that exceeds a limit later ends its own request alone.

mod definitions;
mod errors;
mod gbnf;
mod matcher;
mod regex;
mod schema;
#[cfg(test)]
mod tests;
mod tools;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use llguidance::api::{GrammarInit, GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{ParserFactory, panic_utils};
use serde_json::{Value, json};

use self::errors::{message, without_place};
pub(crate) use self::matcher::Matcher;
use self::tools::ControlToken;
pub use self::tools::ToolGrammar;
use crate::error::{Error, Result};
use crate::reasoning::Reasoning;
use crate::tokenizer::Tokenizer;

/// What the text of an answer must be. Reasoning before it is free.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// The field or flag that it comes from, which errors name.
    pub field: String,
    /// What it asks for.
    pub grammar: Grammar,
}

/// A language that an answer must be in.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON that satisfies this schema: `true` or an object. Between its tokens there are at most
    /// two spaces, or a line break and an indentation.
    JsonSchema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// A text that is in the language of this grammar, in llama.cpp's notation.
    Gbnf(String),
    /// Calls of tools.
    Tools(ToolGrammar),
}

impl Constraint {
    /// Checks what does not depend on a model's vocabulary. A request with the constraint may still
    /// be refused.
    ///
    /// # Errors
    /// If it is not valid, has a part that is not supported, or exceeds a limit.
    pub fn check(&self) -> Result<()> {
        self.on_large_stack(|grammar| {
            let found = compile_alone(top_level(grammar, &[])?);
            found.map_err(|error| explain(grammar, &error))
        })
    }

    /// Runs something on a thread with a large stack: the caller's may be small, and what is too
    /// much for it would end the process.
    fn on_large_stack<T: Send>(
        &self,
        work: impl FnOnce(&Grammar) -> std::result::Result<T, String> + Send,
    ) -> Result<T> {
        let wrong = |message| Error::Constraint { field: self.field.clone(), message };
        thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, || work(&self.grammar));
            let panicked = |_| Err("compiling it panicked".to_owned());
            thread.map_err(Error::Thread)?.join().unwrap_or_else(panicked).map_err(wrong)
        })
    }
}

impl Grammar {
    /// Any JSON object.
    pub fn json_object() -> Grammar {
        Grammar::JsonSchema(json!({ "type": "object" }))
    }

    /// One of these texts.
    pub fn choice(texts: &[String]) -> Grammar {
        let texts: Vec<String> = texts.iter().map(|text| regex::escape(text)).collect();
        Grammar::Regex(format!("({})", texts.join("|")))
    }
}

/// The longest regular expression, in bytes.
const REGEX_BYTES: usize = 1 << 16;

/// The most bytes of all tokens. The trie has at most a node for each, and room for 2^22 nodes.
const TRIE_BYTES: usize = (1 << 22) - 2;

/// The longest token that an answer with a constraint can have, in bytes: the trie has room for
/// 1024.
const TOKEN_BYTES: usize = 1000;

/// The stack of a thread that compiles, of which only what is used takes memory. A level of a
/// schema takes up to 20 KB in a debug build, and [`schema::MAX_DEPTH`] and [`schema::MAX_LEVELS`]
/// bound the levels.
const STACK_BYTES: usize = 256 << 20;

/// What a constraint may take.
fn limits() -> ParserLimits {
    ParserLimits {
        // 20 ms of work for the lexer before the first token; 500 KB of schemas of hospitals take
        // half of it.
        initial_lexer_fuel: 1_000_000,
        max_grammar_size: 500_000,
        // For each token: 15 ms of work for the lexer, 3 ms for the parser.
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_items_in_row: 2000,
        // A state takes up to 2 KB: 40 MB for a request.
        max_lexer_states: 20_000,
        // Time before the first token that most answers do not get back.
        precompute_large_lexemes: false,
        // These repeat the answer and the grammar.
        verbose_errors: false,
    }
}

/// Compiles constraints for one tokenizer.
pub(crate) struct Compiler {
    tokenizer: Arc<Tokenizer>,
    factory: ParserFactory,
    /// Held while one is compiled, which takes a core: others wait.
    turn: Mutex<()>,
}

impl Compiler {
    /// Builds the trie of the vocabulary, which takes a second for the largest.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>) -> std::result::Result<Compiler, String> {
        let words = words(tokenizer);
        let bytes: usize = words.iter().map(Vec::len).sum();
        if bytes > TRIE_BYTES {
            return Err(format!(
                "the vocabulary has {bytes} bytes of text; constraints need at most {TRIE_BYTES}"
            ));
        }
        let ends = tokenizer.ends_of_generation();
        let end = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(ends);
        }
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::json_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| error.to_string())?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Compiler { tokenizer: Arc::clone(tokenizer), factory, turn: Mutex::new(()) })
    }

    /// Compiles a constraint, with what `reasoning` comes before the answer.
    ///
    /// # Errors
    /// If it is not valid, has a part that is not supported, or exceeds a limit.
    pub(crate) fn compile(
        &self,
        constraint: &Constraint,
        reasoning: Option<Reasoning>,
    ) -> Result<Matcher> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let controls = match constraint.grammar {
            Grammar::Tools(_) => control_tokens(&self.tokenizer),
            _ => Vec::new(),
        };
        let matcher = constraint.on_large_stack(|grammar| {
            let parser = self.factory.create_parser(top_level(grammar, &controls)?);
            let mut matcher = llguidance::Matcher::new(parser);
            // One whose first token exceeds a limit is refused here, not in the middle of a step.
            matcher.compute_mask().map_err(|error| explain(grammar, &error.to_string()))?;
            Ok(matcher)
        })?;
        let field = constraint.field.clone();
        Ok(Matcher::new(matcher, Arc::clone(&self.tokenizer), field, reasoning))
    }
}

/// A grammar as llguidance takes it.
fn top_level(
    grammar: &Grammar,
    controls: &[ControlToken],
) -> std::result::Result<TopLevelGrammar, String> {
    let grammar = match grammar {
        Grammar::JsonSchema(schema) => {
            GrammarWithLexer::from_json_schema(schema::prepared(schema)?)
        }
        Grammar::Regex(regex) if regex.len() > REGEX_BYTES => {
            let bytes = regex.len();
            return Err(format!(
                "the regular expression has {bytes} bytes, at most {REGEX_BYTES} are allowed"
            ));
        }
        // A backslash at the end would be left out.
        Grammar::Regex(regex) if trailing_backslashes(regex) % 2 == 1 => {
            return Err("the regular expression ends within an escape".to_owned());
        }
        Grammar::Regex(regex) => GrammarWithLexer::from_regex(regex),
        Grammar::Gbnf(text) => GrammarWithLexer::from_lark(gbnf::to_lark(text)?),
        Grammar::Tools(tools) => GrammarWithLexer::from_lark(tools.lark(controls)?),
    };
    Ok(TopLevelGrammar::from_grammar(grammar))
}

/// The bytes of each token; none for those that no answer with a constraint has: control tokens,
/// and those with the byte that marks them in a trie, which no text has.
fn words(tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    let word = |id| {
        let word = tokenizer.piece(id, false);
        let is_text = word.len() <= TOKEN_BYTES && !word.contains(&TokTrie::SPECIAL_TOKEN_MARKER);
        if is_text && !tokenizer.is_end_of_generation(id) { word } else { Vec::new() }
    };
    (0..tokenizer.vocab_size() as u32).map(word).collect()
}

/// Compiles a grammar without a vocabulary, to see whether that works.
fn compile_alone(grammar: TopLevelGrammar) -> std::result::Result<(), String> {
    let compile = || GrammarInit::Serialized(grammar).to_internal(None, limits());
    let found = panic_utils::catch_unwind(AssertUnwindSafe(compile));
    found.map(|_| ()).map_err(|error| error.to_string())
}

/// The line for an error of llguidance. Of several tools it names the one that is wrong by itself.
fn explain(grammar: &Grammar, error: &str) -> String {
    let tools = match grammar {
        Grammar::Tools(tools) => tools,
        Grammar::Gbnf(_) => return message(without_place(error)),
        Grammar::JsonSchema(_) | Grammar::Regex(_) => return message(error),
    };
    let wrong = tools.tools.iter().find_map(|tool| {
        let schema = schema::prepared(&tool.parameters).ok()?;
        let grammar = TopLevelGrammar::from_json_schema(schema);
        let error = compile_alone(grammar).err()?;
        Some(format!("the parameters of {}: {}", tool.name, message(&error)))
    });
    wrong.unwrap_or_else(|| message(error))
}

/// The control tokens that stand in an answer's text, and their texts.
fn control_tokens(tokenizer: &Tokenizer) -> Vec<ControlToken> {
    let ids = 0..tokenizer.vocab_size() as u32;
    let text = |id| String::from_utf8_lossy(&tokenizer.piece(id, true)).into_owned();
    ids.filter(|&id| tokenizer.is_marker(id)).map(|id| (text(id), id)).collect()
}

/// Backslashes at the end of a text.
fn trailing_backslashes(text: &str) -> usize {
    text.bytes().rev().take_while(|&byte| byte == b'\\').count()
}
