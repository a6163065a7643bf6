//! Scales that exporters left out, left at zero or filled with NaN (H01).
//!
//! An expert that no calibration text reached has no activation scale, or one of zero. Weights do not depend on it
//! here, so the model loads and says so; a weight's own scale is another matter and is refused.

mod support;

use lapidary_formats::{Scales, decode_row, validate};
use lapidary_weights::safetensors::Dtype;
use lapidary_weights::{Checkpoint, Error, ExpertPart, LayerRole, Role};
use support::{Tensor, folder, message};

const LAYER: u32 = 5;
const EXPERTS: u32 = 9;
/// The experts whose scales are damaged.
const DAMAGED: [u32; 2] = [3, 7];

/// The two published NVFP4 schemes: codes, tensor scale, activation scale.
const SCHEMES: [[&str; 3]; 2] = [
    ["weight_packed", "weight_global_scale", "input_global_scale"],
    ["weight", "weight_scale_2", "input_scale"],
];

fn module(expert: u32, part: ExpertPart) -> String {
    format!("model.language_model.layers.{LAYER}.experts.{expert}.{}", part.name())
}

/// One layer's experts, 3 x 48 each. `damage` may change, rename or drop any tensor.
fn experts(
    [codes, tensor, input]: [&str; 3],
    damage: impl Fn(u32, ExpertPart, Tensor) -> Option<Tensor>,
) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for expert in 0..EXPERTS {
        for part in ExpertPart::ALL {
            let at = |suffix: &str| format!("{}.{suffix}", module(expert, part));
            let whole = [
                Tensor::codes(&at(codes), Dtype::U8, &[3, 24]),
                Tensor::codes(&at("weight_scale"), Dtype::F8E4M3, &[3, 3]),
                Tensor::f32s(&at(tensor), &[1], &[2f32.powi(expert as i32 - 4)]),
                Tensor::f32s(&at(input), &[1], &[3.5]),
            ];
            tensors.extend(whole.into_iter().filter_map(|t| damage(expert, part, t)));
        }
    }
    tensors
}

/// Every value of every expert, in order.
fn values(checkpoint: &Checkpoint) -> Vec<f32> {
    let mut all = Vec::new();
    for expert in 0..EXPERTS {
        for part in ExpertPart::ALL {
            let view = checkpoint.expect_expert(LAYER, expert, part, 3, 48).unwrap();
            assert!(matches!(view.scales, Scales::Nvfp4 { .. }));
            validate(&view).unwrap();
            let mut row = [0.0; 48];
            for r in 0..view.rows {
                decode_row(&view, r, &mut row);
                all.extend_from_slice(&row);
            }
        }
    }
    assert!(all.iter().all(|v| v.is_finite()) && all.iter().any(|v| *v != 0.0));
    all
}

#[test]
fn h01_activation_scales_that_are_missing_zero_or_nan_are_noted_and_change_no_weight() {
    for scheme in SCHEMES {
        let sound = folder(&experts(scheme, |_, _, t| Some(t)));
        let sound = Checkpoint::open(sound.path()).unwrap();
        let expected = values(&sound);
        assert!(sound.notes().is_empty(), "{:?}", sound.notes());
        for bad in [None, Some(0.0), Some(-0.0), Some(-1.0), Some(f32::NAN), Some(f32::INFINITY)] {
            let dir = folder(&experts(scheme, |expert, part, t| {
                let hit = DAMAGED.contains(&expert) && part == ExpertPart::Up && t.name.ends_with(scheme[2]);
                match (hit, bad) {
                    (false, _) => Some(t),
                    (true, None) => None,
                    (true, Some(value)) => Some(Tensor::f32s(&t.name, &[1], &[value])),
                }
            }));
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            assert!(values(&checkpoint) == expected, "{scheme:?} {bad:?}");
            let notes = checkpoint.notes();
            let [note] = &notes[..] else { panic!("{scheme:?} {bad:?}: {notes:?}") };
            for part in ["layer 5: experts 3, 7", "up_proj", "activation scale", "not used"] {
                assert!(note.contains(part), "{bad:?}: {part} is not in: {note}");
            }
        }
    }
}

#[test]
fn h01_weight_scales_that_are_missing_zero_or_nan_are_refused_by_layer_and_expert() {
    for scheme in SCHEMES {
        let [_, tensor, _] = scheme;
        // The first damaged expert is the one that is named.
        let named = format!("layers.{LAYER}.experts.3.down_proj");
        for suffix in ["weight_scale", tensor] {
            let suffix = &format!("down_proj.{suffix}");
            let hit = |expert, t: &Tensor| DAMAGED.contains(&expert) && t.name.ends_with(suffix.as_str());
            let dir = folder(&experts(scheme, |expert, _, t| (!hit(expert, &t)).then_some(t)));
            let missing = Checkpoint::open(dir.path());
            assert!(matches!(missing, Err(Error::MissingTensor { .. })), "{missing:?}");
            message(missing, &[&named, suffix, "missing"]);
        }
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            refused(scheme, &named, tensor, |t| Tensor::f32s(&t.name, &[1], &[bad]));
        }
        // A NaN among the block scales.
        refused(scheme, &named, "weight_scale", |mut t| {
            t.bytes[4] = 0x7f;
            t
        });
    }
}

fn refused(scheme: [&str; 3], named: &str, suffix: &str, edit: impl Fn(Tensor) -> Tensor) {
    let suffix = format!("down_proj.{suffix}");
    let dir = folder(&experts(scheme, |expert, _, t| {
        let hit = DAMAGED.contains(&expert) && t.name.ends_with(&suffix);
        Some(if hit { edit(t) } else { t })
    }));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.expect_expert(LAYER, 2, ExpertPart::Down, 3, 48).unwrap();
    for expert in DAMAGED {
        let role = Role::Layer(LAYER, LayerRole::Expert { index: expert, part: ExpertPart::Down });
        let error = checkpoint.tensor(role).map(|v| format!("{v:?}"));
        assert!(matches!(error, Err(Error::BadScale { .. })), "{error:?}");
        let named = named.replace(".3.", &format!(".{expert}."));
        message(error, &[&named, &suffix, "expected"]);
    }
}
