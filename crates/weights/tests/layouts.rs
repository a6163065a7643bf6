//! One model stored in each layout: what is quantised decodes as its definition says, and experts are the same
//! however they lie.

mod support;

use half::bf16;
use lapidary_formats::{Format, Scales, TensorView};
use lapidary_weights::LayerRole::*;
use lapidary_weights::safetensors::Dtype;
use lapidary_weights::{Checkpoint, Error, ExpertPart, Role};
use support::{Tensor, folder, folder_with, message};

const EXPERTS: usize = 3;
const WIDTH: usize = 5;
const HIDDEN: usize = 7;

fn q_proj() -> Role {
    Role::Layer(0, QProj)
}

/// The only matrix of a checkpoint: `q_proj` of layer 0 with these companions.
fn one(parts: Vec<Tensor>) -> Result<(Checkpoint, tempfile::TempDir), Error> {
    let dir = folder(&named(parts, "model.layers.0.self_attn.q_proj"));
    Checkpoint::open(dir.path()).map(|c| (c, dir))
}

fn named(parts: Vec<Tensor>, module: &str) -> Vec<Tensor> {
    parts.into_iter().map(|t| Tensor { name: format!("{module}.{}", t.name), ..t }).collect()
}

/// What taking the view of that matrix gives.
fn view_error(parts: Vec<Tensor>) -> Error {
    match one(parts) {
        Ok((c, _dir)) => c.tensor(q_proj()).map(|v| format!("{v:?}")).expect_err("should have been refused"),
        Err(e) => e,
    }
}

#[test]
fn experts_are_the_same_in_every_bf16_layout() {
    let per_expert = |part: ExpertPart, e: usize| {
        let shape = if part == ExpertPart::Down { [HIDDEN, WIDTH] } else { [WIDTH, HIDDEN] };
        Tensor::bf16(&format!("{}.{e}", part.name()), &shape)
    };
    let stack = |name: &str, parts: &[ExpertPart]| {
        let matrices: Vec<Tensor> =
            (0..EXPERTS).flat_map(|e| parts.iter().map(move |p| per_expert(*p, e))).collect();
        let [rows, cols] = matrices[0].shape[..] else { panic!() };
        let bytes = matrices.iter().flat_map(|t| t.bytes.clone()).collect();
        Tensor::new(
            &format!("model.layers.4.{name}"),
            Dtype::Bf16,
            &[EXPERTS, parts.len() * rows, cols],
            bytes,
        )
    };
    use ExpertPart::{Down, Gate, Up};
    let fused = vec![stack("experts.gate_up_proj", &[Gate, Up]), stack("experts.down_proj", &[Down])];
    let moe = vec![stack("moe.gate_up_proj", &[Gate, Up]), stack("moe.down_proj", &[Down])];
    let separate = vec![
        stack("experts.gate_proj", &[Gate]),
        stack("experts.up_proj", &[Up]),
        stack("experts.down_proj", &[Down]),
    ];
    let each = |prefix: &str| -> Vec<Tensor> {
        (0..EXPERTS)
            .flat_map(|e| ExpertPart::ALL.map(|p| (e, p)))
            .map(|(e, p)| Tensor {
                name: format!("model.layers.4.{prefix}{e}.{}.weight", p.name()),
                ..per_expert(p, e)
            })
            .collect()
    };
    let layouts = [fused, moe, separate, each("experts."), each("moe.experts.")];
    for tensors in &layouts {
        let dir = folder(tensors);
        let c = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(c.experts_in_file(4), EXPERTS);
        for e in 0..EXPERTS {
            for part in ExpertPart::ALL {
                let expected = per_expert(part, e);
                let view = c.expect_expert(4, e as u32, part, expected.shape[0], expected.shape[1]).unwrap();
                assert_eq!(
                    view.bytes,
                    &expected.bytes[..],
                    "{} of expert {e} in {}",
                    part.name(),
                    tensors[0].name
                );
            }
        }
        assert!(c.expert(4, EXPERTS as u32, Gate).unwrap().is_none());
    }
    // Two layouts in one layer leave it open which is meant.
    for pair in [(0, 3), (0, 2), (3, 2)] {
        let both: Vec<Tensor> = layouts[pair.0].iter().chain(&layouts[pair.1]).cloned().collect();
        let mut seen = std::collections::HashSet::new();
        let both: Vec<Tensor> = both.into_iter().filter(|t| seen.insert(t.name.clone())).collect();
        let result = Checkpoint::open(folder(&both).path());
        assert!(matches!(result, Err(Error::Duplicate { .. })), "{result:?}");
        message(result, &["model.layers.4.", "experts", "keep one"]);
    }
    // A stack with an odd number of rows has no halves.
    let odd = [Tensor::bf16("model.layers.4.experts.gate_up_proj", &[2, 5, 3])];
    let dir = folder(&odd);
    let c = Checkpoint::open(dir.path()).unwrap();
    message(c.expert(4, 0, Gate), &["gate_up_proj", "[2, 5, 3]", "even"]);
}

