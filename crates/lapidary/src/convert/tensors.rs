//! The tensors of a converted file: which there are, and how each gets its bytes.

use std::collections::HashSet;

use lapidary_formats::{Format, TensorView, decode_row, encode_rows};
use lapidary_model::{Config, Family, LayerConfig, MoeConfig};
use lapidary_ops::Group;
use lapidary_weights::names::{Spelling, spell};
use lapidary_weights::{Checkpoint, ExpertPart, LayerRole, Role};

use super::error::{ConvertError, Result};
use super::{ConvertReport, EncodingError, Fallback, MatrixReport, Types};
use crate::mix::{self, Matrix, Mix, Model};

/// Values that are encoded at a time.
const PIECE_VALUES: usize = 1 << 20;

/// A divisor of rotation frequencies that stands for no rotation, as published files have it.
const NO_ROTATION: f32 = 1e30;

/// A tensor of the file.
pub(super) struct Planned {
    pub(super) name: String,
    /// Row length first.
    pub(super) dims: Vec<u64>,
    pub(super) format: Format,
    /// Whether the format is left to the choice of types.
    open: bool,
    content: Content,
}

enum Content {
    Matrix {
        role: Role,
        rows: usize,
        cols: usize,
    },
    /// For each expert the parts' rows one after another.
    Experts {
        layer: u32,
        parts: &'static [ExpertPart],
        experts: usize,
        rows: usize,
        cols: usize,
    },
    /// A small tensor in float32.
    Vector {
        role: Role,
        len: usize,
    },
    /// A norm's gain as it multiplies.
    Norm {
        role: Role,
        len: usize,
    },
    Values(Vec<f32>),
}

/// Every tensor of the file, in the order that converters use. Checks presence and shape of all.
pub(super) fn plan(
    checkpoint: &Checkpoint,
    config: &Config,
    types: Types,
    report: &mut ConvertReport,
) -> Result<Vec<Planned>> {
    let mut plan = Plan { checkpoint, list: Vec::new(), used: HashSet::new(), report };
    plan.model(config)?;
    for (n, layer) in config.layers.iter().enumerate() {
        plan.layer(config, n as u32, layer)?;
    }
    plan.account_for_the_rest(config)?;
    plan.assign(types, config);
    Ok(plan.list)
}

struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    list: Vec<Planned>,
    used: HashSet<Role>,
    report: &'a mut ConvertReport,
}

