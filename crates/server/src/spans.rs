//! The spans of a request, named as OpenTelemetry's conventions for HTTP and for generative models name them: one for the exchange
//! until the head of the response, within it one for the whole inference, and in that one until the first token and one for
//! the rest. Without a subscriber that wants spans they cost nothing.

use axum::http::{HeaderMap, Method};
use lapidary::service::ServiceUsage;
use tracing::{Span, field};

use crate::layers::RequestId;

/// What all spans have as their target, so that a log can leave them out.
const TARGET: &str = "lapidary::spans";

/// The span of an HTTP exchange, part of the trace that the client names.
pub fn exchange(method: &Method, route: &str, id: &RequestId, headers: &HeaderMap) -> Span {
    let span = tracing::info_span!(
        target: TARGET,
        "exchange",
        "otel.kind" = "server",
        "otel.name" = %format_args!("{method} {route}"),
        "http.request.method" = %method,
        "http.route" = route,
        "http.response.status_code" = field::Empty,
        request_id = id.as_str(),
    );
    continue_trace(&span, headers);
    span
}

#[cfg(feature = "otel")]
fn continue_trace(span: &Span, headers: &HeaderMap) {
    use opentelemetry::propagation::{Extractor, TextMapPropagator};
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    struct Headers<'a>(&'a HeaderMap);

    impl Extractor for Headers<'_> {
        fn get(&self, key: &str) -> Option<&str> {
            self.0.get(key)?.to_str().ok()
        }

        fn keys(&self) -> Vec<&str> {
            self.0.keys().map(axum::http::HeaderName::as_str).collect()
        }
    }

    if span.is_none() {
        return;
    }
    let parent = opentelemetry_sdk::propagation::TraceContextPropagator::new().extract(&Headers(headers));
    if let Err(error) = span.set_parent(parent) {
        tracing::debug!(%error, "a span could not go on the client's trace");
    }
}

#[cfg(not(feature = "otel"))]
fn continue_trace(_: &Span, _: &HeaderMap) {}

/// The spans of what the model does for a request.
#[derive(Debug)]
pub struct Inference {
    whole: Span,
    /// Prompt (with the time in the queue), then decode.
    phase: Span,
}

impl Inference {
    /// Begins within the current span.
    pub fn begin(route: &'static str, model: &str) -> Inference {
        let whole = tracing::info_span!(
            target: TARGET,
            "inference",
            "otel.name" = %format_args!("{} {model}", operation(route)),
            "gen_ai.operation.name" = operation(route),
            "gen_ai.provider.name" = "lapidary",
            "gen_ai.request.model" = model,
            "gen_ai.usage.input_tokens" = field::Empty,
            "gen_ai.usage.cache_read.input_tokens" = field::Empty,
            "gen_ai.usage.output_tokens" = field::Empty,
            "gen_ai.usage.reasoning.output_tokens" = field::Empty,
            outcome = field::Empty,
        );
        let phase = tracing::info_span!(target: TARGET, parent: &whole, "prompt");
        Inference { whole, phase }
    }

    /// The first token is there.
    pub fn first_token(&mut self) {
        self.phase = tracing::info_span!(target: TARGET, parent: &self.whole, "decode");
    }

    /// Records how it went; the spans end when this is dropped.
    pub fn end(&self, usage: &ServiceUsage, outcome: &str) {
        self.whole.record("gen_ai.usage.input_tokens", usage.prompt_tokens);
        self.whole.record("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens);
        self.whole.record("gen_ai.usage.output_tokens", usage.completion_tokens);
        self.whole.record("gen_ai.usage.reasoning.output_tokens", usage.reasoning_tokens);
        self.whole.record("outcome", outcome);
    }
}

fn operation(route: &str) -> &'static str {
    if route.ends_with("/v1/completions") { "text_completion" } else { "chat" }
}
