//! The built-in model: a small trained Gemma 4 with routed experts, so that the first command works offline.

use lapidary_weights::Checkpoint;

use crate::error::Result;

/// The bytes, aligned like a mapped file, so that a backend may read matrices in place.
#[repr(align(64))]
struct Aligned<T: ?Sized>(T);

static PEBBLE: &Aligned<[u8]> = &Aligned(*include_bytes!("../../../models/pebble-moe-q8_0.gguf"));

/// Opens the built-in model.
///
/// # Errors
/// None that a test has not ruled out: the file is part of the library.
pub fn builtin() -> Result<Checkpoint> {
    Ok(Checkpoint::from_gguf_bytes("pebble (built in)", &PEBBLE.0)?)
}
