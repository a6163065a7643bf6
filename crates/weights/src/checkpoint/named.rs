//! A safetensors checkpoint by role: every tensor sorted, every matrix's layout settled, nothing read but headers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use lapidary_formats::TensorView;

use super::Ignored;
use crate::names::{Class, ExpertPart, LayerRole, Role, classify_safetensors};
use crate::quant::{Matrix, Parts};
use crate::safetensors::{Shards, TensorId};
use crate::{Error, Result};

/// The text tensors of a safetensors checkpoint.
#[derive(Debug)]
pub(super) struct Named {
    pub shards: Shards,
    pub matrices: BTreeMap<Role, Matrix>,
    pub ignored: Ignored,
}

impl Named {
    /// Sorts the tensors and settles each matrix's layout.
    pub fn new(shards: Shards) -> Result<Named> {
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
        let named = Named { shards, matrices, ignored };
        named.refuse_two_expert_layouts()?;
        Ok(named)
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

    /// The view of a role.
    pub fn view(&self, role: Role) -> Result<Option<TensorView<'_>>> {
        self.matrices.get(&role).map(|m| m.view(&self.shards)).transpose()
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

    /// The file and the name of a role's codes.
    pub fn place(&self, matrix: &Matrix) -> (PathBuf, String) {
        place(&self.shards, matrix.codes)
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
