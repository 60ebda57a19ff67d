//! Rules about CUDA sources, read line by line: a function begins at the first column and ends at
//! the first closing brace there. Functions inside a `struct` are not measured.

use super::ratchet::Excess;
use super::tree::Item;

const FUNCTION_LINES_MAX: usize = 100;
const COLUMNS_MAX: usize = 120;

/// Long functions, and the number of long lines of each file.
pub(super) fn check(items: &[Item]) -> Vec<Excess> {
    let mut found = Vec::new();
    let is_kernel = |item: &&Item| item.path.ends_with(".cu") || item.path.ends_with(".cuh");
    for item in items.iter().filter(is_kernel) {
        for (name, size) in functions(item) {
            if size > FUNCTION_LINES_MAX {
                let detail = format!("allowed are {FUNCTION_LINES_MAX} lines");
                found.push(Excess { place: format!("{}:{name}", item.path), size, detail });
            }
        }
        let is_long = |line: &&(usize, &str)| line.1.chars().count() > COLUMNS_MAX;
        let long: Vec<String> =
            item.lines().filter(|line| is_long(&line)).map(|line| line.0.to_string()).collect();
        if !long.is_empty() {
            let place = format!("{}: lines over {COLUMNS_MAX} columns", item.path);
            found.push(Excess {
                place,
                size: long.len(),
                detail: format!("at {}", long.join(", ")),
            });
        }
    }
    found
}

/// Names and lengths in lines of a file's functions, from their template's line on.
fn functions(item: &Item) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut head = String::new();
    let mut start = None;
    for (number, line) in item.lines() {
        if line == "}" {
            if let (Some(start), Some(name)) = (start, function_name(&head)) {
                found.push((name.to_owned(), number + 1 - start));
            }
            start = None;
        } else if line.starts_with([' ', '#', '/']) || line.is_empty() {
            // The parameters of a function whose head has several lines.
            if start.is_some() && !head.contains('{') {
                head.push_str(line);
            }
        } else if line.ends_with(';') {
            start = None;
        } else if start.is_none() {
            head = line.to_owned();
            start = Some(number);
        } else if !head.contains('{') {
            head.push_str(line);
        }
    }
    found
}

/// The last name before parentheses in a head such as `void __launch_bounds__(256) f(int x) {`.
fn function_name(head: &str) -> Option<&str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut before = head.match_indices('(').map(|(at, _)| {
        let start = head[..at].rfind(|c| !is_name(c)).map_or(0, |at| at + 1);
        &head[start..at]
    });
    before.find(|name| !name.is_empty() && !name.starts_with("__"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(String, usize)> {
        let item = Item { path: "a.cu".to_owned(), text: Some(text.to_owned()) };
        check(&[item]).into_iter().map(|found| (found.place, found.size)).collect()
    }

    #[test]
    fn functions_and_lines_have_limits() {
        let function = |lines: usize| {
            format!(
                "#include \"a.cuh\"\n\nstruct S {{\n    int x;\n}};\n\ntemplate <int N>\n\
                 __global__ void __launch_bounds__(256) f(\n    int x) {{\n{}}}\n",
                "    g();\n".repeat(lines - 4)
            )
        };
        assert_eq!(found(&function(100)), []);
        assert_eq!(found(&function(101)), [("a.cu:f".to_owned(), 101)]);
        let line = |columns: usize| format!("// {}\n", "a".repeat(columns - 3));
        assert_eq!(found(&line(120)), []);
        assert_eq!(found(&line(121)), [("a.cu: lines over 120 columns".to_owned(), 1)]);
    }
}
