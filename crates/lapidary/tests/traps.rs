//! The engine steps over every known trap of Gemma 4's mathematics.
//!
//! Each test makes one plausible mistake on purpose and sees the stored outputs miss by far, while the
//! unchanged model meets them: so the goldens guard against the mistake, and the engine doesn't make it.
//! The traps, in the order in which the mathematics is written down:
//!
//!  1. the embedding scale is rounded to the weights' type in a bf16 model and unrounded in a float32 run
//!  2. soft tokens are not multiplied by the embedding scale
//!  3. norms multiply by `w`, not `1 + w` (Gemma 3 is the other way round)
//!  4. the layer scalar exists, and multiplies the whole residual after everything else
//!  5. the gate of per-layer inputs reads the residual without a norm
//!  6. router and experts read the residual from before the dense branch's norm
//!  7. attention scores are not divided by `sqrt(D)` (and are not capped)
//!  8. on K=V layers values are the raw key projection, before key norm and rotation
//!  9. the number of global key/value heads counts only where keys are values
//! 10. the rotation's exponent is over the whole head, not the rotated part
//! 11. partial rotation pairs `i` with `i + D/2`, not within the first dimensions
//! 12. a window of W holds the current token: W keys, not W - 1 or W + 1
//! 13. vision blocks are bidirectional on sliding layers only
//! 14. keys and values that the file holds for KV-sharing layers are dead
//! 15. the per-expert scale comes after renormalisation, and does come
//! 16. the router's input is the raw residual under its own norm, not the experts' input
//! 17. pre-norm without a number is the dense branch's, number 2 is the experts'
//! 18. per-layer inputs take the pad token's row at soft positions, and the soft token as context
//!
//! Not applicable here: that a drafter's position stays where it is belongs to speculative decoding, which
//! this engine does not have; drafter checkpoints are refused by name (`config.rs`).

mod common;

use common::drive::{golden_ids, golden_soft, score};
use common::spy::{Hooks, Verb, hooked};
use common::{EVERY, On, Setup};
use lapidary_engine::{Prompt, SoftKind};
use lapidary_model::model::{Layer, Mlp};
use lapidary_model::{Config, EmbedScale, VisionBlocks};
use lapidary_ops::{Activation, Group, KvRef, PAGE_TOKENS, TapPoint, TensorView};
use lapidary_reference::{Golden, Limits, assert_close, compare};

const GEMMA4: [&str; 4] = ["dense31b", "moe26b", "e2b", "unified12b"];
const KEYS_ARE_VALUES: [&str; 3] = ["dense31b", "moe26b", "unified12b"];

/// A mistake must miss by ten times what a float32 engine is allowed.
const FAR: f64 = 10.0 * Limits::FLOAT32.rel;

/// Which stored logits a mistake is held against.
#[derive(Clone, Copy)]
enum Against {
    Text,
    Soft,
}

fn prompt(golden: &Golden, against: Against) -> (Prompt, Vec<f32>) {
    match against {
        Against::Text => {
            let prompt = Prompt::from(&golden_ids(golden, "input_ids")[..]);
            (prompt, golden.f32("logits").unwrap().values)
        }
        Against::Soft => (golden_soft(golden), golden.f32("soft.logits").unwrap().values),
    }
}

/// Relative distance of the hooked model from the stored logits.
fn distance(variant: &str, on: On, against: Against, hooks: &Hooks) -> f64 {
    let golden = Golden::variant(variant).unwrap();
    let mut s = hooked(golden.folder(), on, Setup::default(), hooks);
    let (prompt, expected) = prompt(&golden, against);
    let report = compare(&score(&mut s, &prompt).0, &expected);
    assert!(report.finite, "{variant}: a mistake that shows as a NaN proves nothing: {report}");
    report.rel_rms
}

