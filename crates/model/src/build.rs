//! From a checkpoint and a backend to a [`Model`].
//!
//! Asks the checkpoint for roles with the shapes that the config implies, hands them to the backend, and
//! keeps a registry of what each handle stands for. At the end the whole pass is run once through the
//! recorder, so that a width that does not fit is found here.

use std::collections::HashMap;

use lapidary_ops::program::{self, Registry};
use lapidary_ops::{
    Act, ActKind, ActRows, ActSpec, AttnSpec, Backend, BatchShape, ExpertSpec, Gain, GainSpec, Group, KvSpec,
    Mat, MatSpec, Norm, PerLayerSpec, QkvSpec, RouteSpec, TailRows, TensorView, ValueSource,
};
use lapidary_weights::{Checkpoint, ExpertPart, Kind, LayerRole, Role};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::forward::forward;
use crate::kv_plan::kv_refs;
use crate::model::{
    Acts, Attention, Dense, Layer, Limits, Mlp, Model, Moe, MoeActs, PerLayer, PerLayerBranch,
};
use crate::requantise::Requantise;

/// How embeddings are scaled by `sqrt(hidden)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbedScale {
    /// Rounded to bf16 for safetensors whose embedding is bf16 (what the reference does when it serves
    /// them), unrounded otherwise.
    #[default]
    Auto,
    /// Rounded to bf16.
    Bf16,
    /// Unrounded.
    F32,
}

/// What a caller may choose at load.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Rows of the buffers.
    pub limits: Limits,
    /// Embedding scale.
    pub embed_scale: EmbedScale,
    /// Formats that plain matrices get while they are loaded.
    pub requantise: Requantise,
}

/// Bytes of weights handed to the backend so far, and in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes so far.
    pub done: usize,
    /// Bytes of the checkpoint's text model.
    pub total: usize,
}

impl Model {
    /// Builds the model on `backend`.
    ///
    /// # Errors
    /// A tensor that is missing, of the wrong shape, damaged, or without a place in the config
    /// ([`Config::check_tensors`]); a backend out of memory; a pass that does not fit together. The backend must
    /// not be used after an error.
    pub fn build(
        config: Config,
        checkpoint: &Checkpoint,
        backend: &mut dyn Backend,
        options: &BuildOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Model> {
        config.check_tensors(checkpoint)?;
        // The embedding's shape comes first: the widths that buffers are made of are in it.
        let embed_view = checkpoint.expect(Role::Embed, config.vocab, config.hidden)?;
        backend.hold(&checkpoint.maps());
        let total = checkpoint.total_bytes() as usize;
        let mut b = Builder {
            config: &config,
            checkpoint,
            backend,
            limits: options.limits,
            requantise: options.requantise,
            registry: Registry::default(),
            by_width: HashMap::new(),
            progress,
            done: 0,
            total,
        };
        let acts = b.acts()?;
        let embed_format = options.requantise.format_of(Role::Embed, embed_view.format, config.hidden);
        let embed_is_bf16 = embed_format == lapidary_ops::Format::Bf16 && is_safetensors(checkpoint);
        let root = (config.hidden as f32).sqrt();
        let embed_scale = match options.embed_scale {
            EmbedScale::F32 => root,
            EmbedScale::Auto if !embed_is_bf16 => root,
            EmbedScale::Auto | EmbedScale::Bf16 => half::bf16::from_f32(root).to_f32(),
        };
        let untied = checkpoint.tensor(Role::Head)?;
        if untied.is_none() && !config.tied {
            return Err(Error::Tensor {
                tensor: "lm_head.weight".into(),
                problem: "missing, but tie_word_embeddings is false".into(),
            });
        }
        let (embed, head) = match untied {
            None => {
                let embed = b.tied(embed_view)?;
                (embed, embed)
            }
            Some(_) => {
                let embed = b.rows(Role::Embed, embed_view)?;
                let head = checkpoint.expect(Role::Head, config.vocab, config.hidden)?;
                (embed, b.mat(Role::Head, &[head])?)
            }
        };
        let inv_freq = b.inv_freq()?;
        let per_layer = b.per_layer()?;
        let refs = kv_refs(&config);
        let mut layers = Vec::with_capacity(config.layers.len());
        for (index, &kv) in refs.iter().enumerate() {
            layers.push(b.layer(index, kv, &acts)?);
        }
        let final_norm = b.norm(Role::FinalNorm, config.hidden)?;
        let registry = b.registry;
        let model = Model {
            acts,
            embed,
            embed_scale,
            inv_freq,
            layers,
            per_layer,
            final_norm,
            head,
            last_writer: config.first_shared() - 1,
            registry,
            limits: options.limits,
            config,
        };
        model.listing(&model.check_shape())?;
        Ok(model)
    }

    /// The pass for `shape`, one verb a line.
    ///
    /// # Errors
    /// The first width that does not fit.
    pub fn listing(&self, shape: &BatchShape) -> Result<Vec<String>> {
        Ok(program::check(&self.registry, &|s| forward(s, self, shape))?)
    }

    /// A shape that reaches every verb of the pass.
    pub fn check_shape(&self) -> BatchShape {
        BatchShape {
            rows: 1,
            head_rows: 1,
            tail: TailRows::Heads,
            has_soft: true,
            layers: (0, self.layers.len()),
            has_taps: false,
            steered: true,
            drawn: false,
        }
    }
}

fn is_safetensors(checkpoint: &Checkpoint) -> bool {
    checkpoint.kind() == Kind::Safetensors
}

/// How a backend takes the parts of a matrix over.
type Pack<'a> = dyn FnMut(&mut dyn Backend, &[TensorView<'_>]) -> lapidary_ops::Result<Mat> + 'a;

