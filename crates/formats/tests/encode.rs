//! What encoders make is legal and as near to its source as the format's steps allow.

mod common;

use common::{Random, decode};
use lapidary_formats::{
    EncodedScales, Format, FormatError, Scaling, encode_rows, encode_rows_scaled, validate,
};

const ROWS: usize = 5;

/// Error bound for a group of values under one scale, as a share of the group's largest magnitude `max` and of
/// its range `hi - lo`, from the format's steps. Rounding of the scales themselves is in it.
fn bound(format: Format, group: &[f32]) -> f32 {
    let max = group.iter().fold(0f32, |m, v| m.max(v.abs()));
    let lo = group.iter().fold(0f32, |m, &v| m.min(v));
    let range = group.iter().fold(0f32, |m, &v| m.max(v)) - lo;
    let half = |bits: i32| 2f32.powi(-bits - 1);
    // Half a step, or a whole one where the largest code is one short of the smallest (-8 .. 7: the value that
    // mirrors the largest magnitude is cut). `f16` and `bf16` rounding of a scale moves a code's value by
    // 2^-11 or 2^-8 of itself.
    let (f16, bf16) = (half(10), half(7));
    match format {
        Format::F32 => 0.0,
        Format::F16 => max * f16,
        Format::Bf16 => max * bf16,
        // Mantissa of three bits: relative 2^-4 of each value, so of the largest.
        Format::Fp8E4M3 => max * half(3),
        // Codes 4 and 6 are two apart, so one of six; the E4M3 scale may be 1/16 low, which cuts 6.4 to 6.
        Format::Nvfp4 | Format::GgufNvfp4 => max * 1.0 / 6.0 * (1.0 + 1.0 / 16.0),
        // The scale's power of two may leave the largest at just under 8, which is cut to 6: a quarter.
        Format::Mxfp4 => max * 0.25,
        Format::Int4G32 => max * (0.5 / 7.5 + 2.0 * bf16),
        Format::Q4_0 => max * (1.0 / 8.0 + f16),
        Format::Q5_0 => max * (1.0 / 16.0 + f16),
        Format::Q8_0 => max * (0.5 / 127.0 + f16),
        // Here the range is the true one (not stretched to zero), and the minimum rounds as f16 too.
        Format::Q4_1 => range * (0.5 / 15.0 + f16) + max * f16,
        Format::Q5_1 => range * (0.5 / 31.0 + f16) + max * f16,
        // Levels 89 and 113 are 24 apart; the mirror of -127 is cut at 113.
        Format::Iq4Nl => max * (14.0 / 127.0 + f16),
        _ => unreachable!("{format} shares scales among sub-blocks"),
    }
}

fn values(n: usize, sigma: f32) -> Vec<f32> {
    let mut random = Random(1234);
    (0..n).map(|_| random.normal(sigma)).collect()
}

#[test]
fn simple_formats_stay_within_their_step() {
    for (format, group) in [
        (Format::F32, 1),
        (Format::F16, 1),
        (Format::Bf16, 1),
        (Format::Nvfp4, 16),
        (Format::GgufNvfp4, 16),
        (Format::Mxfp4, 32),
        (Format::Int4G32, 32),
        (Format::Q4_0, 32),
        (Format::Q4_1, 32),
        (Format::Q5_0, 32),
        (Format::Q5_1, 32),
        (Format::Q8_0, 32),
        (Format::Iq4Nl, 32),
    ] {
        let cols = 3 * format.block_len().max(group);
        // Large enough that GGUF NVFP4 without a tensor scale has normal block scales.
        let source = values(ROWS * cols, 2.0);
        let encoded = encode_rows(format, &source, ROWS, cols).unwrap();
        let decoded = decode(&encoded.view("m"));
        for (source, decoded) in source.chunks(group).zip(decoded.chunks(group)) {
            // One more rounding of a product or sum in float32.
            let bound = bound(format, source) * 1.00001;
            for (x, y) in source.iter().zip(decoded) {
                assert!((x - y).abs() <= bound, "{format}: {x} became {y}, more than {bound} away");
            }
        }
    }
}

/// In K-quants and IQ4_XS a sub-block's scale is itself rounded to a step of the block's, so a sub-block much
/// smaller than its neighbours has a coarse scale. The bound has a term for the sub-block and one for the block.
#[test]
fn k_quants_stay_within_their_steps() {
    // Format, sub-block, largest code (or |smallest|), largest scale, and whether there are minimums.
    for (format, sub, codes, scales, affine) in [
        (Format::Q2K, 16, 3.0, 15.0, true),
        (Format::Q4K, 32, 15.0, 63.0, true),
        (Format::Q5K, 32, 31.0, 63.0, true),
        (Format::Q3K, 16, 4.0, 32.0, false),
        (Format::Q6K, 16, 32.0, 128.0, false),
        (Format::Iq4Xs, 32, 127.0 / 14.0, 32.0, false),
    ] {
        let source = values(ROWS * 768, 0.03);
        let encoded = encode_rows(format, &source, ROWS, 768).unwrap();
        let decoded = decode(&encoded.view("m"));
        for (source, decoded) in source.chunks(256).zip(decoded.chunks(256)) {
            let extent = |values: &[f32]| {
                let (lo, hi) = values.iter().fold((0f32, 0f32), |(lo, hi), &v| (lo.min(v), hi.max(v)));
                if affine { hi - lo } else { hi.max(-lo) }
            };
            // Half a scale step moves the far code by half its share; minimums move by half a step of theirs.
            // A signed sub-block whose own scale is the largest loses a whole scale step where the mirror of the
            // smallest scale is cut (-32 .. 31).
            let whole = sub_extent_max(source, sub, extent);
            let slack = whole * if affine { 1.0 / scales } else { 1.5 / scales } + whole * 2f32.powi(-10);
            for (x, y) in source.chunks(sub).zip(decoded.chunks(sub)) {
                // Half a code's step for minimum formats, a whole one where the mirrored extreme is cut.
                let step = (extent(x) + slack) / codes;
                let bound = step * if affine { 0.5 } else { 1.0 } + slack;
                for (x, y) in x.iter().zip(y) {
                    assert!((x - y).abs() <= bound, "{format}: {x} became {y}, more than {bound} away");
                }
            }
        }
    }
}

