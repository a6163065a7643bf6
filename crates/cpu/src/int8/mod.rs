//! Products with activations in int8 blocks.
//!
//! A row of activations is quantised once, by the verb that produces it ([`activations`]); a weight matrix is
//! packed once, at load, into tiles of 16 rows ([`tiles`]); the [`kernel`] multiplies integers exactly and joins
//! the blocks of an output in ascending order. [`lanes`] names the few vector operations that it takes, so that
//! one kernel text serves every level and every format ([`formats`]).

pub(crate) mod activations;
mod codes;
mod file_rows;
mod formats;
mod kernel;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scaling;
pub(crate) mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use file_rows::decode_file_row;
pub(crate) use formats::{beside, is_packed};
pub(crate) use kernel::PAIR;

/// Name of the instruction set whose kernel multiplies `format`, if the format is packed.
pub(crate) fn kernel_name(isa: crate::level::Isa, format: lapidary_formats::Format) -> Option<&'static str> {
    kernel::choose(isa, format).map(|choice| choice.name)
}
