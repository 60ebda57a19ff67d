//! Steps of one row in one kernel (`kernels/persistent.cu`): which stages it can run. The stages
//! before them have kernels of their own.

use std::ops::Range;

use bodkin_gguf::Format;
use bodkin_model::{NormKind, Plan, Weight};

use crate::constants::{ATTENTION_TEAMS, CHOSEN_BYTES, CHUNK_COLS, MAX_CHOSEN, MAX_RESULTS};
use crate::constants::{MAX_TABLES, MMA_WORKSPACE_BYTES, PERSISTENT_BYTES, PERSISTENT_RULE_DIM};
use crate::constants::{PERSISTENT_WARPS, SHORT_NORM, TILE_ROWS};
use crate::kv_layout::KvLayout;
use crate::lower::{Attend, Content, Epilogue, Experts, Fusion, Matmul, MatmulFusion, Program};
use crate::lower::{Stage, Value, Work};
use crate::packed::{MmaLayout, PackedLayout};
use crate::shared_memory::{route_bytes, route_places};

/// Rows of the last matmul, at least: a tile of 16 for every block, also of larger devices.
const MIN_LAST_ROWS: usize = 4096;
/// Shared memory that the kernels declare statically.
pub(crate) const STATIC_BYTES: usize = 1728;
/// Shared memory for what a delta rule needs of a token.
const RULE_TOKEN_BYTES: usize = 4 * (3 * PERSISTENT_RULE_DIM + 4);
/// The largest workspace of a stage, on the devices that have the kernel.
const MAX_WORKSPACE_BYTES: usize = (227 << 10) - STATIC_BYTES - PERSISTENT_BYTES;

/// A persistent kernel, and what it can run.
pub(crate) struct Variant {
    /// Its name, and that of its file.
    pub(crate) name: &'static str,
    layouts: &'static [MmaLayout],
    /// Whether it has stages for norms, experts and recurrent layers, and activations of matmuls
    /// without a gate.
    has_experts: bool,
    /// Whether its attention can have softcaps, and read a KV cache in Q8_0.
    has_softcap_q8: bool,
}

/// All of them; the first that can run all stages is used.
pub(crate) const VARIANTS: [Variant; 5] = [
    Variant { name: "persistent", layouts: &DENSE, has_experts: false, has_softcap_q8: true },
    Variant {
        name: "persistent_s24",
        layouts: &[
            MmaLayout::F16,
            MmaLayout::S8,
            MmaLayout::S24F16,
            MmaLayout::S24S8,
            MmaLayout::S24S4,
        ],
        has_experts: false,
        has_softcap_q8: true,
    },
    Variant {
        name: "persistent_experts",
        layouts: &DENSE,
        has_experts: true,
        has_softcap_q8: false,
    },
    Variant {
        name: "persistent_experts_softcap_q8",
        layouts: &DENSE,
        has_experts: true,
        has_softcap_q8: true,
    },
    Variant { name: "persistent_cached", layouts: &DENSE, has_experts: true, has_softcap_q8: true },
];
/// The one that is used in place of those with experts where these are cached.
const CACHED: usize = 4;
const DENSE: [MmaLayout; 10] = [
    MmaLayout::F16,
    MmaLayout::S8,
    MmaLayout::S6x16,
    MmaLayout::U5,
    MmaLayout::U4,
    MmaLayout::S4x16,
    MmaLayout::U2x16,
    MmaLayout::Iq4,
    MmaLayout::Codebook,
    MmaLayout::Fp4,
];

/// The stages of a step of one row that one kernel runs: all from the first of them to the head.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Persistent {
    pub(crate) stages: Range<usize>,
    /// An index into [`VARIANTS`].
    pub(crate) variant: usize,
    /// Shared memory of a block for the input of any of the stages.
    pub(crate) workspace_bytes: usize,
    /// The input of the last matmul, or of its norm.
    pub(crate) last_input: Value,
}

