//! A backend whose models skip small inputs: each model that it loads first reads a short text to
//! learn what is small. It knows no particular backend.

use std::sync::{Arc, Mutex, PoisonError};

use bodkin_backend::{Backend, Error, KvType, Limits, Memory, Model, Progress, Result};
use bodkin_compress::magnitudes::Magnitudes;
use bodkin_engine::{Error as EngineError, Tokenizer, steps};
use bodkin_gguf::File;
use bodkin_model::Plan;

/// What is read: prose, speech, a list, numbers and code, as models meet them.
const TEXT: &str = include_str!("skipping.txt");
/// How it is cut into words where a model's way is not known: its size matters, and no word does.
const ANY_WAY: &str = "gpt-2";
/// Tokens of it at most.
const TOKENS: usize = 256;

/// Another backend, with thresholds.
pub(crate) struct Skipping {
    pub(crate) backend: Box<dyn Backend>,
    /// The share of inputs that is skipped.
    pub(crate) share: f64,
}

impl Backend for Skipping {
    fn name(&self) -> String {
        format!("{}, {:.0} % of gated inputs skipped", self.backend.name(), 100.0 * self.share)
    }

    fn threads(&self) -> usize {
        self.backend.threads()
    }

    fn kv_type(&self) -> KvType {
        self.backend.kv_type()
    }

    fn bandwidth(&self) -> Result<f64> {
        self.backend.bandwidth()
    }

    fn available_memory(&self) -> Option<u64> {
        self.backend.available_memory()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        self.backend.memory(plan, limits)
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
            plan.gated_matmuls().iter().map(|&id| plan.weight(id).name.as_str()).collect();
        let mut magnitudes = Magnitudes::of(names.iter().copied());
        read(&mut *model, file, &mut magnitudes)
            .map_err(|error| Error::Config(format!("--activation-sparsity: {error}")))?;
        let threshold = |name: &&str| magnitudes.threshold(name, self.share).unwrap_or(0.0);
        let thresholds: Vec<f32> = names.iter().map(threshold).collect();
        let (reading_less, all) = (model.set_input_thresholds(&thresholds)?, thresholds.len());
        let others = match all - reading_less {
            0 => String::new(),
            others => format!("; {others} are read whole, with no gain"),
        };
        let line = format!("{reading_less} of {all} down projections read less{others}");
        // Of the same model once.
        static SAID: Mutex<String> = Mutex::new(String::new());
        let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
        if *said != line {
            eprintln!("{line}");
            *said = line;
        }
        Ok(model)
    }
}

/// Reads the text, as much of it as the model was loaded for.
fn read(
    model: &mut dyn Model,
    file: &File,
    magnitudes: &mut Magnitudes,
) -> bodkin_engine::Result<()> {
    let tokenizer = match Tokenizer::from_metadata(file.metadata()) {
        Err(EngineError::UnknownPreTokenizer { .. }) => {
            Tokenizer::from_metadata_assuming(file.metadata(), ANY_WAY)?
        }
        other => other?,
    };
    let mut tokens = tokenizer.encode(TEXT, true, false);
    tokens.truncate(TOKENS.min(bodkin_engine::Pages::of(model).longest_sequence()));
    let step = model.limits().tokens;
    steps(model, &tokens, step, |_| false, Some(magnitudes), |_, _| ())
}
