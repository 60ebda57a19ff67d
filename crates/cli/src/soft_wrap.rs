//! Line breaks between words for a terminal. A word waits until it is complete, so that nothing
//! that is printed has to be taken back, whatever the size of the terminal becomes meanwhile.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Joins characters to one symbol, such as a family of emoji.
const JOINER: char = '\u{200d}';
/// The start of the lines before and after code, which is not wrapped.
const FENCE: &str = "```";

/// Text on its way to a terminal.
#[derive(Default)]
pub(crate) struct SoftWrap {
    /// The cursor's column; 0 is the start of a line.
    column: usize,
    /// Spaces that wait with the word after them.
    spaces: usize,
    /// Whether the line begins after a note that is not part of the text.
    is_after_note: bool,
    /// The word that is not complete yet.
    word: String,
    /// Whether the word has a character of two columns.
    is_wide_word: bool,
    /// Whether the start of a word that is longer than a line is printed already.
    is_long_word: bool,
    /// The start of the text's line, as long as a fence.
    line_start: String,
    /// Whether this is code between fences.
    is_code: bool,
}

impl SoftWrap {
    /// Adds text and returns what can be printed on a terminal of `width` columns.
    pub(crate) fn push(&mut self, text: &str, width: usize) -> String {
        // A terminal that became narrower has wrapped the line itself.
        if self.column > width {
            self.column %= width.max(1);
        }
        let mut out = String::with_capacity(text.len());
        text.chars().for_each(|c| self.push_char(c, width, &mut out));
        out
    }

    /// The rest, at the end of the text.
    pub(crate) fn finish(&mut self, width: usize) -> String {
        let mut out = String::new();
        self.end_word(width, &mut out);
        out
    }

    /// Accounts for a line break that is not part of the text; false if a line has just begun. A
    /// word that is not complete yet comes after it, without the spaces before that word.
    pub(crate) fn break_line(&mut self) -> bool {
        let is_inside = std::mem::take(&mut self.column) > 0;
        self.is_after_note |= is_inside;
        is_inside
    }

    fn push_char(&mut self, c: char, width: usize, out: &mut String) {
        if c == '\n' {
            self.end_word(width, out);
            out.push(c);
            self.is_code ^= self.line_start == FENCE;
            (self.column, self.spaces) = (0, 0);
            (self.is_long_word, self.is_after_note) = (false, false);
            return self.line_start.clear();
        }
        if self.line_start.len() < FENCE.len() && !c.is_whitespace() {
            self.line_start.push(c);
        }
        match c {
            _ if self.is_code => self.push_unwrapped(c, width, out),
            ' ' | '\t' => {
                self.end_word(width, out);
                self.is_long_word = false;
                let to_tab = 8 - (self.column + self.spaces) % 8;
                self.spaces += if c == '\t' { to_tab } else { 1 };
            }
            _ if self.is_long_word => self.push_unwrapped(c, width, out),
            _ => {
                if self.breaks_before(c) {
                    self.end_word(width, out);
                }
                self.word.push(c);
                self.is_wide_word |= c.width().unwrap_or(0) > 1;
                // A column has at least a byte. Marks on one letter have no width: such words are
                // long by their bytes, or measuring them would take a quadratic time.
                let bytes = self.word.len();
                if bytes > width && (bytes > width.saturating_mul(16) || self.word.width() > width)
                {
                    self.end_word(width, out);
                    self.is_long_word = true;
                }
            }
        }
    }

    /// Prints a character whose line the terminal breaks.
    fn push_unwrapped(&mut self, c: char, width: usize, out: &mut String) {
        out.push(c);
        self.is_after_note = false;
        self.column = (self.column + c.width().unwrap_or(0)) % width.max(1);
    }

    /// Whether a line may break between the pending word and `c`: beside a wide character, such as
    /// those of Chinese, whose words have no spaces between them.
    fn breaks_before(&self, c: char) -> bool {
        let columns = |c: char| c.width().unwrap_or(0);
        let is_joined = self.word.ends_with(JOINER) || columns(c) == 0;
        !is_joined && (self.is_wide_word || columns(c) > 1)
    }