/// A stage as the kernel runs it.
pub(crate) enum PersistentStage<'a> {
    Matmul(&'a Matmul, MatmulFusion),
    Attend(&'a Attend),
    /// One whose kernel the large one has as a function.
    Small(&'a Work),
}

impl Persistent {
    /// The index of the kernel in [`VARIANTS`].
    pub(crate) fn kernel(&self, caches_experts: bool) -> usize {
        if caches_experts && VARIANTS[self.variant].has_experts { CACHED } else { self.variant }
    }

    /// The stages that one kernel can run, if they are most of a step. The last one is a wide
    /// matmul whose results no other stage of the kernel reads: there all blocks reset the
    /// sentinels. Kernels of their own scale the logits.
    pub(crate) fn of(plan: &Plan, program: &Program, kv: KvLayout) -> Option<Persistent> {
        let stages = &program.stages;
        let last = stages.iter().rposition(|stage| matches!(stage.work, Work::Matmul(_)))?;
        let Work::Matmul(head) = &stages[last].work else { return None };
        let workspace = |variant: &Variant, i: usize| {
            let bytes = variant.workspace(plan, program, kv, i);
            bytes.filter(|&bytes| bytes <= MAX_WORKSPACE_BYTES)
        };
        let start_for = |variant: &Variant| {
            let cannot = |i: &usize| workspace(variant, *i).is_none();
            (0..=last).rev().find(cannot).map_or(0, |other| other + 1)
        };
        let starts = VARIANTS.map(|variant| start_for(&variant));
        let start = starts.into_iter().min()?;
        let variant = starts.iter().position(|&other| other == start)?;
        let bytes = (start..=last).filter_map(|i| workspace(&VARIANTS[variant], i));
        let is_gather = |stage: &&Stage| matches!(stage.work, Work::Gather(_));
        let is_sharded = stages.get(last + 1).filter(is_gather).is_some();
        let rows = head.rows(plan) / if is_sharded { program.devices } else { 1 };
        let is_wide = rows >= MIN_LAST_ROWS && head.epilogue == Epilogue::None;
        let can_follow =
            |stage: &Stage| matches!(stage.work, Work::Elementwise { .. } | Work::Gather(_));
        let are_last = head.gathers_outputs && stages[last + 1..].iter().all(can_follow);
        let is_awaitable = stages[..start].iter().all(|stage| is_awaitable(plan, &stage.work));
        let persistent = Persistent {
            stages: start..last + 1,
            variant,
            workspace_bytes: bytes.max().unwrap_or(0).next_multiple_of(16),
            last_input: head.norm.map_or(head.input, |norm| norm.input),
        };
        (is_wide && are_last && is_awaitable && 2 * start < last).then_some(persistent)
    }

    /// Whether a device with `blocks` multiprocessors can run the stages: another block than that
    /// which chooses experts has to take tiles, and a block has a place for `MAX_RESULTS` results
    /// of ungated ones.
    pub(crate) fn fits(&self, blocks: usize, plan: &Plan, program: &Program) -> bool {
        self.stages.clone().all(|i| match &program.stages[i].work {
            Work::Matmul(Matmul { operands, epilogue, experts: Some(experts), .. }) => {
                let weight = plan.weight(operands[0].weight);
                let tiles = experts.used * (weight.rows / experts.count).div_ceil(TILE_ROWS);
                let with_tiles = blocks_with_tiles(experts, program.fusions[i], blocks).max(1);
                let has_room = tiles.div_ceil(with_tiles) + experts.used <= MAX_RESULTS;
                blocks > 1 && (has_room || matches!(epilogue, Epilogue::Gate { .. }))
            }
            _ => true,
        })
    }

    /// The names of the stages that the kernel runs.
    pub(crate) fn stage_names(&self, program: &Program) -> Vec<String> {
        let is_run = |i: &usize| matches!(program.fusions[*i], Fusion::Runs(_));
        let stages = self.stages.clone().filter(is_run);
        stages.map(|i| program.stages[i].name.clone()).collect()
    }

    /// The stages that the kernel runs, without those that are fused into others.
    pub(crate) fn list<'a>(
        &self,
        program: &'a Program,
    ) -> impl Iterator<Item = PersistentStage<'a>> {
        self.stages.clone().filter_map(|i| {
            let Fusion::Runs(fusion) = program.fusions[i] else { return None };
            match &program.stages[i].work {
                Work::Matmul(matmul) => Some(PersistentStage::Matmul(matmul, fusion)),
                Work::Attend(attend) => Some(PersistentStage::Attend(attend)),
                work => Some(PersistentStage::Small(work)),
            }
        })
    }
}

/// Whether the persistent kernel can wait for the result of a stage before it: no value may have
/// the bits of the sentinel, all ones, as floats that come from outside may.
fn is_awaitable(plan: &Plan, work: &Work) -> bool {
    match work {
        Work::Input { .. } => false,
        Work::Embed { table, .. } => plan.weight(*table).format != Format::F32,
        _ => true,
    }
}