/// The mistake misses the stored logits by far, in every variant named.
fn steps_over(trap: &str, variants: &[&str], against: Against, mistake: impl Fn() -> Hooks) {
    for on in EVERY {
        for variant in variants {
            let clean = distance(variant, on, against, &Hooks::default());
            assert!(clean <= Limits::FLOAT32.rel, "{variant} {on:?}: unchanged, and off by {clean:e}");
            let off = distance(variant, on, against, &mistake());
            println!("{trap} {variant} {on:?}: {off:e}, unchanged {clean:e}");
            assert!(off > FAR, "{variant} {on:?}: {trap} would go unnoticed, {off:e}");
        }
    }
}

#[test]
fn t01_embedding_scale_is_rounded_for_bf16_weights_only() {
    for on in EVERY {
        for variant in ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"] {
            let golden = Golden::variant(variant).unwrap();
            let prompt = Prompt::from(&golden_ids(&golden, "input_ids")[..]);
            let scales = [(EmbedScale::F32, "logits"), (EmbedScale::Auto, "logits_rounded_scale")];
            for (scale, right) in scales {
                let setup = Setup { scale, ..Setup::default() };
                let mut s = hooked(golden.folder(), on, setup, &Hooks::default());
                let found = score(&mut s, &prompt).0;
                for (_, key) in scales {
                    let report = compare(&found, &golden.f32(key).unwrap().values);
                    match key == right {
                        true => assert_close(variant, &report, Limits::FLOAT32),
                        false => assert!(report.rel_rms > FAR, "{variant} {key}: {report}"),
                    }
                }
            }
        }
    }
}

#[test]
fn t02_soft_tokens_are_not_scaled() {
    steps_over("soft rows times the scale", &["moe26b", "e2b", "unified12b"], Against::Soft, || {
        Hooks::batch(|model, batch| batch.soft_values.iter_mut().for_each(|v| *v *= model.embed_scale))
    });
}

fn is_norm(name: &str) -> bool {
    name.contains("norm") && name.ends_with(".weight")
}

#[test]
fn t03_norms_multiply_by_w() {
    let add = |by: f32| {
        move || {
            Hooks::vector(move |name, values| {
                if is_norm(name) {
                    values.iter_mut().for_each(|v| *v += by);
                }
            })
        }
    };
    steps_over("1 + w", &GEMMA4, Against::Text, add(1.0));
    steps_over("w for Gemma 3", &["gemma3"], Against::Text, add(-1.0));
    for kind in ["q_norm", "k_norm", "input_layernorm", "post_attention", "post_feedforward", ".norm.weight"]
    {
        steps_over(kind, &["dense31b", "e2b"], Against::Text, || {
            Hooks::vector(move |name, values| {
                if is_norm(name) && format!(".{name}").contains(kind) {
                    values.iter_mut().for_each(|v| *v += 1.0);
                }
            })
        });
    }
}

#[test]
fn t04_layer_scalar_multiplies_the_whole_residual_at_the_end() {
    steps_over("no layer scalar", &GEMMA4, Against::Text, || {
        Hooks::model(|m| m.layers.iter_mut().for_each(|l| l.scalar = None))
    });
    // Applied to the last branch alone: its normed output is scaled before it joins.
    steps_over("the scalar on the branch only", &GEMMA4, Against::Text, || {
        Hooks::verb(|m, verb, s| match verb {
            Verb::RmsNorm(_, _, norm) => {
                verb.run(s);
                let last = |l: &&Layer| l.per_layer.map_or(l.post_ffn_norm, |b| b.post_norm) == norm;
                if let Some(layer) = m.layers.iter().find(last) {
                    s.scale(m.acts.y, layer.scalar.unwrap());
                }
            }
            Verb::Scale(..) => {}
            other => other.run(s),
        })
    });
    // Before the per-layer branch joins, and the branch unscaled.
    steps_over("the scalar before per-layer inputs", &["e2b"], Against::Text, || {
        Hooks::verb(|m, verb, s| match verb {
            // The branch's gate is the first thing behind the MLP.
            Verb::Linear(out, _, gate) if m.per_layer.is_some_and(|p| p.gate_act == out) => {
                let layer = m.layers.iter().find(|l| l.per_layer.is_some_and(|b| b.gate == gate));
                s.scale(m.acts.x, layer.and_then(|l| l.scalar).unwrap());
                let p = m.per_layer.unwrap();
                s.cast(p.input_act, m.acts.x);
                verb.run(s);
            }
            Verb::Scale(..) => {}
            other => other.run(s),
        })
    });
}

