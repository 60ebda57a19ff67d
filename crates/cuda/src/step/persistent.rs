//! The persistent kernel: the list of its stages, and its launch.

use bodkin_backend::Result;

use super::Step;
use crate::constants::{OP_ATTENTION, OP_CONV, OP_CONVERT_INPUT, OP_DELTA_RULE, OP_ELEMENTWISE};
use crate::constants::{OP_GATED, OP_GEMV_F32, OP_NORM, OP_ROTATE, OP_ROUTE, OP_SCAN};
use crate::constants::{OP_SLICE_CONCAT, PERSISTENT_BYTES, PERSISTENT_WARPS};
use crate::driver::Kernel;
use crate::lower::{Experts, Fusion, MatmulFusion, Work};
use crate::packed::{MmaLayout, PackedLayout};
use crate::parameters as p;
use crate::persistent::{Persistent, PersistentStage, blocks_with_tiles};

/// Threads of a block: the warps that compute, and four for the producer and the watchdog.
const THREADS: usize = 32 * PERSISTENT_WARPS + 128;

impl Step<'_> {
    /// The stages of the persistent kernel as it reads them.
    pub(crate) fn persistent_stages(&self, persistent: &Persistent) -> Vec<p::Stage> {
        persistent.list(self.program).map(|stage| self.persistent_stage(&stage)).collect()
    }

    fn persistent_stage(&self, stage: &PersistentStage<'_>) -> p::Stage {
        match stage {
            PersistentStage::Matmul(matmul, fusion) => {
                let mut parameters = self.matmul_parameters(1, matmul);
                let shape = &self.weights[matmul.operands[0].weight.0].shape;
                match fusion {
                    MatmulFusion::None => {}
                    MatmulFusion::Norm(norm) => self.set_input_norm(&mut parameters, norm),
                    MatmulFusion::Sum { added, out } => {
                        // Also a single expert's input, which counts as shared.
                        parameters.shares_input = 0;
                        if let Some(added) = added {
                            parameters.residual = self.result_address(*added, shape, 1).0;
                        }
                        // The partial results that blocks leave to those that sum them.
                        parameters.matrices[1].out = parameters.matrices[0].out;
                        parameters.matrices[0].out = self.result_address(*out, shape, 1).0;
                    }
                }
                let blocks = self.device.processors as usize;
                parameters.blocks = match &matmul.experts {
                    Some(experts) => {
                        blocks_with_tiles(experts, Fusion::Runs(*fusion), blocks) as u32
                    }
                    None => blocks as u32,
                };
                if let Some(Experts { route: None, used, .. }) = matmul.experts {
                    // Part `i` has matrix `i`. The weights that a route has before the numbers
                    // are not read.
                    parameters.route = self.at.numbers - 4 * used as u64;
                    parameters.shares_input = 0;
                }
                let op = match shape.layout {
                    PackedLayout::F32 => OP_GEMV_F32,
                    PackedLayout::Mma(layout) => matmul_op(layout, matmul.is_gated()),
                };
                p::Stage::new(op, &parameters)
            }
            PersistentStage::Attend(attend) => {
                let mut parameters = self.attend_parameters(attend, true);
                parameters.partials = self.at.polled_partials;
                p::Stage::new(OP_ATTENTION, &parameters)
            }
            PersistentStage::Small(work) => self.small_stage(work),
        }
    }

    fn small_stage(&self, work: &Work) -> p::Stage {
        match work {
            Work::Norm(norm) => p::Stage::new(OP_NORM, &self.norm_parameters(norm)),
            Work::Route(route) => p::Stage::new(OP_ROUTE, &self.route_parameters(route)),
            Work::Conv(conv) => p::Stage::new(OP_CONV, &self.conv_parameters(conv)),
            Work::Scan(scan) => p::Stage::new(OP_SCAN, &self.scan_parameters(scan)),
            Work::DeltaRule(rule) => p::Stage::new(OP_DELTA_RULE, &self.rule_parameters(rule)),
            Work::Elementwise { function, a, b, out, half_out } => {
                let parameters =
                    self.elementwise_parameters(*function, (*a, *b), (*out, *half_out));
                p::Stage::new(OP_ELEMENTWISE, &parameters)
            }
            Work::ScaleBy { input, weight, out } => {
                let parameters = self.scale_by_parameters(*input, *weight, *out);
                p::Stage::new(OP_ELEMENTWISE, &parameters)
            }
            Work::Rotate(rotate) => p::Stage::new(OP_ROTATE, &self.rotate_parameters(rotate)),
            Work::SliceConcat(slice_concat) => {
                p::Stage::new(OP_SLICE_CONCAT, &self.slice_concat_parameters(slice_concat))
            }
            Work::ConvertInput { input, halves, out } => {
                let parameters = self.convert_input_parameters(*input, *halves, *out);
                p::Stage::new(OP_CONVERT_INPUT, &parameters)
            }
            _ => unreachable!("the kernel has no such stage"),
        }
    }

    /// Launches the persistent kernel.
    pub(crate) fn run_persistent(&self, kernel: Kernel, persistent: &Persistent) -> Result<()> {
        let last_input = persistent.last_input;
        let last_input_bytes = self.program.values[last_input.0].bytes(1, 1);
        let parameters = p::PersistentStep {
            stages: self.at.persistent_stages,
            metadata: self.at.metadata,
            values: self.at.non_aliased,
            last_input: self.address(last_input),
            stalled: self.at.stalled_stages,
            stage_count: persistent.list(self.program).count() as u32,
            workspace_bytes: persistent.workspace_bytes as u32,
            values_len: (self.sizes.reset_bytes / 16) as u32,
            last_input_len: last_input_bytes.div_ceil(16) as u32,
        };
        let grid = [self.device.processors as usize, 1, 1];
        let shared = PERSISTENT_BYTES + persistent.workspace_bytes;
        // SAFETY: the list has `count` stages, whose values have memory of their own, which ends
        // at multiples of 16 bytes.
        unsafe { self.device.launch(kernel, grid, THREADS, shared, &parameters) }
    }
}

/// The op code of a matmul.
fn matmul_op(layout: MmaLayout, is_gated: bool) -> u32 {
    layout as u32 + if is_gated { OP_GATED } else { 0 }
}
