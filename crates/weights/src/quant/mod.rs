//! From the tensors of one matrix (codes and the scales beside them) to one view.
//!
//! The tensors present decide; `quantization_config` is only read to refuse a scheme in plain words (`config`).
//! `Matrix::resolve` looks at headers alone and settles the layout, `Matrix::view` reads the scales.
//!
//! | layout | codes | scales |
//! | --- | --- | --- |
//! | plain | `weight` F32, F16, BF16 | none |
//! | FP8 | `weight` F8_E4M3 `[out, in]` | `weight_scale`: one number, `[out]`, `[out, 1]`, or `[ceil(out/128), ceil(in/128)]` |
//! | NVFP4, compressed-tensors | `weight_packed` U8 `[out, in/2]` | `weight_scale` F8_E4M3 `[out, in/16]`, `weight_global_scale` F32, a divisor |
//! | NVFP4, ModelOpt | `weight` U8 `[out, in/2]` | `weight_scale` F8_E4M3 `[out, in/16]`, `weight_scale_2` F32, a multiplier |
//! | INT4 | `weight_packed` I32 `[out, in/8]` | `weight_scale` BF16 `[out, in/32]`; `weight_shape` I64 repeats `[out, in]` |

mod config;
mod scales;

pub(crate) use config::check_scheme;
pub(crate) use scales::floats;

use lapidary_formats::{Format, Scales, TensorView};

use crate::names::Slot;
use crate::safetensors::{Dtype, Entry, Shards, TensorId};
use crate::{Error, Result};

/// The tensors of one matrix, by slot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Parts([Option<TensorId>; Slot::ALL.len()]);

impl Parts {
    pub fn get(&self, slot: Slot) -> Option<TensorId> {
        self.0[slot as usize]
    }

    /// Fills a slot and returns what was in it.
    pub fn set(&mut self, slot: Slot, id: TensorId) -> Option<TensorId> {
        self.0[slot as usize].replace(id)
    }

    fn any(&self) -> Option<TensorId> {
        self.0.iter().flatten().copied().next()
    }
}

/// A matrix (vector, stack) whose layout is settled.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// What is stored, unpacked: lengths in values, slowest first.
    pub shape: Vec<usize>,
    pub format: Format,
    /// The tensor that holds the codes.
    pub codes: TensorId,
    /// Bytes of codes and scales together.
    pub bytes: u64,
    /// The activation scale, which is not used, but which is looked at.
    pub input_scale: Option<TensorId>,
    layout: Layout,
}

#[derive(Clone, Copy, Debug)]
enum Layout {
    Plain,
    Fp8 { scale: TensorId, spread: Spread },
    Nvfp4 { blocks: TensorId, tensor: TensorId, convention: Convention },
    Int4 { scale: TensorId, stated_shape: Option<TensorId> },
}

/// What one FP8 scale covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    Tensor,
    Row,
    Block128,
}

/// What the file's tensor scale is to an NVFP4 value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Convention {
    /// `weight_global_scale`: value = code * block / scale.
    Divisor,
    /// `weight_scale_2`: value = code * block * scale.
    Multiplier,
}

impl Matrix {
    /// Settles the layout of a matrix from the headers of its tensors.
    ///
    /// # Errors
    /// Codes without their scales, scales without codes, or types and shapes that belong to no layout.
    pub fn resolve(parts: &Parts, shards: &Shards) -> Result<Matrix> {
        let resolver = Resolver { parts, shards };
        let mut matrix = match (parts.get(Slot::Weight), parts.get(Slot::Packed)) {
            (Some(codes), None) => match shards.entry(codes).dtype {
                Dtype::F32 => resolver.plain(codes, Format::F32),
                Dtype::F16 => resolver.plain(codes, Format::F16),
                Dtype::Bf16 => resolver.plain(codes, Format::Bf16),
                Dtype::F8E4M3 => resolver.fp8(codes),
                Dtype::U8 => resolver.nvfp4(codes, Slot::Scale2, Convention::Multiplier),
                _ => Err(resolver.wrong_dtype(codes, "F32, F16, BF16, F8_E4M3, or U8 with weight_scale_2")),
            },
            (None, Some(codes)) => match shards.entry(codes).dtype {
                Dtype::U8 => resolver.nvfp4(codes, Slot::GlobalScale, Convention::Divisor),
                Dtype::I32 => resolver.int4(codes),
                _ => Err(resolver.wrong_dtype(codes, "U8 (NVFP4) or I32 (INT4)")),
            },
            (Some(weight), Some(packed)) => Err(Error::Duplicate {
                path: shards.file(weight).path().to_owned(),
                tensor: shards.entry(weight).name.clone(),
                other_path: shards.file(packed).path().to_owned(),
                other: shards.entry(packed).name.clone(),
            }),
            (None, None) => {
                let orphan = parts.any().expect("a matrix has at least one tensor");
                Err(Error::MissingTensor {
                    path: shards.file(orphan).path().to_owned(),
                    tensor: format!(
                        "{} (the file has {})",
                        resolver.sibling(orphan, Slot::Weight),
                        shards.entry(orphan).name
                    ),
                })
            }
        }?;
        if let Some(&zero) = matrix.shape.iter().find(|&&d| d == 0) {
            return Err(resolver.wrong_shape(matrix.codes, format!("no length of {zero}")));
        }
        matrix.bytes = parts.0.iter().flatten().map(|&id| shards.bytes_len(id)).sum();
        matrix.input_scale = parts.get(Slot::InputScale).or(parts.get(Slot::InputGlobalScale));
        Ok(matrix)
    }

