//! What a request wants copied out while it runs, as plain data that serde reads and writes.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use lapidary_model::Config;
use serde::{Deserialize, Serialize};

use super::error::{CaptureError, Result};

/// A kind of activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// The residual stream after the layer, its scalar and steering included: `hidden.N [P, H]`.
    Hidden,
    /// Attention before its output projection: `attn.N.o [P, heads, D]`.
    Attn,
    /// The feed-forward block before its post norm: `mlp.N [P, H]`.
    Mlp,
    /// Chosen experts, best first, and their weights: `router_idx.N`, `router_weight.N [P, K]`.
    Routes,
    /// What a steered row projected onto each vector's direction before it was edited: `projections.N [P, V]` for the
    /// layers at which a vector has one, the vectors in the order of the request, NaN for those without.
    Projections,
}

impl What {
    const NAMES: [(&'static str, What); 5] = [
        ("hidden", What::Hidden),
        ("attn", What::Attn),
        ("mlp", What::Mlp),
        ("routes", What::Routes),
        ("projections", What::Projections),
    ];
}

/// Layers by number, written as `all`, `5` or `0+3-9`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LayerChoice {
    /// Every one.
    #[default]
    All,
    /// First and last of each run, in rising order.
    These(Vec<(usize, usize)>),
}

impl LayerChoice {
    /// The layers' numbers.
    ///
    /// # Errors
    /// `Layer` for one that the model does not have.
    pub fn list(&self, layers: usize) -> Result<Vec<usize>> {
        let LayerChoice::These(runs) = self else { return Ok((0..layers).collect()) };
        if let Some(&(_, last)) = runs.iter().find(|(_, last)| *last >= layers) {
            return Err(CaptureError::Layer { layer: last, last: layers - 1 });
        }
        let mut list: Vec<usize> = runs.iter().flat_map(|&(first, last)| first..=last).collect();
        list.sort_unstable();
        list.dedup();
        Ok(list)
    }
}

impl FromStr for LayerChoice {
    type Err = CaptureError;

    fn from_str(text: &str) -> Result<LayerChoice> {
        if text == "all" {
            return Ok(LayerChoice::All);
        }
        let expected = "all, or numbers and ranges as in 0+3-9";
        let bad = || CaptureError::Field { field: "layers", found: format!("{text:?}"), expected };
        let run = |part: &str| {
            let run = range(part).ok_or_else(bad)?;
            Ok((run.start, run.end - 1))
        };
        Ok(LayerChoice::These(text.split('+').map(run).collect::<Result<_>>()?))
    }
}

impl fmt::Display for LayerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerChoice::All => f.write_str("all"),
            LayerChoice::These(runs) => {
                let text: Vec<String> = runs.iter().map(|(a, b)| show(*a, *b)).collect();
                f.write_str(&text.join("+"))
            }
        }
    }
}

/// Which positions of the sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CapturePositions {
    /// The last token of the prompt, whose logits give the first token of the answer.
    #[default]
    Last,
    /// Every token of prompt and answer that is run.
    All,
    /// The tokens of the answer that are run.
    Generated,
    /// These positions, of prompt or answer.
    Range(Range<usize>),
}

impl CapturePositions {
    /// Whether `position` is wanted, with `prompt` the number of tokens of the prompt.
    pub fn wants(&self, position: usize, prompt: usize) -> bool {
        match self {
            CapturePositions::Last => position + 1 == prompt,
            CapturePositions::All => true,
            CapturePositions::Generated => position >= prompt,
            CapturePositions::Range(range) => range.contains(&position),
        }
    }
}

impl FromStr for CapturePositions {
    type Err = CaptureError;

    fn from_str(text: &str) -> Result<CapturePositions> {
        Ok(match text {
            "last" => CapturePositions::Last,
            "all" => CapturePositions::All,
            "generated" => CapturePositions::Generated,
            other => CapturePositions::Range(range(other).ok_or_else(|| CaptureError::Field {
                field: "positions",
                found: format!("{text:?}"),
                expected: "last, all, generated, or a range as in 3-9",
            })?),
        })
    }
}

