//! The request of `POST /v1/chat/completions`.

use lapidary::ChatInput;
use lapidary::service::{ChatRequest, ParallelCalls};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::format::{self, ResponseFormat, StructuredOutputs};
use super::message::{self, Message, Tool};
use super::sampling::request;
use super::thinking::{Reasoning, Switches, Thinking};
use crate::body::Ignored;
use crate::error::ApiError;
use crate::options::ServerOptions;

/// Most of the likeliest tokens beside each token.
pub const MAX_TOP_LOGPROBS: u32 = 20;

request! {
    /// The body.
    pub struct ChatBody {
        pub model: Option<String>,
        pub messages: Vec<Message>,
        pub stream: Option<bool>,
        pub stream_options: Option<StreamOptions>,
        pub max_completion_tokens: Option<usize>,
        pub logprobs: Option<bool>,
        pub top_logprobs: Option<u32>,
        pub tools: Option<Vec<Tool>>,
        pub tool_choice: Option<Value>,
        pub parallel_tool_calls: Option<bool>,
        pub response_format: Option<ResponseFormat>,
        pub structured_outputs: Option<StructuredOutputs>,
        pub reasoning_effort: Option<String>,
        pub reasoning: Option<Reasoning>,
        pub thinking: Option<Value>,
        pub enable_thinking: Option<bool>,
        pub thinking_budget: Option<usize>,
        pub chat_template_kwargs: Option<Map<String, Value>>,
        pub add_generation_prompt: Option<bool>,
        pub continue_final_message: Option<bool>,
        pub modalities: Option<Vec<String>>,
        // Known, and without effect on an answer.
        #[allow(dead_code)]
        pub user: Option<Value>,
        #[allow(dead_code)]
        pub metadata: Option<Value>,
        #[allow(dead_code)]
        pub safety_identifier: Option<Value>,
        #[allow(dead_code)]
        pub prompt_cache_key: Option<Value>,
        #[allow(dead_code)]
        pub service_tier: Option<Value>,
        pub store: Option<bool>,
        // Known in order to be refused by name.
        pub functions: Option<Value>,
        pub function_call: Option<Value>,
        pub audio: Option<Value>,
        pub web_search_options: Option<Value>,
        pub chat_template: Option<Value>,
    }
}

/// `stream_options`.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
}

impl StreamOptions {
    /// Whether a last chunk tells the usage.
    pub fn usage(options: Option<StreamOptions>, stream: bool) -> Result<bool, ApiError> {
        match options {
            Some(_) if !stream => {
                Err(ApiError::bad_request(Some("stream_options"), "it goes with stream: true only"))
            }
            options => Ok(options.and_then(|o| o.include_usage).unwrap_or(false)),
        }
    }
}

impl ChatBody {
    /// The request as the service takes it.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn request(self, options: &ServerOptions, ignored: &mut Ignored) -> Result<ChatRequest, ApiError> {
        self.refuse_what_is_not_here()?;
        if self.store == Some(true) {
            // Nothing is kept, so asking for it has no effect.
            ignored.add("store");
            ignored.refuse_if(options.strict)?;
        }
        let mut sampling = self.sampling();
        sampling.max_tokens = limit(self.max_completion_tokens, self.max_tokens)?;
        let mut generation = sampling.params(options)?;
        generation.logprobs = logprobs(self.logprobs, self.top_logprobs)?;
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        let mut switches = Switches::default();
        switches.effort("reasoning_effort", self.reasoning_effort.as_deref())?;
        switches.reasoning(self.reasoning.as_ref())?;
        switches.thinking(self.thinking.as_ref())?;
        switches.on("enable_thinking", self.enable_thinking)?;
        switches.budget("thinking_budget", self.thinking_budget)?;
        switches.template(&mut variables)?;
        let Thinking { on, budget } = switches.settle();
        let preserve_thinking = match variables.remove("preserve_thinking") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(keep)) => Some(keep),
            Some(_) => {
                let field = "chat_template_kwargs.preserve_thinking";
                return Err(ApiError::bad_request(Some(field), "expected true or false"));
            }
        };
        let last_is_answer = self.messages.last().is_some_and(|m| m.role == "assistant");
        let input = ChatInput {
            messages: message::conversation(self.messages)?,
            tools: message::tools(self.tools.unwrap_or_default())?,
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            continue_final: self.continue_final_message.unwrap_or(last_is_answer),
            enable_thinking: on,
            preserve_thinking,
            extra: variables,
            ..ChatInput::default()
        };
        Ok(ChatRequest {
            input,
            tool_choice: message::tool_choice(self.tool_choice.as_ref())?,
            parallel_tool_calls: match self.parallel_tool_calls {
                Some(false) => ParallelCalls::One,
                _ => ParallelCalls::Many,
            },
            format: format::format(self.response_format, self.structured_outputs)?,
            thinking_budget: budget,
            generation,
        })
    }

    fn refuse_what_is_not_here(&self) -> Result<(), ApiError> {
        for (name, value, instead) in [
            ("functions", &self.functions, "; send tools"),
            ("function_call", &self.function_call, "; send tool_choice"),
            ("audio", &self.audio, ""),
            ("web_search_options", &self.web_search_options, ""),
            ("chat_template", &self.chat_template, "; the model's own template is used"),
        ] {
            if value.as_ref().is_some_and(|v| !v.is_null()) {
                return Err(ApiError::bad_request(
                    Some(name),
                    &format!("this server does not take it{instead}"),
                ));
            }
        }
        match self.modalities.iter().flatten().find(|kind| *kind != "text") {
            Some(kind) => Err(ApiError::unsupported(Some("modalities"), &format!("modalities: {kind:?}"))),
            None => Ok(()),
        }
    }
}

/// The limit under its two names.
fn limit(new: Option<usize>, old: Option<usize>) -> Result<Option<usize>, ApiError> {
    let (field, limit) = match (new, old) {
        (Some(new), Some(old)) if new != old => {
            let text = format!("it says {new}, and max_tokens {old}; send one of them");
            return Err(ApiError::bad_request(Some("max_completion_tokens"), &text));
        }
        (Some(new), _) => ("max_completion_tokens", Some(new)),
        (None, old) => ("max_tokens", old),
    };
    match limit {
        Some(0) => Err(ApiError::bad_request(Some(field), "expected a whole number above 0, got 0")),
        limit => Ok(limit),
    }
}

fn logprobs(wanted: Option<bool>, top: Option<u32>) -> Result<Option<u32>, ApiError> {
    let field = Some("top_logprobs");
    match (wanted.unwrap_or(false), top) {
        (_, Some(top)) if top > MAX_TOP_LOGPROBS => {
            let text = format!("expected a whole number from 0 to {MAX_TOP_LOGPROBS}, got {top}");
            Err(ApiError::bad_request(field, &text))
        }
        (false, Some(1..)) => Err(ApiError::bad_request(field, "it goes with logprobs: true only")),
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, _) => Ok(None),
    }
}