    fn end_word(&mut self, width: usize, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        if std::mem::take(&mut self.is_after_note) {
            self.spaces = 0;
        }
        let columns = self.word.width();
        if self.column > 0 && self.column + self.spaces + columns > width {
            out.push('\n');
            self.column = 0;
        } else {
            out.extend(std::iter::repeat_n(' ', self.spaces));
            self.column += self.spaces;
        }
        out.push_str(&self.word);
        self.column += columns;
        (self.spaces, self.is_wide_word) = (0, false);
        self.word.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text in pieces of `step` characters.
    fn wrap(text: &str, width: usize, step: usize) -> String {
        let (mut wrap, mut out) = (SoftWrap::default(), String::new());
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(step) {
            out.push_str(&wrap.push(&piece.iter().collect::<String>(), width));
        }
        out + &wrap.finish(width)
    }

    #[test]
    fn a_word_without_end_takes_linear_time() {
        let start = std::time::Instant::now();
        let marks = format!("a{}", "\u{301}".repeat(200_000));
        assert_eq!(wrap(&marks, 80, 1000), marks);
        let name = "a".repeat(1_000_000);
        assert_eq!(wrap(&name, usize::MAX, 1000), name);
        // A quadratic time would be more than a minute.
        assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
    }

    #[test]
    fn lines_break_between_words() {
        for step in [1, 3, 100] {
            let wrap = |text| wrap(text, 10, step);
            assert_eq!(wrap("the hens in the garden"), "the hens\nin the\ngarden");
            assert_eq!(wrap("ten column and"), "ten column\nand");
            assert_eq!(wrap("  an item\n  another"), "  an item\n  another");
            // A word that is longer than a line is left to the terminal.
            assert_eq!(wrap("a incomprehensible b"), "a\nincomprehensible b");
            assert_eq!(wrap("incomprehensible bean"), "incomprehensible\nbean");
            // Two columns for each of these; and five characters that are one.
            assert_eq!(wrap("海里的动物很多"), "海里的动物\n很多");
            let family = "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}";
            assert_eq!(wrap(&format!("12345678 {family}")), format!("12345678\n{family}"));
        }
    }

    #[test]
    fn code_keeps_its_lines() {
        let code = "```rust\nlet long = a + b + c;\n```\n";
        let wrapped = wrap(&format!("{code}and then some words"), 10, 1);
        assert_eq!(wrapped, format!("{code}and then\nsome words"));
    }

    #[test]
    fn a_line_break_keeps_words_whole() {
        let mut wrap = SoftWrap::default();
        assert_eq!(wrap.push("  the hens in the gar", 40), "  the hens in the");
        assert!(wrap.break_line() && !wrap.break_line());
        assert_eq!(wrap.push("den are", 40) + &wrap.finish(40), "garden are");
        // The space may come later. Code is printed at once.
        let mut wrap = SoftWrap::default();
        assert_eq!(wrap.push("the hens ", 40), "the hens");
        assert!(wrap.break_line());
        assert_eq!(wrap.push(" in\n  the\n```\nlet ", 40), "in\n  the\n```\nlet ");
        assert!(wrap.break_line());
        // The rest of a word that is longer than a line, and the space after it.
        let mut wrap = SoftWrap::default();
        assert_eq!(wrap.push("incomprehens", 10), "incomprehens");
        assert!(wrap.break_line());
        assert_eq!(wrap.push("ible bean", 10) + &wrap.finish(10), "ible bean");
        // An indented line that has not begun keeps its spaces.
        let mut wrap = SoftWrap::default();
        assert_eq!(wrap.push("  an", 40), "");
        assert!(!wrap.break_line());
        assert_eq!(wrap.push(" item", 40) + &wrap.finish(40), "  an item");
    }

    #[test]
    fn the_terminal_may_become_narrower() {
        let mut wrap = SoftWrap::default();
        let start = wrap.push("the hens in the garden ", 40);
        assert_eq!(start, "the hens in the garden");
        // The terminal shows `he garden` in its second line, and 4 columns are left.
        assert_eq!(wrap.push("are old", 13) + &wrap.finish(13), " are\nold");
    }
}
