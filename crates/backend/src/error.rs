//! Why a plan could not be loaded or a step not be run.

/// What can go wrong in a backend.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The backend has no way to compute something in the plan.
    #[error("{backend} cannot run {what}")]
    Unsupported {
        /// The backend's name.
        backend: String,
        /// The operation or format.
        what: String,
    },
    /// The step asks for more than the model was sized for, or contradicts itself.
    #[error("the step has {found} {what}, the model was loaded for {limit}")]
    Limit {
        /// Tokens, output rows, pages, ids.
        what: &'static str,
        /// What the batch has.
        found: usize,
        /// What the model can take.
        limit: usize,
    },
    /// A device's driver has no memory of the host for experts.
    #[error("{0}")]
    HostMemory(String),
    /// A setting of the backend makes no sense here.
    #[error("{0}")]
    Config(String),
}

impl Error {
    /// The answer of a backend that cannot skip small activations.
    pub fn no_thresholds(backend: &str, thresholds: &[f32]) -> Error {
        let what = format!("{} matmuls with activation thresholds", thresholds.len());
        Error::Unsupported { backend: backend.to_owned(), what }
    }
}

/// The result of loading or running.
pub type Result<T> = std::result::Result<T, Error>;
