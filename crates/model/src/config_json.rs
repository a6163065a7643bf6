//! `config.json` to [`Config`].
//!
//! Missing fields take the defaults of the reference classes. Both spellings of per-layer head shapes are
//! read (`global_head_dim` with `num_global_key_value_heads`, or `per_layer_config`), and the text config may
//! stand under `text_config` or at the top.

use lapidary_ops::{Activation, Group};
use serde_json::Value;

use crate::config::{
    Config, Family, LayerConfig, MAX_DIM, MAX_LAYERS, MoeConfig, PerLayerConfig, Rope, VisionBlocks, periodic,
};
use crate::error::{Error, Result};

impl Config {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// `NotSupported` names a model type, activation, rope type or mask that this engine does not run;
    /// `Config` names a field that is missing, of the wrong type, or contradicts another.
    pub fn from_json(root: &Value) -> Result<Config> {
        let model_type = str_of(root, "model_type")?.unwrap_or_default();
        let text = object_of(root, "text_config")?.unwrap_or(root);
        match model_type {
            "gemma4" | "gemma4_text" => gemma4(root, text, model_type, false),
            "gemma4_unified" | "gemma4_unified_text" => gemma4(root, text, model_type, true),
            "gemma3" | "gemma3_text" => gemma3(root, text, model_type),
            "gemma4_assistant" | "gemma4_unified_assistant" => Err(Error::NotSupported {
                what: "model_type gemma4_assistant".into(),
                detail: "this is a drafter for speculative decoding; load the model it belongs to".into(),
            }),
            "" => Err(Error::config("model_type", "missing; gemma4 or gemma3 is expected")),
            other => Err(Error::NotSupported {
                what: format!("model_type {other}"),
                detail: "this engine runs gemma4, gemma4_unified and gemma3".into(),
            }),
        }
    }
}

