//! Writes a safetensors checkpoint again in another layout: for conversions, and for tests that hold the layouts of one
//! model against each other. One matrix is in memory at a time.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use lapidary_formats::{Encoded, EncodedScales, Format, Scaling, TensorView, decode_row, encode_rows_scaled};
use serde_json::{Value, json};

use crate::names::{Class, ExpertPart, LayerRole, Role, Spelling, classify_safetensors, spell};
use crate::safetensors::{Body, Dtype, File, Writer};
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

    /// What `config.json` says of it. `whole_groups` is whether every width is a multiple of 128.
    fn quantization_config(self, whole_groups: bool) -> Option<Value> {
        let group = |format: &str, weights: Value, activations: Value| {
            let groups = json!({"group_0": {"targets": ["Linear"], "format": format, "weights": weights,
                                            "input_activations": activations, "output_activations": null}});
            json!({"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": format,
                   "config_groups": groups, "ignore": KEPT})
        };
        let fp8 = |strategy: &str, block: Value| {
            let weights = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false,
                                 "strategy": strategy, "block_structure": block});
            let token = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": true, "strategy": "token"});
            let mut activations = token;
            if strategy == "block" {
                // Groups of activations are cut like the weights' blocks, and readers know no ragged group.
                (activations["strategy"], activations["group_size"]) = ("group".into(), 128.into());
                activations = if whole_groups { activations } else { Value::Null };
            }
            Some(group("float-quantized", weights, activations))
        };
        match self {
            Layout::PerExpert | Layout::MoeStacks => None,
            Layout::Fp8Tensor => fp8("tensor", Value::Null),
            Layout::Fp8Row => fp8("channel", Value::Null),
            Layout::Fp8Block => fp8("block", json!([128, 128])),
            Layout::Nvfp4Divisor => Some(group(
                "nvfp4-pack-quantized",
                json!({"num_bits": 4, "type": "float", "symmetric": true, "dynamic": false,
                       "strategy": "tensor_group", "group_size": 16}),
                Value::Null,
            )),
            Layout::Nvfp4Multiplier => {
                Some(json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": KEPT}))
            }
            Layout::Int4 => Some(group(
                "pack-quantized",
                json!({"num_bits": 4, "type": "int", "symmetric": true, "dynamic": false,
                       "strategy": "group", "group_size": 32}),
                Value::Null,
            )),
        }
    }
}

/// Linear layers that stay plain, in the words of `quantization_config`.
const KEPT: [&str; 5] = [
    "lm_head",
    "re:.*router.*",
    "re:.*per_layer_model_projection.*",
    "re:.*(vision|audio)_.*",
    "re:.*embed_(vision|audio).*",
];

/// A tensor that was written, for reports.
#[derive(Debug)]
pub struct Exported<'a> {
    /// Its name, which of a quantised matrix is the module's with `.weight`.
    pub name: &'a str,
    /// What was read.
    pub source: &'a TensorView<'a>,
    /// What was written.
    pub written: &'a TensorView<'a>,
    /// Bytes written so far.
    pub done: u64,
    /// Bytes to write in all.
    pub total: u64,
}

/// Writes `config.json` and `model.safetensors` into a folder that exists. Tensors of other input paths are copied. The
/// text files are left to the caller.
///
/// # Errors
/// A source that isn't safetensors or is already quantised, a width that the format cannot have, or a file that cannot
/// be written.
pub fn export(source: &Checkpoint, folder: &Path, layout: Layout) -> Result<()> {
    export_each(source, folder, layout, &mut |_| {})
}

