//! Each way in which a matrix can be wrong gives its own error with the place in it.

mod common;

use common::{Arbitrary, PAIRS, Random, decode};
use lapidary_formats::{Encoded, EncodedScales, Format, FormatError, Scales, Scaling, TensorView};
use lapidary_formats::{encode_rows, encode_rows_scaled, validate};

/// A sound matrix of `rows x 3 blocks`.
fn sound(format: Format, scaling: Scaling, rows: usize) -> Encoded {
    let cols = 3 * format.block_len();
    let mut random = Random(41);
    let values: Vec<f32> = (0..rows * cols).map(|_| random.normal(1.0)).collect();
    encode_rows_scaled(format, scaling, &values, rows, cols).unwrap()
}

/// Where and what `validate` complains of, as `row col scale value`.
fn bad_scale(view: &TensorView) -> String {
    match validate(view) {
        Err(FormatError::BadScale { row, col, scale, value, .. }) => format!("{row} {col} {scale} {value}"),
        other => panic!("{} in {}: {other:?}", view.name, view.format),
    }
}

#[test]
fn lengths_and_shapes_are_held_against_each_other() {
    for format in Format::ALL {
        let good = sound(format, Scaling::Usual, 5);
        validate(&good.view("m")).unwrap();
        let mut view = good.view("m");
        view.bytes = &view.bytes[1..];
        assert!(matches!(validate(&view), Err(FormatError::ByteLength { .. })), "{format}");
        let mut view = good.view("m");
        view.rows += 1;
        assert!(matches!(validate(&view), Err(FormatError::ByteLength { .. })), "{format}");
        let mut view = good.view("m");
        (view.rows, view.bytes) = (0, &[]);
        assert!(matches!(validate(&view), Err(FormatError::Empty { .. })), "{format}");
        let mut view = good.view("m");
        view.cols = usize::MAX / format.block_len() * format.block_len();
        assert!(validate(&view).is_err(), "{format}");
        if format.block_len() > 1 {
            let mut view = good.view("m");
            view.cols += 1;
            assert!(matches!(validate(&view), Err(FormatError::PartialBlock { .. })), "{format}");
        }
    }
}

#[test]
fn scales_of_a_foreign_kind_or_number_are_refused() {
    for format in Format::ALL {
        let good = sound(format, Scaling::Usual, 5);
        let mut view = good.view("m");
        view.scales = match format {
            Format::Fp8E4M3 | Format::Nvfp4 | Format::Int4G32 => Scales::None,
            _ => Scales::Row(vec![1.0; 5]),
        };
        assert!(matches!(validate(&view), Err(FormatError::ScaleKind { .. })), "{format}");
    }
    let fp8 = sound(Format::Fp8E4M3, Scaling::Row, 5);
    let nvfp4 = sound(Format::Nvfp4, Scaling::Usual, 5);
    let int4 = sound(Format::Int4G32, Scaling::Usual, 5);
    for (encoded, scales) in [
        (&fp8, Scales::Row(vec![1.0; 4])),
        (&fp8, Scales::Block128 { values: vec![], first_row: 0 }),
        (&fp8, Scales::Block128 { values: vec![1.0], first_row: 124 }),
        (&nvfp4, Scales::Nvfp4 { blocks: &[1; 14], tensor: 1.0 }),
        (&int4, Scales::Group32Bf16(&[1; 31])),
    ] {
        let mut view = encoded.view("m");
        view.scales = scales;
        assert!(matches!(validate(&view), Err(FormatError::ScaleCount { .. })), "{:?}", view.scales);
    }
}

