//! Writing strips: the layouts of `kernels/common/forms.cuh`, byte by byte.
//!
//! Lane `4 g + t` of a warp holds rows `g` and `g + 8` of a strip; `lane` below runs over them.

use std::ops::Range;

use lapidary_formats::{Format, Scales, TensorView};

use super::codes::{Row, read_row};
use super::form::{Form, PackedShape};

/// Outputs of a strip.
pub const STRIP_ROWS: usize = 16;

/// Writes the strips `strips` of `view` to `out`, which is exactly as long.
///
/// Rows beyond the matrix and inputs beyond its width become zeros. The view has passed
/// [`validate`](lapidary_formats::validate).
///
/// # Panics
/// When `out` has another length or a strip lies outside the matrix.
pub fn pack_strips(view: &TensorView<'_>, strips: Range<usize>, out: &mut [u8]) {
    let shape = PackedShape::of(view);
    assert!(strips.end <= shape.strips(), "strip {} lies outside {}", strips.end, view.name);
    assert_eq!(out.len(), strips.len() * shape.strip_bytes(), "strips of {}", view.name);
    let padded = shape.chunks() * shape.form.chunk_inputs();
    let mut rows: [Row; STRIP_ROWS] = Default::default();
    for (strip, out) in strips.zip(out.chunks_exact_mut(shape.strip_bytes())) {
        for (r, row) in rows.iter_mut().enumerate() {
            let at = strip * STRIP_ROWS + r;
            read_row(view, at.min(view.rows - 1), padded, row);
            if at >= view.rows {
                row.codes.fill(zero_code(shape.form));
                row.scales.fill(0);
            }
        }
        for (chunk, out) in out.chunks_exact_mut(shape.form.chunk_bytes()).enumerate() {
            write_chunk(shape.form, &rows, chunk, out);
            if shape.form == Form::Fp8Block {
                write_block_scales(view, strip, chunk, &mut out[1024..]);
            }
        }
    }
}

/// The factor of each output that multiplies its sum, where the format has one: FP8 by matrix or row, NVFP4's matrix
/// multiplier.
pub fn row_scales(view: &TensorView<'_>) -> Option<Vec<f32>> {
    match (&view.scales, view.format) {
        (Scales::Row(scales), Format::Fp8E4M3) => Some(scales.clone()),
        (Scales::Tensor(scale) | Scales::Nvfp4 { tensor: scale, .. }, _) if *scale != 1.0 => {
            Some(vec![*scale; view.rows])
        }
        _ => None,
    }
}

fn zero_code(form: Form) -> u8 {
    match form {
        Form::Int4 | Form::Int4Bf16 => 8,
        Form::Int8 | Form::Sub16 => 128,
        _ => 0,
    }
}

fn write_chunk(form: Form, rows: &[Row; STRIP_ROWS], chunk: usize, out: &mut [u8]) {
    let k0 = chunk * form.chunk_inputs();
    match form {
        Form::Bf16 => bf16_codes(rows, k0, out),
        Form::Fp8 | Form::Fp8Block => {
            for lane in 0..32 {
                let t = lane & 3;
                for r in 0..2 {
                    let codes = &rows[(lane >> 2) + 8 * r].codes[k0..];
                    for j in 0..4 {
                        let k = 32 * (j >> 1) + 8 * t + 4 * (j & 1);
                        let word = [codes[k + 2], codes[k], codes[k + 3], codes[k + 1]];
                        out[r * 512 + lane * 16 + j * 4..][..4].copy_from_slice(&word);
                    }
                }
            }
        }
        Form::Nvfp4 => {
            for lane in 0..32 {
                let t = lane & 3;
                for r in 0..2 {
                    let row = &rows[(lane >> 2) + 8 * r];
                    for w in 0..2 {
                        let word = nibble_word(&row.codes[k0 + 16 * t + 8 * w..][..8]);
                        out[lane * 16 + (r * 2 + w) * 4..][..4].copy_from_slice(&word.to_le_bytes());
                    }
                    out[512 + lane * 2 + r] = row.scales.get(k0 / 16 + t).copied().unwrap_or(0);
                }
            }
        }
        Form::Int4 | Form::Int4Bf16 => {
            nibble_codes(rows, k0, out);
            block_scales::<2>(rows, chunk, &mut out[512..]);
        }
        Form::Int4Min => {
            nibble_codes(rows, k0, out);
            block_scales::<4>(rows, chunk, &mut out[512..]);
        }
        Form::Int8 => {
            byte_codes(rows, k0, NARROW, out);
            block_scales::<2>(rows, chunk, &mut out[1024..]);
        }
        Form::Int8Min => {
            byte_codes(rows, k0, NARROW, out);
            block_scales::<4>(rows, chunk, &mut out[1024..]);
        }
        Form::Q4K => {
            (0..4).for_each(|p| nibble_codes(rows, k0 + 64 * p, &mut out[512 * p..]));
            headers(rows, chunk, &mut out[2048..]);
        }
        Form::Q5K => {
            (0..4).for_each(|p| byte_codes(rows, k0 + 64 * p, NARROW, &mut out[1024 * p..]));
            headers(rows, chunk, &mut out[4096..]);
        }
        Form::Sub16 => {
            (0..4).for_each(|p| byte_codes(rows, k0 + 64 * p, SUB16, &mut out[1024 * p..]));
            for (r, row) in rows.iter().enumerate() {
                let scales = &row.scales[chunk * 18..][..18];
                for p in 0..4 {
                    out[4096 + p * 64 + r * 4..][..4].copy_from_slice(&scales[4 * p..4 * p + 4]);
                }
                out[4352 + 2 * r..][..2].copy_from_slice(&scales[16..]);
            }
        }
    }
}