/// [`export`], which tells `each` of every text tensor that it wrote.
///
/// # Errors
/// As [`export`].
pub fn export_each(
    source: &Checkpoint,
    folder: &Path,
    layout: Layout,
    each: &mut dyn FnMut(Exported<'_>),
) -> Result<()> {
    let ConfigSource::Json { config, .. } = source.config() else {
        return Err(Error::NotSupported {
            path: source.path().to_owned(),
            what: "writing a GGUF checkpoint as safetensors is".to_owned(),
            remedy: "write from the model's safetensors".to_owned(),
        });
    };
    let path = folder.join("model.safetensors");
    let plan = Plan::new(source, &path, layout)?;
    let mut writer = Writer::new(&path, &BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
    for item in &plan.items {
        for (name, dtype, shape) in item.tensors(layout) {
            writer.tensor(&name, dtype, &shape)?;
        }
    }
    let others = others(source)?;
    for (file, names) in &others {
        for entry in names.iter().filter_map(|name| file.find(name)) {
            writer.tensor(&entry.name, entry.dtype, &entry.shape)?;
        }
    }

    let mut config = config.clone();
    let whole_groups = plan.items.iter().all(|item| !item.encoded || item.sides().1.is_multiple_of(128));
    if let Some(scheme) = layout.quantization_config(whole_groups) {
        config["quantization_config"] = scheme;
    }
    let config_path = folder.join("config.json");
    let text = format!("{config:#}\n");
    std::fs::write(&config_path, text)
        .map_err(|source| Error::Write { path: config_path.clone(), source })?;

    let (mut done, total) = (0, writer.total_bytes());
    let mut body = writer.create()?;
    for item in &plan.items {
        let view = item.view(source)?;
        let encoded = item.write(&view, &path, layout, &mut body, &mut done)?;
        let written = encoded.as_ref().map_or_else(|| view.clone(), |e| e.view(item.name.as_str()));
        each(Exported { name: &item.name, source: &view, written: &written, done, total });
        source.release(&view);
    }
    for (file, names) in &others {
        for entry in names.iter().filter_map(|name| file.find(name)) {
            body.write(&entry.name, file.bytes(entry))?;
            file.release(file.bytes(entry));
        }
    }
    body.finish()
}

/// The tensors that aren't text, by file.
fn others(source: &Checkpoint) -> Result<Vec<(File, Vec<String>)>> {
    if source.ignored().tensors() == 0 {
        return Ok(Vec::new());
    }
    let open = |path: &Path| -> Result<(File, Vec<String>)> {
        let file = File::open(path)?;
        let other = |name: &&String| matches!(classify_safetensors(name), Class::Other(_));
        let names = file.entries().iter().map(|e| &e.name).filter(other).cloned().collect();
        Ok((file, names))
    };
    source.files().into_iter().map(open).collect()
}

/// What becomes of each tensor of the source.
struct Plan<'a> {
    source: &'a Checkpoint,
    path: &'a Path,
    layout: Layout,
    spelling: Spelling,
    items: Vec<Item>,
}

/// One tensor or matrix of the source.
struct Item {
    /// Its name in the new file, before it is taken apart into codes and scales.
    name: String,
    from: From,
    shape: Vec<usize>,
    dtype: Dtype,
    /// Whether it gets the layout's encoding.
    encoded: bool,
}

#[derive(Clone, Copy)]
enum From {
    Role(Role),
    Expert(u32, u32, ExpertPart),
}

impl<'a> Plan<'a> {
    fn new(source: &'a Checkpoint, path: &'a Path, layout: Layout) -> Result<Plan<'a>> {
        let composite = |name: &str| name.starts_with("model.language_model.");
        let spelling = match source.stored(Role::Embed).is_none_or(|s| composite(s.name)) {
            true => Spelling::Composite,
            false => Spelling::TextOnly,
        };
        let mut plan = Plan { source, path, layout, spelling, items: Vec::new() };
        source.roles().try_for_each(|role| plan.add(role))?;
        plan.whole_blocks()?;
        Ok(plan)
    }

    fn spelled(&self, role: Role) -> String {
        spell(role, self.spelling).expect("every tensor of safetensors files has a name there")
    }

    fn add(&mut self, role: Role) -> Result<()> {
        let stored = self.source.stored(role).expect("it is one of the file's roles");
        let dtype = self.plain_dtype(role)?;
        let Role::Layer(layer, local) = role else {
            self.push(self.spelled(role), From::Role(role), stored.shape, dtype, false);
            return Ok(());
        };
        match local {
            LayerRole::ExpertsGateUp | LayerRole::ExpertsDown if self.layout == Layout::MoeStacks => {
                let name = self.spelled(role).replace(".experts.", ".moe.");
                self.push(name, From::Role(role), stored.shape, dtype, false);
                Ok(())
            }
            LayerRole::ExpertsGateUp => self.experts(layer, &[ExpertPart::Gate, ExpertPart::Up], dtype),
            LayerRole::ExpertsGate => self.experts(layer, &[ExpertPart::Gate], dtype),
            LayerRole::ExpertsUp => self.experts(layer, &[ExpertPart::Up], dtype),
            LayerRole::ExpertsDown => self.experts(layer, &[ExpertPart::Down], dtype),
            _ => {
                self.push(self.spelled(role), From::Role(role), stored.shape, dtype, is_linear(local));
                Ok(())
            }
        }
    }

    fn experts(&mut self, layer: u32, parts: &[ExpertPart], dtype: Dtype) -> Result<()> {
        for index in 0..self.source.experts_in_file(layer) as u32 {
            for &part in parts {
                let Some(view) = self.source.expert(layer, index, part)? else { continue };
                let name = self.spelled(Role::Layer(layer, LayerRole::Expert { index, part }));
                self.push(name, From::Expert(layer, index, part), &[view.rows, view.cols], dtype, true);
            }
        }
        Ok(())
    }

    fn push(&mut self, name: String, from: From, shape: &[usize], dtype: Dtype, linear: bool) {
        let encoded = linear && self.layout.encoding().is_some();
        self.items.push(Item { name, from, shape: shape.to_vec(), dtype, encoded });
    }

    /// Refuses a width that the layout's format can't have before anything is written.
    fn whole_blocks(&self) -> Result<()> {
        let Some((format, _)) = self.layout.encoding() else { return Ok(()) };
        let partial = |item: &&Item| item.encoded && format.row_bytes(item.sides().1).is_none();
        self.items.iter().find(partial).map_or(Ok(()), |item| {
            let (cols, of) = (item.sides().1, format.block_len());
            let what = format!("rows of {cols} values; {format} needs a multiple of {of}");
            Err(Error::BadWrite { path: self.path.to_owned(), tensor: item.name.clone(), what })
        })
    }

    fn plain_dtype(&self, role: Role) -> Result<Dtype> {
        let stored = self.source.stored(role).expect("it is one of the file's roles");
        plain_dtype(stored.format).ok_or_else(|| Error::BadWrite {
            path: self.path.to_owned(),
            tensor: stored.name.to_owned(),
            what: format!("it is {} already; export from a plain checkpoint", stored.format),
        })
    }
}

