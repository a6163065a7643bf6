//! Steering: edits of the residual stream along given directions.
//!
//! A [`SteerSet`] is a list of edits that a row can be given; [`Batch::steer`](crate::Batch::steer) names, for each
//! row, the set that applies to it. Sets are device tables, so which rows are steered, and how, is plain data of a
//! batch and never a different pass. [`Ops::steer`](crate::Ops::steer) has the formulas.

use std::sync::Arc;

/// What an edit does to a row `x`, with `u` the unit direction, `n` the length of the direction as it was given,
/// `p = x . u` and `s` the edit's strength. An edit of strength 0 only measures `p`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SteerMode {
    /// `x + s n u`: the direction as it was given, times the strength.
    Add,
    /// `x - s p u`: at strength 1 nothing is left along the direction.
    Ablate,
    /// `x + s (to - p) u`: at strength 1 the projection becomes [`SteerEdit::to`].
    Clamp,
    /// As `Ablate`, then scaled back to the length that `x` had.
    Renorm,
}

impl SteerMode {
    /// Every mode.
    pub const ALL: [SteerMode; 4] = [SteerMode::Add, SteerMode::Ablate, SteerMode::Clamp, SteerMode::Renorm];

    /// The name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            SteerMode::Add => "add",
            SteerMode::Ablate => "ablate",
            SteerMode::Clamp => "clamp",
            SteerMode::Renorm => "renorm",
        }
    }
}

/// One edit at the end of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct SteerEdit {
    /// The layer, after whose scalar the edit is made.
    pub layer: usize,
    /// What is done.
    pub mode: SteerMode,
    /// How much of it; 0 leaves every bit of the row as it is.
    pub strength: f32,
    /// The projection that `Clamp` sets.
    pub to: f32,
    /// The edit is made only where the projection exceeds this.
    pub gate: Option<f32>,
    /// The direction at length 1, as wide as the residual stream.
    pub unit: Arc<[f32]>,
    /// The length that the direction had.
    pub norm: f32,
}

/// The edits that a row gets, ascending by layer; those of one layer are made in order, each on what the one
/// before left.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SteerSet {
    /// The edits.
    pub edits: Vec<SteerEdit>,
}

/// What is wrong with a set.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum SteerError {
    #[error("steering names layer {layer}, the model has layers 0 to {last}")]
    Layer { layer: usize, last: usize },
    #[error("the steering direction for layer {layer} has {found} values, the model is {expected} wide")]
    Width { layer: usize, found: usize, expected: usize },
    #[error("the steering direction for layer {layer} is zero or holds a value that is not finite")]
    Direction { layer: usize },
    #[error("steering {field} for layer {layer} is not a finite number")]
    Number { field: &'static str, layer: usize },
    #[error("steering edits must ascend by layer, {layer} comes after {before}")]
    Order { layer: usize, before: usize },
    #[error("a steering set holds {edits} edits, the limit is {limit}")]
    TooMany { edits: usize, limit: usize },
}

impl SteerEdit {
    /// An edit along `direction`, which is brought to length 1.
    ///
    /// # Errors
    /// `Direction` for one that has no length.
    pub fn new(
        layer: usize,
        mode: SteerMode,
        strength: f32,
        direction: &[f32],
    ) -> Result<SteerEdit, SteerError> {
        // In float64, so that neither a long nor a tiny direction overflows.
        let norm = direction.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
        if !(norm.is_finite() && norm as f32 > 0.0 && (norm as f32).is_finite()) {
            return Err(SteerError::Direction { layer });
        }
        let unit = direction.iter().map(|&v| (f64::from(v) / norm) as f32).collect();
        Ok(SteerEdit { layer, mode, strength, to: 0.0, gate: None, unit, norm: norm as f32 })
    }
}

impl SteerSet {
    /// Most edits of a set: a row's projections are read back side by side.
    pub const MOST_EDITS: usize = 4096;

    /// Checks a set for a model of `layers` layers, `width` wide: the safety condition of
    /// [`Backend::steer_set`](crate::Backend::steer_set).
    ///
    /// # Errors
    /// The first edit that does not fit.
    pub fn check(&self, layers: usize, width: usize) -> Result<(), SteerError> {
        if self.edits.len() > SteerSet::MOST_EDITS {
            return Err(SteerError::TooMany { edits: self.edits.len(), limit: SteerSet::MOST_EDITS });
        }
        let mut before = 0;
        for edit in &self.edits {
            let layer = edit.layer;
            if layer >= layers {
                return Err(SteerError::Layer { layer, last: layers.saturating_sub(1) });
            }
            if layer < before {
                return Err(SteerError::Order { layer, before });
            }
            before = layer;
            if edit.unit.len() != width {
                return Err(SteerError::Width { layer, found: edit.unit.len(), expected: width });
            }
            let numbers = [("strength", edit.strength), ("to", edit.to), ("gate", edit.gate.unwrap_or(0.0))];
            if let Some((field, _)) = numbers.iter().find(|(_, v)| !v.is_finite()) {
                return Err(SteerError::Number { field, layer });
            }
            let some = edit.unit.iter().any(|&v| v != 0.0);
            if !some || !edit.norm.is_finite() || edit.unit.iter().any(|v| !v.is_finite()) {
                return Err(SteerError::Direction { layer });
            }
        }
        Ok(())
    }

    /// The edits of `layer`, and the index of the first of them.
    pub fn at(&self, layer: usize) -> (usize, &[SteerEdit]) {
        let first = self.edits.partition_point(|e| e.layer < layer);
        let end = first + self.edits[first..].partition_point(|e| e.layer == layer);
        (first, &self.edits[first..end])
    }
}

/// What rows projected onto the directions of their sets before each edit was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Projections {
    /// Values of a row: the most edits that any set in use has.
    pub stride: usize,
    /// By row of the batch and index of the edit in the row's set; NaN where an edit was not reached (the row has
    /// no such edit, or was dropped before its layer).
    pub values: Vec<f32>,
}

impl Projections {
    /// Room for `rows` rows of `stride` edits, none of them reached.
    pub fn new(rows: usize, stride: usize) -> Projections {
        Projections { stride, values: vec![f32::NAN; rows * stride] }
    }

    /// The projections of a row, in the order of its set's edits; empty where nothing was steered.
    pub fn row(&self, row: usize) -> &[f32] {
        self.values.get(row * self.stride..(row + 1) * self.stride).unwrap_or_default()
    }

    /// Takes from another pass over the same batch what this one did not reach.
    pub fn fill_from(&mut self, other: &Projections) {
        for (own, &other) in self.values.iter_mut().zip(&other.values) {
            if own.is_nan() {
                *own = other;
            }
        }
    }
}