/// 131 x 259: a last block of 3 rows and one of 3 columns.
const ROWS: usize = 131;
const COLS: usize = 259;

fn fp8(scale: Tensor) -> Vec<Tensor> {
    vec![Tensor::codes("weight", Dtype::F8E4M3, &[ROWS, COLS]), scale]
}

#[test]
fn fp8_scales_are_read_in_every_shape_and_type() {
    let rows: Vec<f32> = (0..ROWS).map(|r| 1.0 + r as f32).collect();
    let blocks: Vec<f32> = (0..6).map(|b| 0.25 + b as f32).collect();
    let scales = |scale: Tensor| {
        let (c, _dir) = one(fp8(scale)).unwrap();
        let view = c.expect(q_proj(), ROWS, COLS).unwrap();
        assert_eq!((view.format, view.bytes.len()), (Format::Fp8E4M3, ROWS * COLS));
        match view.scales {
            Scales::Tensor(s) => vec![s],
            Scales::Row(s) => s,
            Scales::Block128 { values, first_row: 0 } => [vec![f32::NAN], values].concat(),
            other => panic!("{other:?}"),
        }
    };
    for shape in [&[][..], &[1], &[1, 1]] {
        assert_eq!(scales(Tensor::f32s("weight_scale", shape, &[0.375])), [0.375]);
        assert_eq!(scales(Tensor::bf16s("weight_scale", shape, &[0.375])), [0.375]);
    }
    for shape in [&[ROWS][..], &[ROWS, 1]] {
        assert_eq!(scales(Tensor::f32s("weight_scale", shape, &rows)), rows);
        assert_eq!(scales(Tensor::bf16s("weight_scale", shape, &rows)), rows);
    }
    assert_eq!(scales(Tensor::f32s("weight_scale", &[2, 3], &blocks))[1..], blocks);
    assert_eq!(scales(Tensor::bf16s("weight_scale", &[2, 3], &blocks))[1..], blocks);
}

