//! Reads scales and refuses those that would make weights infinite, not a number, or all zero.

use half::{bf16, f16};
use lapidary_formats::Scales;
use lapidary_formats::fp4::E2M1_MAX;
use lapidary_formats::fp8::{E4M3_MAX, e4m3_to_f32};

use super::{Convention, Spread};
use crate::safetensors::{Dtype, Shards, TensorId};
use crate::{Error, Result};

/// The values of a small F32, BF16 or F16 tensor, or `None` for another type.
pub(crate) fn floats(shards: &Shards, id: TensorId) -> Option<Vec<f32>> {
    let bytes = shards.bytes(id);
    match shards.entry(id).dtype {
        Dtype::F32 => {
            Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
        Dtype::Bf16 => {
            Some(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect())
        }
        Dtype::F16 => {
            Some(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect())
        }
        _ => None,
    }
}

/// FP8: value = code * scale. A zero is a legal scale where the codes under it are zero too, and for a block, which it
/// makes a zero block; above codes it would silence a row or the whole matrix.
pub(super) fn fp8<'a>(shards: &Shards, scale: TensorId, spread: Spread, codes: &[u8]) -> Result<Scales<'a>> {
    let values = floats(shards, scale).expect("the type was checked when the layout was settled");
    let per_scale = codes.len() / values.len();
    for (index, &value) in values.iter().enumerate() {
        let zero_allowed = || {
            spread == Spread::Block128
                || codes[index * per_scale..(index + 1) * per_scale].iter().all(|code| code & 0x7f == 0)
        };
        let finite = (value * E4M3_MAX).is_finite();
        if !(finite && (value > 0.0 || value == 0.0 && zero_allowed())) {
            return Err(bad(shards, scale, index, value, "positive, with weights that are finite"));
        }
    }
    Ok(match spread {
        Spread::Tensor => Scales::Tensor(values[0]),
        Spread::Row => Scales::Row(values),
        Spread::Block128 => Scales::Block128 { values, first_row: 0 },
    })
}

/// NVFP4: value = code * block * tensor, where `tensor` is always a multiplier.
///
/// A file's divisor `g` becomes `1 / g` rounded to float32, so values differ from an exact `code * block / g` by
/// at most one part in 2^24 (plus the rounding of the product itself).
pub(super) fn nvfp4<'a>(
    shards: &'a Shards,
    blocks: TensorId,
    tensor: TensorId,
    convention: Convention,
) -> Result<Scales<'a>> {
    let stored = floats(shards, tensor).expect("the type was checked when the layout was settled")[0];
    let multiplier = match convention {
        Convention::Divisor => 1.0 / stored,
        Convention::Multiplier => stored,
    };
    // The reciprocal of a tiny divisor is infinite, that of an infinite one is zero.
    let finite = (multiplier * E4M3_MAX * E2M1_MAX).is_finite();
    if !(finite && stored.is_finite() && multiplier > 0.0) {
        return Err(bad(shards, tensor, 0, stored, "positive, with weights that are finite"));
    }
    let bytes = shards.bytes(blocks);
    // E4M3: 0x7f and 0xff are the two codes that are not a number; 0x80 is minus zero, as good as zero.
    if let Some(index) = bytes.iter().position(|&b| b == 0x7f || b > 0x80) {
        return Err(bad(shards, blocks, index, e4m3_to_f32(bytes[index]), "finite and not negative"));
    }
    Ok(Scales::Nvfp4 { blocks: bytes, tensor: multiplier })
}

/// INT4: value = (code - 8) * scale. Negative scales are allowed: weights trained in a signed-scale format
/// (GGUF's Q4_0 is one) keep their signs when repacked.
pub(super) fn int4(shards: &Shards, scale: TensorId) -> Result<Scales<'_>> {
    let bytes = shards.bytes(scale);
    let values = bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]));
    if let Some((index, value)) = values.enumerate().find(|(_, v)| !(v.to_f32() * 8.0).is_finite()) {
        return Err(bad(shards, scale, index, value.to_f32(), "one with weights that are finite"));
    }
    Ok(Scales::Group32Bf16(bytes))
}

/// INT4 files repeat the shape `[rows, cols]` of the codes as two integers; other integers mean another packing.
pub(super) fn check_stated_shape(shards: &Shards, shape: TensorId, packed: [usize; 2]) -> Result<()> {
    let stated: Vec<i64> = shards
        .bytes(shape)
        .chunks_exact(8)
        .map(|b| i64::from_le_bytes(b.try_into().expect("chunks are eight bytes")))
        .collect();
    if stated.iter().zip(packed).all(|(&s, p)| usize::try_from(s) == Ok(p)) {
        return Ok(());
    }
    Err(Error::BadTensor {
        path: shards.file(shape).path().to_owned(),
        tensor: shards.entry(shape).name.clone(),
        what: format!("it states {stated:?}, the packed 4-bit codes hold {packed:?}"),
    })
}

fn bad(shards: &Shards, id: TensorId, index: usize, found: f32, expected: &'static str) -> Error {
    let (path, tensor) = (shards.file(id).path().to_owned(), shards.entry(id).name.clone());
    Error::BadScale { path, tensor, index, found, expected }
}
