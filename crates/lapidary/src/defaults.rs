//! What a checkpoint says about generating: sampling, stop tokens, suppressed tokens.

use lapidary_engine::sampling::SamplingParams;
use lapidary_model::Config;
use lapidary_text::Tokenizer;
use serde_json::Value;

use crate::error::{Error, Result};

/// A checkpoint's own choices.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// Sampling, with the suppressed tokens in it.
    pub sampling: SamplingParams,
    /// Tokens that end an answer: the union of what config, generation config, file metadata and vocabulary
    /// declare.
    pub stop_ids: Vec<u32>,
}

impl Defaults {
    /// Reads `generation_config.json`; without one, temperature 1, top-k 64, top-p 0.95.
    pub(crate) fn new(
        config: &Config,
        generation: Option<&Value>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Defaults> {
        let mut sampling = SamplingParams::default();
        let mut stop_ids = config.eos.clone();
        if let Some(tokenizer) = tokenizer {
            stop_ids.extend(tokenizer.specials().end_ids());
        }
        if let Some(g) = generation {
            if let Some(t) = number(g, "temperature")? {
                sampling.temperature = t;
            }
            if g.get("do_sample") == Some(&Value::Bool(false)) {
                sampling.temperature = 0.0;
            }
            if let Some(k) = number(g, "top_k")? {
                sampling.top_k = k as u32;
            }
            if let Some(p) = number(g, "top_p")? {
                sampling.top_p = p;
            }
            stop_ids.extend(ids(g, "eos_token_id")?);
            sampling.suppress = ids(g, "suppress_tokens")?;
        }
        stop_ids.retain(|&id| (id as usize) < config.vocab);
        stop_ids.sort_unstable();
        stop_ids.dedup();
        sampling.validate(config.vocab).map_err(|e| Error::Engine(e.into()))?;
        Ok(Defaults { sampling, stop_ids })
    }
}

fn number(g: &Value, field: &'static str) -> Result<Option<f32>> {
    match g.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(v) => v.as_f64().map(|v| Some(v as f32)).ok_or_else(|| bad(field, v)),
    }
}

fn ids(g: &Value, field: &'static str) -> Result<Vec<u32>> {
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| bad(field, v));
    match g.get(field) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(v) => Ok(vec![id(v)?]),
    }
}

fn bad(field: &'static str, v: &Value) -> Error {
    Error::GenerationConfig { field, problem: format!("{v} has the wrong type") }
}
