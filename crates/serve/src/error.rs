//! Errors of requests, and how each interface writes them.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bodkin::Error as RuntimeError;
use bodkin_engine::Error as EngineError;
use serde_json::{Map, Value, json};

/// The result of a handler.
pub(crate) type Result<T> = std::result::Result<T, ApiError>;

/// Why a request was refused or has failed.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// The `type` that OpenAI and llama-server write.
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    /// The field of the request that is wrong.
    pub(crate) param: Option<String>,
    /// Further numbers, such as `n_ctx`.
    pub(crate) details: Vec<(&'static str, u64)>,
    /// Seconds after which a client may try again.
    pub(crate) retry_after: u64,
    /// The message with the paths of files, for the operator; none if `message` hides nothing.
    pub(crate) full_message: Option<Box<str>>,
}

/// Why images are refused.
const NO_IMAGES: &str = "images need a vision projector (mmproj), which this server does not run: \
                         the model takes text alone";

impl ApiError {
    /// A field has an image.
    pub(crate) fn image(param: &str) -> ApiError {
        ApiError::field(param, format!("{param}: {NO_IMAGES}"))
    }

    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            details: Vec::new(),
            retry_after: 1,
            full_message: None,
        }
    }

    /// A field has a value that is not accepted.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..ApiError::bad_request(message) }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    pub(crate) fn unauthorized() -> ApiError {
        let message = "the API key is missing or not valid";
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// A key's limit is used up for some seconds.
    pub(crate) fn rate_limited(message: impl Into<String>, seconds: u64) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        ApiError { retry_after: seconds, ..error }
    }

    pub(crate) fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// As OpenAI and llama-server write it.
    pub(crate) fn openai(&self) -> Value {
        let mut error = Map::new();
        error.insert("code".to_owned(), self.status.as_u16().into());
        error.insert("message".to_owned(), self.message.as_str().into());
        error.insert("type".to_owned(), self.kind.into());
        error.insert("param".to_owned(), self.param.as_deref().into());
        error.extend(self.details.iter().map(|&(name, value)| (name.to_owned(), value.into())));
        json!({ "error": error })
    }

    /// As Ollama writes it.
    pub(crate) fn ollama(&self) -> Value {
        json!({ "error": self.message })
    }

    /// As Anthropic writes it.
    pub(crate) fn anthropic(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        };
        json!({ "type": "error", "error": { "type": kind, "message": self.message } })
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        let message = error.to_string();
        match error {
            EngineError::PromptTooLong { tokens, limit } => ApiError {
                kind: "exceed_context_size_error",
                details: vec![("n_prompt_tokens", tokens as u64), ("n_ctx", limit as u64 + 1)],
                ..ApiError::bad_request(message)
            },
            EngineError::Constraint { field, .. } => ApiError::field(field, message),
            EngineError::Sampling { option, .. } => ApiError::field(option, message),
            EngineError::Template(_)
            | EngineError::LongText { .. }
            | EngineError::EmptyPrompt
            | EngineError::TooManyRequests { .. }
            | EngineError::UnknownToken { .. }
            | EngineError::NoText { .. }
            | EngineError::NoEmbeddings { .. }
            | EngineError::EmptyText { .. }
            | EngineError::TextTooLong { .. } => ApiError::bad_request(message),
            EngineError::QueueFull { .. } => ApiError::unavailable(message),
            _ => ApiError::internal(message),
        }
    }
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> ApiError {
        match error {
            RuntimeError::Request(error) => error.into(),
            RuntimeError::Engine { source, .. } => (*source).into(),
            RuntimeError::Option { option: option @ "dimensions", .. } => {
                ApiError::field(option, error.to_string())
            }
            RuntimeError::NoReranker { .. } => ApiError::bad_request(error.to_string()),
            RuntimeError::NoTemplate { .. } | RuntimeError::Encoder { .. } => {
                ApiError::bad_request(error.to_string())
            }
            RuntimeError::Name { .. } | RuntimeError::UnknownModel { .. } => {
                ApiError::not_found(error.to_string())
            }
            RuntimeError::OutOfMemory { .. } | RuntimeError::HostMemory { .. } => {
                ApiError::unavailable(error.to_string())
            }
            _ => ApiError::internal(error.to_string()),
        }
    }
}

/// The response has no body yet: the router of each interface writes it.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

/// Writes the body of a refused request as `format` has it, if it is not written yet.
pub(crate) fn write_error(mut response: Response, format: fn(&ApiError) -> Value) -> Response {
    let Some(error) = response.extensions_mut().remove::<Arc<ApiError>>() else {
        return response;
    };
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    let json = HeaderValue::from_static("application/json");
    parts.headers.insert(header::CONTENT_TYPE, json);
    if matches!(error.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        parts.headers.insert(header::RETRY_AFTER, HeaderValue::from(error.retry_after));
    }
    Response::from_parts(parts, Body::from(format(&error).to_string()))
}
