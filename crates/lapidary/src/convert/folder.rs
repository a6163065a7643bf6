//! A safetensors checkpoint as a folder with quantised safetensors, laid out as compressed-tensors or ModelOpt write
//! them.

use std::path::Path;

use lapidary_weights::Checkpoint;
use lapidary_weights::export::{Layout, export};

use super::error::{ConvertError, Result};
use super::{ConvertReport, TensorLoss};

/// Files beside the weights that a model is not whole without.
const TEXT_FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
];

/// Writes `checkpoint` to the folder `out`, which is made where it is not there. The embedding, the head, the router,
/// norms and other small tensors stay as they are. The whole file is in memory on the way.
///
/// # Errors
/// A folder with a model in it already, and what [`export`] refuses.
pub fn to_folder(checkpoint: &Checkpoint, out: &Path, layout: Layout) -> Result<ConvertReport> {
    let io = |path: &Path, source| ConvertError::Io { path: path.to_owned(), source };
    let target = out.join("model.safetensors");
    if target.exists() {
        let source = std::io::Error::new(
            std::io::ErrorKind::AlreadyExists,
            "it is there already; name another folder",
        );
        return Err(io(&target, source));
    }
    std::fs::create_dir_all(out).map_err(|e| io(out, e))?;
    let lost = export(checkpoint, out, layout)?;
    let folder =
        if checkpoint.path().is_dir() { Some(checkpoint.path()) } else { checkpoint.path().parent() };
    for name in TEXT_FILES {
        let Some(from) = folder.map(|f| f.join(name)).filter(|f| f.is_file()) else { continue };
        std::fs::copy(&from, out.join(name)).map_err(|e| io(&from, e))?;
    }
    let losses = lost
        .into_iter()
        .map(|l| TensorLoss { tensor: l.tensor, format: l.format, bytes: l.bytes, loss: l.loss })
        .collect();
    let bytes = target.metadata().map_err(|e| io(&target, e))?.len();
    let tensors = Checkpoint::open(out)?.roles().count();
    Ok(ConvertReport { bytes, tensors, losses, ..ConvertReport::default() })
}
