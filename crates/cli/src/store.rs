//! Which vector store a command uses.

use std::time::Duration;

#[cfg(feature = "flight")]
use anyhow::{Context, Result};

use crate::arguments::duration;

/// Why a command cannot do something with Arrow.
#[cfg(not(feature = "flight"))]
pub(crate) const WITHOUT_ARROW: &str =
    "this bodkin was built without Arrow: build it with `--features flight`";

/// Flags of commands that use a vector store.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Vector store over Arrow Flight")]
pub(crate) struct StoreArgs {
    /// The store's data port; the port is 3000 if not given
    #[arg(long, value_name = "HOST[:PORT]", requires = "dataset")]
    pub(crate) flight: Option<String>,
    /// The store's meta port [default: port 3001 of the same host]
    #[arg(long, value_name = "HOST:PORT", requires = "flight")]
    flight_meta: Option<String>,
    /// The dataset in the store: one for each embedding model
    #[arg(long, value_name = "NAME", requires = "flight")]
    dataset: Option<String>,
    /// API key for the store (bearer token)
    #[arg(long, value_name = "KEY", env = "BODKIN_STORE_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Time limit of the answers of a store, and of retries
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = timeout)]
    flight_timeout: Duration,
}

/// Parses a time above 0.
fn timeout(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    if time.is_zero() { Err("expected a time above 0".to_owned()) } else { Ok(time) }
}

#[cfg(feature = "flight")]
impl StoreArgs {
    /// Where the store is.
    pub(crate) fn address(&self) -> Result<bodkin_flight::store::Address> {
        let data = self.flight.as_deref().context("expected --flight HOST")?;
        let data = data.trim_start_matches("grpc://").trim_start_matches("http://");
        let host = match data.rsplit_once(':') {
            // The colons of an IPv6 address are inside of brackets.
            Some((host, port)) if !port.ends_with(']') => host,
            _ => data,
        };
        let data = match host == data {
            true => format!("{data}:3000"),
            false => data.to_owned(),
        };
        let meta = self.flight_meta.clone().unwrap_or_else(|| format!("{host}:3001"));
        let (api_key, timeout) = (self.api_key.clone(), self.flight_timeout);
        Ok(bodkin_flight::store::Address { data, meta, api_key, timeout })
    }

    /// The dataset.
    pub(crate) fn dataset(&self) -> Result<&str> {
        self.dataset.as_deref().context("expected --dataset NAME")
    }
}
