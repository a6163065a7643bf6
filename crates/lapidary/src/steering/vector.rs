//! Control vectors and their files.
//!
//! In both kinds of file tensor `direction.N` is the direction for layer N, counted from 0, and applies to the
//! residual stream after that layer. GGUF files are those of llama.cpp: architecture `controlvector`, float32
//! tensors, no layer 0. Safetensors files may hold any layer, in F32, F16 or BF16.

use std::collections::BTreeMap;
use std::path::Path;

use lapidary_formats::decode_row;
use lapidary_model::Config;
use lapidary_weights::gguf::{self, GgmlType, Version, Writer};
use lapidary_weights::safetensors::{self, Dtype, NewTensor};

use super::error::{Result, SteeringError};

const F32: GgmlType = GgmlType(0);

/// `general.architecture` of a GGUF file with a control vector.
const ARCHITECTURE: &str = "controlvector";
/// Our own key, in files of either kind, for the number of layers of the model that a vector was made on.
const MODEL_LAYERS: &str = "controlvector.model_layers";

/// Directions in the residual stream, by layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlVector {
    /// What messages call it: the file's path or name.
    pub name: String,
    /// By layer; all equally wide, finite and not zero.
    pub directions: BTreeMap<usize, Vec<f32>>,
    /// Layers of the model that it was made on, where the file says so.
    pub model_layers: Option<usize>,
    /// The family of models that it was made on, where the file says so.
    pub model_hint: Option<String>,
}

