//! Copying activations out.
//!
//! [`capture`] runs a prompt and gives every position's logits and chosen activations, named as the goldens name them.
//! A [`CaptureSpec`] says, as plain data, what a request wants copied out while it is answered, and a [`Recording`]
//! collects it from the batches in which the request has rows.

mod error;
mod recording;
mod spec;

pub use error::CaptureError;
pub use recording::Recording;
pub use spec::{CapturePositions, CaptureSpec, LayerChoice, What};

pub(crate) use recording::{routes, row_of};

use lapidary_engine::sampling::top_logprobs;
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
    /// Layers whose feed-forward block is wanted: `mlp.N`.
    pub mlp: Vec<usize>,
    /// So many of the likeliest tokens by the head applied to each layer's output: `lens.ids`, `lens.probability`;
    /// 0 for none.
    pub lens: usize,
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
/// | `mlp.N` | `[T, H]` | feed-forward block before its post norm |
/// | `lens.ids`, `lens.probability` | `[L, T, K]` | the head applied to each layer's output: likeliest tokens |
///
/// What a model does not have (a router, per-layer inputs) is left out.
///
/// # Errors
/// What [`Stepper::score`] refuses, and `Layer` for a layer that does not exist.
pub fn capture(stepper: &mut Stepper, prompt: &Prompt, wanted: &Wanted) -> Result<Vec<Captured>> {
    let layers = stepper.model().layers.len();
    if let Some(&layer) =
        wanted.layers.iter().chain(&wanted.attention).chain(&wanted.mlp).find(|&&l| l >= layers)
    {
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
    let lens = match wanted.lens {
        0 => None,
        count => Some(lens(stepper, &taps, count)?),
    };
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
    for &layer in &wanted.mlp {
        out.extend(plain(format!("mlp.{layer}"), TapPoint::Mlp(layer), &[config.hidden]));
    }
    if let Some((ids, probabilities)) = lens {
        let shape = vec![layers, rows, wanted.lens.min(config.vocab)];
        out.push(Captured { name: "lens.ids".into(), shape: shape.clone(), values: Values::I64(ids) });
        out.push(Captured { name: "lens.probability".into(), shape, values: Values::F32(probabilities) });
    }
    if let (true, Some(moe)) = (wanted.router, config.moe) {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for layer in 0..layers {
            if let Some(tap) = take(TapPoint::Routes(layer)) {
                let (chosen, by) = routes(&tap.values, moe.top_k);
                ids.extend(chosen);
                weights.extend(by);
            }
        }
        let shape = vec![layers, rows, moe.top_k];
        out.push(Captured { name: "router_idx".into(), shape: shape.clone(), values: Values::I64(ids) });
        out.push(Captured { name: "router_weight".into(), shape, values: Values::F32(weights) });
    }
    Ok(out)
}

/// The likeliest tokens of every layer and row.
fn lens(stepper: &mut Stepper, taps: &[Tap], count: usize) -> Result<(Vec<i64>, Vec<f32>)> {
    let (mut ids, mut probabilities) = (Vec::new(), Vec::new());
    for layer in 0..stepper.model().layers.len() {
        let tap =
            taps.iter().find(|t| t.point == TapPoint::LayerOut(layer)).expect("every layer is captured");
        let mut bad = None;
        stepper.lens(&tap.values, &mut |row, logits| match top_logprobs(logits, row as u64, count) {
            Ok(top) => top.into_iter().for_each(|(id, logprob)| {
                ids.push(i64::from(id));
                probabilities.push(logprob.exp() as f32);
            }),
            Err(error) => bad = Some(error),
        })?;
        if let Some(error) = bad {
            return Err(error.into());
        }
    }
    Ok((ids, probabilities))
}

fn f32s(name: &str, shape: &[usize], values: Vec<f32>) -> Captured {
    debug_assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
    Captured { name: name.to_string(), shape: shape.to_vec(), values: Values::F32(values) }
}

fn points(wanted: &Wanted, layers: usize) -> Vec<TapPoint> {
    let mut points: Vec<TapPoint> = wanted.layers.iter().map(|&l| TapPoint::LayerOut(l)).collect();
    points.extend(wanted.attention.iter().flat_map(|&l| [TapPoint::Qkv(l), TapPoint::Attn(l)]));
    if wanted.lens > 0 {
        points
            .extend((0..layers).map(TapPoint::LayerOut).filter(|p| !points.contains(p)).collect::<Vec<_>>());
    }
    points.extend(wanted.mlp.iter().map(|&l| TapPoint::Mlp(l)));
    points.extend(wanted.embed.then_some(TapPoint::Embed));
    points.extend(wanted.final_norm.then_some(TapPoint::FinalNorm));
    points.extend(wanted.per_layer.then_some(TapPoint::PerLayer));
    if wanted.router {
        points.extend((0..layers).map(TapPoint::Routes));
    }
    points
}