    /// The rows and columns of the view: leading lengths flattened, a vector one row, a scalar one value.
    pub fn rows_cols(&self) -> (usize, usize) {
        match self.shape.split_last() {
            None => (1, 1),
            Some((&cols, rows)) => (rows.iter().product(), cols),
        }
    }

    /// The view, with its scales read and checked.
    ///
    /// # Errors
    /// [`Error::BadScale`].
    pub fn view<'a>(&self, shards: &'a Shards) -> Result<TensorView<'a>> {
        let (rows, cols) = self.rows_cols();
        let bytes = shards.bytes(self.codes);
        let scales = match self.layout {
            Layout::Plain => Scales::None,
            Layout::Fp8 { scale, spread } => scales::fp8(shards, scale, spread, bytes)?,
            Layout::Nvfp4 { blocks, tensor, convention } => {
                scales::nvfp4(shards, blocks, tensor, convention)?
            }
            Layout::Int4 { scale, stated_shape } => {
                if let Some(shape) = stated_shape {
                    scales::check_stated_shape(shards, shape, [rows, cols])?;
                }
                scales::int4(shards, scale)?
            }
        };
        Ok(TensorView {
            name: shards.entry(self.codes).name.clone(),
            rows,
            cols,
            format: self.format,
            bytes,
            scales,
        })
    }
}

/// The tensors of one matrix while its layout is being settled.
struct Resolver<'a> {
    parts: &'a Parts,
    shards: &'a Shards,
}

