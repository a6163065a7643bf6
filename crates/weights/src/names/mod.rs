//! What a tensor is to Gemma, and the two spellings of it.
//!
//! [`Role`] is the meaning; [`MODEL_TABLE`] and [`LAYER_TABLE`] are the one place that knows how safetensors files
//! and GGUF files spell each role. `classify` sorts every name of a file with them.

mod classify;

pub use classify::{Class, Modality, Slot, classify_gguf, classify_safetensors};

use std::fmt;

/// The meaning of a text tensor. Shapes are `[outputs, inputs]`; H is the hidden size, V the vocabulary, L the number
/// of layers, P the width of per-layer embeddings, E the number of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Token embeddings `[V, H]`; also the head where the file has none.
    Embed,
    /// Final norm `[H]`.
    FinalNorm,
    /// An untied output head `[V, H]`.
    Head,
    /// GGUF only: divisors of the rotation frequencies of full-attention layers `[D / 2]`.
    RopeFreqs,
    /// Per-layer token embeddings `[V, L * P]`.
    PerLayerTable,
    /// Projection of the main embedding into per-layer inputs `[L * P, H]`.
    PerLayerModelProj,
    /// Norm of that projection `[P]`.
    PerLayerProjNorm,
    /// A tensor of one layer.
    Layer(u32, LayerRole),
}

/// The meaning of a tensor inside a layer. D is the head dimension, I the width of the dense MLP, Im that of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerRole {
    /// Norm before attention `[H]`.
    InputNorm,
    /// Norm of the attention output `[H]`.
    PostAttnNorm,
    /// Norm before the (dense) MLP `[H]`.
    PreFfnNorm,
    /// Norm of the MLP output, or of the sum of dense MLP and experts `[H]`.
    PostFfnNorm,
    /// The number that multiplies the whole residual at the end of the layer `[1]`.
    LayerScalar,
    /// `[Nh * D, H]`.
    QProj,
    /// `[Nkv * D, H]`.
    KProj,
    /// `[Nkv * D, H]`; absent where K and V share a projection.
    VProj,
    /// `[H, Nh * D]`.
    OProj,
    /// Norm of each query head `[D]`.
    QNorm,
    /// Norm of each key head `[D]`.
    KNorm,
    /// `[I, H]`.
    Gate,
    /// `[I, H]`.
    Up,
    /// `[H, I]`.
    Down,
    /// `[E, H]`.
    Router,
    /// Scale of the router's normed input `[H]`.
    RouterScale,
    /// Multiplier of each expert's gate `[E]`.
    PerExpertScale,
    /// All experts, gate rows before up rows `[E, 2 * Im, H]`.
    ExpertsGateUp,
    /// All experts `[E, Im, H]`.
    ExpertsGate,
    /// All experts `[E, Im, H]`.
    ExpertsUp,
    /// All experts `[E, H, Im]`.
    ExpertsDown,
    /// One matrix of one expert.
    Expert {
        /// Which expert.
        index: u32,
        /// Which of its matrices.
        part: ExpertPart,
    },
    /// Norm before the experts `[H]`.
    PreFfnNorm2,
    /// Norm of the dense MLP beside experts `[H]`.
    PostFfnNorm1,
    /// Norm of the experts' output `[H]`.
    PostFfnNorm2,
    /// `[P, H]`.
    PerLayerGate,
    /// `[H, P]`.
    PerLayerProj,
    /// `[H]`.
    PostPerLayerNorm,
    /// Hint for an FP8 cache of keys `[1]`.
    KScale,
    /// Hint for an FP8 cache of values `[1]`.
    VScale,
}

/// One of an expert's three matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertPart {
    /// `[Im, H]`.
    Gate,
    /// `[Im, H]`.
    Up,
    /// `[H, Im]`.
    Down,
}

impl ExpertPart {
    /// All three.
    pub const ALL: [ExpertPart; 3] = [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down];

    /// The name of the matrix in safetensors files.
    pub const fn name(self) -> &'static str {
        match self {
            ExpertPart::Gate => "gate_proj",
            ExpertPart::Up => "up_proj",
            ExpertPart::Down => "down_proj",
        }
    }
}

/// How one role is spelled. In safetensors a name is a module followed by `.weight` (or the name of a scale) when
/// `weight` is set, and stands bare otherwise; the first spelling is the one published files use.
struct Spelled<R> {
    role: R,
    modules: &'static [&'static str],
    weight: bool,
    gguf: Option<&'static str>,
}

const fn weight<R>(role: R, modules: &'static [&'static str], gguf: &'static str) -> Spelled<R> {
    Spelled { role, modules, weight: true, gguf: Some(gguf) }
}

const fn bare<R>(role: R, modules: &'static [&'static str], gguf: &'static str) -> Spelled<R> {
    Spelled { role, modules, weight: false, gguf: Some(gguf) }
}

