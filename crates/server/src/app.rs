//! What all handlers share: the model, the options, the counters, and whether requests are taken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::Value;

use crate::error::ApiError;
use crate::ids;
use crate::layers::RequestId;
use crate::metrics::Metrics;
use crate::model::Model;
use crate::options::ServerOptions;
use crate::replies::{Replies, Watch};
use lapidary::service::{Reply, RequestError};

/// The server's state; clones share it.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    options: ServerOptions,
    model: OnceLock<Arc<dyn Model>>,
    metrics: Metrics,
    draining: AtomicBool,
    /// When the server began, in seconds since 1970.
    started: u64,
}

impl App {
    /// A server without a model: it lives, and is not ready.
    pub fn new(options: ServerOptions) -> App {
        App(Arc::new(Inner {
            options,
            model: OnceLock::new(),
            metrics: Metrics::default(),
            draining: AtomicBool::new(false),
            started: ids::now(),
        }))
    }

    /// Gives it the model: from here on it is ready. A second model is dropped.
    pub fn serve(&self, model: Arc<dyn Model>) {
        let _ = self.0.model.set(model);
    }

    /// The options.
    pub fn options(&self) -> &ServerOptions {
        &self.0.options
    }

    /// The counters.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// When the server began, in seconds since 1970.
    pub fn started(&self) -> u64 {
        self.0.started
    }

    /// The model, once it is loaded.
    pub fn loaded(&self) -> Option<&Arc<dyn Model>> {
        self.0.model.get()
    }

    /// The model, for a request.
    ///
    /// # Errors
    /// It is not loaded yet, or the server is about to stop.
    pub fn model(&self) -> Result<&Arc<dyn Model>, ApiError> {
        if self.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        self.loaded().ok_or_else(|| ApiError::unavailable("the model is still being loaded"))
    }

    /// Refuses requests from here on; those that run go on.
    pub fn begin_drain(&self) {
        self.0.draining.store(true, Ordering::SeqCst);
    }

    /// Whether requests are refused because the server is about to stop.
    pub fn is_draining(&self) -> bool {
        self.0.draining.load(Ordering::SeqCst)
    }

    /// The name in replies, if `asked` is one of ours. None asked for is ours.
    ///
    /// # Errors
    /// A name that is not served.
    pub fn model_name(&self, asked: Option<&str>) -> Result<&str, ApiError> {
        let names = &self.0.options.names;
        match asked {
            None | Some("") => Ok(names.first().map_or("", String::as_str)),
            Some(asked) => match names.iter().find(|name| *name == asked) {
                Some(name) => Ok(name),
                None => Err(ApiError::no_model(asked, names)),
            },
        }
    }

    /// Writes what was asked into the log, where the operator wants that.
    pub fn log_text(&self, id: &RequestId, messages: &[Value]) {
        if self.0.options.log_text {
            let messages = Value::from(messages);
            tracing::info!(request_id = id.as_str(), %messages, "asked");
        }
    }

    /// Hands a request to the model. Compiling a schema or reading a long prompt takes time, so it happens on a thread
    /// that may block; a client that leaves meanwhile drops the replies, which cancels and counts them.
    ///
    /// # Errors
    /// Why the request is refused.
    pub async fn start<F>(&self, id: &RequestId, route: &'static str, ask: F) -> Result<Replies, ApiError>
    where
        F: FnOnce(&dyn Model) -> Result<Vec<Reply>, RequestError> + Send + 'static,
    {
        let watch = Watch::new(self.clone(), id.clone(), route);
        self.ask(move |model| Ok(Replies::new(ask(model)?, watch))).await
    }

    /// Asks the model something on a thread that may block.
    ///
    /// # Errors
    /// What the model refuses with.
    pub async fn ask<T, F>(&self, ask: F) -> Result<T, ApiError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn Model) -> Result<T, RequestError> + Send + 'static,
    {
        let model = self.model()?.clone();
        match tokio::task::spawn_blocking(move || ask(model.as_ref())).await {
            Ok(done) => Ok(done?),
            // The panic has been told by the hook; the request is the only one that it ends.
            Err(_) => Err(ApiError::internal("the request caused a panic in the server; this is a bug")),
        }
    }

    /// Waits until nothing runs any more, at most `limit`.
    pub fn drain(&self, limit: Duration) {
        self.begin_drain();
        if let Some(model) = self.loaded() {
            model.drain(limit);
        }
    }
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("options", &self.0.options).finish_non_exhaustive()
    }
}