fn bf16_codes(rows: &[Row; STRIP_ROWS], k0: usize, out: &mut [u8]) {
    for lane in 0..32 {
        let t = lane & 3;
        for j in 0..4 {
            for w in 0..4 {
                let k = k0 + 32 * (j >> 1) + 8 * t + 4 * (j & 1) + (w >> 1) * 2;
                let pair = &rows[(lane >> 2) + 8 * (w & 1)].codes[2 * k..][..4];
                out[j * 512 + lane * 16 + w * 4..][..4].copy_from_slice(pair);
            }
        }
    }
}

/// Eight codes of four bits, those of even inputs in the word's low half.
fn nibble_word(q: &[u8]) -> u32 {
    q.iter().enumerate().fold(0, |w, (i, &q)| w | u32::from(q) << (4 * (i >> 1) + 16 * (i & 1)))
}

/// 64 inputs: a word for each block of 32 and row, even inputs in its low half.
fn nibble_codes(rows: &[Row; STRIP_ROWS], k0: usize, out: &mut [u8]) {
    for lane in 0..32 {
        let t = lane & 3;
        for h in 0..2 {
            for r in 0..2 {
                let q = &rows[(lane >> 2) + 8 * r].codes[k0 + 32 * h + 8 * t..][..8];
                out[lane * 16 + (h * 2 + r) * 4..][..4].copy_from_slice(&nibble_word(q).to_le_bytes());
            }
        }
    }
}

/// Which input of 64 a lane's word `i` of block `h` starts at: `[h, t, i]` strides.
pub(super) const NARROW: [usize; 3] = [32, 8, 4];
/// The order in which every product covers 16 neighbours.
pub(super) const SUB16: [usize; 3] = [32, 4, 16];

fn byte_codes(rows: &[Row; STRIP_ROWS], k0: usize, [sh, st, si]: [usize; 3], out: &mut [u8]) {
    for lane in 0..32 {
        let t = lane & 3;
        for h in 0..2 {
            for r in 0..2 {
                let codes = &rows[(lane >> 2) + 8 * r].codes[k0..];
                for i in 0..2 {
                    let k = sh * h + st * t + si * i;
                    let word = [codes[k], codes[k + 2], codes[k + 1], codes[k + 3]];
                    out[h * 512 + lane * 16 + (r * 2 + i) * 4..][..4].copy_from_slice(&word);
                }
            }
        }
    }
}

/// `N` bytes for each 32 inputs, two blocks a chunk: `[g][block][row g, row g + 8]`.
fn block_scales<const N: usize>(rows: &[Row; STRIP_ROWS], chunk: usize, out: &mut [u8]) {
    for (at, row) in rows.iter().enumerate() {
        for h in 0..2 {
            let scale = row.scales.get((2 * chunk + h) * N..).and_then(|s| s.first_chunk::<N>()).copied();
            let to = (at % 8) * 4 * N + h * 2 * N + at / 8 * N;
            out[to..to + N].copy_from_slice(&scale.unwrap_or([0; N]));
        }
    }
}

fn headers(rows: &[Row; STRIP_ROWS], chunk: usize, out: &mut [u8]) {
    for (r, row) in rows.iter().enumerate() {
        out[16 * r..16 * r + 16].copy_from_slice(&row.scales[16 * chunk..16 * chunk + 16]);
    }
}

/// The two scales that a strip can meet (its rows lie in one band of 128 or in two) and the row where the second
/// begins.
fn write_block_scales(view: &TensorView<'_>, strip: usize, chunk: usize, out: &mut [u8]) {
    let Scales::Block128 { values, first_row } = &view.scales else { unreachable!("the form says so") };
    let (across, row) = (view.cols.div_ceil(128), first_row + strip * STRIP_ROWS);
    let at = |band: usize| values.get(band * across + chunk * 64 / 128).copied().unwrap_or(0.0);
    let split = (128 - row % 128) as i32;
    out[..4].copy_from_slice(&at(row / 128).to_le_bytes());
    out[4..8].copy_from_slice(&at(row / 128 + 1).to_le_bytes());
    out[8..12].copy_from_slice(&split.to_le_bytes());
    out[12..16].fill(0);
}
