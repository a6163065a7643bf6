//! GGUF metadata to [`Config`].
//!
//! GGUF states less than `config.json`: what it leaves out is taken from what every published model of the
//! family has, and from which tensors the file holds.

use lapidary_ops::{Activation, Group};
use lapidary_weights::gguf::{GgufError, Metadata, StringArray, Value};
use lapidary_weights::{Checkpoint, ConfigSource, LayerRole, Role};

use crate::config::{
    Config, Family, LayerConfig, MAX_LAYERS, MoeConfig, PerLayerConfig, Rope, VisionBlocks, periodic,
};
use crate::error::{Error, Result};

impl Config {
    /// Reads the config of a checkpoint, wherever it keeps it.
    ///
    /// # Errors
    /// As [`Config::from_json`].
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Config> {
        match checkpoint.config() {
            ConfigSource::Json { config, .. } => Config::from_json(config),
            ConfigSource::Gguf(file) => from_gguf(file.metadata(), checkpoint),
            _ => Err(Error::NotSupported {
                what: "this kind of checkpoint".into(),
                detail: "config.json and GGUF metadata are".into(),
            }),
        }
    }
}

/// Metadata under the architecture's own prefix.
struct Keys<'a> {
    meta: &'a Metadata,
    arch: &'a str,
}

fn from_gguf(meta: &Metadata, checkpoint: &Checkpoint) -> Result<Config> {
    let arch: &str = meta.require("general.architecture").map_err(key)?;
    let keys = Keys { meta, arch };
    match arch {
        "gemma4" => gemma4(&keys, checkpoint),
        "gemma3" => gemma3(&keys, checkpoint),
        other if other.contains("assistant") => Err(Error::NotSupported {
            what: format!("architecture {other}"),
            detail: "this is a drafter for speculative decoding; load the model it belongs to".into(),
        }),
        other => Err(Error::NotSupported {
            what: format!("architecture {other}"),
            detail: "this engine runs gemma4 and gemma3".into(),
        }),
    }
}

fn key(error: GgufError) -> Error {
    Error::config("GGUF metadata", error.to_string())
}

impl Keys<'_> {
    fn name(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn count(&self, name: &str) -> Result<usize> {
        Ok(self.meta.require::<u32>(&self.name(name)).map_err(key)? as usize)
    }

    fn count_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.meta.get::<u32>(&self.name(name)).map_err(key)?.map_or(default, |n| n as usize))
    }

    fn number(&self, name: &str) -> Result<Option<f32>> {
        self.meta.get::<f32>(&self.name(name)).map_err(key)
    }

    fn each(&self, name: &str, layers: usize) -> Result<Vec<usize>> {
        let values = self.meta.get_each::<u32>(&self.name(name), layers).map_err(key)?;
        let values = values.ok_or_else(|| Error::config(self.name(name), "missing"))?;
        Ok(values.into_iter().map(|v| v as usize).collect())
    }

    fn layers(&self) -> Result<usize> {
        match self.count("block_count")? {
            n if (1..=MAX_LAYERS).contains(&n) => Ok(n),
            n => Err(Error::config(self.name("block_count"), format!("{n} layers"))),
        }
    }

    /// Layer kinds: a bool for each layer (true is sliding) or a period; every `default`-th is full without.
    fn groups(&self, layers: usize, default: usize) -> Result<Vec<Group>> {
        let name = self.name("attention.sliding_window_pattern");
        let period = match self.meta.value(&name) {
            None => default,
            Some(Value::Array(_)) => {
                let flags: Vec<bool> = self.meta.require(&name).map_err(key)?;
                if flags.len() != layers {
                    return Err(Error::config(name, format!("{} entries for {layers} layers", flags.len())));
                }
                let kind = |sliding| if sliding { Group::Sliding } else { Group::Full };
                return Ok(flags.into_iter().map(kind).collect());
            }
            Some(_) => self.meta.require::<u32>(&name).map_err(key)? as usize,
        };
        match period {
            0 => Err(Error::config(name, "a period of 0")),
            period => Ok(periodic(layers, period)),
        }
    }

    fn eps(&self) -> Result<f32> {
        Ok(self.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6))
    }

    fn id(&self, name: &str, default: u32) -> Result<u32> {
        Ok(self.meta.get::<u32>(name).map_err(key)?.unwrap_or(default))
    }

    fn eos(&self) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for name in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            ids.extend(self.meta.get::<u32>(name).map_err(key)?);
        }
        ids.extend(
            self.meta.get::<Vec<u32>>("tokenizer.ggml.eos_token_ids").map_err(key)?.unwrap_or_default(),
        );
        if ids.is_empty() {
            ids.push(1);
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    fn placeholders(&self) -> Result<Vec<u32>> {
        let Some(tokens) = self.meta.get::<&StringArray>("tokenizer.ggml.tokens").map_err(key)? else {
            return Ok(Vec::new());
        };
        let named = |t: &str| matches!(t, "<|image|>" | "<|audio|>" | "<|video|>");
        Ok(tokens.iter().enumerate().filter(|(_, t)| named(t)).map(|(i, _)| i as u32).collect())
    }
}