#[test]
fn fp8_without_a_usable_scale_is_refused() {
    let weight = || Tensor::codes("weight", Dtype::F8E4M3, &[ROWS, COLS]);
    let missing = view_error(vec![weight()]);
    assert!(matches!(missing, Error::MissingTensor { .. }));
    message::<()>(Err(missing), &["q_proj.weight_scale", "q_proj.weight need"]);
    let orphan = view_error(vec![Tensor::f32s("weight_scale", &[1], &[1.0])]);
    message::<()>(Err(orphan), &["q_proj.weight ", "missing", "q_proj.weight_scale"]);
    for shape in [&[COLS][..], &[3, 2], &[2, 2], &[1, ROWS], &[ROWS, 2]] {
        let count: usize = shape.iter().product();
        let wrong = view_error(fp8(Tensor::f32s("weight_scale", shape, &vec![1.0; count])));
        assert!(matches!(wrong, Error::WrongShape { .. }), "{shape:?}");
        message::<()>(Err(wrong), &["q_proj.weight_scale", &format!("{shape:?}"), "[2, 3]", "[131, 1]"]);
    }
    message::<()>(
        Err(view_error(fp8(Tensor::codes("weight_scale", Dtype::U8, &[1])))),
        &["weight_scale", "U8", "BF16"],
    );
    for (index, bad) in [(0, f32::NAN), (77, f32::INFINITY), (78, 1e36), (ROWS - 1, -1.0), (5, 0.0)] {
        let mut rows = vec![1.0; ROWS];
        rows[index] = bad;
        let error = view_error(fp8(Tensor::f32s("weight_scale", &[ROWS, 1], &rows)));
        assert!(matches!(error, Error::BadScale { index: i, .. } if i == index), "{error:?}");
        message::<()>(Err(error), &["q_proj.weight_scale", &format!("element {index}")]);
    }
    message::<()>(
        Err(view_error(fp8(Tensor::f32s("weight_scale", &[], &[0.0])))),
        &["weight_scale", "element 0 is 0"],
    );
    // Beside plain values a scale has no meaning.
    let stray = vec![Tensor::bf16("weight", &[3, 5]), Tensor::f32s("weight_scale", &[1], &[2.0])];
    message::<()>(Err(view_error(stray)), &["q_proj.weight_scale", "BF16"]);
    // The other 8-bit float is not read as this one.
    let e5m2 =
        vec![Tensor::codes("weight", Dtype::F8E5M2, &[3, 5]), Tensor::f32s("weight_scale", &[1], &[2.0])];
    message::<()>(Err(view_error(e5m2)), &["q_proj.weight", "F8_E5M2"]);
}

#[test]
fn a_zero_scale_is_legal_over_zeros_and_for_a_block() {
    let mut zero_row = Tensor::codes("weight", Dtype::F8E4M3, &[ROWS, COLS]);
    zero_row.bytes[COLS * 4..COLS * 5].fill(0x80);
    let mut rows = vec![1.0; ROWS];
    rows[4] = 0.0;
    let (c, _dir) = one(vec![zero_row, Tensor::f32s("weight_scale", &[ROWS], &rows)]).unwrap();
    c.expect(q_proj(), ROWS, COLS).unwrap();
    let (c, _dir) = one(fp8(Tensor::f32s("weight_scale", &[2, 3], &[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]))).unwrap();
    c.expect(q_proj(), ROWS, COLS).unwrap();
}

/// 3 x 48: three blocks of 16 a row.
fn nvfp4(codes: &str, tensor: &str, value: f32) -> Vec<Tensor> {
    vec![
        Tensor::codes(codes, Dtype::U8, &[3, 24]),
        Tensor::codes("weight_scale", Dtype::F8E4M3, &[3, 3]),
        Tensor::f32s(tensor, if tensor == "weight_scale_2" { &[] } else { &[1] }, &[value]),
    ]
}

