//! The activations of a prompt in a file: what a model is held against.
//!
//! A safetensors file with `input_ids [T]`, `embed [T, H]`, `hidden.N [T, H]` for every layer and `logits [T, V]`, as
//! `lapidary dump --layers all --also embed` writes it, or `scripts/reference/dump.py` from the published implementation. Its
//! metadata may say which formats the weights were in; without it they count as bf16.

use std::collections::BTreeMap;
use std::path::Path;

use lapidary_engine::{Prompt, Stepper};
use lapidary_formats::{Format, decode_row, encode_rows};
use lapidary_weights::safetensors::{Dtype, NewTensor, write};
use lapidary_weights::{Checkpoint, LayerRole, Role};
use serde_json::{Value, json};

use super::VerifyError;
use crate::capture::{Captured, Values, Wanted, capture};
use crate::convert::EncodingError;
use crate::eval::DumpFile;

/// The metadata key that holds the formats.
const FORMATS: &str = "lapidary.formats";
/// The metadata key that holds program and arithmetic.
const MADE_BY: &str = "lapidary.made_by";

/// The coarsest format of a model's matrices, by layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Formats {
    /// Of the embedding.
    pub embed: Format,
    /// Of the output head.
    pub head: Format,
    /// Of each layer.
    pub layers: Vec<Format>,
}

impl Formats {
    /// Those of a checkpoint with `layers` layers.
    pub fn of(checkpoint: &Checkpoint, layers: usize) -> Formats {
        let one = |role| checkpoint.stored(role).map(|s| s.format);
        let embed = one(Role::Embed).unwrap_or(Format::Bf16);
        let layer = |n: usize| {
            let of_layer = checkpoint.roles().filter(|r| matches!(r, Role::Layer(l, _) if *l as usize == n));
            let matrices = of_layer.filter(|r| !matches!(r, Role::Layer(_, LayerRole::Router)));
            let stored = matrices.filter_map(|r| checkpoint.stored(r)).filter(|s| s.shape.len() > 1);
            let formats = stored.map(|s| s.format);
            formats.max_by(|a, b| typical_loss(*a).total_cmp(&typical_loss(*b))).unwrap_or(Format::F32)
        };
        Formats { embed, head: one(Role::Head).unwrap_or(embed), layers: (0..layers).map(layer).collect() }
    }

    fn json(&self) -> Value {
        let name = |f: &Format| f.to_string();
        let layers: Vec<String> = self.layers.iter().map(name).collect();
        json!({"embed": name(&self.embed), "head": name(&self.head), "layers": layers})
    }

    fn from_json(value: &Value, layers: usize) -> Option<Formats> {
        let format = |v: &Value| Format::ALL.into_iter().find(|f| Some(f.to_string().as_str()) == v.as_str());
        let list = value["layers"].as_array()?.iter().map(format).collect::<Option<Vec<_>>>()?;
        (list.len() == layers).then_some(())?;
        Some(Formats { embed: format(&value["embed"])?, head: format(&value["head"])?, layers: list })
    }
}

/// The relative error of a format on values that are spread like weights: measured on fixed, normally distributed ones.
pub fn typical_loss(format: Format) -> f64 {
    const ROWS: usize = 4;
    const COLS: usize = 512;
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    // The sum of twelve uniform numbers is as good as normal here.
    let values: Vec<f32> = (0..ROWS * COLS)
        .map(|_| (0..12).map(|_| uniform()).sum::<f64>() as f32 - 6.0)
        .map(|v| 0.02 * v)
        .collect();
    let Ok(encoded) = encode_rows(format, &values, ROWS, COLS) else { return 0.0 };
    let (view, mut back, mut loss) = (encoded.view("typical"), vec![0.0; COLS], EncodingError::default());
    for (row, values) in values.chunks_exact(COLS).enumerate() {
        decode_row(&view, row, &mut back);
        loss.add(values, &back);
    }
    loss.relative_rms()
}

/// A prompt's activations.
#[derive(Clone, Debug, PartialEq)]
pub struct Dump {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Scaled embeddings, `[T, H]`.
    pub embed: Vec<f32>,
    /// By layer: its output, `[T, H]`.
    pub hidden: Vec<Vec<f32>>,
    /// `[T, V]`, after the softcap.
    pub logits: Vec<f32>,
    /// Formats of the weights that it was made with.
    pub formats: Formats,
    /// Program and arithmetic that it was made by, where the file says so.
    pub made_by: Option<String>,
}

