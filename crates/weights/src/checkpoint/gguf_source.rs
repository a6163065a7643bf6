//! A GGUF checkpoint by role: every tensor sorted, nothing read but headers and, with a view, its scale.
//!
//! A matrix of type NVFP4 may have a scale beside it, `blk.N.ffn_down.scale` F32 `{1}`, and a stack of experts one for
//! each, `blk.N.ffn_gate_up_exps.scale` `{experts}`: value = decoded code * scale. For `ffn_down_exps` that name is the
//! experts' own scale, which multiplies their outputs and so is the same number in another place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lapidary_formats::fp4::E2M1_MAX;
use lapidary_formats::fp8::E4M3_MAX;
use lapidary_formats::{Format, Scales, TensorView};

use super::source::{Source, Stored};
use super::{Ignored, Kind};
use crate::gguf::{File, GgufError, TensorInfo};
use crate::names::{Class, LayerRole, Role, Slot, classify_gguf};
use crate::{Error, FileMap, Result};

/// The text tensors of a GGUF checkpoint.
#[derive(Debug)]
pub(super) struct GgufSource {
    file: Arc<File>,
    tensors: BTreeMap<Role, Tensor>,
    ignored: Ignored,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    /// Slowest first, the other way round than in the file.
    shape: Vec<usize>,
    format: Format,
    /// Codes and scales.
    bytes: u64,
    /// The name of the scale beside it.
    scale: Option<String>,
}

impl GgufSource {
    /// Sorts the tensors and looks at the types of those that matter.
    pub fn new(file: Arc<File>) -> Result<GgufSource> {
        refuse_other_kinds(&file)?;
        let mut source =
            GgufSource { file: file.clone(), tensors: BTreeMap::new(), ignored: Ignored::default() };
        let mut scales = Vec::new();
        for info in file.tensors() {
            let place = || source.place(&info.name);
            match classify_gguf(&info.name) {
                Class::Text(role, Slot::Weight) => {
                    let Some(format) = info.kind.format() else {
                        let (tensor, kind) = (info.name.clone(), info.kind.to_string());
                        return Err(GgufError::UnsupportedType { tensor, kind }.in_file(place()).into());
                    };
                    let tensor = Tensor {
                        name: info.name.clone(),
                        shape: info.dims.iter().rev().map(|&d| d as usize).collect(),
                        format,
                        bytes: info.bytes.expect("every format has a size"),
                        scale: None,
                    };
                    // A role has one name and a name one tensor, so nothing was there.
                    source.tensors.insert(role, tensor);
                }
                Class::Text(role, Slot::Scale) => scales.push((role, info)),
                // A scale for activations, which are not quantised with it.
                Class::Text(..) => {}
                Class::Other(modality) => source.ignored.count(modality, info.bytes.unwrap_or(0)),
                Class::Adapter => return Err(not_yet(place(), "LoRA adapters are", &info.name)),
                Class::Drafter | Class::Scheme(_) | Class::Unknown => {
                    let architecture = architecture(&file)?.unwrap_or("missing");
                    let what =
                        format!("no Gemma text model has it; the file's architecture is {architecture}");
                    return Err(Error::UnknownTensor { path: place(), tensor: info.name.clone(), what });
                }
            }
        }
        for (role, scale) in scales {
            source.attach_scale(role, scale)?;
        }
        source.refuse_two_expert_layouts()?;
        Ok(source)
    }

    fn place(&self, name: &str) -> PathBuf {
        self.file.path_of(name).expect("the tensor is one of the file").to_owned()
    }

    fn attach_scale(&mut self, role: Role, scale: &TensorInfo) -> Result<()> {
        let path = self.place(&scale.name);
        let Some(matrix) = self.tensors.get_mut(&role) else {
            let stem = scale.name.trim_end_matches(".scale");
            let tensor = format!("{stem}.weight (the file has {})", scale.name);
            return Err(Error::MissingTensor { path, tensor });
        };
        let tensor = scale.name.clone();
        if matrix.format != Format::GgufNvfp4 {
            let what = format!("{} is {} and takes no scale; only NVFP4 does", matrix.name, matrix.format);
            return Err(Error::UnknownTensor { path, tensor, what });
        }
        if scale.kind.format() != Some(Format::F32) {
            return Err(Error::WrongDtype {
                path,
                tensor,
                expected: "F32".into(),
                found: scale.kind.to_string(),
            });
        }
        let (values, stacked) = (scale.elements(), matrix.shape.len() == 3);
        if scale.dims.len() > 1 || !(values == 1 || stacked && values == matrix.shape[0] as u64) {
            let expected =
                if stacked { format!("{{1}} or {{{}}}", matrix.shape[0]) } else { "{1}".to_owned() };
            return Err(Error::WrongShape { path, tensor, expected, found: format!("{:?}", scale.dims) });
        }
        matrix.bytes += scale.bytes.expect("F32 has a size");
        matrix.scale = Some(tensor);
        Ok(())
    }

