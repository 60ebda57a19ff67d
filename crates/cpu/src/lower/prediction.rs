//! Where experts are cached, each layer predicts what the next one will choose: the next layer's
//! router gets this layer's input too, as the layers between add little to it. The experts that it
//! would choose are read from the file while this layer is computed.

use bodkin_model::{Op, Plan, Routing, WeightId};

use crate::program::{Linear, Operand, Prediction, Program, Stage};

/// The router of a layer with experts.
struct Router {
    weight: WeightId,
    bias: Option<WeightId>,
    routing: Routing,
    /// Added to the probabilities.
    choice_bias: Option<WeightId>,
}

/// Adds predictions to a lowered plan, where two layers have routers of the same kind.
pub(super) fn add_predictions(program: &mut Program, plan: &Plan) {
    let routers: Vec<Option<Router>> =
        program.permutations.iter().map(|p| p.op.and_then(|op| router(plan, op))).collect();
    let routers: Vec<_> =
        routers.iter().enumerate().filter_map(|(i, router)| Some((i, router.as_ref()?))).collect();
    // A layer's prediction is over before that of the next begins, so all share two buffers.
    let first = program.buffer_widths.len();
    let [mut scores_width, mut out_width] = [0; 2];
    for pair in routers.windows(2) {
        let [(this, router), (permutation, next)] = [pair[0], pair[1]];
        let [weight, next_weight] = [router, next].map(|router| plan.weight(router.weight));
        // The input lies in the formats of this layer's router.
        if (weight.cols, weight.format) != (next_weight.cols, next_weight.format) {
            continue;
        }
        let reads = |stage: &Stage| match stage {
            Stage::Matmul { linears, .. } => linears.iter().any(|l| l.weight == router.weight),
            _ => false,
        };
        let Some(at) = program.stages.iter().position(reads) else { continue };
        let Stage::Matmul { input, .. } = program.stages[at] else { continue };
        let scores = Operand { buffer: Some(first), width: next.routing.experts };
        let out = Operand { buffer: Some(first + 1), width: 2 * next.routing.used };
        scores_width = scores_width.max(scores.width);
        out_width = out_width.max(out.width);
        let linear = Linear { weight: next.weight, bias: next.bias, out: scores };
        program.stages.insert(at + 1, Stage::Prediction { input, linear });
        program.permutations[this].prediction = Some(Prediction {
            permutation,
            scores,
            bias: next.choice_bias,
            routing: next.routing,
            out,
        });
    }
    if scores_width > 0 {
        program.buffer_widths.extend([scores_width, out_width]);
    }
}

/// The router of a choice that scores decide.
fn router(plan: &Plan, route: usize) -> Option<Router> {
    let Op::Route { input, chosen: None, bias: choice_bias, routing } = plan.ops[route] else {
        return None;
    };
    let Op::Linear { weight, bias, .. } = plan.ops[input.0] else { return None };
    Some(Router { weight, bias, routing, choice_bias })
}
