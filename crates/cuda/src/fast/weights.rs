//! Matrices as the fast kernels read them.

use lapidary_formats::{Format, Scales, TensorView};
use lapidary_ops::Result;

use super::random::Tiles;
use crate::driver::{Arena, DevPtr, Staging};
use crate::kernels::skinny_gemm::Weights;
use crate::matrix::Tied;
use crate::pack::{Form, PackedShape, pack_strips, row_scales, segments};

/// A packed matrix: runs of outputs, each of one form.
#[derive(Debug)]
pub(crate) struct Packed {
    /// First output and weights of each run; of a stack of experts one run, its shape that of one expert.
    pub runs: Vec<(usize, Weights)>,
    /// Bytes that a product with all of it reads.
    pub bytes: usize,
}

impl Packed {
    fn new(mut runs: Vec<(usize, Weights)>, stacked: bool, group_rows: usize) -> Packed {
        let bytes = runs.iter().map(|(_, w)| w.shape.bytes()).sum();
        if stacked {
            runs.iter_mut().for_each(|(_, w)| w.shape.rows = group_rows);
        }
        Packed { runs, bytes }
    }

    /// Whether single rows can be read from it as they are in `parts`: there is a kernel for the form, and packing rounded
    /// nothing.
    pub fn gathers(&self, parts: &[TensorView<'_>], random: bool) -> bool {
        let exact = random || parts.iter().all(|p| Form::is_exact(p.format));
        let row_form = |w: &Weights| matches!(w.shape.form, Form::Bf16 | Form::Fp8);
        exact && matches!(&self.runs[..], [(0, weights)] if row_form(weights))
    }
}

/// Where and how a matrix is packed.
pub(crate) struct PackOptions<'a> {
    pub arena: &'a mut Arena,
    pub staging: &'a mut Staging,
    /// Puts these in the place of the values.
    pub random: Option<&'a mut Tiles>,
    pub tied: Tied,
}

