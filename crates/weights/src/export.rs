//! Writes a safetensors checkpoint again in another layout: for conversions, and for tests that hold the layouts of one
//! model against each other.

use std::collections::BTreeMap;
use std::path::Path;

use lapidary_formats::{
    Encoded, EncodedScales, Format, Loss, Scaling, TensorView, decode_row, encode_rows_scaled,
};
use serde_json::{Value, json};

use crate::names::{ExpertPart, LayerRole, Role, Spelling, spell};
use crate::safetensors::{Dtype, NewTensor, write};
use crate::{Checkpoint, ConfigSource, Error, Result};

/// How a checkpoint stores the matrices of its layers. The embedding, the head, the router, norms and other small
/// tensors stay as they are, as in published files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Plain, an expert's matrix a tensor.
    PerExpert,
    /// Plain, all experts of a layer in a stack, spelled with `moe.`.
    MoeStacks,
    /// FP8 with one scale a matrix.
    Fp8Tensor,
    /// FP8 with one scale a row.
    Fp8Row,
    /// FP8 with one scale for each 128 x 128 block.
    Fp8Block,
    /// NVFP4 as compressed-tensors writes it, the tensor scale a divisor.
    Nvfp4Divisor,
    /// NVFP4 as ModelOpt writes it, the tensor scale a multiplier.
    Nvfp4Multiplier,
    /// INT4 in groups of 32.
    Int4,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Layout; 8] = [
        Layout::PerExpert,
        Layout::MoeStacks,
        Layout::Fp8Tensor,
        Layout::Fp8Row,
        Layout::Fp8Block,
        Layout::Nvfp4Divisor,
        Layout::Nvfp4Multiplier,
        Layout::Int4,
    ];

    /// The format of the codes and where its scales go; `None` for plain layouts.
    fn encoding(self) -> Option<(Format, Scaling)> {
        match self {
            Layout::PerExpert | Layout::MoeStacks => None,
            Layout::Fp8Tensor => Some((Format::Fp8E4M3, Scaling::Tensor)),
            Layout::Fp8Row => Some((Format::Fp8E4M3, Scaling::Row)),
            Layout::Fp8Block => Some((Format::Fp8E4M3, Scaling::Block128)),
            Layout::Nvfp4Divisor | Layout::Nvfp4Multiplier => Some((Format::Nvfp4, Scaling::Usual)),
            Layout::Int4 => Some((Format::Int4G32, Scaling::Usual)),
        }
    }

    /// What `config.json` says of it.
    fn quantization_config(self) -> Option<Value> {
        let group = |format: &str, weights: Value| {
            let groups = json!({"group_0": {"targets": ["Linear"], "format": format, "weights": weights}});
            json!({"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": format,
                   "config_groups": groups, "ignore": ["lm_head", "re:.*router.*"]})
        };
        let fp8 = |strategy: &str, block: Value| {
            let weights = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy, "block_structure": block});
            Some(group("float-quantized", weights))
        };
        match self {
            Layout::PerExpert | Layout::MoeStacks => None,
            Layout::Fp8Tensor => fp8("tensor", Value::Null),
            Layout::Fp8Row => fp8("channel", Value::Null),
            Layout::Fp8Block => fp8("block", json!([128, 128])),
            Layout::Nvfp4Divisor => Some(group(
                "nvfp4-pack-quantized",
                json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
            )),
            Layout::Nvfp4Multiplier => {
                Some(json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}))
            }
            Layout::Int4 => Some(group(
                "pack-quantized",
                json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32}),
            )),
        }
    }
}

/// What a matrix lost in an export.
#[derive(Clone, Debug, PartialEq)]
pub struct Lost {
    /// Its name in the file.
    pub tensor: String,
    /// What it is in.
    pub format: Format,
    /// Bytes of its codes and scales.
    pub bytes: u64,
    /// Against what the checkpoint holds.
    pub loss: Loss,
}

