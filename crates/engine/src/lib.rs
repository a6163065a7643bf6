//! Steps, slots, sampling and requests over one device.
//!
//! A [`Runner`] owns a model on a backend; a [`Stepper`] adds sequences: the one that most callers use and,
//! on demand, slots beside it. [`sampling`] turns logits into tokens. [`generate`] answers one request;
//! [`scheduler`] shares batches and [`pages`] among many.
//!
//! Deliberately absent: text (ids in, ids out), HTTP, files.

mod debug;
mod error;
pub mod generate;
mod lane;
pub mod pages;
mod prompt;
mod runner;
pub mod sampling;
pub mod scheduler;
mod slots;
mod steering;
mod stepper;

pub use error::{Error, Result};
pub use prompt::{Prompt, SoftKind, SoftSpan};
pub use runner::Runner;
pub use slots::SmokeReport;
pub use stepper::{Chunk, Heads, Stepper};
