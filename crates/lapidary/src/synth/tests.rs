//! Small models of every kind load and give finite logits; the real ones have the tensors that they should.

use super::shape::Moe;
use super::*;
use crate::{Checkpoint, LoadOptions, load_stepper};

fn tiny() -> Shape {
    Shape {
        layers: 6,
        hidden: 256,
        heads: 4,
        kv_heads: [2, 1],
        head_dim: [64, 128],
        ff: 416,
        window: 23,
        period: 4,
        context: 512,
        vocab: 1003,
        kv_shared: 0,
        double_wide: false,
        per_layer: 0,
        values_are_keys: true,
        moe: None,
    }
}

fn tiny_with_experts() -> Shape {
    Shape { moe: Some(Moe { experts: 7, top_k: 3, ff: 96 }), ..tiny() }
}

fn tiny_with_per_layer_embeddings() -> Shape {
    Shape {
        layers: 10,
        kv_heads: [1, 1],
        period: 5,
        kv_shared: 5,
        double_wide: true,
        per_layer: 256,
        values_are_keys: false,
        ..tiny()
    }
}

fn made(shape: &Shape, mix: Mix, name: &Path, options: &SynthOptions) -> SynthReport {
    write_shape(shape, "tiny", mix, name, options, &mut |_, _| {}).expect("the file is written")
}

#[test]
fn models_of_every_kind_and_mix_load_and_give_finite_logits() {
    let folder = tempfile::tempdir().expect("scratch folder");
    for (kind, shape) in
        [("dense", tiny()), ("experts", tiny_with_experts()), ("per-layer", tiny_with_per_layer_embeddings())]
    {
        for mix in Mix::ALL {
            let path = folder.path().join(format!("{kind}-{}.gguf", mix.name()));
            made(&shape, mix, &path, &SynthOptions { seed: 5, ..SynthOptions::default() });
            let checkpoint = Checkpoint::open(&path).expect("opens");
            let options = LoadOptions { context: Some(64), threads: Some(1), ..LoadOptions::default() };
            let mut stepper = load_stepper(&checkpoint, &options, &mut |_| {}).expect("loads");
            let ids: Vec<u32> = (0..41u32).map(|i| (i * 37 + 2) % 1003).collect();
            stepper.prefill(&ids).expect("runs, and refuses logits that aren't finite");
            let mut logits = vec![0.0; shape.vocab];
            stepper.logits_into(&mut logits).expect("logits");
            let n = logits.len() as f32;
            let spread = (logits.iter().map(|v| v * v).sum::<f32>() / n).sqrt();
            assert!((0.3..15.0).contains(&spread), "{kind} {}: logits of size {spread}", mix.name());
        }
    }
}

#[test]
fn the_stand_in_vocabulary_writes_any_text_and_can_be_taken_over() {
    let folder = tempfile::tempdir().expect("scratch folder");
    let (first, second) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    made(&tiny(), Mix::Q8_0, &first, &SynthOptions::default());
    let tokenizer = Some(first.clone());
    made(
        &tiny(),
        Mix::Q4_0,
        &second,
        &SynthOptions { tokenizer: tokenizer.clone(), ..SynthOptions::default() },
    );
    for path in [&first, &second] {
        let tokenizer =
            crate::text_source::tokenizer(&Checkpoint::open(path).expect("opens")).expect("a tokenizer");
        let ids = tokenizer.encode_prompt("ä w1", lapidary_text::Specials::Plain).expect("ids");
        assert_eq!(ids[0], 2);
        assert_eq!(ids[1..3], [4 + 0xc3, 4 + 0xa4], "{ids:?}");
    }
    let other = Shape { vocab: 1009, ..tiny() };
    let options = SynthOptions { tokenizer, ..SynthOptions::default() };
    let error =
        write_shape(&other, "other", Mix::Q8_0, &second, &options, &mut |_, _| {}).expect_err("refused");
    assert!(error.to_string().contains("1003 entries, the model's has 1009"), "{error}");
}

#[test]
fn equal_seeds_give_equal_files_and_sparse_ones_are_holes() {
    let folder = tempfile::tempdir().expect("scratch folder");
    let file = |name: &str, seed, sparse| {
        let path = folder.path().join(name);
        made(&tiny(), Mix::Q4KM, &path, &SynthOptions { seed, sparse, ..SynthOptions::default() });
        std::fs::read(path).expect("reads")
    };
    let (one, again, other, sparse) = (
        file("1.gguf", 1, false),
        file("2.gguf", 1, false),
        file("3.gguf", 2, false),
        file("4.gguf", 1, true),
    );
    assert!(one == again);
    assert!(one != other);
    assert_eq!(sparse.len(), one.len());
    let zeros = |bytes: &[u8]| bytes.iter().filter(|&&b| b == 0).count();
    assert!(zeros(&sparse) > one.len() / 2 && zeros(&one) < one.len() / 10);
    Checkpoint::open(folder.path().join("4.gguf")).expect("the header is whole");
}

#[test]
fn numbers_of_layers_that_a_model_cannot_have_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("scratch folder");
    let out = folder.path().join("x.gguf");
    for (size, layers) in [(Size::E2b, 24), (Size::E4b, 0), (Size::Moe26b, 0), (Size::Dense31b, 513)] {
        let options = SynthOptions { layers: Some(layers), sparse: true, ..SynthOptions::default() };
        let error = write(size, Mix::Q8_0, &out, &options, &mut |_, _| {}).expect_err("refused");
        assert!(error.to_string().contains(&format!("can't have {layers} layers")), "{error}");
    }
    assert!(!out.exists());
}

