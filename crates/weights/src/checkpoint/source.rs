//! What both kinds of file give a checkpoint.

use std::path::Path;

use lapidary_formats::{Format, TensorView};

use super::{Ignored, Kind};
use crate::names::Role;
use crate::{Error, FileMap, Result};

/// The text tensors of a checkpoint by role, from one kind of file.
pub(super) trait Source: std::fmt::Debug + Send + Sync {
    fn kind(&self) -> Kind;
    fn files(&self) -> Vec<&Path>;
    fn maps(&self) -> Vec<FileMap>;
    /// Lets the system take back the memory of bytes that a view of this source points to.
    fn release(&self, bytes: &[u8]);
    fn total_bytes(&self) -> u64;
    fn ignored(&self) -> Ignored;
    /// In the order of [`Role`], so that experts of a layer are neighbours.
    fn roles(&self) -> Box<dyn Iterator<Item = Role> + '_>;
    fn stored(&self, role: Role) -> Option<Stored<'_>>;
    /// The view of a role that is stored, with leading lengths flattened into rows.
    fn view(&self, role: Role) -> Result<TensorView<'_>>;
    /// Matrix `index` of a stack whose matrices have `rows` rows each.
    fn slab(&self, role: Role, index: usize, rows: usize) -> Result<TensorView<'_>> {
        Ok(self.view(role)?.slice_rows(index * rows, rows))
    }
    /// What a user should hear of.
    fn notes(&self) -> Vec<String>;
}

/// What the headers say of one tensor.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// The file that holds the codes.
    pub file: &'a Path,
    /// The name of the codes in the file.
    pub name: &'a str,
    /// Lengths in values (unpacked), slowest first; empty for a scalar.
    pub shape: &'a [usize],
    /// How the codes are stored.
    pub format: Format,
    /// Bytes of codes and scales.
    pub bytes: u64,
}

impl Stored<'_> {
    /// How many values it holds.
    pub fn values(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }

    pub(super) fn wrong_shape(&self, expected: &[usize]) -> Error {
        self.wrong_shape_text(format!("{expected:?}"))
    }

    pub(super) fn wrong_shape_text(&self, expected: String) -> Error {
        Error::WrongShape {
            path: self.file.to_owned(),
            tensor: self.name.to_owned(),
            expected,
            found: format!("{:?}", self.shape),
        }
    }
}