#[test]
fn t05_per_layer_gate_reads_the_residual_without_a_norm() {
    steps_over("a normed gate input", &["e2b"], Against::Text, || {
        Hooks::verb(|m, verb, s| match verb {
            Verb::Linear(out, x, _) if m.per_layer.is_some_and(|p| p.gate_act == out) => {
                s.rms_norm(x, m.acts.x, m.final_norm);
                verb.run(s);
            }
            other => other.run(s),
        })
    });
}

#[test]
fn t06_experts_read_the_residual_before_the_dense_norm() {
    steps_over("experts behind the dense norm", &["moe26b"], Against::Text, || {
        Hooks::verb(|m, verb, s| {
            let layer = m.layers.iter().find_map(|l| match (&l.mlp, verb) {
                (Mlp::Moe(e), Verb::RmsNorm(out, _, norm))
                    if out == e.acts.input && norm == e.expert_norm =>
                {
                    Some(*e)
                }
                _ => None,
            });
            match (layer, verb) {
                // The router has read its input by then, so its buffer is free.
                (Some(e), Verb::RmsNorm(out, x, norm)) => {
                    s.rms_norm(e.acts.router_input, x, e.dense.norm);
                    s.rms_norm(out, e.acts.router_input, norm);
                }
                (_, other) => other.run(s),
            }
        })
    });
}

#[test]
fn t07_scores_are_neither_divided_nor_capped() {
    steps_over("1 / sqrt(D)", &GEMMA4, Against::Text, || {
        Hooks::model(|m| {
            for l in &mut m.layers {
                l.attn.spec.scale = (l.attn.spec.head_dim as f32).sqrt().recip();
            }
        })
    });
    steps_over("1 for Gemma 3", &["gemma3"], Against::Text, || {
        Hooks::model(|m| m.layers.iter_mut().for_each(|l| l.attn.spec.scale = 1.0))
    });
    steps_over("a cap on the scores", &GEMMA4, Against::Text, || {
        Hooks::model(|m| m.layers.iter_mut().for_each(|l| l.attn.spec.softcap = Some(50.0)))
    });
}

/// Page and place of the batch's positions in the group of `cache`.
fn cells(batch: &lapidary_ops::Batch, cache: KvRef) -> Vec<(usize, usize)> {
    let g = cache.group.index();
    assert_eq!(batch.spans.len(), 1);
    let table = batch.spans[0].tables[g];
    let cell = |&p: &i32| {
        let p = p as usize;
        let page = batch.pages[g][table.start + p / PAGE_TOKENS - table.first_block];
        (page as usize, p % PAGE_TOKENS)
    };
    batch.positions.iter().map(cell).collect()
}

/// What keys become when they stand in for values.
fn values_from_keys(rows: usize) -> (Hooks, Setup) {
    let hooks = Hooks::after(|model, batch, backend| {
        for (layer, l) in model.layers.iter().enumerate() {
            if !model.config.layers[layer].values_are_keys {
                continue;
            }
            let width = l.attn.spec.kv_heads * l.attn.spec.head_dim;
            let (mut k, mut v) = (vec![0.0; width], vec![0.0; width]);
            for (page, place) in cells(batch, l.attn.spec.cache) {
                backend.kv_load(l.attn.spec.cache, page, place, &mut k, &mut v).unwrap();
                assert_ne!(k, v, "keys are rotated and values are not");
                backend.kv_store(l.attn.spec.cache, page, place, &k, &k).unwrap();
            }
        }
    });
    (hooks, Setup { rows, head_rows: rows, ..Setup::default() })
}

