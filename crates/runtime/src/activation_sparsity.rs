//! A backend whose models skip small inputs of down projections. Each model that it loads first
//! reads a short text, from which the thresholds follow. It knows no particular backend.

mod magnitudes;

use std::sync::Arc;

use bodkin_backend::{
    Backend, DeviceInfo, Error, KvType, Limits, Memory, Model, Progress, Result, StoredFormat,
};
use bodkin_engine::{Error as EngineError, Tokenizer, steps};
use bodkin_gguf::File;
use bodkin_model::Plan;

use crate::progress::Reporter;
use magnitudes::Magnitudes;

/// The calibration text: prose, speech, a list, numbers and code.
const TEXT: &str = include_str!("activation_sparsity.txt");
/// The pre-tokenizer for files whose own is unknown. Thresholds hardly depend on it.
const FALLBACK_PRE_TOKENIZER: &str = "gpt-2";
/// The most calibration tokens.
const MAX_TOKENS: usize = 256;

/// Another backend, with thresholds for the inputs of down projections.
pub(crate) struct ActivationSparsity {
    pub(crate) backend: Box<dyn Backend>,
    /// The share of inputs that is skipped.
    pub(crate) share: f64,
    pub(crate) reporter: Reporter,
}

impl Backend for ActivationSparsity {
    fn name(&self) -> String {
        format!("{}, {:.0} % of gated inputs skipped", self.backend.name(), 100.0 * self.share)
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        self.backend.devices()
    }

    fn threads(&self) -> usize {
        self.backend.threads()
    }

    fn kv_type(&self) -> KvType {
        self.backend.kv_type()
    }

    fn measure_bandwidth(&self) -> Result<f64> {
        self.backend.measure_bandwidth()
    }

    fn available_memory(&self) -> Option<u64> {
        self.backend.available_memory()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        self.backend.memory(plan, limits)
    }

    fn stored_formats(&self, plan: &Plan) -> Vec<StoredFormat> {
        self.backend.stored_formats(plan)
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let mut model = self.backend.load(Arc::clone(&plan), file, limits, progress)?;
        let names: Vec<&str> =
            plan.sparse_input_matmuls().iter().map(|&id| plan.weight(id).name.as_str()).collect();
        let mut magnitudes = Magnitudes::of(names.iter().copied());
        calibrate(&mut *model, file, &mut magnitudes)
            .map_err(|error| Error::Config(format!("activation sparsity: {error}")))?;
        let threshold = |name: &&str| magnitudes.threshold(name, self.share).unwrap_or(0.0);
        let thresholds: Vec<f32> = names.iter().map(threshold).collect();
        let (sparse, all) = (model.set_activation_thresholds(&thresholds)?, thresholds.len());
        let others = match all - sparse {
            0 => String::new(),
            others => format!("; {others} read all weights, with no gain"),
        };
        self.reporter.note(&format!("{sparse} of {all} down projections skip weights{others}"));
        Ok(model)
    }
}

/// Reads the calibration text, or as much of it as the model has context for.
fn calibrate(
    model: &mut dyn Model,
    file: &File,
    magnitudes: &mut Magnitudes,
) -> bodkin_engine::Result<()> {
    let tokenizer = match Tokenizer::from_metadata(file.metadata()) {
        Err(EngineError::UnknownPreTokenizer { .. }) => {
            Tokenizer::from_metadata_assuming(file.metadata(), FALLBACK_PRE_TOKENIZER)?
        }
        other => other?,
    };
    let mut tokens = tokenizer.try_encode(TEXT, true, false)?;
    tokens.truncate(MAX_TOKENS.min(bodkin_engine::Pages::of(model).longest_sequence()));
    let step = model.limits().tokens;
    steps(model, &tokens, step, |_| false, Some(magnitudes), |_, _| ())
}
