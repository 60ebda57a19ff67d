//! Rules about Cargo.toml files: the direction of dependency between the crates, the shared lints,
//! and the order of dependencies.

use toml::Table;

use super::tree::Item;

/// Every crate with the crates that it may use: the layers below it, and nothing beside it.
const EDGES: &[(&str, &[&str])] = &[
    ("gguf", &[]),
    ("model", &["gguf"]),
    ("backend", &["gguf", "model"]),
    ("conformance", &["backend", "gguf", "model"]),
    ("cpu", &["backend", "gguf", "model"]),
    ("cuda", &["backend", "gguf", "model"]),
    ("wgpu", &["backend", "gguf", "model"]),
    ("engine", &["backend", "gguf", "model"]),
    ("compress", &["backend", "gguf", "model"]),
    ("convert", &["compress", "gguf", "model"]),
    ("runtime", &["backend", "convert", "cpu", "cuda", "engine", "gguf", "model", "wgpu"]),
    ("eval", &["backend", "engine", "gguf", "model", "runtime"]),
    ("serve", &["backend", "engine", "gguf", "model", "runtime"]),
    ("flight", &["backend", "engine", "gguf", "model", "runtime", "serve"]),
    ("cli", ALL_BUT_DEVICES),
    ("emulator", &[]),
    ("xtask", ALL),
];
const ALL_BUT_DEVICES: &[&str] = &[
    "backend", "compress", "convert", "engine", "eval", "flight", "gguf", "model", "runtime",
    "serve",
];
const ALL: &[&str] = &[
    "backend",
    "compress",
    "conformance",
    "convert",
    "cpu",
    "cuda",
    "engine",
    "eval",
    "flight",
    "gguf",
    "model",
    "runtime",
    "serve",
    "wgpu",
];
const SECTIONS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Checks one file.
pub(super) fn check(item: &Item, violations: &mut Vec<String>) {
    let path = &item.path;
    if !path.ends_with("Cargo.toml") {
        return;
    }
    order(item, violations);
    let Some(name) = item.crate_name() else { return };
    let manifest: Table = match item.text.as_deref().unwrap_or_default().parse() {
        Ok(manifest) => manifest,
        Err(error) => return violations.push(format!("{path}: {}", error.message())),
    };
    let lints = manifest.get("lints").and_then(|lints| lints.get("workspace"));
    if lints.and_then(|value| value.as_bool()) != Some(true) {
        violations.push(format!("{path}: expected [lints] workspace = true"));
    }
    let Some((_, allowed)) = EDGES.iter().find(|(crate_name, _)| *crate_name == name) else {
        return violations.push(format!("{path}: the design has no crate `{name}`"));
    };
    for (section, used) in dependencies(&manifest) {
        let Some(ours) = used.strip_prefix("bodkin-") else { continue };
        // Tests of any crate may compare with the reference interpreter.
        let is_tested_with = (section, ours) == ("dev-dependencies", "conformance");
        if ours != name && !allowed.contains(&ours) && !is_tested_with {
            violations.push(format!("{path}: {name} must not use {used}"));
        }
    }
}

/// The section and the name of every dependency, also of those for one platform only.
fn dependencies(manifest: &Table) -> Vec<(&str, &str)> {
    let targets = manifest.get("target").and_then(|value| value.as_table());
    let targets = targets.into_iter().flat_map(Table::values).filter_map(|value| value.as_table());
    std::iter::once(manifest)
        .chain(targets)
        .flat_map(|table| {
            SECTIONS.iter().filter_map(|&section| Some((section, table.get(section)?.as_table()?)))
        })
        .flat_map(|(section, table)| table.keys().map(move |key| (section, key.as_str())))
        .collect()
}

/// Dependencies stand in alphabetical order.
fn order(item: &Item, violations: &mut Vec<String>) {
    let mut last: Option<&str> = None;
    for (number, line) in item.lines() {
        if line.starts_with('[') {
            let section = line.trim_matches(['[', ']']).rsplit('.').next().unwrap_or_default();
            last = SECTIONS.contains(&section).then_some("");
        } else if let (Some(before), Some((key, _))) = (last, line.split_once(['.', ' ', '='])) {
            let is_key = !key.is_empty() && !key.starts_with(['#', '"', '\'', ']', '}']);
            if is_key && key < before {
                let path = &item.path;
                violations.push(format!("{path}:{number}: `{key}` stands after `{before}`"));
            }
            last = if is_key { Some(key) } else { last };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::violations;

    #[test]
    fn every_rule_can_fail() {
        let good = "[lints]\nworkspace = true\n\n[dependencies]\nbodkin-gguf.workspace = true\n\
                    half = \"2\"\n";
        assert_eq!(violations("crates/model/Cargo.toml", good).len(), 0);
        for bad in [
            good.replace("workspace = true\n\n", "\n"),
            good.replace("bodkin-gguf", "bodkin-engine"),
            good.replace("half", "anyhow"),
            good.replace("bodkin-gguf", "bodkin-conformance"),
            format!("{good}\n[target.'cfg(unix)'.dependencies]\nbodkin-cpu = \"1\"\n"),
        ] {
            assert_eq!(violations("crates/model/Cargo.toml", &bad).len(), 1, "{bad}");
        }
        let tested = format!("{good}\n[dev-dependencies]\nbodkin-conformance = \"1\"\n");
        assert_eq!(violations("crates/model/Cargo.toml", &tested).len(), 0);
        assert_eq!(violations("crates/novel/Cargo.toml", good).len(), 1);
        let workspace = "[workspace.dependencies]\nb = \"1\"\na = \"1\"\n";
        assert_eq!(violations("Cargo.toml", workspace).len(), 1);
    }
}
