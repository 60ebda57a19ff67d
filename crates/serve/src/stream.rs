//! Streamed answers: server-sent events and lines of JSON. All events that are there are written
//! at once, so that a busy server makes few system calls.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;
use tokio::time::timeout;

use crate::generate::{ChoiceEvent, Running};

/// A comment is sent after this time without an event, so that a client that has gone is noticed
/// and proxies keep the connection.
const PING: Duration = Duration::from_secs(10);

/// Writes the events of one interface.
pub(crate) trait StreamFormat: Send + 'static {
    /// The value of the `Content-Type` header.
    const CONTENT_TYPE: &'static str;
    /// What keeps the connection alive; empty if the format has nothing for that.
    const PING: &'static [u8];

    /// Writes what comes before the first event.
    fn begin(&mut self, running: &Running, out: &mut Vec<u8>);
    /// Writes an event.
    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>);
    /// Writes what comes after the last event.
    fn end(&mut self, running: &Running, out: &mut Vec<u8>);
}

/// The response that streams a running request.
pub(crate) fn response<F: StreamFormat>(running: Running, format: F) -> Response {
    let state = (Some((running, format)), true);
    let chunks = stream::unfold(state, |(open, is_first)| async move {
        let (mut running, mut format) = open?;
        let mut out = Vec::new();
        if is_first {
            format.begin(&running, &mut out);
        }
        while out.is_empty() && !running.has_ended() {
            match timeout(PING, running.next()).await {
                Ok(Some(event)) => {
                    format.event(&running, event, &mut out);
                    while let Some(event) = running.try_next() {
                        format.event(&running, event, &mut out);
                    }
                }
                Ok(None) => {}
                Err(_) => out.extend_from_slice(F::PING),
            }
        }
        // The model is free as soon as the answers have ended, not when their client has read them.
        let open = match running.has_ended() {
            true => {
                format.end(&running, &mut out);
                None
            }
            false => Some((running, format)),
        };
        Some((Ok::<Bytes, Infallible>(Bytes::from(out)), (open, false)))
    });
    let headers = [
        (header::CONTENT_TYPE, F::CONTENT_TYPE),
        (header::CACHE_CONTROL, "no-cache"),
        // Proxies must not gather the response.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(chunks)).into_response()
}

/// Writes a server-sent event without a name.
pub(crate) fn sse_data(value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    json(value, out);
    out.extend_from_slice(b"\n\n");
}

/// Writes a server-sent event.
pub(crate) fn sse_event(name: &str, value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    sse_data(value, out);
}

/// Writes JSON, which has no line breaks.
pub(crate) fn json(value: &impl Serialize, out: &mut Vec<u8>) {
    serde_json::to_writer(out, value).expect("JSON with string keys is written to memory");
}
