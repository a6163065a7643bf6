//! A checkpoint: whatever files a path means, seen as roles.

mod named;
mod notes;
mod open;
mod text_files;

pub use text_files::TextFiles;

use std::path::{Path, PathBuf};

use lapidary_formats::{Format, Scales, TensorView};
use serde_json::Value;

use self::named::Named;
use self::notes::Notes;
use self::open::{Found, find, read_json, read_json_if_there};
use crate::names::{ExpertPart, LayerRole, Modality, Role};
use crate::quant::{Matrix, check_scheme, floats};
use crate::{Error, Result};

/// An opened checkpoint. Files are mapped, headers checked, every text tensor sorted by [`Role`]; data is read when
/// a view is taken or decoded.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ConfigSource,
    text_files: TextFiles,
    named: Named,
    notes: Notes,
}

/// The kind of file that a checkpoint's tensors come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// safetensors with a `config.json`.
    Safetensors,
    /// GGUF.
    Gguf,
}

/// Where the model's hyperparameters are.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum ConfigSource {
    /// The JSON files beside safetensors.
    Json {
        /// Where `config.json` is, for messages.
        path: PathBuf,
        /// `config.json`.
        config: Value,
        /// `generation_config.json`.
        generation: Option<Value>,
    },
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

/// How much of a checkpoint one format takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatShare {
    /// The format.
    pub format: Format,
    /// Matrices and vectors in it.
    pub tensors: usize,
    /// Their bytes, scales included.
    pub bytes: u64,
}

/// The tensors that belong to other input paths than text and are not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ignored {
    /// Tensors of a vision tower.
    pub vision: usize,
    /// Tensors of an audio tower.
    pub audio: usize,
    /// Tensors that join a tower to the text model.
    pub projector: usize,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl Ignored {
    fn count(&mut self, modality: Modality, bytes: u64) {
        self.bytes += bytes;
        match modality {
            Modality::Vision => self.vision += 1,
            Modality::Audio => self.audio += 1,
            Modality::Projector => self.projector += 1,
        }
    }

    /// How many tensors.
    pub fn tensors(&self) -> usize {
        self.vision + self.audio + self.projector
    }
}

impl Checkpoint {
    /// Opens a folder (a `config.json` with `.safetensors` files, or exactly one `.gguf` file or split set), a `.gguf`
    /// file, or a `.safetensors` file beside its `config.json`.
    ///
    /// # Errors
    /// Whatever a header, a name or a layout has wrong with it; see [`Error`].
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = path.as_ref();
        match find(path)? {
            Found::Safetensors { folder, weights } => {
                let config_path = folder.join("config.json");
                let config = read_json(&config_path)?;
                refuse_drafter(&config, &config_path)?;
                check_scheme(&config, &config_path)?;
                let text_files = TextFiles::find(&folder);
                let generation = read_json_if_there(&folder.join("generation_config.json"))?;
                let named = Named::new(weights.open()?)?;
                let notes = Notes::of(&named, &config);
                let config = ConfigSource::Json { path: config_path, config, generation };
                Ok(Checkpoint { path: path.to_owned(), config, text_files, named, notes })
            }
            Found::Gguf(file) => Err(Error::NotSupported {
                path: file,
                what: "GGUF files are".to_owned(),
                remedy: "use the safetensors form of the model".to_owned(),
            }),
        }
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of file that the tensors come from.
    pub fn kind(&self) -> Kind {
        Kind::Safetensors
    }

    /// The model's hyperparameters.
    pub fn config(&self) -> &ConfigSource {
        &self.config
    }

    /// Where tokenizer and chat template are.
    pub fn text_files(&self) -> &TextFiles {
        &self.text_files
    }

    /// The files that hold tensors.
    pub fn files(&self) -> Vec<&Path> {
        self.named.shards.files().iter().map(|f| f.path()).collect()
    }

    /// The length of those files.
    pub fn total_bytes(&self) -> u64 {
        self.named.shards.files().iter().map(|f| f.len()).sum()
    }