/// Writes `config.json` and `model.safetensors` into a folder that exists, and tells what each matrix lost. The text
/// files are left to the caller. The whole file is in memory on the way.
///
/// # Errors
/// A source that isn't safetensors or is already quantised, a width that the format cannot have, or a file that cannot
/// be written.
pub fn export(source: &Checkpoint, folder: &Path, layout: Layout) -> Result<Vec<Lost>> {
    let ConfigSource::Json { config, .. } = source.config() else {
        return Err(Error::NotSupported {
            path: source.path().to_owned(),
            what: "writing a GGUF checkpoint as safetensors is".to_owned(),
            remedy: "write from the model's safetensors".to_owned(),
        });
    };
    let mut config = config.clone();
    if let Some(scheme) = layout.quantization_config() {
        config["quantization_config"] = scheme;
    }
    let config_path = folder.join("config.json");
    std::fs::write(&config_path, config.to_string())
        .map_err(|source| Error::Write { path: config_path.clone(), source })?;

    let path = folder.join("model.safetensors");
    let mut out = Tensors { path: &path, layout, list: Vec::new(), lost: Vec::new() };
    for role in source.roles() {
        out.add(source, role)?;
    }
    let borrowed: Vec<NewTensor> = out
        .list
        .iter()
        .map(|(name, dtype, shape, bytes)| NewTensor {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            bytes,
        })
        .collect();
    write(&path, &borrowed, &BTreeMap::from([("format".to_owned(), "pt".to_owned())]))?;
    Ok(out.lost)
}

/// The tensors of the file to be written.
struct Tensors<'a> {
    path: &'a Path,
    layout: Layout,
    list: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    lost: Vec<Lost>,
}