fn gemma4(root: &Value, t: &Value, model_type: &str, unified: bool) -> Result<Config> {
    let mut notes = Vec::new();
    let hidden = usize_or(t, "hidden_size", 2304)?;
    let count = layer_count(t, 30)?;
    let heads = usize_or(t, "num_attention_heads", 8)?;
    let kv_heads = usize_or(t, "num_key_value_heads", 4)?;
    let head_dim = usize_or(t, "head_dim", 256)?;
    let global_dim = usize_or(t, "global_head_dim", 512)?;
    let global_kv = opt_usize(t, "num_global_key_value_heads")?;
    let values_are_keys = bool_or(t, "attention_k_eq_v", false)?;
    let intermediate = usize_or(t, "intermediate_size", 9216)?;
    let shared = usize_or(t, "num_kv_shared_layers", 0)?;
    let double_wide = bool_or(t, "use_double_wide_mlp", false)?;
    let mut groups = layer_types(t, count)?.unwrap_or_else(|| periodic(count, 6));
    if groups.last() == Some(&Group::Sliding) {
        notes.push("the last layer is run with full attention, as in every Gemma 4 model".into());
        *groups.last_mut().expect("there is a last layer") = Group::Full;
    }
    if shared >= count.max(1) {
        return Err(Error::config("num_kv_shared_layers", format!("{shared} of {count} layers")));
    }
    let first = count - shared;
    // Configs written by newer libraries list the layers that differ instead of the global fields.
    let per_layer_shapes = object_of(t, "per_layer_config")?;
    if let Some(shapes) = per_layer_shapes {
        known_keys(shapes, "per_layer_config", &|key| key.parse::<usize>().is_ok_and(|l| l < count))?;
    }
    let layers = groups.iter().enumerate().map(|(i, &group)| {
        let full = group == Group::Full;
        let mut layer = LayerConfig {
            group,
            kv_heads: match global_kv {
                Some(n) if full && values_are_keys => n,
                _ => kv_heads,
            },
            head_dim: if full && per_layer_shapes.is_none() { global_dim } else { head_dim },
            intermediate: if double_wide && i >= first { 2 * intermediate } else { intermediate },
            donor: Config::donor(&groups, first, i)?,
            values_are_keys: values_are_keys && full,
        };
        if let Some(shape) = per_layer_shapes.and_then(|s| s.get(i.to_string())) {
            let field = format!("per_layer_config.{i}");
            known_keys(shape, &field, &|key| ["head_dim", "num_key_value_heads"].contains(&key))?;
            layer.head_dim = usize_or(shape, "head_dim", layer.head_dim)?;
            layer.kv_heads = usize_or(shape, "num_key_value_heads", layer.kv_heads)?;
        }
        Ok(layer)
    });
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let moe = if bool_or(t, "enable_moe_block", false)? {
        let width = match opt_usize(t, "moe_intermediate_size")? {
            Some(width) => Some(width),
            None => opt_usize(t, "expert_intermediate_size")?,
        };
        let need = |field: &'static str, v: Option<usize>| {
            v.ok_or_else(|| Error::config(field, "missing, but enable_moe_block is true"))
        };
        Some(MoeConfig {
            experts: need("num_experts", opt_usize(t, "num_experts")?)?,
            top_k: need("top_k_experts", opt_usize(t, "top_k_experts")?)?,
            width: need("moe_intermediate_size", width)?,
        })
    } else {
        None
    };
    // A missing field means 256 in the class, null and 0 mean none; the unified class has no such field.
    let per_layer_width = match t.get("hidden_size_per_layer_input") {
        None if unified => 0,
        None => 256,
        Some(Value::Null) => 0,
        Some(_) => usize_or(t, "hidden_size_per_layer_input", 0)?,
    };
    let vocab = usize_or(t, "vocab_size", 262_144)?;
    let per_layer = match per_layer_width {
        0 => None,
        width => Some(PerLayerConfig { width, vocab: usize_or(t, "vocab_size_per_layer_input", 262_144)? }),
    };
    let vision = match t.get("use_bidirectional_attention") {
        None if unified => VisionBlocks::Sliding,
        None | Some(Value::Null) | Some(Value::Bool(false)) => VisionBlocks::Causal,
        Some(Value::String(s)) if s == "vision" => VisionBlocks::Sliding,
        Some(other) => {
            return Err(Error::NotSupported {
                what: format!("use_bidirectional_attention {other}"),
                detail: "null and \"vision\" are".into(),
            });
        }
    };
    no_bias(t)?;
    let rope = rope_parameters(t)?;
    Config {
        family: Family::Gemma4,
        model_type: model_type.into(),
        vocab,
        hidden,
        heads,
        layers,
        window: usize_or(t, "sliding_window", if unified { 1024 } else { 512 })?,
        max_positions: usize_or(t, "max_position_embeddings", if unified { 262_144 } else { 131_072 })?,
        eps: f64_or(t, "rms_norm_eps", 1e-6)? as f32,
        final_softcap: opt_f64(t, "final_logit_softcapping")?.map(|c| c as f32),
        attn_softcap: opt_f64(t, "attn_logit_softcapping")?.map(|c| c as f32),
        score_scale: 1.0,
        activation: activation(t)?,
        rope: [
            rope_of(rope, "sliding_attention", Rope { theta: 1e4, rotated: 1.0, factor: 1.0 })?,
            rope_of(rope, "full_attention", Rope { theta: 1e6, rotated: 0.25, factor: 1.0 })?,
        ],
        vision,
        moe,
        per_layer,
        norm_plus_one: false,
        value_norm: true,
        layer_scalar: true,
        tied: tied(root, t)?,
        pad: id_or(t, "pad_token_id", 0)?,
        bos: id_or(t, "bos_token_id", 2)?,
        eos: eos(root, t)?,
        placeholders: placeholders(root)?,
        notes,
    }
    .validate()
}

