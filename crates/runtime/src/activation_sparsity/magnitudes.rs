//! Histograms of the magnitudes of matmul inputs, one for each weight, counted while a model is
//! observed. They give the threshold below which a share of the inputs lies, see Liu et al. 2024,
//! "Training-Free Activation Sparsity in Large Language Models" (arXiv 2408.14690).

use std::collections::BTreeMap;

use bodkin_backend::{Matmul, Observer};

/// Low bits of an f32 that a bucket ignores: five bits of the fraction remain.
const LOW_BITS: u32 = 18;
/// Buckets of a histogram.
const BUCKETS: usize = 1 << (31 - LOW_BITS);

/// One histogram for each weight, by the weight's name.
pub(super) struct Magnitudes {
    counts: BTreeMap<String, Vec<u64>>,
}

impl Magnitudes {
    /// Empty histograms for these weights.
    pub(super) fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Magnitudes {
        let counts = names.into_iter().map(|name| (name.to_owned(), vec![0; BUCKETS])).collect();
        Magnitudes { counts }
    }

    /// The magnitude below which at most `share` of the inputs of a weight lies, and at least 97 %
    /// of that. `None` without any input.
    pub(super) fn threshold(&self, name: &str, share: f64) -> Option<f32> {
        let counts = self.counts.get(name)?;
        let all: u64 = counts.iter().sum();
        let mut below = 0;
        let bucket = counts.iter().position(|count| {
            below += count;
            below as f64 > share * all as f64
        });
        bucket.map(|bucket| f32::from_bits((bucket as u32) << LOW_BITS))
    }
}

impl Observer for Magnitudes {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let Some(counts) = self.counts.get_mut(&matmul.weight.name) else { return };
        for x in matmul.rows.iter().flat_map(|row| row.values) {
            counts[(x.abs().to_bits() >> LOW_BITS) as usize] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use bodkin_backend::InputRow;
    use bodkin_gguf::Format;
    use bodkin_model::Weight;

    use super::*;

    #[test]
    fn a_share_lies_below_the_threshold() {
        let weight = Weight {
            name: "down".to_owned(),
            format: Format::F32,
            cols: 1000,
            rows: 1,
            bytes: 4000,
            layer: None,
        };
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 - 499.5) / 500.0).collect();
        let rows = [InputRow { expert: 0, values: &values }];
        let mut magnitudes = Magnitudes::of(["down"]);
        assert_eq!(magnitudes.threshold("down", 0.5), None);
        magnitudes.matmul(&Matmul { weight: &weight, experts: 1, rows: &rows });
        for share in [0.1, 0.5, 0.9] {
            let threshold = magnitudes.threshold("down", share).unwrap_or(f32::NAN);
            let below = values.iter().filter(|x| x.abs() < threshold).count();
            let found = below as f64 / 1000.0;
            assert!(found <= share && found > share - 0.03, "{share}: {found}");
        }
        assert_eq!(magnitudes.threshold("up", 0.5), None);
        assert_eq!(magnitudes.threshold("down", 0.0), Some(f32::from_bits(0x3a80_0000)));
    }
}
