//! A safetensors checkpoint by role: every tensor sorted, every matrix's layout settled, nothing read but headers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lapidary_formats::TensorView;
use serde_json::Value;

use super::notes::Notes;
use super::source::{Source, Stored};
use super::{Ignored, Kind};
use crate::names::{Class, ExpertPart, LayerRole, Role, classify_safetensors};
use crate::quant::{Matrix, Parts};
use crate::safetensors::{Shards, TensorId};
use crate::{Error, FileMap, Result};

/// The text tensors of a safetensors checkpoint.
#[derive(Debug)]
pub(super) struct SafetensorsSource {
    pub shards: Shards,
    pub matrices: BTreeMap<Role, Matrix>,
    ignored: Ignored,
    notes: Notes,
}

impl SafetensorsSource {
    /// Sorts the tensors and settles each matrix's layout.
    pub fn new(shards: Shards, config: &Value) -> Result<SafetensorsSource> {
        let classes: Vec<(TensorId, Class)> =
            shards.ids().map(|id| (id, classify_safetensors(&shards.entry(id).name))).collect();
        // First what the whole file is, since a drafter or an adapter also has names that are unknown here.
        for (id, class) in &classes {
            let what = match class {
                Class::Drafter => "gemma4_assistant drafter checkpoints are",
                Class::Adapter => "LoRA adapters are",
                _ => continue,
            };
            return Err(not_yet(&shards, *id, what));
        }
        let mut parts: BTreeMap<Role, Parts> = BTreeMap::new();
        let mut ignored = Ignored::default();
        for (id, class) in classes {
            let (path, tensor) = place(&shards, id);
            match class {
                Class::Text(role, slot) => {
                    if let Some(other) = parts.entry(role).or_default().set(slot, id) {
                        let (other_path, other) = place(&shards, other);
                        return Err(Error::Duplicate { path, tensor, other_path, other });
                    }
                }
                Class::Other(modality) => ignored.count(modality, shards.bytes_len(id)),
                Class::Scheme(what) => {
                    let remedy = "use a checkpoint in BF16, FP8, NVFP4 or symmetric INT4".to_owned();
                    return Err(Error::NotSupported {
                        path,
                        what: format!("tensor {tensor}: {what} is"),
                        remedy,
                    });
                }
                Class::Unknown => {
                    let what = "no Gemma text model has it; the file is damaged or made for another model"
                        .to_owned();
                    return Err(Error::UnknownTensor { path, tensor, what });
                }
                Class::Drafter | Class::Adapter => unreachable!("refused above"),
            }
        }
        let mut matrices = BTreeMap::new();
        for (role, parts) in &parts {
            matrices.insert(*role, Matrix::resolve(parts, &shards)?);
        }
        let mut source = SafetensorsSource { shards, matrices, ignored, notes: Notes::default() };
        source.refuse_two_expert_layouts()?;
        source.notes = Notes::of(&source, config);
        Ok(source)
    }

    /// One layer stores its experts in one way.
    fn refuse_two_expert_layouts(&self) -> Result<()> {
        let mut seen: BTreeMap<(u32, ExpertPart), (bool, TensorId)> = BTreeMap::new();
        for (role, matrix) in &self.matrices {
            let Role::Layer(layer, role) = *role else { continue };
            let (parts, each): (&[ExpertPart], bool) = match &role {
                LayerRole::ExpertsGateUp => (&[ExpertPart::Gate, ExpertPart::Up], false),
                LayerRole::ExpertsGate => (&[ExpertPart::Gate], false),
                LayerRole::ExpertsUp => (&[ExpertPart::Up], false),
                LayerRole::ExpertsDown => (&[ExpertPart::Down], false),
                LayerRole::Expert { part, .. } => (std::slice::from_ref(part), true),
                _ => continue,
            };
            for part in parts {
                match seen.insert((layer, *part), (each, matrix.codes)) {
                    Some((other_each, other)) if !(each && other_each) => {
                        let (path, tensor) = place(&self.shards, matrix.codes);
                        let (other_path, other) = place(&self.shards, other);
                        return Err(Error::Duplicate { path, tensor, other_path, other });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// For each layer and part, the experts without an activation scale, where other experts have one.
    pub fn experts_without_input_scale(&self) -> BTreeMap<(u32, ExpertPart), BTreeSet<u32>> {
        let mut with = BTreeSet::new();
        let mut without: BTreeMap<_, BTreeSet<u32>> = BTreeMap::new();
        for (role, matrix) in &self.matrices {
            let Role::Layer(layer, LayerRole::Expert { index, part }) = *role else { continue };
            match matrix.input_scale {
                Some(_) => {
                    with.insert((layer, part));
                }
                None => {
                    without.entry((layer, part)).or_default().insert(index);
                }
            }
        }
        without.retain(|key, _| with.contains(key));
        without
    }
}

impl Source for SafetensorsSource {
    fn kind(&self) -> Kind {
        Kind::Safetensors
    }

    fn files(&self) -> Vec<&Path> {
        self.shards.files().iter().map(|f| f.path()).collect()
    }

    fn maps(&self) -> Vec<FileMap> {
        self.shards.files().iter().map(|f| f.map()).collect()
    }

    fn release(&self, bytes: &[u8]) {
        self.shards.files().iter().any(|f| f.release(bytes));
    }

    fn total_bytes(&self) -> u64 {
        self.shards.files().iter().map(|f| f.len()).sum()
    }

    fn ignored(&self) -> Ignored {
        self.ignored
    }

    fn roles(&self) -> Box<dyn Iterator<Item = Role> + '_> {
        Box::new(self.matrices.keys().copied())
    }

    fn stored(&self, role: Role) -> Option<Stored<'_>> {
        let matrix = self.matrices.get(&role)?;
        Some(Stored {
            file: self.shards.file(matrix.codes).path(),
            name: &self.shards.entry(matrix.codes).name,
            shape: &matrix.shape,
            format: matrix.format,
            bytes: matrix.bytes,
        })
    }

    fn view(&self, role: Role) -> Result<TensorView<'_>> {
        let matrix = &self.matrices[&role];
        self.notes.look_at_input_scale(&self.shards, role, matrix);
        matrix.view(&self.shards)
    }

    fn notes(&self) -> Vec<String> {
        self.notes.lines()
    }
}

fn place(shards: &Shards, id: TensorId) -> (PathBuf, String) {
    (shards.file(id).path().to_owned(), shards.entry(id).name.clone())
}

fn not_yet(shards: &Shards, id: TensorId, what: &str) -> Error {
    let (path, tensor) = place(shards, id);
    Error::NotSupported {
        path,
        what: what.to_owned(),
        remedy: format!("it holds {tensor}; open the model that it belongs to"),
    }
}