/// Rows that a pass wrote get their keys for values, so that every later pass reads rotated keys.
#[test]
fn t08_values_are_the_raw_projection() {
    for on in EVERY {
        for variant in KEYS_ARE_VALUES {
            let golden = Golden::variant(variant).unwrap();
            let (prompt, expected) = prompt(&golden, Against::Text);
            let (hooks, setup) = values_from_keys(8);
            let mut s = hooked(golden.folder(), on, setup, &hooks);
            let report = compare(&score(&mut s, &prompt).0, &expected);
            assert!(report.finite && report.rel_rms > FAR, "{variant} {on:?}: {report}");
        }
    }
    steps_over("values without their norm", &GEMMA4, Against::Text, || {
        Hooks::model(|m| {
            let specs = m.layers.iter_mut().filter_map(|l| l.attn.finish.kv.as_mut());
            specs.for_each(|kv| kv.v_norm_eps = None);
        })
    });
    steps_over("normed values in Gemma 3", &["gemma3"], Against::Text, || {
        Hooks::model(|m| {
            let specs = m.layers.iter_mut().filter_map(|l| l.attn.finish.kv.as_mut());
            specs.for_each(|kv| kv.v_norm_eps = Some(1e-6));
        })
    });
}

#[test]
fn t09_global_heads_count_only_where_keys_are_values() {
    let golden = Golden::variant("e2b").unwrap();
    let text = std::fs::read_to_string(golden.config_path()).unwrap();
    let plain: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut stated = plain.clone();
    stated["text_config"]["num_global_key_value_heads"] = 2.into();
    // The file's field is idle, so a number in it changes nothing ...
    assert_eq!(Config::from_json(&stated).unwrap(), Config::from_json(&plain).unwrap());
    // ... and where keys are values it does.
    stated["text_config"]["attention_k_eq_v"] = true.into();
    let counted = Config::from_json(&stated).unwrap();
    for l in &counted.layers {
        assert_eq!(l.kv_heads, if l.group == Group::Full { 2 } else { 1 });
    }
}

#[test]
fn t10_rotation_exponent_is_over_the_whole_head() {
    steps_over("exponent over the rotated part", &GEMMA4, Against::Text, || {
        Hooks::vector(|name, values| {
            if name == "rope frequencies, Full" {
                let rotated = values.iter().filter(|&&f| f != 0.0).count();
                for (i, f) in values.iter_mut().enumerate().take(rotated) {
                    *f = 1e6f64.powf(-(i as f64) / rotated as f64) as f32;
                }
            }
        })
    });
    steps_over("all of the head rotated", &GEMMA4, Against::Text, || {
        Hooks::config(|c| c.rope[Group::Full.index()].rotated = 1.0)
    });
    steps_over("one base for both kinds", &["dense31b", "gemma3"], Against::Text, || {
        Hooks::config(|c| c.rope[0] = c.rope[1])
    });
}

/// Half-split rotation of a head whose dimensions are permuted alike in queries and keys is rotation of other
/// pairs of the same head; scores are sums over all dimensions and do not see the order.
fn contiguous(head_dim: usize, rotated: usize) -> Vec<usize> {
    let (first, second) = (0..rotated, rotated..2 * rotated);
    let mut rest = 2 * rotated..head_dim;
    let half = head_dim / 2;
    let mut order = vec![0; head_dim];
    for (slot, dim) in first.zip(&mut order) {
        *dim = slot;
    }
    for (slot, dim) in second.zip(&mut order[half..]) {
        *dim = slot;
    }
    for slot in (rotated..half).chain(half + rotated..head_dim) {
        order[slot] = rest.next().unwrap();
    }
    order
}

