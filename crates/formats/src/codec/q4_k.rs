//! Q4_K: 256 four-bit codes in eight sub-blocks of 32, each with a six-bit scale and minimum.
//!
//! ```text
//! 0   2      4              16                   144
//! +---+------+--------------+--------------------+
//! | d | dmin | scales: 12 B | qs: 4 x 32 bytes   |   scales: see k_quant
//! +---+------+--------------+--------------------+
//! byte l of qs group g: input l of sub-block 2g in the low nibble, of sub-block 2g + 1 in the high one
//! value = (d * scale) * code - dmin * minimum
//! ```

use super::f16_at;
use super::k_quant::{encode_affine, pack_scales, unpack_scales};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    let (scales, minimums) = unpack_scales(block[4..16].as_array().expect("twelve bytes"));
    for (j, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[j]);
        let minimum = dmin * f32::from(minimums[j]);
        let codes = &block[16 + j / 2 * 32..][..32];
        for (value, byte) in out.iter_mut().zip(codes) {
            *value = scale * f32::from(byte >> (4 * (j % 2)) & 15) - minimum;
        }
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 256]) -> [u8; 144] {
    let q = encode_affine::<8>(values, 15, 63);
    let mut block = [0; 144];
    block[0..2].copy_from_slice(&q.d.to_le_bytes());
    block[2..4].copy_from_slice(&q.dmin.to_le_bytes());
    block[4..16].copy_from_slice(&pack_scales(&q.scales, &q.minimums));
    for (i, &code) in q.codes.iter().enumerate() {
        block[16 + i / 64 * 32 + i % 32] |= code << (i % 64 / 32 * 4);
    }
    block
}