fn nvfp4_scales<'a>(view: &TensorView<'a>) -> (&'a [u8], f32) {
    match view.scales {
        Scales::Nvfp4 { blocks, tensor } => (blocks, tensor),
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn both_nvfp4_conventions_give_the_same_multiplier() {
    let (divisor, _d) = one(nvfp4("weight_packed", "weight_global_scale", 2688.0 / 0.75)).unwrap();
    let (multiplier, _m) = one(nvfp4("weight", "weight_scale_2", 0.75 / 2688.0)).unwrap();
    let a = divisor.expect(q_proj(), 3, 48).unwrap();
    let b = multiplier.expect(q_proj(), 3, 48).unwrap();
    assert_eq!((a.format, b.format), (Format::Nvfp4, Format::Nvfp4));
    assert_eq!(a.bytes, b.bytes);
    let ((blocks, s), (other_blocks, t)) = (nvfp4_scales(&a), nvfp4_scales(&b));
    assert_eq!(blocks, other_blocks);
    assert_eq!(blocks.len(), 9);
    // Both round the same real number, one of them twice: they differ by two units in the last place at most.
    assert!((s / t - 1.0).abs() <= 2.0 * f32::EPSILON, "{s} and {t}");
    let (c, _dir) = one(nvfp4("weight_packed", "weight_global_scale", 4.0)).unwrap();
    assert_eq!(nvfp4_scales(&c.expect(q_proj(), 3, 48).unwrap()).1, 0.25);
    let (c, _dir) = one(nvfp4("weight", "weight_scale_2", 4.0)).unwrap();
    assert_eq!(nvfp4_scales(&c.expect(q_proj(), 3, 48).unwrap()).1, 4.0);
}

#[test]
fn each_matrix_keeps_its_own_tensor_scale() {
    let modules = [("q_proj", 1.0), ("k_proj", 2.0), ("v_proj", 4.0)];
    let tensors: Vec<Tensor> = modules
        .iter()
        .flat_map(|(m, s)| {
            named(nvfp4("weight", "weight_scale_2", *s), &format!("model.layers.0.self_attn.{m}"))
        })
        .collect();
    let dir = folder(&tensors);
    let c = Checkpoint::open(dir.path()).unwrap();
    for (role, (_, scale)) in [QProj, KProj, VProj].into_iter().zip(modules) {
        assert_eq!(nvfp4_scales(&c.expect(Role::Layer(0, role), 3, 48).unwrap()).1, scale);
    }
}

#[test]
fn nvfp4_without_usable_scales_is_refused() {
    for (codes, tensor) in [("weight_packed", "weight_global_scale"), ("weight", "weight_scale_2")] {
        let parts = || nvfp4(codes, tensor, 1.0);
        for dropped in 1..3 {
            let mut less = parts();
            let name = less.remove(dropped).name;
            message::<()>(Err(view_error(less)), &[&format!("q_proj.{name}"), "missing"]);
        }
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, if tensor == "weight_scale_2" { 1e36 } else { 1e-36 }]
        {
            let error = view_error(nvfp4(codes, tensor, bad));
            assert!(matches!(error, Error::BadScale { .. }), "{error:?}");
            message::<()>(
                Err(error),
                &[&format!("q_proj.{tensor}"), "positive, with weights that are finite"],
            );
        }
        for (byte, found) in [(0x7f, "NaN"), (0xff, "NaN"), (0xb8, "-1"), (0x81, "-0.001953125")] {
            let mut bad = parts();
            bad[1].bytes[7] = byte;
            message::<()>(Err(view_error(bad)), &["q_proj.weight_scale ", "element 7", found]);
        }
        let mut zero_blocks = parts();
        zero_blocks[1].bytes.fill(0);
        zero_blocks[1].bytes[3] = 0x80;
        let (c, _dir) = one(zero_blocks).unwrap();
        c.expect(q_proj(), 3, 48).unwrap();
        let mut wrong = parts();
        wrong[1] = Tensor::codes("weight_scale", Dtype::F8E4M3, &[3, 2]);
        message::<()>(Err(view_error(wrong)), &["q_proj.weight_scale", "[3, 2]", "[3, 3]"]);
        let mut wrong = parts();
        wrong[0] = Tensor::codes(codes, Dtype::U8, &[3, 23]);
        message::<()>(Err(view_error(wrong)), &[codes, "[3, 23]", "8 bytes"]);
    }
    // The scale of one convention beside the codes of the other: neither reading is safe.
    message::<()>(Err(view_error(nvfp4("weight_packed", "weight_scale_2", 1.0))), &["q_proj.weight_scale_2"]);
    message::<()>(
        Err(view_error(nvfp4("weight", "weight_global_scale", 1.0))),
        &["q_proj.weight_global_scale"],
    );
    // A divisor without a finite reciprocal.
    message::<()>(
        Err(view_error(nvfp4("weight_packed", "weight_global_scale", 1e-40))),
        &["weights that are finite"],
    );
}

/// 3 x 96: three groups of 32 a row.
fn int4() -> Vec<Tensor> {
    let shape: Vec<u8> = [3i64, 96].iter().flat_map(|n| n.to_le_bytes()).collect();
    vec![
        Tensor::codes("weight_packed", Dtype::I32, &[3, 12]),
        Tensor::bf16s("weight_scale", &[3, 3], &[0.5, -0.25, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 7.0]),
        Tensor::new("weight_shape", Dtype::I64, &[2], shape),
    ]
}

#[test]
fn int4_groups_are_read() {
    let (c, _dir) = one(int4()).unwrap();
    let view = c.expect(q_proj(), 3, 96).unwrap();
    assert_eq!((view.format, view.bytes.len()), (Format::Int4G32, 3 * 48));
    let Scales::Group32Bf16(bytes) = view.scales else { panic!("{:?}", view.scales) };
    assert_eq!(bytes, int4()[1].bytes);
    assert_eq!(bf16::from_le_bytes([bytes[2], bytes[3]]).to_f32(), -0.25);
    let [share] = c.formats()[..] else { panic!("one format") };
    assert_eq!((share.tensors, share.bytes, c.parameters()), (1, 144 + 18 + 16, 288));

    let mut no_shape = int4();
    no_shape.pop();
    let (c, _dir) = one(no_shape).unwrap();
    c.expect(q_proj(), 3, 96).unwrap();
}

#[test]
fn int4_that_is_something_else_is_refused() {
    let with = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut parts = int4();
        change(&mut parts);
        view_error(parts)
    };
    // Eight-bit codes in the same words: half as many columns as four-bit codes would be.
    let eight_bit = with(&|p| p[2].bytes[8] = 48);
    message::<()>(Err(eight_bit), &["q_proj.weight_shape", "[3, 48]", "[3, 96]"]);
    message::<()>(
        Err(with(&|p| p[1] = Tensor::bf16s("weight_scale", &[3, 1], &[1.0; 3]))),
        &["weight_scale", "[3, 3]"],
    );
    message::<()>(
        Err(with(&|p| p[1] = Tensor::f32s("weight_scale", &[3, 3], &[1.0; 9]))),
        &["weight_scale", "BF16"],
    );
    message::<()>(
        Err(with(&|p| p[0] = Tensor::codes("weight_packed", Dtype::I32, &[3, 13]))),
        &["weight_packed", "[3, 13]", "4 words"],
    );
    let nan = with(&|p| p[1].bytes[12..14].copy_from_slice(&[0xc0, 0x7f]));
    message::<()>(Err(nan), &["q_proj.weight_scale", "element 6", "NaN"]);
    let zero_point = with(&|p| p.push(Tensor::codes("weight_zero_point", Dtype::I32, &[3, 3])));
    assert!(matches!(zero_point, Error::NotSupported { .. }));
    message::<()>(Err(zero_point), &["weight_zero_point", "not yet supported"]);
}

