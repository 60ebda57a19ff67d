//! Small valid inputs of each target, and words of its format.

use bodkin_eval::{BaseWriter, Windows, encode_row};
use bodkin_gguf::{Array, Format, Metadata, Value, Writer};

/// Words of chat templates.
pub const JINJA: &[&str] = &[
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if ",
    "{% endif %}",
    "{% else %}",
    "{{ ",
    " }}",
    "{%- ",
    " -%}",
    "{% set x = ",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "namespace(x=1)",
    "loop.",
    "[::-1]",
    "[1:]",
    "|tojson",
    "|indent(4)",
    "|trim",
    "|length",
    "|default('')",
    "is defined",
    "is iterable",
    "range(9)",
    "*",
    "**",
    "'%s' % ",
    "raise_exception('x')",
    "strftime_now('%d')",
    "m['content']",
    "messages",
    "tools",
    "bos_token",
    ".split('\\n')",
    ".strip()",
    "~",
    "(",
    ")",
];

/// Words of Ollama manifests.
pub const MANIFEST: &[&str] = &[
    "\"mediaType\":",
    "application/vnd.ollama.image.",
    "model",
    "params",
    "adapter",
    "\"digest\":",
    "sha256:",
    "sha256-",
    "../",
    "\"size\":",
    "\"layers\":",
    "-1",
    "1e999",
    "18446744073709551616",
    "null",
    "{",
    "}",
    "[",
    "]",
];

/// Words of surgery files.
pub const SURGERY: &[&str] = &[
    "[[rule]]\n",
    "tensors = ",
    "\"*\"",
    "method = ",
    "\"wanda\"",
    "\"magnitude\"",
    "sparsity = ",
    "pattern = ",
    "\"2:4\"",
    "\"unstructured\"",
    "format = ",
    "\"Q8_0\"",
    "keep = true\n",
    "nan",
    "inf",
    "1e999",
    "-0.0",
    "imatrix = ",
    "dense = ",
    "{",
    "}",
    "|",
    "?",
    "blk.",
];

/// Words of tokenizer metadata.
pub const TOKENIZER: &[&str] = &[
    "tokenizer.ggml.",
    "llama",
    "gpt2",
    "bert",
    "t5",
    "<0x41>",
    "\u{2581}",
    "\u{120}",
    "<|eot_id|>",
    "llama-bpe",
    "qwen2",
    "gpt-4o",
    "##",
    " ",
];

fn file(metadata: &Metadata, tensors: &[(&str, Format, &[u64], Vec<u8>)]) -> Vec<u8> {
    let mut writer = Writer::new("seed.gguf", metadata).expect("valid metadata");
    for (name, format, shape, data) in tensors {
        writer.tensor(name, *format, shape, data).expect("a valid tensor");
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).expect("enough memory");
    bytes
}

fn text(value: &str) -> Value {
    Value::String(value.as_bytes().into())
}

fn strings(values: &[&str]) -> Value {
    Value::Array(Array::String(values.iter().map(|value| value.as_bytes().into()).collect()))
}

fn metadata(entries: &[(&str, Value)]) -> Metadata {
    let mut metadata = Metadata::new();
    entries.iter().for_each(|(key, value)| metadata.insert(*key, value.clone()));
    metadata
}

/// Every value type, and tensors of dense and sparse formats.
pub fn gguf() -> Vec<Vec<u8>> {
    let nested = Array::Array(vec![Array::U16(vec![1, 2]), Array::Bool(vec![true])]);
    let metadata = metadata(&[
        ("general.architecture", text("llama")),
        ("general.alignment", Value::U32(32)),
        ("a.u8", Value::U8(1)),
        ("a.i64", Value::I64(-1)),
        ("a.f64", Value::F64(0.5)),
        ("a.bool", Value::Bool(true)),
        ("a.f32s", Value::Array(Array::F32(vec![1.0, 2.0]))),
        ("a.strings", strings(&["x", "y"])),
        ("a.nested", Value::Array(nested)),
    ]);
    let values: Vec<f32> = (0..256).map(|i| if i % 4 < 2 { i as f32 } else { 0.0 }).collect();
    let formats = Format::all().iter().filter_map(|&format| {
        let data = format.encode(&values, 256).ok()?;
        Some(file(&metadata, &[("x", format, &[256], data)]))
    });
    formats.collect()
}

/// One weight and one weight of two experts.
pub fn imatrix() -> Vec<Vec<u8>> {
    let metadata = metadata(&[
        ("general.type", text("imatrix")),
        ("imatrix.datasets", strings(&["text"])),
        ("imatrix.chunk_count", Value::U32(2)),
        ("imatrix.chunk_size", Value::U32(512)),
    ]);
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let tensors: [(&str, Format, &[u64], Vec<u8>); 4] = [
        ("a.in_sum2", Format::F32, &[4, 1], floats(&[1.0; 4])),
        ("a.counts", Format::F32, &[1, 1], floats(&[3.0])),
        ("b.in_sum2", Format::F32, &[2, 2], floats(&[2.0; 4])),
        ("b.counts", Format::F32, &[1, 2], floats(&[1.0, 0.0])),
    ];
    vec![file(&metadata, &tensors)]
}

