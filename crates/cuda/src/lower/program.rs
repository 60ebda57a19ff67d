//! The lowered plan, and how the persistent kernel runs its stages.

use bodkin_model::Rope;

use super::stage::{InputNorm, Stage};
use super::value::{Value, ValueShape};

/// How the persistent kernel runs a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fusion {
    /// Itself, with what it computes besides if it is a matmul.
    Runs(MatmulFusion),
    /// Not at all: a matmul computes it.
    FusedAway,
}

/// What a matmul computes besides in the persistent kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MatmulFusion {
    /// Nothing.
    None,
    /// The norm of its input.
    Norm(InputNorm),
    /// The weighted sum of its experts' results, which it adds to `added`, if any.
    Sum { added: Option<Value>, out: Value },
}

/// The lowered plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Program {
    pub(crate) stages: Vec<Stage>,
    pub(crate) values: Vec<ValueShape>,
    /// The value that the host reads.
    pub(crate) output: Value,
    /// The distinct rotations.
    pub(crate) ropes: Vec<Rope>,
    /// The value whose rows come with the step, if there is one.
    pub(crate) input: Option<Value>,
    /// The number of experts of each routing.
    pub(crate) routings: Vec<usize>,
    /// How the persistent kernel runs each stage.
    pub(crate) fusions: Vec<Fusion>,
    /// The number of tensor-parallel devices, and whether they store into each other's memory.
    pub(crate) devices: usize,
    pub(crate) are_connected: bool,
}

impl Program {
    /// The value in whose memory a value lies: of a view, that of which it is a part.
    pub(crate) fn base(&self, value: Value) -> Value {
        self.values[value.0].view.map_or(value, |(base, _)| base)
    }

    /// The stages that read or write a value or a view of it, once for each use, and one behind all
    /// stages if the host reads it.
    pub(crate) fn uses(&self, value: Value) -> Vec<usize> {
        let mut uses = Vec::new();
        for (i, stage) in self.stages.iter().enumerate() {
            stage.values(&mut |other| {
                if self.base(other) == value {
                    uses.push(i);
                }
            });
        }
        uses.extend((self.base(self.output) == value).then_some(self.stages.len()));
        uses
    }
}
