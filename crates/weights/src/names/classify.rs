//! Sorts every tensor name of a file: text, something beside it, or unknown.

use super::{ExpertPart, LAYER_TABLE, LayerRole, MODEL_TABLE, Role};

/// What a name says about its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Part of the text model.
    Text(Role, Slot),
    /// Part of another input path; not read.
    Other(Modality),
    /// Part of a drafter for speculative decoding.
    Drafter,
    /// Part of a LoRA adapter.
    Adapter,
    /// Belongs to a quantisation scheme that is not read; what that scheme is called.
    Scheme(&'static str),
    /// Nothing that is known.
    Unknown,
}

/// The input paths that a checkpoint may carry beside text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Modality {
    /// Vision tower.
    Vision,
    /// Audio tower.
    Audio,
    /// What joins a tower to the text model.
    Projector,
}

/// Which of a matrix's tensors a name is. Plain files only have `Weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// `.weight`, or a name that stands without a suffix.
    Weight,
    /// `.weight_packed`: codes narrower than a byte.
    Packed,
    /// `.weight_scale`: scales of rows, blocks or the tensor. GGUF's `.scale`: one number for a matrix.
    Scale,
    /// `.weight_global_scale`: a divisor (compressed-tensors).
    GlobalScale,
    /// `.weight_scale_2`: a multiplier (ModelOpt).
    Scale2,
    /// `.weight_shape`: the shape before packing.
    Shape,
    /// `.input_scale`: a multiplier for activations.
    InputScale,
    /// `.input_global_scale`: a divisor for activations.
    InputGlobalScale,
}

impl Slot {
    /// Every slot, in the order of declaration.
    pub const ALL: [Slot; 8] = [
        Slot::Weight,
        Slot::Packed,
        Slot::Scale,
        Slot::GlobalScale,
        Slot::Scale2,
        Slot::Shape,
        Slot::InputScale,
        Slot::InputGlobalScale,
    ];

    /// The last part of the name.
    pub const fn suffix(self) -> &'static str {
        match self {
            Slot::Weight => "weight",
            Slot::Packed => "weight_packed",
            Slot::Scale => "weight_scale",
            Slot::GlobalScale => "weight_global_scale",
            Slot::Scale2 => "weight_scale_2",
            Slot::Shape => "weight_shape",
            Slot::InputScale => "input_scale",
            Slot::InputGlobalScale => "input_global_scale",
        }
    }
}

/// Companions of schemes that are recognised in order to be refused by name.
const OTHER_SCHEMES: [(&str, &str); 6] = [
    ("weight_zero_point", "asymmetric quantisation (weight_zero_point)"),
    ("weight_g_idx", "reordered groups (weight_g_idx)"),
    ("weight_scale_inv", "fine-grained FP8 with inverse scales (weight_scale_inv)"),
    ("pre_quant_scale", "AWQ input scales (pre_quant_scale)"),
    ("qweight", "GPTQ or AWQ packing (qweight)"),
    ("qzeros", "GPTQ or AWQ packing (qzeros)"),
];

/// What stands before text names; longer ones first, since `model.` begins another.
const TEXT_PREFIXES: [&str; 3] = ["model.language_model.", "language_model.model.", "model."];

/// Where the head stands.
const HEAD_NAMES: [&str; 2] = ["lm_head", "language_model.lm_head"];

/// Modules beside the text model, after an optional `model.`.
const OTHER_PREFIXES: [(&str, Modality); 6] = [
    ("vision_tower.", Modality::Vision),
    ("vision_embedder.", Modality::Vision),
    ("audio_tower.", Modality::Audio),
    ("embed_vision.", Modality::Projector),
    ("embed_audio.", Modality::Projector),
    ("multi_modal_projector.", Modality::Projector),
];

const DRAFTER_PREFIXES: [&str; 3] = ["pre_projection.", "post_projection.", "masked_embedding."];

