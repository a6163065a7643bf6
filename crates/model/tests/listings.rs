//! The pass of every variant, a verb a line, against stored text: whoever changes what is computed, or its
//! order, changes a file that a person reads.

use std::fs;
use std::path::Path;

use lapidary_model::{BuildOptions, Config, EmbedScale, Limits, Model};
use lapidary_ops::{BatchShape, TailRows};
use lapidary_reference::ReferenceBackend;
use lapidary_reference::tiny::{self, Variant};
use lapidary_weights::{Checkpoint, ConfigSource};

fn model(variant: Variant) -> Model {
    let dir = tempfile::tempdir().unwrap();
    tiny::write(variant, dir.path()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let config = match checkpoint.config() {
        ConfigSource::Json { config, .. } => Config::from_json(config).unwrap(),
        other => panic!("{other:?}"),
    };
    let limits = Limits { rows: 8, head_rows: 3 };
    let options = BuildOptions { limits, embed_scale: EmbedScale::Bf16, requantise: Default::default() };
    Model::build(config, &checkpoint, &mut ReferenceBackend::new(), &options, &mut |_| {}).unwrap()
}

fn listing(model: &Model, shape: &BatchShape) -> String {
    model.listing(shape).unwrap().iter().map(|l| format!("{}\n", l.trim_end())).collect()
}

/// Set `LAPIDARY_WRITE_LISTINGS` to write the files instead, then read what has changed.
fn check(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/listings").join(format!("{name}.txt"));
    if std::env::var_os("LAPIDARY_WRITE_LISTINGS").is_some() {
        fs::write(&path, text).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    for (i, (found, expected)) in text.lines().zip(stored.lines()).enumerate() {
        assert_eq!(found, expected, "{name}, line {}", i + 1);
    }
    assert_eq!(text.lines().count(), stored.lines().count(), "{name}: number of lines");
}

#[test]
fn the_whole_pass_of_every_variant() {
    for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs, Variant::Unified, Variant::Gemma3]
    {
        let m = model(variant);
        check(variant.name(), &listing(&m, &m.check_shape()));
    }
}

#[test]
fn both_config_forms_make_the_same_pass() {
    let pass = |variant| {
        let m = model(variant);
        // Only the names of tensors differ, by their prefix.
        listing(&m, &m.check_shape()).replace("model.language_model.", "model.")
    };
    assert_eq!(pass(Variant::Dense), pass(Variant::DensePerLayerConfig));
}

/// Without heads the pass ends with the last KV write; a tail for all rows compacts the residual at the end.
#[test]
fn the_shapes_that_change_a_pass() {
    let m = model(Variant::PerLayerInputs);
    let whole = m.check_shape();
    let plain = BatchShape { has_soft: false, steered: false, ..whole.clone() };
    let no_heads = BatchShape { head_rows: 0, ..plain.clone() };
    let all_rows = BatchShape { tail: TailRows::All, ..plain.clone() };
    let all_no_heads = BatchShape { tail: TailRows::All, ..no_heads.clone() };
    let part = BatchShape { layers: (2, 3), ..plain.clone() };
    let none = BatchShape { layers: (0, 0), ..plain.clone() };
    check("shape_no_heads", &listing(&m, &no_heads));
    check("shape_all_rows", &listing(&m, &all_rows));
    check("shape_layer_2", &listing(&m, &part));
    check("shape_no_layers", &listing(&m, &none));

    let lines = |s: &BatchShape| m.listing(s).unwrap();
    let soft: Vec<_> = lines(&whole).into_iter().filter(|l| !l.starts_with("inject_soft")).collect();
    let steered = lines(&BatchShape { steered: true, ..plain.clone() });
    assert_eq!(soft, steered, "soft rows add one verb");
    let (steers, others): (Vec<_>, Vec<_>) = steered.into_iter().partition(|l| l.starts_with("steer "));
    assert_eq!(others, lines(&plain), "steering adds one verb");
    assert_eq!(steers.len(), m.layers.len(), "in each layer");
    assert!(lines(&plain).starts_with(&lines(&no_heads)), "without heads it is a beginning of the pass");
    let last = lines(&no_heads).pop().unwrap();
    assert!(last.starts_with("qkv_finish") && last.contains("kv"), "{last}");
    assert!(lines(&all_rows).starts_with(&lines(&all_no_heads)));
    assert_eq!(lines(&all_rows).iter().filter(|l| l.starts_with("keep_rows")).count(), 1);
    // Neither rows nor captures are seen by a pass.
    assert_eq!(lines(&BatchShape { rows: 7, has_taps: true, ..plain.clone() }), lines(&plain));
}
