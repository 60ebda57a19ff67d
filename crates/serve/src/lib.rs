//! The HTTP server: the OpenAI, llama-server, Ollama and Anthropic interfaces, each translated to
//! the engine's requests and from its events. It must not know how tokens are computed or
//! scheduled, nor which backends there are.

#![forbid(unsafe_code)]

mod anthropic;
mod app;
mod auth;
mod bodies;
mod constraint;
mod embedder;
mod embeddings;
mod error;
mod experts;
mod fields;
mod generate;
mod llama;
mod metrics;
mod models;
mod ollama;
mod openai;
mod openapi;
mod options;
mod origins;
mod prompt;
mod reasoning;
mod request_id;
mod rerank;
mod router;
mod sampling;
mod server;
mod stream;
mod timings;
mod tools;
mod write_timeout;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bodkin::{Reporter, Request};
use tokio::sync::watch;

pub use bodies::BodyBudget;
pub use embedder::{Admitted, Embedder, Refusal};
pub use options::{LinkTrace, ModelSpec, ServerOptions, Tls};
pub use server::Error;

use app::App;
use auth::ApiKeys;
use models::ModelPool;
use server::Listener;

/// How often models that are idle or have failed are looked for.
const MAINTAIN_EVERY: Duration = Duration::from_millis(500);

/// A server whose socket listens.
pub struct Server {
    listener: Listener,
    app: Arc<App>,
    stop: (watch::Sender<bool>, watch::Receiver<bool>),
}

/// Stops a server: once to let its running requests finish, twice to cancel them.
#[derive(Clone, Debug)]
pub struct Stopper(watch::Sender<bool>);

impl Stopper {
    /// Stops the server.
    pub fn stop(&self) {
        self.0.send_modify(|stop| *stop = true);
    }
}

impl Server {
    /// Listens on the address of `options`. Models are loaded when the server runs.
    ///
    /// # Errors
    /// If the address, the certificate, the key file or an allowed origin cannot be used, or a
    /// model cannot be found.
    pub fn bind(options: ServerOptions, reporter: Reporter) -> Result<Server, Error> {
        let keys = ApiKeys::new(&options, reporter.clone()).map_err(Error::Keys)?;
        sampling::defaults(&options.defaults, Request::default())
            .map_err(|error| Error::Defaults(error.message))?;
        origins::check(&options.cors_origins)?;
        for model in &options.models {
            let checked = bodkin::source::check(&model.source, &reporter);
            checked.map_err(|error| Error::Model(error.to_string()))?;
        }
        let listener = Listener::bind(&options)?;
        let pool = ModelPool::new(&options, reporter);
        pool.read_headers();
        let app = Arc::new(App::new(options, pool, keys));
        Ok(Server { listener, app, stop: watch::channel(false) })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.listener.address
    }

    /// Whether it speaks HTTPS.
    pub fn has_tls(&self) -> bool {
        self.listener.has_tls()
    }

    /// Its models, for other protocols.
    pub fn embedder(&self) -> Embedder {
        Embedder::new(&self.app, self.stop.1.clone())
    }

    /// What stops it.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.stop.0.clone())
    }

    /// Loads the default model and answers requests until the server is stopped.
    ///
    /// # Errors
    /// If the default model cannot be loaded, or the threads cannot be started.
    pub fn run(self) -> Result<(), Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(Error::Threads)?;
        let Server { listener, app, stop: (sender, receiver) } = self;
        let result = runtime.block_on(async {
            let router = router::router(Arc::clone(&app));
            let pool = Arc::clone(&app.pool);
            pool.begin_default();
            let first = tokio::spawn(async move { pool.get(None).await.map(drop) });
            let pool = Arc::clone(&app.pool);
            let maintenance = tokio::spawn(async move {
                loop {
                    tokio::time::sleep(MAINTAIN_EVERY).await;
                    pool.unload_expired().await;
                    pool.reload_failed();
                }
            });
            let serve = listener.run(router, receiver, || app.cancel());
            tokio::pin!(serve);
            let loaded = tokio::select! {
                result = &mut serve => return result,
                loaded = first => loaded,
            };
            match loaded {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    return Err(Error::Model(
                        error.full_message.map_or(error.message, String::from),
                    ));
                }
                Err(_) => return Err(Error::Model("loading the model panicked".to_owned())),
            }
            let result = serve.await;
            maintenance.abort();
            result
        });
        let pool = Arc::clone(&app.pool);
        let steps_end = runtime.block_on(pool.end_steps());
        // Cancels what still runs, and waits for the models' threads.
        runtime.shutdown_timeout(Duration::from_secs(1));
        drop((sender, pool));
        match steps_end {
            true => drop(app),
            // Its thread ends with the process.
            false => std::mem::forget(app),
        }
        result
    }
}
