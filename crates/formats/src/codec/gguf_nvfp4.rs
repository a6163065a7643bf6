//! NVFP4 as GGUF holds it (type 40): 64 E2M1 codes under four unsigned E4M3 scales in the block.
//!
//! ```text
//! 0            4                     36
//! +------------+---------------------+
//! | d: 4 bytes | qs: 4 x 8 bytes     |   sub-block s of 16 inputs, byte j of its 8:
//! +------------+---------------------+   input j in the low nibble, input j + 8 in the high one
//! value = (ue4m3(d[s]) / 2) * (2 * e2m1(code)),  times the tensor's own scale when the file has one
//! ```
//!
//! Nibbles pair differently from the safetensors form. Codes are doubled integers and scales halved, as in
//! ggml. Without a tensor scale, magnitudes below about 0.1 fall among the subnormal block scales and lose
//! precision; encode with one where small weights matter.

use super::{abs_max, nearest};
use crate::fp4::{E2M1_DOUBLED, E2M1_MAX};
use crate::fp8::{ue4m3_from_f32, ue4m3_to_f32};

/// Decodes one block, without a tensor scale.
#[inline]
pub fn decode(block: &[u8; 36], out: &mut [f32; 64]) {
    let (scales, codes) = block.split_at(4);
    for ((&scale, codes), out) in scales.iter().zip(codes.as_chunks::<8>().0).zip(out.as_chunks_mut::<16>().0)
    {
        let d = ue4m3_to_f32(scale) * 0.5;
        for (j, &byte) in codes.iter().enumerate() {
            out[j] = d * f32::from(E2M1_DOUBLED[(byte & 15) as usize]);
            out[j + 8] = d * f32::from(E2M1_DOUBLED[(byte >> 4) as usize]);
        }
    }
}

/// Encodes one block of values that are already divided by the tensor scale, if there is one.
pub fn encode(values: &[f32; 64]) -> [u8; 36] {
    let mut block = [0; 36];
    for (s, sub) in values.as_chunks::<16>().0.iter().enumerate() {
        block[s] = ue4m3_from_f32(abs_max(sub) / E2M1_MAX);
        let d = ue4m3_to_f32(block[s]) * 0.5;
        for j in 0..8 {
            block[4 + 8 * s + j] =
                nearest(&E2M1_DOUBLED, d, sub[j]) | nearest(&E2M1_DOUBLED, d, sub[j + 8]) << 4;
        }
    }
    block
}
