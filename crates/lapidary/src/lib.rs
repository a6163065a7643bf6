//! Run Google's Gemma 4 models.
//!
//! [`Gemma`] is a loaded model with its text: it completes prompts and answers conversations. [`Stepper`] drives
//! the model token by token, with slots, captures and logits; [`load_stepper`] gives one without any text.
//!
//! Deliberately absent: HTTP, the command line, and any arithmetic.

mod answer;
pub mod bandwidth;
pub mod budget;
#[cfg(feature = "pebble")]
mod builtin;
pub mod capture;
pub mod check;
pub mod convert;
mod defaults;
pub mod device;
mod error;
pub mod eval;
mod gemma;
pub mod host;
#[cfg(feature = "hub")]
pub mod hub;
mod mix;
mod options;
pub mod plan;
pub mod service;
pub mod steering;
pub mod synth;
pub mod text_source;
pub mod timings;
pub mod trace;
pub mod verify;

pub use answer::{Answer, Piece};
#[cfg(feature = "pebble")]
pub use builtin::builtin;
pub use defaults::Defaults;
pub use device::Device;
pub use error::{Error, Result};
pub use gemma::{Gemma, TemplateSource, load_stepper};
pub use lapidary_engine::generate::{FinishReason, Usage};
pub use lapidary_engine::sampling::SamplingParams;
pub use lapidary_engine::{Heads, Prompt, Runner, SoftKind, SoftSpan, Stepper};
pub use lapidary_model::{Config, EmbedScale, Progress, Requantise};
pub use lapidary_ops::{Format, KvFormat, PAGE_TOKENS, TapPoint};
pub use lapidary_text::{ChatInput, ChatTemplate, Tokenizer, ToolCall};
pub use lapidary_weights::Checkpoint;
pub use options::{AnswerOptions, Compute, DEFAULT_CONTEXT, Level, LoadOptions};
