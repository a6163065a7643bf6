//! Weight matrices on the device, in the bytes of their files.
//!
//! Stacked parts of one format are laid end to end, so that a matrix of 128 experts is one run of rows. Scales
//! beside the codes take one of two forms: one float a row (a tensor's scale is repeated, which changes no
//! product), or an array of blocks.

use std::sync::Arc;

use lapidary_formats::{Format, Scales, TensorView, validate};
use lapidary_ops::{Error, Result};

use crate::args::{MatrixArgs, PartArgs};
use crate::driver::{Arena, Context, DevPtr, Pinned, Staging, copy_in_parallel};
use crate::fast::{PackOptions, Packed, ROUTER_ROWS, Tiles, decoded, float_view, keeps_file_form, repeat};

/// A matrix of stacked parts, `[rows, cols]` = `[outputs, inputs]`, in one form or both.
#[derive(Debug)]
pub(crate) struct Matrix {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// In the bytes of its file.
    pub file: Option<MatrixArgs>,
    /// Its values in float32, where it is small enough to be a router.
    pub floats: Option<DevPtr>,
    /// As the fast kernels read it.
    pub packed: Option<Packed>,
    /// Bytes that a product with all of it reads.
    pub bytes: usize,
}

/// Whether a matrix is looked up in as well as multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tied {
    Yes,
    No,
}

/// Where weights go.
pub(crate) struct Store<'a> {
    pub arena: &'a mut Arena,
    pub staging: &'a mut Staging,
    /// Where rows go that the device is to read from the host's memory; `None` for the device's own.
    pub host: Option<(&'a Arc<Context>, &'a mut Vec<Pinned>)>,
}

impl Matrix {
    /// Checks the parts and takes them over in the form that the mode wants: packed where `pack` says how and the
    /// fast kernels take the shape, in the bytes of the file otherwise. Small matrices get both, and tied vocabularies
    /// of which the packed form gives no single row.
    ///
    /// # Errors
    /// `Tensor` for parts of unequal width and values that the format's rules forbid, `OutOfMemory`.
    pub fn new(
        store: &mut Store<'_>,
        parts: &[TensorView<'_>],
        group_rows: usize,
        tied: Tied,
        fast: Option<&mut Option<Tiles>>,
    ) -> Result<Matrix> {
        let Some(random) = fast else { return Matrix::in_file_form(store, parts) };
        let (rows, cols) = shape(parts)?;
        // What is float32 in a file is a router, which measurements want real: it spreads rows over experts.
        let random = random.as_mut().filter(|_| parts[0].format != Format::F32);
        let is_random = random.is_some();
        if !is_random {
            check_all(parts)?;
        }
        let mut tiles = random;
        let packed =
            PackOptions { arena: store.arena, staging: store.staging, random: tiles.as_deref_mut(), tied }
                .pack(parts, group_rows)?;
        // A router is multiplied with in float32 whatever its packed form can do.
        let gathers = tied == Tied::Yes && packed.as_ref().is_some_and(|p| p.gathers(parts, is_random));
        let (file, floats) = match (&packed, tiles) {
            (Some(_), _) if !keeps_file_form(rows, group_rows, tied) || gathers => (None, None),
            (_, Some(tiles)) => (Some(Matrix::random_rows(store, tiles, (rows, cols), tied)?), None),
            (_, None) if rows <= ROUTER_ROWS => {
                let (file, floats) = Matrix::in_floats(store, parts)?;
                (file, Some(floats))
            }
            (_, None) => (Matrix::in_file_form(store, parts)?.file, None),
        };
        let bytes = packed.as_ref().map_or(parts.iter().map(|p| p.bytes.len()).sum(), |p| p.bytes);
        Ok(Matrix { rows, cols, file, floats, packed, bytes })
    }

    /// A table of which only rows are read.
    pub fn table(store: &mut Store<'_>, part: &TensorView<'_>, random: &mut Option<Tiles>) -> Result<Matrix> {
        match random {
            None => Matrix::in_file_form(store, std::slice::from_ref(part)),
            Some(tiles) => {
                let file = Some(Matrix::random_rows(store, tiles, (part.rows, part.cols), Tied::No)?);
                Ok(Matrix { rows: part.rows, cols: part.cols, file, floats: None, packed: None, bytes: 0 })
            }
        }
    }

    /// Small parts, decoded: as a matrix, and where its values are.
    fn in_floats(store: &mut Store<'_>, parts: &[TensorView<'_>]) -> Result<(Option<MatrixArgs>, DevPtr)> {
        let values: Vec<Vec<u8>> = parts.iter().map(decoded).collect();
        let views: Vec<_> = parts.iter().zip(&values).map(|(p, v)| float_view(p, v)).collect();
        let run = store.run(&views, 0)?;
        let table = store.put(&[&run_bytes(&run)])?;
        let args = MatrixArgs { parts: table, count: 1, rows: run.rows, cols: parts[0].cols as i32, pad: 0 };
        Ok((Some(args), run.codes))
    }

