//! Every variant against the published implementation's stored float32 values.

mod common;

use common::{EVERY, On, Setup, stepper};
use lapidary_engine::{Prompt, SoftKind, SoftSpan, Stepper};
use lapidary_model::EmbedScale;
use lapidary_ops::TapPoint;
use lapidary_reference::{Golden, Limits, assert_close, compare};

const VARIANTS: [&str; 5] = ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"];

/// About ten times the published implementation's own float32 noise against float64.
const LOGITS: Limits = Limits { rel: 5e-5, max: 5e-3 };
const HIDDEN: Limits = Limits { rel: 5e-5, max: f64::INFINITY };

fn ids(golden: &Golden, name: &str) -> Vec<u32> {
    golden.tokens(name).expect("tokens").iter().map(|&t| t as u32).collect()
}

fn all_logits(stepper: &mut Stepper, prompt: &Prompt) -> (Vec<f32>, Vec<lapidary_ops::Outcome>) {
    let (mut logits, mut outcomes) = (Vec::new(), Vec::new());
    stepper
        .score(prompt, &mut |_, row| logits.extend_from_slice(row), &mut |_, o| outcomes.push(o.clone()))
        .expect("the prompt runs");
    (logits, outcomes)
}

fn check_prompt(golden: &Golden, prefix: &str, stepper: &mut Stepper, prompt: &Prompt) {
    let layers = stepper.model().layers.len();
    let mut points: Vec<TapPoint> = (0..layers).map(TapPoint::LayerOut).collect();
    points.extend([TapPoint::Embed, TapPoint::FinalNorm, TapPoint::PerLayer]);
    stepper.reset();
    stepper.set_capture(&points);
    let (logits, outcomes) = all_logits(stepper, prompt);
    let name = format!("{} {prefix}", golden.folder().display());
    let expected = golden.f32(&format!("{prefix}logits")).expect("logits");
    assert_close(&format!("{name}logits"), &compare(&logits, &expected.values), LOGITS);
    if golden.has(&format!("{prefix}hidden")) {
        let hidden = golden.f32(&format!("{prefix}hidden")).expect("hidden");
        let each = hidden.values.len() / (layers + 1);
        for n in 0..=layers {
            let point = n.checked_sub(1).map_or(TapPoint::Embed, TapPoint::LayerOut);
            let tap = outcomes[0].taps.iter().find(|t| t.point == point).expect("captured");
            let what = format!("{name}hidden {n}");
            assert_close(&what, &compare(&tap.values, &hidden.values[n * each..][..each]), HIDDEN);
        }
    }
    for (key, point) in [("final_norm", TapPoint::FinalNorm), ("per_layer_inputs", TapPoint::PerLayer)] {
        if prefix.is_empty() && golden.has(key) {
            let tap = outcomes[0].taps.iter().find(|t| t.point == point).expect("captured");
            let expected = golden.f32(key).expect("values");
            assert_close(&format!("{name}{key}"), &compare(&tap.values, &expected.values), HIDDEN);
        }
    }
    stepper.set_capture(&[]);
}

fn check_greedy(golden: &Golden, prefix: &str, stepper: &mut Stepper, prompt: &Prompt) {
    let expected = ids(golden, &format!("{prefix}greedy"));
    stepper.reset();
    let mut token = stepper.prefill_prompt(prompt).expect("prefill");
    let mut found = vec![token];
    while found.len() < expected.len() {
        token = stepper.decode_step(token, stepper.cursor()).expect("step");
        found.push(token);
    }
    assert_eq!(found, expected, "{} {prefix}greedy", golden.folder().display());
}

fn soft_prompt(golden: &Golden) -> Prompt {
    let positions = golden.i64("soft.positions").expect("positions");
    let types = golden.i64("soft.token_types").expect("types");
    let embeds = golden.f32("soft.embeds").expect("embeds");
    let soft = positions.values.iter().enumerate().map(|(i, &p)| SoftSpan {
        start: p as usize,
        values: embeds.at(i).to_vec(),
        kind: if types.values[p as usize] == 3 { SoftKind::Audio } else { SoftKind::Vision },
    });
    Prompt { tokens: ids(golden, "soft.input_ids"), soft: soft.collect() }
}

fn each(check: impl Fn(&Golden, &mut Stepper, On)) {
    for variant in VARIANTS {
        let golden = Golden::variant(variant).expect("golden");
        for on in EVERY {
            check(&golden, &mut stepper(golden.folder(), on, Setup::default()), on);
        }
    }
}

#[test]
fn logits_and_hidden_states_of_every_prompt() {
    each(|golden, stepper, _| {
        for prefix in ["", "b0.", "b1.", "b2."] {
            let prompt = Prompt::from(&ids(golden, &format!("{prefix}input_ids"))[..]);
            check_prompt(golden, prefix, stepper, &prompt);
        }
    });
}

#[test]
fn greedy_continuations() {
    each(|golden, stepper, _| {
        for prefix in ["", "b0.", "b1.", "b2."] {
            let prompt = Prompt::from(&ids(golden, &format!("{prefix}input_ids"))[..]);
            check_greedy(golden, prefix, stepper, &prompt);
        }
    });
}

#[test]
fn soft_tokens() {
    each(|golden, stepper, _| {
        if golden.has("soft.input_ids") {
            let prompt = soft_prompt(golden);
            check_prompt(golden, "soft.", stepper, &prompt);
            check_greedy(golden, "soft.", stepper, &prompt);
        }
    });
}

#[test]
fn rounded_embedding_scale() {
    for variant in VARIANTS {
        let golden = Golden::variant(variant).expect("golden");
        for on in EVERY {
            // Rounded is what safetensors in bf16 get unasked.
            let setup = Setup { scale: EmbedScale::Auto, ..Setup::default() };
            let mut stepper = stepper(golden.folder(), on, setup);
            let (logits, _) = all_logits(&mut stepper, &Prompt::from(&ids(&golden, "input_ids")[..]));
            let expected = golden.f32("logits_rounded_scale").expect("logits");
            assert_close(variant, &compare(&logits, &expected.values), LOGITS);
        }
    }
}