/// The roles of the model as a whole. The head stands outside the text prefix.
const MODEL_TABLE: [Spelled<Role>; 7] = [
    weight(Role::Embed, &["embed_tokens"], "token_embd.weight"),
    weight(Role::FinalNorm, &["norm"], "output_norm.weight"),
    weight(Role::Head, &["lm_head"], "output.weight"),
    Spelled { role: Role::RopeFreqs, modules: &[], weight: true, gguf: Some("rope_freqs.weight") },
    weight(Role::PerLayerTable, &["embed_tokens_per_layer"], "per_layer_token_embd.weight"),
    weight(Role::PerLayerModelProj, &["per_layer_model_projection"], "per_layer_model_proj.weight"),
    weight(Role::PerLayerProjNorm, &["per_layer_projection_norm"], "per_layer_proj_norm.weight"),
];

/// The roles of a layer, but for [`LayerRole::Expert`], whose name carries a number: `experts.E.PART.weight`.
const LAYER_TABLE: [Spelled<LayerRole>; 29] = {
    use LayerRole::*;
    [
        weight(InputNorm, &["input_layernorm"], "attn_norm.weight"),
        weight(PostAttnNorm, &["post_attention_layernorm"], "post_attention_norm.weight"),
        weight(PreFfnNorm, &["pre_feedforward_layernorm"], "ffn_norm.weight"),
        weight(PostFfnNorm, &["post_feedforward_layernorm"], "post_ffw_norm.weight"),
        bare(LayerScalar, &["layer_scalar"], "layer_output_scale.weight"),
        weight(QProj, &["self_attn.q_proj"], "attn_q.weight"),
        weight(KProj, &["self_attn.k_proj"], "attn_k.weight"),
        weight(VProj, &["self_attn.v_proj"], "attn_v.weight"),
        weight(OProj, &["self_attn.o_proj"], "attn_output.weight"),
        weight(QNorm, &["self_attn.q_norm"], "attn_q_norm.weight"),
        weight(KNorm, &["self_attn.k_norm"], "attn_k_norm.weight"),
        weight(Gate, &["mlp.gate_proj"], "ffn_gate.weight"),
        weight(Up, &["mlp.up_proj"], "ffn_up.weight"),
        weight(Down, &["mlp.down_proj"], "ffn_down.weight"),
        weight(Router, &["router.proj", "moe.router.proj"], "ffn_gate_inp.weight"),
        bare(RouterScale, &["router.scale", "moe.router.scale"], "ffn_gate_inp.scale"),
        bare(
            PerExpertScale,
            &["router.per_expert_scale", "moe.per_expert_scale", "moe.router.per_expert_scale"],
            "ffn_down_exps.scale",
        ),
        bare(
            ExpertsGateUp,
            &["experts.gate_up_proj", "moe.gate_up_proj", "moe.experts.gate_up_proj"],
            "ffn_gate_up_exps.weight",
        ),
        bare(
            ExpertsGate,
            &["experts.gate_proj", "moe.gate_proj", "moe.experts.gate_proj"],
            "ffn_gate_exps.weight",
        ),
        bare(ExpertsUp, &["experts.up_proj", "moe.up_proj", "moe.experts.up_proj"], "ffn_up_exps.weight"),
        bare(
            ExpertsDown,
            &["experts.down_proj", "moe.down_proj", "moe.experts.down_proj"],
            "ffn_down_exps.weight",
        ),
        weight(PreFfnNorm2, &["pre_feedforward_layernorm_2"], "pre_ffw_norm_2.weight"),
        weight(PostFfnNorm1, &["post_feedforward_layernorm_1"], "post_ffw_norm_1.weight"),
        weight(PostFfnNorm2, &["post_feedforward_layernorm_2"], "post_ffw_norm_2.weight"),
        weight(PerLayerGate, &["per_layer_input_gate"], "inp_gate.weight"),
        weight(PerLayerProj, &["per_layer_projection"], "proj.weight"),
        weight(PostPerLayerNorm, &["post_per_layer_input_norm"], "post_norm.weight"),
        Spelled {
            role: KScale,
            modules: &["self_attn.k_scale", "self_attn.k_proj.k_scale"],
            weight: false,
            gguf: None,
        },
        Spelled {
            role: VScale,
            modules: &["self_attn.v_scale", "self_attn.v_proj.v_scale"],
            weight: false,
            gguf: None,
        },
    ]
};

/// Which names to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// safetensors with `model.language_model.` before text names, as published.
    Composite,
    /// safetensors with `model.`, as text-only exports have it.
    TextOnly,
    /// GGUF.
    Gguf,
}

