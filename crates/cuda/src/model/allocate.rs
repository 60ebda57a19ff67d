//! What a loaded model allocates besides its weights.

use bodkin_backend::Result;
use bodkin_gguf::File;
use bodkin_model::{Plan, Rope};

use crate::lower::Program;
use crate::sizes::Sizes;
use crate::step::Addresses;

/// Allocates what steps read and write, and the state between them.
pub(super) fn addresses(
    plan: &Plan,
    program: &Program,
    sizes: &Sizes,
    take: &mut dyn FnMut(usize, &str) -> Result<u64>,
) -> Result<Addresses> {
    let mut addresses = Addresses {
        arena: take(sizes.arena.bytes as usize, "the values of a step")?,
        partials: take(sizes.partial_bytes, "the splits of attention")?,
        polled_partials: take(sizes.polled_partial_bytes, "the splits of a row's attention")?,
        swizzled: take(sizes.swizzled_bytes, "the swizzled input of a matmul")?,
        slice_sums: take(sizes.slice_sum_bytes, "the sums of a matmul's slices")?,
        groups: take(sizes.group_bytes, "the groups of experts' rows")?,
        permutation: take(sizes.permutation_bytes, "the permutation of experts' rows")?,
        arrival_counts: take(sizes.arrival_bytes, "the counts of attention's blocks")?,
        entry_scores: take(sizes.scores.bytes(), "the scores of an indexer")?,
        non_aliased: take(sizes.non_aliased.bytes as usize, "the values of a row")?,
        window_indices: plan.window_indices(),
        ..Addresses::default()
    };
    take_state(sizes, program, &mut addresses, take)?;
    for &bytes in &sizes.angle_bytes {
        addresses.angles.push(take(bytes, "the angles")?);
    }
    Ok(addresses)
}

/// Allocates the state between steps: KV cache, recurrent state, expert counts.
fn take_state(
    sizes: &Sizes,
    program: &Program,
    addresses: &mut Addresses,
    take: &mut dyn FnMut(usize, &str) -> Result<u64>,
) -> Result<()> {
    for [keys, values] in &sizes.kv_bytes {
        addresses.kv.push([take(*keys, "the keys")?, take(*values, "the values")?]);
    }
    for &bytes in &sizes.state_bytes {
        addresses.states.push(take(bytes, "the recurrent state")?);
    }
    for &experts in &program.routings {
        addresses.expert_counts.push(take(4 * experts, "the counts of experts")?);
    }
    Ok(())
}

/// The inverse frequencies of a rotation, in half turns a position, and its attention factor.
pub(super) fn inverse_frequencies(plan: &Plan, file: &File, rope: &Rope) -> (Vec<f64>, f32) {
    let factors = rope.factors.map(|id| {
        let weight = plan.weight(id);
        let mut values = vec![0.0; weight.rows * weight.cols];
        let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
        weight.format.dequantize(file.data(tensor), &mut values);
        values
    });
    let table = rope.table(factors.as_deref());
    let half_turn = std::f64::consts::PI;
    (table.inverse_frequencies.iter().map(|f| f / half_turn).collect(), table.attention_factor)
}
