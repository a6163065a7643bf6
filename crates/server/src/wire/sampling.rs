//! How to generate, as the OpenAI formats say it; chat and plain completions share the fields.

use std::time::Duration;

use lapidary::capture::CaptureSpec;
use lapidary::service::GenerationParams;

use super::looks::Steers;
use super::values::{Biases, Id, Seed, Strings};
use crate::error::ApiError;
use crate::options::ServerOptions;

/// Most stop strings of a request.
const MAX_STOPS: usize = 32;

/// The shared fields.
#[derive(Debug, Clone, Default)]
#[allow(missing_docs, reason = "the names are OpenAI's and vLLM's; `GenerationParams` explains them")]
pub struct Sampling {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub logit_bias: Option<Biases>,
    pub seed: Option<Seed>,
    pub n: Option<usize>,
    pub stop: Option<Strings>,
    pub stop_token_ids: Option<Vec<Id>>,
    pub ignore_eos: Option<bool>,
    pub max_tokens: Option<usize>,
    pub min_tokens: Option<usize>,
    pub priority: Option<i8>,
    /// Seconds.
    pub timeout: Option<f64>,
    pub prompt_logprobs: Option<u32>,
    pub steering: Option<Steers>,
    pub capture: Option<CaptureSpec>,
}

impl Sampling {
    /// Checks what only this format knows; ranges are the service's to check.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn params(self, options: &ServerOptions) -> Result<GenerationParams, ApiError> {
        let refuse = |field: &str, text: &str| Err(ApiError::bad_request(Some(field), text));
        let n = self.n.unwrap_or(1);
        if n == 0 || n > options.max_choices {
            return refuse(
                "n",
                &format!("expected a whole number from 1 to {}, got {n}", options.max_choices),
            );
        }
        let stop = self.stop.unwrap_or_default().0;
        if stop.len() > MAX_STOPS {
            return refuse(
                "stop",
                &format!("{} strings, of which at most {MAX_STOPS} are taken", stop.len()),
            );
        }
        if let Some(place) = stop.iter().position(String::is_empty) {
            return refuse(
                &format!("stop[{place}]"),
                "an empty string would end every answer before it begins",
            );
        }
        let top_k = match self.top_k {
            None => None,
            // vLLM's word for off.
            Some(-1) => Some(0),
            Some(k) => match u32::try_from(k) {
                Ok(k) => Some(k),
                Err(_) => {
                    return refuse(
                        "top_k",
                        &format!("expected 0 (off), -1 (off) or a count of tokens, got {k}"),
                    );
                }
            },
        };
        let timeout = match self.timeout {
            None => options.timeout,
            Some(seconds) => match Duration::try_from_secs_f64(seconds) {
                Ok(limit) if !limit.is_zero() => Some(options.timeout.map_or(limit, |own| own.min(limit))),
                _ => {
                    return refuse(
                        "timeout",
                        &format!("expected a number of seconds above 0, got {seconds}"),
                    );
                }
            },
        };
        let (steering, vectors) = self.steering.map_or_else(|| Ok(Default::default()), Steers::parts)?;
        Ok(GenerationParams {
            temperature: self.temperature,
            top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.unwrap_or_default().0,
            seed: self.seed.map(|seed| seed.0),
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens.unwrap_or(0),
            stop,
            stop_ids: self.stop_token_ids.unwrap_or_default().into_iter().map(|id| id.0).collect(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            n,
            logprobs: None,
            prompt_logprobs: self.prompt_logprobs,
            steering,
            vectors,
            capture: self.capture,
            priority: self.priority.unwrap_or(0),
            timeout,
        })
    }
}

/// Declares a request with the shared fields beside its own. (serde could flatten a struct instead, and would lose
/// paths and unknown fields for it.)
macro_rules! request {
    ($(#[$outer:meta])* pub struct $name:ident { $($(#[$inner:meta])* pub $field:ident: $type:ty,)* }) => {
        $(#[$outer])*
        #[derive(Debug, Clone, serde::Deserialize)]
        #[allow(missing_docs, reason = "the names are those of the API; the document at /openapi.json explains them")]
        pub struct $name {
            $($(#[$inner])* pub $field: $type,)*
            pub temperature: Option<f32>,
            pub top_p: Option<f32>,
            pub top_k: Option<i64>,
            pub min_p: Option<f32>,
            pub presence_penalty: Option<f32>,
            pub frequency_penalty: Option<f32>,
            pub repetition_penalty: Option<f32>,
            pub logit_bias: Option<$crate::wire::values::Biases>,
            pub seed: Option<$crate::wire::values::Seed>,
            pub n: Option<usize>,
            pub stop: Option<$crate::wire::values::Strings>,
            pub stop_token_ids: Option<Vec<$crate::wire::values::Id>>,
            pub ignore_eos: Option<bool>,
            pub max_tokens: Option<usize>,
            pub min_tokens: Option<usize>,
            pub priority: Option<i8>,
            pub timeout: Option<f64>,
            pub prompt_logprobs: Option<u32>,
            pub steering: Option<$crate::wire::looks::Steers>,
            pub capture: Option<lapidary::capture::CaptureSpec>,
        }

        impl $name {
            /// The shared fields.
            pub fn sampling(&self) -> $crate::wire::sampling::Sampling {
                $crate::wire::sampling::Sampling {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    repetition_penalty: self.repetition_penalty,
                    logit_bias: self.logit_bias.clone(),
                    seed: self.seed,
                    n: self.n,
                    stop: self.stop.clone(),
                    stop_token_ids: self.stop_token_ids.clone(),
                    ignore_eos: self.ignore_eos,
                    max_tokens: self.max_tokens,
                    min_tokens: self.min_tokens,
                    priority: self.priority,
                    timeout: self.timeout,
                    prompt_logprobs: self.prompt_logprobs,
                    steering: self.steering.clone(),
                    capture: self.capture.clone(),
                }
            }
        }
    };
}
pub(crate) use request;
