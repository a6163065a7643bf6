//! The keys of a converted file, but for the vocabulary's.

use lapidary_formats::Format;
use lapidary_model::{Config, Family};
use lapidary_ops::Group;
use lapidary_weights::gguf::{Value as Gguf, Writer};
use serde_json::Value;

use super::Types;
use super::error::Result;
use super::vocabulary::Vocabulary;

/// `general.*`.
pub(super) fn general(w: &mut Writer, config: &Config, name: &str, types: Types) -> Result<()> {
    w.set("general.architecture", architecture_name(config))?;
    w.set("general.type", "model")?;
    w.set("general.name", name)?;
    if let Some(number) = file_type(types) {
        w.set("general.file_type", number)?;
    }
    if !matches!(types.base(), Format::F32 | Format::F16 | Format::Bf16) {
        w.set("general.quantization_version", 2u32)?;
    }
    Ok(())
}

fn architecture_name(config: &Config) -> &'static str {
    match config.family {
        Family::Gemma4 => "gemma4",
        Family::Gemma3 => "gemma3",
    }
}

/// The number by which files name the type that most matrices have.
fn file_type(types: Types) -> Option<u32> {
    let format = match types {
        Types::Mix(mix) => return Some(mix.file_type()),
        Types::All(format) => format,
    };
    Some(match format {
        Format::F32 => 0,
        Format::F16 => 1,
        Format::Q4_0 => 2,
        Format::Q4_1 => 3,
        Format::Q8_0 => 7,
        Format::Q5_0 => 8,
        Format::Q5_1 => 9,
        Format::Q2K => 10,
        // All matrices alike is the "small" kind of these three.
        Format::Q3K => 11,
        Format::Q4K => 14,
        Format::Q5K => 16,
        Format::Q6K => 18,
        Format::Iq4Nl => 25,
        Format::Iq4Xs => 30,
        Format::Bf16 => 32,
        Format::Mxfp4 => 38,
        Format::GgufNvfp4 => 39,
        _ => return None,
    })
}

/// `gemma4.*` or `gemma3.*`.
pub(super) fn architecture(w: &mut Writer, config: &Config) -> Result<()> {
    let arch = architecture_name(config);
    let mut set = |key: &str, value: Gguf| w.set(&format!("{arch}.{key}"), value);
    let count = |n: usize| Gguf::U32(n as u32);
    let head_dim = |group: Group| config.layers.iter().find(|l| l.group == group).map(|l| l.head_dim);
    // A file whose layers are all of one kind has one head dimension.
    let any = config.layers[0].head_dim;
    let full_dim = head_dim(Group::Full).unwrap_or(any);
    let sliding_dim = head_dim(Group::Sliding).unwrap_or(any);

    set("block_count", count(config.layers.len()))?;
    set("context_length", count(config.max_positions))?;
    set("embedding_length", count(config.hidden))?;
    set("vocab_size", count(config.vocab))?;
    set("feed_forward_length", one_or_each(config.layers.iter().map(|l| l.intermediate)))?;
    set("attention.head_count", count(config.heads))?;
    set("attention.head_count_kv", one_or_each(config.layers.iter().map(|l| l.kv_heads)))?;
    set("attention.key_length", count(full_dim))?;
    set("attention.value_length", count(full_dim))?;
    set("attention.layer_norm_rms_epsilon", config.eps.into())?;
    set("attention.sliding_window", count(config.window))?;
    set("attention.sliding_window_pattern", pattern(config))?;
    let [sliding, full] = config.rope;
    set("rope.freq_base", (full.theta as f32).into())?;
    set("rope.freq_base_swa", (sliding.theta as f32).into())?;
    if let Some(cap) = config.final_softcap {
        set("final_logit_softcapping", cap.into())?;
    }
    if let Some(cap) = config.attn_softcap {
        set("attn_logit_softcapping", cap.into())?;
    }
    match config.family {
        Family::Gemma3 if full.factor != 1.0 => {
            set("rope.scaling.type", "linear".into())?;
            set("rope.scaling.factor", (full.factor as f32).into())?;
        }
        Family::Gemma3 => {}
        Family::Gemma4 => {
            set("attention.key_length_swa", count(sliding_dim))?;
            set("attention.value_length_swa", count(sliding_dim))?;
            set("attention.shared_kv_layers", count(config.layers.len() - config.first_shared()))?;
            set("embedding_length_per_layer_input", count(config.per_layer.map_or(0, |p| p.width)))?;
            set("rope.dimension_count", count(full_dim))?;
            set("rope.dimension_count_swa", count(sliding_dim))?;
        }
    }
    if let Some(moe) = config.moe {
        set("expert_count", count(moe.experts))?;
        set("expert_used_count", count(moe.top_k))?;
        set("expert_feed_forward_length", count(moe.width))?;
    }
    Ok(())
}

