//! The slow, obvious backend that judges the others.
//!
//! [`ReferenceBackend`] carries out every verb of `lapidary_ops::Ops` in plain loops: one thread, no SIMD, no
//! unsafe, weights decoded to float32. Activations are stored in float32, as on every backend in its float32
//! mode; whatever is summed or composed inside one verb is float64 and rounded once when it is stored. The
//! judge's own rounding is therefore that of storing float32 values, some thousand times below the limits
//! that a kernel is held to.
//!
//! Beside it stand the other things that only tests need: [`compare`](mod@compare) says how far two runs
//! of numbers are apart, [`golden`] reads the stored outputs of the published implementation, [`tiny`] writes
//! small random checkpoints of every variant.
//!
//! Deliberately absent: speed, and any place in a binary that is handed out.

mod backend;
pub mod compare;
mod decode;
mod error;
pub mod golden;
mod kv;
pub mod math;
mod ops;
pub mod tiny;

pub use backend::ReferenceBackend;
pub use compare::{Limits, Report, assert_close, compare};
pub use error::{Error, Result};
pub use golden::Golden;
