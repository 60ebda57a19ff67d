//! What a kernel that runs a whole step of one row makes together, where single kernels do not: a
//! norm with all products that read it, and experts' products with the weighted sum of their
//! results and what that is added to.

use bodkin_model::{NormKind, Plan};

use super::{After, Factor, Function, INLINED_COLS, InputNorm, Program, Stage, Value, Work};
use crate::planes::Kind;

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
        Work::Product { factors, is_outputs, experts, .. } => {
            let is_exact = Kind::of(plan.weight(factors[0].weight).format) == Kind::F32;
            // Each expert meets the same input.
            let shares = experts.is_none_or(|experts| experts.is_shared && !is_exact);
            shares && !is_outputs
        }
        _ => false,
    };
    let all_can = readers.iter().all(|&reader| program.stages.get(reader).is_some_and(can));
    let fits = INLINED_COLS.contains(&width) && width.is_multiple_of(4);
    if fits && all_can { readers } else { Vec::new() }
}
