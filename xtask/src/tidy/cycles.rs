//! No import cycles between the files of a crate: who reads a file must be able to understand what
//! it uses first. Edges follow `use` declarations and paths in code that is not for tests. A path
//! leads to the file that defines its item, through re-exports: declaring or re-exporting a module
//! is no edge. Not seen are uses without a path (a method of another file's `impl` of a type, a
//! type that is inferred), what macros make, and globs that re-export.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::code;
use super::imports::Source;
use super::ratchet::Excess;
use super::tree::Item;

/// A module's path below the crate.
type Module = Vec<String>;

/// Re-exports that one name may go through.
const DEPTH_MAX: usize = 8;

/// A crate's modules that are files.
struct Crate<'a> {
    files: BTreeMap<Module, (&'a str, Source)>,
}

/// Where a path leads.
#[derive(Clone, Debug, PartialEq)]
enum Target {
    Module(Module),
    /// Something that this module's file defines.
    Item(Module),
}

/// From one module to another, with the line and the path that make it so.
type Edges = BTreeMap<Module, BTreeMap<Module, (usize, String)>>;

/// Files that all depend on each other.
struct Cycles<'a> {
    tree: Crate<'a>,
    edges: Edges,
    /// Sorted modules of each.
    components: Vec<Vec<Module>>,
}

/// Crates with their number of files in cycles.
pub(super) fn check(items: &[Item]) -> Vec<Excess> {
    let mut found = Vec::new();
    for name in crates(items) {
        let cycles = Cycles::find(items, name);
        let size = cycles.components.iter().map(Vec::len).sum();
        if size > 0 {
            let place = format!("files in import cycles of {name}");
            found.push(Excess { place, size, detail: cycles.describe(name) });
        }
    }
    found
}

/// All edges between files of one cycle, for those who want to remove them.
pub(super) fn report(items: &[Item], name: &str) -> Vec<String> {
    let cycles = Cycles::find(items, name);
    let mut lines = Vec::new();
    for component in &cycles.components {
        lines.push(format!("{} files of {name} depend on each other:", component.len()));
        for from in component {
            let inside = cycles.edges[from].iter().filter(|(to, _)| component.contains(to));
            lines.extend(inside.map(|(to, _)| format!("  {}", cycles.edge(from, to))));
        }
    }
    lines
}

fn crates(items: &[Item]) -> BTreeSet<&str> {
    items.iter().filter(|item| module(item).is_some()).filter_map(Item::crate_name).collect()
}

/// The module that a file is.
fn module(item: &Item) -> Option<Module> {
    let folder = match item.crate_name()? {
        name @ ("emulator" | "xtask") => format!("{name}/src/"),
        name => format!("crates/{name}/src/"),
    };
    let stem = item.path.strip_prefix(&folder)?.strip_suffix(".rs")?;
    let mut module: Module = stem.split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| last == "mod") || stem == "lib" || stem == "main" {
        module.pop();
    }
    Some(module)
}

impl<'a> Crate<'a> {
    fn read(items: &'a [Item], name: &str) -> Self {
        let mut files = BTreeMap::new();
        let mut tests = Vec::new();
        for item in items.iter().filter(|item| item.crate_name() == Some(name)) {
            let (Some(module), Some(text)) = (module(item), item.text.as_deref()) else { continue };
            let (code, test_modules) = code::cut_tests(&code::strip(text));
            tests
                .extend(test_modules.into_iter().map(|test| [module.clone(), vec![test]].concat()));
            files.insert(module, (item.path.as_str(), Source::read(&code)));
        }
        files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        Self { files }
    }

