//! The keys of a synthetic file.

use std::path::Path;

use lapidary_weights::gguf::{File, GgufError, StringArray, Value, Writer};

use super::mix::Mix;
use super::shape::Shape;
use super::weights;
use crate::error::{Error, Result};

/// `general.*` and `gemma4.*`.
pub(super) fn model(w: &mut Writer, shape: &Shape, name: &str, mix: Mix) -> Result<(), GgufError> {
    w.set("general.architecture", "gemma4")?;
    w.set("general.name", name)?;
    w.set("general.file_type", mix.file_type())?;
    w.set("general.quantization_version", 2u32)?;
    let layers = 0..shape.layers;
    let count = |n: usize| Value::U32(n as u32);
    let each =
        |of: &dyn Fn(usize) -> usize| Value::from(layers.clone().map(|l| of(l) as i32).collect::<Vec<_>>());
    let [sliding_dim, full_dim] = shape.head_dim;
    let mut keys = vec![
        ("block_count", count(shape.layers)),
        ("context_length", count(shape.context)),
        ("embedding_length", count(shape.hidden)),
        (
            "feed_forward_length",
            match shape.double_wide {
                true => each(&|l| shape.ff_of(l)),
                false => count(shape.ff),
            },
        ),
        ("attention.head_count", count(shape.heads)),
        (
            "attention.head_count_kv",
            match shape.kv_heads {
                [sliding, full] if sliding == full => count(full),
                _ => each(&|l| shape.kv_heads_of(l)),
            },
        ),
        ("attention.layer_norm_rms_epsilon", 1e-6f32.into()),
        ("attention.key_length", count(full_dim)),
        ("attention.value_length", count(full_dim)),
        ("attention.key_length_swa", count(sliding_dim)),
        ("attention.value_length_swa", count(sliding_dim)),
        ("attention.sliding_window", count(shape.window)),
        (
            "attention.sliding_window_pattern",
            layers.clone().map(|l| shape.is_sliding(l)).collect::<Vec<_>>().into(),
        ),
        ("attention.shared_kv_layers", count(shape.kv_shared)),
        ("embedding_length_per_layer_input", count(shape.per_layer)),
        ("rope.freq_base", 1e6f32.into()),
        ("rope.freq_base_swa", 1e4f32.into()),
        ("rope.dimension_count", count(full_dim)),
        ("rope.dimension_count_swa", count(sliding_dim)),
        ("final_logit_softcapping", 30f32.into()),
    ];
    if let Some(moe) = shape.moe {
        keys.push(("expert_count", count(moe.experts)));
        keys.push(("expert_used_count", count(moe.top_k)));
        keys.push(("expert_feed_forward_length", count(moe.ff)));
    }
    for (key, value) in keys {
        w.set(&format!("gemma4.{key}"), value)?;
    }
    Ok(())
}

/// Kinds of tokens as `tokenizer.ggml.token_type` numbers them.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

/// A vocabulary of `size` entries that any text can be written in: four special tokens, the 256 bytes, made-up words.
pub(super) fn stand_in_vocabulary(w: &mut Writer, size: usize) -> Result<(), GgufError> {
    let (mut tokens, mut scores, mut types) = (StringArray::default(), Vec::new(), Vec::new());
    let special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)];
    for (token, kind) in special {
        tokens.push(token);
        scores.push(0.0);
        types.push(kind);
    }
    for byte in 0..=255u8 {
        tokens.push(&format!("<0x{byte:02X}>"));
        scores.push(-1e4);
        types.push(BYTE);
    }
    for word in 0..size.saturating_sub(types.len()) {
        tokens.push(&format!("w{word}"));
        scores.push(-(word as f32));
        types.push(NORMAL);
    }
    w.set("tokenizer.ggml.model", "llama")?;
    w.set("tokenizer.ggml.tokens", tokens)?;
    w.set("tokenizer.ggml.scores", scores)?;
    w.set("tokenizer.ggml.token_type", types)?;
    w.set("tokenizer.ggml.bos_token_id", 2u32)?;
    w.set("tokenizer.ggml.eos_token_id", 1u32)?;
    w.set("tokenizer.ggml.unknown_token_id", 3u32)?;
    w.set("tokenizer.ggml.padding_token_id", 0u32)?;
    w.set("tokenizer.ggml.add_bos_token", true)?;
    w.set("tokenizer.ggml.add_space_prefix", false)
}

/// The vocabulary of another file, which must have `size` entries.
pub(super) fn copied_vocabulary(w: &mut Writer, path: &Path, size: usize) -> Result<()> {
    let source = File::open(path).map_err(weights)?;
    let tokens: &StringArray = source.metadata().require("tokenizer.ggml.tokens").map_err(weights)?;
    if tokens.len() != size {
        let found = tokens.len();
        let problem =
            format!("{}: its vocabulary has {found} entries, the model's has {size}", path.display());
        return Err(Error::Synth { problem });
    }
    for (key, value) in source.metadata().iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
        w.set(key, value.clone()).map_err(weights)?;
    }
    Ok(())
}