/// The blocks that take tiles of a matmul of experts: not the last one, which has just chosen them
/// and would be late, where the input exists before they are chosen.
pub(crate) fn blocks_with_tiles(experts: &Experts, fusion: Fusion, blocks: usize) -> usize {
    let is_summed = matches!(fusion, Fusion::Runs(MatmulFusion::Sum { .. }));
    blocks - usize::from(experts.route.is_some() && experts.shares_input && !is_summed)
}

/// Whether this is an all-gather that stores what the matmul does not.
fn gather_stores(stage: Option<&Stage>) -> bool {
    matches!(stage, Some(Stage { work: Work::Gather(gather), .. }) if !gather.are_stored)
}

impl Variant {
    /// The shared memory that stage `i` needs for its input; none if this kernel cannot run it.
    fn workspace(&self, plan: &Plan, program: &Program, kv: KvLayout, i: usize) -> Option<usize> {
        match (&program.stages[i].work, program.fusions[i]) {
            (Work::Norm(_), Fusion::FusedAway) => Some(0),
            // As much as the matmul that it is fused into, so that no range begins behind that.
            (_, Fusion::FusedAway) => self.workspace(plan, program, kv, i - 1),
            (Work::Norm(norm), _) if norm.kind == NormKind::Rms && norm.bias.is_none() => {
                let n = program.values[norm.input.0].content.stride() / norm.groups;
                // Elements and weights: of a row, or of the group of each warp.
                let bytes = if n > SHORT_NORM { 8 * n } else { PERSISTENT_WARPS * 8 * SHORT_NORM };
                (self.has_experts && n.is_multiple_of(4)).then_some(bytes)
            }
            // The kernel has no all-gather.
            (Work::Matmul(_), _) if gather_stores(program.stages.get(i + 1)) => None,
            (Work::Matmul(matmul), Fusion::Runs(fusion)) => {
                let weight = plan.weight(matmul.operands[0].weight);
                match PackedLayout::of(weight.format) {
                    PackedLayout::F32 => self.f32_workspace(matmul, weight, fusion),
                    PackedLayout::Mma(layout) if !self.layouts.contains(&layout) => None,
                    _ if matmul.experts.is_some() => {
                        self.expert_workspace(program, matmul, weight, fusion)
                    }
                    _ => self.matmul_workspace(matmul, weight, fusion),
                }
            }
            (Work::Route(route), _) => {
                let bytes = 4 * route_places(&route.routing) + route_bytes(&route.routing);
                self.has_experts.then_some(bytes)
            }
            (Work::DeltaRule(stage), _) => {
                let fits = stage.rule.head_dim <= PERSISTENT_RULE_DIM;
                (self.has_experts && fits).then_some(RULE_TOKEN_BYTES)
            }
            (
                Work::Conv(_)
                | Work::Scan(_)
                | Work::Elementwise { .. }
                | Work::ScaleBy { .. }
                | Work::Rotate(_)
                | Work::SliceConcat(_)
                | Work::ConvertInput { .. },
                _,
            ) => self.has_experts.then_some(0),
            (Work::Attend(attend), _) => {
                let is_known = plan.window_indices()[attend.slot] < MAX_TABLES;
                // A thread combines the splits of a column.
                let has_mma = kv.has_mma(&plan.slots[attend.slot])
                    && attend.attention.value_dim <= 32 * PERSISTENT_WARPS;
                let is_plain = attend.attention.softcap.is_none() && kv != KvLayout::Q8;
                let can = has_mma && attend.attention.causal && attend.kv.is_some() && is_known;
                let can = can && (is_plain || self.has_softcap_q8);
                can.then_some(ATTENTION_TEAMS * MMA_WORKSPACE_BYTES)
            }
            _ => None,
        }
    }

    /// Of a matmul with f32 weights: a row of weights, the input, and the weights of its norm.
    fn f32_workspace(
        &self,
        matmul: &Matmul,
        weight: &Weight,
        fusion: MatmulFusion,
    ) -> Option<usize> {
        let rows = if matches!(fusion, MatmulFusion::Norm(_)) { 3 } else { 2 };
        let is_plain = !matmul.gathers_outputs
            && matmul.norm.is_none()
            && matmul.experts.is_none()
            && matches!(matmul.epilogue, Epilogue::None | Epilogue::Act { .. })
            && matmul.operands.len() == 1;
        let can = self.has_experts && is_plain && weight.cols.is_multiple_of(4);
        can.then_some(4 * rows * weight.cols)
    }

