//! The CPU against the reference interpreter on every instruction set, and the settings that must
//! not change a bit.

use bodkin_backend::{ExpertBudget, KvType};
use bodkin_conformance as conformance;
use bodkin_cpu::{Cpu, Fusions, Isa, Sparse};

const ROWS: Fusions = Fusions { rows: true, ..Fusions::NONE };
const SIBLINGS: Fusions = Fusions { siblings: true, ..Fusions::NONE };

fn cpu(threads: usize, isa: Isa) -> Cpu {
    Cpu {
        threads,
        isa,
        fusions: Fusions::ALL,
        repack: true,
        sparse: Sparse::Always,
        skip_inputs: false,
        kv_type: KvType::Auto,
        expert_budget: ExpertBudget::Auto,
        memory_limit: None,
    }
}

/// The instruction sets of this processor. Tiles are emulated, in plain Rust, where it has none.
fn levels() -> impl Iterator<Item = Isa> {
    let has_tiles = Isa::available().any(|isa| isa.name() == "amx");
    Isa::available().filter(move |isa| !has_tiles || isa.name() != "amx-emulated")
}

#[test]
fn every_isa_conforms() {
    for isa in levels() {
        check(&cpu(1, isa));
    }
}

#[test]
fn every_isa_conforms_with_other_keys_and_values() {
    // The other levels have the attention of one of these.
    let has_own_attention = |isa: &Isa| {
        *isa == Isa::detect() || ["avx512", "avx2", "neon", "portable"].contains(&isa.name())
    };
    for kv_type in [KvType::F16, KvType::Q8_0] {
        for isa in levels().filter(has_own_attention) {
            let cpu = Cpu { kv_type, ..cpu(1, isa) };
            // Large cases are for matmuls: the detected level takes them.
            let is_tried = |name: &str| isa == Isa::detect() || !conformance::is_large(name);
            check_named(&cpu, is_tried);
        }
    }
}

/// The cases that every feeding and setting is tried with. The portable code's bits in large ones
/// are those of other levels all the same: see [`every_isa_has_the_bits_of_the_portable_code`].
fn is_tried(isa: Isa) -> impl Fn(&str) -> bool {
    move |name| isa != Isa::Portable || !conformance::is_large(name)
}

fn check(cpu: &Cpu) {
    check_named(cpu, is_tried(cpu.isa));
}

fn check_named(cpu: &Cpu, is_tried: impl Fn(&str) -> bool) {
    let mut failures = conformance::check_named(cpu, is_tried);
    failures.extend(conformance::check_steps(cpu));
    assert!(failures.is_empty(), "{cpu:?}:\n{}", failures.join("\n"));
}

/// The portable code fuses multiplications and additions too, so a model's text does not depend on
/// the processor.
#[test]
fn every_isa_has_the_bits_of_the_portable_code() {
    let wanted = conformance::logits(&cpu(1, Isa::Portable)).unwrap();
    // The instructions of BF16 round activations to bfloat16, as tiles do.
    let rounds = |isa: &Isa| ["avx512-bf16", "amx", "amx-emulated"].contains(&isa.name());
    for isa in levels().filter(|isa| !rounds(isa)) {
        let found = conformance::logits(&cpu(1, isa)).unwrap();
        for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
            let same = found.iter().zip(wanted).all(|(f, w)| f.to_bits() == w.to_bits());
            assert!(same, "{isa}: {name}");
        }
    }
}

#[test]
fn threads_conform() {
    check(&cpu(2, Isa::detect()));
}

/// Threads, fusions, repacking, zeros and cached experts: of their combinations each `every`th,
/// with large cases or without.
fn check_settings(isas: impl Iterator<Item = Isa>, every: usize, has_large: bool) {
    for isa in isas {
        let is_tried = |name: &str| has_large || !conformance::is_large(name);
        let logits =
            |cpu: &Cpu| conformance::logits_named(cpu, is_tried).expect("no case is refused");
        let wanted = logits(&cpu(1, isa));
        for (threads, fusions, repack, sparse, experts) in [
            (1, Fusions::NONE, true, Sparse::Never, 0.5),
            (1, ROWS, true, Sparse::Always, 1.0),
            (1, SIBLINGS, true, Sparse::Auto, 0.0),
            (3, Fusions::ALL, false, Sparse::Auto, 0.5),
            (2, Fusions::NONE, false, Sparse::Never, 1.0),
            (2, Fusions::ALL, true, Sparse::Always, 0.0),
            (3, ROWS, true, Sparse::Always, 0.5),
            (3, SIBLINGS, true, Sparse::Never, 1.0),
        ]
        .into_iter()
        .step_by(every)
        {
            let skip_inputs = threads == 3;
            let expert_budget = ExpertBudget::Share(experts);
            let setting = cpu(threads, isa);
            let setting = Cpu { fusions, repack, sparse, skip_inputs, expert_budget, ..setting };
            let found = logits(&setting);
            assert_eq!(found.len(), wanted.len());
            for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
                let same = found.iter().zip(wanted).all(|(f, w)| f.to_bits() == w.to_bits());
                assert!(same, "{setting:?}: {name}");
            }
        }
    }
}

#[test]
fn settings_change_no_bit() {
    check_settings([Isa::detect()].into_iter(), 1, true);
}

#[test]
fn settings_change_no_bit_of_other_levels() {
    // All levels share the code that settings choose; large cases are for matmuls.
    check_settings(levels().filter(|&isa| isa != Isa::detect()), 3, false);
}