#[test]
fn quantised_experts_carry_their_own_scales_and_their_gaps_are_noted() {
    let mut tensors = Vec::new();
    for e in 0..9 {
        for part in ExpertPart::ALL {
            let module = format!("model.language_model.layers.6.experts.{e}.{}", part.name());
            let mut parts = nvfp4("weight_packed", "weight_global_scale", 2f32.powi(e));
            if part != ExpertPart::Gate || ![3, 7].contains(&e) {
                let bad = part == ExpertPart::Down && [1, 8].contains(&e);
                let scale = if bad { 0.0 } else { 3.5 };
                parts.push(Tensor::f32s("input_global_scale", &[1], &[scale]));
            }
            tensors.extend(named(parts, &module));
        }
    }
    let dir = folder(&tensors);
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(c.experts_in_file(6), 9);
    let notes = c.notes();
    assert_eq!(notes.len(), 1, "{notes:?}");
    for part in ["layer 6", "experts 3, 7 ", "gate_proj"] {
        assert!(notes[0].contains(part), "{notes:?}");
    }
    for e in 0..9 {
        for part in ExpertPart::ALL {
            let view = c.expect_expert(6, e, part, 3, 48).unwrap();
            assert_eq!(nvfp4_scales(&view).1, 2f32.powi(-(e as i32)));
        }
    }
    let notes = c.notes();
    assert_eq!(notes.len(), 2, "{notes:?}");
    for part in ["layer 6", "experts 1, 8:", "down_proj"] {
        assert!(notes[1].contains(part), "{notes:?}");
    }
}