impl Resolver<'_> {
    fn plain(&self, codes: TensorId, format: Format) -> Result<Matrix> {
        self.only(codes, &[Slot::Weight])?;
        Ok(self.matrix(codes, self.entry(codes).shape.clone(), format, Layout::Plain))
    }

    fn fp8(&self, codes: TensorId) -> Result<Matrix> {
        self.only(codes, &[Slot::Weight, Slot::Scale])?;
        let (rows, cols) = self.two_lengths(codes)?;
        let scale = self.need(codes, Slot::Scale)?;
        if !matches!(self.entry(scale).dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
            return Err(self.wrong_dtype(scale, "F32, BF16 or F16"));
        }
        let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
        let spread = match self.entry(scale).shape.as_slice() {
            [] | [1] | [1, 1] => Spread::Tensor,
            [r] | [r, 1] if *r == rows => Spread::Row,
            shape if shape == blocks => Spread::Block128,
            _ => {
                let expected =
                    format!("[], [1], [{rows}], [{rows}, 1] or {blocks:?} beside codes [{rows}, {cols}]");
                return Err(self.wrong_shape(scale, expected));
            }
        };
        Ok(self.matrix(codes, vec![rows, cols], Format::Fp8E4M3, Layout::Fp8 { scale, spread }))
    }

    fn nvfp4(&self, codes: TensorId, tensor: Slot, convention: Convention) -> Result<Matrix> {
        let code_slot = if convention == Convention::Divisor { Slot::Packed } else { Slot::Weight };
        self.only(codes, &[code_slot, Slot::Scale, tensor])?;
        let (rows, packed) = self.two_lengths(codes)?;
        let cols = packed * 2;
        if !cols.is_multiple_of(16) {
            return Err(self.wrong_shape(
                codes,
                "two codes a byte in blocks of 16: a multiple of 8 bytes a row".to_owned(),
            ));
        }
        let blocks = self.need(codes, Slot::Scale)?;
        if self.entry(blocks).dtype != Dtype::F8E4M3 {
            return Err(self.wrong_dtype(blocks, "F8_E4M3, one for 16 inputs"));
        }
        self.exact(blocks, &[rows, cols / 16])?;
        let tensor = self.need(codes, tensor)?;
        if self.entry(tensor).dtype != Dtype::F32 {
            return Err(self.wrong_dtype(tensor, "F32"));
        }
        self.one(tensor)?;
        Ok(self.matrix(codes, vec![rows, cols], Format::Nvfp4, Layout::Nvfp4 { blocks, tensor, convention }))
    }

    fn int4(&self, codes: TensorId) -> Result<Matrix> {
        self.only(codes, &[Slot::Packed, Slot::Scale, Slot::Shape])?;
        let (rows, words) = self.two_lengths(codes)?;
        let cols = words * 8;
        let stated_shape = self.parts.get(Slot::Shape);
        if let Some(shape) = stated_shape {
            if self.entry(shape).dtype != Dtype::I64 {
                return Err(self.wrong_dtype(shape, "I64"));
            }
            self.exact(shape, &[2])?;
        }
        if !cols.is_multiple_of(32) {
            return Err(self.wrong_shape(
                codes,
                "eight codes a word in groups of 32: a multiple of 4 words a row".to_owned(),
            ));
        }
        let scale = self.need(codes, Slot::Scale)?;
        if self.entry(scale).dtype != Dtype::Bf16 {
            return Err(self.wrong_dtype(scale, "BF16, one for 32 inputs"));
        }
        self.exact(scale, &[rows, cols / 32])?;
        Ok(self.matrix(codes, vec![rows, cols], Format::Int4G32, Layout::Int4 { scale, stated_shape }))
    }

    fn matrix(&self, codes: TensorId, shape: Vec<usize>, format: Format, layout: Layout) -> Matrix {
        Matrix { shape, format, codes, bytes: 0, input_scale: None, layout }
    }

    fn entry(&self, id: TensorId) -> &Entry {
        self.shards.entry(id)
    }

    /// The name of another tensor of the same matrix.
    fn sibling(&self, id: TensorId, slot: Slot) -> String {
        let name = &self.entry(id).name;
        let module = name.rsplit_once('.').map_or(name.as_str(), |(module, _)| module);
        format!("{module}.{}", slot.suffix())
    }

    fn need(&self, codes: TensorId, slot: Slot) -> Result<TensorId> {
        self.parts.get(slot).ok_or_else(|| Error::MissingTensor {
            path: self.shards.file(codes).path().to_owned(),
            tensor: format!("{} (the codes {} need it)", self.sibling(codes, slot), self.entry(codes).name),
        })
    }

    /// Only these slots are filled, activation scales aside.
    fn only(&self, codes: TensorId, allowed: &[Slot]) -> Result<()> {
        let stray = Slot::ALL.into_iter().find(|s| {
            let activation = matches!(s, Slot::InputScale | Slot::InputGlobalScale);
            !activation && !allowed.contains(s) && self.parts.get(*s).is_some()
        });
        match stray.and_then(|s| self.parts.get(s)) {
            None => Ok(()),
            Some(id) => Err(self.bad_tensor(
                id,
                format!(
                    "it does not belong beside {} of type {}",
                    self.entry(codes).name,
                    self.entry(codes).dtype
                ),
            )),
        }
    }

    fn two_lengths(&self, id: TensorId) -> Result<(usize, usize)> {
        match self.entry(id).shape[..] {
            [rows, cols] => Ok((rows, cols)),
            _ => Err(self.wrong_shape(id, "two lengths".to_owned())),
        }
    }

    fn exact(&self, id: TensorId, expected: &[usize]) -> Result<()> {
        if self.entry(id).shape == expected {
            Ok(())
        } else {
            Err(self.wrong_shape(id, format!("{expected:?}")))
        }
    }

    fn one(&self, id: TensorId) -> Result<()> {
        if self.entry(id).shape.iter().all(|&d| d == 1) {
            Ok(())
        } else {
            Err(self.wrong_shape(id, "one number".to_owned()))
        }
    }

    fn wrong_shape(&self, id: TensorId, expected: String) -> Error {
        let found = format!("{:?}", self.entry(id).shape);
        let (path, tensor) = self.place(id);
        Error::WrongShape { path, tensor, expected, found }
    }

    fn wrong_dtype(&self, id: TensorId, expected: &str) -> Error {
        let (path, tensor) = self.place(id);
        Error::WrongDtype {
            path,
            tensor,
            expected: expected.to_owned(),
            found: self.entry(id).dtype.to_string(),
        }
    }

    fn bad_tensor(&self, id: TensorId, what: String) -> Error {
        let (path, tensor) = self.place(id);
        Error::BadTensor { path, tensor, what }
    }

    fn place(&self, id: TensorId) -> (std::path::PathBuf, String) {
        (self.shards.file(id).path().to_owned(), self.entry(id).name.clone())
    }
}