/// Sorts a name of a safetensors file.
pub fn classify_safetensors(name: &str) -> Class {
    if [".lora_A.", ".lora_B.", ".lora_embedding_", ".lora_magnitude_"].iter().any(|part| name.contains(part))
    {
        return Class::Adapter;
    }
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if let Some((_, modality)) = OTHER_PREFIXES.iter().find(|(p, _)| inner.starts_with(p)) {
        return Class::Other(*modality);
    }
    if DRAFTER_PREFIXES.iter().any(|p| inner.starts_with(p)) {
        return Class::Drafter;
    }
    let (module, suffix) = name.rsplit_once('.').unwrap_or(("", name));
    if let Some((_, scheme)) = OTHER_SCHEMES.iter().find(|(s, _)| *s == suffix) {
        return Class::Scheme(scheme);
    }
    let slot = Slot::ALL.into_iter().find(|s| s.suffix() == suffix);
    if let (Some(slot), true) = (slot, HEAD_NAMES.contains(&module)) {
        return Class::Text(Role::Head, slot);
    }
    let Some(local) = TEXT_PREFIXES.iter().find_map(|p| name.strip_prefix(p)) else {
        return Class::Unknown;
    };
    let found = match slot {
        Some(slot) => {
            local.rsplit_once('.').and_then(|(module, _)| text_role(module, true)).map(|r| (r, slot))
        }
        None => text_role(local, false).map(|r| (r, Slot::Weight)),
    };
    found.map_or(Class::Unknown, |(role, slot)| Class::Text(role, slot))
}

/// The role of a module; `weight` says that a suffix like `.weight` followed it.
fn text_role(module: &str, weight: bool) -> Option<Role> {
    let Some(rest) = module.strip_prefix("layers.") else {
        let spelled = MODEL_TABLE.iter().find(|s| s.weight == weight && s.modules.contains(&module))?;
        return (spelled.role != Role::Head).then_some(spelled.role);
    };
    let (layer, module) = rest.split_once('.')?;
    let layer = number(layer)?;
    if let Some(spelled) = LAYER_TABLE.iter().find(|s| s.weight == weight && s.modules.contains(&module)) {
        return Some(Role::Layer(layer, spelled.role));
    }
    let (index, part) =
        module.strip_prefix("moe.").unwrap_or(module).strip_prefix("experts.")?.split_once('.')?;
    let part = ExpertPart::ALL.into_iter().find(|p| p.name() == part)?;
    let index = number(index)?;
    weight.then_some(Role::Layer(layer, LayerRole::Expert { index, part }))
}

/// Sorts a name of a GGUF file.
pub fn classify_gguf(name: &str) -> Class {
    if name.ends_with(".lora_a") || name.ends_with(".lora_b") {
        return Class::Adapter;
    }
    for (prefix, modality) in
        [("v.", Modality::Vision), ("a.", Modality::Audio), ("mm.", Modality::Projector)]
    {
        if name.starts_with(prefix) {
            return Class::Other(modality);
        }
    }
    if let Some(role) = gguf_role(name) {
        return Class::Text(role, Slot::Weight);
    }
    // What stands beside a matrix bears its name. Roles come first: the router's scale and the experts' own end in
    // `.scale` too.
    for (suffix, slot) in [(".scale", Slot::Scale), (".input_scale", Slot::InputScale)] {
        let matrix = name.strip_suffix(suffix).and_then(|stem| gguf_role(&format!("{stem}.weight")));
        if let Some(role) = matrix {
            return Class::Text(role, slot);
        }
    }
    Class::Unknown
}

fn gguf_role(name: &str) -> Option<Role> {
    let Some(rest) = name.strip_prefix("blk.") else {
        return MODEL_TABLE.iter().find(|s| s.gguf == Some(name)).map(|s| s.role);
    };
    let (layer, local) = rest.split_once('.')?;
    let spelled = LAYER_TABLE.iter().find(|s| s.gguf == Some(local))?;
    Some(Role::Layer(number(layer)?, spelled.role))
}

