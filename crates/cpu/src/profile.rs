//! Where the time of steps goes, by kind of stage.

use bodkin_backend::Part;
use bodkin_model::{Plan, Rows};

use crate::lower::{Product, Program, RowOp, Stage};
use crate::weights::Prepared;

/// Times since profiling began.
pub(crate) struct Times {
    /// Of each stage.
    pub(crate) seconds: Vec<f64>,
    pub(crate) steps: u64,
    pub(crate) tokens: u64,
    pub(crate) outputs: u64,
}

impl Times {
    pub(crate) fn new(program: &Program) -> Times {
        Times { seconds: vec![0.0; program.stages.len()], steps: 0, tokens: 0, outputs: 0 }
    }

    /// The stages of all layers added up by what they do.
    pub(crate) fn parts(&self, plan: &Plan, program: &Program, weights: &[Prepared]) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for (stage, &seconds) in program.stages.iter().zip(&self.seconds) {
            let mut part = Part { what: describe(plan, stage), seconds, ..Part::default() };
            if let Stage::Multiply { rows, products, .. } = stage {
                let tokens = match rows {
                    Rows::Tokens => self.tokens,
                    Rows::Outputs => self.outputs,
                };
                for product in products {
                    let matrix = weights[product.weight.0].matrix.as_ref();
                    let weight = plan.weight(product.weight);
                    part.bytes += self.steps * matrix.map_or(0, |m| m.bytes() as u64);
                    part.operations += 2 * tokens * (weight.rows * weight.cols) as u64;
                }
            }
            match parts.iter_mut().find(|other| other.what == part.what) {
                Some(other) => {
                    other.seconds += part.seconds;
                    other.bytes += part.bytes;
                    other.operations += part.operations;
                }
                None => parts.push(part),
            }
        }
        parts
    }
}

/// The stage's operations, or the names of its weights without the layer.
fn describe(plan: &Plan, stage: &Stage) -> String {
    let name = |product: &Product| {
        let name = plan.weight(product.weight).name.trim_end_matches(".weight");
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        layer.map_or(name, |(_, name)| name).to_owned()
    };
    match stage {
        Stage::Attend { .. } => "attention".to_owned(),
        Stage::Multiply { products, .. } => {
            products.iter().map(name).collect::<Vec<_>>().join(" + ")
        }
        Stage::Rows { ops, .. } => ops.iter().map(RowOp::name).collect::<Vec<_>>().join(", "),
    }
}
