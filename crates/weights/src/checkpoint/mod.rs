//! A checkpoint: whatever files a path means, seen as roles.

mod gguf_source;
mod notes;
mod open;
mod safetensors_source;
mod source;
mod text_files;

pub use source::Stored;
pub use text_files::TextFiles;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lapidary_formats::{Format, Scales, TensorView, decode_row};
use serde_json::Value;

use self::gguf_source::GgufSource;
use self::open::{Found, find, read_json, read_json_if_there};
use self::safetensors_source::SafetensorsSource;
use self::source::Source;
use crate::names::{ExpertPart, LayerRole, Modality, Role};
use crate::quant::check_scheme;
use crate::{Error, FileMap, Result, gguf};

/// An opened checkpoint. Files are mapped, headers checked, every text tensor sorted by [`Role`]; data is read when
/// a view is taken or decoded.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ConfigSource,
    text_files: TextFiles,
    source: Box<dyn Source>,
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
    /// The GGUF file itself, whose metadata also holds tokenizer and chat template.
    Gguf(Arc<gguf::File>),
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
                let source = Box::new(SafetensorsSource::new(weights.open()?, &config)?);
                let config = ConfigSource::Json { path: config_path, config, generation };
                Ok(Checkpoint { path: path.to_owned(), config, text_files, source })
            }
            Found::Gguf(file) => Checkpoint::from_gguf(path.to_owned(), gguf::File::open(file)?),
        }
    }

    /// Opens a GGUF file that is part of the program, with the checks of [`Checkpoint::open`]. `name` stands for its
    /// path. A backend that reads matrices in place needs bytes aligned as `general.alignment` says.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn from_gguf_bytes(name: &str, bytes: &'static [u8]) -> Result<Checkpoint> {
        Checkpoint::from_gguf(name.into(), gguf::File::from_static(name, bytes)?)
    }

    fn from_gguf(path: PathBuf, file: gguf::File) -> Result<Checkpoint> {
        let file = Arc::new(file);
        let source = Box::new(GgufSource::new(file.clone())?);
        Ok(Checkpoint { path, config: ConfigSource::Gguf(file), text_files: TextFiles::default(), source })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of file that the tensors come from.
    pub fn kind(&self) -> Kind {
        self.source.kind()
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
        self.source.files()
    }

    /// The bytes of those files, which every view points into. Whoever holds a clone may keep pointing into it after
    /// the checkpoint is gone.
    pub fn maps(&self) -> Vec<FileMap> {
        self.source.maps()
    }

    /// Lets the system take back the memory of a view's codes once they were copied elsewhere. The view stays valid: who
    /// reads it again waits for the file.
    pub fn release(&self, view: &TensorView<'_>) {
        self.source.release(view.bytes);
    }

    /// The length of those files.
    pub fn total_bytes(&self) -> u64 {
        self.source.total_bytes()
    }

    /// Every role that the file holds, in order.
    pub fn roles(&self) -> impl Iterator<Item = Role> + '_ {
        self.source.roles()
    }

    /// What the headers say of a role; touches no data.
    pub fn stored(&self, role: Role) -> Option<Stored<'_>> {
        self.source.stored(role)
    }

    /// Values (not bytes) in the text tensors, each counted once, unused ones included; scales are not counted.
    pub fn parameters(&self) -> u64 {
        let hint =
            |r: &Role| matches!(r, Role::RopeFreqs | Role::Layer(_, LayerRole::KScale | LayerRole::VScale));
        self.all_stored().filter(|(r, _)| !hint(r)).map(|(_, s)| s.values()).sum()
    }

    /// The formats of the text tensors, in the order of [`Format::ALL`].
    pub fn formats(&self) -> Vec<FormatShare> {
        let share = |format| {
            let of_format = self.all_stored().map(|(_, s)| s).filter(|s| s.format == format);
            let (tensors, bytes) = of_format.fold((0, 0), |(n, bytes), s| (n + 1, bytes + s.bytes));
            FormatShare { format, tensors, bytes }
        };
        Format::ALL.into_iter().map(share).filter(|s| s.tensors > 0).collect()
    }

    /// The tensors of other input paths.
    pub fn ignored(&self) -> Ignored {
        self.source.ignored()
    }

    /// What a user should hear of that is no error: from the headers, and from the views taken so far.
    pub fn notes(&self) -> Vec<String> {
        self.source.notes()
    }

    /// The view of a role, `None` where the file has no such tensor. Leading lengths are flattened into rows; a vector
    /// is one row, a scalar one value.
    ///
    /// # Errors
    /// [`Error::BadScale`].
    pub fn tensor(&self, role: Role) -> Result<Option<TensorView<'_>>> {
        self.stored(role).map(|_| self.source.view(role)).transpose()
    }

    /// The matrix `[rows, cols]` of a role that the model cannot do without.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::WrongShape`], [`Error::BadScale`].
    pub fn expect(&self, role: Role, rows: usize, cols: usize) -> Result<TensorView<'_>> {
        let Some(stored) = self.stored(role) else { return Err(self.missing(role)) };
        if stored.shape != [rows, cols] {
            return Err(stored.wrong_shape(&[rows, cols]));
        }
        self.source.view(role)
    }

    /// A vector of `len` values as float32; a scalar has one. `None` where the file has no such tensor.
    ///
    /// # Errors
    /// [`Error::WrongShape`], [`Error::WrongDtype`] when it is quantised, [`Error::NotFinite`].
    pub fn vector(&self, role: Role, len: usize) -> Result<Option<Vec<f32>>> {
        let Some(stored) = self.stored(role) else { return Ok(None) };
        let scalar = len == 1 && stored.shape.is_empty();
        if stored.shape != [len] && !scalar {
            return Err(stored.wrong_shape(&[len]));
        }
        let (path, tensor) = (stored.file.to_owned(), stored.name.to_owned());
        if !matches!(stored.format, Format::F32 | Format::F16 | Format::Bf16) {
            let (expected, found) = ("F32, F16 or BF16".to_owned(), stored.format.to_string());
            return Err(Error::WrongDtype { path, tensor, expected, found });
        }
        let mut values = vec![0.0; len];
        decode_row(&self.source.view(role)?, 0, &mut values);
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
        let index = |role| match role {
            Role::Layer(l, LayerRole::Expert { index, .. }) if l == layer => Some(index as usize),
            _ => None,
        };
        self.roles().filter_map(index).max().map_or(0, |last| last + 1)
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
            return Err(stored.wrong_shape_text("[experts, rows, columns]".to_owned()));
        };
        if half.is_some() && !rows.is_multiple_of(2) {
            return Err(stored.wrong_shape_text(format!("[{experts}, an even number of rows, {cols}]")));
        }
        if e as usize >= experts {
            return Ok(None);
        }
        let slab = self.source.slab(role, e as usize, rows)?;
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
                Err(stored.wrong_shape(&[stored.shape[0], rows, cols]))
            }
            (stored, _) => Err(stored.expect("the view came from it").wrong_shape(&[rows, cols])),
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
        roles.into_iter().find(|(r, _)| self.stored(*r).is_some())
    }

    fn all_stored(&self) -> impl Iterator<Item = (Role, Stored<'_>)> {
        self.roles().filter_map(|r| Some((r, self.stored(r)?)))
    }

    fn missing(&self, role: Role) -> Error {
        Error::MissingTensor { path: self.path.clone(), tensor: role.to_string() }
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
