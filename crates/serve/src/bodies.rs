//! Bodies of requests as they arrive: each within a time and a size, and all together within the
//! bytes that the server gives them. The bytes are those on the wire; parsed JSON takes several
//! times as much. They count until the answer is made, or its stream begins.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::{ApiError, Result};
use crate::options::ServerOptions;

/// The bytes that the bodies of all requests may have together, a permit for each that is free.
#[derive(Clone, Debug)]
pub struct BodyBudget(Arc<Semaphore>);

impl BodyBudget {
    /// Takes this many bytes until the permit drops; none if fewer are free.
    pub fn take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let bytes = u32::try_from(bytes).ok()?;
        Arc::clone(&self.0).try_acquire_many_owned(bytes).ok()
    }
}

/// The limits of request bodies, and the byte budget that all of them share.
#[derive(Clone)]
pub(crate) struct Bodies {
    /// Of one body.
    max_bytes: usize,
    timeout: Duration,
    pub(crate) budget: BodyBudget,
}

/// A body, and its bytes of the budget, which are free again when this drops.
pub(crate) type HeldBody = (Vec<u8>, Option<OwnedSemaphorePermit>);

impl Bodies {
    pub(crate) fn new(options: &ServerOptions) -> Bodies {
        // One of the largest size always fits.
        let budget = options.bodies_bytes.max(options.body_bytes).min(Semaphore::MAX_PERMITS);
        let budget = BodyBudget(Arc::new(Semaphore::new(budget)));
        Bodies { max_bytes: options.body_bytes, timeout: options.body_timeout, budget }
    }

    /// Reads a body to its end.
    pub(crate) async fn read(&self, body: Body) -> Result<HeldBody> {
        let late = || {
            let message = format!("the body took longer than {} s", self.timeout.as_secs_f64());
            ApiError { status: StatusCode::REQUEST_TIMEOUT, ..ApiError::bad_request(message) }
        };
        timeout(self.timeout, self.collect(body)).await.unwrap_or_else(|_| Err(late()))
    }

    async fn collect(&self, body: Body) -> Result<HeldBody> {
        let mut chunks = body.into_data_stream();
        let (mut bytes, mut held) = (Vec::new(), None::<OwnedSemaphorePermit>);
        while let Some(chunk) = chunks.next().await {
            let failed = |error| ApiError::bad_request(format!("the body is not whole: {error}"));
            let chunk = chunk.map_err(failed)?;
            if chunk.len() > self.max_bytes - bytes.len() {
                let message = format!("the body is over the limit of {} bytes", self.max_bytes);
                let status = StatusCode::PAYLOAD_TOO_LARGE;
                return Err(ApiError { status, ..ApiError::bad_request(message) });
            }
            let full =
                || ApiError::unavailable("the bodies of all requests are too large together");
            let share = self.budget.take(chunk.len()).ok_or_else(full)?;
            match &mut held {
                Some(held) => held.merge(share),
                None => held = Some(share),
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok((bytes, held))
    }
}