    /// Random rows in the bytes of a file.
    fn random_rows(
        store: &mut Store<'_>,
        tiles: &mut Tiles,
        (rows, cols): (usize, usize),
        tied: Tied,
    ) -> Result<MatrixArgs> {
        let tile = tiles.tile(cols, tied)?;
        let view = tile.view("tile");
        let many = |n: usize| n / view.rows * rows + n % view.rows * rows / view.rows;
        let mut fill = |bytes: &[u8]| -> Result<DevPtr> {
            let len = many(bytes.len());
            if let Some(host) = &mut store.host {
                let memory = on_host(host, len)?;
                memory.chunks_mut(bytes.len().max(1)).for_each(|to| to.copy_from_slice(&bytes[..to.len()]));
                return Ok(DevPtr(memory.as_ptr() as u64));
            }
            let ptr = store.arena.take(len)?;
            repeat(store.staging.stream(), ptr, len, bytes)?;
            Ok(ptr)
        };
        let floats = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (scales, row_scale) = match &view.scales {
            Scales::None | Scales::Block128 { .. } => (DevPtr::NULL, DevPtr::NULL),
            Scales::Tensor(s) => (DevPtr::NULL, fill(&floats(&vec![*s; view.rows]))?),
            Scales::Row(s) => (DevPtr::NULL, fill(&floats(s))?),
            Scales::Nvfp4 { blocks, tensor } => (fill(blocks)?, fill(&floats(&vec![*tensor; view.rows]))?),
            Scales::Group32Bf16(s) => (fill(s)?, DevPtr::NULL),
        };
        let run = PartArgs {
            codes: fill(view.bytes)?,
            scales,
            row_scale,
            row_bytes: view.row_bytes() as i64,
            first_row: 0,
            rows: rows as i32,
            format: format_code(view.format),
            block_cols: 0,
            first_scaled_row: 0,
            pad: 0,
        };
        let parts = store.put(&[&run_bytes(&run)])?;
        Ok(MatrixArgs { parts, count: 1, rows: rows as i32, cols: cols as i32, pad: 0 })
    }

    /// Checks the parts and copies them to the device.
    ///
    /// # Errors
    /// `Tensor` for parts of unequal width and values that the format's rules forbid, `OutOfMemory`.
    fn in_file_form(store: &mut Store<'_>, parts: &[TensorView<'_>]) -> Result<Matrix> {
        let (rows, cols) = shape(parts)?;
        check_all(parts)?;
        let (mut runs, mut next) = (Vec::new(), 0);
        while next < parts.len() {
            let len = 1 + parts[next..].windows(2).take_while(|pair| stacks(&pair[0], &pair[1])).count();
            let first_row = parts[..next].iter().map(|p| p.rows).sum();
            runs.push(store.run(&parts[next..next + len], first_row)?);
            next += len;
        }
        let table: Vec<u8> = runs.iter().flat_map(run_bytes).collect();
        let args = MatrixArgs {
            parts: store.put(&[&table])?,
            count: runs.len() as i32,
            rows: rows as i32,
            cols: cols as i32,
            pad: 0,
        };
        let bytes = parts.iter().map(|p| p.bytes.len()).sum();
        Ok(Matrix { rows, cols, file: Some(args), floats: None, packed: None, bytes })
    }
}

