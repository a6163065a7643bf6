//! Finds the files of a checkpoint behind a path: a folder, a `.safetensors` file or a `.gguf` file.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::safetensors::{INDEX_FILE, Shards};
use crate::{Error, Result};

/// `config.json` and the files like it are small; a larger one is something else.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// Which files a path means.
#[derive(Debug)]
pub(super) enum Found {
    /// The folder of a `config.json`, and the file of the tensors or the index of several.
    Safetensors { folder: PathBuf, weights: Weights },
    /// A GGUF file, the first of a split set.
    Gguf(PathBuf),
}

#[derive(Debug)]
pub(super) enum Weights {
    File(PathBuf),
    Index(PathBuf),
}

impl Weights {
    pub fn open(&self) -> Result<Shards> {
        match self {
            Weights::File(path) => Shards::open_file(path),
            Weights::Index(path) => Shards::open_index(path),
        }
    }
}

/// Looks behind a path.
///
/// # Errors
/// [`Error::NoCheckpoint`] saying what the folder holds and what was looked for; [`Error::NotSupported`] for a folder
/// with a LoRA adapter.
pub(super) fn find(path: &Path) -> Result<Found> {
    let metadata = std::fs::metadata(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    if metadata.is_dir() {
        return find_in_folder(path);
    }
    let folder = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        _ => PathBuf::from("."),
    };
    match extension(path) {
        Some("gguf") => Ok(Found::Gguf(path.to_owned())),
        Some("safetensors") => {
            refuse_adapter(&folder)?;
            let index = folder.join(INDEX_FILE);
            let weights = if index.is_file() && Shards::index_lists(&index, path)? {
                Weights::Index(index)
            } else {
                Weights::File(path.to_owned())
            };
            Ok(Found::Safetensors { folder, weights })
        }
        _ => Err(Error::NoCheckpoint {
            path: path.to_owned(),
            what: "expected a folder, a .gguf file, or a .safetensors file beside its config.json".to_owned(),
        }),
    }
}

fn find_in_folder(folder: &Path) -> Result<Found> {
    let io = |source| Error::Io { path: folder.to_owned(), source };
    refuse_adapter(folder)?;
    let (mut safetensors, mut gguf, mut later_part) = (Vec::new(), Vec::new(), None);
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        match extension(&path) {
            Some("safetensors") => safetensors.push(path),
            Some("gguf") if is_projector(&path) => {}
            Some("gguf") if is_later_part(&path) => later_part = Some(path),
            Some("gguf") => gguf.push(path),
            _ => {}
        }
    }
    // Without its first part a split set is still what the folder holds; opening it names the part that is missing.
    if gguf.is_empty() {
        gguf.extend(later_part);
    }
    let (single, index) = (folder.join("model.safetensors"), folder.join(INDEX_FILE));
    let weights = if single.is_file() {
        Some(Weights::File(single))
    } else if index.is_file() {
        Some(Weights::Index(index))
    } else if let [only] = &safetensors[..] {
        Some(Weights::File(only.clone()))
    } else {
        None
    };
    let config = folder.join("config.json").is_file();
    let none = |what: String| Err(Error::NoCheckpoint { path: folder.to_owned(), what });
    match (weights, &gguf[..]) {
        (Some(weights), _) if config => Ok(Found::Safetensors { folder: folder.to_owned(), weights }),
        (_, [only]) => Ok(Found::Gguf(only.clone())),
        (_, [_, ..]) => {
            gguf.sort();
            none(format!("it holds {} .gguf files; name one, such as {}", gguf.len(), gguf[0].display()))
        }
        (Some(_), []) => none("it holds tensors but no config.json; put the model's config.json beside them".to_owned()),
        (None, []) if safetensors.is_empty() && config => none(
            "it holds a config.json but no tensors; expected model.safetensors, or its shards with their index".to_owned(),
        ),
        (None, []) if safetensors.is_empty() => {
            none("it holds neither a config.json with .safetensors files nor a .gguf file".to_owned())
        }
        (None, []) => none(format!("it holds {} .safetensors files and no {INDEX_FILE}", safetensors.len())),
    }
}

fn refuse_adapter(folder: &Path) -> Result<()> {
    let adapter = folder.join("adapter_config.json");
    if !adapter.is_file() {
        return Ok(());
    }
    Err(Error::NotSupported {
        path: adapter,
        what: "LoRA adapters are".to_owned(),
        remedy: "merge the adapter into its model, or take adapter_config.json out of the folder to run the model alone"
            .to_owned(),
    })
}

/// The extension in lower case, where it is one that matters.
fn extension(path: &Path) -> Option<&'static str> {
    let found = path.extension()?;
    ["gguf", "safetensors"].into_iter().find(|e| found.eq_ignore_ascii_case(OsStr::new(e)))
}

/// Vision and audio projectors are published beside the model as `mmproj-*.gguf`.
fn is_projector(path: &Path) -> bool {
    path.file_stem().is_some_and(|s| s.to_string_lossy().to_lowercase().contains("mmproj"))
}

/// Whether the name ends in `-0000M-of-0000N` with M other than 1.
fn is_later_part(path: &Path) -> bool {
    let Some(stem) = path.file_stem().map(|s| s.to_string_lossy()) else { return false };
    let Some((rest, count)) = stem.rsplit_once("-of-") else { return false };
    let Some((_, part)) = rest.rsplit_once('-') else { return false };
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    digits(count) && digits(part) && part != "00001"
}

/// Reads a JSON object.
///
/// # Errors
/// [`Error::Io`], or [`Error::BadConfig`] when it is no JSON object or too large to be one.
pub(super) fn read_json(path: &Path) -> Result<Value> {
    let bad = |what: String| Error::BadConfig { path: path.to_owned(), what };
    let io = |source| Error::Io { path: path.to_owned(), source };
    let length = std::fs::metadata(path).map_err(io)?.len();
    if length > MAX_JSON_BYTES {
        return Err(bad(format!("{length} bytes, expected at most {MAX_JSON_BYTES}")));
    }
    let text = std::fs::read(path).map_err(io)?;
    let value: Value = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    if value.is_object() { Ok(value) } else { Err(bad("expected a JSON object".to_owned())) }
}

/// As [`read_json`], `None` where there is no such file.
pub(super) fn read_json_if_there(path: &Path) -> Result<Option<Value>> {
    if path.is_file() { read_json(path).map(Some) } else { Ok(None) }
}
