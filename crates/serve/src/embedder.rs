//! The server's models for other protocols than HTTP: the same keys, queues and limits.

use std::future::Future;
use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode};
use tokio::sync::watch;

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::bodies::BodyBudget;
use crate::embeddings::compute;
use crate::error::ApiError;
use crate::options::ServerOptions;

/// Embeds texts with the models of a server.
#[derive(Clone)]
pub struct Embedder {
    app: SharedApp,
    stop: watch::Receiver<bool>,
}

/// A caller whose key was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted(Caller);

/// Why a request was refused or has failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The status that HTTP would have.
    pub status: StatusCode,
    /// What is wrong, in one line.
    pub message: String,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Refusal {
        Refusal { status: error.status, message: error.message }
    }
}

impl Embedder {
    pub(crate) fn new(app: &SharedApp, stop: watch::Receiver<bool>) -> Embedder {
        Embedder { app: Arc::clone(app), stop }
    }

    /// The options of the server.
    pub fn options(&self) -> &ServerOptions {
        &self.app.options
    }

    /// What the bodies of all requests share.
    pub fn body_budget(&self) -> BodyBudget {
        self.app.bodies.budget.clone()
    }

    /// Ends when the server is asked to stop.
    pub fn stopped(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut stop = self.stop.clone();
        // If the server is gone, so is the sender.
        async move { drop(stop.wait_for(|stop| *stop).await) }
    }

    /// Checks the key of a request and counts the request.
    ///
    /// # Errors
    /// If the key is missing, wrong or used up.
    pub fn admit(&self, headers: &HeaderMap) -> Result<Admitted, Refusal> {
        Ok(Admitted(self.app.keys.admit(headers)?))
    }

    /// The names of the models.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.app.pool.entries().iter().map(|entry| entry.spec.id.as_str())
    }

    /// Elements of the vectors of a model, which is loaded if need be.
    ///
    /// # Errors
    /// If there is no such model, it makes no vectors, or cannot be loaded.
    pub async fn width(&self, model: &str) -> Result<usize, Refusal> {
        let lease = self.app.model(Some(model)).await?;
        let encoder = lease.encoder()?;
        if encoder.is_reranker() {
            let message = format!("{} scores documents and makes no vectors", lease.id());
            return Err(ApiError::bad_request(message).into());
        }
        Ok(encoder.width())
    }

    /// The vectors of texts, in order. Dropping the future ends the request.
    ///
    /// # Errors
    /// As [`Embedder::width`], if a text is too long, or if the queue of the model is full.
    pub async fn embed(
        &self,
        caller: Admitted,
        model: &str,
        texts: Vec<String>,
    ) -> Result<Vec<Vec<f32>>, Refusal> {
        let lease = self.app.model(Some(model)).await?;
        let options = lease.encoder()?.options().clone();
        let embedded = compute(&self.app, caller.0, lease, options, move |encoder| {
            texts.iter().map(|text| encoder.tokenize(text)).collect()
        });
        Ok(embedded.await?.vectors)
    }
}
