//! From a checkpoint's codes to float32.

use half::{bf16, f16};
use lapidary_ops::{Error, Format, Result, TensorView};

/// All values of `view`, row after row.
pub(crate) fn decode(view: &TensorView<'_>) -> Result<Vec<f32>> {
    let bad = |reason: String| Error::Tensor { tensor: view.name.clone(), reason };
    let row_bytes = view.format.row_bytes(view.cols).ok_or_else(|| {
        bad(format!(
            "{} columns are no whole number of {} blocks of {}",
            view.cols,
            view.format,
            view.format.block_len()
        ))
    })?;
    let needed = row_bytes.checked_mul(view.rows).ok_or_else(|| bad("its size overflows".into()))?;
    if view.bytes.len() != needed {
        return Err(bad(format!("{} bytes, its shape needs {needed}", view.bytes.len())));
    }
    let mut out = Vec::new();
    out.try_reserve_exact(view.rows * view.cols).map_err(|_| Error::OutOfMemory {
        what: view.name.clone(),
        needed: view.rows * view.cols * 4,
        available: 0,
    })?;
    let pairs = || view.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match view.format {
        Format::F32 => {
            out.extend(view.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        Format::F16 => out.extend(pairs().map(|b| f16::from_le_bytes(b).to_f32())),
        Format::Bf16 => out.extend(pairs().map(|b| bf16::from_le_bytes(b).to_f32())),
        other => {
            return Err(Error::Unsupported {
                device: "reference".into(),
                what: format!("{} in {other}", view.name),
            });
        }
    }
    if let Some(i) = out.iter().position(|v| !v.is_finite()) {
        return Err(bad(format!(
            "value {} at row {} column {} is not finite",
            out[i],
            i / view.cols,
            i % view.cols
        )));
    }
    Ok(out)
}
