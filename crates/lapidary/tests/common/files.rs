//! Checkpoints with something changed: a tensor more, a tensor less, other bytes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lapidary::convert::{ConvertOptions, to_gguf};
use lapidary_formats::{Format, decode_row};
use lapidary_reference::Golden;
use lapidary_weights::gguf::{self, Version, Writer};
use lapidary_weights::names::{Spelling, spell};
use lapidary_weights::safetensors::{Dtype, NewTensor, write};
use lapidary_weights::{Checkpoint, Role};

/// A tensor of a safetensors file that owns its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn f32s(shape: &[usize], values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }
}

pub type Tensors = BTreeMap<String, Tensor>;

/// Every text tensor decoded to float32, under the names of composite checkpoints.
pub fn decoded_tensors(checkpoint: &Checkpoint) -> Tensors {
    let roles = checkpoint.roles().filter(|role| *role != Role::RopeFreqs);
    roles
        .map(|role| {
            let view = checkpoint.tensor(role).unwrap().unwrap();
            let mut values = vec![0.0; view.rows * view.cols];
            values.chunks_exact_mut(view.cols).enumerate().for_each(|(r, out)| decode_row(&view, r, out));
            let shape = checkpoint.stored(role).unwrap().shape;
            (spell(role, Spelling::Composite).unwrap(), Tensor::f32s(shape, &values))
        })
        .collect()
}

/// Writes `model.safetensors` beside a copy of `config`.
pub fn save(folder: &Path, config: &Path, tensors: &Tensors) {
    let list: Vec<NewTensor> = tensors
        .iter()
        .map(|(name, t)| NewTensor {
            name: name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            bytes: &t.bytes,
        })
        .collect();
    write(&folder.join("model.safetensors"), &list, &BTreeMap::new()).expect("the file is written");
    std::fs::copy(config, folder.join("config.json")).expect("the config is copied");
}

/// A golden checkpoint as a GGUF file of float32, without a tokenizer.
pub fn golden_gguf(variant: &str, folder: &Path) -> PathBuf {
    let checkpoint = Checkpoint::open(Golden::root().join(variant).join("model.safetensors")).unwrap();
    let out = folder.join("golden.gguf");
    to_gguf(&checkpoint, &out, &ConvertOptions::new(Format::F32)).expect("the file is written");
    out
}

/// Copies a GGUF file, but for what `edit` does with a tensor: its bytes, others, or nothing. `more` are tensors to
/// add, each with the one that it takes its bytes and shape from; `keys` are string keys to add.
pub fn rewritten(
    from: &Path,
    to: &Path,
    edit: impl Fn(&str, &[u8]) -> Option<Vec<u8>>,
    more: &[(&str, &str)],
    keys: &[(&str, &str)],
) {
    let file = gguf::File::open(from).unwrap();
    let mut writer = Writer::new(Version::V3);
    for (key, value) in file.metadata().iter() {
        writer.set(key, value.clone()).unwrap();
    }
    for (key, value) in keys {
        writer.set(key, gguf::Value::from(*value)).unwrap();
    }
    let mut data = Vec::new();
    for tensor in file.tensors() {
        if let Some(bytes) = edit(&tensor.name, file.bytes(&tensor.name).unwrap()) {
            data.push((tensor.name.clone(), tensor, bytes));
        }
    }
    for (name, origin) in more {
        let tensor = file.tensor(origin).unwrap();
        let bytes = edit(name, file.bytes(origin).unwrap()).expect("it is to be added");
        data.push(((*name).to_owned(), tensor, bytes));
    }
    for (name, tensor, _) in &data {
        writer.tensor(name, &tensor.dims, tensor.kind).unwrap();
    }
    let mut body = writer.create(to).unwrap();
    for (name, _, bytes) in &data {
        body.write(name, bytes).unwrap();
    }
    body.finish().unwrap();
}