/// One number where all layers agree, else a list.
fn one_or_each(values: impl Iterator<Item = usize>) -> Gguf {
    let values: Vec<u32> = values.map(|v| v as u32).collect();
    match values.split_first() {
        Some((first, rest)) if rest.iter().all(|v| v == first) => (*first).into(),
        _ => values.into(),
    }
}

/// Whether each layer is sliding. Gemma 3 files have the period instead, and some of their readers know no list.
fn pattern(config: &Config) -> Gguf {
    let sliding: Vec<bool> = config.layers.iter().map(|l| l.group == Group::Sliding).collect();
    if config.family == Family::Gemma3
        && let Some(first_full) = sliding.iter().position(|s| !s)
    {
        let period = first_full + 1;
        if sliding.iter().enumerate().all(|(i, &s)| s != (i + 1).is_multiple_of(period)) {
            return (period as u32).into();
        }
    }
    sliding.into()
}

/// `general.sampling.*` from `generation_config.json`.
pub(super) fn sampling(w: &mut Writer, generation: Option<&Value>) -> Result<()> {
    let Some(generation) = generation else { return Ok(()) };
    let number = |field: &str| generation.get(field).and_then(Value::as_f64);
    if generation.get("do_sample") == Some(&Value::Bool(false)) {
        w.set("general.sampling.temp", 0.0f32)?;
    } else if let Some(temperature) = number("temperature") {
        w.set("general.sampling.temp", temperature as f32)?;
    }
    if let Some(k) = generation.get("top_k").and_then(Value::as_i64) {
        w.set("general.sampling.top_k", k as i32)?;
    }
    for (field, key) in [("top_p", "top_p"), ("min_p", "min_p"), ("repetition_penalty", "penalty_repeat")] {
        if let Some(value) = number(field) {
            w.set(&format!("general.sampling.{key}"), value as f32)?;
        }
    }
    Ok(())
}

/// The ids that steer generation: where it begins, ends, pads, and what it never says.
pub(super) fn token_ids(
    w: &mut Writer,
    config: &Config,
    generation: Option<&Value>,
    vocabulary: Option<&Vocabulary>,
) -> Result<()> {
    let declared = ids(generation, "eos_token_id");
    let mut ends = declared.clone();
    ends.extend(config.eos.iter().filter(|id| !declared.contains(id)));
    w.set("tokenizer.ggml.bos_token_id", config.bos)?;
    w.set("tokenizer.ggml.eos_token_id", ends[0])?;
    w.set("tokenizer.ggml.eos_token_ids", ends.iter().map(|&id| id as i32).collect::<Vec<i32>>())?;
    w.set("tokenizer.ggml.padding_token_id", config.pad)?;
    if let Some(vocabulary) = vocabulary {
        if let Some(id) = vocabulary.unknown {
            w.set("tokenizer.ggml.unknown_token_id", id)?;
        }
        if let Some(id) = vocabulary.end_of_turn {
            w.set("tokenizer.ggml.eot_token_id", id)?;
        }
    }
    w.set("tokenizer.ggml.add_bos_token", true)?;
    w.set("tokenizer.ggml.add_eos_token", false)?;
    let suppressed = ids(generation, "suppress_tokens");
    if !suppressed.is_empty() {
        let list: Vec<i32> = suppressed.iter().map(|&id| id as i32).collect();
        w.set("tokenizer.ggml.suppress_tokens", list)?;
    }
    Ok(())
}

/// An id, or a list of them.
fn ids(generation: Option<&Value>, field: &str) -> Vec<u32> {
    let id = |v: &Value| v.as_u64().and_then(|id| i32::try_from(id).ok()).map(|id| id as u32);
    match generation.and_then(|g| g.get(field)) {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}
