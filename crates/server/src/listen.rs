//! Accepts connections, with or without TLS, until it is told to stop; then lets what runs come to its end.

use std::future::Future;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::app::App;
use crate::routes::router;

/// Time in which a client has to send the head of a request, or to shake hands.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Time that written bytes have to get out once all requests have ended.
const FLUSH_TIME: Duration = Duration::from_secs(5);

/// Limits on connections.
#[derive(Debug, Clone, Copy)]
pub struct ListenOptions {
    /// Connections at a time; further ones wait in the system's queue.
    pub connections: usize,
    /// Time that running requests have after the signal to stop.
    pub drain: Duration,
}

impl Default for ListenOptions {
    fn default() -> Self {
        ListenOptions { connections: 4096, drain: Duration::from_secs(30) }
    }
}

/// TLS from a certificate chain and its key, both in PEM.
///
/// # Errors
/// The file that cannot be read, or why the pair does not fit.
pub fn tls(certificates: &Path, key: &Path) -> io::Result<TlsAcceptor> {
    let named =
        |path: &Path, error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", path.display()));
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificates)
        .and_then(Iterator::collect)
        .map_err(|error| named(certificates, &error))?;
    if chain.is_empty() {
        return Err(named(certificates, &"no certificate in it; expected PEM"));
    }
    let key_der = PrivateKeyDer::from_pem_file(key).map_err(|error| named(key, &error))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(chain, key_der)
        .map_err(|error| named(key, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Serves until `stop` completes, then refuses requests (503, so that a balancer turns elsewhere) while those that run
/// come to their end, at most [`ListenOptions::drain`].
///
/// # Errors
/// The listener broke.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    app: App,
    options: ListenOptions,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let router = router(app.clone());
    let (closing, _) = watch::channel(false);
    let slots = Arc::new(Semaphore::new(options.connections));
    let drained = async {
        stop.await;
        tracing::info!("stopping: requests in progress come to their end");
        app.begin_drain();
        let app = app.clone();
        let _ = tokio::task::spawn_blocking(move || app.drain(options.drain)).await;
    };
    tokio::pin!(drained);
    loop {
        let slot = slots.clone().acquire_owned();
        let (slot, stream) = tokio::select! {
            () = &mut drained => break,
            accepted = async { (slot.await, listener.accept().await) } => match accepted {
                (Ok(slot), Ok((stream, _))) => (slot, stream),
                // The client is gone already, or files are short for the moment: the next one may fare better.
                (_, Err(error)) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
                (Err(closed), _) => unreachable!("nobody closes the semaphore: {closed}"),
            },
        };
        // Tokens are small and should not wait for each other.
        let _ = stream.set_nodelay(true);
        let (router, tls, closing) = (router.clone(), tls.clone(), closing.subscribe());
        tokio::spawn(async move {
            match tls {
                None => connection(stream, router, closing).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = tokio::time::timeout(HEAD_TIME, tls.accept(stream)).await {
                        connection(stream, router, closing).await;
                    }
                }
            }
            drop(slot);
        });
    }
    closing.send_replace(true);
    let all = u32::try_from(options.connections).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(FLUSH_TIME, slots.acquire_many(all)).await;
    Ok(())
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    mut closing: watch::Receiver<bool>,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = closing.wait_for(|closing| *closing) => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // Clients that leave in the middle are the usual case.
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Completes with the first SIGTERM or Ctrl-C.
///
/// # Errors
/// The system refuses to tell of signals.
pub fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    Ok(async move {
        #[cfg(unix)]
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        #[cfg(not(unix))]
        let _ = tokio::signal::ctrl_c().await;
    })
}