/// The name of a role, or `None` where that kind of file has no such tensor: [`Role::RopeFreqs`] in safetensors; single
/// experts and cache scales in GGUF.
pub fn spell(role: Role, spelling: Spelling) -> Option<String> {
    let prefix = match (spelling, role) {
        (Spelling::Gguf, _) | (_, Role::Head) => "",
        (Spelling::Composite, _) => "model.language_model.",
        (Spelling::TextOnly, _) => "model.",
    };
    let gguf = spelling == Spelling::Gguf;
    let local = match role {
        Role::Layer(n, LayerRole::Expert { index, part }) => {
            let name = format!("layers.{n}.experts.{index}.{}.weight", part.name());
            (!gguf).then_some(name)
        }
        Role::Layer(n, r) => {
            let s = LAYER_TABLE.iter().find(|s| s.role == r)?;
            if gguf {
                Some(format!("blk.{n}.{}", s.gguf?))
            } else {
                Some(format!("layers.{n}.{}", s.safetensors()?))
            }
        }
        _ => {
            let s = MODEL_TABLE.iter().find(|s| s.role == role)?;
            if gguf { s.gguf.map(str::to_owned) } else { s.safetensors() }
        }
    };
    local.map(|l| format!("{prefix}{l}"))
}

impl<R> Spelled<R> {
    fn safetensors(&self) -> Option<String> {
        let module = self.modules.first()?;
        Some(if self.weight { format!("{module}.weight") } else { (*module).to_owned() })
    }
}

impl fmt::Display for Role {
    /// The published safetensors name, or GGUF's where only that exists.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = spell(*self, Spelling::Composite).or_else(|| spell(*self, Spelling::Gguf));
        f.write_str(&name.expect("every role has a name in one of the two"))
    }
}

/// Every role that a layer can have, experts by their first index only. For tests and for lists of what exists.
pub fn layer_roles() -> impl Iterator<Item = LayerRole> {
    let single = ExpertPart::ALL.map(|part| LayerRole::Expert { index: 0, part });
    LAYER_TABLE.iter().map(|s| s.role).chain(single)
}

/// Every role outside the layers.
pub fn model_roles() -> impl Iterator<Item = Role> {
    MODEL_TABLE.iter().map(|s| s.role)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Role> {
        let mut roles: Vec<Role> = model_roles().collect();
        for n in [0, 7, 59] {
            roles.extend(layer_roles().map(|r| Role::Layer(n, r)));
            roles.push(Role::Layer(n, LayerRole::Expert { index: 127, part: ExpertPart::Down }));
        }
        roles
    }

    #[test]
    fn every_spelling_leads_back_to_its_role() {
        for role in all() {
            let mut spelled = 0;
            for spelling in [Spelling::Composite, Spelling::TextOnly] {
                if let Some(name) = spell(role, spelling) {
                    spelled += 1;
                    let Class::Text(found, slot) = classify_safetensors(&name) else {
                        panic!("{name} is no text")
                    };
                    assert_eq!(found, role, "{name}");
                    assert!(matches!(slot, Slot::Weight), "{name}");
                }
            }
            if let Some(name) = spell(role, Spelling::Gguf) {
                spelled += 1;
                assert_eq!(classify_gguf(&name), Class::Text(role, Slot::Weight), "{name}");
            }
            assert!(spelled > 0, "{role:?} has no name");
        }
    }

    #[test]
    fn no_name_is_spelled_twice() {
        let mut names: Vec<&str> = LAYER_TABLE.iter().flat_map(|s| s.modules.iter().copied()).collect();
        names.extend(LAYER_TABLE.iter().filter_map(|s| s.gguf));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    /// The roles of the published variants, from the lists of the two file formats: what one kind of file has, the
    /// other has too, but for the exceptions that [`spell`] documents.
    #[test]
    fn both_files_cover_every_role_of_every_variant() {
        use LayerRole::*;
        let common = [
            InputNorm,
            PostAttnNorm,
            PreFfnNorm,
            PostFfnNorm,
            QProj,
            KProj,
            VProj,
            OProj,
            QNorm,
            KNorm,
            Gate,
            Up,
            Down,
        ];
        let gemma4 = [LayerScalar];
        let moe = [
            Router,
            RouterScale,
            PerExpertScale,
            ExpertsGateUp,
            ExpertsGate,
            ExpertsUp,
            ExpertsDown,
            PreFfnNorm2,
            PostFfnNorm1,
            PostFfnNorm2,
        ];
        let per_layer = [PerLayerGate, PerLayerProj, PostPerLayerNorm];
        let quantised = [KScale, VScale];
        for r in common.iter().chain(&gemma4).chain(&moe).chain(&per_layer) {
            for spelling in [Spelling::Composite, Spelling::TextOnly, Spelling::Gguf] {
                assert!(spell(Role::Layer(3, *r), spelling).is_some(), "{r:?} in {spelling:?}");
            }
        }
        let listed = common.len() + gemma4.len() + moe.len() + per_layer.len() + quantised.len();
        assert_eq!(listed, LAYER_TABLE.len(), "a role of the table belongs to no variant above");
        for role in model_roles() {
            assert!(spell(role, Spelling::Gguf).is_some(), "{role:?}");
            assert_eq!(spell(role, Spelling::Composite).is_some(), role != Role::RopeFreqs, "{role:?}");
        }
    }
}
