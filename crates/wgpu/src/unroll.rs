//! What is done to the text of a shader before it is compiled: loops are unrolled, lines are
//! chosen.

/// Repeats the lines between `//@ for NAME COUNT` and `//@ end`, with each number for `{NAME}`: a
/// driver may not unroll the loops that it gets, and arrays that are indexed in a loop are slow. A
/// count is a number, that of a loop around it, or one of `constants`, which the shader sees too.
/// One of 0 or 1 leaves the lines out or in.
pub(crate) fn unrolled(source: &str, constants: &[(&str, usize)]) -> String {
    let declared = constants.iter().map(|(name, value)| format!("const {name}: u32 = {value}u;\n"));
    let mut text: String = declared.collect();
    unroll(source, constants, &mut text);
    text
}

/// Of the lines from `//@ if cached` to `//@ end if`, those before `//@ else`, or those after it.
pub(crate) fn chosen(source: &str, is_cached: bool) -> String {
    let mut is_in = true;
    let lines = source.split_inclusive('\n').filter(|line| {
        let wanted = match line.trim() {
            "//@ if cached" => is_cached,
            "//@ else" => !is_cached,
            "//@ end if" => true,
            _ => return is_in,
        };
        is_in = wanted;
        false
    });
    lines.collect()
}

/// Unrolls the outermost loops, then those in them.
fn unroll(source: &str, constants: &[(&str, usize)], text: &mut String) {
    let mut lines = source.split_inclusive('\n');
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let &["//@", "for", name, count] = &words[..] else {
            text.push_str(line);
            continue;
        };
        let constant = constants.iter().find(|(name, _)| *name == count);
        let count = constant.map(|(_, value)| *value).or_else(|| count.parse().ok());
        let mut depth = 1;
        let in_loop = |line: &&str| {
            depth += i32::from(line.trim_start().starts_with("//@ for"));
            depth -= i32::from(line.trim() == "//@ end");
            depth > 0
        };
        let body: String = lines.by_ref().take_while(in_loop).collect();
        for i in 0..count.expect("a number or a constant") {
            unroll(&body.replace(&format!("{{{name}}}"), &i.to_string()), constants, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{chosen, unrolled};

    #[test]
    fn loops_are_unrolled_from_the_outside() {
        let source = "a\n//@ for i N\nb{i}\n//@ for j {i}\nc{i}{j}\n//@ end\n//@ end\nd\n";
        let wanted = "const N: u32 = 3u;\na\nb0\nb1\nc10\nb2\nc20\nc21\nd\n";
        assert_eq!(unrolled(source, &[("N", 3)]), wanted);
        assert_eq!(unrolled("//@ for i 0\na\n//@ end\nb\n", &[]), "b\n");
    }

    #[test]
    fn lines_are_chosen() {
        let source = "a\n//@ if cached\nb\n//@ else\nc\n//@ end if\nd\n";
        assert_eq!(chosen(source, true), "a\nb\nd\n");
        assert_eq!(chosen(source, false), "a\nc\nd\n");
    }
}
