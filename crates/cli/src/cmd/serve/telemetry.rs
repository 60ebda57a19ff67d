//! What a server tells about its requests while it runs: lines on stderr, and traces.

use anyhow::Result;
use bodkin_serve::LinkTrace;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

#[cfg(feature = "otlp")]
use super::otlp::Exporter;

/// The logs and traces of a server. Dropping it exports the spans that wait.
pub(super) struct Telemetry {
    #[cfg(feature = "otlp")]
    exporter: Option<Exporter>,
}

impl Telemetry {
    /// Starts to log in this format, if any, and to export traces to this collector, if any.
    pub(super) fn start(log: Option<&str>, otlp: Option<&str>) -> Result<Telemetry> {
        let mut layers: Vec<Box<dyn Layer<Registry> + Send + Sync>> = Vec::new();
        let lines = fmt::layer().with_writer(std::io::stderr).with_target(false);
        match log {
            Some("json") => {
                let json = lines.json().flatten_event(true).with_current_span(false);
                layers.push(json.with_span_list(false).boxed());
            }
            Some(_) => layers.push(lines.with_ansi(false).boxed()),
            None => {}
        }
        #[cfg(feature = "otlp")]
        let exporter = otlp.map(Exporter::new).transpose()?;
        #[cfg(feature = "otlp")]
        layers.extend(exporter.as_ref().map(Exporter::layer));
        #[cfg(not(feature = "otlp"))]
        anyhow::ensure!(otlp.is_none(), "--otlp needs a build with `--features otlp`");
        if !layers.is_empty() {
            tracing_subscriber::registry().with(layers.with_filter(LevelFilter::INFO)).init();
        }
        Ok(Telemetry {
            #[cfg(feature = "otlp")]
            exporter,
        })
    }

    /// How a request becomes part of its client's trace.
    pub(super) fn link_trace(&self) -> Option<LinkTrace> {
        #[cfg(feature = "otlp")]
        return self.exporter.as_ref().map(|_| super::otlp::link as LinkTrace);
        #[cfg(not(feature = "otlp"))]
        None
    }
}
