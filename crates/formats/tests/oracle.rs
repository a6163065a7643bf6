//! Decoders and encoders against values that independent tools computed, bit for bit.

mod common;

use common::{Oracle, decode, f32s};
use lapidary_formats::{Format, Scales, TensorView, encode_rows, fp4, fp8, validate};

fn check(name: &str, format: Format, scales: impl FnOnce(&Oracle) -> Scales<'_>) {
    let oracle = Oracle::read(name);
    let view = TensorView {
        name: name.into(),
        rows: oracle.rows,
        cols: oracle.cols,
        format,
        bytes: &oracle.codes,
        scales: scales(&oracle),
    };
    validate(&view).unwrap();
    let decoded = decode(&view);
    for (i, (got, want)) in decoded.iter().zip(&oracle.values).enumerate() {
        let (row, col) = (i / oracle.cols, i % oracle.cols);
        assert_eq!(
            got.to_bits(),
            want.to_bits(),
            "{name}, row {row}, column {col}: {got:e}, oracle {want:e}"
        );
    }
}

#[test]
fn self_contained_formats_decode_as_their_reference() {
    for (name, format) in [
        ("decode_f32", Format::F32),
        ("decode_f16", Format::F16),
        ("decode_bf16", Format::Bf16),
        ("decode_q4_0", Format::Q4_0),
        ("decode_q4_1", Format::Q4_1),
        ("decode_q5_0", Format::Q5_0),
        ("decode_q5_1", Format::Q5_1),
        ("decode_q8_0", Format::Q8_0),
        ("decode_q2_k", Format::Q2K),
        ("decode_q3_k", Format::Q3K),
        ("decode_q4_k", Format::Q4K),
        ("decode_q5_k", Format::Q5K),
        ("decode_q6_k", Format::Q6K),
        ("decode_iq4_nl", Format::Iq4Nl),
        ("decode_iq4_xs", Format::Iq4Xs),
        ("decode_mxfp4", Format::Mxfp4),
        ("decode_nvfp4", Format::GgufNvfp4),
    ] {
        check(name, format, |_| Scales::None);
    }
}

#[test]
fn fp8_decodes_under_every_kind_of_scale() {
    check("decode_fp8_tensor", Format::Fp8E4M3, |o| Scales::Tensor(f32s(&o.scales)[0]));
    check("decode_fp8_row", Format::Fp8E4M3, |o| Scales::Row(f32s(&o.scales)));
    check("decode_fp8_block128", Format::Fp8E4M3, |o| Scales::Block128 {
        values: f32s(&o.scales),
        first_row: 0,
    });
}

#[test]
fn nvfp4_is_the_product_of_its_three_numbers_rounded_once() {
    check("decode_nvfp4_safetensors", Format::Nvfp4, |o| {
        let (blocks, tensor) = o.scales.split_at(o.scales.len() - 4);
        Scales::Nvfp4 { blocks, tensor: f32s(tensor)[0] }
    });
}

#[test]
fn int4_decodes_from_its_words() {
    check("decode_int4_g32", Format::Int4G32, |o| Scales::Group32Bf16(&o.scales));
}

#[test]
fn encoders_agree_with_ggml_bit_for_bit() {
    for (name, format) in [
        ("encode_q4_0", Format::Q4_0),
        ("encode_q4_1", Format::Q4_1),
        ("encode_q5_0", Format::Q5_0),
        ("encode_q5_1", Format::Q5_1),
        ("encode_q8_0", Format::Q8_0),
        ("encode_mxfp4", Format::Mxfp4),
        ("encode_bf16", Format::Bf16),
    ] {
        let oracle = Oracle::read(name);
        let encoded = encode_rows(format, &oracle.values, oracle.rows, oracle.cols).unwrap();
        assert!(encoded.bytes == oracle.codes, "{name}");
    }
}

#[test]
fn e4m3_and_e2m1_round_as_ml_dtypes() {
    let oracle = Oracle::read("encode_e4m3");
    for (&value, &code) in oracle.values.iter().zip(&oracle.codes) {
        assert_eq!(fp8::e4m3_from_f32(value), code, "{value}");
    }
    let oracle = Oracle::read("encode_e2m1");
    for (&value, &code) in oracle.values.iter().zip(&oracle.codes) {
        assert_eq!(fp4::e2m1_from_f32(value), code, "{value}");
    }
}
