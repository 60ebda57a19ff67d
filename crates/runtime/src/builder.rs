//! The options of a load, one method each.

use bodkin_backend::{ExpertBudget, ExpertStore, KvType};
use bodkin_cpu::Sparse;

use crate::error::Result;
use crate::model_file::ModelFile;
use crate::options::Options;
use crate::progress::{Progress, Reporter};

/// A model's name with the options to load it, made by [`crate::Model::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    name: String,
    pub(crate) options: Options,
    reporter: Reporter,
}

impl Builder {
    /// All options have their defaults. [`crate::source::find`] describes the names.
    pub fn new(name: &str) -> Builder {
        Builder {
            name: name.to_owned(),
            options: Options::default(),
            reporter: Reporter::default(),
        }
    }

    /// Sets all options at once.
    pub fn options(self, options: Options) -> Builder {
        Builder { options, ..self }
    }

    /// Sets the device: `auto`, `cpu`, `cuda[:N,..]` or `wgpu[:N]`, as [`Options::device`] says.
    pub fn device(mut self, device: &str) -> Builder {
        self.options.device = device.to_owned();
        self
    }

    /// Puts only the last `layers` layers on the GPU.
    pub fn gpu_layers(mut self, layers: usize) -> Builder {
        self.options.gpu_layers = Some(layers);
        self
    }

    /// Sets how much memory of the device the experts of a model may take.
    pub fn expert_budget(mut self, budget: ExpertBudget) -> Builder {
        self.options.expert_budget = budget;
        self
    }

    /// Sets where a GPU finds the experts without a slot.
    pub fn expert_store(mut self, store: ExpertStore) -> Builder {
        self.options.expert_store = store;
        self
    }

    /// Sets the number of CPU threads, at most one for each core.
    pub fn threads(mut self, threads: usize) -> Builder {
        self.options.threads = Some(threads);
        self
    }

    /// Sets the context size in tokens.
    pub fn ctx_size(mut self, tokens: usize) -> Builder {
        self.options.ctx_size = Some(tokens);
        self
    }

    /// Sets the most tokens of one step, the prefill chunk.
    pub fn batch_size(mut self, tokens: usize) -> Builder {
        self.options.batch_size = Some(tokens);
        self
    }

    /// Sets the most requests that run at the same time.
    pub fn parallel(mut self, requests: usize) -> Builder {
        self.options.parallel = requests;
        self
    }

    /// Sets the data type of the KV cache.
    pub fn kv_type(mut self, kv_type: KvType) -> Builder {
        self.options.kv_type = kv_type;
        self
    }

    /// Uses the built-in launch shapes of a GPU's matmuls instead of measuring them.
    pub fn no_tune(mut self) -> Builder {
        self.options.no_tune = true;
        self
    }

    /// Sets whether weights of sparse formats are stored without their zeros.
    pub fn sparse(mut self, sparse: Sparse) -> Builder {
        self.options.sparse = sparse;
        self
    }

    /// Calls `callback` with the events of the download and of the load.
    pub fn on_progress(
        mut self,
        callback: impl Fn(Progress<'_>) + Send + Sync + 'static,
    ) -> Builder {
        self.reporter = Reporter::new(callback);
        self
    }

    /// Finds the model and reads its header.
    ///
    /// # Errors
    /// If the model is not found, or its file has no plan.
    pub fn find(&self) -> Result<ModelFile> {
        ModelFile::find(&self.name, &self.reporter)
    }
}
