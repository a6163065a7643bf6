//! What the backend says of itself: which kernel multiplies with which format, and how long phases took.

use std::time::Duration;

use lapidary_formats::{Format, Scales, TensorView};
use lapidary_ops::{KernelReport, PassTiming, Phase, Result};

use crate::backend::Compute;
use crate::driver::Event;
use crate::kernels::skinny_gemm::has_row_kernel;
use crate::pack::Form;

/// The kernel for matrices in `format`; `packs` where the fast ones are there.
pub fn kernel(format: Format, packs: bool, compute: Compute) -> KernelReport {
    if !packs {
        let fallback = compute == Compute::Fast;
        return KernelReport { format, kernel: "decoded to f32, f32 sums".into(), fallback };
    }
    let form = form_of(format);
    let mut kernel = format!("bf16 x {} on tensor cores", form.name());
    if !Form::is_exact(format) {
        kernel += ", weights rounded to bf16";
    }
    if has_row_kernel(form) {
        kernel += match form {
            Form::Fp8 | Form::Fp8Block => ", one row as f16",
            _ => ", one row as 16-bit integers",
        };
    }
    KernelReport { format, kernel, fallback: false }
}

/// The form that a matrix of `format` is packed into, whatever its scales.
fn form_of(format: Format) -> Form {
    let scales = Scales::None;
    Form::of(&TensorView { name: String::new(), rows: 0, cols: 0, format, bytes: &[], scales })
}

/// The times of marks from the first one on; the last ends the pass.
pub fn pass_timing(marks: &[(Option<Phase>, Event)]) -> Result<PassTiming> {
    let (Some((_, first)), Some((_, last))) = (marks.first(), marks.last()) else {
        return Ok(PassTiming::default());
    };
    let since = |event: &Event| -> Result<Duration> {
        Ok(Duration::from_secs_f64(event.micros_since(first)?.max(0.0) / 1e6))
    };
    let mut begun = Vec::with_capacity(marks.len());
    for (phase, event) in marks {
        if let Some(phase) = phase {
            begun.push((*phase, since(event)?));
        }
    }
    Ok(PassTiming::from_marks(&begun, since(last)?))
}