impl ControlVector {
    /// A vector of these directions.
    ///
    /// # Errors
    /// None at all, of unequal widths, zero, or not finite.
    pub fn new(name: impl Into<String>, directions: BTreeMap<usize, Vec<f32>>) -> Result<ControlVector> {
        let name = name.into();
        let path = Path::new(&name).to_owned();
        let Some(width) = directions.values().next().map(Vec::len) else {
            return Err(SteeringError::NotAVector { path, problem: "it has no tensor direction.N".into() });
        };
        for (layer, values) in &directions {
            let tensor = || format!("direction.{layer}");
            let bad =
                |problem: String| SteeringError::Direction { path: path.clone(), tensor: tensor(), problem };
            if values.len() != width {
                return Err(bad(format!("{} values, others have {width}", values.len())));
            }
            if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                return Err(bad(format!("value {i} is {}", values[i])));
            }
            if values.iter().all(|&v| v == 0.0) {
                return Err(bad("every value is zero: it points nowhere".to_owned()));
            }
        }
        Ok(ControlVector { name, directions, model_layers: None, model_hint: None })
    }

    /// Reads a `.gguf` or `.safetensors` file, told apart by its first bytes.
    ///
    /// # Errors
    /// A file that cannot be read or is something else; a direction that is zero, not finite or of another width
    /// than the others.
    pub fn read(path: &Path) -> Result<ControlVector> {
        let mut magic = [0; 4];
        let io = |source| lapidary_weights::Error::Io { path: path.to_owned(), source };
        let mut file = std::fs::File::open(path).map_err(io)?;
        let is_gguf = std::io::Read::read_exact(&mut file, &mut magic).is_ok() && &magic == b"GGUF";
        if is_gguf { ControlVector::from_gguf(path) } else { ControlVector::from_safetensors(path) }
    }

    fn from_gguf(path: &Path) -> Result<ControlVector> {
        let file = gguf::File::open(path)?;
        let refuse = |problem: String| SteeringError::NotAVector { path: path.to_owned(), problem };
        match file.metadata().get::<&str>("general.architecture")? {
            Some(ARCHITECTURE) => {}
            Some(other) => {
                return Err(refuse(format!("its architecture is {other:?}, not {ARCHITECTURE:?}")));
            }
            None => return Err(refuse("it names no general.architecture".to_owned())),
        }
        let mut directions = BTreeMap::new();
        for info in file.tensors() {
            let layer = layer_of(path, &info.name)?;
            let bad = |problem: String| SteeringError::Direction {
                path: path.to_owned(),
                tensor: info.name.clone(),
                problem,
            };
            if layer == 0 {
                return Err(bad("GGUF control vectors count layers from 1; llama.cpp refuses it too".into()));
            }
            if info.kind != F32 {
                return Err(bad(format!("its type is {}; expected F32", info.kind)));
            }
            let view = file.view(&info.name)?;
            if view.rows != 1 {
                return Err(bad(format!("its shape is {:?}; expected one dimension", info.dims)));
            }
            let mut values = vec![0.0; view.cols];
            decode_row(&view, 0, &mut values);
            directions.insert(layer, values);
        }
        if let Some(count) = file.metadata().get::<u32>("controlvector.layer_count")?
            && (count as usize) < directions.len()
        {
            let found = directions.len();
            return Err(refuse(format!(
                "controlvector.layer_count is {count}, but it has {found} directions"
            )));
        }
        let mut vector = ControlVector::new(path.display().to_string(), directions)?;
        vector.model_layers = file.metadata().get::<u32>(MODEL_LAYERS)?.map(|n| n as usize);
        vector.model_hint = file.metadata().get::<&str>("controlvector.model_hint")?.map(str::to_owned);
        Ok(vector)
    }

    fn from_safetensors(path: &Path) -> Result<ControlVector> {
        let file = safetensors::File::open(path)?;
        let mut directions = BTreeMap::new();
        for entry in file.entries() {
            let layer = layer_of(path, &entry.name)?;
            let bytes = file.bytes(entry);
            let half = |bits: u16, dtype| match dtype {
                Dtype::Bf16 => f32::from_bits(u32::from(bits) << 16),
                _ => half::f16::from_bits(bits).to_f32(),
            };
            let values = match (entry.dtype, entry.shape.len()) {
                (Dtype::F32, 1) => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                (dtype @ (Dtype::F16 | Dtype::Bf16), 1) => {
                    bytes.as_chunks::<2>().0.iter().map(|b| half(u16::from_le_bytes(*b), dtype)).collect()
                }
                (dtype, _) => {
                    return Err(SteeringError::Direction {
                        path: path.to_owned(),
                        tensor: entry.name.clone(),
                        problem: format!(
                            "{dtype} of shape {:?}; expected F32, F16 or BF16 of shape [H]",
                            entry.shape
                        ),
                    });
                }
            };
            directions.insert(layer, values);
        }
        let mut vector = ControlVector::new(path.display().to_string(), directions)?;
        vector.model_layers = match file.metadata().get(MODEL_LAYERS) {
            None => None,
            Some(text) => Some(text.parse().map_err(|_| SteeringError::NotAVector {
                path: path.to_owned(),
                problem: format!("its metadata {MODEL_LAYERS} is {text:?}; expected a number"),
            })?),
        };
        vector.model_hint = file.metadata().get("controlvector.model_hint").cloned();
        Ok(vector)
    }

    /// Writes a file: GGUF for a path that ends in `.gguf`, safetensors else.
    ///
    /// # Errors
    /// `LayerZero` for a GGUF file of a vector with layer 0, a file that cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        match path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
            true => self.write_gguf(path),
            false => self.write_safetensors(path),
        }
    }

    fn write_gguf(&self, path: &Path) -> Result<()> {
        if self.directions.contains_key(&0) {
            return Err(SteeringError::LayerZero);
        }
        let mut writer = Writer::new(Version::V3);
        writer.set("general.architecture", ARCHITECTURE)?;
        writer.set("controlvector.model_hint", self.model_hint.as_deref().unwrap_or_default())?;
        writer.set("controlvector.layer_count", self.directions.len() as u32)?;
        if let Some(layers) = self.model_layers {
            writer.set(MODEL_LAYERS, layers as u32)?;
        }
        for (layer, values) in &self.directions {
            writer.tensor(&direction(*layer), &[values.len() as u64], F32)?;
        }
        let mut body = writer.create(path)?;
        for (layer, values) in &self.directions {
            body.write(&direction(*layer), &bytes(values))?;
        }
        body.finish()?;
        Ok(())
    }

    fn write_safetensors(&self, path: &Path) -> Result<()> {
        let data: Vec<Vec<u8>> = self.directions.values().map(|values| bytes(values)).collect();
        let tensors: Vec<NewTensor<'_>> = self
            .directions
            .iter()
            .zip(&data)
            .map(|((&layer, values), bytes)| NewTensor {
                name: direction(layer),
                dtype: Dtype::F32,
                shape: vec![values.len()],
                bytes,
            })
            .collect();
        let mut metadata = BTreeMap::new();
        metadata.extend(self.model_layers.map(|n| (MODEL_LAYERS.to_owned(), n.to_string())));
        metadata.extend(self.model_hint.clone().map(|hint| ("controlvector.model_hint".to_owned(), hint)));
        Ok(safetensors::write(path, &tensors, &metadata)?)
    }

    /// Values of a direction.
    pub fn width(&self) -> usize {
        self.directions.values().next().map_or(0, Vec::len)
    }

    /// Checks that it is one for this model.
    ///
    /// # Errors
    /// `Width`, `LayerCount`, `Layer`.
    pub fn check(&self, config: &Config) -> Result<()> {
        let vector = || self.name.clone();
        let layers = config.layers.len();
        if self.width() != config.hidden {
            return Err(SteeringError::Width {
                vector: vector(),
                found: self.width(),
                expected: config.hidden,
            });
        }
        if let Some(found) = self.model_layers.filter(|&found| found != layers) {
            return Err(SteeringError::LayerCount { vector: vector(), found, expected: layers });
        }
        match self.directions.keys().find(|&&layer| layer >= layers) {
            Some(&layer) => Err(SteeringError::Layer { vector: vector(), layer, last: layers - 1 }),
            None => Ok(()),
        }
    }
}

fn direction(layer: usize) -> String {
    format!("direction.{layer}")
}

/// The layer that a tensor's name stands for.
fn layer_of(path: &Path, name: &str) -> Result<usize> {
    let number = name.strip_prefix("direction.").filter(|n| n.len() <= 6 && !n.starts_with('+'));
    number.and_then(|n| n.parse().ok()).filter(|layer| direction(*layer) == name).ok_or_else(|| {
        SteeringError::NotAVector {
            path: path.to_owned(),
            problem: format!("it holds a tensor {name:?}; expected direction.N, N a layer's number"),
        }
    })
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
