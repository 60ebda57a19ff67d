//! The CPU against the reference interpreter at every level of vector instructions, and the
//! settings that must not change a bit.

use bodkin_backend::conformance;
use bodkin_cpu::{Cpu, Fusions, Simd};

const ROWS: Fusions = Fusions { rows: true, ..Fusions::NONE };
const SIBLINGS: Fusions = Fusions { siblings: true, ..Fusions::NONE };

#[test]
fn every_level_conforms() {
    for simd in Simd::available() {
        let failures = conformance::check(&Cpu { threads: 1, simd, fusions: Fusions::ALL });
        assert!(failures.is_empty(), "{simd}:\n{}", failures.join("\n"));
    }
}

#[test]
fn threads_conform() {
    let failures =
        conformance::check(&Cpu { threads: 2, simd: Simd::detect(), fusions: Fusions::ALL });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn threads_and_fusions_change_no_bit() {
    for simd in Simd::available() {
        let run = |threads, fusions| conformance::logits(&Cpu { threads, simd, fusions });
        let wanted = run(1, Fusions::ALL).unwrap();
        for (threads, fusions) in [
            (1, Fusions::NONE),
            (1, ROWS),
            (1, SIBLINGS),
            (2, Fusions::ALL),
            (2, Fusions::NONE),
            (3, Fusions::ALL),
            (3, ROWS),
            (3, SIBLINGS),
        ] {
            let found = run(threads, fusions).unwrap();
            assert_eq!(found.len(), wanted.len());
            for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
                let same = found.iter().zip(wanted).all(|(f, w)| f.to_bits() == w.to_bits());
                assert!(same, "{simd}, {threads} threads, {fusions:?}: {name}");
            }
        }
    }
}