#[test]
fn every_f16_scale_inside_a_block_is_read() {
    const NAN: [u8; 2] = 0x7E01u16.to_le_bytes();
    const INFINITY: [u8; 2] = 0xFC00u16.to_le_bytes();
    for (format, name, offset) in [
        (Format::Q4_0, "d", 0),
        (Format::Q4_1, "d", 0),
        (Format::Q4_1, "m", 2),
        (Format::Q5_0, "d", 0),
        (Format::Q5_1, "d", 0),
        (Format::Q5_1, "m", 2),
        (Format::Q8_0, "d", 0),
        (Format::Q2K, "d", 80),
        (Format::Q2K, "dmin", 82),
        (Format::Q3K, "d", 108),
        (Format::Q4K, "d", 0),
        (Format::Q4K, "dmin", 2),
        (Format::Q5K, "d", 0),
        (Format::Q5K, "dmin", 2),
        (Format::Q6K, "d", 208),
        (Format::Iq4Nl, "d", 0),
        (Format::Iq4Xs, "d", 0),
    ] {
        for (bits, value) in [(NAN, "NaN"), (INFINITY, "-inf")] {
            let mut encoded = sound(format, Scaling::Usual, 5);
            // Row 4, block 1 of 3.
            let at = 13 * format.block_bytes() + offset;
            encoded.bytes[at..at + 2].copy_from_slice(&bits);
            assert!(decode(&encoded.view("m")).iter().any(|v| !v.is_finite()), "{format} {name}");
            let place = format!("4 {} {name} {value}", format.block_len());
            assert_eq!(bad_scale(&encoded.view("m")), place, "{format}");
        }
    }
}

#[test]
fn eight_bit_scales_that_are_no_numbers_are_refused() {
    let mut mxfp4 = sound(Format::Mxfp4, Scaling::Usual, 5);
    mxfp4.bytes[13 * 17] = 255;
    assert_eq!(bad_scale(&mxfp4.view("m")), "4 32 e NaN");
    mxfp4.bytes[13 * 17] = 253;
    assert_eq!(bad_scale(&mxfp4.view("m")), "4 32 e 2^126");
    mxfp4.bytes[13 * 17] = 252;
    validate(&mxfp4.view("m")).unwrap();

    let mut gguf = sound(Format::GgufNvfp4, Scaling::Usual, 5);
    gguf.bytes[13 * 36 + 2] = 0x7F;
    assert_eq!(bad_scale(&gguf.view("m")), "4 96 d NaN");
    gguf.bytes[13 * 36 + 2] = 0x80;
    assert_eq!(bad_scale(&gguf.view("m")), "4 96 d signed (0x80)");

    let mut nvfp4 = sound(Format::Nvfp4, Scaling::Usual, 5);
    let EncodedScales::Nvfp4 { blocks, .. } = &mut nvfp4.scales else { unreachable!() };
    blocks[13] = 0xFF;
    assert_eq!(bad_scale(&nvfp4.view("m")), "4 16 of the block NaN");
}

#[test]
fn scales_beside_the_codes_must_be_finite_and_not_overflow() {
    let fp8 = sound(Format::Fp8E4M3, Scaling::Row, 5);
    let mut view = fp8.view("m");
    for (value, name) in
        [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (1e38, "100000000000000000000000000000000000000")]
    {
        view.scales = Scales::Tensor(value);
        assert_eq!(bad_scale(&view), format!("0 0 of the tensor {name}"));
        view.scales = Scales::Row(vec![1.0, 1.0, 1.0, value, 1.0]);
        assert_eq!(bad_scale(&view), format!("3 0 of the row {name}"));
    }
    let values: Vec<f32> = (0..131 * 139).map(|i| i as f32).collect();
    let fp8 = encode_rows_scaled(Format::Fp8E4M3, Scaling::Block128, &values, 131, 139).unwrap();
    let mut view = fp8.view("m");
    view.scales = Scales::Block128 { values: vec![1.0, 1.0, 1.0, f32::NAN], first_row: 0 };
    assert_eq!(bad_scale(&view), "128 128 of the 128 x 128 block NaN");
    validate(&view.slice_rows(0, 128)).unwrap();
    assert_eq!(bad_scale(&view.slice_rows(100, 31)), "28 128 of the 128 x 128 block NaN");

    let int4 = sound(Format::Int4G32, Scaling::Usual, 5);
    let mut scales = [0x80, 0x3F].repeat(15);
    (scales[26], scales[27]) = (0x80, 0x7F);
    let mut view = int4.view("m");
    view.scales = Scales::Group32Bf16(&scales);
    assert_eq!(bad_scale(&view), "4 32 of the group inf");

    let nvfp4 = sound(Format::Nvfp4, Scaling::Usual, 5);
    let mut view = nvfp4.view("m");
    let Scales::Nvfp4 { tensor, .. } = &mut view.scales else { unreachable!() };
    *tensor = f32::INFINITY;
    assert_eq!(bad_scale(&view), "0 0 of the tensor inf");
}