struct Builder<'a> {
    config: &'a Config,
    checkpoint: &'a Checkpoint,
    backend: &'a mut dyn Backend,
    limits: Limits,
    requantise: Requantise,
    registry: Registry,
    /// Buffers that layers share when their widths agree.
    by_width: HashMap<(&'static str, usize), Act>,
    progress: &'a mut dyn FnMut(Progress),
    done: usize,
    total: usize,
}

impl Builder<'_> {
    fn acts(&mut self) -> Result<Acts> {
        let hidden = self.config.hidden;
        let rope_width = |c: &Config, g: Group| c.layers.iter().find(|l| l.group == g).map(|l| l.head_dim);
        let sliding = rope_width(self.config, Group::Sliding);
        let full = rope_width(self.config, Group::Full);
        // A model with one kind of layer only still gets both tables; the idle one is two values wide.
        let rope = [sliding.unwrap_or(2), full.unwrap_or(2)];
        Ok(Acts {
            x: self.act("x", hidden, ActKind::F32, ActRows::Batch)?,
            input: self.act("input", hidden, ActKind::Input, ActRows::Batch)?,
            y: self.act("y", hidden, ActKind::F32, ActRows::Batch)?,
            rope: [
                self.act("rope_sliding", rope[0], ActKind::F32, ActRows::Batch)?,
                self.act("rope_full", rope[1], ActKind::F32, ActRows::Batch)?,
            ],
            final_norm: self.act("final_norm", hidden, ActKind::F32, ActRows::Heads)?,
            head_input: self.act("head_input", hidden, ActKind::Input, ActRows::Heads)?,
            logits: self.act("logits", self.config.vocab, ActKind::F32, ActRows::Heads)?,
        })
    }

    fn act(&mut self, name: &'static str, width: usize, kind: ActKind, rows: ActRows) -> Result<Act> {
        let max_rows = match rows {
            ActRows::Batch => self.limits.rows,
            ActRows::Heads => self.limits.head_rows,
        };
        let spec = ActSpec { name, width, kind, rows, max_rows };
        let act = self.backend.activation(spec.clone())?;
        self.registry.acts.push(spec);
        Ok(act)
    }

    fn shared_act(&mut self, name: &'static str, width: usize, kind: ActKind) -> Result<Act> {
        if let Some(&act) = self.by_width.get(&(name, width)) {
            return Ok(act);
        }
        let act = self.act(name, width, kind, ActRows::Batch)?;
        self.by_width.insert((name, width), act);
        Ok(act)
    }

    /// Parts of a matrix whose roles are treated alike; `role` is one of them.
    fn mat(&mut self, role: Role, parts: &[TensorView<'_>]) -> Result<Mat> {
        let rows = parts.iter().map(|p| p.rows).sum();
        self.grouped_mat(role, parts, rows)
    }

    fn grouped_mat(&mut self, role: Role, parts: &[TensorView<'_>], group_rows: usize) -> Result<Mat> {
        self.take(role, parts, &mut |backend, parts| backend.pack(parts, group_rows))
    }

    fn tied(&mut self, part: TensorView<'_>) -> Result<Mat> {
        self.take(Role::Embed, &[part], &mut |backend, parts| backend.pack_tied(&parts[0]))
    }

    fn rows(&mut self, role: Role, part: TensorView<'_>) -> Result<Mat> {
        self.take(role, &[part], &mut |backend, parts| backend.pack_rows(&parts[0]))
    }

    /// Hands parts to the backend, in the format that `role` asks for.
    fn take(&mut self, role: Role, parts: &[TensorView<'_>], pack: &mut Pack<'_>) -> Result<Mat> {
        let mapped = self.backend.memory().mapped;
        let encoded = self.requantise.of(role).map(|to| to.encode(parts)).transpose()?;
        let views = encoded.iter().flatten().zip(parts).map(|(e, part)| e.view(part.name.as_str()));
        let views: Vec<TensorView<'_>> = views.collect();
        let given = if encoded.is_some() { &views[..] } else { parts };
        let mat = pack(self.backend, given)?;
        // What was copied needs no second place in memory; what the backend reads in place, or has yet to copy, does.
        if self.backend.memory().mapped == mapped && !self.backend.reads_later(mat) {
            parts.iter().for_each(|part| self.checkpoint.release(part));
        }
        self.packed(given);
        self.done += parts.iter().map(|part| part.bytes.len()).sum::<usize>();
        (self.progress)(Progress { done: self.done.min(self.total), total: self.total });
        Ok(mat)
    }

    fn packed(&mut self, parts: &[TensorView<'_>]) {
        let mut formats = Vec::new();
        for part in parts {
            if !formats.contains(&part.format) {
                formats.push(part.format);
            }
        }
        self.registry.mats.push(MatSpec {
            name: parts[0].name.clone(),
            rows: parts.iter().map(|p| p.rows).sum(),
            cols: parts[0].cols,
            formats,
        });
    }

    fn gain(&mut self, name: String, values: &[f32]) -> Result<Gain> {
        let gain = self.backend.vector(&name, values)?;
        self.registry.gains.push(GainSpec { name, len: values.len() });
        Ok(gain)
    }

    /// A norm's gain as it multiplies.
    fn norm(&mut self, role: Role, len: usize) -> Result<Norm> {
        let mut values = self.checkpoint.expect_vector(role, len)?;
        // GGUF files carry the sum already.
        if self.config.norm_plus_one && is_safetensors(self.checkpoint) {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        let gain = self.gain(format!("{role}"), &values)?;
        Ok(Norm { gain, eps: self.config.eps })
    }

    fn inv_freq(&mut self) -> Result<[Gain; 2]> {
        let mut gains = [Gain(0); 2];
        for group in Group::ALL {
            let layer = self.config.layers.iter().find(|l| l.group == group);
            let head_dim = layer.map_or(2, |l| l.head_dim);
            let mut values = self.config.rope[group.index()].inv_freq(head_dim);
            // Divisors from the file take the place of the config's partial rotation, on full layers only.
            if group == Group::Full && layer.is_some() && self.checkpoint.tensor(Role::RopeFreqs)?.is_some() {
                let divisors = self.checkpoint.expect_vector(Role::RopeFreqs, head_dim / 2)?;
                let whole = crate::config::Rope { rotated: 1.0, ..self.config.rope[group.index()] };
                values = whole.inv_freq(head_dim).iter().zip(&divisors).map(|(f, d)| f / d).collect();
                if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                    return Err(Error::Tensor {
                        tensor: "rope_freqs.weight".into(),
                        problem: format!("divisor {i} is {}", divisors[i]),
                    });
                }
            }
            gains[group.index()] = self.gain(format!("rope frequencies, {group:?}"), &values)?;
        }
        Ok(gains)
    }

    fn per_layer(&mut self) -> Result<Option<PerLayer>> {
        let Some(p) = self.config.per_layer else { return Ok(None) };
        let (hidden, layers) = (self.config.hidden, self.config.layers.len());
        let width = layers * p.width;
        let projection = self.checkpoint.expect(Role::PerLayerModelProj, width, hidden)?;
        let table = self.checkpoint.expect(Role::PerLayerTable, p.vocab, width)?;
        Ok(Some(PerLayer {
            projection: self.mat(Role::PerLayerModelProj, &[projection])?,
            spec: PerLayerSpec {
                table: self.rows(Role::PerLayerTable, table)?,
                layers,
                width: p.width,
                norm: self.norm(Role::PerLayerProjNorm, p.width)?,
                context_scale: (hidden as f32).sqrt().recip(),
                token_scale: (p.width as f32).sqrt(),
                mix_scale: std::f32::consts::FRAC_1_SQRT_2,
            },
            input_act: self.act("per_layer_input", hidden, ActKind::Input, ActRows::Batch)?,
            inputs_act: self.act("per_layer_inputs", width, ActKind::F32, ActRows::Batch)?,
            gate_act: self.act("per_layer_gate", p.width, ActKind::F32, ActRows::Batch)?,
            hidden_act: self.act("per_layer_hidden", p.width, ActKind::Input, ActRows::Batch)?,
        }))
    }

    fn layer(&mut self, index: usize, kv: lapidary_ops::KvRef, acts: &Acts) -> Result<Layer> {
        let hidden = self.config.hidden;
        let at = |role| Role::Layer(index as u32, role);
        let attn = self.attention(index, kv, acts)?;
        let dense = self.dense(index)?;
        let mlp = match self.config.moe {
            None => Mlp::Dense(dense),
            Some(_) => Mlp::Moe(self.moe(index, dense)?),
        };
        let branch = match self.config.per_layer {
            Some(p) => {
                let gate = self.checkpoint.expect(at(LayerRole::PerLayerGate), p.width, hidden)?;
                let projection = self.checkpoint.expect(at(LayerRole::PerLayerProj), hidden, p.width)?;
                Some(PerLayerBranch {
                    gate: self.mat(at(LayerRole::PerLayerGate), &[gate])?,
                    projection: self.mat(at(LayerRole::PerLayerProj), &[projection])?,
                    post_norm: self.norm(at(LayerRole::PostPerLayerNorm), hidden)?,
                    activation: self.config.activation,
                })
            }
            None => None,
        };
        let scalar = match self.config.layer_scalar {
            true => Some(self.checkpoint.expect_vector(at(LayerRole::LayerScalar), 1)?[0]),
            false => None,
        };
        Ok(Layer {
            input_norm: self.norm(at(LayerRole::InputNorm), hidden)?,
            attn,
            post_attn_norm: self.norm(at(LayerRole::PostAttnNorm), hidden)?,
            mlp,
            post_ffn_norm: self.norm(at(LayerRole::PostFfnNorm), hidden)?,
            per_layer: branch,
            scalar,
        })
    }

    fn attention(&mut self, index: usize, kv: lapidary_ops::KvRef, acts: &Acts) -> Result<Attention> {
        let (c, l) = (self.config, self.config.layers[index]);
        let at = |role| Role::Layer(index as u32, role);
        let (q_rows, kv_rows) = (c.heads * l.head_dim, l.kv_heads * l.head_dim);
        let mut parts = vec![self.checkpoint.expect(at(LayerRole::QProj), q_rows, c.hidden)?];
        if kv.writes {
            parts.push(self.checkpoint.expect(at(LayerRole::KProj), kv_rows, c.hidden)?);
            if !l.values_are_keys {
                parts.push(self.checkpoint.expect(at(LayerRole::VProj), kv_rows, c.hidden)?);
            }
        }
        let width = parts.iter().map(|p| p.rows).sum();
        let out = self.checkpoint.expect(at(LayerRole::OProj), c.hidden, q_rows)?;
        let own_kv = match kv.writes {
            false => None,
            true => Some(KvSpec {
                k_norm: self.norm(at(LayerRole::KNorm), l.head_dim)?,
                values: if l.values_are_keys { ValueSource::Keys } else { ValueSource::Projected },
                v_norm_eps: c.value_norm.then_some(c.eps),
                cache: kv,
            }),
        };
        Ok(Attention {
            qkv: self.mat(at(LayerRole::QProj), &parts)?,
            out: self.mat(at(LayerRole::OProj), &[out])?,
            qkv_act: self.shared_act("qkv", width, ActKind::F32)?,
            heads_act: self.shared_act("heads", q_rows, ActKind::Input)?,
            finish: QkvSpec {
                heads: c.heads,
                kv_heads: l.kv_heads,
                head_dim: l.head_dim,
                q_norm: self.norm(at(LayerRole::QNorm), l.head_dim)?,
                kv: own_kv,
                rope: acts.rope[l.group.index()],
            },
            spec: AttnSpec {
                heads: c.heads,
                kv_heads: l.kv_heads,
                head_dim: l.head_dim,
                scale: c.score_scale,
                softcap: c.attn_softcap,
                window: (l.group == Group::Sliding).then_some(c.window),
                cache: kv,
            },
        })
    }

    fn dense(&mut self, index: usize) -> Result<Dense> {
        let (hidden, width) = (self.config.hidden, self.config.layers[index].intermediate);
        let at = |role| Role::Layer(index as u32, role);
        let gate = self.checkpoint.expect(at(LayerRole::Gate), width, hidden)?;
        let up = self.checkpoint.expect(at(LayerRole::Up), width, hidden)?;
        let down = self.checkpoint.expect(at(LayerRole::Down), hidden, width)?;
        Ok(Dense {
            norm: self.norm(at(LayerRole::PreFfnNorm), hidden)?,
            gate_up: self.mat(at(LayerRole::Gate), &[gate, up])?,
            down: self.mat(at(LayerRole::Down), &[down])?,
            gate_up_act: self.shared_act("gate_up", 2 * width, ActKind::F32)?,
            hidden_act: self.shared_act("mlp_hidden", width, ActKind::Input)?,
            activation: self.config.activation,
        })
    }

    fn moe(&mut self, index: usize, dense: Dense) -> Result<Moe> {
        let m = self.config.moe.expect("the caller saw experts");
        let hidden = self.config.hidden;
        let at = |role| Role::Layer(index as u32, role);
        let mut scale = self.checkpoint.expect_vector(at(LayerRole::RouterScale), hidden)?;
        let root = (hidden as f32).sqrt().recip();
        scale.iter_mut().for_each(|s| *s *= root);
        let router_gain = self.gain(format!("{} / sqrt(hidden)", at(LayerRole::RouterScale)), &scale)?;
        let per_expert_role = at(LayerRole::PerExpertScale);
        // Some quantised conversions fold this scale into the experts and leave it out.
        let per_expert =
            match is_safetensors(self.checkpoint) || self.checkpoint.tensor(per_expert_role)?.is_some() {
                true => self.checkpoint.expect_vector(per_expert_role, m.experts)?,
                false => vec![1.0; m.experts],
            };
        let router = self.checkpoint.expect(at(LayerRole::Router), m.experts, hidden)?;
        let mut gate_up = Vec::with_capacity(2 * m.experts);
        let mut down = Vec::with_capacity(m.experts);
        for e in 0..m.experts {
            for part in [ExpertPart::Gate, ExpertPart::Up] {
                gate_up.push(self.checkpoint.expect_expert(index as u32, e as u32, part, m.width, hidden)?);
            }
            down.push(self.checkpoint.expect_expert(
                index as u32,
                e as u32,
                ExpertPart::Down,
                hidden,
                m.width,
            )?);
        }
        Ok(Moe {
            dense,
            dense_post: self.norm(at(LayerRole::PostFfnNorm1), hidden)?,
            router_norm: Norm { gain: router_gain, eps: self.config.eps },
            router: self.mat(at(LayerRole::Router), &[router])?,
            route: RouteSpec {
                experts: m.experts,
                top_k: m.top_k,
                per_expert_scale: self.gain(format!("{per_expert_role}"), &per_expert)?,
            },
            expert_norm: self.norm(at(LayerRole::PreFfnNorm2), hidden)?,
            experts: ExpertSpec {
                experts: m.experts,
                top_k: m.top_k,
                width: m.width,
                gate_up: self.grouped_mat(at(LayerRole::ExpertsGateUp), &gate_up, 2 * m.width)?,
                down: self.grouped_mat(at(LayerRole::ExpertsDown), &down, hidden)?,
                activation: self.config.activation,
            },
            expert_post: self.norm(at(LayerRole::PostFfnNorm2), hidden)?,
            acts: MoeActs {
                router_input: self.shared_act("router_input", hidden, ActKind::F32)?,
                router_logits: self.shared_act("router_logits", m.experts, ActKind::F32)?,
                routes: self.shared_act("routes", 2 * m.top_k, ActKind::F32)?,
                input: self.shared_act("expert_input", hidden, ActKind::Input)?,
                output: self.shared_act("expert_output", hidden, ActKind::F32)?,
            },
        })
    }
}
