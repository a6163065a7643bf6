//! F32, F16 and BF16: little-endian numbers, no blocks and no scales.
//!
//! ```text
//! F32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
//! BF16  s eeeeeeee mmmmmmm                   the upper half of an F32
//! F16   s eeeee mmmmmmmmmm
//! ```
//!
//! Encoding rounds to nearest, ties to even.

use half::{bf16, f16};

/// Reads F32.
pub fn decode_f32(bytes: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*bytes);
}

/// Writes F32.
pub fn encode_f32(values: &[f32; 1]) -> [u8; 4] {
    values[0].to_le_bytes()
}

/// Widens F16.
pub fn decode_f16(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16::from_le_bytes(*bytes).to_f32();
}

/// Rounds to F16; beyond 65504 that is an infinity.
pub fn encode_f16(values: &[f32; 1]) -> [u8; 2] {
    f16::from_f32(values[0]).to_le_bytes()
}

/// Widens BF16.
pub fn decode_bf16(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = bf16::from_le_bytes(*bytes).to_f32();
}

/// Rounds to BF16.
pub fn encode_bf16(values: &[f32; 1]) -> [u8; 2] {
    bf16::from_f32(values[0]).to_le_bytes()
}
