//! Checkpoints in the published layout: everything in them is known, and views are the bytes that belong to them.

mod support;

use lapidary_formats::Format;
use lapidary_weights::LayerRole::*;
use lapidary_weights::{Checkpoint, ConfigSource, Error, ExpertPart, Role};
use support::{golden, message};

#[test]
fn a_file_with_dead_tensors_of_sharing_layers_is_known_in_full() {
    let c = Checkpoint::open(golden("e2b")).unwrap();
    let ConfigSource::Json { config, generation, .. } = c.config() else { panic!("it has a config.json") };
    assert_eq!(config["text_config"]["num_kv_shared_layers"], 4);
    assert!(generation.is_none());

    assert_eq!(c.roles().count(), 158, "every tensor of the file has a role");
    assert_eq!(c.ignored().tensors(), 0);
    assert_eq!(c.notes(), Vec::<String>::new());
    // Layer 8 shares the keys and values of layer 5 and still has tensors of its own.
    for (role, rows) in [(KProj, 64), (VProj, 64)] {
        c.expect(Role::Layer(8, role), rows, 96).unwrap();
    }
    assert_eq!(c.expect_vector(Role::Layer(8, KNorm), 64).unwrap().len(), 64);

    // Five of nine layers own their KV; the others have an MLP twice as wide.
    c.expect(Role::Layer(4, Gate), 128, 96).unwrap();
    c.expect(Role::Layer(5, Gate), 256, 96).unwrap();
    c.expect(Role::PerLayerTable, 512, 9 * 32).unwrap();
    c.expect(Role::PerLayerModelProj, 9 * 32, 96).unwrap();
    assert_eq!(c.expect_vector(Role::PerLayerProjNorm, 32).unwrap().len(), 32);
    assert_eq!(c.expect_vector(Role::Layer(0, LayerScalar), 1).unwrap().len(), 1);
    assert!(c.tensor(Role::Head).unwrap().is_none());
    assert_eq!(c.head_differs().unwrap(), None);
}

#[test]
fn stacked_experts_are_cut_gate_first() {
    let c = Checkpoint::open(golden("moe26b")).unwrap();
    let (experts, width, hidden) = (8, 64, 96);
    let bytes = |rows: usize, cols: usize| rows * cols * 2;
    for layer in 0..5 {
        assert_eq!(c.experts_in_file(layer), experts);
        let gate_up = c.tensor(Role::Layer(layer, ExpertsGateUp)).unwrap().unwrap();
        let down = c.tensor(Role::Layer(layer, ExpertsDown)).unwrap().unwrap();
        assert_eq!((gate_up.rows, gate_up.cols), (experts * 2 * width, hidden));
        for e in 0..experts {
            let view = |part, rows, cols| c.expect_expert(layer, e as u32, part, rows, cols).unwrap();
            let half = bytes(width, hidden);
            let first = e * 2 * half;
            assert_eq!(view(ExpertPart::Gate, width, hidden).bytes, &gate_up.bytes[first..first + half]);
            assert_eq!(
                view(ExpertPart::Up, width, hidden).bytes,
                &gate_up.bytes[first + half..first + 2 * half]
            );
            let size = bytes(hidden, width);
            assert_eq!(view(ExpertPart::Down, hidden, width).bytes, &down.bytes[e * size..(e + 1) * size]);
        }
        assert!(c.expert(layer, experts as u32, ExpertPart::Up).unwrap().is_none());
    }
    assert!(c.expert(5, 0, ExpertPart::Up).unwrap().is_none(), "there is no sixth layer");
    assert_eq!(c.experts_in_file(5), 0);
    message(c.expect_expert(0, 8, ExpertPart::Up, width, hidden), &["experts.8.up_proj", "missing"]);
    let swapped = c.expect_expert(0, 7, ExpertPart::Up, width, hidden + 1);
    message(swapped, &["layers.0.experts.gate_up_proj", "[8, 128, 96]", "expected [8, 128, 97]"]);
}

#[test]
fn sums_come_from_headers() {
    let c = Checkpoint::open(golden("moe26b")).unwrap();
    assert_eq!(c.parameters(), 1_154_125);
    let [share] = c.formats()[..] else { panic!("one format") };
    assert_eq!((share.format, share.tensors, share.bytes), (Format::Bf16, 110, 2 * 1_154_125));
    assert_eq!(c.total_bytes(), std::fs::metadata(golden("moe26b").join("model.safetensors")).unwrap().len());
    let stored = c.stored(Role::Layer(4, ExpertsDown)).unwrap();
    assert_eq!(
        (stored.name, stored.shape),
        ("model.language_model.layers.4.experts.down_proj", &[8, 96, 64][..])
    );
    assert_eq!(stored.bytes, 8 * 96 * 64 * 2);
}

#[test]
fn what_a_config_expects_and_the_file_lacks_is_named() {
    let c = Checkpoint::open(golden("moe26b")).unwrap();
    let text = message(
        c.expect(Role::Layer(1, QProj), 128, 95),
        &["model.safetensors", "layers.1.self_attn.q_proj.weight"],
    );
    assert!(text.contains("shape [128, 96], expected [128, 95]"), "{text}");
    // Layer 2 attends in full and takes its values from k_proj.
    assert!(c.tensor(Role::Layer(2, VProj)).unwrap().is_none());
    let missing = c.expect(Role::Layer(2, VProj), 64, 96);
    assert!(matches!(missing, Err(Error::MissingTensor { .. })));
    message(missing, &["layers.2.self_attn.v_proj.weight", "missing"]);
    message(c.vector(Role::FinalNorm, 95), &["norm.weight", "[96]", "[95]"]);
    // A vector is not a matrix, nor a matrix a vector.
    message(c.expect(Role::FinalNorm, 1, 96), &["norm.weight", "expected [1, 96]"]);
    message(c.vector(Role::Layer(0, Router), 8 * 96), &["router.proj.weight", "[8, 96]"]);
    message::<()>(
        Err(c.refuse(Role::Layer(4, Router), "a dense model has no router")),
        &["layers.4.router", "dense"],
    );
}