fn sub_extent_max(values: &[f32], sub: usize, extent: impl Fn(&[f32]) -> f32) -> f32 {
    values.chunks(sub).map(extent).fold(0.0, f32::max)
}

#[test]
fn fp8_stays_within_its_step_for_every_placement_of_scales() {
    let (rows, cols) = (131, 139);
    let mut source = values(rows * cols, 1.0);
    // One row and one corner far larger than the rest: only their own scales may notice.
    source[3 * cols..4 * cols].iter_mut().for_each(|v| *v *= 1000.0);
    source[rows * cols - 1] = -77777.0;
    for scaling in [Scaling::Tensor, Scaling::Row, Scaling::Block128] {
        let encoded = encode_rows_scaled(Format::Fp8E4M3, scaling, &source, rows, cols).unwrap();
        let decoded = decode(&encoded.view("m"));
        let scales = match &encoded.scales {
            EncodedScales::Tensor(scale) => vec![*scale],
            EncodedScales::Row(scales) | EncodedScales::Block128(scales) => scales.clone(),
            other => panic!("{other:?}"),
        };
        assert!(scales.iter().all(|s| s.to_bits() & 0xFFFF == 0), "files may store scales as bf16");
        for (i, (x, y)) in source.iter().zip(&decoded).enumerate() {
            let (row, col) = (i / cols, i % cols);
            let group = |other: usize| match scaling {
                Scaling::Row => other / cols == row,
                Scaling::Block128 => (other / cols / 128, other % cols / 128) == (row / 128, col / 128),
                _ => true,
            };
            // Relative 2^-4 for normal codes; half of 2^-9 of the scale, a bf16, for subnormal ones.
            if i % 97 == 0 || i + 1 == source.len() {
                let max = (0..source.len()).filter(|&o| group(o)).fold(0f32, |m, o| m.max(source[o].abs()));
                let scale = max / 448.0 * (1.0 + 1.0 / 256.0);
                let bound = (x.abs() / 16.0).max(scale / 1024.0) * 1.00001;
                assert!((x - y).abs() <= bound, "{scaling:?} {row} {col}: {x} became {y}");
            }
        }
    }
}

#[test]
fn a_tensor_scale_saves_small_weights_in_gguf_nvfp4() {
    let source = values(ROWS * 192, 0.003);
    let error = |scaling| {
        let encoded = encode_rows_scaled(Format::GgufNvfp4, scaling, &source, ROWS, 192).unwrap();
        let decoded = decode(&encoded.view("m"));
        source.iter().zip(&decoded).map(|(x, y)| ((x - y) as f64).powi(2)).sum::<f64>().sqrt()
    };
    assert!(error(Scaling::Tensor) < 0.7 * error(Scaling::Usual));
}

#[test]
fn zero_matrices_and_tiny_values_encode_legally_in_every_format() {
    for format in Format::ALL {
        let cols = 3 * format.block_len();
        for value in [0.0, -0.0, 1e-44, -1e-41, 1e-9] {
            let source = vec![value; ROWS * cols];
            let encoded = encode_rows(format, &source, ROWS, cols).unwrap();
            validate(&encoded.view("m")).unwrap();
            let worst = decode(&encoded.view("m")).iter().fold(0f32, |m, v| m.max((v - value).abs()));
            assert!(worst <= value.abs(), "{format}: {value} became something {worst} away");
        }
    }
}

#[test]
fn the_source_must_fit_shape_and_range() {
    let encode = |format, values: &[f32], rows, cols| encode_rows(format, values, rows, cols).unwrap_err();
    assert!(matches!(encode(Format::F32, &[1.0; 6], 2, 4), FormatError::ValueCount { expected: 8, .. }));
    assert!(matches!(encode(Format::F32, &[], usize::MAX, 2), FormatError::ValueCount { .. }));
    assert!(matches!(encode(Format::Q4_0, &[1.0; 33], 1, 33), FormatError::PartialBlock { .. }));
    assert!(matches!(encode(Format::F32, &[], 0, 4), FormatError::Empty { .. }));
    for format in Format::ALL {
        let mut source = vec![1.0; 2 * format.block_len()];
        source[format.block_len()] = f32::NAN;
        let error = encode(format, &source, 2, format.block_len());
        assert!(matches!(error, FormatError::BadValue { row: 1, col: 0, .. }), "{format}");
    }
    let huge = vec![1e38; 256];
    for format in
        [Format::F16, Format::Q4_0, Format::Q4_1, Format::Q8_0, Format::Q4K, Format::Q6K, Format::Iq4Xs]
    {
        let error = encode(format, &huge, 1, 256);
        assert!(
            matches!(error, FormatError::BadValue { .. } | FormatError::BadScale { .. }),
            "{format}: {error}"
        );
    }
    assert!(matches!(encode(Format::GgufNvfp4, &huge, 1, 256), FormatError::OutOfRange { .. }));
    let error = encode_rows_scaled(Format::Q4_0, Scaling::Row, &huge, 1, 256).unwrap_err();
    assert!(matches!(error, FormatError::Scaling { .. }));
}
