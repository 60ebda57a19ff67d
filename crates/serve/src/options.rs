//! The options of a server.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::HeaderMap;
use bodkin::Options;
use serde_json::{Map, Value};
use tracing::Span;

/// A model that the server offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// The name that clients use.
    pub id: String,
    /// The name that [`bodkin::source::find`] resolves.
    pub source: String,
}

/// Certificate and private key of the server, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The certificate chain.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// Makes a span part of the trace that the headers of a request name.
pub type LinkTrace = fn(&Span, &HeaderMap);

/// How a server listens, whom it answers, and how models are loaded.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address to listen on.
    pub host: IpAddr,
    /// The port to listen on; 0 for any free one.
    pub port: u16,
    /// The models, the default one first.
    pub models: Vec<ModelSpec>,
    /// How each of them is loaded.
    pub load: Options,
    /// Models that were made for text embed texts instead.
    pub embeds: bool,
    /// Fields that requests without them have, such as `temperature` and `max_tokens`.
    pub defaults: Map<String, Value>,
    /// How long a model stays loaded without requests; none for ever.
    pub keep_alive: Option<Duration>,
    /// The most bytes of all loaded models together; none for what the device has.
    pub memory_bytes: Option<u64>,
    /// Keys that clients must present one of; with no key and no file, everybody is answered.
    pub api_keys: Vec<String>,
    /// A file of keys, read again when it changes: on each line a key, and its limits.
    pub api_key_file: Option<PathBuf>,
    /// Origins of web pages that may call the server; `*` for all.
    pub cors_origins: Vec<String>,
    /// TLS instead of plain HTTP.
    pub tls: Option<Tls>,
    /// The largest body of a request, in bytes.
    pub body_bytes: usize,
    /// The most bytes of the bodies of all requests whose answers have not begun; at least
    /// `body_bytes`.
    pub bodies_bytes: usize,
    /// A body that takes longer to arrive is refused.
    pub body_timeout: Duration,
    /// A step of a model that takes longer makes `/health` report a failure. One that takes ten
    /// times as long ends its requests.
    pub step_timeout: Duration,
    /// A client that takes nothing of what is written for it for so long is disconnected.
    pub write_timeout: Duration,
    /// How long the load of a model waits for requests of other models to end, whose memory it
    /// needs.
    pub release_timeout: Duration,
    /// How long running requests may go on when the server is stopped.
    pub drain: Duration,
    /// How the span of a request becomes part of its client's trace; none where nobody traces.
    pub link_trace: Option<LinkTrace>,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            host: IpAddr::from([127, 0, 0, 1]),
            port: 8080,
            models: Vec::new(),
            load: Options::default(),
            embeds: false,
            defaults: Map::new(),
            keep_alive: None,
            memory_bytes: None,
            api_keys: Vec::new(),
            api_key_file: None,
            cors_origins: Vec::new(),
            tls: None,
            body_bytes: 32 << 20,
            bodies_bytes: 256 << 20,
            body_timeout: Duration::from_secs(60),
            step_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(20),
            release_timeout: Duration::from_secs(30),
            drain: Duration::from_secs(30),
            link_trace: None,
        }
    }
}