    /// Of a matmul of experts.
    fn expert_workspace(
        &self,
        program: &Program,
        matmul: &Matmul,
        weight: &Weight,
        fusion: MatmulFusion,
    ) -> Option<usize> {
        let experts = matmul.experts?;
        let is_half = |out: Value| matches!(program.values[out.0].content, Content::F16(_));
        let inputs = match (matmul.epilogue, fusion) {
            (Epilogue::Gate { out, .. }, _) => (experts.shares_input && is_half(out)).then_some(1),
            (_, MatmulFusion::Sum { .. }) => {
                (!experts.shares_input || experts.used == 1).then_some(experts.used)
            }
            // Parts that have matrices of their own.
            _ if experts.route.is_none() => Some(experts.used),
            _ => (experts.shares_input && matmul.operands.len() == 1).then_some(1),
        };
        let can = self.has_experts && experts.used <= MAX_CHOSEN;
        let cols = weight.cols.next_multiple_of(CHUNK_COLS);
        let norm = if matches!(fusion, MatmulFusion::Norm(_)) { 4 * cols } else { 0 };
        let bytes = inputs? * 2 * cols + CHOSEN_BYTES + norm;
        can.then_some(bytes)
    }

    /// Of any other matmul.
    fn matmul_workspace(
        &self,
        matmul: &Matmul,
        weight: &Weight,
        fusion: MatmulFusion,
    ) -> Option<usize> {
        if matches!(matmul.epilogue, Epilogue::Act { .. }) && !self.has_experts {
            return None;
        }
        let is_normed = matmul.norm.is_some() || matches!(fusion, MatmulFusion::Norm(_));
        let cols = weight.cols.next_multiple_of(CHUNK_COLS);
        // Chosen experts lie before the norm's weights.
        let chosen = if self.has_experts { CHOSEN_BYTES } else { 0 };
        let weights = if is_normed { chosen + 4 * cols } else { 0 };
        (!is_normed || weight.cols.is_multiple_of(4)).then_some(2 * cols + weights)
    }
}

#[cfg(test)]
mod tests {
    use bodkin_model::Op;

    use super::*;
    use crate::lower::{lower, plan_of};

    /// The variant for experts whose attention is plain.
    const OF_EXPERTS: usize = 2;

    fn lowered(model: &str) -> (Plan, Program) {
        let plan = plan_of(model);
        let program = lower(&plan, true, 1);
        (plan, program)
    }

    #[test]
    fn experts_run_in_the_kernel_for_them_alone() {
        let (plan, program) = lowered("qwen3moe-q4_k_m");
        let (plain, experts) = (&VARIANTS[0], &VARIANTS[OF_EXPERTS]);
        let first = program.stages.iter().position(|stage| matches!(stage.work, Work::Norm(_)));
        let run = first.unwrap()..program.stages.len();
        for i in run.clone() {
            let name = &program.stages[i].name;
            assert!(experts.workspace(&plan, &program, KvLayout::F16, i).is_some(), "{name}");
        }
        assert!(run.clone().any(|i| plain.workspace(&plan, &program, KvLayout::F16, i).is_none()));
        // The weighted sum and the residual are fused into the matmul before them.
        let fusions = &program.fusions;
        let is_sum = |i: &usize| matches!(fusions[*i], Fusion::Runs(MatmulFusion::Sum { .. }));
        let of_sums: Vec<usize> = run.clone().filter(is_sum).collect();
        for &i in &of_sums {
            let bytes =
                [i, i + 1, i + 2].map(|i| experts.workspace(&plan, &program, KvLayout::F16, i));
            assert!(
                bytes.iter().all(|other| *other == bytes[0]),
                "no run begins in a sum: {bytes:?}"
            );
        }
        let sums = of_sums.len();
        let is_norm = |i: &usize| matches!(program.stages[*i].work, Work::Norm(_));
        let unlisted = run.filter(|&i| fusions[i] == Fusion::FusedAway);
        assert!(sums > 0);
        assert_eq!(unlisted.filter(|i| !is_norm(i)).count(), 2 * sums);
    }

    #[test]
    fn experts_beside_a_shared_one_run_in_the_kernel() {
        let (mut plan, _) = lowered("nemotron-h-moe-latent");
        for op in plan.ops.clone() {
            if let Op::ExpertLinear { weight, .. } = op {
                plan.weights[weight.0].format = Format::Q8_0;
            }
        }
        let program = lower(&plan, true, 1);
        let is_sum =
            |fusion: &Fusion| matches!(fusion, Fusion::Runs(MatmulFusion::Sum { added: None, .. }));
        assert!(program.fusions.iter().any(is_sum));
        for name in ["ffn_up_exps", "ffn_down_exps", "expert_sum"] {
            let i = program.stages.iter().position(|stage| stage.name == name).unwrap();
            let bytes = VARIANTS[OF_EXPERTS].workspace(&plan, &program, KvLayout::F16, i);
            assert!(bytes.is_some(), "{name}");
        }
    }