#[test]
fn router_and_small_projections_may_be_quantised() {
    let router =
        named(fp8(Tensor::bf16s("weight_scale", &[ROWS, 1], &[0.5; ROWS])), "model.layers.0.router.proj");
    let dir = folder(&router);
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(c.expect(Role::Layer(0, Router), ROWS, COLS).unwrap().format, Format::Fp8E4M3);
    // A vector has to be plain.
    let norm = named(vec![Tensor::codes("weight", Dtype::I8, &[4])], "model.norm");
    message(Checkpoint::open(folder(&norm).path()), &["model.norm.weight", "I8"]);
    let norm = [Tensor::f32s("model.norm.weight", &[3], &[1.0, f32::NAN, 1.0])];
    let dir = folder(&norm);
    let c = Checkpoint::open(dir.path()).unwrap();
    message(c.vector(Role::FinalNorm, 3), &["model.norm.weight", "element 1", "NaN"]);
}

#[test]
fn vectors_come_in_three_types() {
    let values = [1.5f32, -0.25, 96.0];
    let half: Vec<u8> = values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    for tensor in [
        Tensor::f32s("model.norm.weight", &[3], &values),
        Tensor::bf16s("model.norm.weight", &[3], &values),
        Tensor::new("model.norm.weight", Dtype::F16, &[3], half),
    ] {
        let dir = folder(&[tensor]);
        let c = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(c.expect_vector(Role::FinalNorm, 3).unwrap(), values);
        assert!(c.vector(Role::PerLayerProjNorm, 3).unwrap().is_none());
    }
    let dir = folder(&[Tensor::bf16s("model.layers.0.layer_scalar", &[], &[0.5])]);
    assert_eq!(
        Checkpoint::open(dir.path()).unwrap().expect_vector(Role::Layer(0, LayerScalar), 1).unwrap(),
        [0.5]
    );
}

#[test]
fn schemes_are_accepted_or_refused_by_name() {
    let scheme = |weights: &str| {
        let config = format!(
            r#"{{"quantization_config": {{"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*vision.*"],
               "config_groups": {{"group_0": {{"targets": ["Linear"], "format": "f", "weights": {weights}}}}}}}}}"#
        );
        let dir = folder_with(&config, &[Tensor::bf16("model.norm.weight", &[5])]);
        Checkpoint::open(dir.path()).map(|_| ())
    };
    for good in [
        r#"{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "group_size": null}"#,
        r#"{"num_bits": 8, "type": "float", "strategy": "tensor"}"#,
        r#"{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}"#,
        r#"{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}"#,
        r#"{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true}"#,
        "null",
        "{}",
    ] {
        scheme(good).unwrap_or_else(|e| panic!("{good}: {e}"));
    }
    for (bad, part) in [
        (
            r#"{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}"#,
            "FP8 in blocks of [64, 64]",
        ),
        (r#"{"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}"#, "FP4 in groups of 32"),
        (
            r#"{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}"#,
            "INT4 in groups of 128",
        ),
        (r#"{"num_bits": 4, "type": "int", "strategy": "channel"}"#, "one scale a channel"),
        (r#"{"num_bits": 8, "type": "int", "strategy": "channel"}"#, "8-bit int"),
        (
            r#"{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": false}"#,
            "asymmetric",
        ),
    ] {
        let result = scheme(bad);
        assert!(matches!(result, Err(Error::NotSupported { .. })), "{result:?}");
        message(result, &["config.json", part, "group_0", "INT4 in groups of 32"]);
    }
    let wrong = scheme(r#"{"num_bits": "four"}"#);
    assert!(matches!(wrong, Err(Error::BadConfig { .. })), "{wrong:?}");
}
