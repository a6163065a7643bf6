//! Rows of packed formats as float32, straight from the bytes of a file.
//!
//! The formats' own decoders index nibbles and bits one value at a time, which compilers leave as it is. Here a
//! block goes through the words of four codes that packing makes of it, compiled for each level. Each value takes
//! the steps of the format's definition, so the bits are the same.

use lapidary_formats::Format;

use super::activations::BLOCK;
use super::codes::Words;
use super::formats::{Kind, with_kind};
use super::scaling::{RowFactors, Scaling};
use crate::level::Isa;
#[cfg(target_arch = "x86_64")]
use crate::level::Level;

/// Decodes a row whose scales beside the codes, where it has any for its blocks, are `beside`; false where the format is
/// not a packed one or the row no whole blocks of 32. A multiplier of the matrix is left to the caller.
pub(crate) fn decode_file_row(
    isa: Isa,
    format: Format,
    bytes: &[u8],
    beside: &[u8],
    out: &mut [f32],
) -> bool {
    out.len().is_multiple_of(BLOCK)
        && with_kind!(format, K => at_level::<K>(isa, bytes, beside, out)).is_some()
}

fn at_level<K: Kind>(isa: Isa, bytes: &[u8], beside: &[u8], out: &mut [f32]) {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was detected.
        Level::Avx512 => unsafe { avx512::<K>(bytes, beside, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 | Level::AvxVnni => unsafe { avx2::<K>(bytes, beside, out) },
        _ => plain::<K>(bytes, beside, out),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn avx512<K: Kind>(bytes: &[u8], beside: &[u8], out: &mut [f32]) {
    plain::<K>(bytes, beside, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<K: Kind>(bytes: &[u8], beside: &[u8], out: &mut [f32]) {
    plain::<K>(bytes, beside, out);
}

#[inline(always)]
fn plain<K: Kind>(bytes: &[u8], beside: &[u8], out: &mut [f32]) {
    // Scales of a super-block as a tile has them, this row the first of it.
    let mut scales = [0u8; 512];
    let scales = &mut scales[..K::Scaling::BYTES];
    let files = bytes.chunks_exact(K::FILE_BYTES).enumerate();
    for ((i, file), out) in files.zip(out.chunks_exact_mut(K::Scaling::BLOCKS * BLOCK)) {
        K::Scaling::put(file, &beside[i * K::Scaling::BESIDE..][..K::Scaling::BESIDE], 0, scales);
        for (j, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let words = K::words(&file, j);
            for (half, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                half_values::<K>(&words, half, K::Scaling::row(scales, 0, j, half), out);
            }
        }
    }
}

/// The values of half a block.
#[inline(always)]
pub(super) fn half_values<K: Kind>(words: &Words, half: usize, f: RowFactors, out: &mut [f32; 16]) {
    let mut codes = [0u8; 16];
    for (bytes, word) in codes.as_chunks_mut::<4>().0.iter_mut().zip(&words[4 * half..4 * half + 4]) {
        *bytes = word.to_le_bytes();
    }
    for (value, code) in out.iter_mut().zip(codes) {
        let number = match K::LEVELS {
            Some(levels) => i32::from(levels[usize::from(code & 15)]) - K::OFFSET,
            None if K::SIGNED => i32::from(code as i8),
            None => i32::from(code) - K::OFFSET,
        };
        let number = if K::NEGATIVE_ZERO && code & 15 == 8 { -0.0 } else { number as f32 };
        *value = f.scale * number;
        if K::Scaling::MINIMUM {
            *value += f.minimum;
        }
    }
}
