//! A compiled template whose instructions are bounded. minijinja counts instructions but not what
//! one of them does, and its operators cannot be replaced. So instructions that build, compare or
//! call are followed by a filter that charges the result to the [`Budget`](super::budget::Budget);
//! those that only read or iterate check the deadline; a namespace's member is charged before it is
//! set. `+`, `*`, slices and unpacking become filters of bounded size with Python's meaning.

use std::sync::Arc;

use minijinja::machinery::{
    CompiledTemplate, Instruction as Op, Instructions, TemplateConfig, Token, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Error, Value};

use super::budget::exceeded;
use super::operators::{ADD, ADMIT, ADMIT_MEMBER, CHECK_TIME, FLATTEN, MULTIPLY, SLICE};

/// The name of the only template.
const NAME: &str = "chat";
/// The longest source; the longest that is published has 40 kB.
const SOURCE_MAX: usize = 512 << 10;
/// The most lines, and the most bytes of one: minijinja counts them with 16 bits.
const LINES_OR_COLUMNS_MAX: usize = u16::MAX as usize - 1;
/// The most tokens of one tag. Each can add a level to the syntax tree, which is walked with a
/// stack frame for each level.
const TAG_TOKENS_MAX: u64 = 8192;
/// The most that the squares of all tags' numbers of tokens add up to: compiling a chain of
/// operators takes a time that grows with the square.
const SQUARES_MAX: u64 = 32 << 20;
/// The most steps of minijinja's search for the variables that macros and call blocks capture: each
/// macro or call block around an identifier looks it up in every scope that is open at that point.
/// Published templates need a tenth at most.
const CAPTURE_STEPS_MAX: u64 = 1 << 20;
/// Steps for each identifier and enclosing macro, beside one for each open scope.
const CAPTURED_NAME_STEPS: u64 = 8;
/// The local id of a filter that has none: minijinja looks it up at each call.
const UNCACHED: u8 = !0;
/// The most maps that are merged into one call's keyword arguments.
const MERGED_MAX: usize = 16;

fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// Checks that a source is small enough to compile, and adapts it to minijinja:
/// - Products such as `'x' * 9999` get a factor that is known at run time only, so that the
///   compiler does not multiply constants.
/// - `{% generation %}`, with which transformers marks what the model said, becomes an `if` that is
///   always true, which trims white space alike.
pub(super) fn bounded_source(source: &str) -> Result<String, Error> {
    if source.len() > SOURCE_MAX {
        return Err(exceeded(format!("the template has more than {SOURCE_MAX} bytes")));
    }
    if source.lines().count().max(source.lines().map(str::len).max().unwrap_or(0))
        > LINES_OR_COLUMNS_MAX
    {
        return Err(exceeded(format!(
            "the template has more than {LINES_OR_COLUMNS_MAX} lines or columns"
        )));
    }
    let mut out = String::with_capacity(source.len());
    let (mut copied, mut tag_tokens, mut squares) = (0, 0, 0);
    let (mut follows_operand, mut starts_block) = (false, false);
    let mut capture_cost = CaptureCost::default();
    for token in tokenize(source, false, syntax()?) {
        let (token, span) = token?;
        let is_end = matches!(token, Token::VariableEnd | Token::BlockEnd);
        tag_tokens += 1;
        if tag_tokens > TAG_TOKENS_MAX || squares + tag_tokens * tag_tokens > SQUARES_MAX {
            return Err(exceeded(format!("line {}: expressions are too long", span.start_line)));
        }
        if !capture_cost.add_token(&token, starts_block) {
            let line = span.start_line;
            return Err(exceeded(format!("line {line}: macros and call blocks are too deep")));
        }
        if is_end {
            squares += tag_tokens * tag_tokens;
        }
        if is_end || matches!(token, Token::TemplateData(_)) {
            tag_tokens = 0;
        }
        let replacement = match token {
            Token::Mul if follows_operand => "*1|int*",
            Token::Ident("generation") if starts_block => "if true",
            Token::Ident("endgeneration") if starts_block => "endif",
            _ => "",
        };
        if !replacement.is_empty() {
            out.push_str(&source[copied..span.start_offset as usize]);
            out.push_str(replacement);
            copied = span.end_offset as usize;
        }
        // After `(`, `[` and `,` an asterisk unpacks arguments; after an operand it multiplies.
        follows_operand = !matches!(token, Token::ParenOpen | Token::BracketOpen | Token::Comma);
        starts_block = matches!(token, Token::BlockStart);
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

/// What the macros and call blocks so far cost the compiler: each finds the variables that it
/// captures by walking through all that it holds, other macros included.
#[derive(Default)]
struct CaptureCost {
    /// Macros and call blocks that are open.
    macro_depth: u64,
    /// All blocks that are open, in which names may be assigned.
    scope_depth: u64,
    steps: u64,
}

impl CaptureCost {
    /// Adds a token's steps. Returns whether all steps are within their limit.
    fn add_token(&mut self, token: &Token<'_>, starts_block: bool) -> bool {
        let mut steps = 1;
        if let Token::Ident(name) = token {
            steps = CAPTURED_NAME_STEPS + self.scope_depth;
            let (is_end, tag) = match name.strip_prefix("end") {
                Some(tag) => (true, tag),
                None => (false, *name),
            };
            let is_macro = matches!(tag, "macro" | "call");
            // A `set` is not counted: whether it opens a block is not known from its name.
            let is_scope = is_macro
                || matches!(tag, "for" | "if" | "with" | "filter" | "autoescape" | "block");
            let moved = |open: u64, counts: bool| match (starts_block && counts, is_end) {
                (false, _) => open,
                (true, false) => open + 1,
                (true, true) => open.saturating_sub(1),
            };
            self.macro_depth = moved(self.macro_depth, is_macro);
            self.scope_depth = moved(self.scope_depth, is_scope);
        }
        self.steps += self.macro_depth * steps;
        self.steps <= CAPTURE_STEPS_MAX
    }
}

/// Compiles a template with bounded instructions.
pub(super) fn compile(source: &str) -> Result<CompiledTemplate<'_>, Error> {
    let default_auto_escape = Arc::new(|_: &str| AutoEscape::None);
    let config = TemplateConfig { syntax_config: syntax()?, default_auto_escape };
    let mut template = CompiledTemplate::new(NAME, source, &config)?;
    template.instructions = bounded(&template.instructions)?;
    for block in template.blocks.values_mut() {
        *block = bounded(block)?;
    }
    Ok(template)
}

fn bounded<'s>(old: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    let mut new = Instructions::new(old.name(), old.source());
    // Where each old instruction is now.
    let mut starts = Vec::new();
    let (mut index, mut len) = (0, 0);
    while let Some(op) = old.get(index) {
        starts.push(len);
        let line = old.get_line(index).and_then(|line| u16::try_from(line).ok()).unwrap_or(0);
        for op in bounded_op(op)? {
            new.add_with_line(op, line);
            len += 1;
        }
        index += 1;
    }
    starts.push(len);
    for index in 0..len {
        if let Some(
            Op::Jump(target)
            | Op::JumpIfFalse(target)
            | Op::JumpIfFalseOrPop(target)
            | Op::JumpIfTrueOrPop(target)
            | Op::Iterate(target)
            | Op::BuildMacro(_, target, _),
        ) = new.get_mut(index)
        {
            *target = starts[*target as usize];
        }
    }
    Ok(new)
}

