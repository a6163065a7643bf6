//! The tiny random checkpoints, whose sizes are odd on purpose: each loads, and its numbers are of order one.

mod common;

use common::{EVERY, Setup, stepper};
use lapidary_engine::Prompt;
use lapidary_ops::TapPoint;
use lapidary_reference::tiny::{self, Variant};

/// Logits of a prompt that is several windows long, and the residual after each layer.
fn run(variant: Variant, on: common::On) -> (Vec<f32>, Vec<Vec<f32>>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    tiny::write(variant, folder.path()).expect("the checkpoint is written");
    let mut stepper = stepper(folder.path(), on, Setup::default());
    let layers = stepper.model().layers.len();
    let points: Vec<TapPoint> = (0..layers).map(TapPoint::LayerOut).collect();
    stepper.set_capture(&points);
    let ids: Vec<u32> = (0..47).map(|i| 2 + i * 37 % 150).collect();
    let (mut logits, mut layers) = (Vec::new(), Vec::new());
    stepper
        .score(&Prompt::from(ids.as_slice()), &mut |_, row| logits.extend_from_slice(row), &mut |_, o| {
            layers.extend(o.taps.iter().map(|t| t.values.clone()));
        })
        .expect("the prompt runs");
    (logits, layers)
}

fn rms(values: &[f32]) -> f64 {
    (values.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / values.len() as f64).sqrt()
}

#[test]
fn every_tiny_variant_runs_with_activations_of_order_one() {
    for on in EVERY {
        for variant in Variant::ALL {
            let (logits, layers) = run(variant, on);
            assert_eq!(logits.len(), 47 * variant.sizes().vocab);
            assert!(logits.iter().all(|v| v.is_finite()));
            assert!((1.5..12.0).contains(&rms(&logits)), "{variant:?}: logits of size {}", rms(&logits));
            for layer in layers {
                assert!((0.2..5.0).contains(&rms(&layer)), "{variant:?}: residual of size {}", rms(&layer));
            }
        }
    }
}

#[test]
fn both_forms_of_config_give_the_same_bits() {
    for on in EVERY {
        assert_eq!(run(Variant::Dense, on), run(Variant::DensePerLayerConfig, on));
    }
}