    /// One layer stores its experts' gate and up rows in one way.
    fn refuse_two_expert_layouts(&self) -> Result<()> {
        for (role, fused) in &self.tensors {
            let Role::Layer(layer, LayerRole::ExpertsGateUp) = *role else { continue };
            for part in [LayerRole::ExpertsGate, LayerRole::ExpertsUp] {
                if let Some(part) = self.tensors.get(&Role::Layer(layer, part)) {
                    return Err(Error::Duplicate {
                        path: self.place(&part.name),
                        tensor: part.name.clone(),
                        other_path: self.place(&fused.name),
                        other: fused.name.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    /// A tensor's codes without the scale beside them, and that scale's values.
    fn parts(&self, role: Role) -> Result<(TensorView<'_>, Vec<f32>)> {
        let tensor = &self.tensors[&role];
        let (&cols, leading) = tensor.shape.split_last().unwrap_or((&1, &[]));
        let codes = TensorView {
            name: tensor.name.clone(),
            rows: leading.iter().product(),
            cols,
            format: tensor.format,
            bytes: self.file.bytes(&tensor.name)?,
            scales: Scales::None,
        };
        Ok((codes, self.scale_values(tensor)?))
    }

    /// The values of the scale beside a tensor, checked: none, one, or one for each matrix of a stack.
    fn scale_values(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let Some(name) = &tensor.scale else { return Ok(Vec::new()) };
        let values: Vec<f32> =
            self.file.bytes(name)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let usable = |v: f32| v > 0.0 && (v * E4M3_MAX * E2M1_MAX).is_finite();
        match values.iter().position(|&v| !usable(v)) {
            None => Ok(values),
            Some(index) => Err(Error::BadScale {
                path: self.place(name),
                tensor: name.clone(),
                index,
                found: values[index],
                expected: "positive, with weights that are finite",
            }),
        }
    }
}

impl Source for GgufSource {
    fn kind(&self) -> Kind {
        Kind::Gguf
    }

    fn files(&self) -> Vec<&Path> {
        self.file.paths().collect()
    }

    fn maps(&self) -> Vec<FileMap> {
        self.file.maps().collect()
    }

    fn release(&self, bytes: &[u8]) {
        self.file.release(bytes);
    }

    fn total_bytes(&self) -> u64 {
        self.file.file_bytes()
    }

    fn ignored(&self) -> Ignored {
        self.ignored
    }

    fn roles(&self) -> Box<dyn Iterator<Item = Role> + '_> {
        Box::new(self.tensors.keys().copied())
    }

    fn stored(&self, role: Role) -> Option<Stored<'_>> {
        let tensor = self.tensors.get(&role)?;
        Some(Stored {
            file: self.file.path_of(&tensor.name).expect("the tensor is one of the file"),
            name: &tensor.name,
            shape: &tensor.shape,
            format: tensor.format,
            bytes: tensor.bytes,
        })
    }

    /// Of a stack with a scale for each expert, the scales of the view are those of its rows.
    fn view(&self, role: Role) -> Result<TensorView<'_>> {
        let (mut view, scales) = self.parts(role)?;
        view.scales = match scales[..] {
            [] => Scales::None,
            [one] => Scales::Tensor(one),
            [..] => {
                let rows_each = view.rows / scales.len();
                Scales::Row(scales.iter().flat_map(|&s| std::iter::repeat_n(s, rows_each)).collect())
            }
        };
        Ok(view)
    }

    fn slab(&self, role: Role, index: usize, rows: usize) -> Result<TensorView<'_>> {
        let (stack, scales) = self.parts(role)?;
        let mut slab = stack.slice_rows(index * rows, rows);
        slab.scales = match scales[..] {
            [] => Scales::None,
            [one] => Scales::Tensor(one),
            [..] => Scales::Tensor(scales[index]),
        };
        Ok(slab)
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

fn architecture(file: &File) -> Result<Option<&str>> {
    Ok(file.metadata().get("general.architecture")?)
}

/// Files that belong beside a model and are published as GGUF too.
fn refuse_other_kinds(file: &File) -> Result<()> {
    let path = file.paths().next().expect("there is at least one file").to_owned();
    let kind = file.metadata().get::<&str>("general.type")?.unwrap_or("model");
    let architecture = architecture(file)?.unwrap_or_default();
    let what = match (kind, architecture) {
        ("adapter", _) => "LoRA adapters are".to_owned(),
        ("mmproj", _) | (_, "clip") => "vision and audio projectors (mmproj) are".to_owned(),
        ("imatrix", _) => "importance matrices are".to_owned(),
        (_, other) if other.contains("assistant") => format!("{other} drafter checkpoints are"),
        _ => return Ok(()),
    };
    let remedy = "open the model that it belongs to".to_owned();
    Err(Error::NotSupported { path, what, remedy })
}

fn not_yet(path: PathBuf, what: &str, tensor: &str) -> Error {
    Error::NotSupported {
        path,
        what: what.to_owned(),
        remedy: format!("it holds {tensor}; open the model that it belongs to"),
    }
}