impl Item {
    fn module(&self) -> &str {
        self.name.strip_suffix(".weight").expect("linear layers are spelled with it")
    }

    /// Rows and columns of a matrix.
    fn sides(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        (self.shape.iter().rev().skip(1).product(), cols)
    }

    /// The tensors that it becomes, in the order in which [`Item::write`] writes them.
    fn tensors(&self, layout: Layout) -> Vec<(String, Dtype, Vec<usize>)> {
        if !self.encoded {
            return vec![(self.name.clone(), self.dtype, self.shape.clone())];
        }
        let (rows, cols) = self.sides();
        let at = |suffix: &str, dtype, shape: &[usize]| {
            (format!("{}.{suffix}", self.module()), dtype, shape.to_vec())
        };
        let fp8 = |scales: &[usize]| {
            vec![at("weight", Dtype::F8E4M3, &[rows, cols]), at("weight_scale", Dtype::Bf16, scales)]
        };
        let nvfp4 = |codes, tensor, shape: &[usize]| {
            let blocks = at("weight_scale", Dtype::F8E4M3, &[rows, cols / 16]);
            vec![at(codes, Dtype::U8, &[rows, cols / 2]), blocks, at(tensor, Dtype::F32, shape)]
        };
        match layout {
            Layout::PerExpert | Layout::MoeStacks => unreachable!("plain layouts encode nothing"),
            Layout::Fp8Tensor => fp8(&[1]),
            Layout::Fp8Row => fp8(&[rows, 1]),
            Layout::Fp8Block => fp8(&[rows.div_ceil(128), cols.div_ceil(128)]),
            Layout::Nvfp4Divisor => nvfp4("weight_packed", "weight_global_scale", &[1]),
            Layout::Nvfp4Multiplier => nvfp4("weight", "weight_scale_2", &[]),
            Layout::Int4 => vec![
                at("weight_packed", Dtype::I32, &[rows, cols / 8]),
                at("weight_scale", Dtype::Bf16, &[rows, cols / 32]),
                at("weight_shape", Dtype::I64, &[2]),
            ],
        }
    }

