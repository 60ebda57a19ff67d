//! `cargo xtask expert-trace`: a routing trace with the locality of trained models, from a seed.
//!
//! The score of each expert is a process that forgets its past with a time constant, plus noise
//! that is new for each token; a token chooses the experts with the highest scores. Layers are
//! independent. The constants were fitted to what is published of a Qwen 3 30B-A3B: half of all
//! experts are used again within two tokens, 45 % of a token's experts by the next token and 80 %
//! within eight, and LRU caches of 5, 15, 30, 40 and 50 % of the experts hit in 37, 74, 89, 90 to
//! 95, and 96 % of all choices.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use bodkin_eval::RoutingTrace;

use crate::random::Random;

/// Tokens after which the steady part of a score has lost all but 1/e of its past.
const TIME_CONSTANT: f64 = 60.0;
/// The deviation of the part that is new for each token, relative to that of the steady part.
const NOISE: f64 = 0.57;
/// Tokens within which most experts are used again.
const WINDOW: usize = 8;

/// The trace to make.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The file to write.
    out: PathBuf,
    #[command(flatten)]
    pub(crate) generated: Generated,
}

/// The size and the seed of a generated trace. By default those of a Qwen 3 30B-A3B.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Generated {
    /// Experts of each layer.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) experts: u16,
    /// Experts that a token chooses.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) used: u16,
    /// Layers with experts.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) layers: u16,
    /// The number of the first of them in the model.
    #[arg(long, default_value_t = 0)]
    pub(crate) first_layer: u16,
    /// Tokens.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) tokens: u32,
    /// Another seed gives another trace.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Writes the file and prints the trace's statistics.
pub(crate) fn run(args: &Args) -> Result<()> {
    let trace = args.generated.trace(&args.out)?;
    let mut data = Vec::new();
    trace.write(&mut data)?;
    std::fs::write(&args.out, data)?;
    println!("{}: {}", args.out.display(), Locality::of(&trace));
    Ok(())
}

impl Generated {
    /// The trace, which errors call `name`.
    pub(crate) fn trace(&self, name: &Path) -> Result<RoutingTrace> {
        let [experts, used] = [self.experts, self.used].map(usize::from);
        let layers: Vec<usize> =
            (0..self.layers).map(|i| usize::from(self.first_layer) + usize::from(i)).collect();
        let mut random = Random::new(self.seed);
        let mut normal = || f64::from(random.normal());
        let kept = (-1.0 / TIME_CONSTANT).exp();
        let fresh = (1.0 - kept * kept).sqrt();
        let mut steady: Vec<f64> = (0..experts * layers.len()).map(|_| normal()).collect();
        let mut choices = Vec::new();
        for _ in 0..self.tokens {
            for scores in steady.chunks_exact_mut(experts) {
                scores.iter_mut().for_each(|score| *score = kept * *score + fresh * normal());
                let noisy: Vec<f64> = scores.iter().map(|score| score + NOISE * normal()).collect();
                let mut order: Vec<u16> = (0..self.experts).collect();
                order.sort_by(|&a, &b| noisy[usize::from(b)].total_cmp(&noisy[usize::from(a)]));
                choices.extend(order.iter().take(used));
            }
        }
        Ok(RoutingTrace::new(name, [experts, used], layers, choices)?)
    }
}

/// How soon experts are used again, over all layers of a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Locality {
    /// The median number of tokens until an expert is used again.
    pub(crate) median: usize,
    /// The share of a token's experts that the next token uses.
    pub(crate) next: f64,
    /// The share that one of the next eight tokens uses.
    pub(crate) within: f64,
}

impl Locality {
    /// Only tokens with eight more behind them are counted.
    pub(crate) fn of(trace: &RoutingTrace) -> Locality {
        let (mut distances, mut uses) = (Vec::new(), 0);
        for layer in 0..trace.layers().len() {
            let mut next = vec![None; trace.experts()];
            for token in (0..trace.tokens()).rev() {
                let is_counted = token + WINDOW < trace.tokens();
                for &expert in trace.chosen(token, layer) {
                    if is_counted {
                        uses += 1;
                        distances.extend(next[usize::from(expert)].map(|next: usize| next - token));
                    }
                    next[usize::from(expert)] = Some(token);
                }
            }
        }
        distances.sort_unstable();
        let share = |tokens: usize| {
            distances.partition_point(|&distance| distance <= tokens) as f64 / uses.max(1) as f64
        };
        let median = distances.get(distances.len() / 2).copied().unwrap_or(0);
        Locality { median, next: share(1), within: share(WINDOW) }
    }
}

impl fmt::Display for Locality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [next, within] = [self.next, self.within].map(|share| 100.0 * share);
        write!(
            f,
            "an expert's next use is {} tokens later at the median; the next token uses {next:.0} \
             %, the next {WINDOW} use {within:.0} % of a token's experts",
            self.median
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generated(seed: u64) -> Generated {
        let (experts, used, layers, first_layer, tokens) = (128, 8, 4, 0, 1024);
        Generated { experts, used, layers, first_layer, tokens, seed }
    }

    #[test]
    fn experts_are_used_again_as_in_trained_models() {
        for seed in [0, 7] {
            let trace = generated(seed).trace(Path::new("generated")).unwrap();
            let found = Locality::of(&trace);
            assert_eq!(found.median, 2, "{found}");
            assert!((0.42..0.48).contains(&found.next), "{found}");
            assert!((0.77..0.85).contains(&found.within), "{found}");
        }
    }

    #[test]
    fn locality_counts_uses() {
        // Expert 0 is used by every token, the others by every tenth.
        let choices: Vec<u16> = (0..40).flat_map(|token| [0, 1 + token % 10]).collect();
        let trace = RoutingTrace::new(Path::new("t"), [11, 2], vec![0], choices).unwrap();
        let found = Locality::of(&trace);
        assert_eq!((found.next, found.within), (0.5, 0.5));
        assert_eq!(found.median, 1);
    }

    #[test]
    fn the_seed_decides() {
        let trace = |seed| generated(seed).trace(Path::new("generated")).unwrap();
        assert_eq!(trace(1), trace(1));
        assert_ne!(trace(1), trace(2));
        let wrong = Generated { used: 129, ..generated(1) };
        assert!(wrong.trace(Path::new("generated")).unwrap_err().to_string().contains("129"));
    }
}
