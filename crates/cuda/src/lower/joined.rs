//! What a kernel that runs a whole step of one row makes together, where single kernels do not: a
//! norm with all products that read it, and experts' products with the weighted sum of their
//! results and what that is added to.

use bodkin_model::{NormKind, Plan};

use super::{After, Factor, Function, INLINED_COLS, InputNorm, Program, Stage, Value, Work};
use crate::planes::Kind;

/// The longest rows whose norm products with weights in f32 make: a row of weights, the input and
/// the norm's weights have to fit in shared memory.
const MOST_COLS: usize = 4800;

/// How a stage takes part in such a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Joined {
    /// As it is.
    Alone,
    /// Not at all: products make it.
    Elsewhere,
    /// A product that makes the norm of its input.
    Norm(InputNorm),
    /// An experts' product whose results are summed and added to `added`.
    Sum { added: Value, out: Value },
}

/// What becomes of each stage of a program.
pub(super) fn joined(plan: &Plan, program: &Program) -> Vec<Joined> {
    let mut joined = vec![Joined::Alone; program.stages.len()];
    for (i, stage) in program.stages.iter().enumerate() {
        if let Some((added, out)) = summed(program, i) {
            joined[i] = Joined::Sum { added, out };
            joined[i + 1..i + 3].fill(Joined::Elsewhere);
        }
        let &Work::Norm { input, weight, eps, is_inlined, .. } = &stage.work else { continue };
        let readers = if is_inlined { Vec::new() } else { readers(plan, program, i) };
        if is_inlined || !readers.is_empty() {
            joined[i] = Joined::Elsewhere;
        }
        for reader in readers {
            joined[reader] = Joined::Norm(InputNorm { input, weight, eps });
        }
    }
    joined
}

/// If the results of the experts' product `i` are only summed, and the sum only added to a value:
/// that value, and where the result goes.
fn summed(program: &Program, i: usize) -> Option<(Value, Value)> {
    let [product, sum, add] = program.stages.get(i..i + 3)? else { return None };
    let Work::Product { factors, after: After::Nothing, experts: Some(experts), .. } =
        &product.work
    else {
        return None;
    };
    let [Factor { out: Some(made), .. }] = factors[..] else { return None };
    let Work::ExpertSum { input, route, out: sum } = sum.work else { return None };
    let Work::Elementwise { function: Function::Add, a, b: Some(b), out } = add.work else {
        return None;
    };
    let added = if a == sum { b } else { a };
    let are_joined = input == made && experts.route == Some(route) && (a == sum || b == sum);
    let uses = |value| program.uses(value).len();
    (are_joined && uses(made) == 2 && uses(sum) == 2).then_some((added, out))
}

