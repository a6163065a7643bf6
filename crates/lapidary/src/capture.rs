//! Every position's logits and chosen activations of a prompt, named as the goldens name them.

use lapidary_engine::{Prompt, Result, Stepper};
use lapidary_ops::{Tap, TapPoint};

/// What to capture beside the logits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Layers whose output is wanted: `hidden.N`.
    pub layers: Vec<usize>,
    /// Scaled embeddings, soft rows in place: `embed`.
    pub embed: bool,
    /// The residual after the final norm: `final_norm`.
    pub final_norm: bool,
    /// Layers whose attention is wanted: `attn.N.q`, `attn.N.o`.
    pub attention: Vec<usize>,
    /// Chosen experts and their weights of all layers: `router_idx`, `router_weight`.
    pub router: bool,
    /// Combined per-layer inputs: `per_layer_inputs`.
    pub per_layer: bool,
}

/// One named value, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Captured {
    /// Name.
    pub name: String,
    /// Sides, the slowest first.
    pub shape: Vec<usize>,
    /// The numbers.
    pub values: Values,
}

/// Numbers of either type.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Activations.
    F32(Vec<f32>),
    /// Ids.
    I64(Vec<i64>),
}

/// Runs `prompt` from position 0 and returns, with `T` its length:
///
/// | name | shape | meaning |
/// | --- | --- | --- |
/// | `logits` | `[T, V]` | after the softcap |
/// | `embed` | `[T, H]` | scaled embeddings |
/// | `hidden.N` | `[T, H]` | output of layer N, its scalar included |
/// | `final_norm` | `[T, H]` | after the final norm |
/// | `attn.N.q` | `[T, heads, D]` | normed and rotated queries |
/// | `attn.N.o` | `[T, heads, D]` | attention before the output projection |
/// | `router_idx`, `router_weight` | `[L, T, K]` | experts by falling probability, final weights |
/// | `per_layer_inputs` | `[T, L, P]` | combined per-layer inputs |
///
/// What a model does not have (a router, per-layer inputs) is left out.
///
/// # Errors
/// What [`Stepper::score`] refuses, and `Layer` for a layer that does not exist.
pub fn capture(stepper: &mut Stepper, prompt: &Prompt, wanted: &Wanted) -> Result<Vec<Captured>> {
    let layers = stepper.model().layers.len();
    if let Some(&layer) = wanted.layers.iter().chain(&wanted.attention).find(|&&l| l >= layers) {
        return Err(lapidary_engine::Error::Layer { layer, layers });
    }
    stepper.reset();
    stepper.set_capture(&points(wanted, layers));
    let mut logits = Vec::new();
    let mut taps: Vec<Tap> = Vec::new();
    let scored = stepper.score(prompt, &mut |_, row| logits.extend_from_slice(row), &mut |_, outcome| {
        for tap in &outcome.taps {
            match taps.iter_mut().find(|t| t.point == tap.point) {
                Some(whole) => {
                    whole.rows += tap.rows;
                    whole.values.extend_from_slice(&tap.values);
                }
                None => taps.push(tap.clone()),
            }
        }
    });
    stepper.set_capture(&[]);
    scored?;
    let config = &stepper.model().config;
    let rows = prompt.tokens.len();
    let mut out = vec![f32s("logits", &[rows, config.vocab], logits)];
    let take = |point| taps.iter().find(|t| t.point == point);
    let plain = |name: String, point, sides: &[usize]| {
        let shape = [&[rows][..], sides].concat();
        take(point).map(|tap| f32s(&name, &shape, tap.values.clone()))
    };
    out.extend(plain("embed".into(), TapPoint::Embed, &[config.hidden]));
    for &layer in &wanted.layers {
        out.extend(plain(format!("hidden.{layer}"), TapPoint::LayerOut(layer), &[config.hidden]));
    }
    out.extend(plain("final_norm".into(), TapPoint::FinalNorm, &[config.hidden]));
    if let Some(p) = config.per_layer {
        out.extend(plain("per_layer_inputs".into(), TapPoint::PerLayer, &[layers, p.width]));
    }
    for &layer in &wanted.attention {
        let d = config.layers[layer].head_dim;
        out.extend(plain(format!("attn.{layer}.o"), TapPoint::Attn(layer), &[config.heads, d]));
        if let Some(tap) = take(TapPoint::Qkv(layer)) {
            // Queries are the first columns of the stacked projection.
            let queries = tap.values.chunks_exact(tap.width).flat_map(|row| &row[..config.heads * d]);
            out.push(f32s(&format!("attn.{layer}.q"), &[rows, config.heads, d], queries.copied().collect()));
        }
    }
    if let (true, Some(moe)) = (wanted.router, config.moe) {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for layer in 0..layers {
            for row in take(TapPoint::Routes(layer)).iter().flat_map(|t| t.values.chunks_exact(t.width)) {
                ids.extend(row[..moe.top_k].iter().map(|&id| id as i64));
                weights.extend_from_slice(&row[moe.top_k..2 * moe.top_k]);
            }
        }
        let shape = vec![layers, rows, moe.top_k];
        out.push(Captured { name: "router_idx".into(), shape: shape.clone(), values: Values::I64(ids) });
        out.push(Captured { name: "router_weight".into(), shape, values: Values::F32(weights) });
    }
    Ok(out)
}

fn f32s(name: &str, shape: &[usize], values: Vec<f32>) -> Captured {
    debug_assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
    Captured { name: name.to_string(), shape: shape.to_vec(), values: Values::F32(values) }
}

fn points(wanted: &Wanted, layers: usize) -> Vec<TapPoint> {
    let mut points: Vec<TapPoint> = wanted.layers.iter().map(|&l| TapPoint::LayerOut(l)).collect();
    points.extend(wanted.attention.iter().flat_map(|&l| [TapPoint::Qkv(l), TapPoint::Attn(l)]));
    points.extend(wanted.embed.then_some(TapPoint::Embed));
    points.extend(wanted.final_norm.then_some(TapPoint::FinalNorm));
    points.extend(wanted.per_layer.then_some(TapPoint::PerLayer));
    if wanted.router {
        points.extend((0..layers).map(TapPoint::Routes));
    }
    points
}
