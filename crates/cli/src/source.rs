//! From what a user calls a model to an opened checkpoint.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use lapidary_weights::Checkpoint;

use crate::model_args::{ModelArgs, StoreArgs};

/// Opens the model that `-m` names, or the built-in one.
pub fn open(args: &ModelArgs) -> anyhow::Result<Checkpoint> {
    match &args.model {
        Some(model) => Ok(Checkpoint::open(path(model, args.store)?)?),
        #[cfg(feature = "pebble")]
        None => Ok(lapidary::builtin()?),
        #[cfg(not(feature = "pebble"))]
        None => anyhow::bail!("no model was given and this build has none built in; name one with -m MODEL"),
    }
}

/// The name of the model in reports.
pub fn name(args: &ModelArgs) -> String {
    args.model.as_ref().map_or("built-in".to_string(), |m| m.to_string_lossy().into_owned())
}

/// The name under which a server offers the model: that of its folder, file or repository.
pub fn short_name(args: &ModelArgs) -> String {
    let Some(model) = &args.model else { return "lapidary".to_string() };
    let path = Path::new(model);
    match path.exists() {
        true => path
            .file_stem()
            .filter(|_| path.is_file())
            .or(path.file_name())
            .unwrap_or(model)
            .to_string_lossy()
            .into_owned(),
        false => model.to_string_lossy().into_owned(),
    }
}

/// Where a model's files are. Paths are opaque to us: they need not be text.
pub fn path(model: &OsStr, store: StoreArgs) -> anyhow::Result<PathBuf> {
    let path = Path::new(model);
    match model.to_str().filter(|text| !path.exists() && is_hub_name(text)) {
        Some(name) => from_hub(name, store),
        // What is not there is refused with the path in the message when it is opened.
        None => Ok(path.to_owned()),
    }
}

/// `owner/name`, perhaps with a revision and a quantisation; not `./x`, `/x`, `a/b/c` or `x.gguf`.
fn is_hub_name(text: &str) -> bool {
    let repo = text.split([':', '@']).next().unwrap_or(text);
    let parts: Vec<&str> = repo.split('/').collect();
    let file = |p: &str| p.ends_with(".gguf") || p.ends_with(".safetensors");
    matches!(&parts[..], [owner, name] if !owner.is_empty() && !owner.starts_with('.') && !name.is_empty() && !file(name))
}

#[cfg(feature = "hub")]
fn from_hub(name: &str, store: StoreArgs) -> anyhow::Result<PathBuf> {
    let snapshot = crate::commands::pull::fetch(name, store)?;
    Ok(snapshot.path().to_owned())
}

#[cfg(not(feature = "hub"))]
fn from_hub(name: &str, _: StoreArgs) -> anyhow::Result<PathBuf> {
    anyhow::bail!(
        "there is no file or folder {name}, and this build cannot download models; name a folder or a .gguf file"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_are_told_apart() {
        for name in ["google/gemma-4-E2B-it", "o/n:Q4_K_M", "o/n@main:sub/file.gguf"] {
            assert!(is_hub_name(name), "{name}");
        }
        for path in ["./o/n", "/o/n", "../n", "a/b/c", "a/model.gguf", "model", "", "a/"] {
            assert!(!is_hub_name(path), "{path}");
        }
    }
}