/// The instructions that replace one.
fn bounded_op<'s>(op: &Op<'s>) -> Result<Vec<Op<'s>>, Error> {
    let filter = |name, arguments| Op::ApplyFilter(name, Some(arguments), UNCACHED);
    Ok(match op {
        // Raw text is written like a value, so that it is charged.
        Op::EmitRaw(text) => vec![Op::LoadConst(Value::from(*text)), Op::Emit],
        Op::Add => vec![filter(ADD, 2)],
        Op::Mul => vec![filter(MULTIPLY, 2)],
        Op::Slice => vec![filter(SLICE, 4)],
        Op::MergeKwargs(count) if *count > MERGED_MAX => {
            return Err(exceeded(format!("a call unpacks more than {MERGED_MAX} maps")));
        }
        Op::UnpackLists(count) => {
            vec![Op::BuildList(Some(*count)), filter(FLATTEN, 1), Op::UnpackLists(1)]
        }
        Op::SetAttr(name) => {
            vec![Op::Swap, filter(ADMIT_MEMBER, 1), Op::Swap, Op::SetAttr(name)]
        }
        Op::PushLoop(flags) => vec![filter(CHECK_TIME, 1), Op::PushLoop(*flags)],
        // Indexing a string walks its characters, and a look-up in a map hashes the key.
        Op::GetItem => vec![Op::GetItem, filter(CHECK_TIME, 1)],
        Op::Iterate(target) => vec![Op::Iterate(*target), filter(CHECK_TIME, 1)],
        Op::Include(ignores_missing) => {
            vec![filter(CHECK_TIME, 1), Op::Include(*ignores_missing)]
        }
        Op::BuildMap(_)
        | Op::BuildKwargs(_)
        | Op::MergeKwargs(_)
        | Op::BuildList(_)
        | Op::BuildTuple(_)
        | Op::StringConcat
        | Op::Eq
        | Op::Ne
        | Op::Gt
        | Op::Gte
        | Op::Lt
        | Op::Lte
        | Op::In
        | Op::CompareAndPreserve(_)
        | Op::PerformTest(..)
        | Op::CallFunction(..)
        | Op::CallMethod(..)
        | Op::CallObject(_) => vec![op.clone(), filter(ADMIT, 1)],
        // Filters charge their own results (`builtins`); the others make no large value.
        _ => vec![op.clone()],
    })
}
