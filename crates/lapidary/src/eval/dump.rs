//! A file of logits and activations that a reference wrote: `lapidary dump`, or `scripts/reference/dump.py`.
//!
//! | name | shape, type | needed |
//! | --- | --- | --- |
//! | `input_ids` | `[T]` I64 | unless the caller knows the tokens |
//! | `logits` | `[T, V]` F32, F16 or BF16 | for distances of logits |
//! | `logits_bf16` | `[T, V]` | the same of a run in bfloat16: the reference's own noise |
//! | `embed`, `hidden.N`, `final_norm` | `[T, H]` | for comparisons layer by layer |

use std::ops::Range;
use std::path::Path;

use lapidary_formats::{Format, Scales, TensorView, decode_row};
use lapidary_weights::safetensors::{Dtype, Entry, File};

use super::error::{EvalError, Result};
use super::{Rows, Unit};

/// An opened dump.
#[derive(Debug)]
pub struct DumpFile {
    file: File,
    ids: Vec<u32>,
}

impl DumpFile {
    /// Opens a dump. `tokens` stand in for its `input_ids`, and must equal them where both are there.
    ///
    /// # Errors
    /// [`EvalError::Weights`] for a file that is no safetensors, [`EvalError::Dump`] for one without what a dump has.
    pub fn open(path: &Path, tokens: Option<&[u32]>) -> Result<DumpFile> {
        let file = File::open(path)?;
        let wrong = |problem: String| EvalError::Dump { path: path.to_owned(), problem };
        let stored = match file.find("input_ids") {
            Some(entry) => Some(ids(&file, entry).map_err(wrong)?),
            None => None,
        };
        let ids = match (stored, tokens) {
            (Some(stored), Some(given)) if stored != given => {
                return Err(wrong("input_ids are other tokens than those given".to_owned()));
            }
            (Some(stored), _) => stored,
            (None, Some(given)) => given.to_vec(),
            (None, None) => {
                return Err(wrong("it has no tensor input_ids; say which tokens it is of".to_owned()));
            }
        };
        if ids.is_empty() {
            return Err(wrong("it is of no tokens".to_owned()));
        }
        Ok(DumpFile { file, ids })
    }

    /// The tokens that it is of.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The free-form strings of its header.
    pub fn metadata(&self) -> &std::collections::BTreeMap<String, String> {
        self.file.metadata()
    }

    /// All tokens as one unit, each but the first scored.
    ///
    /// # Errors
    /// [`EvalError::Nothing`] for a single token.
    pub fn unit(&self) -> Result<Unit> {
        if self.ids.len() < 2 {
            return Err(EvalError::Nothing {
                what: format!("{} is of one token", self.file.path().display()),
            });
        }
        Ok(Unit { ids: self.ids.clone(), scored: 1..self.ids.len() })
    }

    /// Whether it has a matrix of this name.
    pub fn has(&self, name: &str) -> bool {
        self.file.find(name).is_some()
    }

    /// A matrix `[T, width]`, a row for each token.
    ///
    /// # Errors
    /// [`EvalError::Dump`] when it is absent, or of another type or shape.
    pub fn matrix(&self, name: &str) -> Result<TensorView<'_>> {
        let wrong = |problem: String| EvalError::Dump { path: self.file.path().to_owned(), problem };
        let rows = self.ids.len();
        let entry = self.file.find(name).ok_or_else(|| wrong(format!("it has no tensor {name}")))?;
        let format = match entry.dtype {
            Dtype::F32 => Format::F32,
            Dtype::F16 => Format::F16,
            Dtype::Bf16 => Format::Bf16,
            other => return Err(wrong(format!("{name} has type {other}, expected F32, F16 or BF16"))),
        };
        match entry.shape[..] {
            [found, cols] if found == rows && cols > 0 => {
                let bytes = self.file.bytes(entry);
                Ok(TensorView { name: name.to_owned(), rows, cols, format, bytes, scales: Scales::None })
            }
            _ => Err(wrong(format!("{name} has shape {:?}, expected [{rows}, width]", entry.shape))),
        }
    }

    /// Its rows of `name`, `logits` or `logits_bf16`.
    ///
    /// # Errors
    /// As [`DumpFile::matrix`].
    pub fn rows(&self, name: &str) -> Result<DumpRows<'_>> {
        let view = self.matrix(name)?;
        Ok(DumpRows { path: self.file.path(), row: vec![0.0; view.cols], view })
    }
}

fn ids(file: &File, entry: &Entry) -> Result<Vec<u32>, String> {
    // Some writers keep a batch of one.
    let one = matches!(entry.shape[..], [_] | [1, _]);
    if entry.dtype != Dtype::I64 || !one {
        return Err(format!(
            "input_ids is {} of shape {:?}, expected I64 of shape [T]",
            entry.dtype, entry.shape
        ));
    }
    let ids = file.bytes(entry).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b));
    ids.map(|id| u32::try_from(id).map_err(|_| format!("input_ids holds {id}"))).collect()
}

/// Logits of a dump.
#[derive(Debug)]
pub struct DumpRows<'a> {
    path: &'a Path,
    view: TensorView<'a>,
    row: Vec<f32>,
}

impl Rows for DumpRows<'_> {
    fn vocab(&self) -> usize {
        self.view.cols
    }

    fn begin(&mut self, _: &Unit) -> Result<()> {
        Ok(())
    }

    fn rows(&mut self, _: &Unit, tokens: Range<usize>, sink: &mut dyn FnMut(&[f32])) -> Result<()> {
        for token in tokens {
            decode_row(&self.view, token - 1, &mut self.row);
            if let Some(col) = self.row.iter().position(|v| !v.is_finite()) {
                let problem =
                    format!("{} of row {}, column {col} is {}", self.view.name, token - 1, self.row[col]);
                return Err(EvalError::Dump { path: self.path.to_owned(), problem });
            }
            sink(&self.row);
        }
        Ok(())
    }
}