    #[test]
    fn one_kernel_of_each_kind_has_softcaps_and_reads_bytes_of_the_kv_cache() {
        let can = |model, kv| {
            let (plan, program) = lowered(model);
            let is_attention = |i: &usize| matches!(program.stages[*i].work, Work::Attend(_));
            let attention = (0..program.stages.len()).find(is_attention).unwrap();
            VARIANTS.map(|variant| variant.workspace(&plan, &program, kv, attention).is_some())
        };
        assert_eq!(can("qwen3moe-q4_k_m", KvLayout::F16), [true; 5]);
        for (model, kv) in [("qwen3moe-q4_k_m", KvLayout::Q8), ("gemma2", KvLayout::F16)] {
            assert_eq!(can(model, kv), [true, true, false, true, true]);
        }
        assert_eq!(can("qwen3moe-q4_k_m", KvLayout::F32), [false; 5]);
    }

    #[test]
    fn recurrent_layers_and_shared_keys_run_in_the_kernel() {
        for (model, layers) in
            [("mamba2", "scan"), ("qwen35", "delta_rule"), ("gemma4-e2b", "attention")]
        {
            let (mut plan, _) = lowered(model);
            // As quantised files have them.
            for op in plan.ops.clone() {
                if let Op::Linear { weight, .. } | Op::Logits { weight, .. } = op {
                    plan.weights[weight.0].format = Format::Q8_0;
                }
            }
            let program = lower(&plan, true, 1);
            let stages = &program.stages;
            assert!(stages.iter().any(|stage| stage.name == layers), "{model}");
            let last = stages.iter().rposition(|stage| matches!(stage.work, Work::Embed { .. }));
            for (i, stage) in stages.iter().enumerate().skip(last.unwrap() + 1) {
                let bytes = VARIANTS[OF_EXPERTS].workspace(&plan, &program, KvLayout::F16, i);
                assert!(bytes.is_some(), "{model}: {}", stage.name);
            }
        }
    }

    #[test]
    fn a_block_has_room_for_the_results_that_it_sums() {
        let (mut plan, program) = lowered("qwen3moe-q4_k_m");
        let all = 0..program.stages.len();
        let of_experts = |i: usize| match &program.stages[i].work {
            Work::Matmul(Matmul { operands, experts: Some(experts), .. }) => {
                Some((operands[0].weight, *experts))
            }
            _ => None,
        };
        let is_summed =
            |i: &usize| matches!(program.fusions[*i], Fusion::Runs(MatmulFusion::Sum { .. }));
        let (gated, _) = all.clone().find_map(of_experts).unwrap();
        let (weight, experts) = all.clone().filter(is_summed).find_map(of_experts).unwrap();
        let blocks = 100;
        let persistent = Persistent {
            stages: all,
            variant: OF_EXPERTS,
            workspace_bytes: 0,
            last_input: program.output,
        };
        let fits = |blocks, plan: &Plan| persistent.fits(blocks, plan, &program);
        assert!(fits(blocks, &plan));
        assert!(!fits(1, &plan), "another block has to choose");
        let up = Experts { route: Some(program.output), shares_input: true, ..experts };
        let runs = |fusion| blocks_with_tiles(&up, Fusion::Runs(fusion), blocks);
        assert_eq!(runs(MatmulFusion::None), blocks - 1, "that which chose them would be late");
        let sum = MatmulFusion::Sum { added: None, out: program.output };
        assert_eq!(runs(sum), blocks, "sums are of what comes after the choice");
        let parts = Experts { route: None, ..up };
        let with_tiles = blocks_with_tiles(&parts, Fusion::Runs(MatmulFusion::None), blocks);
        assert_eq!(with_tiles, blocks, "nothing is chosen");
        let most = (MAX_RESULTS - experts.used) * blocks / experts.used;
        plan.weights[weight.0].rows = experts.count * TILE_ROWS * most;
        assert!(fits(blocks, &plan));
        plan.weights[weight.0].rows += experts.count * TILE_ROWS * blocks;
        assert!(!fits(blocks, &plan));
        plan.weights[gated.0].rows = std::mem::replace(&mut plan.weights[weight.0].rows, 0);
        assert!(fits(blocks, &plan), "results that are not summed need no room");
    }
}