impl PackOptions<'_> {
    /// Packs stacked parts; `None` where the kernels do not take their shape, and then they stay in the bytes of their
    /// files. `group_rows` as of [`lapidary_ops::Backend::pack`]. The parts were checked.
    pub fn pack(&mut self, parts: &[TensorView<'_>], group_rows: usize) -> Result<Option<Packed>> {
        let rows: usize = parts.iter().map(|p| p.rows).sum();
        let stacked = group_rows != rows;
        let fits = |s: PackedShape| s.cols.is_multiple_of(8) && is_whole(s, stacked, group_rows);
        if let Some(tiles) = &mut self.random {
            let shape = tiles.shape(rows, parts[0].cols, self.tied)?;
            if !fits(shape) {
                return Ok(None);
            }
            let weights = tiles.fill(self.arena, self.staging.stream(), shape, self.tied)?;
            return Ok(Some(Packed::new(vec![(0, weights)], stacked, group_rows)));
        }
        let segments = segments(parts);
        if segments.iter().any(|s| !fits(s.shape)) || stacked && segments.len() != 1 {
            return Ok(None);
        }
        let mut runs = Vec::new();
        for segment in segments {
            let weights = self.strips(segment.shape, &parts[segment.parts.clone()])?;
            runs.push((segment.first_row, weights));
        }
        Ok(Some(Packed::new(runs, stacked, group_rows)))
    }

    fn strips(&mut self, shape: PackedShape, parts: &[TensorView<'_>]) -> Result<Weights> {
        let strips = self.arena.take(shape.bytes())?;
        let each = shape.strip_bytes();
        let mut ends = Vec::with_capacity(parts.len());
        for part in parts {
            ends.push(ends.last().copied().unwrap_or(0) + PackedShape::of(part).strips());
        }
        let all = ends.last().copied().unwrap_or(0);
        let mut write = |from: usize, out: &mut [u8]| in_parallel(parts, &ends, from / each, each, out);
        // SAFETY: the strips of all parts were just taken.
        unsafe { self.staging.fill(strips, all * each, each, &mut write)? };
        Ok(Weights { shape, strips, row_scales: put_row_scales(self.arena, self.staging, parts)? })
    }
}

/// Experts are read one at a time, so each is whole strips and chunks. Gate and up together are twice as high as the other
/// matrix is wide; only where both are packed can the kernels for experts be used, so what keeps one apart must keep both.
fn is_whole(shape: PackedShape, stacked: bool, group_rows: usize) -> bool {
    !stacked || group_rows.is_multiple_of(128) && shape.cols.is_multiple_of(shape.form.chunk_inputs())
}

/// Factors of outputs, where any part has one.
pub(super) fn put_row_scales(
    arena: &mut Arena,
    staging: &mut Staging,
    parts: &[TensorView<'_>],
) -> Result<DevPtr> {
    let each: Vec<Option<Vec<f32>>> = parts.iter().map(row_scales).collect();
    if each.iter().all(Option::is_none) {
        return Ok(DevPtr::NULL);
    }
    let all = parts.iter().zip(each).flat_map(|(p, s)| s.unwrap_or_else(|| vec![1.0; p.rows]));
    let bytes: Vec<u8> = all.flat_map(f32::to_le_bytes).collect();
    let ptr = arena.take(bytes.len())?;
    // SAFETY: as many bytes were just taken.
    unsafe { staging.copy(ptr, &bytes)? };
    Ok(ptr)
}

/// Writes the strips of stacked parts from strip `first` on that fill `bytes`; `ends` says behind which strip each part ends.
/// A part may be one expert's and small, so cores share all of them and not each.
fn in_parallel(parts: &[TensorView<'_>], ends: &[usize], first: usize, strip_bytes: usize, bytes: &mut [u8]) {
    let strips = bytes.len() / strip_bytes;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(strips);
    let each = strips.div_ceil(threads.max(1)).max(1);
    let write = |mut strip: usize, mut out: &mut [u8]| {
        while !out.is_empty() {
            let part = ends.partition_point(|&end| end <= strip);
            let begin = if part == 0 { 0 } else { ends[part - 1] };
            let count = (ends[part] - strip).min(out.len() / strip_bytes);
            let (own, rest) = out.split_at_mut(count * strip_bytes);
            pack_strips(&parts[part], strip - begin..strip - begin + count, own);
            (strip, out) = (strip + count, rest);
        }
    };
    std::thread::scope(|s| {
        for (i, out) in bytes.chunks_mut(each * strip_bytes).enumerate() {
            s.spawn(move || write(first + i * each, out));
        }
    });
}

/// Rows up to which a matrix is so small that both forms are kept: a router multiplies with float32.
pub(crate) const ROUTER_ROWS: usize = 256;

/// Whether a matrix is kept in the bytes of its file beside its packed form.
pub(crate) fn keeps_file_form(rows: usize, group_rows: usize, tied: Tied) -> bool {
    tied == Tied::Yes || rows == group_rows && rows <= ROUTER_ROWS
}

/// A small matrix in float32, so that kernels need to know no other format of it; exact for every format.
pub(crate) fn decoded(part: &TensorView<'_>) -> Vec<u8> {
    let mut row = vec![0.0; part.cols];
    let mut bytes = Vec::with_capacity(part.rows * part.cols * 4);
    for r in 0..part.rows {
        lapidary_formats::decode_row(part, r, &mut row);
        bytes.extend(row.iter().flat_map(|v| v.to_le_bytes()));
    }
    bytes
}

/// A view of [`decoded`] values.
pub(crate) fn float_view<'a>(part: &TensorView<'_>, bytes: &'a [u8]) -> TensorView<'a> {
    TensorView {
        name: part.name.clone(),
        rows: part.rows,
        cols: part.cols,
        format: Format::F32,
        bytes,
        scales: Scales::None,
    }
}
