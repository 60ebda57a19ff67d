//! Where special tokens are found, and that looking for them is bounded.

use super::super::tests::byte_level;
use super::super::vocabulary::Spelling;
use super::*;

fn matcher(tokens: &[&str], name: &str) -> (SpecialMatcher, Vocabulary) {
    let tokens: Vec<(&str, i32)> = tokens.iter().map(|&token| (token, 4)).collect();
    let mut metadata = byte_level(&tokens, &[]);
    metadata.insert("general.name", bodkin_gguf::Value::String(name.as_bytes().into()));
    let vocabulary = Vocabulary::from_metadata(&metadata, Spelling::Plain).unwrap();
    (SpecialMatcher::new(&metadata, &vocabulary).unwrap(), vocabulary)
}

/// Searches for each token in all that the longer ones left.
fn searched(text: &str, tokens: &[&str], rstrip: bool) -> Vec<Fragment> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|&id| std::cmp::Reverse(tokens[id].len()));
    let mut fragments = vec![Fragment::Text(0..text.len())];
    for id in order {
        let mut out = Vec::new();
        for fragment in fragments {
            let Fragment::Text(range) = fragment else {
                out.push(fragment);
                continue;
            };
            let (mut start, end) = (range.start, range.end);
            while let Some(at) = text[start..end].find(tokens[id]) {
                if at > 0 {
                    out.push(Fragment::Text(start..start + at));
                }
                out.push(Fragment::Token(id as u32));
                start += at + tokens[id].len();
                if rstrip {
                    start = end - text[start..end].trim_start().len();
                }
            }
            if start < end {
                out.push(Fragment::Text(start..end));
            }
        }
        fragments = out;
    }
    fragments
}

#[test]
fn remembered_places_give_what_searches_give() {
    let mut state = 1_u32;
    let mut random = |limit: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % limit
    };
    for round in 0..3000 {
        let mut word = |most: u32, letters: u32| -> String {
            let len = 1 + random(most);
            (0..len).map(|_| ['a', 'b', ' ', 'é'][random(letters) as usize]).collect()
        };
        let letters = 1 + round % 4;
        let mut tokens: Vec<String> = (0..6).map(|_| word(5, letters)).collect();
        tokens.sort();
        tokens.dedup();
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        // In the longer ones, tokens stand so often that they are searched for.
        let text = word(if round % 10 == 0 { 3000 } else { 60 }, letters);
        for (name, rstrip) in [("", false), ("phi-3", true)] {
            let (matcher, vocabulary) = matcher(&tokens, name);
            let fragments = matcher.partition(&text, &vocabulary, true).unwrap();
            assert_eq!(fragments, searched(&text, &tokens, rstrip), "{text:?} {tokens:?} {name}");
        }
    }
}

#[test]
fn tokens_with_one_long_prefix_take_bounded_time() {
    let ends = ["b", "c", "d", "e"];
    let tokens: Vec<String> =
        ends.iter().flat_map(|end| (1..1024).map(move |k| "a".repeat(k) + end)).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let (matcher, vocabulary) = matcher(&tokens, "");
    let all: String = ends.iter().map(|end| "a".repeat(1023) + end).collect();
    let start = std::time::Instant::now();
    // A search for each of them would read 250 million bytes.
    let text = all.clone() + &"a".repeat(60_000);
    assert_eq!(matcher.partition(&text, &vocabulary, true).unwrap().len(), 5);
    let error = matcher.partition(&(all + &"a".repeat(200_000)), &vocabulary, true);
    assert!(error.is_err_and(|error| error.to_string().contains("takes too long")));
    // A second of an optimised build.
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}

#[test]
fn tokens_that_are_nearly_everywhere_are_found() {
    let tokens: Vec<String> = (1..=32).map(|k| "\n".repeat(k)).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let (matcher, vocabulary) = matcher(&tokens, "");
    let fragments = matcher.partition(&"\n".repeat(1_000_003), &vocabulary, true).unwrap();
    assert_eq!(fragments.len(), 1_000_003 / 32 + 1);
    assert_eq!(fragments.last(), Some(&Fragment::Token(2)));
    // Thousands of different ones, each in its place.
    let names: Vec<String> = (0..30_000).map(|i| format!("<{i}>")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (matcher, vocabulary) = self::matcher(&names, "");
    let fragments = matcher.partition(&names.concat(), &vocabulary, true).unwrap();
    let expected: Vec<Fragment> = (0..30_000).map(Fragment::Token).collect();
    assert_eq!(fragments, expected);
}