impl Dump {
    /// Runs `tokens` and takes everything down. The single sequence is reset.
    ///
    /// # Errors
    /// What the engine refuses.
    pub fn make(stepper: &mut Stepper, tokens: &[u32], formats: Formats) -> Result<Dump, VerifyError> {
        let layers = stepper.model().layers.len();
        let wanted = Wanted { layers: (0..layers).collect(), embed: true, ..Wanted::default() };
        let captured = capture(stepper, &Prompt::from(tokens), &wanted)?;
        stepper.reset();
        let take = |name: &str| match captured.iter().find(|c| c.name == name) {
            Some(Captured { values: Values::F32(v), .. }) => v.clone(),
            _ => unreachable!("{name} was captured"),
        };
        let hidden = (0..layers).map(|n| take(&format!("hidden.{n}"))).collect();
        Ok(Dump {
            tokens: tokens.to_vec(),
            embed: take("embed"),
            hidden,
            logits: take("logits"),
            formats,
            made_by: Some(made_by(stepper)),
        })
    }

    /// Reads a file for a model of `layers` layers, `width` wide, with `vocab` tokens.
    ///
    /// # Errors
    /// A file that cannot be read, or lacks a tensor, or is of another model's shape; values that are not finite.
    pub fn read(path: &Path, layers: usize, width: usize, vocab: usize) -> Result<Dump, VerifyError> {
        let file = DumpFile::open(path, None)?;
        let bad = |tensor: &str, problem: String| VerifyError::Dump {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            problem,
        };
        let tokens = file.ids().to_vec();
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(bad("input_ids", format!("holds {id}, the vocabulary has {vocab}")));
        }
        let floats = |name: &str, width: usize| -> Result<Vec<f32>, VerifyError> {
            let view = file.matrix(name)?;
            if view.cols != width {
                return Err(bad(name, format!("is {} wide, the model {width}", view.cols)));
            }
            let mut values = vec![0.0; view.rows * width];
            values.chunks_exact_mut(width).enumerate().for_each(|(row, out)| decode_row(&view, row, out));
            match values.iter().position(|v| !v.is_finite()) {
                Some(i) => Err(bad(name, format!("value {i} is {}", values[i]))),
                None => Ok(values),
            }
        };
        let hidden =
            (0..layers).map(|n| floats(&format!("hidden.{n}"), width)).collect::<Result<Vec<_>, _>>()?;
        let more = format!("hidden.{layers}");
        if file.has(&more) {
            return Err(bad(&more, format!("is there, but the model has {layers} layers")));
        }
        let formats = match file.metadata().get(FORMATS) {
            None => Formats { embed: Format::Bf16, head: Format::Bf16, layers: vec![Format::Bf16; layers] },
            Some(text) => serde_json::from_str(text)
                .ok()
                .and_then(|value| Formats::from_json(&value, layers))
                .ok_or_else(|| bad(FORMATS, "is no list of formats for these layers".to_owned()))?,
        };
        Ok(Dump {
            made_by: file.metadata().get(MADE_BY).cloned(),
            embed: floats("embed", width)?,
            logits: floats("logits", vocab)?,
            tokens,
            hidden,
            formats,
        })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), VerifyError> {
        let rows = self.tokens.len();
        let ids: Vec<u8> = self.tokens.iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
        let mut list: Vec<(String, Vec<u8>)> = vec![("embed".into(), bytes(&self.embed))];
        list.extend(self.hidden.iter().enumerate().map(|(n, v)| (format!("hidden.{n}"), bytes(v))));
        list.push(("logits".into(), bytes(&self.logits)));
        let mut tensors =
            vec![NewTensor { name: "input_ids".into(), dtype: Dtype::I64, shape: vec![rows], bytes: &ids }];
        tensors.extend(list.iter().map(|(name, bytes)| NewTensor {
            name: name.clone(),
            dtype: Dtype::F32,
            shape: vec![rows, bytes.len() / 4 / rows],
            bytes,
        }));
        Ok(write(path, &tensors, &metadata(&self.formats, self.made_by.as_deref()))?)
    }
}

/// What a dump's file says of weights and program.
pub fn metadata(formats: &Formats, made_by: Option<&str>) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::from([(FORMATS.to_owned(), formats.json().to_string())]);
    metadata.extend(made_by.map(|by| (MADE_BY.to_owned(), by.to_owned())));
    metadata
}

/// Program and arithmetic of a stepper: where they are the same, so is every bit.
pub fn made_by(stepper: &Stepper) -> String {
    let r = stepper.runner().report();
    format!("lapidary {} {} {} {}", env!("CARGO_PKG_VERSION"), r.backend, r.mode, r.level)
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