/// The readers of the norm that stage `i` is, if all are products that can make it for themselves;
/// else none.
fn readers(plan: &Plan, program: &Program, i: usize) -> Vec<usize> {
    let Work::Norm { input, kind: NormKind::Rms, bias: None, groups: 1, out, half_out, .. } =
        &program.stages[i].work
    else {
        return Vec::new();
    };
    let width = program.values[input.0].content.stride();
    let uses = [out, half_out].into_iter().flatten().flat_map(|value| program.uses(*value));
    let readers: Vec<usize> = uses.filter(|&reader| reader != i).collect();
    let can = |stage: &Stage| match &stage.work {
        Work::Product { input, factors, is_outputs, after, experts, .. } => {
            let is_exact = Kind::of(plan.weight(factors[0].weight).format) == Kind::F32;
            // Each expert meets the same input.
            let shares = experts.is_none_or(|experts| experts.is_shared && !is_exact);
            let is_input = [out, half_out].contains(&&Some(*input));
            let is_added = matches!(after, After::Add(value) if *out == Some(*value));
            let fits = !is_exact || width <= MOST_COLS;
            shares && !is_outputs && is_input && !is_added && fits
        }
        _ => false,
    };
    // Memory for rows counts on the last stage to read its input alone (`arena::apart`).
    let last = program.stages.len() - 1;
    let all_can = readers.iter().all(|&reader| reader < last && can(&program.stages[reader]));
    let fits = INLINED_COLS.contains(&width) && width.is_multiple_of(4);
    if fits && all_can { readers } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use bodkin_model::Op;

    use super::super::lower;
    use super::*;

    /// A model with experts, as if its rows were `width` long.
    fn plan(width: usize) -> Plan {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let file = bodkin_model::open(format!("{folder}/qwen3moe-q4_k_m.gguf")).unwrap();
        let mut plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
        let own = plan.widths[0];
        let sizes = plan.weights.iter_mut().flat_map(|w| [&mut w.cols, &mut w.rows]);
        sizes.chain(&mut plan.widths).filter(|size| **size == own).for_each(|size| *size = width);
        plan
    }

    /// The names of the stages that make the norms of their inputs.
    fn normed(plan: &Plan) -> Vec<String> {
        let program = lower(plan, true, 1);
        let stages = program.stages.iter().zip(&program.joined);
        let normed = stages.filter(|(_, joined)| matches!(joined, Joined::Norm(_)));
        normed.map(|(stage, _)| stage.name.clone()).collect()
    }

    #[test]
    fn routers_and_experts_make_the_norm_of_their_input() {
        let plan = plan(512);
        let layers = plan.layers();
        let names = normed(&plan);
        assert_eq!(names.len(), 2 * layers, "{names:?}");
        for layer in names.chunks(2) {
            assert_eq!(layer, ["ffn_gate_inp", "ffn_gate_exps + ffn_up_exps"]);
        }
        let program = lower(&plan, true, 1);
        let norms = program.stages.iter().zip(&program.joined).filter(|(stage, joined)| {
            matches!(stage.work, Work::Norm { .. }) && **joined == Joined::Elsewhere
        });
        // With those before attention and the head.
        assert_eq!(norms.count(), 2 * layers + 1);
    }

    #[test]
    fn norms_of_short_rows_and_those_that_others_read_are_stages() {
        assert_eq!(normed(&plan(256)), [""; 0]);
        let mut plan = plan(512);
        // The sum of experts is added to the normed row, not to what it was made of.
        for i in 0..plan.ops.len() {
            if let Op::ExpertSum { .. } = plan.ops[i] {
                let norm = (0..i).rev().find(|&j| is_long_norm(&plan, j)).unwrap();
                let sum = bodkin_model::Value(i);
                plan.ops[i + 1] = Op::Add { a: bodkin_model::Value(norm), b: sum };
            }
        }
        assert_eq!(normed(&plan), [""; 0]);
    }

    #[test]
    fn a_norm_that_is_added_to_something_is_a_stage() {
        let mut plan = plan(512);
        let is_residual = |plan: &Plan, i: usize| match plan.ops[i] {
            Op::Add { b, .. } => matches!(plan.ops[b.0], Op::Linear { .. }),
            _ => false,
        };
        let i = (0..plan.ops.len()).find(|&i| is_residual(&plan, i)).unwrap();
        let norm = (0..i).rev().find(|&j| is_long_norm(&plan, j)).unwrap();
        if let Op::Add { a, .. } = &mut plan.ops[i] {
            *a = bodkin_model::Value(norm);
        }
        let program = lower(&plan, true, 1);
        let has_added = |stage: &Stage| match &stage.work {
            Work::Product { after: After::Add(value), .. } => Some(*value),
            _ => None,
        };
        let added = program.stages.iter().find_map(has_added).unwrap();
        let is_maker =
            |stage: &Stage| matches!(stage.work, Work::Norm { out, .. } if out == Some(added));
        let maker = program.stages.iter().position(is_maker).unwrap();
        assert_eq!(program.joined[maker], Joined::Alone);
        assert_eq!(normed(&plan).iter().filter(|name| name.contains("attn")).count(), 0);
    }

    fn is_long_norm(plan: &Plan, i: usize) -> bool {
        matches!(plan.ops[i], Op::Norm { groups: 1, .. }) && plan.widths[i] == 512
    }
}