/// Outputs and inputs of stacked parts.
fn shape(parts: &[TensorView<'_>]) -> Result<(usize, usize)> {
    let Some(first) = parts.first() else {
        return Err(Error::Tensor { tensor: "matrix".into(), reason: "has no parts".into() });
    };
    let mut rows = 0usize;
    for part in parts {
        let fail = |reason: String| Err(Error::Tensor { tensor: part.name.clone(), reason });
        if part.cols != first.cols {
            return fail(format!("has {} columns, {} has {}", part.cols, first.name, first.cols));
        }
        rows += part.rows;
        if rows > i32::MAX as usize || part.cols > i32::MAX as usize {
            return fail(format!("{rows} x {} is more than a kernel counts to", part.cols));
        }
    }
    Ok((rows, first.cols))
}

/// Checks every part, many small ones side by side.
fn check_all(parts: &[TensorView<'_>]) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    if parts.len() < cores {
        return parts.iter().try_for_each(check);
    }
    let alone = |part: &TensorView<'_>| {
        validate(part).map_err(|e| Error::Tensor { tensor: part.name.clone(), reason: e.to_string() })
    };
    std::thread::scope(|s| {
        let some = parts.chunks(parts.len().div_ceil(cores));
        let workers: Vec<_> = some.map(|some| s.spawn(move || some.iter().try_for_each(alone))).collect();
        workers.into_iter().try_for_each(|w| w.join().expect("a check does not panic"))
    })
}

/// Checks lengths, scales and codes, with as many threads as there are cores where there is much to check.
fn check(part: &TensorView<'_>) -> Result<()> {
    const WORTH_A_THREAD: usize = 4 << 20;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = cores.min(part.bytes.len() / WORTH_A_THREAD).min(part.rows).max(1);
    let sane =
        part.format.row_bytes(part.cols).and_then(|b| b.checked_mul(part.rows)) == Some(part.bytes.len());
    let result = if threads == 1 || !sane {
        validate(part)
    } else {
        std::thread::scope(|s| {
            let border = |t: usize| part.rows * t / threads;
            let ask = |t| move || validate(&part.slice_rows(border(t), border(t + 1) - border(t)));
            let workers: Vec<_> = (0..threads).map(|t| s.spawn(ask(t))).collect();
            let results = workers.into_iter().map(|w| w.join().expect("a check does not panic"));
            results.collect::<Vec<_>>().into_iter().collect()
        })
    };
    result.map_err(|e| Error::Tensor { tensor: part.name.clone(), reason: e.to_string() })
}

/// Whether `next` can be laid behind `before` as one run of rows.
fn stacks(before: &TensorView<'_>, next: &TensorView<'_>) -> bool {
    before.format == next.format
        && match (&before.scales, &next.scales) {
            (Scales::Block128 { first_row, .. }, Scales::Block128 { first_row: after, .. }) => {
                (first_row + before.rows).is_multiple_of(128) && after.is_multiple_of(128)
            }
            (Scales::Block128 { .. }, _) | (_, Scales::Block128 { .. }) => false,
            _ => true,
        }
}

