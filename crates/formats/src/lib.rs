//! Number formats of Gemma checkpoints.
//!
//! A [`Format`] says how the codes of a matrix are laid out in bytes, a [`TensorView`] borrows one matrix
//! (rows = outputs, columns = inputs) together with the [`Scales`] that live outside its codes, and
//! [`decode_row`] turns any row of any view into float32 exactly as the format defines it. [`validate`] finds
//! what is wrong with a view before anyone computes with it; what passes decodes to finite numbers.
//! [`encode_rows`] makes a matrix in any format. The layouts are drawn in [`codec`], one file a format.
//!
//! Deliberately absent: files (crate `lapidary-weights`), packing for a device (each backend's own), and any
//! arithmetic on the decoded values.

pub mod codec;
pub mod fp4;
pub mod fp8;

mod decode;
mod encode;
mod error;
mod file;
mod format;
mod validate;
mod view;

pub use decode::{decode_codes, decode_row};
pub use encode::{Encoded, EncodedScales, Scaling, encode_rows, encode_rows_scaled};
pub use error::FormatError;
pub use file::{FileBytes, FileMap};
pub use format::Format;
pub use validate::validate;
pub use view::{Scales, TensorView};