#[test]
fn a_zero_scale_over_codes_is_refused_for_tensor_and_row_only() {
    let zero_scale = |view: &TensorView| match validate(view) {
        Err(FormatError::ZeroScale { row, scale, .. }) => format!("{scale} {row}"),
        other => panic!("{other:?}"),
    };
    let mut fp8 = sound(Format::Fp8E4M3, Scaling::Row, 5);
    fp8.bytes[..6].fill(0x80);
    let mut view = fp8.view("m");
    view.scales = Scales::Tensor(-0.0);
    assert_eq!(zero_scale(&view), "tensor 2");
    view.scales = Scales::Row(vec![0.0, 0.0, 1.0, 0.0, 1.0]);
    assert_eq!(zero_scale(&view), "row 3");
    view.scales = Scales::Row(vec![0.0, 0.0, 1.0, 1.0, 1.0]);
    validate(&view).unwrap();
    view.scales = Scales::Block128 { values: vec![0.0], first_row: 0 };
    validate(&view).unwrap();

    let nvfp4 = sound(Format::Nvfp4, Scaling::Usual, 5);
    let mut view = nvfp4.view("m");
    view.scales = Scales::Nvfp4 { blocks: &[0; 15], tensor: 1.0 };
    validate(&view).unwrap();
    view.scales = Scales::Nvfp4 { blocks: &[0x38; 15], tensor: 0.0 };
    assert_eq!(zero_scale(&view), "tensor 0");
    view.bytes = &[0x80; 120];
    validate(&view).unwrap();

    let gguf = sound(Format::GgufNvfp4, Scaling::Tensor, 5);
    let mut view = gguf.view("m");
    view.scales = Scales::Tensor(0.0);
    assert_eq!(zero_scale(&view), "tensor 0");
}

#[test]
fn values_that_are_no_numbers_are_refused_with_their_place() {
    let bad = |format: Format, element: &[u8]| {
        let mut encoded = encode_rows(format, &vec![1.0; 3 * 5003], 3, 5003).unwrap();
        // Far enough into the matrix that the scan has left its first run.
        let at = (2 * 5003 + 4999) * element.len();
        encoded.bytes[at..at + element.len()].copy_from_slice(element);
        match validate(&encoded.view("m")) {
            Err(FormatError::BadValue { row: 2, col: 4999, value, .. }) => value,
            other => panic!("{format}: {other:?}"),
        }
    };
    assert_eq!(bad(Format::F32, &f32::INFINITY.to_le_bytes()), f32::INFINITY);
    assert_eq!(bad(Format::F16, &0xFC00u16.to_le_bytes()), f32::NEG_INFINITY);
    assert!(bad(Format::Bf16, &0x7FC0u16.to_le_bytes()).is_nan());
    assert!(bad(Format::Fp8E4M3, &[0xFF]).is_nan());
}

#[test]
fn what_passes_decodes_to_finite_numbers() {
    let mut random = Random(97);
    let mut passed = 0;
    for pair in PAIRS {
        for _ in 0..40 {
            let matrix = Arbitrary::new(pair, 1, 1, &mut random);
            if validate(&matrix.view).is_ok() {
                passed += 1;
                assert!(decode(&matrix.view).iter().all(|v| v.is_finite()), "{:?}", matrix.view);
            }
        }
    }
    assert!(passed > 400, "only {passed} matrices passed, too few to say anything");
}