impl Store<'_> {
    /// Copies pieces to the device, end to end.
    fn put(&mut self, pieces: &[&[u8]]) -> Result<DevPtr> {
        let ptr = self.arena.take(pieces.iter().map(|p| p.len()).sum())?;
        let mut at = 0;
        for piece in pieces {
            // SAFETY: the sum of all pieces was just taken.
            unsafe { self.staging.copy(ptr.at(at), piece)? };
            at += piece.len();
        }
        Ok(ptr)
    }

    /// Copies rows, or what they are scaled by, to where they are read: the device, or the host's memory.
    fn put_rows(&mut self, pieces: &[&[u8]]) -> Result<DevPtr> {
        let Some(host) = &mut self.host else { return self.put(pieces) };
        let mut rest = on_host(host, pieces.iter().map(|p| p.len()).sum())?;
        let ptr = DevPtr(rest.as_ptr() as u64);
        for piece in pieces {
            let (own, after) = rest.split_at_mut(piece.len());
            copy_in_parallel(piece, own);
            rest = after;
        }
        Ok(ptr)
    }

    /// Takes over parts of one format and kind of scale.
    fn run(&mut self, parts: &[TensorView<'_>], first_row: usize) -> Result<PartArgs> {
        let first = &parts[0];
        let rows: usize = parts.iter().map(|p| p.rows).sum();
        let codes: Vec<&[u8]> = parts.iter().map(|p| p.bytes).collect();
        let mut run = PartArgs {
            codes: self.put_rows(&codes)?,
            scales: DevPtr::NULL,
            row_scale: DevPtr::NULL,
            row_bytes: first.row_bytes() as i64,
            first_row: first_row as i32,
            rows: rows as i32,
            format: format_code(first.format),
            block_cols: 0,
            first_scaled_row: 0,
            pad: 0,
        };
        let (mut row_scales, mut blocks) = (Vec::new(), Vec::new());
        let mut any_row_scale = false;
        for part in parts {
            match &part.scales {
                Scales::None => row_scales.extend(std::iter::repeat_n(1.0f32, part.rows)),
                Scales::Tensor(scale) => {
                    any_row_scale = true;
                    row_scales.extend(std::iter::repeat_n(*scale, part.rows));
                }
                Scales::Row(scales) => {
                    any_row_scale = true;
                    row_scales.extend_from_slice(scales);
                }
                Scales::Block128 { values, first_row } => {
                    let across = part.cols.div_ceil(128);
                    let (from, to) = (first_row / 128, (first_row + part.rows).div_ceil(128));
                    if run.block_cols == 0 {
                        run.block_cols = across as i32;
                        run.first_scaled_row = (first_row % 128) as i32;
                    }
                    let needed = &values[from * across..to * across];
                    blocks.extend(needed.iter().flat_map(|v| v.to_le_bytes()));
                }
                Scales::Nvfp4 { blocks: scales, tensor } => {
                    any_row_scale = true;
                    row_scales.extend(std::iter::repeat_n(*tensor, part.rows));
                    blocks.extend_from_slice(scales);
                }
                Scales::Group32Bf16(scales) => blocks.extend_from_slice(scales),
            }
        }
        if any_row_scale {
            let scales: Vec<u8> = row_scales.iter().flat_map(|v| v.to_le_bytes()).collect();
            run.row_scale = self.put_rows(&[&scales])?;
        }
        if !blocks.is_empty() {
            run.scales = self.put_rows(&[&blocks])?;
        }
        Ok(run)
    }
}

/// `len` bytes of the host's memory that the device reads at the host's own address.
fn on_host<'a>(
    (context, list): &'a mut (&Arc<Context>, &mut Vec<Pinned>),
    len: usize,
) -> Result<&'a mut [u8]> {
    list.push(Pinned::new(context, len)?);
    let memory = list.last_mut().expect("just pushed");
    Ok(&mut memory.bytes_mut()[..len])
}

/// The number that kernels know a format by: `enum Format` of kernels/common/decode.cuh.
fn format_code(format: Format) -> i32 {
    Format::ALL.iter().position(|&f| f == format).map_or(-1, |i| i as i32)
}

fn run_bytes(run: &PartArgs) -> [u8; size_of::<PartArgs>()] {
    // SAFETY: plain numbers without padding.
    unsafe { std::mem::transmute(*run) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_the_numbers_of_the_kernels() {
        // The order of `enum Format` in decode.cuh.
        let text = include_str!("../kernels/common/decode.cuh");
        let body = text.split("enum Format {").nth(1).and_then(|t| t.split('}').next()).unwrap();
        let names: Vec<String> = body
            .split(',')
            .map(|n| n.trim().replace('_', "").to_lowercase())
            .filter(|n| !n.is_empty())
            .collect();
        let ours = Format::ALL.map(|f| match f {
            Format::Fp8E4M3 => "fp8".to_string(),
            other => format!("{other:?}").replace('_', "").to_lowercase(),
        });
        assert_eq!(names, ours);
    }

    #[test]
    fn blocks_stack_only_at_their_borders() {
        let view = |rows, first_row| TensorView {
            name: "w".into(),
            rows,
            cols: 128,
            format: Format::Fp8E4M3,
            bytes: &[],
            scales: Scales::Block128 { values: Vec::new(), first_row },
        };
        assert!(stacks(&view(256, 0), &view(5, 0)));
        assert!(!stacks(&view(250, 0), &view(5, 0)));
        assert!(!stacks(&view(256, 0), &view(5, 64)));
        assert!(stacks(&view(64, 64), &view(5, 128)));
        let row = TensorView { scales: Scales::Tensor(1.0), ..view(256, 0) };
        assert!(!stacks(&view(256, 0), &row) && stacks(&row, &row));
    }
}