/// Two windows of four tokens out of three.
pub fn kld() -> Vec<Vec<u8>> {
    let windows = Windows::new(vec![0, 1, 2, 0, 1, 2, 0, 1], 4, None).expect("valid windows");
    let mut bytes = Vec::new();
    let mut writer = BaseWriter::new(&mut bytes, &windows, 3).expect("enough memory");
    for _ in 0..2 {
        writer.row(&encode_row(&[0.5, -1.0, 2.0], 2.3)).expect("enough memory");
    }
    writer.finish().expect("enough memory");
    vec![bytes]
}

/// A model with parameters and a template.
pub fn manifest() -> Vec<Vec<u8>> {
    let layer = |kind: &str, digit: &str, size: u64| {
        format!(
            "{{\"mediaType\":\"application/vnd.ollama.image.{kind}\",\"digest\":\"sha256:{}\",\
             \"size\":{size}}}",
            digit.repeat(64)
        )
    };
    let layers =
        [layer("model", "a", 1 << 33), layer("params", "0", 96), layer("template", "9", 7)];
    let config = "\"schemaVersion\":2,\"config\":{\"digest\":\"sha256:0\",\"size\":1}";
    vec![format!("{{{config},\"layers\":[{}]}}", layers.join(",")).into_bytes()]
}

/// Rules with all keys.
pub fn surgery() -> Vec<Vec<u8>> {
    let seeds = [
        "imatrix = \"m.gguf\"\n[[rule]]\ntensors = \"blk.*.ffn_*.weight\"\nmethod = \"wanda\"\n\
         sparsity = 0.5\npattern = \"2:4\"\nformat = \"S24_Q8_0\"\n[[rule]]\nkeep = true\n",
        "[[rule]]\nmethod = \"magnitude\"\nsparsity = 0.3\ndense = true\n",
    ];
    seeds.map(|seed| seed.as_bytes().to_vec()).to_vec()
}

/// Templates in the style of ChatML, Llama and Mistral.
pub fn template() -> Vec<Vec<u8>> {
    let seeds = [
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' ~ m['content'] ~ '<|im_end|>' \
         }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "{{ bos_token }}{%- set ns = namespace(n=0) -%}{% for m in messages[1:] %}\
         {% if m.tool_calls is defined %}{% for t in m.tool_calls %}\
         {{ t.function | tojson(indent=2) }}{% endfor %}\
         {% elif m['content'] is string %}{{ m['content'] | trim }}{% endif %}\
         {% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ tools | tojson | indent(4) }}",
        "{% macro f(a, b=1) %}{{ a[::-1] }}{{ '%s-%d' % (b, 2) }}{% endmacro %}{{ f('xy') }}\
         {% for c in 'abc'.split('b') %}{{ loop.index0 ~ c.strip() }}{% endfor %}\
         {{ strftime_now('%Y-%m-%d') }}{{ range(3) | list | length }}",
    ];
    seeds.map(|seed| seed.as_bytes().to_vec()).to_vec()
}

/// A small vocabulary of each tokenizer model.
pub fn tokenizer() -> Vec<Vec<u8>> {
    let bytes: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    let words = ["<unk>", "<s>", "</s>", "\u{2581}", "He", "l", "o", "llo", "\u{2581}w", "##rld"];
    let mut spm: Vec<&str> = words.to_vec();
    spm.extend(bytes.iter().map(String::as_str));
    let scores = Value::Array(Array::F32((0..spm.len()).map(|i| -(i as f32)).collect()));
    let types = |len: usize| {
        let kind = |i| match i {
            0 => 2,
            1 | 2 => 3,
            i if i >= words.len() => 6,
            _ => 1,
        };
        Value::Array(Array::I32((0..len).map(kind).collect()))
    };
    let with = |model: &str, pre: &str, tokens: &[&str], more: &[(&str, Value)]| {
        let mut entries = vec![
            ("tokenizer.ggml.model", text(model)),
            ("tokenizer.ggml.pre", text(pre)),
            ("tokenizer.ggml.tokens", strings(tokens)),
            ("tokenizer.ggml.token_type", types(tokens.len())),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U32(2)),
            ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
            ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
        ];
        entries.extend_from_slice(more);
        file(&metadata(&entries), &[])
    };
    let scores = [("tokenizer.ggml.scores", scores)];
    let merges = [("tokenizer.ggml.merges", strings(&["l l", "ll o", "H e"]))];
    let bpe = ["<unk>", "<s>", "</s>", "H", "e", "l", "o", "ll", "llo", "He", "\u{120}", "w"];
    vec![
        with("llama", "default", &spm, &scores),
        with("t5", "default", &spm, &scores),
        with("gpt2", "llama-bpe", &bpe, &merges),
        with("gpt2", "qwen2", &bpe, &merges),
        with("bert", "default", &words, &[]),
    ]
}