    fn view<'s>(&self, source: &'s Checkpoint) -> Result<TensorView<'s>> {
        let view = match self.from {
            From::Role(role) => source.tensor(role)?,
            From::Expert(layer, index, part) => source.expert(layer, index, part)?,
        };
        Ok(view.expect("it was there when the file was planned"))
    }

    /// Writes its tensors; what was encoded.
    fn write(
        &self,
        view: &TensorView<'_>,
        path: &Path,
        layout: Layout,
        body: &mut Body,
        done: &mut u64,
    ) -> Result<Option<Encoded>> {
        let (Some((format, scaling)), true) = (layout.encoding(), self.encoded) else {
            body.write(&self.name, view.bytes)?;
            *done += view.bytes.len() as u64;
            return Ok(None);
        };
        let mut values = vec![0.0; view.rows * view.cols];
        for (row, out) in values.chunks_exact_mut(view.cols).enumerate() {
            decode_row(view, row, out);
        }
        let encoded = encode_rows_scaled(format, scaling, &values, view.rows, view.cols).map_err(|e| {
            Error::BadWrite { path: path.to_owned(), tensor: self.name.clone(), what: e.to_string() }
        })?;
        let scales = beside(&encoded, layout);
        let parts = std::iter::once(&encoded.bytes).chain(&scales);
        for ((name, _, _), bytes) in self.tensors(layout).iter().zip(parts) {
            body.write(name, bytes)?;
            *done += bytes.len() as u64;
        }
        Ok(Some(encoded))
    }
}

/// The bytes of the tensors that lie beside the codes.
fn beside(encoded: &Encoded, layout: Layout) -> Vec<Vec<u8>> {
    let bf16s = |values: &[f32]| -> Vec<u8> {
        // Exact: the encoder rounds FP8 scales to bf16.
        values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()
    };
    match &encoded.scales {
        EncodedScales::None => Vec::new(),
        EncodedScales::Tensor(scale) => vec![bf16s(&[*scale])],
        EncodedScales::Row(scales) | EncodedScales::Block128(scales) => vec![bf16s(scales)],
        EncodedScales::Nvfp4 { blocks, tensor } => {
            let stored = if layout == Layout::Nvfp4Divisor { 1.0 / tensor } else { *tensor };
            vec![blocks.clone(), stored.to_le_bytes().to_vec()]
        }
        EncodedScales::Group32Bf16(scales) => {
            let shape = [encoded.rows as i64, encoded.cols as i64];
            vec![scales.clone(), shape.iter().flat_map(|n| n.to_le_bytes()).collect()]
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

fn plain_dtype(format: Format) -> Option<Dtype> {
    match format {
        Format::F32 => Some(Dtype::F32),
        Format::F16 => Some(Dtype::F16),
        Format::Bf16 => Some(Dtype::Bf16),
        _ => None,
    }
}
