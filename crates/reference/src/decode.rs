//! From a checkpoint's codes to float32.

use lapidary_formats::{decode_row, validate};
use lapidary_ops::{Error, Result, TensorView};

/// All values of `view`, row after row.
pub(crate) fn decode(view: &TensorView<'_>) -> Result<Vec<f32>> {
    validate(view).map_err(|error| {
        // The error names the tensor, and so does the one that it becomes.
        let text = error.to_string();
        let reason = text.strip_prefix(&format!("tensor {}: ", view.name)).unwrap_or(&text).to_string();
        Error::Tensor { tensor: view.name.clone(), reason }
    })?;
    let len = view.rows * view.cols;
    let mut out = Vec::new();
    out.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
        what: view.name.clone(),
        needed: len.saturating_mul(4),
        available: 0,
    })?;
    out.resize(len, 0.0);
    for (r, row) in out.chunks_exact_mut(view.cols).enumerate() {
        decode_row(view, r, row);
    }
    Ok(out)
}