#[test]
fn t11_rotated_pairs_are_half_a_head_apart() {
    // 64 wide full heads, a quarter of which rotates: 8 pairs.
    let order = contiguous(64, 8);
    assert_eq!((order[0], order[32], order[7], order[39]), (0, 8, 7, 15));
    let vector_order = order.clone();
    // Values are their own projection here and stay in order.
    steps_over("pairs within the first dimensions", &["e2b"], Against::Text, move || {
        let (order, vector_order) = (order.clone(), vector_order.clone());
        let permute = move |view: &TensorView<'_>| {
            let row = view.bytes.len() / view.rows;
            let mut bytes = Vec::with_capacity(view.bytes.len());
            for head in view.bytes.chunks_exact(64 * row) {
                order.iter().for_each(|&d| bytes.extend_from_slice(&head[d * row..(d + 1) * row]));
            }
            bytes
        };
        let mut hooks = Hooks::pack(move |parts| {
            // Full layers' queries are four heads of 64, their keys one.
            let full = parts[0].name.contains("q_proj") && parts[0].rows == 256;
            for view in parts.iter_mut().filter(|v| full && !v.name.contains("v_proj")) {
                // Test checkpoints are small, and the views must live as long as the pack.
                view.bytes = permute(view).leak();
            }
        });
        hooks.vector = Hooks::vector(move |name, values| {
            if (name.contains("q_norm") || name.contains("k_norm")) && values.len() == 64 {
                *values = vector_order.iter().map(|&d| values[d]).collect();
            }
        })
        .vector;
        hooks
    });
}

#[test]
fn t12_a_window_of_w_holds_the_current_token() {
    for by in [-1, 1] {
        steps_over(
            &format!("window {by:+}"),
            &["dense31b", "moe26b", "e2b", "unified12b", "gemma3"],
            Against::Text,
            || {
                Hooks::model(move |m| {
                    for window in m.layers.iter_mut().filter_map(|l| l.attn.spec.window.as_mut()) {
                        *window = window.checked_add_signed(by).unwrap();
                    }
                })
            },
        );
    }
    steps_over("no window on the shared layers", &["e2b"], Against::Text, || {
        Hooks::model(|m| {
            let shared = m.layers.iter_mut().filter(|l| l.attn.finish.kv.is_none());
            shared.for_each(|l| l.attn.spec.window = None);
        })
    });
}

#[test]
fn t13_vision_blocks_are_bidirectional_on_sliding_layers_only() {
    let with = |blocks| move || Hooks::config(move |c: &mut Config| c.vision = blocks);
    let vision = ["moe26b", "unified12b"];
    steps_over("blocks on full layers too", &vision, Against::Soft, with(VisionBlocks::Both));
    steps_over("no blocks", &vision, Against::Soft, with(VisionBlocks::Causal));
    steps_over("blocks in E2B", &["e2b"], Against::Soft, with(VisionBlocks::Sliding));
    for on in EVERY {
        for variant in vision {
            let golden = Golden::variant(variant).unwrap();
            let (mut prompt, expected) = prompt(&golden, Against::Soft);
            let audio = prompt.soft.iter().filter(|s| s.kind == SoftKind::Audio).count();
            assert_eq!(audio, 2, "two audio rows side by side");
            prompt.soft.iter_mut().for_each(|s| s.kind = SoftKind::Vision);
            let mut s = hooked(golden.folder(), on, Setup::default(), &Hooks::default());
            let report = compare(&score(&mut s, &prompt).0, &expected);
            assert!(report.rel_rms > FAR, "{variant}: audio in blocks goes unnoticed: {report}");
        }
        // A plain forward of the published library builds another mask for this variant.
        let golden = Golden::variant("unified12b").unwrap();
        let mut s = hooked(golden.folder(), on, Setup::default(), &Hooks::default());
        let found = score(&mut s, &golden_soft(&golden)).0;
        let other = golden.f32("soft.logits_hf_plain_forward").unwrap().values;
        assert!(compare(&found, &other).rel_rms > FAR);
    }
}