impl Plan<'_> {
    fn model(&mut self, config: &Config) -> Result<()> {
        let (hidden, vocab) = (config.hidden, config.vocab);
        self.matrix(Role::Embed, vocab, hidden)?;
        let different = self.checkpoint.head_differs()?;
        if different == Some(true) || (different.is_none() && !config.tied) {
            self.matrix(Role::Head, vocab, hidden)?;
        }
        if let Some(p) = config.per_layer {
            let width = config.layers.len() * p.width;
            self.matrix(Role::PerLayerTable, p.vocab, width)?;
            self.matrix(Role::PerLayerModelProj, width, hidden)?;
            self.norm(Role::PerLayerProjNorm, p.width)?;
        }
        self.norm(Role::FinalNorm, hidden)?;
        let full = config.layers.iter().find(|l| l.group == Group::Full);
        if let (Family::Gemma4, Some(layer)) = (config.family, full) {
            let divisors = rope_divisors(config, layer.head_dim);
            let name = spelled(Role::RopeFreqs);
            self.list.push(Planned::plain(name, divisors.len(), Content::Values(divisors)));
        }
        Ok(())
    }

    fn layer(&mut self, config: &Config, n: u32, layer: &LayerConfig) -> Result<()> {
        use LayerRole::*;
        let hidden = config.hidden;
        let (queries, keys) = (config.heads * layer.head_dim, layer.kv_heads * layer.head_dim);
        let at = |role| Role::Layer(n, role);
        self.norm(at(InputNorm), hidden)?;
        self.matrix(at(QProj), queries, hidden)?;
        self.norm(at(QNorm), layer.head_dim)?;
        if layer.donor.is_none() {
            self.matrix(at(KProj), keys, hidden)?;
            self.norm(at(KNorm), layer.head_dim)?;
            if !layer.values_are_keys {
                self.matrix(at(VProj), keys, hidden)?;
            }
        }
        self.matrix(at(OProj), hidden, queries)?;
        self.norm(at(PostAttnNorm), hidden)?;
        self.norm(at(PreFfnNorm), hidden)?;
        self.matrix(at(Gate), layer.intermediate, hidden)?;
        self.matrix(at(Up), layer.intermediate, hidden)?;
        self.matrix(at(Down), hidden, layer.intermediate)?;
        self.norm(at(PostFfnNorm), hidden)?;
        if let Some(moe) = config.moe {
            self.experts(hidden, n, moe)?;
        }
        if let Some(p) = config.per_layer {
            self.matrix(at(PerLayerGate), p.width, hidden)?;
            self.matrix(at(PerLayerProj), hidden, p.width)?;
            self.norm(at(PostPerLayerNorm), hidden)?;
        }
        if config.layer_scalar {
            self.vector(at(LayerScalar), 1)?;
        }
        Ok(())
    }

    fn experts(&mut self, hidden: usize, n: u32, moe: MoeConfig) -> Result<()> {
        use LayerRole::*;
        let at = |role| Role::Layer(n, role);
        let MoeConfig { experts, width, .. } = moe;
        let found = self.checkpoint.experts_in_file(n);
        // None at all is left to the look-up below, whose error names the tensor.
        if found != experts && found != 0 {
            return Err(ConvertError::Experts { layer: n, found, expected: experts });
        }
        self.norm(at(PreFfnNorm2), hidden)?;
        self.norm(at(PostFfnNorm1), hidden)?;
        self.norm(at(PostFfnNorm2), hidden)?;
        // A wrong choice of experts costs more than the bytes.
        self.matrix_in(at(Router), experts, hidden, false)?;
        self.vector(at(RouterScale), hidden)?;
        let both: &[_] = &[ExpertPart::Gate, ExpertPart::Up];
        for (role, parts, rows, cols) in
            [(ExpertsGateUp, both, width, hidden), (ExpertsDown, &[ExpertPart::Down], hidden, width)]
        {
            for e in 0..experts as u32 {
                for &part in parts {
                    self.checkpoint.expect_expert(n, e, part, rows, cols)?;
                }
            }
            let name = spelled(at(role));
            let dims = vec![cols as u64, (parts.len() * rows) as u64, experts as u64];
            let content = Content::Experts { layer: n, parts, experts, rows, cols };
            self.list.push(Planned { name, dims, format: Format::F32, open: true, content });
        }
        self.vector(at(PerExpertScale), experts)
    }

    fn matrix(&mut self, role: Role, rows: usize, cols: usize) -> Result<()> {
        self.matrix_in(role, rows, cols, true)
    }

    /// A matrix that is `open` to the choice of types, or float32.
    fn matrix_in(&mut self, role: Role, rows: usize, cols: usize, open: bool) -> Result<()> {
        self.checkpoint.expect(role, rows, cols)?;
        self.used.insert(role);
        let dims = vec![cols as u64, rows as u64];
        let content = Content::Matrix { role, rows, cols };
        self.list.push(Planned { name: spelled(role), dims, format: Format::F32, open, content });
        Ok(())
    }

    fn norm(&mut self, role: Role, len: usize) -> Result<()> {
        self.small(role, len, Content::Norm { role, len })
    }

    fn vector(&mut self, role: Role, len: usize) -> Result<()> {
        self.small(role, len, Content::Vector { role, len })
    }

    fn small(&mut self, role: Role, len: usize, content: Content) -> Result<()> {
        self.checkpoint.expect_vector(role, len)?;
        self.used.insert(role);
        self.list.push(Planned::plain(spelled(role), len, content));
        Ok(())
    }

    /// Gives every open matrix its type, or one whose blocks fit its rows.
    fn assign(&mut self, types: Types, config: &Config) {
        let open: Vec<&Planned> = self.list.iter().filter(|t| t.open).collect();
        let matrices: Vec<Matrix<'_>> =
            open.iter().map(|t| Matrix { name: &t.name, cols: t.dims[0] as usize }).collect();
        let experts = config.moe.map_or(0, |m| m.experts);
        let model = Model { layers: config.layers.len(), experts, plain: Format::Bf16 };
        let wanted = match types {
            Types::All(format) => vec![format; matrices.len()],
            Types::Mix(mix) => Mix::formats(mix, model, &matrices),
        };
        let fitting = |wanted: Format, cols: usize| {
            let second = match types {
                Types::All(_) => Some(Format::Q8_0),
                Types::Mix(_) => mix::whole_blocks(wanted, cols),
            };
            let choices = [Some(wanted), second, Some(Format::Bf16)];
            let whole = |f: &Format| f.row_bytes(cols).is_some();
            choices.into_iter().flatten().find(whole).expect("BF16 has blocks of one value")
        };
        let formats: Vec<(Format, Format)> =
            wanted.iter().zip(&matrices).map(|(&f, m)| (f, fitting(f, m.cols))).collect();
        for (tensor, (wanted, format)) in self.list.iter_mut().filter(|t| t.open).zip(formats) {
            tensor.format = format;
            if format != wanted {
                let (name, cols) = (tensor.name.clone(), tensor.dims[0] as usize);
                self.report.fallbacks.push(Fallback { tensor: name, cols, format });
            }
        }
    }

    /// Every tensor of the checkpoint is written, known to be unused, or an error.
    fn account_for_the_rest(&mut self, config: &Config) -> Result<()> {
        use LayerRole::*;
        for role in self.checkpoint.roles().filter(|role| !self.used.contains(role)) {
            let layer = |n: u32| config.layers.get(n as usize);
            let unused = match role {
                Role::Head => true,
                Role::Layer(n, KProj | VProj | KNorm) => layer(n).is_some_and(|l| l.donor.is_some()),
                Role::Layer(n, KScale | VScale) => layer(n).is_some(),
                Role::Layer(n, ExpertsGateUp | ExpertsGate | ExpertsUp | ExpertsDown | Expert { .. })
                    if config.moe.is_some() && layer(n).is_some() =>
                {
                    continue;
                }
                _ => false,
            };
            if !unused {
                return Err(self.checkpoint.refuse(role, "the configuration has no place for it").into());
            }
            self.report.dropped.push(role.to_string());
        }
        Ok(())
    }
}

