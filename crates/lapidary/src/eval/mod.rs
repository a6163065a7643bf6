//! How well a model, a number format or a backend predicts: perplexity, distance between two runs, multiple choice.
//!
//! What is scored is a list of [`Unit`]s: tokens that are run from an empty sequence, and the range of them that counts.
//! [`windows`] cuts a text into units, [`chat`] takes the answers of conversations. [`ppl`], [`kl`] and [`choice`] go
//! through them one at a time; a [`Record`] keeps what each unit gave, so that an evaluation that was broken off goes on
//! where it was.
//!
//! Logits are looked at row by row as they leave the head; no more than a batch of them is ever kept.

mod choice;
mod dump;
mod error;
mod kl;
mod ppl;
mod record;
mod row;
mod units;

pub use choice::{Choice, ChoiceResult, Context, Question, choice, questions};
pub use dump::{DumpFile, DumpRows};
pub use error::{EvalError, Result};
pub use kl::{Kl, KlUnit, Rows, StepperRows, kl};
pub use ppl::{Ppl, PplUnit, ppl};
pub use record::Record;
pub use row::{Distance, distance, log_probability};
pub use units::{ChatUnits, Unit, chat, windows};

/// How far an evaluation is: tokens scored, and tokens to score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scored {
    /// So far.
    pub done: usize,
    /// In all.
    pub total: usize,
}
