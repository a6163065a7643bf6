//! The border to what answers: everything the server asks of a model, and nothing else.
//!
//! [`Service`] is the one that ships. The trait is there so that tests of the wire can script what a model says.

use std::time::Duration;

use lapidary::ChatInput;
use lapidary::service::{
    Bos, ChatRequest, CompletionRequest, Markers, Reply, RequestError, Service, ServiceStats,
};

/// Something that answers many requests at once. Calls may take a while (a grammar is compiled, a long text is
/// tokenised) and are made on threads that may block.
pub trait Model: Send + Sync + 'static {
    /// Answers a conversation: a reply for each of `n`.
    ///
    /// # Errors
    /// Why the request is refused; nothing was queued then.
    fn chat(&self, request: ChatRequest) -> Result<Vec<Reply>, RequestError>;

    /// Goes on with a raw prompt: a reply for each of `n`.
    ///
    /// # Errors
    /// Why the request is refused; nothing was queued then.
    fn complete(&self, request: CompletionRequest) -> Result<Vec<Reply>, RequestError>;

    /// Ids of a text.
    ///
    /// # Errors
    /// What the tokenizer refuses.
    fn tokenize(&self, text: &str, bos: Bos, markers: Markers) -> Result<Vec<u32>, RequestError>;

    /// Text of ids.
    ///
    /// # Errors
    /// The id that the vocabulary lacks.
    fn detokenize(&self, ids: &[i64]) -> Result<String, RequestError>;

    /// The prompt that a conversation becomes: text and ids.
    ///
    /// # Errors
    /// What is wrong with the conversation.
    fn apply_template(&self, input: &ChatInput) -> Result<(String, Vec<u32>), RequestError>;

    /// Positions of one sequence.
    fn context(&self) -> usize;

    /// What goes on, for metrics.
    fn stats(&self) -> ServiceStats;

    /// Takes no more requests and waits for those that run, at most `limit`.
    fn drain(&self, limit: Duration);
}

impl Model for Service {
    fn chat(&self, request: ChatRequest) -> Result<Vec<Reply>, RequestError> {
        Service::chat(self, request)
    }

    fn complete(&self, request: CompletionRequest) -> Result<Vec<Reply>, RequestError> {
        Service::complete(self, request)
    }

    fn tokenize(&self, text: &str, bos: Bos, markers: Markers) -> Result<Vec<u32>, RequestError> {
        Service::tokenize(self, text, bos, markers)
    }

    fn detokenize(&self, ids: &[i64]) -> Result<String, RequestError> {
        Service::detokenize(self, ids)
    }

    fn apply_template(&self, input: &ChatInput) -> Result<(String, Vec<u32>), RequestError> {
        Service::apply_template(self, input)
    }

    fn context(&self) -> usize {
        self.model_info().context
    }

    fn stats(&self) -> ServiceStats {
        Service::stats(self)
    }

    fn drain(&self, limit: Duration) {
        Service::drain(self, limit);
    }
}
