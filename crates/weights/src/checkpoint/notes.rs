//! What a user should hear of, though nothing fails: mostly activation scales.
//!
//! Activations are not quantised with scales from the file, so a missing or broken one changes no result here. In engines
//! that do use them it turns into infinities for certain prompts only, hence the note.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use super::safetensors_source::SafetensorsSource;
use crate::names::{LayerRole, Role};
use crate::quant::{Matrix, floats};
use crate::safetensors::Shards;

/// The notes of one checkpoint.
#[derive(Debug, Default)]
pub(super) struct Notes {
    from_headers: Vec<String>,
    bad_scales: Mutex<BadScales>,
}

/// Matrices whose activation scale turned out bad when a view was taken: by layer and module, the experts (none for a
/// matrix that belongs to no expert).
type BadScales = BTreeMap<(Option<u32>, String), BTreeSet<u32>>;

impl Notes {
    /// The notes that headers give cause for.
    pub fn of(source: &SafetensorsSource, config: &Value) -> Notes {
        let mut lines = Vec::new();
        for ((layer, part), experts) in source.experts_without_input_scale() {
            lines.push(format!(
                "layer {layer}: experts {} have no activation scale for {}; it is not used here",
                list(&experts),
                part.name()
            ));
        }
        let tied =
            config.pointer("/tie_word_embeddings").or(config.pointer("/text_config/tie_word_embeddings"));
        if source.matrices.contains_key(&Role::Head) && tied.and_then(Value::as_bool) != Some(false) {
            lines.push("the configuration ties the head to the embedding, the file has lm_head.weight: the file is followed".to_owned());
        }
        if source.shards.unlisted > 0 {
            lines.push(format!(
                "{} tensors of the shards are not in the index; they are used",
                source.shards.unlisted
            ));
        }
        Notes { from_headers: lines, bad_scales: Mutex::default() }
    }

    /// Records a matrix whose activation scale is there and could not be used.
    pub fn look_at_input_scale(&self, shards: &Shards, role: Role, matrix: &Matrix) {
        let Some(scale) = matrix.input_scale else { return };
        let values = floats(shards, scale).unwrap_or_default();
        if matches!(values[..], [v] if v.is_finite() && v > 0.0) {
            return;
        }
        let (key, expert) = match role {
            Role::Layer(layer, LayerRole::Expert { index, part }) => {
                ((Some(layer), part.name().to_owned()), Some(index))
            }
            Role::Layer(layer, _) => ((Some(layer), role.to_string()), None),
            _ => ((None, role.to_string()), None),
        };
        let mut bad = self.bad_scales.lock().unwrap_or_else(PoisonError::into_inner);
        bad.entry(key).or_default().extend(expert);
    }

    /// All of them.
    pub fn lines(&self) -> Vec<String> {
        let bad = self.bad_scales.lock().unwrap_or_else(PoisonError::into_inner);
        let bad = bad.iter().map(|((layer, module), experts)| {
            let place = match layer {
                Some(layer) if !experts.is_empty() => format!("layer {layer}: experts {}", list(experts)),
                Some(layer) => format!("layer {layer}"),
                None => "model".to_owned(),
            };
            format!("{place}: the activation scale of {module} is not one finite positive number; it is not used here")
        });
        self.from_headers.iter().cloned().chain(bad).collect()
    }
}

fn list(experts: &BTreeSet<u32>) -> String {
    experts.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}
