//! A safetensors checkpoint in another layout of safetensors, with what lies beside the weights.

use std::path::{Path, PathBuf};

use lapidary_weights::Checkpoint;
use lapidary_weights::export::{Exported, Layout, export_each};

use super::error::{ConvertError, Result};
use super::{ConvertReport, EncodingError, MatrixReport, Written};

/// The files beside the weights that belong to a model in any layout.
const COMPANIONS: [&str; 11] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// Writes `checkpoint` into the folder `out`, which must not exist: `config.json` with the scheme, one
/// `model.safetensors`, and the tokenizer's and template's files. One matrix is in memory at a time; the folder takes its
/// name when it is complete.
///
/// # Errors
/// [`ConvertError::Weights`] for a checkpoint that isn't plain safetensors, a width that the format can't have, or a file
/// that can't be written; [`ConvertError::Io`], also where `out` exists.
pub fn to_safetensors(
    checkpoint: &Checkpoint,
    out: &Path,
    layout: Layout,
    progress: &mut dyn FnMut(Written),
) -> Result<ConvertReport> {
    if out.symlink_metadata().is_ok() {
        return Err(io(out)(std::io::ErrorKind::AlreadyExists.into()));
    }
    let part = PartFolder::beside(out)?;
    let mut report = ConvertReport::default();
    export_each(checkpoint, &part.0, layout, &mut |Exported { name, source, written, done, total }| {
        report.tensors += 1;
        if source.rows > 1 {
            let mut error = EncodingError::default();
            error.add_views(source, written);
            report.matrices.push(MatrixReport {
                tensor: name.to_owned(),
                rows: source.rows,
                cols: source.cols,
                from: source.format,
                format: written.format,
                error,
            });
        }
        progress(Written { done, total });
    })?;
    let ignored = checkpoint.ignored();
    if ignored.tensors() > 0 {
        report
            .notes
            .push(format!("{} tensors of vision and audio are copied as they are", ignored.tensors()));
    }
    let from = checkpoint.files()[0].parent().unwrap_or(Path::new("."));
    for name in COMPANIONS {
        let companion = from.join(name);
        if companion.is_file() {
            std::fs::copy(&companion, part.0.join(name)).map_err(io(&companion))?;
        }
    }
    let weights = part.0.join("model.safetensors");
    report.bytes = std::fs::metadata(&weights).map_err(io(&weights))?.len();
    std::fs::rename(&part.0, out).map_err(io(out))?;
    Ok(report)
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> ConvertError {
    let path = path.to_owned();
    |source| ConvertError::Io { path, source }
}

/// A folder that is removed again unless it was renamed.
struct PartFolder(PathBuf);

impl PartFolder {
    fn beside(out: &Path) -> Result<PartFolder> {
        let mut name = out.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let path = out.with_file_name(name);
        std::fs::create_dir(&path).map_err(io(&path))?;
        Ok(PartFolder(path))
    }
}

impl Drop for PartFolder {
    fn drop(&mut self) {
        // It is gone when the conversion succeeded, and there is nobody to tell when it can't be removed.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