/// A decimal number as writers print it: no sign, no leading zero, so that each number has one spelling.
fn number(text: &str) -> Option<u32> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text.len() == 1 || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(n: u32, role: LayerRole, slot: Slot) -> Class {
        Class::Text(Role::Layer(n, role), slot)
    }

    #[test]
    fn every_prefix_and_variant_spelling_is_read() {
        use LayerRole::*;
        for prefix in ["model.language_model.", "model.", "language_model.model."] {
            let class = |local: &str| classify_safetensors(&format!("{prefix}{local}"));
            assert_eq!(class("embed_tokens.weight"), Class::Text(Role::Embed, Slot::Weight));
            assert_eq!(class("layers.5.layer_scalar"), layer(5, LayerScalar, Slot::Weight));
            assert_eq!(class("layers.5.moe.gate_up_proj"), layer(5, ExpertsGateUp, Slot::Weight));
            assert_eq!(class("layers.5.moe.per_expert_scale"), layer(5, PerExpertScale, Slot::Weight));
            let down = Expert { index: 127, part: ExpertPart::Down };
            assert_eq!(class("layers.29.experts.127.down_proj.weight"), layer(29, down, Slot::Weight));
            assert_eq!(
                class("layers.29.moe.experts.127.down_proj.weight_scale"),
                layer(29, down, Slot::Scale)
            );
            assert_eq!(class("layers.2.self_attn.k_scale"), layer(2, KScale, Slot::Weight));
            assert_eq!(
                class("layers.2.self_attn.q_proj.input_global_scale"),
                layer(2, QProj, Slot::InputGlobalScale)
            );
        }
        assert_eq!(classify_safetensors("lm_head.weight"), Class::Text(Role::Head, Slot::Weight));
        assert_eq!(
            classify_safetensors("language_model.lm_head.weight_scale"),
            Class::Text(Role::Head, Slot::Scale)
        );
    }

    #[test]
    fn what_is_not_text_is_named() {
        for (name, class) in [
            ("model.vision_tower.encoder.layers.0.self_attn.q_proj.weight", Class::Other(Modality::Vision)),
            ("vision_tower.vision_model.post_layernorm.bias", Class::Other(Modality::Vision)),
            ("model.vision_embedder.patch.weight_scale", Class::Other(Modality::Vision)),
            ("model.audio_tower.layers.0.norm.weight", Class::Other(Modality::Audio)),
            ("model.embed_vision.embedding_projection.weight", Class::Other(Modality::Projector)),
            ("model.embed_audio.embedding_projection.weight", Class::Other(Modality::Projector)),
            ("multi_modal_projector.mm_input_projection_weight", Class::Other(Modality::Projector)),
            ("pre_projection.weight", Class::Drafter),
            ("masked_embedding.token_ordering", Class::Drafter),
            ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", Class::Adapter),
            ("model.layers.0.mlp.up_proj.weight_zero_point", Class::Scheme(OTHER_SCHEMES[0].1)),
        ] {
            assert_eq!(classify_safetensors(name), class, "{name}");
        }
        for (name, class) in [
            ("v.blk.0.attn_q.weight", Class::Other(Modality::Vision)),
            ("a.conv1d.weight", Class::Other(Modality::Audio)),
            ("mm.input_projection.weight", Class::Other(Modality::Projector)),
            ("blk.0.attn_q.weight.lora_a", Class::Adapter),
            ("rope_freqs.weight", Class::Text(Role::RopeFreqs, Slot::Weight)),
            ("blk.3.ffn_down.scale", layer(3, LayerRole::Down, Slot::Scale)),
            ("blk.3.ffn_gate_up_exps.scale", layer(3, LayerRole::ExpertsGateUp, Slot::Scale)),
            ("blk.3.attn_q.input_scale", layer(3, LayerRole::QProj, Slot::InputScale)),
            ("blk.3.ffn_down_exps.scale", layer(3, LayerRole::PerExpertScale, Slot::Weight)),
            ("blk.3.ffn_gate_inp.scale", layer(3, LayerRole::RouterScale, Slot::Weight)),
            ("output.scale", Class::Text(Role::Head, Slot::Scale)),
        ] {
            assert_eq!(classify_gguf(name), class, "{name}");
        }
    }

    #[test]
    fn near_misses_are_unknown() {
        for name in [
            "model.layers.0.self_attn.q_proj",      // no suffix
            "model.layers.0.self_attn.q_proj.bias", // Gemma has no biases
            "model.layers.0.layer_scalar.weight",   // a bare name
            "model.layers.00.layer_scalar",         // a second spelling of layer 0
            "model.layers.+1.layer_scalar",
            "model.layers.4294967296.layer_scalar",
            "model.layers..layer_scalar",
            "model.layers.0.experts.1.gate_up_proj.weight",
            "model.layers.0.experts.1.gate_proj",
            "model.lm_head.weight",
            "model.language_model.lm_head.weight",
            "layers.0.layer_scalar",
            "rope_freqs.weight",
            "model.weight",
            "weight",
            "",
        ] {
            assert_eq!(classify_safetensors(name), Class::Unknown, "{name}");
        }
        for name in [
            "blk.0.attn_q.bias",
            "blk.0.attn_qk.scale",
            "blk.0.attn_q.weight.scale",
            "blk.0.altup.weight",
            "blk.x.attn_q.weight",
            "blk.0",
            "other.weight",
        ] {
            assert_eq!(classify_gguf(name), Class::Unknown, "{name}");
        }
    }
}