#[test]
fn t14_keys_and_values_of_shared_layers_are_dead() {
    steps_over("the file's dead keys and values", &["e2b"], Against::Text, || {
        Hooks::config(|c| c.layers.iter_mut().for_each(|l| l.donor = None))
    });
    steps_over("the first layer of the kind as donor", &["e2b"], Against::Text, || {
        Hooks::model(|m| {
            let shared = m.layers.iter_mut().filter(|l| l.attn.finish.kv.is_none());
            shared.filter(|l| l.attn.spec.window.is_some()).for_each(|l| l.attn.spec.cache.index = 0);
        })
    });
}

#[test]
fn t15_per_expert_scale_comes_after_renormalisation() {
    steps_over("no per-expert scale", &["moe26b"], Against::Text, || {
        Hooks::vector(|name, values| {
            if name.contains("per_expert_scale") {
                values.fill(1.0);
            }
        })
    });
    // Scaling first and renormalising afterwards gives weights that sum to 1. The norm behind the experts
    // hides a common factor from the logits, so the weights themselves are compared.
    let golden = Golden::variant("moe26b").unwrap();
    let (ids, weights) = (golden.i64("router_idx").unwrap(), golden.f32("router_weight").unwrap());
    for on in EVERY {
        let mut s = hooked(golden.folder(), on, Setup::default(), &Hooks::default());
        let layers = s.model().layers.len();
        s.set_capture(&(0..layers).map(TapPoint::Routes).collect::<Vec<_>>());
        let (_, outcomes) = score(&mut s, &prompt(&golden, Against::Text).0);
        for layer in 0..layers {
            let tap = outcomes[0].taps.iter().find(|t| t.point == TapPoint::Routes(layer)).unwrap();
            let k = tap.width / 2;
            let rows = tap.values.chunks_exact(tap.width);
            let found: (Vec<f32>, Vec<f32>) =
                rows.fold(Default::default(), |(mut i, mut w): (Vec<f32>, Vec<f32>), row| {
                    i.extend(&row[..k]);
                    w.extend(&row[k..]);
                    (i, w)
                });
            let expected: Vec<f32> = ids.at(layer).iter().map(|&i| i as f32).collect();
            assert_eq!(found.0, expected, "layer {layer}");
            assert_close("weights", &compare(&found.1, weights.at(layer)), Limits::FLOAT32);
            let first = |w: &[f32]| -> Vec<f32> {
                let sums = w.chunks_exact(k).map(|w| w.iter().sum::<f32>());
                w.chunks_exact(k).zip(sums).flat_map(|(w, sum)| w.iter().map(move |w| w / sum)).collect()
            };
            assert!(compare(&first(&found.1), weights.at(layer)).rel_rms > FAR);
        }
    }
}

#[test]
fn t16_router_reads_the_raw_residual() {
    for experts_input in [true, false] {
        steps_over("a router behind another norm", &["moe26b"], Against::Text, || {
            Hooks::verb(move |m, verb, s| {
                let moe = m.layers.iter().find_map(|l| match (&l.mlp, verb) {
                    (Mlp::Moe(e), Verb::RmsNorm(_, _, norm)) if norm == e.router_norm => Some(*e),
                    _ => None,
                });
                match (moe, verb) {
                    (Some(e), Verb::RmsNorm(out, x, norm)) => {
                        let first = if experts_input { e.expert_norm } else { e.dense.norm };
                        s.rms_norm(out, x, first);
                        s.rms_norm(out, out, norm);
                    }
                    (_, other) => other.run(s),
                }
            })
        });
    }
}

