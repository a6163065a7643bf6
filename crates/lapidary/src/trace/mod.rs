//! A token at a time: how sure the model was, what else it considered, which experts it used, and what each layer
//! would have said.

mod html;

use lapidary_engine::Stepper;
use lapidary_engine::sampling::{log_sum_exp, top_logprobs};
use lapidary_model::Model;
use lapidary_ops::TapPoint;
use serde::Serialize;

use crate::capture::row_of;
use crate::error::Result;

pub use html::html;

/// What to note of each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// The likeliest tokens of the model's own distribution.
    pub alternatives: usize,
    /// The likeliest tokens of the head applied to each layer's output; 0 leaves the lens out, which is a pass of
    /// the head over all layers for each token.
    pub lens: usize,
}

impl Default for TraceOptions {
    fn default() -> TraceOptions {
        TraceOptions { alternatives: 5, lens: 0 }
    }
}

/// A token and its probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Alternative {
    /// The token.
    pub token: u32,
    /// Its probability.
    pub probability: f64,
}

/// What is known of one token of an answer. Probabilities are those of the model's own distribution: no temperature,
/// penalty or filter is in them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenTrace {
    /// The token.
    pub token: u32,
    /// The position that it takes.
    pub position: usize,
    /// Its probability.
    pub probability: f64,
    /// Entropy of the distribution in nats.
    pub entropy: f64,
    /// The likeliest tokens, best first.
    pub alternatives: Vec<Alternative>,
    /// By layer: root mean square of the residual stream after it, of the row that the token was chosen from.
    pub norms: Vec<f64>,
    /// By layer: chosen experts, best first, with their weights. Empty for a model without experts.
    pub experts: Vec<Vec<(usize, f32)>>,
    /// By layer: the likeliest tokens of the head applied to its output. Empty when not asked for.
    pub lens: Vec<Vec<Alternative>>,
}

/// A trace in the making.
#[derive(Clone, Debug)]
pub(crate) struct Tracing {
    options: TraceOptions,
    pub tokens: Vec<TokenTrace>,
}

impl Tracing {
    pub fn new(options: TraceOptions) -> Tracing {
        Tracing { options, tokens: Vec::new() }
    }

    /// What every batch must copy out.
    pub fn points(&self, model: &Model) -> Vec<TapPoint> {
        let layers = 0..model.layers.len();
        let routes = layers.clone().filter(|_| model.config.moe.is_some()).map(TapPoint::Routes);
        layers.map(TapPoint::LayerOut).chain(routes).collect()
    }

    /// Notes `token`, which was just chosen from the last batch's last row.
    pub fn note(&mut self, stepper: &mut Stepper, token: u32) -> Result<()> {
        let (layers, vocab) = (stepper.model().layers.len(), stepper.model().config.vocab);
        let top_k = stepper.model().config.moe.map_or(0, |m| m.top_k);
        let position = stepper.cursor();
        let mut logits = vec![0.0; vocab];
        stepper.logits_into(&mut logits)?;
        let of = |logits: &[f32], count| -> Result<Vec<Alternative>> {
            let top = top_logprobs(logits, position as u64, count).map_err(lapidary_engine::Error::from)?;
            Ok(top.into_iter().map(|(token, p)| Alternative { token, probability: p.exp() }).collect())
        };
        let lse = log_sum_exp(&logits, position as u64).map_err(lapidary_engine::Error::from)?;
        let entropy = logits.iter().map(|&z| f64::from(z) - lse).map(|p| -p.exp() * p).sum();
        let (mut norms, mut experts, mut residual) = (Vec::new(), Vec::new(), Vec::new());
        for layer in 0..layers {
            let tap = stepper.tap(TapPoint::LayerOut(layer))?;
            let row = row_of(tap, tap.rows - 1);
            let squares: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            norms.push((squares / row.len() as f64).sqrt());
            residual.extend_from_slice(row);
            if top_k > 0 {
                let tap = stepper.tap(TapPoint::Routes(layer))?;
                let (ids, weights) = row_of(tap, tap.rows - 1).split_at(top_k);
                experts.push(ids.iter().map(|&id| id as usize).zip(weights.iter().copied()).collect());
            }
        }
        let alternatives = of(&logits, self.options.alternatives)?;
        let probability = (f64::from(logits[token as usize]) - lse).exp();
        let mut lens = Vec::new();
        if self.options.lens > 0 {
            let mut bad = None;
            stepper.lens(&residual, &mut |_, logits| match of(logits, self.options.lens) {
                Ok(top) => lens.push(top),
                Err(error) => bad = Some(error),
            })?;
            if let Some(error) = bad {
                return Err(error);
            }
        }
        self.tokens.push(TokenTrace {
            token,
            position,
            probability,
            entropy,
            alternatives,
            norms,
            experts,
            lens,
        });
        Ok(())
    }
}