    /// Where `path`, as it stands in the file of `from`, leads within the crate.
    fn resolve(&self, from: &Module, path: &[String], depth: usize) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        let start = match first.as_str() {
            "crate" => Module::new(),
            "self" => from.clone(),
            "super" => from[..from.len().checked_sub(1)?].to_vec(),
            _ => match self.lookup(from, first, depth)? {
                Target::Module(module) => module,
                item @ Target::Item(_) => return Some(item),
            },
        };
        self.walk(start, rest, depth)
    }

    /// Follows `path` from a module downwards.
    fn walk(&self, mut module: Module, path: &[String], depth: usize) -> Option<Target> {
        for name in path {
            if name == "*" || name == "self" {
                break;
            }
            if name == "super" {
                module.pop()?;
                continue;
            }
            match self.lookup(&module, name, depth) {
                Some(Target::Module(next)) => module = next,
                Some(item) => return Some(item),
                // Something that a macro defines.
                None => return Some(Target::Item(module)),
            }
        }
        Some(Target::Module(module))
    }

    /// What `name` means in a module.
    fn lookup(&self, module: &Module, name: &str, depth: usize) -> Option<Target> {
        let child = [module.as_slice(), &[name.to_owned()]].concat();
        if self.files.contains_key(&child) {
            return Some(Target::Module(child));
        }
        let (_, source) = self.files.get(module)?;
        if source.items.iter().any(|item| item == name) {
            return Some(Target::Item(module.clone()));
        }
        let depth = depth.checked_sub(1)?;
        // An import of another crate by the name that is looked for would lead here again.
        let imports = source.imports.iter().filter(|import| import.path[0] != name);
        let (globs, named): (Vec<_>, Vec<_>) = imports.partition(|import| import.name == "*");
        if let Some(import) = named.iter().find(|import| import.name == name) {
            return self.resolve(module, &import.path, depth);
        }
        globs.iter().find_map(|glob| match self.resolve(module, &glob.path, depth)? {
            Target::Module(of) if of != *module => self.lookup(&of, name, depth),
            _ => None,
        })
    }

    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (module, (_, source)) in &self.files {
            let targets = edges.entry(module.clone()).or_default();
            let mut add = |line: usize, path: &[String]| {
                let is_glob = path.last().is_some_and(|last| last == "*");
                let to = match self.resolve(module, path, DEPTH_MAX) {
                    Some(Target::Item(to)) => to,
                    Some(Target::Module(to)) if is_glob => to,
                    // Where the module's items are used, their paths are edges.
                    _ => return,
                };
                if to != *module {
                    targets.entry(to).or_insert_with(|| (line, path.join("::")));
                }
            };
            for import in &source.imports {
                // A re-export is a dependency only where this file uses the name itself.
                let line = match import.is_public {
                    true => source.line_with(&import.name),
                    false => Some(import.line),
                };
                if let Some(line) = line {
                    add(line, &import.path);
                }
            }
            for mention in &source.mentions {
                add(mention.line, &mention.path);
            }
        }
        edges
    }
}

impl<'a> Cycles<'a> {
    fn find(items: &'a [Item], name: &str) -> Self {
        let tree = Crate::read(items, name);
        let edges = tree.edges();
        let reached: BTreeMap<_, _> =
            edges.keys().map(|from| (from, reach(&edges, from))).collect();
        let mut components: Vec<Vec<Module>> = Vec::new();
        for (from, to) in &reached {
            let component: Vec<Module> =
                to.iter().filter(|to| reached[to].contains(*from)).cloned().collect();
            if !component.is_empty() && !components.contains(&component) {
                components.push(component);
            }
        }
        Self { tree, edges, components }
    }

    /// The files of all cycles, and the shortest cycle of each component.
    fn describe(&self, name: &str) -> String {
        let mut text = "files of a crate must not import each other in a circle:".to_owned();
        for component in &self.components {
            for (from, to) in shortest(&self.edges, component) {
                text.push_str("\n  ");
                text.push_str(&self.edge(&from, &to));
            }
            let others = component.len();
            text.push_str(&format!("\n  one cycle among {others} files; "));
            text.push_str(&format!("`cargo xtask tidy --cycles {name}` lists all their imports"));
        }
        text
    }

    fn edge(&self, from: &Module, to: &Module) -> String {
        let path = |module: &Module| self.tree.files[module].0;
        let (line, import) = &self.edges[from][to];
        format!("{}:{line} uses `{import}` of {}", path(from), path(to))
    }
}

/// All modules that `from` depends on, with itself if it is in a cycle.
fn reach(edges: &Edges, from: &Module) -> BTreeSet<Module> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(next) = open.pop() {
        for to in edges[next].keys() {
            if reached.insert(to.clone()) {
                open.push(to);
            }
        }
    }
    reached
}

