//! IQ4_XS: 256 codes of the IQ4_NL levels in eight sub-blocks of 32 with six-bit scales.
//!
//! ```text
//! 0   2              4               8                   136
//! +---+--------------+---------------+-------------------+
//! | d | scales_h u16 | scales_l 4 B  | qs: 8 x 16 bytes  |
//! +---+--------------+---------------+-------------------+
//! sub-block j  scale s = (nibble j of scales_l) + 16 * (bits 2j, 2j+1 of scales_h)
//!              codes   byte i of its 16: input i in the low nibble, input i + 16 in the high one
//! value = (d * (s - 32)) * LEVELS[code]
//! ```
//!
//! The encoder gives each sub-block the scale that IQ4_NL would, the largest of them becomes -32 of 31 steps.

use super::iq4_nl::LEVELS;
use super::{f16_at, nearest, put_f16, reciprocal, signed_max};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for (j, (codes, out)) in
        block[8..].as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<32>().0).enumerate()
    {
        let low = block[4 + j / 2] >> (4 * (j % 2)) & 15;
        let scale = d * f32::from((low | ((high >> (2 * j) & 3) << 4) as u8) as i8 - 32);
        for (i, &byte) in codes.iter().enumerate() {
            out[i] = scale * f32::from(LEVELS[(byte & 15) as usize]);
            out[i + 16] = scale * f32::from(LEVELS[(byte >> 4) as usize]);
        }
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 256]) -> [u8; 136] {
    let mut block = [0; 136];
    let subs = values.as_chunks::<32>().0;
    let scales: [f32; 8] = std::array::from_fn(|j| signed_max(&subs[j]) / -127.0);
    let d = put_f16(&mut block, 0, signed_max(&scales) / -32.0);
    let inverse = reciprocal(d);
    let mut high = 0u16;
    for (j, sub) in subs.iter().enumerate() {
        let steps = (scales[j] * inverse).round_ties_even().clamp(-32.0, 31.0);
        let stored = (steps + 32.0) as u8;
        block[4 + j / 2] |= (stored & 15) << (4 * (j % 2));
        high |= u16::from(stored >> 4) << (2 * j);
        for i in 0..16 {
            block[8 + 16 * j + i] =
                nearest(&LEVELS, d * steps, sub[i]) | nearest(&LEVELS, d * steps, sub[i + 16]) << 4;
        }
    }
    block[2..4].copy_from_slice(&high.to_le_bytes());
    block
}