fn gemma3(root: &Value, t: &Value, model_type: &str) -> Result<Config> {
    let composite = model_type == "gemma3";
    let count = layer_count(t, 26)?;
    let heads = usize_or(t, "num_attention_heads", 8)?;
    let kv_heads = usize_or(t, "num_key_value_heads", 4)?;
    let head_dim = usize_or(t, "head_dim", 256)?;
    let intermediate = usize_or(t, "intermediate_size", 9216)?;
    let period = match opt_usize(t, "sliding_window_pattern")? {
        Some(n) => n,
        None => usize_or(t, "_sliding_window_pattern", 6)?,
    };
    if period == 0 {
        return Err(Error::config("sliding_window_pattern", "must not be 0"));
    }
    let groups = layer_types(t, count)?.unwrap_or_else(|| periodic(count, period));
    let layers = groups
        .iter()
        .map(|&group| LayerConfig {
            group,
            kv_heads,
            head_dim,
            intermediate,
            donor: None,
            values_are_keys: false,
        })
        .collect();
    let scalar = f64_or(t, "query_pre_attn_scalar", 256.0)?;
    if !scalar.is_finite() || scalar <= 0.0 {
        return Err(Error::config("query_pre_attn_scalar", format!("{scalar} is not a positive number")));
    }
    no_bias(t)?;
    let rope = match rope_parameters(t)? {
        Some(rope) => [
            rope_of(Some(rope), "sliding_attention", Rope { theta: 1e4, rotated: 1.0, factor: 1.0 })?,
            rope_of(Some(rope), "full_attention", Rope { theta: 1e6, rotated: 1.0, factor: 1.0 })?,
        ],
        None => {
            let factor = match object_of(t, "rope_scaling")? {
                None => 1.0,
                Some(scaling) => {
                    let kind = match str_of(scaling, "rope_type")? {
                        Some(kind) => kind,
                        None => str_of(scaling, "type")?.unwrap_or("linear"),
                    };
                    match kind {
                        "linear" => f64_or(scaling, "factor", 1.0)?,
                        "default" => 1.0,
                        other => return Err(unsupported_rope(other)),
                    }
                }
            };
            [
                Rope { theta: f64_or(t, "rope_local_base_freq", 1e4)?, rotated: 1.0, factor: 1.0 },
                Rope { theta: f64_or(t, "rope_theta", 1e6)?, rotated: 1.0, factor },
            ]
        }
    };
    match t.get("use_bidirectional_attention") {
        None | Some(Value::Null) | Some(Value::Bool(false)) => {}
        Some(other) => {
            return Err(Error::NotSupported {
                what: format!("use_bidirectional_attention {other}"),
                detail: "false is".into(),
            });
        }
    }
    Config {
        family: Family::Gemma3,
        model_type: model_type.into(),
        vocab: usize_or(t, "vocab_size", 262_208)?,
        hidden: usize_or(t, "hidden_size", 2304)?,
        heads,
        layers,
        window: usize_or(t, "sliding_window", 4096)?,
        max_positions: usize_or(t, "max_position_embeddings", 131_072)?,
        eps: f64_or(t, "rms_norm_eps", 1e-6)? as f32,
        final_softcap: opt_f64(t, "final_logit_softcapping")?.map(|c| c as f32),
        attn_softcap: opt_f64(t, "attn_logit_softcapping")?.map(|c| c as f32),
        score_scale: (1.0 / scalar.sqrt()) as f32,
        activation: activation(t)?,
        rope,
        vision: if composite { VisionBlocks::Both } else { VisionBlocks::Causal },
        moe: None,
        per_layer: None,
        norm_plus_one: true,
        value_norm: false,
        layer_scalar: false,
        tied: tied(root, t)?,
        pad: id_or(t, "pad_token_id", 0)?,
        bos: id_or(t, "bos_token_id", 2)?,
        eos: eos(root, t)?,
        placeholders: placeholders(root)?,
        notes: Vec::new(),
    }
    .validate()
}

fn activation(t: &Value) -> Result<Activation> {
    let name = match str_of(t, "hidden_activation")? {
        Some(name) => name,
        None => str_of(t, "hidden_act")?.unwrap_or("gelu_pytorch_tanh"),
    };
    match name {
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "silu" | "swish" => Ok(Activation::Silu),
        other => Err(Error::NotSupported {
            what: format!("hidden_activation {other}"),
            detail: "gelu_pytorch_tanh and silu are".into(),
        }),
    }
}

fn rope_of(parameters: Option<&Value>, kind: &str, default: Rope) -> Result<Rope> {
    let Some(p) = parameters.map_or(Ok(None), |p| object_of(p, kind))? else {
        return Ok(default);
    };
    let theta = f64_or(p, "rope_theta", default.theta)?;
    match str_of(p, "rope_type")?.unwrap_or("default") {
        "default" => Ok(Rope { theta, rotated: 1.0, factor: 1.0 }),
        "linear" => Ok(Rope { theta, rotated: 1.0, factor: f64_or(p, "factor", 1.0)? }),
        "proportional" => Ok(Rope {
            theta,
            rotated: f64_or(p, "partial_rotary_factor", 1.0)?,
            factor: f64_or(p, "factor", 1.0)?,
        }),
        other => Err(unsupported_rope(other)),
    }
}

/// Rotation by layer kind. A flat object, as other families write it, would be read as nothing at all.
fn rope_parameters(t: &Value) -> Result<Option<&Value>> {
    let rope = object_of(t, "rope_parameters")?;
    if let Some(rope) = rope {
        let kinds = ["sliding_attention", "full_attention"];
        known_keys(rope, "rope_parameters", &|key| kinds.contains(&key))?;
    }
    Ok(rope)
}

/// The pass has no bias, so a model with one would speak without it.
fn no_bias(t: &Value) -> Result<()> {
    match bool_or(t, "attention_bias", false)? {
        false => Ok(()),
        true => Err(Error::NotSupported { what: "attention_bias true".into(), detail: "false is".into() }),
    }
}

