//! Stored outputs of the published implementation, `tests/goldens/` at the root of the workspace.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

use crate::{Error, Result};

/// One variant's folder: a tiny checkpoint and what it must compute.
///
/// The names of the values, their shapes and their meaning are in `tests/goldens/README.md`.
#[derive(Clone, Debug)]
pub struct Golden {
    folder: PathBuf,
    bytes: Vec<u8>,
}

/// A named value with its shape, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Values<T> {
    /// Sides, the slowest first.
    pub shape: Vec<usize>,
    /// The numbers.
    pub values: Vec<T>,
}

impl<T> Values<T> {
    /// Entry `i` along the first side: a layer of `hidden`, a position of `logits`.
    ///
    /// # Panics
    /// When there is no such entry.
    pub fn at(&self, i: usize) -> &[T] {
        assert!(i < self.shape[0], "entry {i} of {}", self.shape[0]);
        let len = self.values.len() / self.shape[0];
        &self.values[i * len..(i + 1) * len]
    }
}

impl Golden {
    /// The variants with stored outputs.
    pub const VARIANTS: [&str; 5] = ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"];

    /// Opens a variant of this workspace by its folder's name.
    ///
    /// # Errors
    /// When the folder has no readable `golden.safetensors`.
    pub fn variant(name: &str) -> Result<Golden> {
        Golden::open(&Golden::root().join(name))
    }

    /// The folder of all variants: in the workspace that this was built in or, for a binary that was taken to
    /// another machine, in the current directory's workspace.
    pub fn root() -> PathBuf {
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
        if built.is_dir() { built } else { PathBuf::from("tests/goldens") }
    }

    /// Opens a variant's folder.
    ///
    /// # Errors
    /// When it has no readable `golden.safetensors`.
    pub fn open(folder: &Path) -> Result<Golden> {
        let path = folder.join("golden.safetensors");
        let bytes = fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        SafeTensors::deserialize(&bytes).map_err(|source| Error::Safetensors { path, source })?;
        Ok(Golden { folder: folder.to_path_buf(), bytes })
    }

    /// The checkpoint's folder, for loaders that want one.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The checkpoint's `config.json`.
    pub fn config_path(&self) -> PathBuf {
        self.folder.join("config.json")
    }

    /// The checkpoint's `model.safetensors`.
    pub fn model_path(&self) -> PathBuf {
        self.folder.join("model.safetensors")
    }

    /// Whether a value of this name is stored.
    pub fn has(&self, name: &str) -> bool {
        self.file().tensor(name).is_ok()
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.file().names().into_iter().map(str::to_string).collect();
        names.sort();
        names
    }

    /// A float32 value.
    ///
    /// # Errors
    /// When the name is unknown or its type another.
    pub fn f32(&self, name: &str) -> Result<Values<f32>> {
        self.read(name, Dtype::F32, "float32", f32::from_le_bytes)
    }

    /// An integer value.
    ///
    /// # Errors
    /// When the name is unknown or its type another.
    pub fn i64(&self, name: &str) -> Result<Values<i64>> {
        self.read(name, Dtype::I64, "int64", i64::from_le_bytes)
    }

    /// A mask.
    ///
    /// # Errors
    /// When the name is unknown or its type another.
    pub fn u8(&self, name: &str) -> Result<Values<u8>> {
        self.read(name, Dtype::U8, "uint8", |[byte]: [u8; 1]| byte)
    }

    /// Token ids, as a batch takes them.
    ///
    /// # Errors
    /// When the name is unknown or its type not int64.
    pub fn tokens(&self, name: &str) -> Result<Vec<i32>> {
        Ok(self.i64(name)?.values.into_iter().map(|id| id as i32).collect())
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("the header was read when the file was opened")
    }

    fn read<T, const N: usize>(
        &self,
        name: &str,
        dtype: Dtype,
        expected: &'static str,
        from: fn([u8; N]) -> T,
    ) -> Result<Values<T>> {
        let path = || self.folder.join("golden.safetensors");
        let file = self.file();
        let tensor =
            file.tensor(name).map_err(|_| Error::Missing { path: path(), name: name.to_string() })?;
        if tensor.dtype() != dtype {
            let found = format!("{:?}", tensor.dtype());
            return Err(Error::Type { path: path(), name: name.to_string(), found, expected });
        }
        let (chunks, _) = tensor.data().as_chunks::<N>();
        Ok(Values { shape: tensor.shape().to_vec(), values: chunks.iter().map(|&c| from(c)).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_holds_what_tests_read() {
        for name in Golden::VARIANTS {
            let golden = Golden::variant(name).unwrap();
            assert!(golden.config_path().is_file() && golden.model_path().is_file());
            for prefix in ["", "b0.", "b1.", "b2."] {
                let ids = golden.tokens(&format!("{prefix}input_ids")).unwrap();
                let logits = golden.f32(&format!("{prefix}logits")).unwrap();
                assert_eq!(ids[0], 2);
                assert_eq!(logits.shape, [ids.len(), 512]);
                assert_eq!(golden.tokens(&format!("{prefix}greedy")).unwrap().len(), 32);
            }
            let hidden = golden.f32("hidden").unwrap();
            assert_eq!(hidden.at(1).len(), hidden.shape[1] * hidden.shape[2]);
            assert!(golden.names().iter().all(|n| !n.ends_with("_bf16")), "{name}");
        }
    }

    #[test]
    fn masks_and_routes_are_there_where_the_variant_has_them() {
        let moe = Golden::variant("moe26b").unwrap();
        assert_eq!(moe.i64("router_idx").unwrap().shape, [5, 40, 3]);
        assert_eq!(moe.u8("soft.mask_sliding").unwrap().shape, [40, 40]);
        assert_eq!(Golden::variant("e2b").unwrap().f32("per_layer_inputs").unwrap().shape, [40, 9, 32]);
    }

    #[test]
    fn a_wrong_name_or_type_is_named() {
        let golden = Golden::variant("gemma3").unwrap();
        let message = golden.f32("logit").unwrap_err().to_string();
        assert!(message.contains("no value named logit"), "{message}");
        let message = golden.f32("input_ids").unwrap_err().to_string();
        assert!(message.contains("input_ids") && message.contains("not float32"), "{message}");
        assert!(Golden::variant("absent").unwrap_err().to_string().contains("golden.safetensors"));
    }
}
