//! Pruning of a small file: how many weights go, where they may go, and what is lost by it.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;

use bodkin_backend::{InputRow, Matmul, Observer};
use bodkin_compress::prune::{self, Calibration, Cut, Job, Method, Pruner, Rule, Structure};
use bodkin_compress::surgery::Surgery;
use bodkin_gguf::{File, Format, Metadata, Value, Writer};
use bodkin_model::{EmbedBy, Op, Plan, Value as PlanValue, Weight, WeightId};

const NAME: &str = "blk.0.ffn_up.weight";
const GATE: &str = "blk.0.ffn_gate.weight";
const COLS: usize = 96;
const ROWS: usize = 40;

/// Numbers from -1 to 1, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

fn weights() -> Vec<f32> {
    let mut random = Random(7);
    (0..ROWS * COLS).map(|_| random.next() + random.next()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A file with one matrix of a layer, an embedding and a router.
fn file() -> File {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", Value::String((*b"llama").into()));
    let data = bytes(&weights());
    let mut writer = Writer::new("test", &metadata).unwrap();
    let shape = [COLS as u64, ROWS as u64];
    for name in [NAME, "blk.0.ffn_gate_inp.weight", "token_embd.weight", "output.weight"] {
        writer.tensor(name, Format::F32, &shape, &data).unwrap();
    }
    writer.tensor("blk.0.ffn_norm.weight", Format::F32, &[COLS as u64], &data[..COLS * 4]).unwrap();
    let mut out = Vec::new();
    writer.write_to(&mut out).unwrap();
    File::from_bytes("test", out).unwrap()
}

/// Inputs whose columns depend on each other and differ in size.
fn inputs() -> Vec<Vec<f32>> {
    let mut random = Random(3);
    let row = |_| {
        let causes: Vec<f32> = (0..12).map(|_| random.next()).collect();
        let input = |j: usize| {
            let size = if j % 17 == 3 { 6.0 } else { 1.0 };
            size * (causes[j % 12] + 0.5 * causes[j * 5 % 12] + 0.1 * random.next())
        };
        (0..COLS).map(input).collect()
    };
    (0..300).map(row).collect()
}

/// A layer in which a gate and the matrix of the file have the same input.
fn plan() -> Plan {
    let weight = |name: &str| {
        let (cols, rows) = (COLS, ROWS);
        Weight { name: name.into(), format: Format::F32, cols, rows, bytes: 0, layer: Some(0) }
    };
    let linear = |weight| Op::Linear { input: PlanValue(0), weight: WeightId(weight), bias: None };
    let table = Op::Embed { table: WeightId(0), by: EmbedBy::Token };
    Plan {
        architecture: "llama".to_owned(),
        context_length: 64,
        vocabulary: ROWS,
        weights: ["token_embd.weight", GATE, NAME].map(weight).to_vec(),
        slots: Vec::new(),
        states: Vec::new(),
        ops: vec![table, linear(1), linear(2)],
        widths: vec![COLS, ROWS, ROWS],
    }
}

/// What is seen of a weight's inputs.
fn calibration() -> Calibration {
    let plan = plan();
    let wanted = BTreeSet::from([GATE, NAME].map(str::to_owned));
    let mut calibration = Calibration::new(&plan, &wanted, 2);
    for inputs in inputs().chunks(100) {
        let rows: Vec<InputRow<'_>> =
            inputs.iter().map(|values| InputRow { expert: 0, values }).collect();
        for weight in &plan.weights[1..] {
            calibration.matmul(&Matmul { weight, experts: 1, rows: &rows });
        }
    }
    calibration
}

fn rule(method: Method, sparsity: f32, structure: Structure, format: Format) -> Rule {
    let dense = format.base().is_none();
    let cut = Cut { method, sparsity, structure, format: Some(format), dense };
    Rule { tensors: None, cut: Some(cut) }
}

/// The pruned file and its jobs.
fn pruned(rules: &[Rule]) -> (File, Vec<Job>) {
    let file = file();
    let jobs = prune::plan(&file, rules).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut pruner = Pruner::new(&file, folder.path()).unwrap();
    let calibration = calibration();
    for job in &jobs {
        pruner.prune(job, &calibration, 3).unwrap();
    }
    let metadata = pruner.metadata(&jobs, "a text");
    let mut out = Vec::new();
    pruner.write(&metadata, &mut out).unwrap();
    (File::from_bytes("pruned", out).unwrap(), jobs)
}

fn values(file: &File) -> Vec<f32> {
    let tensor = file.tensor(NAME).unwrap();
    let mut values = vec![0.0; tensor.elements() as usize];
    tensor.format.dequantize(file.data(tensor), &mut values);
    values
}

/// The mean square of what the products with all inputs are off.
fn output_error(pruned: &[f32]) -> f64 {
    let before = weights();
    let mut sum = 0.0;
    for input in inputs() {
        for (a, b) in before.chunks(COLS).zip(pruned.chunks(COLS)) {
            let off: f32 = a.iter().zip(b).zip(&input).map(|((a, b), x)| (a - b) * x).sum();
            sum += f64::from(off).powi(2);
        }
    }
    sum
}

const METHODS: [Method; 4] = [Method::Magnitude, Method::Wanda, Method::Ria, Method::SparseGpt];

#[test]
fn each_row_loses_exactly_the_number() {
    for method in METHODS {
        for sparsity in [0.0, 0.28, 0.5, 0.9] {
            let (file, _) = pruned(&[rule(method, sparsity, Structure::Unstructured, Format::F32)]);
            let wanted = (f64::from(sparsity) * COLS as f64).round() as usize;
            for row in values(&file).chunks(COLS) {
                let zeros = row.iter().filter(|value| **value == 0.0).count();
                assert_eq!(zeros, wanted, "{method} {sparsity}");
            }
        }
    }
}

#[test]
fn groups_keep_exactly_the_number() {
    for method in METHODS {
        for (kept, of) in [(2, 4), (3, 4), (1, 2), (5, 24)] {
            let structure = Structure::Groups { kept, of };
            let (file, _) = pruned(&[rule(method, 0.0, structure, Format::F32)]);
            for group in values(&file).chunks(of) {
                let left = group.iter().filter(|value| **value != 0.0).count();
                assert_eq!(left, kept, "{method} {structure}");
            }
        }
    }
}

#[test]
fn knowing_more_loses_less() {
    for structure in [Structure::Unstructured, Structure::Groups { kept: 2, of: 4 }] {
        let errors = METHODS.map(|method| {
            let (file, _) = pruned(&[rule(method, 0.5, structure, Format::F32)]);
            output_error(&values(&file))
        });
        let [magnitude, wanda, ria, sparsegpt] = errors;
        assert!(wanda < magnitude && ria < magnitude, "{structure}: {errors:?}");
        assert!(sparsegpt < 0.3 * wanda, "{structure}: {errors:?}");
    }
}

#[test]
fn sparse_files_hold_what_dense_ones_do() {
    for (sparse, dense) in [
        (Format::BITMAP_F16, Format::F16),
        (Format::BITMAP_Q8_0, Format::Q8_0),
        (Format::BITMAP_Q4_0, Format::Q4_0),
        (Format::CSR_F16, Format::F16),
        (Format::S24_Q8_0, Format::Q8_0),
    ] {
        let structure = Structure::Groups { kept: 2, of: 4 };
        let files = [sparse, dense].map(|f| pruned(&[rule(Method::Ria, 0.0, structure, f)]).0);
        let [found, wanted] = files.each_ref().map(values);
        assert_eq!(found, wanted, "{}", sparse.name());
        let [found, wanted] = files.each_ref().map(|file| file.tensor(NAME).unwrap().format);
        assert_eq!((found, wanted), (sparse, dense));
    }
}

#[test]
fn formats_follow_the_structure_and_the_precision() {
    let two_four = Structure::Groups { kept: 2, of: 4 };
    for (structure, format, wanted) in [
        (Structure::Unstructured, None, Format::BITMAP_F16),
        (two_four, None, Format::S24_F16),
        (Structure::Groups { kept: 3, of: 4 }, Some(Format::Q8_0), Format::BITMAP_Q8_0),
        (two_four, Some(Format::Q4_0), Format::S24_Q4_0),
        (two_four, Some(Format::CSR_F16), Format::CSR_F16),
    ] {
        let method = Method::Magnitude;
        let cut = Cut { method, sparsity: 0.5, structure, format, dense: false };
        let jobs = prune::plan(&file(), &[Rule { tensors: None, cut: Some(cut) }]).unwrap();
        assert_eq!(jobs[0].format, wanted);
    }
}

#[test]
fn only_matrices_of_layers_are_pruned() {
    let rules = [rule(Method::Ria, 0.5, Structure::Unstructured, Format::BITMAP_Q8_0)];
    let (pruned, jobs) = pruned(&rules);
    assert_eq!(jobs.iter().map(|job| job.tensor.name.as_str()).collect::<Vec<_>>(), [NAME]);
    let before = file();
    for tensor in before.tensors().iter().filter(|tensor| tensor.name != NAME) {
        let after = pruned.tensor(&tensor.name).unwrap();
        assert_eq!((after.format, pruned.data(after)), (tensor.format, before.data(tensor)));
    }
    let metadata = pruned.metadata();
    assert_eq!(metadata.str("bodkin.prune.method").unwrap(), Some("ria"));
    assert_eq!(metadata.str("bodkin.prune.calibration").unwrap(), Some("a text"));
    assert_eq!(metadata.f32("bodkin.prune.sparsity").unwrap(), Some(0.5));
}

#[test]
fn what_cannot_be_is_refused() {
    let file = Arc::new(file());
    let error = |rule: Rule| prune::plan(&file, &[rule]).unwrap_err().to_string();
    let groups = |of| Structure::Groups { kept: 1, of };
    assert_eq!(
        error(rule(Method::Ria, 1.0, Structure::Unstructured, Format::F16)),
        "rule 1: sparsity: expected 0 <= x < 1, found 1"
    );
    assert_eq!(
        error(rule(Method::Ria, 0.5, groups(5), Format::F16)),
        "blk.0.ffn_up.weight: expected rows of whole groups of 5, found rows of 96"
    );
    let jobs = prune::plan(&file, &[rule(Method::Wanda, 0.5, groups(2), Format::F16)]).unwrap();
    let mut pruner = Pruner::new(&file, &std::env::temp_dir()).unwrap();
    let nothing = Calibration::default();
    assert_eq!(
        pruner.prune(&jobs[0], &nothing, 1).unwrap_err().to_string(),
        "blk.0.ffn_up.weight: expected statistics of its inputs, 1 x 96, found none"
    );
}

#[test]
fn surgery_files_are_read() {
    let text = "[[rule]]\ntensors = 'ffn_up'\nkeep = true\n\n\
                [[rule]]\nmethod = \"wanda\"\npattern = \"2:4\"\nformat = \"Q8_0\"\n";
    let surgery = Surgery::parse("file", text).unwrap();
    assert!(prune::plan(&file(), &surgery.rules).unwrap().is_empty());
    let unknown = Surgery::parse("file", &text.replace("ffn_up", "ffn_down")).unwrap();
    assert_eq!(
        prune::plan(&file(), &unknown.rules).unwrap_err().to_string(),
        "rule 1: tensors: expected a pattern that is found in the name of such a tensor, found \
         `ffn_down`"
    );
    let surgery = Surgery::parse("file", &text.replace("ffn_up", "token_embd")).unwrap();
    let jobs = prune::plan(&file(), &surgery.rules).unwrap();
    assert_eq!((jobs.len(), jobs[0].format, jobs[0].sparsity), (1, Format::S24_Q8_0, 0.5));
}

#[test]
fn wrong_surgery_files_say_where() {
    for (text, wanted) in [
        ("", "file: line 1: expected a surgery file, found missing field `rule`"),
        ("[[rule]]\n", "file: rule 1: method: expected a method, found none"),
        (
            "[[rule]]\nmethod = \"magic\"\nsparsity = 0.5\n",
            "file: rule 1: method: expected one of magnitude, wanda, ria, sparsegpt, found `magic`",
        ),
        (
            "[[rule]]\nkeep = true\n[[rule]]\nmethod = \"ria\"\n",
            "file: rule 2: sparsity: expected 0 <= x < 1, found none",
        ),
        (
            "[[rule]]\nmethod = \"ria\"\nsparsity = 0.3\npattern = \"2:4\"\n",
            "file: rule 1: sparsity: expected 0.5, as the pattern 2:4 has it, found 0.3",
        ),
        (
            "[[rule]]\nmethod = \"ria\"\npattern = \"4:4\"\n",
            "file: rule 1: pattern: expected unstructured, or N:M such as 2:4, with N of every M \
             weights kept, M at most 32, found `4:4`",
        ),
        (
            "[[rule]]\nmethod = \"ria\"\nsparsity = 0.5\nformat = \"Q9\"\n",
            "file: rule 1: format: expected the name of a format, found `Q9`",
        ),
        (
            "[[rule]]\nmethod = \"ria\"\nsparsity = 0.5\ntensors = \"(\"\n",
            "file: rule 1: tensors: expected a regular expression, found `(` (unclosed group)",
        ),
    ] {
        assert_eq!(Surgery::parse("file", text).unwrap_err().to_string(), wanted);
    }
    let unknown = Surgery::parse("file", "[[rule]]\nmethods = \"ria\"\n").unwrap_err().to_string();
    assert!(unknown.contains("unknown field `methods`"), "{unknown}");
}
