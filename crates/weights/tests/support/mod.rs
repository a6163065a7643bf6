//! Small checkpoints that tests write themselves.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lapidary_weights::safetensors::{Dtype, NewTensor, write};

/// A tensor that owns its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Tensor {
        Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
    }

    /// BF16 with bytes that differ from tensor to tensor and are always finite.
    pub fn bf16(name: &str, shape: &[usize]) -> Tensor {
        let seed = name.bytes().fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)));
        let count: usize = shape.iter().product();
        let bytes = (0..count as u32)
            .flat_map(|i| {
                let x = seed.wrapping_add(i).wrapping_mul(2_654_435_761);
                [(x >> 8) as u8, 0x3c | (x >> 24) as u8 & 0x83]
            })
            .collect();
        Tensor::new(name, Dtype::Bf16, shape, bytes)
    }

    pub fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::new(name, Dtype::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub fn bf16s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
        Tensor::new(name, Dtype::Bf16, shape, bytes)
    }

    /// Bytes that count up from 0, none of them an E4M3 code that is not a number.
    pub fn codes(name: &str, dtype: Dtype, shape: &[usize]) -> Tensor {
        let bytes = dtype.bytes_of(shape).unwrap() as usize;
        Tensor::new(name, dtype, shape, (0..bytes).map(|i| (i * 37 % 113) as u8).collect())
    }
}

pub const CONFIG: &str = r#"{"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}"#;

/// Writes one file of tensors.
pub fn write_file(path: &Path, tensors: &[Tensor]) {
    let borrowed: Vec<NewTensor> = tensors
        .iter()
        .map(|t| NewTensor { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone(), bytes: &t.bytes })
        .collect();
    write(path, &borrowed, &BTreeMap::from([("format".to_owned(), "pt".to_owned())])).unwrap();
}

/// A folder with a `config.json` and one file of tensors.
pub fn folder(tensors: &[Tensor]) -> tempfile::TempDir {
    folder_with(CONFIG, tensors)
}

pub fn folder_with(config: &str, tensors: &[Tensor]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    write_file(&dir.path().join("model.safetensors"), tensors);
    dir
}

/// A file of a header as given and `data` bytes of zero.
pub fn raw_file(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    std::fs::write(path, bytes).unwrap();
}

/// The checkpoints with published layouts that lie in the project.
pub fn golden(variant: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(variant)
}

/// The error's message, with a check that it is one line that names `parts`.
pub fn message<T: std::fmt::Debug>(result: Result<T, lapidary_weights::Error>, parts: &[&str]) -> String {
    let text = result.expect_err("should have been refused").to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    assert!(!text.contains('\n') && !text.ends_with('.'), "{text}");
    text
}