fn spelled(role: Role) -> String {
    spell(role, Spelling::Gguf).expect("the role has a GGUF name")
}

/// Divides the frequencies of full-attention layers: by the scaling factor where the pair rotates, and by so much that
/// nothing remains where it doesn't.
fn rope_divisors(config: &Config, head_dim: usize) -> Vec<f32> {
    let rope = config.rope[Group::Full.index()];
    let rotates = rope.inv_freq(head_dim).into_iter().map(|f| f != 0.0);
    rotates.map(|rotates| if rotates { rope.factor as f32 } else { NO_ROTATION }).collect()
}

impl Planned {
    fn plain(name: String, len: usize, content: Content) -> Planned {
        Planned { name, dims: vec![len as u64], format: Format::F32, open: false, content }
    }

    /// Bytes that [`Planned::write`] passes on.
    pub(super) fn bytes(&self) -> u64 {
        let blocks = self.dims.iter().product::<u64>() / self.format.block_len() as u64;
        blocks * self.format.block_bytes() as u64
    }

    /// Passes the tensor's bytes to `sink` in order; what a matrix lost thereby.
    pub(super) fn write(
        &self,
        checkpoint: &Checkpoint,
        config: &Config,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<Option<MatrixReport>> {
        let mut encode = Encode { format: self.format, from: None, error: EncodingError::default() };
        match self.content {
            Content::Matrix { role, rows, cols } => {
                encode.matrix(checkpoint, &checkpoint.expect(role, rows, cols)?, sink)?;
            }
            Content::Experts { layer, parts, experts, rows, cols } => {
                for e in 0..experts as u32 {
                    for &part in parts {
                        let view = checkpoint.expect_expert(layer, e, part, rows, cols)?;
                        encode.matrix(checkpoint, &view, sink)?;
                    }
                }
            }
            Content::Vector { role, len } => sink(&bytes_of(&checkpoint.expect_vector(role, len)?))?,
            Content::Norm { role, len } => {
                let mut values = checkpoint.expect_vector(role, len)?;
                if config.norm_plus_one {
                    values.iter_mut().for_each(|v| *v += 1.0);
                }
                sink(&bytes_of(&values))?;
            }
            Content::Values(ref values) => sink(&bytes_of(values))?,
        }
        Ok(encode.from.map(|from| MatrixReport {
            tensor: self.name.clone(),
            rows: self.dims[1..].iter().product::<u64>() as usize,
            cols: self.dims[0] as usize,
            from,
            format: self.format,
            error: encode.error,
        }))
    }
}

/// The encoding of one tensor's matrices.
struct Encode {
    format: Format,
    /// The format that they were read in.
    from: Option<Format>,
    error: EncodingError,
}

impl Encode {
    /// A matrix in the tensor's format. GGUF's blocks lie inside rows, so pieces of rows can be encoded apart.
    fn matrix(
        &mut self,
        checkpoint: &Checkpoint,
        view: &TensorView<'_>,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.from = Some(view.format);
        let rows_at_once = (PIECE_VALUES / view.cols).max(1);
        let mut values = vec![0.0; rows_at_once.min(view.rows) * view.cols];
        for first in (0..view.rows).step_by(rows_at_once) {
            let rows = rows_at_once.min(view.rows - first);
            let piece = &mut values[..rows * view.cols];
            for (row, out) in piece.chunks_exact_mut(view.cols).enumerate() {
                decode_row(view, first + row, out);
            }
            let encoded = encode_rows(self.format, piece, rows, view.cols)
                .map_err(|source| ConvertError::Encode { tensor: view.name.clone(), source })?;
            let written = encoded.view(view.name.as_str());
            let mut back = vec![0.0; view.cols];
            for (row, values) in piece.chunks_exact(view.cols).enumerate() {
                decode_row(&written, row, &mut back);
                self.error.add(values, &back);
            }
            sink(&encoded.bytes)?;
        }
        checkpoint.release(view);
        Ok(())
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