/// The edges of a shortest cycle in a component.
fn shortest(edges: &Edges, component: &[Module]) -> Vec<(Module, Module)> {
    let cycle = |start: &Module| {
        let mut before: BTreeMap<&Module, &Module> = BTreeMap::new();
        let mut open = VecDeque::from([start]);
        while let Some(from) = open.pop_front() {
            for to in edges[from].keys().filter(|to| component.contains(to)) {
                if before.contains_key(to) {
                    continue;
                }
                before.insert(to, from);
                if to != start {
                    open.push_back(to);
                    continue;
                }
                let mut cycle = vec![(from.clone(), to.clone())];
                while cycle[0].0 != *start {
                    let at = cycle[0].0.clone();
                    cycle.insert(0, (before[&at].clone(), at));
                }
                return cycle;
            }
        }
        Vec::new()
    };
    component.iter().map(cycle).min_by_key(Vec::len).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files in cycles and the description, for files of crate `a` with these contents.
    fn cycles(files: &[(&str, &str)]) -> (usize, String) {
        let items: Vec<Item> = files
            .iter()
            .map(|(path, text)| Item {
                path: format!("crates/a/src/{path}"),
                text: Some((*text).to_owned()),
            })
            .collect();
        let found = check(&items);
        found.first().map_or((0, String::new()), |found| (found.size, found.detail.clone()))
    }

    #[test]
    fn a_child_that_uses_what_its_parent_defines_is_a_cycle() {
        let parent = "mod child;\nuse child::Part;\npub struct Whole(Part);\n";
        let child = "use super::Whole;\npub struct Part;\nfn f(_: Whole) {}\n";
        let (size, text) = cycles(&[("lib.rs", parent), ("child.rs", child)]);
        assert_eq!(size, 2);
        assert!(text.contains("child.rs:1 uses `super::Whole` of crates/a/src/lib.rs"), "{text}");
        assert!(text.contains("lib.rs:2 uses `child::Part` of crates/a/src/child.rs"), "{text}");
    }

    #[test]
    fn declaring_and_exporting_is_no_edge() {
        let child = "use crate::Whole;\npub struct Part(Whole);\n";
        let parent = "mod child;\npub use child::Part;\npub struct Whole;\n";
        assert_eq!(cycles(&[("lib.rs", parent), ("child.rs", child)]).0, 0);
        let uses = format!("{parent}fn f(_: Part) {{}}\n");
        let (size, text) = cycles(&[("lib.rs", &uses), ("child.rs", child)]);
        assert_eq!(size, 2);
        assert!(text.contains("lib.rs:4 uses `child::Part`"), "{text}");
    }

    #[test]
    fn paths_lead_through_exports_to_the_file_that_defines() {
        let root = "mod b;\nmod c;\n";
        let b = "mod inner;\npub(crate) use inner::{Deep as Shallow};\nuse crate::c::g;\n";
        let inner = "pub(crate) struct Deep;\n";
        let c = "use crate::b;\npub(crate) fn g(_: b::Shallow) {}\n";
        let files = [("lib.rs", root), ("b.rs", b), ("b/inner.rs", inner), ("c.rs", c)];
        assert_eq!(cycles(&files).0, 0);
        let inner = "pub(crate) struct Deep;\nfn f() {\n    crate::c::g(Deep);\n}\n";
        let files = [("lib.rs", root), ("b.rs", b), ("b/inner.rs", inner), ("c.rs", c)];
        let (size, text) = cycles(&files);
        assert_eq!(size, 2);
        assert!(text.contains("c.rs:2 uses `b::Shallow` of crates/a/src/b/inner.rs"), "{text}");
    }

    #[test]
    fn siblings_and_globs_are_edges_and_tests_are_not() {
        let b = "use super::c::*;\npub struct B;\n";
        let c = "pub struct C;\nfn f() {\n    let _ = super::b::B;\n}\n";
        let root = "mod b;\nmod c;\n#[cfg(test)]\nmod d;\n";
        assert_eq!(cycles(&[("main.rs", root), ("b.rs", b), ("c/mod.rs", c)]).0, 2);
        let c = "pub struct C;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\n";
        assert_eq!(cycles(&[("main.rs", root), ("b.rs", b), ("c/mod.rs", c)]).0, 0);
        let c = "pub struct C;\n// crate::b::B\nconst D: &str = \"crate::b::B\";\n";
        assert_eq!(cycles(&[("main.rs", root), ("b.rs", b), ("c/mod.rs", c)]).0, 0);
        let d = "use crate::b::B;\n";
        let b = "use crate::d::D;\npub struct B;\n";
        assert_eq!(cycles(&[("main.rs", root), ("b.rs", b), ("d.rs", d)]).0, 0);
    }

    #[test]
    fn the_report_lists_every_import_of_a_cycle() {
        let item = |path: &str, text: &str| Item {
            path: format!("emulator/src/{path}"),
            text: Some(text.to_owned()),
        };
        let items = [
            item("lib.rs", "mod a;\nmod b;\n"),
            item("a.rs", "use crate::b::B;\npub struct A;\n"),
            item("b.rs", "use crate::a::A;\npub struct B;\n"),
        ];
        let lines = report(&items, "emulator");
        assert_eq!(lines[0], "2 files of emulator depend on each other:");
        assert_eq!(lines[1], "  emulator/src/a.rs:1 uses `crate::b::B` of emulator/src/b.rs");
        assert_eq!(lines.len(), 3);
    }
}
