//! Rotations against values worked out by hand.

use bodkin_model::{Rope, RopeScaling, RopeStyle, WeightId};

fn rope(dims: usize, scaling: RopeScaling) -> Rope {
    Rope {
        style: RopeStyle::Norm,
        dims,
        base: 10_000.0,
        scaling,
        factors: None,
        inverse: false,
        block: 1,
    }
}

fn assert_close(found: &[f64], wanted: &[f64]) {
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(wanted) {
        assert!((found - wanted).abs() <= 1e-9 * wanted.abs(), "{found}, not {wanted}");
    }
}

#[test]
fn frequencies_fall_by_the_base() {
    let table = rope(8, RopeScaling::None).table(None);
    assert_close(&table.inverse_frequencies, &[1.0, 0.1, 0.01, 0.001]);
    assert_eq!(table.attention_factor, 1.0);
}

#[test]
fn linear_scaling_divides_positions() {
    let table = rope(4, RopeScaling::Linear { factor: 4.0 }).table(None);
    assert_close(&table.inverse_frequencies, &[0.25, 0.0025]);
}

#[test]
fn factors_divide_each_frequency() {
    let rope = Rope { factors: Some(WeightId(0)), ..rope(4, RopeScaling::None) };
    let table = rope.table(Some(&[2.0, 8.0]));
    assert_close(&table.inverse_frequencies, &[0.5, 0.00125]);
}

#[test]
fn long_rope_only_magnifies() {
    let table = rope(4, RopeScaling::Long { attn_factor: 1.25 }).table(None);
    assert_close(&table.inverse_frequencies, &[1.0, 0.01]);
    assert_eq!(table.attention_factor, 1.25);
}

#[test]
fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
    // Pair 8 ln(4096 / (32 * 2 pi)) / (2 ln 10000) = 1.3 turns 32 times within 4096 tokens, pair
    // 2.8 turns once: the ramp goes from pair 1 to pair 3, and pair 2 is half stretched.
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attn_factor: 2.0,
    };
    let table = rope(8, yarn).table(None);
    assert_close(&table.inverse_frequencies, &[1.0, 0.1, 0.00625, 0.00025]);
    assert!((table.attention_factor - 2.0 * 1.138_629_4).abs() < 1e-6);
}

#[test]
fn angles_are_frequency_times_position() {
    let mut table = rope(4, RopeScaling::None).table(None);
    table.attention_factor = 2.0;
    let (mut cos, mut sin) = ([0.0; 2], [0.0; 2]);
    table.cos_sin_at(3, &mut cos, &mut sin);
    // The cosine and sine of 3 and of 0.03.
    let wanted = [[-0.989_992_5, 0.999_550_03], [0.141_120_01, 0.029_995_5]];
    for (found, wanted) in cos.iter().chain(&sin).zip(wanted.as_flattened()) {
        assert!((found - 2.0 * wanted).abs() < 1e-6, "{found}, not twice {wanted}");
    }
    // Far out, where single precision would be a tenth of a radian off.
    table.cos_sin_at(1_000_000, &mut cos, &mut sin);
    assert!((f64::from(cos[0]) - 2.0 * 1e6f64.cos()).abs() < 1e-6);
}
