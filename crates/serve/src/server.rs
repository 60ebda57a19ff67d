//! The socket: connections, TLS, limits of time and size, and an end that lets requests finish.

use std::io::Error as IoError;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

use crate::auth::read_key_file;
use crate::options::{ServerOptions, Tls};
use crate::write_timeout::WriteTimeout;

/// A client that does not finish its headers in this time is disconnected.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// The most bytes of the head of a request.
const HEADER_BYTES: usize = 64 << 10;

/// The most headers of a request.
const HEADERS: usize = 100;

/// The most connections at a time; further ones wait to be accepted.
const CONNECTIONS: usize = 10_000;

/// A TLS handshake that takes longer is ended.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long cancelled requests have to write why they end.
const CANCEL_TIME: Duration = Duration::from_secs(1);

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: IoError,
    },
    /// The certificate or the key cannot be used.
    #[error("{path}: {reason}")]
    Tls {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The key file cannot be used.
    #[error("{0}")]
    Keys(String),
    /// An allowed origin is none.
    #[error("CORS origin `{0}`: expected * or an origin such as https://one.example")]
    Origin(String),
    /// A default of requests is not accepted.
    #[error("{0}")]
    Defaults(String),
    /// A model's path is wrong, or the default model cannot be loaded.
    #[error("{0}")]
    Model(String),
    /// The threads of the server cannot be started.
    #[error("cannot start the server's threads: {0}")]
    Threads(IoError),
}

/// A socket that listens.
pub(crate) struct Listener {
    listener: StdListener,
    pub(crate) address: SocketAddr,
    tls: Option<Arc<ServerConfig>>,
    write_timeout: Duration,
    drain: Duration,
}

impl Listener {
    /// Listens where `options` say.
    pub(crate) fn bind(options: &ServerOptions) -> Result<Listener, Error> {
        let address = SocketAddr::new(options.host, options.port);
        let failed = |source| Error::Listen { address, source };
        let listener = StdListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let tls = options.tls.as_ref().map(tls_config).transpose()?;
        let (write_timeout, drain) = (options.write_timeout, options.drain);
        Ok(Listener { listener, address, tls, write_timeout, drain })
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Answers requests until `stop` changes, then lets running ones go on for a while before it
    /// cancels them.
    pub(crate) async fn run(
        self,
        router: Router,
        mut stop: watch::Receiver<bool>,
        cancel: impl FnOnce(),
    ) -> Result<(), Error> {
        let failed = |source| Error::Listen { address: self.address, source };
        let listener = TcpListener::from_std(self.listener).map_err(failed)?;
        let acceptor = self.tls.map(TlsAcceptor::from);
        let graceful = GracefulShutdown::new();
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let place = Arc::clone(&places).acquire_owned();
            let stream = tokio::select! {
                stream = async { (place.await, listener.accept().await) } => stream,
                _ = stop.changed() => break,
            };
            let (Ok(place), accepted) = stream else { break };
            let Ok((stream, _)) = accepted else {
                // The process has no file descriptor left, or the client has gone already.
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            // Tokens are small and must not wait for each other.
            let _ = stream.set_nodelay(true);
            let stream = WriteTimeout::new(stream, self.write_timeout);
            let (router, watcher) = (router.clone(), graceful.watcher());
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                match acceptor {
                    None => serve(stream, router, watcher).await,
                    Some(acceptor) => {
                        let handshake = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream));
                        if let Ok(Ok(stream)) = handshake.await {
                            serve(stream, router, watcher).await;
                        }
                    }
                }
                drop(place);
            });
        }
        drop(listener);
        tracing::info!("stopping: running requests have {} s", self.drain.as_secs());
        let ended = graceful.shutdown();
        tokio::pin!(ended);
        tokio::select! {
            () = &mut ended => return Ok(()),
            () = tokio::time::sleep(self.drain) => tracing::warn!("cancelling running requests"),
            // Asked to stop again.
            _ = stop.changed() => {}
        }
        cancel();
        // Clients that do not read are not waited for.
        let _ = timeout(CANCEL_TIME, ended).await;
        Ok(())
    }
}

/// Answers the requests of one connection.
async fn serve<S>(stream: S, router: Router, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    // Some clients compare names of headers with their usual case.
    builder.title_case_headers(true);
    builder.max_headers(HEADERS).max_buf_size(HEADER_BYTES);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    // A client that breaks off or does not speak HTTP is no error of the server.
    let _ = watcher.watch(connection).await;
}

/// Reads the certificate and the key.
fn tls_config(tls: &Tls) -> Result<Arc<ServerConfig>, Error> {
    let failed =
        |path: &Path, reason: String| Error::Tls { path: path.display().to_string(), reason };
    let read = |path| read_key_file(path).map_err(|error| failed(path, error.to_string()));
    let certificates = CertificateDer::pem_slice_iter(read(&tls.certificate)?.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| failed(&tls.certificate, error.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(read(&tls.key)?.as_bytes())
        .map_err(|error| failed(&tls.key, error.to_string()))?;
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(certificates, key);
    config.map(Arc::new).map_err(|error| failed(&tls.certificate, error.to_string()))
}