#[test]
fn t17_numbered_norms_are_the_experts() {
    let swap = |pre: bool| {
        move || {
            Hooks::model(move |m| {
                for l in &mut m.layers {
                    let Mlp::Moe(e) = &mut l.mlp else { continue };
                    match pre {
                        true => std::mem::swap(&mut e.dense.norm, &mut e.expert_norm),
                        false => std::mem::swap(&mut e.dense_post, &mut e.expert_post),
                    }
                }
            })
        }
    };
    steps_over("pre-norms the other way round", &["moe26b"], Against::Text, swap(true));
    steps_over("post-norms the other way round", &["moe26b"], Against::Text, swap(false));
}

#[test]
fn t18_per_layer_inputs_at_soft_rows() {
    // The placeholder's own row of the per-layer table.
    steps_over("the placeholder's row", &["e2b"], Against::Soft, || {
        Hooks::batch(|model, batch| {
            for &row in &batch.soft_rows {
                batch.per_layer_tokens[row as usize] = model.config.placeholders[0] as i32;
            }
        })
    });
    // The context of the placeholder's embedding: soft rows come too late.
    steps_over("context from the placeholder", &["e2b"], Against::Soft, || {
        Hooks::verb(|m, verb, s| match verb {
            Verb::InjectSoft(_) => {}
            Verb::PerLayerInputs(..) => {
                verb.run(s);
                s.inject_soft(m.acts.x);
            }
            other => other.run(s),
        })
    });
}

/// Mistakes that carry no warning but are as easily made.
#[test]
fn other_mistakes_are_noticed_too() {
    steps_over("gate and up the other way round", &["dense31b", "moe26b", "e2b"], Against::Text, || {
        Hooks::pack(|parts| {
            if parts.len() == 2 && parts[0].name.contains("gate") {
                parts.swap(0, 1);
            }
        })
    });
    steps_over("experts' gate and up the other way round", &["moe26b"], Against::Text, || {
        Hooks::pack(|parts| {
            // Stacked experts come as gate, up, gate, up.
            if parts.len() > 8 && parts.len() % 2 == 0 {
                parts.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
            }
        })
    });
    steps_over("SiLU", &["dense31b", "moe26b", "e2b", "gemma3"], Against::Text, || {
        Hooks::config(|c| c.activation = Activation::Silu)
    });
    steps_over("no softcap", &GEMMA4, Against::Text, || Hooks::config(|c| c.final_softcap = None));
    steps_over("heads dealt round robin", &["dense31b", "moe26b"], Against::Text, || {
        Hooks::pack(|parts| {
            // Four query heads over two: for head h to read head h % 2, heads 1 and 2 change places, in the
            // query projection and on the way out.
            let order = [0, 2, 1, 3];
            let view = &mut parts[0];
            let swap = |b: &[u8]| order.map(|h| &b[h * b.len() / 4..(h + 1) * b.len() / 4]).concat();
            if view.name.contains("q_proj") && view.rows == 128 {
                view.bytes = swap(view.bytes).leak();
            }
            if view.name.contains("o_proj") && view.cols == 128 {
                let row = view.bytes.len() / view.rows;
                view.bytes = view.bytes.chunks_exact(row).flat_map(swap).collect::<Vec<u8>>().leak();
            }
        })
    });
    steps_over("per-layer inputs of the next layer", &["e2b"], Against::Text, || {
        Hooks::verb(|m, verb, s| match verb {
            Verb::PerLayerGate(out, gate, inputs, layer, f) => {
                s.per_layer_gate(out, gate, inputs, (layer + 1) % m.layers.len(), f);
            }
            other => other.run(s),
        })
    });
    // The factor of the sum is hidden by the branch's norm; the goldens hold the sum itself.
    steps_over("table rows unscaled", &["e2b"], Against::Text, || {
        Hooks::model(|m| m.per_layer.as_mut().unwrap().spec.token_scale = 1.0)
    });
    steps_over("the router's hidden^(-1/2)", &["moe26b"], Against::Text, || {
        Hooks::vector(|name, values| {
            if name.ends_with("/ sqrt(hidden)") {
                values.iter_mut().for_each(|v| *v *= 96f32.sqrt());
            }
        })
    });
}