impl Tensors<'_> {
    fn add(&mut self, source: &Checkpoint, role: Role) -> Result<()> {
        let stored = source.stored(role).expect("it is one of the file's roles");
        let Role::Layer(layer, local) = role else { return self.plain(source, role, stored.shape) };
        match local {
            LayerRole::ExpertsGateUp | LayerRole::ExpertsDown if self.layout == Layout::MoeStacks => {
                let name = role.to_string().replace(".experts.", ".moe.");
                self.push(
                    name,
                    dtype_of(source, role)?,
                    stored.shape,
                    source.tensor(role)?.expect("stored").bytes.to_vec(),
                );
                Ok(())
            }
            LayerRole::ExpertsGateUp => self.experts(source, layer, &[ExpertPart::Gate, ExpertPart::Up]),
            LayerRole::ExpertsGate => self.experts(source, layer, &[ExpertPart::Gate]),
            LayerRole::ExpertsUp => self.experts(source, layer, &[ExpertPart::Up]),
            LayerRole::ExpertsDown => self.experts(source, layer, &[ExpertPart::Down]),
            _ if is_linear(local) => {
                let view = source.tensor(role)?.expect("it is one of the file's roles");
                self.matrix(role, &view)
            }
            _ => self.plain(source, role, stored.shape),
        }
    }

    fn experts(&mut self, source: &Checkpoint, layer: u32, parts: &[ExpertPart]) -> Result<()> {
        for index in 0..source.experts_in_file(layer) as u32 {
            for &part in parts {
                if let Some(view) = source.expert(layer, index, part)? {
                    self.matrix(Role::Layer(layer, LayerRole::Expert { index, part }), &view)?;
                }
            }
        }
        Ok(())
    }

    /// A tensor as it is.
    fn plain(&mut self, source: &Checkpoint, role: Role, shape: &[usize]) -> Result<()> {
        let view = source.tensor(role)?.expect("it is one of the file's roles");
        self.push(role.to_string(), dtype_of(source, role)?, shape, view.bytes.to_vec());
        Ok(())
    }

    /// A linear layer's matrix in the layout.
    fn matrix(&mut self, role: Role, view: &TensorView) -> Result<()> {
        let name = spell(role, Spelling::Composite).expect("every matrix has a safetensors name");
        let shape = [view.rows, view.cols];
        let Some((format, scaling)) = self.layout.encoding() else {
            let dtype = plain_dtype(view.format).ok_or_else(|| self.quantised(view))?;
            self.push(name, dtype, &shape, view.bytes.to_vec());
            return Ok(());
        };
        plain_dtype(view.format).ok_or_else(|| self.quantised(view))?;
        let mut values = vec![0.0; view.rows * view.cols];
        for (row, out) in values.chunks_exact_mut(view.cols).enumerate() {
            decode_row(view, row, out);
        }
        let encoded = encode_rows_scaled(format, scaling, &values, view.rows, view.cols).map_err(|e| {
            Error::BadWrite { path: self.path.to_owned(), tensor: name.clone(), what: e.to_string() }
        })?;
        let (mut loss, mut back) = (Loss::default(), vec![0.0; view.cols]);
        let codes = encoded.view(name.as_str());
        for (row, values) in values.chunks_exact(view.cols).enumerate() {
            decode_row(&codes, row, &mut back);
            loss.add(values, &back);
        }
        let before = self.list.len();
        let module = name.strip_suffix(".weight").expect("linear layers are spelled with it").to_owned();
        self.encoded(&module, encoded);
        let bytes = self.list[before..].iter().map(|(.., bytes)| bytes.len() as u64).sum();
        self.lost.push(Lost { tensor: name, format, bytes, loss });
        Ok(())
    }

    fn encoded(&mut self, module: &str, encoded: Encoded) {
        let Encoded { rows, cols, bytes, scales, .. } = encoded;
        let at = |suffix: &str| format!("{module}.{suffix}");
        let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        match scales {
            EncodedScales::None => unreachable!("plain layouts are not encoded"),
            EncodedScales::Tensor(scale) => {
                self.push(at("weight"), Dtype::F8E4M3, &[rows, cols], bytes);
                self.push(at("weight_scale"), Dtype::F32, &[1], f32s(&[scale]));
            }
            EncodedScales::Row(scales) => {
                self.push(at("weight"), Dtype::F8E4M3, &[rows, cols], bytes);
                self.push(at("weight_scale"), Dtype::F32, &[rows, 1], f32s(&scales));
            }
            EncodedScales::Block128(scales) => {
                self.push(at("weight"), Dtype::F8E4M3, &[rows, cols], bytes);
                let shape = [rows.div_ceil(128), cols.div_ceil(128)];
                self.push(at("weight_scale"), Dtype::F32, &shape, f32s(&scales));
            }
            EncodedScales::Nvfp4 { blocks, tensor } => {
                let divisor = self.layout == Layout::Nvfp4Divisor;
                let codes = if divisor { "weight_packed" } else { "weight" };
                self.push(at(codes), Dtype::U8, &[rows, cols / 2], bytes);
                self.push(at("weight_scale"), Dtype::F8E4M3, &[rows, cols / 16], blocks);
                if divisor {
                    self.push(at("weight_global_scale"), Dtype::F32, &[1], f32s(&[1.0 / tensor]));
                } else {
                    self.push(at("weight_scale_2"), Dtype::F32, &[], f32s(&[tensor]));
                }
            }
            EncodedScales::Group32Bf16(scales) => {
                self.push(at("weight_packed"), Dtype::I32, &[rows, cols / 8], bytes);
                self.push(at("weight_scale"), Dtype::Bf16, &[rows, cols / 32], scales);
                let shape = [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
                self.push(at("weight_shape"), Dtype::I64, &[2], shape);
            }
        }
    }

    fn push(&mut self, name: String, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.list.push((name, dtype, shape.to_vec(), bytes));
    }

    fn quantised(&self, view: &TensorView) -> Error {
        Error::BadWrite {
            path: self.path.to_owned(),
            tensor: view.name.clone(),
            what: format!("it is {} already; export from a plain checkpoint", view.format),
        }
    }
}

/// Whether a role is a matrix that exporters quantise.
fn is_linear(role: LayerRole) -> bool {
    use LayerRole::*;
    matches!(
        role,
        QProj | KProj | VProj | OProj | Gate | Up | Down | PerLayerGate | PerLayerProj | Expert { .. }
    )
}

fn dtype_of(source: &Checkpoint, role: Role) -> Result<Dtype> {
    let stored = source.stored(role).expect("it is one of the file's roles");
    plain_dtype(stored.format).ok_or_else(|| Error::WrongDtype {
        path: stored.file.to_owned(),
        tensor: stored.name.to_owned(),
        expected: "F32, F16 or BF16".to_owned(),
        found: stored.format.to_string(),
    })
}

fn plain_dtype(format: Format) -> Option<Dtype> {
    match format {
        Format::F32 => Some(Dtype::F32),
        Format::F16 => Some(Dtype::F16),
        Format::Bf16 => Some(Dtype::Bf16),
        _ => None,
    }
}
