//! Steps, slots, sampling and requests over one device.
//!
//! A [`Runner`] owns a model on a backend; a [`Stepper`] adds sequences: the one that most callers use and,
//! on demand, slots beside it. [`sampling`] turns logits into tokens. [`generate`] answers one request;
//! [`scheduler`] shares batches and [`pages`] among many, and an [`Engine`] is a thread that drives it.
//!
//! Deliberately absent: text (ids in, ids out), HTTP, and files but for stored prefixes.

mod active;
mod ahead;
mod debug;
mod engine;
mod error;
pub mod generate;
mod guide;
mod lane;
mod look;
pub mod metrics;
pub mod pages;
mod prefix;
pub mod profile;
mod prompt;
mod request;
mod runner;
pub mod sampling;
pub mod scheduler;
mod slots;
mod steering;
mod stepper;
mod worker;

pub use engine::{Engine, EngineOptions, Ticket};
pub use error::{Error, Result};
pub use guide::{Allowed, Guide, GuideError, StopCause, Verdict};
pub use look::Observer;
pub use prefix::{PrefixDir, PrefixOptions, PrefixStats, StoreStats};
pub use prompt::{Prompt, SoftKind, SoftSpan};
pub use request::{
    EngineEvent, EngineFinish, EngineRequest, EngineUsage, FailureKind, PromptScores, Score, ScoreEvent,
    ScoreRequest, ScoreSink, Sink,
};
pub use runner::Runner;
pub use slots::SmokeReport;
pub use stepper::{Chunk, Heads, Stepper};
