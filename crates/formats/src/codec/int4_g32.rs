//! INT4 in groups of 32 as compressed-tensors packs it: codes stored with +8; a bf16 scale lies elsewhere.
//!
//! ```text
//! word w (little-endian u32)   bits 0-3: input 8w   4-7: 8w+1   ...   28-31: 8w+7
//! as bytes                     | 1  0 | 3  2 | ... | 31 30 |     the even input in the low nibble
//! value = (code - 8) * scale
//! ```

use half::bf16;

use super::abs_max;

/// `code - 8`, unscaled.
#[inline]
pub fn decode(codes: &[u8; 16], out: &mut [f32; 32]) {
    for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = [f32::from((byte & 15) as i8 - 8), f32::from((byte >> 4) as i8 - 8)];
    }
}

/// Codes and scale of 32 inputs: the scale maps the largest magnitude to 7.5 (the middle of what the codes -8
/// to 7 reach on either side) and codes are the nearest under the rounded scale.
pub fn encode(values: &[f32; 32]) -> ([u8; 16], bf16) {
    let scale = bf16::from_f32(abs_max(values) / 7.5);
    let d = scale.to_f32();
    let mut codes = [0x88; 16];
    if d != 0.0 {
        let code = |v: f32| ((v / d).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8;
        for (byte, pair) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
            *byte = code(pair[0]) | code(pair[1]) << 4;
        }
    }
    (codes, scale)
}