fn unsupported_rope(kind: &str) -> Error {
    Error::NotSupported {
        what: format!("rope_type {kind}"),
        detail: "default, linear and proportional are".into(),
    }
}

fn layer_types(t: &Value, count: usize) -> Result<Option<Vec<Group>>> {
    let list = match t.get("layer_types") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(Error::config("layer_types", "a list is expected")),
    };
    if list.len() != count {
        return Err(Error::config("layer_types", format!("{} entries for {count} layers", list.len())));
    }
    let kind = |v: &Value| match v.as_str() {
        Some("sliding_attention") => Ok(Group::Sliding),
        Some("full_attention") => Ok(Group::Full),
        _ => {
            Err(Error::config("layer_types", format!("{v} is neither sliding_attention nor full_attention")))
        }
    };
    list.iter().map(kind).collect::<Result<Vec<_>>>().map(Some)
}

fn layer_count(t: &Value, default: usize) -> Result<usize> {
    match usize_or(t, "num_hidden_layers", default)? {
        n if n <= MAX_LAYERS => Ok(n),
        n => Err(Error::config("num_hidden_layers", format!("{n} is beyond {MAX_LAYERS}"))),
    }
}

fn tied(root: &Value, t: &Value) -> Result<bool> {
    bool_or(t, "tie_word_embeddings", bool_or(root, "tie_word_embeddings", true)?)
}

fn eos(root: &Value, t: &Value) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for source in [root, t] {
        match source.get("eos_token_id") {
            None | Some(Value::Null) => {}
            Some(Value::Array(list)) => {
                for v in list {
                    ids.push(id_of(v, "eos_token_id")?);
                }
            }
            Some(v) => ids.push(id_of(v, "eos_token_id")?),
        }
    }
    if ids.is_empty() {
        ids.push(1);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn placeholders(root: &Value) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for key in ["image_token_id", "image_token_index", "audio_token_id", "video_token_id"] {
        if let Some(v) = root.get(key).filter(|v| !v.is_null()) {
            ids.push(id_of(v, key)?);
        }
    }
    Ok(ids)
}

fn id_of(v: &Value, field: &str) -> Result<u32> {
    v.as_u64()
        .and_then(|n| u32::try_from(n).ok())
        .ok_or_else(|| Error::config(field, format!("{v} is not a token id")))
}

fn id_or(t: &Value, field: &str, default: u32) -> Result<u32> {
    match t.get(field) {
        None | Some(Value::Null) => Ok(default),
        Some(v) => id_of(v, field),
    }
}

fn opt_usize(t: &Value, field: &str) -> Result<Option<usize>> {
    match t.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(v) => match v.as_u64() {
            Some(n) if n <= MAX_DIM as u64 => Ok(Some(n as usize)),
            _ => Err(Error::config(field, format!("{v} is not a count up to {MAX_DIM}"))),
        },
    }
}

fn usize_or(t: &Value, field: &str, default: usize) -> Result<usize> {
    Ok(opt_usize(t, field)?.unwrap_or(default))
}

fn opt_f64(t: &Value, field: &str) -> Result<Option<f64>> {
    match t.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(v) => v.as_f64().map(Some).ok_or_else(|| Error::config(field, format!("{v} is not a number"))),
    }
}

fn f64_or(t: &Value, field: &str, default: f64) -> Result<f64> {
    Ok(opt_f64(t, field)?.unwrap_or(default))
}

fn bool_or(t: &Value, field: &str, default: bool) -> Result<bool> {
    match t.get(field) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(b)) => Ok(*b),
        Some(v) => Err(Error::config(field, format!("{v} is not true or false"))),
    }
}

/// A field that holds an object; `None` when it is absent or null.
fn object_of<'a>(t: &'a Value, field: &str) -> Result<Option<&'a Value>> {
    match t.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(v) if v.is_object() => Ok(Some(v)),
        Some(_) => Err(Error::config(field, "an object is expected")),
    }
}

/// Errors on the first key that would be read over in silence.
fn known_keys(object: &Value, field: &str, known: &dyn Fn(&str) -> bool) -> Result<()> {
    let Some(map) = object.as_object() else {
        return Err(Error::config(field, "an object is expected"));
    };
    match map.keys().find(|key| !known(key)) {
        None => Ok(()),
        Some(key) => Err(Error::config(format!("{field}.{key}"), "this entry is not known")),
    }
}

fn str_of<'a>(t: &'a Value, field: &str) -> Result<Option<&'a str>> {
    match t.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(s)),
        Some(v) => Err(Error::config(field, format!("{v} is not a string"))),
    }
}
