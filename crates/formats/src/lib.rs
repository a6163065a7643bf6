//! Number formats of Gemma checkpoints.
//!
//! A [`Format`] says how the codes of a matrix are laid out in bytes, a [`TensorView`] borrows one matrix
//! (rows = outputs, columns = inputs) together with the [`Scales`] that live outside its codes, and
//! `decode_row` turns any row of any view into float32 exactly as the format defines it. Encoding is here
//! too, for the formats that this project writes.
//!
//! Deliberately absent: files (crate `lapidary-weights`), packing for a device (each backend's own), and any
//! arithmetic on the decoded values.

mod format;
mod view;

pub use format::Format;
pub use view::{Scales, TensorView};
