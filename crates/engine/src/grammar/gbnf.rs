//! GBNF, the notation of llama.cpp's grammars: rules of texts, sets of characters and other rules.

mod lark;
mod loops;
mod parse;
mod rules;
mod sets;
#[cfg(test)]
mod tests;

/// The grammar in llguidance's notation.
///
/// # Errors
/// If it is not GBNF, or larger than the limits.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    parse::parse(text).map(lark::write)
}
