//! Removing the spaces that tokenizers of words leave before punctuation, as
//! `clean_up_tokenization_spaces` does in transformers and as llama.cpp does by default for
//! byte-level BPE. Byte by byte what llama.cpp makes of it, its own habits included.

/// Cleans a detokenized text.
pub(super) fn clean_spaces(text: &mut Vec<u8>) {
    remove(text, |text, i| match text[i] {
        b'?' | b'!' | b'.' | b',' => Cut::SpaceBefore,
        _ => Cut::Nothing,
    });
    remove(text, |text, i| match text.get(i..i + 2) {
        Some(b"' ") => Cut::SpacesAround,
        _ => Cut::Nothing,
    });
    remove(text, |text, i| match &text[i..] {
        [b'\'', b's' | b'm', ..] | [b'\'', b'r' | b'v', b'e', ..] => Cut::SpaceBefore,
        _ => Cut::Nothing,
    });
}

enum Cut {
    Nothing,
    SpaceBefore,
    SpacesAround,
}

/// Asks about every byte that follows a space, and cuts.
fn remove(text: &mut Vec<u8>, cut: impl Fn(&[u8], usize) -> Cut) {
    let (mut write, mut read) = (0, 0);
    // Writing never overtakes reading, and what a question looks at lies ahead of both.
    let mut follows_space = false;
    while read < text.len() {
        let byte = text[read];
        let cut = if follows_space { cut(text, read) } else { Cut::Nothing };
        if !matches!(cut, Cut::Nothing) {
            write -= 1;
        }
        text[write] = byte;
        write += 1;
        follows_space = byte == b' ';
        read += 1;
        if matches!(cut, Cut::SpacesAround) {
            read += 1;
        }
    }
    text.truncate(write);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_before_punctuation_go() {
        let clean = |text: &str| {
            let mut text = text.as_bytes().to_vec();
            clean_spaces(&mut text);
            String::from_utf8(text).unwrap()
        };
        assert_eq!(clean("a , b . c ? d !"), "a, b. c? d!");
        assert_eq!(
            clean("I 'm we 're it 's don 't I 'd we 'll"),
            "I'm we're it's don 't I 'd we 'll"
        );
        assert_eq!(clean("x ' y"), "x'y");
        assert_eq!(clean(" ."), ".");
        assert_eq!(clean("  ."), " .");
        assert_eq!(clean(""), "");
    }
}
