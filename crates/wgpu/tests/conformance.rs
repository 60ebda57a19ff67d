//! The GPU against the reference interpreter: on machines without one, Mesa's lavapipe. Software
//! takes most of an hour for the whole suite (`cargo xtask conformance --wgpu`): here are cases of
//! every kernel but those of cooperative matrices, which it does not have.

use std::sync::LazyLock;

use bodkin_backend::KvType;
use bodkin_conformance as conformance;
use bodkin_wgpu::Wgpu;

/// What the names of the cases contain.
const CASES: [&str; 24] = [
    "embed width",
    "norm Layer 3x16 by 48 bias true",
    "norm Rms 2x80 by 160 bias true",
    "linear Q4_K with bias [17, 256]",
    "linear F16 with bias [40, 256]",
    "embed Q6_K",
    "embed Q5_1",
    "tied logits MXFP4",
    "tied logits IQ4_XS",
    "tied logits BF16",
    "tied logits IQ2_XS",
    "neox dims 24",
    "act Gelu width 33",
    "glu ClampedSwish width 33",
    "rescale 3 parts of width 33",
    "cutoff width 33",
    "chosen experts",
    "experts Q8_0",
    "[3 x 17, 256] all",
    "4 hyper-connections",
    "attention in chunks of 16",
    "Indexer { heads: 5, dim: 20, top_k: 12 } 4 heads",
    "blocks of 5",
    "pool",
];
/// Of those with keys and values of each type.
const KV_CASES: [&str; 2] = ["F16 shared", "attention in chunks of 40"];
/// With operations that run together.
const FUSED_CASES: [&str; 3] = ["decoder F16", "decoder mixed", "wide decoder"];
/// Of recurrent state.
const STATE_CASES: [&str; 3] = ["conv", "scan", "delta"];

/// All tests share its kernels, which take software longer to compile than to run.
fn open() -> Wgpu {
    static GPU: LazyLock<Wgpu> =
        LazyLock::new(|| Wgpu::open(0).unwrap_or_else(|error| panic!("{error}")));
    GPU.clone()
}

/// Whether the name of a case contains one of these.
fn is_one_of(names: &[&str]) -> impl Fn(&str) -> bool {
    |case| names.iter().any(|name| case.contains(name))
}

fn check(gpu: &Wgpu, names: &[&str]) {
    let failures = conformance::check_named(gpu, is_one_of(names));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn operations_conform() {
    check(&open(), &CASES);
}

#[test]
fn steps_conform() {
    let failures = conformance::check_steps(&open());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn recurrent_state_conforms() {
    check(&open(), &STATE_CASES);
}

#[test]
fn every_type_of_keys_and_values_conforms() {
    for kv_type in KvType::ALL {
        let gpu = open().keeping(kv_type);
        // Attention to halves alone divides long rows into splits.
        let is_long = |case: &str| [" 150 tokens", " 530 tokens"].iter().any(|s| case.ends_with(s));
        let has_splits = kv_type == KvType::F16;
        let is_chosen = |case: &str| is_one_of(&KV_CASES)(case) && (has_splits || !is_long(case));
        let failures = conformance::check_named(&gpu, is_chosen);
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// Fusion decides how operations run, not what they compute.
#[test]
fn fused_operations_give_the_bits_of_single_ones() {
    let logits = |fuse| {
        let gpu = open().fusing(fuse);
        let prompts = conformance::logits_named(&gpu, is_one_of(&FUSED_CASES));
        let generated = conformance::generated_logits_named(&gpu, is_one_of(&FUSED_CASES));
        [prompts, generated].map(|logits| logits.unwrap_or_else(|e| panic!("{e}"))).concat()
    };
    let (fused, single) = (logits(true), logits(false));
    assert!(!fused.is_empty() && fused.len() == single.len());
    for ((name, found), (_, wanted)) in fused.iter().zip(&single) {
        let is_same = found.iter().map(|x| x.to_bits()).eq(wanted.iter().map(|x| x.to_bits()));
        assert!(is_same, "{name}: fused, it has other bits");
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_says_how_many_there_are() {
    let error = Wgpu::open(1000).err().expect("no machine has a thousand").to_string();
    assert!(error.contains("wgpu:1000"), "{error}");
}