    /// Every role that the file holds, in order.
    pub fn roles(&self) -> impl Iterator<Item = Role> + '_ {
        self.named.matrices.keys().copied()
    }

    /// What the headers say of a role; touches no data.
    pub fn stored(&self, role: Role) -> Option<Stored<'_>> {
        self.named.matrices.get(&role).map(|m| self.stored_of(m))
    }

    /// Values (not bytes) in the text tensors, each counted once, unused ones included; scales are not counted.
    pub fn parameters(&self) -> u64 {
        let hint =
            |r: &Role| matches!(r, Role::RopeFreqs | Role::Layer(_, LayerRole::KScale | LayerRole::VScale));
        let values = |m: &Matrix| m.shape.iter().map(|&d| d as u64).product::<u64>();
        self.named.matrices.iter().filter(|(r, _)| !hint(r)).map(|(_, m)| values(m)).sum()
    }

    /// The formats of the text tensors, in the order of [`Format::ALL`].
    pub fn formats(&self) -> Vec<FormatShare> {
        let share = |format| {
            let of_format = self.named.matrices.values().filter(|m| m.format == format);
            let (tensors, bytes) = of_format.fold((0, 0), |(n, bytes), m| (n + 1, bytes + m.bytes));
            FormatShare { format, tensors, bytes }
        };
        Format::ALL.into_iter().map(share).filter(|s| s.tensors > 0).collect()
    }

    /// The tensors of other input paths.
    pub fn ignored(&self) -> Ignored {
        self.named.ignored
    }

    /// What a user should hear of that is no error: from the headers, and from the views taken so far.
    pub fn notes(&self) -> Vec<String> {
        self.notes.lines()
    }

    /// The view of a role, `None` where the file has no such tensor. Leading lengths are flattened into rows; a vector
    /// is one row, a scalar one value.
    ///
    /// # Errors
    /// [`Error::BadScale`].
    pub fn tensor(&self, role: Role) -> Result<Option<TensorView<'_>>> {
        if let Some(matrix) = self.named.matrices.get(&role) {
            self.notes.look_at_input_scale(&self.named, role, matrix);
        }
        self.named.view(role)
    }

    /// The matrix `[rows, cols]` of a role that the model cannot do without.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::WrongShape`], [`Error::BadScale`].
    pub fn expect(&self, role: Role, rows: usize, cols: usize) -> Result<TensorView<'_>> {
        let Some(stored) = self.stored(role) else { return Err(self.missing(role)) };
        if stored.shape != [rows, cols] {
            return Err(self.wrong_shape(stored, &[rows, cols]));
        }
        Ok(self.tensor(role)?.expect("it is stored"))
    }

    /// A vector of `len` values as float32; a scalar has one. `None` where the file has no such tensor.
    ///
    /// # Errors
    /// [`Error::WrongShape`], [`Error::WrongDtype`] when it is quantised, [`Error::NotFinite`].
    pub fn vector(&self, role: Role, len: usize) -> Result<Option<Vec<f32>>> {
        let Some(matrix) = self.named.matrices.get(&role) else { return Ok(None) };
        let stored = self.stored_of(matrix);
        let scalar = len == 1 && stored.shape.is_empty();
        if stored.shape != [len] && !scalar {
            return Err(self.wrong_shape(stored, &[len]));
        }
        let (path, tensor) = self.named.place(matrix);
        let Some(values) = floats(&self.named.shards, matrix.codes) else {
            let (expected, found) = ("F32, F16 or BF16".to_owned(), stored.format.to_string());
            return Err(Error::WrongDtype { path, tensor, expected, found });
        };
        match values.iter().position(|v| !v.is_finite()) {
            Some(index) => Err(Error::NotFinite { path, tensor, index, found: values[index] }),
            None => Ok(Some(values)),
        }
    }

    /// A vector that the model cannot do without.
    ///
    /// # Errors
    /// As [`Checkpoint::vector`], and [`Error::MissingTensor`].
    pub fn expect_vector(&self, role: Role, len: usize) -> Result<Vec<f32>> {
        self.vector(role, len)?.ok_or_else(|| self.missing(role))
    }

    /// How many experts the file holds for a layer; 0 for a dense one.
    pub fn experts_in_file(&self, layer: u32) -> usize {
        let stacked = self.stored(Role::Layer(layer, LayerRole::ExpertsDown));
        if let Some(&[experts, _, _]) = stacked.as_ref().map(|s| s.shape) {
            return experts;
        }
        let first = Role::Layer(layer, LayerRole::Expert { index: 0, part: ExpertPart::Gate });
        let last = Role::Layer(layer, LayerRole::Expert { index: u32::MAX, part: ExpertPart::Down });
        match self.named.matrices.range(first..=last).next_back() {
            Some((Role::Layer(_, LayerRole::Expert { index, .. }), _)) => *index as usize + 1,
            _ => 0,
        }
    }

    /// One matrix of one expert, however the file stores experts: a tensor each, a stack for each part, or one stack
    /// with the gate's rows before the up rows. `None` where the file has no such expert.
    ///
    /// # Errors
    /// [`Error::WrongShape`] for a stack that is none, [`Error::BadScale`].
    pub fn expert(&self, layer: u32, e: u32, part: ExpertPart) -> Result<Option<TensorView<'_>>> {
        if let Some(view) = self.tensor(Role::Layer(layer, LayerRole::Expert { index: e, part }))? {
            return Ok(Some(view));
        }
        let Some((role, half)) = self.stack_of(layer, part) else { return Ok(None) };
        let stored = self.stored(role).expect("the stack was found");
        let &[experts, rows, cols] = stored.shape else {
            return Err(self.wrong_shape_text(stored, "[experts, rows, columns]".to_owned()));
        };
        if half.is_some() && !rows.is_multiple_of(2) {
            return Err(self.wrong_shape_text(stored, format!("[{experts}, an even number of rows, {cols}]")));
        }
        if e as usize >= experts {
            return Ok(None);
        }
        let stack = self.tensor(role)?.expect("the stack was found");
        let slab = stack.slice_rows(e as usize * rows, rows);
        let mut view = match half {
            None => slab,
            Some(half) => slab.slice_rows(half * (rows / 2), rows / 2),
        };
        view.name = format!("{}[{e}]", view.name);
        Ok(Some(view))
    }

    /// The matrix `[rows, cols]` of an expert that the model cannot do without.
    ///
    /// # Errors
    /// As [`Checkpoint::expect`].
    pub fn expect_expert(
        &self,
        layer: u32,
        e: u32,
        part: ExpertPart,
        rows: usize,
        cols: usize,
    ) -> Result<TensorView<'_>> {
        let single = Role::Layer(layer, LayerRole::Expert { index: e, part });
        let Some(view) = self.expert(layer, e, part)? else { return Err(self.missing(single)) };
        if (view.rows, view.cols) == (rows, cols) {
            return Ok(view);
        }
        match (self.stored(single), self.stack_of(layer, part)) {
            (None, Some((role, half))) => {
                let stored = self.stored(role).expect("the stack was found");
                let rows = if half.is_some() { 2 * rows } else { rows };
                Err(self.wrong_shape(stored, &[stored.shape[0], rows, cols]))
            }
            (stored, _) => Err(self.wrong_shape(stored.expect("the view came from it"), &[rows, cols])),
        }
    }

    /// Whether an explicit output head differs from the embedding; `None` where the file has no head. Compares all
    /// bytes when type and shape agree; a head with scales of its own counts as different.
    ///
    /// # Errors
    /// [`Error::BadScale`].
    pub fn head_differs(&self) -> Result<Option<bool>> {
        let (Some(head), Some(embed)) = (self.tensor(Role::Head)?, self.tensor(Role::Embed)?) else {
            return Ok(None);
        };
        let plain = matches!((&head.scales, &embed.scales), (Scales::None, Scales::None));
        let same =
            plain && head.format == embed.format && head.rows == embed.rows && head.bytes == embed.bytes;
        Ok(Some(!same))
    }

    /// The error for a tensor that is there and should not be, such as one of a layer that the configuration lacks.
    pub fn refuse(&self, role: Role, why: &str) -> Error {
        match self.stored(role) {
            Some(s) => Error::UnknownTensor {
                path: s.file.to_owned(),
                tensor: s.name.to_owned(),
                what: why.to_owned(),
            },
            None => self.missing(role),
        }
    }

    /// The stacked tensor with a part of all experts, and which half of its rows the part is.
    fn stack_of(&self, layer: u32, part: ExpertPart) -> Option<(Role, Option<usize>)> {
        let choices: &[_] = match part {
            ExpertPart::Gate => &[(LayerRole::ExpertsGateUp, Some(0)), (LayerRole::ExpertsGate, None)],
            ExpertPart::Up => &[(LayerRole::ExpertsGateUp, Some(1)), (LayerRole::ExpertsUp, None)],
            ExpertPart::Down => &[(LayerRole::ExpertsDown, None)],
        };
        let roles = choices.iter().map(|&(r, half)| (Role::Layer(layer, r), half));
        roles.into_iter().find(|(r, _)| self.named.matrices.contains_key(r))
    }

    fn stored_of<'a>(&'a self, matrix: &'a Matrix) -> Stored<'a> {
        Stored {
            file: self.named.shards.file(matrix.codes).path(),
            name: &self.named.shards.entry(matrix.codes).name,
            shape: &matrix.shape,
            format: matrix.format,
            bytes: matrix.bytes,
        }
    }

    fn missing(&self, role: Role) -> Error {
        Error::MissingTensor { path: self.path.clone(), tensor: role.to_string() }
    }

    fn wrong_shape(&self, stored: Stored<'_>, expected: &[usize]) -> Error {
        self.wrong_shape_text(stored, format!("{expected:?}"))
    }

    fn wrong_shape_text(&self, stored: Stored<'_>, expected: String) -> Error {
        Error::WrongShape {
            path: stored.file.to_owned(),
            tensor: stored.name.to_owned(),
            expected,
            found: format!("{:?}", stored.shape),
        }
    }
}

/// A drafter's `config.json` says so; its tensors alone would be refused one by one.
fn refuse_drafter(config: &Value, path: &Path) -> Result<()> {
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    if !kind.contains("assistant") {
        return Ok(());
    }
    Err(Error::NotSupported {
        path: path.to_owned(),
        what: format!("{kind} drafter checkpoints are"),
        remedy: "open the model that the drafter belongs to".to_owned(),
    })
}
