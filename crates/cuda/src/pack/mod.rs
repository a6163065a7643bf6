//! Weights as the skinny and prefill kernels read them.
//!
//! A matrix becomes strips of 16 outputs, a strip a run of chunks of 64 (or 256) inputs, a chunk the bytes of the
//! tensor core's A operand in the order in which a warp's lanes read them, scales behind. The layouts are drawn at
//! each kernel form in `kernels/common/forms.cuh`; [`strips`] writes them.
//!
//! Twenty file formats become twelve [`Form`]s. A format that has no form of its own is rewritten into one that
//! holds exactly the same numbers, at the cost of memory ([`Form::added_bytes`]); F32, F16 and Q2_K, which none
//! can hold, are rounded to bf16. Everything here is plain host code, tested against `lapidary_formats`.

mod codes;
mod form;
mod read;
mod segment;
mod strips;

pub use form::{Form, PackedShape};
pub use read::decode_row;
pub use segment::{Segment, segments};
pub use strips::{STRIP_ROWS, pack_strips, row_scales};