/// Tensors, and bytes by format, of an independent listing of the same models; the five mixes in the order of
/// [`Mix::ALL`].
#[test]
fn real_models_have_the_tensors_and_types_of_converted_files() {
    for (size, mix, tensors, bytes) in LISTED {
        let shape = size.shape(None).expect("its own number of layers");
        let list = assign(*mix, &shape, shape.tensors()).expect("rows are whole blocks");
        let mut found: BTreeMap<&str, u64> = BTreeMap::new();
        for (tensor, format) in &list {
            *found.entry(format.name()).or_default() += tensor.bytes(*format);
        }
        assert_eq!(list.len(), *tensors, "{size:?} {mix:?}");
        assert_eq!(found, bytes.iter().copied().collect(), "{size:?} {mix:?}");
    }
}

type Listed = (Size, Mix, usize, &'static [(&'static str, u64)]);

const LISTED: &[Listed] = &[
    (Size::E2b, Mix::F16, 541, &[("F16", 9_256_566_784), ("F32", 1_144_972)]),
    (Size::E2b, Mix::Bf16, 541, &[("BF16", 9_256_566_784), ("F32", 1_144_972)]),
    (Size::E2b, Mix::Q8_0, 541, &[("F16", 27_525_120), ("F32", 1_144_972), ("Q8_0", 4_902_928_384)]),
    (
        Size::E2b,
        Mix::Q4_0,
        541,
        &[("F16", 27_525_120), ("F32", 1_144_972), ("Q4_0", 1_047_969_792), ("Q6_K", 2_257_059_840)],
    ),
    (
        Size::E2b,
        Mix::Q4KM,
        541,
        &[("F16", 27_525_120), ("F32", 1_144_972), ("Q4_K", 902_651_904), ("Q6_K", 2_468_981_760)],
    ),
    (Size::E4b, Mix::F16, 666, &[("F16", 14_924_906_496), ("F32", 2_241_704)]),
    (Size::E4b, Mix::Bf16, 666, &[("BF16", 14_924_906_496), ("F32", 2_241_704)]),
    (Size::E4b, Mix::Q8_0, 666, &[("F16", 55_050_240), ("F32", 2_241_704), ("Q8_0", 7_899_611_136)]),
    (
        Size::E4b,
        Mix::Q4_0,
        666,
        &[("F16", 55_050_240), ("F32", 2_241_704), ("Q4_0", 2_219_212_800), ("Q6_K", 2_862_612_480)],
    ),
    (
        Size::E4b,
        Mix::Q4KM,
        666,
        &[("F16", 55_050_240), ("F32", 2_241_704), ("Q4_K", 1_897_758_720), ("Q6_K", 3_331_399_680)],
    ),
    (Size::Dense12b, Mix::F16, 667, &[("F16", 23_813_160_960), ("F32", 3_080_384)]),
    (Size::Dense12b, Mix::Bf16, 667, &[("BF16", 23_813_160_960), ("F32", 3_080_384)]),
    (Size::Dense12b, Mix::Q8_0, 667, &[("F32", 3_080_384), ("Q8_0", 12_650_741_760)]),
    (Size::Dense12b, Mix::Q4_0, 667, &[("F32", 3_080_384), ("Q4_0", 6_131_220_480), ("Q6_K", 825_753_600)]),
    (Size::Dense12b, Mix::Q4KM, 667, &[("F32", 3_080_384), ("Q4_K", 5_246_484_480), ("Q6_K", 2_115_993_600)]),
    (Size::Moe26b, Mix::F16, 658, &[("F16", 50_443_255_808), ("F32", 46_056_568)]),
    (Size::Moe26b, Mix::Bf16, 658, &[("BF16", 50_443_255_808), ("F32", 46_056_568)]),
    (Size::Moe26b, Mix::Q8_0, 658, &[("F32", 46_056_568), ("Q8_0", 26_797_979_648)]),
    (Size::Moe26b, Mix::Q4_0, 658, &[("F32", 46_056_568), ("Q4_0", 13_771_929_600), ("Q6_K", 605_552_640)]),
    (
        Size::Moe26b,
        Mix::Q4KM,
        658,
        &[
            ("F32", 46_056_568),
            ("Q4_K", 9_347_272_704),
            ("Q5_0", 2_856_730_624),
            ("Q6_K", 667_054_080),
            ("Q8_0", 3_863_078_912),
        ],
    ),
    (Size::Dense31b, Mix::F16, 833, &[("F16", 61_392_027_648), ("F32", 5_327_088)]),
    (Size::Dense31b, Mix::Bf16, 833, &[("BF16", 61_392_027_648), ("F32", 5_327_088)]),
    (Size::Dense31b, Mix::Q8_0, 833, &[("F32", 5_327_088), ("Q8_0", 32_614_514_688)]),
    (
        Size::Dense31b,
        Mix::Q4_0,
        833,
        &[("F32", 5_327_088), ("Q4_0", 16_473_784_320), ("Q6_K", 1_156_055_040)],
    ),
    (
        Size::Dense31b,
        Mix::Q4KM,
        833,
        &[("F32", 5_327_088), ("Q4_K", 14_213_283_840), ("Q6_K", 4_452_618_240)],
    ),
];