/// Rows of the embedding: the file's own shape counts, whatever a key may say.
fn rows(checkpoint: &Checkpoint, role: Role) -> Result<usize> {
    let problem = match checkpoint.stored(role).map(|s| s.shape) {
        Some(&[rows, _]) => return Ok(rows),
        Some(shape) => format!("has shape {shape:?}, expected rows and columns"),
        None => "missing".to_owned(),
    };
    Err(Error::Tensor { tensor: role.to_string(), problem })
}

fn gemma4(k: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Config> {
    let mut notes = Vec::new();
    let count = k.layers()?;
    let mut groups = k.groups(count, 6)?;
    if groups.last() == Some(&Group::Sliding) {
        notes.push("the last layer is run with full attention, as in every Gemma 4 model".to_string());
        *groups.last_mut().expect("there is a last layer") = Group::Full;
    }
    let shared = k.count_or("attention.shared_kv_layers", 0)?;
    if shared >= count {
        return Err(Error::config(
            k.name("attention.shared_kv_layers"),
            format!("{shared} of {count} layers"),
        ));
    }
    let first = count - shared;
    let kv_heads = k.each("attention.head_count_kv", count)?;
    let widths = k.each("feed_forward_length", count)?;
    let full_dim = k.count("attention.key_length")?;
    let sliding_dim = k.count_or("attention.key_length_swa", full_dim)?;
    for (name, dim) in [("attention.value_length", full_dim), ("attention.value_length_swa", sliding_dim)] {
        if k.count_or(name, dim)? != dim {
            return Err(Error::config(k.name(name), "differs from the key length"));
        }
    }
    let layers = groups.iter().enumerate().map(|(i, &group)| {
        let full = group == Group::Full;
        let has_values = checkpoint.stored(Role::Layer(i as u32, LayerRole::VProj)).is_some();
        Ok(LayerConfig {
            group,
            kv_heads: kv_heads[i],
            head_dim: if full { full_dim } else { sliding_dim },
            intermediate: widths[i],
            donor: Config::donor(&groups, first, i)?,
            values_are_keys: full && i < first && !has_values,
        })
    });
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let experts = k.count_or("expert_count", 0)?;
    let moe = match experts {
        0 => None,
        experts => Some(MoeConfig {
            experts,
            top_k: k.count("expert_used_count")?,
            width: k.count("expert_feed_forward_length")?,
        }),
    };
    let per_layer = match k.count_or("embedding_length_per_layer_input", 0)? {
        0 => None,
        width => Some(PerLayerConfig { width, vocab: rows(checkpoint, Role::PerLayerTable)? }),
    };
    let theta = |name, default| Ok::<_, Error>(f64::from(k.number(name)?.unwrap_or(default)));
    Config {
        family: Family::Gemma4,
        model_type: k.arch.into(),
        vocab: rows(checkpoint, Role::Embed)?,
        hidden: k.count("embedding_length")?,
        heads: k.count("attention.head_count")?,
        layers,
        window: k.count("attention.sliding_window")?,
        max_positions: k.count_or("context_length", 131_072)?,
        eps: k.eps()?,
        final_softcap: k.number("final_logit_softcapping")?,
        attn_softcap: k.number("attn_logit_softcapping")?,
        score_scale: 1.0,
        activation: Activation::GeluTanh,
        rope: [
            Rope { theta: theta("rope.freq_base_swa", 1e4)?, rotated: 1.0, factor: 1.0 },
            Rope { theta: theta("rope.freq_base", 1e6)?, rotated: 0.25, factor: 1.0 },
        ],
        // The file does not say; the published models with per-layer embeddings have no vision blocks.
        vision: if per_layer.is_some() { VisionBlocks::Causal } else { VisionBlocks::Sliding },
        moe,
        per_layer,
        norm_plus_one: false,
        value_norm: true,
        layer_scalar: true,
        tied: true,
        pad: k.id("tokenizer.ggml.padding_token_id", 0)?,
        bos: k.id("tokenizer.ggml.bos_token_id", 2)?,
        eos: k.eos()?,
        placeholders: k.placeholders()?,
        notes,
    }
    .validate()
}

fn gemma3(k: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Config> {
    let count = k.layers()?;
    let groups = k.groups(count, 6)?;
    let hidden = k.count("embedding_length")?;
    let heads = k.count("attention.head_count")?;
    let kv_heads = k.each("attention.head_count_kv", count)?;
    let widths = k.each("feed_forward_length", count)?;
    let head_dim = match k.count_or("attention.key_length", 0)? {
        0 if heads > 0 => hidden / heads,
        dim => dim,
    };
    let layers = groups.iter().enumerate().map(|(i, &group)| LayerConfig {
        group,
        kv_heads: kv_heads[i],
        head_dim,
        intermediate: widths[i],
        donor: None,
        values_are_keys: false,
    });
    // No key holds the score scale: it is that of the head, but for the 27B (62 layers), whose
    // query_pre_attn_scalar is hidden / heads.
    let scalar = if count == 62 && heads > 0 { hidden / heads } else { head_dim };
    let factor = match k.meta.get::<&str>(&k.name("rope.scaling.type")).map_err(key)? {
        None | Some("none") => 1.0,
        Some("linear") => f64::from(k.number("rope.scaling.factor")?.unwrap_or(1.0)),
        Some(other) => {
            return Err(Error::NotSupported {
                what: format!("rope scaling {other}"),
                detail: "none and linear are".into(),
            });
        }
    };
    let theta = |name, default| Ok::<_, Error>(f64::from(k.number(name)?.unwrap_or(default)));
    Config {
        family: Family::Gemma3,
        model_type: k.arch.into(),
        vocab: rows(checkpoint, Role::Embed)?,
        hidden,
        heads,
        layers: layers.collect(),
        window: k.count("attention.sliding_window")?,
        max_positions: k.count_or("context_length", 131_072)?,
        eps: k.eps()?,
        final_softcap: k.number("final_logit_softcapping")?,
        attn_softcap: k.number("attn_logit_softcapping")?,
        score_scale: (1.0 / (scalar.max(1) as f64).sqrt()) as f32,
        activation: Activation::GeluTanh,
        rope: [
            Rope { theta: theta("rope.freq_base_swa", 1e4)?, rotated: 1.0, factor: 1.0 },
            Rope { theta: theta("rope.freq_base", 1e6)?, rotated: 1.0, factor },
        ],
        vision: VisionBlocks::Both,
        moe: None,
        per_layer: None,
        norm_plus_one: false,
        value_norm: false,
        layer_scalar: false,
        tied: true,
        pad: k.id("tokenizer.ggml.padding_token_id", 0)?,
        bos: k.id("tokenizer.ggml.bos_token_id", 2)?,
        eos: k.eos()?,
        placeholders: Vec::new(),
        notes: Vec::new(),
    }
    .validate()
}
