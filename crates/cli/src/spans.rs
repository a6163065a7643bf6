//! Spans of requests to an OpenTelemetry collector, as the variables `OTEL_EXPORTER_OTLP_*` and `OTEL_SERVICE_NAME` say.

use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;

/// Sends spans from a thread of its own; what is left is sent when it is dropped.
#[derive(Debug)]
pub struct Exporter(SdkTracerProvider);

impl Exporter {
    /// An exporter to the collector that the environment names; none without one.
    ///
    /// # Errors
    /// The address is none.
    pub fn from_env() -> anyhow::Result<Option<Exporter>> {
        let set = |name| std::env::var(name).is_ok_and(|value| !value.is_empty());
        let wanted = set("OTEL_EXPORTER_OTLP_ENDPOINT") || set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        if !wanted || std::env::var("OTEL_SDK_DISABLED").is_ok_and(|v| v == "true") {
            return Ok(None);
        }
        let exporter = SpanExporter::builder().with_http().with_http_client(Client::new()).build();
        let exporter = exporter.context("OTEL_EXPORTER_OTLP_ENDPOINT")?;
        let mut resource = Resource::builder();
        if !set("OTEL_SERVICE_NAME") {
            resource = resource.with_service_name("lapidary");
        }
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter);
        Ok(Some(Exporter(provider.with_resource(resource.build()).build())))
    }

    /// What makes spans.
    pub fn tracer(&self) -> opentelemetry_sdk::trace::SdkTracer {
        self.0.tracer("lapidary")
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown() {
            eprintln!("note: the last spans did not reach the collector: {error}");
        }
    }
}

/// Posts from the exporter's own thread, which may block.
#[derive(Debug)]
struct Client(ureq::Agent);

impl Client {
    fn new() -> Client {
        let config = ureq::Agent::config_builder();
        let config = config.timeout_global(Some(Duration::from_secs(10))).http_status_as_error(false);
        Client(config.build().into())
    }
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let mut post = self.0.post(parts.uri.to_string());
        for (name, value) in &parts.headers {
            post = post.header(name, value);
        }
        let mut answer = post.send(&body[..])?;
        let bytes = answer.body_mut().read_to_vec()?;
        Ok(Response::builder().status(answer.status()).body(bytes.into())?)
    }
}
