//! Log-probabilities of tokens for clients that ask for them.

use bodkin_backend::argmax;

use crate::request::Logprobs;

/// Those of the sampled token, or of a prompt's, and of the `top` most probable ones, from finite
/// logits.
pub(crate) fn logprobs(logits: &[f32], sampled: u32, top: usize) -> Logprobs {
    let max = logits[argmax(logits) as usize];
    let normaliser = max + sum_of_exponentials(logits, max).ln() as f32;
    let logprob = |id: u32| logits[id as usize] - normaliser;
    let top = most_probable(logits, top).into_iter().map(|id| (id, logprob(id))).collect();
    Logprobs { sampled: logprob(sampled), top }
}

/// The sum of `exp(logit - max)`. The model's thread computes it for each row, so compilers must be
/// able to use vectors: partial sums of 64 values are `f32`.
fn sum_of_exponentials(logits: &[f32], max: f32) -> f64 {
    const LANES: usize = 16;
    let sum = |part: &[f32]| -> f64 {
        let mut sums = [0.0; LANES];
        let (chunks, rest) = part.as_chunks::<LANES>();
        let add = |sums: &mut [f32; LANES], chunk: &[f32]| {
            sums.iter_mut().zip(chunk).for_each(|(sum, &x)| *sum += exp(x - max));
        };
        chunks.iter().for_each(|chunk| add(&mut sums, chunk));
        add(&mut sums, rest);
        sums.into_iter().map(f64::from).sum()
    };
    logits.chunks(64 * LANES).map(sum).sum()
}

/// The exponential of a number that is not above 0, and tiny instead of 0 below -87. A power of two
/// is the product of that of the nearest whole number, which is an exponent's bits, and that of the
/// rest, which is a polynomial's value (Cephes, `exp2f`).
fn exp(x: f32) -> f32 {
    /// Added to a number, it leaves the nearest whole one in the lowest bits.
    const ROUNDING: f32 = 12_582_912.0;
    const COEFFICIENTS: [f32; 7] = [
        1.535_336_2e-4,
        1.339_887_4e-3,
        9.618_437e-3,
        5.550_332_5e-2,
        2.402_264_8e-1,
        6.931_472e-1,
        1.0,
    ];
    let x = (x * std::f32::consts::LOG2_E).max(-126.0);
    let rounded = x + ROUNDING;
    let rest = x - (rounded - ROUNDING);
    let power = COEFFICIENTS.into_iter().fold(0.0, |power, c| power * rest + c);
    power * f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0f32.to_bits()))
}

/// The ids of the `count` largest logits, the largest first.
fn most_probable(logits: &[f32], count: usize) -> Vec<u32> {
    /// Most blocks have none of them, which compilers find out with vectors.
    const BLOCK: usize = 64;
    let mut ids: Vec<u32> = Vec::new();
    if count == 0 {
        return ids;
    }
    for (block, first) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        let least = |ids: &[u32]| match ids.len() == count {
            true => logits[ids[count - 1] as usize],
            false => f32::NEG_INFINITY,
        };
        let floor = least(&ids);
        if ids.len() == count && !block.iter().fold(false, |any, &logit| any | (logit > floor)) {
            continue;
        }
        for (id, &logit) in (first..).zip(block) {
            if ids.len() == count && logit <= least(&ids) {
                continue;
            }
            let at = ids.partition_point(|&id| logits[id as usize] >= logit);
            ids.insert(at, id);
            ids.truncate(count);
        }
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_exponentials_are_as_exact_as_logits() {
        for i in 0..200_000 {
            let x = i as f32 * -1e-4;
            let wanted = f64::from(x).exp();
            assert!((f64::from(exp(x)) - wanted).abs() < 2e-7 * (1.0 - f64::from(x)) * wanted);
        }
        let logits: Vec<f32> =
            (0..100_003).map(|i| 9.0 - (i * 37 % 30_000) as f32 * 1e-3).collect();
        let wanted: f64 = logits.iter().map(|&x| f64::from(x - 9.0).exp()).sum();
        let found = sum_of_exponentials(&logits, 9.0);
        assert!((found / wanted).ln().abs() < 1e-7, "{found} is not {wanted}");
    }

    #[test]
    fn logprobs_are_normalised_and_in_order() {
        let p = [0.1f32, 0.4, 0.2, 0.3];
        let logits = p.map(|p| p.ln() + 7.0);
        let found = logprobs(&logits, 0, 2);
        assert!((found.sampled - p[0].ln()).abs() < 1e-5);
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3]);
        assert!((found.top[1].1 - p[3].ln()).abs() < 1e-5);
        assert!(logprobs(&logits, 0, 0).top.is_empty());
        let all = logprobs(&logits, 0, 9).top;
        assert_eq!(all.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 2, 0]);
        assert_eq!(logprobs(&[f32::NEG_INFINITY, 3.0], 1, 0).sampled, 0.0);
        // Over several blocks, with equal ones.
        let many: Vec<f32> = (0..333).map(|i| (i * 37 % 50) as f32).collect();
        let mut ids: Vec<u32> = (0..333).collect();
        ids.sort_by(|&a, &b| many[b as usize].total_cmp(&many[a as usize]).then(a.cmp(&b)));
        for count in [0, 1, 20, 64, 100, 333, 400] {
            assert_eq!(most_probable(&many, count), ids[..count.min(333)], "{count}");
        }
        // Of equal ones, the first.
        assert_eq!(most_probable(&[1.0, 2.0, 2.0, 1.0, 2.0], 4), [1, 2, 4, 0]);
    }
}