impl fmt::Display for CapturePositions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CapturePositions::Last => f.write_str("last"),
            CapturePositions::All => f.write_str("all"),
            CapturePositions::Generated => f.write_str("generated"),
            CapturePositions::Range(r) => f.write_str(&show(r.start, r.end - 1)),
        }
    }
}

/// A request's capture. As a flag `layers=0+3-9,what=hidden+routes,positions=last`; in JSON
/// `{"layers": "0+3-9", "what": ["hidden", "routes"], "positions": "last"}`. All of it can be left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureSpec {
    /// The layers.
    #[serde(default)]
    pub layers: LayerChoice,
    /// The kinds of activation.
    #[serde(default = "hidden")]
    pub what: Vec<What>,
    /// The positions.
    #[serde(default)]
    pub positions: CapturePositions,
}

fn hidden() -> Vec<What> {
    vec![What::Hidden]
}

impl Default for CaptureSpec {
    fn default() -> CaptureSpec {
        CaptureSpec { layers: LayerChoice::All, what: hidden(), positions: CapturePositions::Last }
    }
}

impl CaptureSpec {
    /// Bytes that are copied out for each position: what a server bounds a response by. `edits` are those of the request's
    /// [`SteerPlan`](crate::steering::SteerPlan), none where it is not steered.
    ///
    /// # Errors
    /// `Layer`; `NoExperts` for routes of a model that has none; `NotSteered` for projections where no vector has a
    /// direction at any of the layers.
    pub fn bytes_per_position(&self, config: &Config, edits: &[(usize, usize)]) -> Result<usize> {
        let mut values = 0;
        let layers = self.layers.list(config.layers.len())?;
        let steered = |layer: usize| edits.iter().any(|&(at, _)| at == layer);
        if self.what.contains(&What::Projections) && !layers.iter().any(|&layer| steered(layer)) {
            return Err(CaptureError::NotSteered { layers: self.layers.to_string() });
        }
        for layer in layers {
            for what in &self.what {
                values += match (what, config.moe) {
                    (What::Hidden | What::Mlp, _) => config.hidden,
                    (What::Attn, _) => config.heads * config.layers[layer].head_dim,
                    (What::Routes, Some(moe)) => 2 * moe.top_k,
                    (What::Routes, None) => return Err(CaptureError::NoExperts),
                    (What::Projections, _) if steered(layer) => vectors(edits),
                    (What::Projections, _) => 0,
                };
            }
        }
        Ok(values * size_of::<f32>())
    }
}

impl FromStr for CaptureSpec {
    type Err = CaptureError;

    fn from_str(text: &str) -> Result<CaptureSpec> {
        let mut spec = CaptureSpec::default();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                let problem = format!("{part:?} is no setting; expected one like layers=3-9");
                return Err(CaptureError::Spec { problem });
            };
            let value = value.trim();
            match key.trim() {
                "layers" => spec.layers = value.parse()?,
                "positions" => spec.positions = value.parse()?,
                "what" => {
                    let named = |name: &str| {
                        What::NAMES.iter().find(|(n, _)| *n == name).map(|(_, what)| *what).ok_or_else(|| {
                            CaptureError::Field {
                                field: "what",
                                found: format!("{name:?}"),
                                expected: "hidden, attn, mlp, routes, projections, or several joined by +",
                            }
                        })
                    };
                    spec.what = value.split('+').map(named).collect::<Result<_>>()?;
                }
                other => {
                    let problem =
                        format!("there is no setting {other:?}; expected layers, what or positions");
                    return Err(CaptureError::Spec { problem });
                }
            }
        }
        Ok(spec)
    }
}

/// How many vectors a plan's edits come from; each has one at least.
pub(super) fn vectors(edits: &[(usize, usize)]) -> usize {
    edits.iter().map(|&(_, vector)| vector + 1).max().unwrap_or(0)
}

/// `3-9` or `5` as a range.
fn range(text: &str) -> Option<Range<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
    (first <= last).then_some(first..last.checked_add(1)?)
}

fn show(first: usize, last: usize) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

macro_rules! text_form {
    ($($name:ty),*) => {$(
        impl TryFrom<String> for $name {
            type Error = CaptureError;

            fn try_from(text: String) -> Result<Self> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.to_string()
            }
        }
    )*};
}
text_form!(LayerChoice, CapturePositions);
