//! Packed bytes hold the numbers of the file.

use lapidary_cuda::pack::{Form, PackedShape, STRIP_ROWS, decode_row, pack_strips, row_scales, segments};
use lapidary_formats::{Encoded, Format, Scales, Scaling, TensorView, encode_rows_scaled, validate};

/// Values of both signs and several magnitudes, other in every place.
fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let mut h = (i ^ seed.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B);
            h = (h ^ h >> 13).wrapping_mul(0xC2B2_AE35);
            let unit = (h >> 8) as f32 / (1 << 23) as f32 - 1.0;
            unit * (1.0 + (h & 7) as f32) * 0.05
        })
        .collect()
}

fn encode(format: Format, scaling: Scaling, rows: usize, cols: usize) -> Encoded {
    encode_rows_scaled(format, scaling, &values(rows * cols, rows as u32), rows, cols).unwrap()
}

fn cases(format: Format) -> Vec<Scaling> {
    match format {
        Format::Fp8E4M3 => vec![Scaling::Tensor, Scaling::Row, Scaling::Block128],
        Format::GgufNvfp4 => vec![Scaling::Usual, Scaling::Tensor],
        _ => vec![Scaling::Usual],
    }
}

/// Bits of every row as packed, scales applied, beside those of the file.
fn check(view: &TensorView) {
    validate(view).unwrap();
    let shape = PackedShape::of(view);
    let mut packed = vec![0xAA; shape.bytes()];
    // In two goes, as loader threads do.
    let cut = shape.strips() / 2;
    let (a, b) = packed.split_at_mut(cut * shape.strip_bytes());
    pack_strips(view, 0..cut, a);
    pack_strips(view, cut..shape.strips(), b);
    let scales = row_scales(view);
    let mut expected = vec![0.0; view.cols];
    for row in 0..view.rows {
        lapidary_formats::decode_row(view, row, &mut expected);
        if shape.form == Form::Bf16 && !Form::is_exact(view.format) {
            expected.iter_mut().for_each(|v| *v = half::bf16::from_f32(*v).to_f32());
        }
        let scale = scales.as_ref().map_or(1.0, |s| s[row]);
        for (k, (found, expected)) in decode_row(shape, &packed, row).iter().zip(&expected).enumerate() {
            let found = found * scale;
            assert!(found == *expected, "{} row {row} input {k}: {found} for {expected}", view.name);
        }
    }
}

#[test]
fn every_format_survives_packing_at_odd_sizes() {
    for format in Format::ALL {
        for scaling in cases(format) {
            let block = format.block_len();
            // Whole strips and chunks; then neither, as far as the blocks allow.
            for (rows, cols) in [(48, 512), (37, block.max(16) * 3), (1, block), (157, block.max(8) * 13)] {
                let encoded = encode(format, scaling, rows, cols);
                check(&encoded.view(format!("{format} {scaling:?} {rows} x {cols}")));
            }
        }
    }
}

#[test]
fn slices_keep_their_block_scales() {
    let encoded = encode(Format::Fp8E4M3, Scaling::Block128, 400, 320);
    let view = encoded.view("fp8");
    for (first, rows) in [(0, 400), (100, 131), (120, 16), (255, 90)] {
        check(&view.slice_rows(first, rows));
    }
}

#[test]
fn padding_is_zero() {
    for format in Format::ALL {
        let encoded = encode(format, Scaling::Usual, 5, format.block_len().max(16) * 3);
        let view = encoded.view(format.name());
        let shape = PackedShape::of(&view);
        let mut packed = vec![0xAA; shape.bytes()];
        pack_strips(&view, 0..shape.strips(), &mut packed);
        let whole = PackedShape {
            rows: shape.strips() * STRIP_ROWS,
            cols: shape.chunks() * shape.form.chunk_inputs(),
            ..shape
        };
        for row in 0..whole.rows {
            let values = decode_row(whole, &packed, row);
            let padding = if row < view.rows { &values[view.cols..] } else { &values[..] };
            assert!(padding.iter().all(|v| *v == 0.0), "{format} row {row}");
        }
    }
}

#[test]
fn parts_join_when_form_and_strips_allow() {
    let q8 = encode(Format::Q8_0, Scaling::Usual, 32, 256);
    let q5 = encode(Format::Q5_0, Scaling::Usual, 24, 256);
    let k4 = encode(Format::Q4K, Scaling::Usual, 16, 256);
    let (q8, q5, k4) = (q8.view("q8"), q5.view("q5"), k4.view("k4"));
    let list = |parts: &[TensorView]| -> Vec<_> {
        segments(parts).into_iter().map(|s| (s.parts, s.first_row, s.shape.rows)).collect()
    };
    assert_eq!(list(&[q8.clone(), q5.clone()]), [(0..2, 0, 56)]);
    assert_eq!(list(&[q5.clone(), q8.clone()]), [(0..1, 0, 24), (1..2, 24, 32)]);
    assert_eq!(list(&[q8.clone(), k4.clone(), k4, q5]), [(0..1, 0, 32), (1..3, 32, 32), (3..4, 64, 24)]);
}

#[test]
fn added_memory_is_counted() {
    let added = |format: Format, rows: usize, cols: usize| {
        Form::added_bytes(&encode(format, Scaling::Usual, rows, cols).view("w"))
    };
    // 34 for 22 bytes a block of 32; 4384 for 16 rows of 210.
    assert_eq!(added(Format::Q5_0, 16, 64), 16 * 2 * (34 - 22));
    assert_eq!(added(Format::Q6K, 16, 256), 4384 - 16 * 210);
    assert_eq!(added(Format::Q4K, 16, 256), 0);
    assert_eq!(added(Format::Bf16, 16, 64), 0);
    let encoded = encode(Format::Nvfp4, Scaling::Usual, 16, 64);
    let Scales::Nvfp4 { .. } = encoded.view("w").scales else { panic!() };
    assert_eq!(Form::added_bytes(&encoded.view("w")), 16 * 4, "one float32 factor a row");
}
