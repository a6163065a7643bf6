//! Weight matrices as the backend holds them.
//!
//! A part is packed into int8 [tiles](Tiles) where the mode and the format have a kernel for them, [late](Late) where its bytes
//! lie in a file map that the backend holds. Otherwise it
//! keeps the bytes of its file format, in place where they lie in a file map that the backend holds, else
//! copied; a tile of rows is decoded at a time. Numbers in F32, F16, BF16 and FP8 [move](Matrix::move_in) from a file's small pages
//! to huge ones once the first pass is over. Experts that are not to be resident stay in the file map too, and a
//! tile of rows is packed whenever it is multiplied, which gives the same bits. No rows are held in two forms.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lapidary_formats::{Format, Scales, TensorView};
use lapidary_ops::{Error, Result};

use crate::decode::decode_row;
use crate::file_rows::{FileRows, Maps, find};
use crate::int8::activations::QuantRows;
use crate::int8::tiles::{Packer, Tiles};
use crate::late::{Allowance, Late, product_from_file};
use crate::level::Isa;
use crate::memory::{Grow, Slabs};
use crate::team::Team;

/// What taking over a matrix needs of its backend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing<'a> {
    pub isa: Isa,
    /// Whether to pack for int8 products.
    pub int8: bool,
    pub team: &'a Team,
    pub slabs: &'a Slabs,
    /// What passes may spend on packing.
    pub allowance: &'a Arc<Allowance>,
    pub maps: Maps<'a>,
}

/// A matrix of stacked parts, `[rows, cols]` = `[outputs, inputs]`.
#[derive(Debug)]
pub(crate) struct Matrix {
    /// Outputs of all parts.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The parts in order.
    pub parts: Vec<Part>,
    /// Whether rows that are about to be used are asked for ahead.
    paged: bool,
    /// Whether rows in a file map may move to memory of their own.
    moves: bool,
}

/// Consecutive rows of a matrix that share a format.
#[derive(Debug)]
pub(crate) struct Part {
    /// Row of the matrix that is this part's first.
    pub first_row: usize,
    /// The weights.
    pub weights: Weights,
}

/// The weights of a part.
#[derive(Debug)]
pub(crate) enum Weights {
    /// In the bytes of their format.
    File(FileRows),
    /// Packed.
    Tiles(Tiles),
    /// Packed when a pass needs them.
    Late(Late),
    /// In the bytes of their format inside a file map, packed a tile at a time for every product.
    Paged(FileRows, Packer),
}

impl Matrix {
    /// Takes over and checks the parts.
    pub fn new(packing: Packing<'_>, parts: &[TensorView<'_>]) -> Result<Matrix> {
        let matrix = Matrix::of(parts, |part| {
            if packing.int8
                && let Some(packed) = pack(packing, part)?
            {
                return Ok(packed);
            }
            in_row_chunks(packing.team, part, |chunk, _| check(chunk))?;
            FileRows::new(part, packing.maps).map(Weights::File)
        })?;
        Ok(Matrix { moves: true, ..matrix })
    }

    /// Takes over the parts without reading them where they lie in a file map: experts of a model that is larger than
    /// memory. Their values are not checked; one that is not finite shows in the logits.
    pub fn paged(packing: Packing<'_>, parts: &[TensorView<'_>]) -> Result<Matrix> {
        let matrix = Matrix::of(parts, |part| {
            if find(packing.maps, part.bytes).is_none() || !is_sliceable(part) {
                return Matrix::new(packing, std::slice::from_ref(part)).map(Matrix::only);
            }
            let file = FileRows::new(part, packing.maps)?;
            Ok(match Packer::new(packing.isa, part).filter(|_| packing.int8) {
                Some(packer) => Weights::Paged(file, packer),
                None => Weights::File(file),
            })
        })?;
        Ok(Matrix { paged: true, moves: false, ..matrix })
    }

    /// The weights of a matrix of one part.
    fn only(self) -> Weights {
        self.parts.into_iter().next().expect("a matrix has parts").weights
    }

    /// Takes over a matrix that is only looked up in. Where it stays in a file map its values are not read, so
    /// that a table of gigabytes costs nothing to load.
    pub fn table(packing: Packing<'_>, part: &TensorView<'_>) -> Result<Matrix> {
        Matrix::of(std::slice::from_ref(part), |part| {
            let shaped = part.format.row_bytes(part.cols).and_then(|b| b.checked_mul(part.rows));
            let plain = matches!(part.scales, Scales::None) && !takes_scales(part.format);
            if !(plain && part.rows > 0 && part.cols > 0 && shaped == Some(part.bytes.len())) {
                check(part)?;
            } else if find(packing.maps, part.bytes).is_none() {
                in_row_chunks(packing.team, part, |chunk, _| check(chunk))?;
            }
            FileRows::new(part, packing.maps).map(Weights::File)
        })
    }

    fn of(parts: &[TensorView<'_>], take: impl Fn(&TensorView<'_>) -> Result<Weights>) -> Result<Matrix> {
        let Some(first) = parts.first() else {
            return Err(Error::Tensor { tensor: "matrix".into(), reason: "has no parts".into() });
        };
        let parts_of = Vec::with_capacity(parts.len());
        let mut matrix = Matrix { rows: 0, cols: first.cols, parts: parts_of, paged: false, moves: false };
        for part in parts {
            if part.cols != first.cols {
                let reason = format!("has {} columns, {} has {}", part.cols, first.name, first.cols);
                return Err(Error::Tensor { tensor: part.name.clone(), reason });
            }
            matrix.parts.push(Part { first_row: matrix.rows, weights: take(part)? });
            matrix.rows += part.rows;
        }
        Ok(matrix)
    }

    /// The parts that are packed late and not yet as a whole.
    pub fn late(&self) -> impl Iterator<Item = &Late> {
        self.parts.iter().filter_map(|p| if let Weights::Late(late) = &p.weights { Some(late) } else { None })
    }

    /// Makes ordinary ones of late parts that are packed; the number of those that are not.
    pub fn settle(&mut self) -> usize {
        if self.late().any(Late::is_packed) {
            let settled = |part: Part| match part.weights {
                Weights::Late(late) if late.is_packed() => {
                    Part { weights: Weights::Tiles(late.into_tiles()), ..part }
                }
                _ => part,
            };
            self.parts = std::mem::take(&mut self.parts).into_iter().map(settled).collect();
        }
        self.late().count()
    }

    /// Whether [`move_in`](Matrix::move_in) has something to move.
    pub fn is_to_move(&self) -> bool {
        self.moves
            && self.parts.iter().any(|p| matches!(&p.weights, Weights::File(file) if file.is_to_move()))
    }

    /// Moves numbers from a file map to memory on huge pages, which is read at the speed of the memory where small pages
    /// cost a third of it, and gives back what they took there. Where there is no memory they stay.
    pub fn move_in(&mut self, team: &Team, slabs: &Slabs) -> Result<()> {
        for part in self.parts.iter_mut().filter(|_| self.moves) {
            if let Weights::File(file) = &mut part.weights
                && file.is_to_move()
            {
                file.move_in(team, slabs)?;
            }
        }
        self.moves = false;
        Ok(())
    }

    /// Lets rows stay where they are.
    pub fn stay(self) -> Matrix {
        Matrix { moves: false, ..self }
    }

    /// Bytes owned.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|p| p.weights.bytes()).sum()
    }

    /// Bytes used in place.
    pub fn mapped(&self) -> usize {
        self.parts.iter().map(|p| p.weights.mapped()).sum()
    }

    /// The part that holds row `row`.
    ///
    /// # Panics
    /// When the matrix has no such row.
    pub fn part_of(&self, row: usize) -> &Part {
        assert!(row < self.rows, "row {row} of a matrix of {}", self.rows);
        let after = self.parts.partition_point(|p| p.first_row <= row);
        &self.parts[after - 1]
    }

    /// Decodes row `row`.
    pub fn decode_row(&self, isa: Isa, row: usize, out: &mut [f32]) {
        let part = self.part_of(row);
        part.weights.decode_row(isa, row - part.first_row, out);
    }

    /// Whether all of it is multiplied in int8 blocks.
    pub fn is_packed(&self) -> bool {
        self.parts.iter().all(|p| p.weights.takes_blocks())
    }

    /// Asks the system to bring rows `first .. first + rows` into memory if they are paged.
    pub fn want(&self, first: usize, rows: usize) {
        if !self.paged {
            return;
        }
        let before = self.parts.partition_point(|p| p.first_row <= first);
        for part in self.parts[before - 1..].iter().take_while(|p| p.first_row < first + rows) {
            if let Weights::File(file) | Weights::Paged(file, _) = &part.weights {
                let start = first.max(part.first_row) - part.first_row;
                let end = (first + rows - part.first_row).min(part.weights.rows());
                file.want(start, end - start);
            }
        }
    }

    /// Whether every part but the last is whole tiles of `tile` rows, so that row `tile * i` starts one.
    pub fn is_aligned(&self, tile: usize) -> bool {
        self.parts.iter().all(|p| p.first_row.is_multiple_of(tile))
    }
}

impl Weights {
    /// Outputs.
    pub fn rows(&self) -> usize {
        match self {
            Weights::File(file) | Weights::Paged(file, _) => file.view().rows,
            Weights::Tiles(tiles) => tiles.rows,
            Weights::Late(late) => late.rows(),
        }
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        match self {
            Weights::File(file) | Weights::Paged(file, _) => file.view().cols,
            Weights::Tiles(tiles) => tiles.cols(),
            Weights::Late(late) => late.file.view().cols,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Weights::File(file) | Weights::Paged(file, _) => file.bytes(),
            Weights::Tiles(tiles) => tiles.bytes(),
            Weights::Late(late) => late.bytes(),
        }
    }

    fn mapped(&self) -> usize {
        match self {
            Weights::File(file) | Weights::Paged(file, _) => file.mapped(),
            Weights::Tiles(_) | Weights::Late(_) => 0,
        }
    }

    /// Whether they are kept in a form that is exact in bf16.
    pub fn is_half(&self) -> bool {
        matches!(self, Weights::File(file) if matches!(file.view().format, Format::Bf16 | Format::Fp8E4M3))
    }

    /// The packed tiles from that of row `row` on; nothing where not all of these weights are packed.
    pub fn packed_from(&self, row: usize) -> &[u8] {
        if let Weights::Tiles(tiles) = self { tiles.bytes_from(row / CHUNK_OF) } else { &[] }
    }

    /// The scales beside the codes of the file's format.
    pub fn scales(&self) -> Option<&Scales<'_>> {
        if let Weights::File(file) = self { Some(&file.view().scales) } else { None }
    }

    /// Decodes row `row` exactly.
    pub fn decode_row(&self, isa: Isa, row: usize, out: &mut [f32]) {
        match self {
            Weights::File(file) | Weights::Paged(file, _) => decode_row(isa, file.view(), row, out),
            Weights::Tiles(tiles) => tiles.decode_row(row, out),
            Weights::Late(late) => late.decode_row(isa, row, out),
        }
    }

    /// Whether products take activations in int8 blocks.
    pub fn takes_blocks(&self) -> bool {
        matches!(self, Weights::Tiles(_) | Weights::Late(_) | Weights::Paged(..))
    }

    /// `out[i, r] = x_i . w_(16 tile + r)` of `rows` rows, one tile or two, in int8 blocks, [`PAIR`](crate::int8::PAIR)
    /// floats from one row of x to the next; false where these weights take none. `room` is for tiles packed on the way.
    pub fn product(
        &self,
        tile: usize,
        rows: usize,
        x: QuantRows<'_>,
        room: &mut Grow,
        out: &mut [f32],
    ) -> bool {
        let tiles = rows.div_ceil(CHUNK_OF);
        match self {
            Weights::File(_) => return false,
            Weights::Tiles(packed) => packed.product(tile, tiles, x, out),
            Weights::Late(late) => late.product(tile, tiles, x, room, out),
            Weights::Paged(file, packer) => product_from_file(file, packer, tile, tiles, x, room, out),
        }
        true
    }

    /// Rows `first .. first + rows` as they stand in memory, where they are numbers of `format` and type `T`.
    ///
    /// # Safety
    /// Every bit pattern is a `T`, and `T` is what a little-endian machine has in memory for `format`.
    pub unsafe fn in_place<T>(&self, format: Format, first: usize, rows: usize) -> Option<&[T]> {
        let Weights::File(file) = self else { return None };
        let view = file.view();
        if view.format != format || cfg!(target_endian = "big") {
            return None;
        }
        let row_bytes = view.row_bytes();
        let bytes = &view.bytes[first * row_bytes..(first + rows) * row_bytes];
        // SAFETY: the caller's; the prefix and suffix are checked to be empty.
        let (before, values, after) = unsafe { bytes.align_to::<T>() };
        (before.is_empty() && after.is_empty()).then_some(values)
    }
}

fn check(view: &TensorView<'_>) -> Result<()> {
    lapidary_formats::validate(view)
        .map_err(|e| Error::Tensor { tensor: view.name.clone(), reason: e.to_string() })
}

/// Packs `view` if its format is one that is packed, late where a map holds it.
fn pack(packing: Packing<'_>, view: &TensorView<'_>) -> Result<Option<Weights>> {
    if !crate::int8::is_packed(view.format) || view.cols == 0 {
        return Ok(None);
    }
    if view.format.row_bytes(view.cols).and_then(|b| b.checked_mul(view.rows)) != Some(view.bytes.len()) {
        // Names what is wrong.
        check(view)?;
    }
    let Some(tiles) = Tiles::empty(packing.isa, view, packing.slabs)? else { return Ok(None) };
    if is_sliceable(view) && find(packing.maps, view.bytes).is_some() {
        in_row_chunks(packing.team, view, |chunk, _| check(chunk))?;
        let file = FileRows::new(view, packing.maps)?;
        return Ok(Some(Weights::Late(Late::new(file, tiles, packing.allowance))));
    }
    in_row_chunks(packing.team, view, |chunk, rows| {
        check(chunk)?;
        for tile in rows.start / CHUNK_OF..rows.end.div_ceil(CHUNK_OF) {
            // SAFETY: chunks start on whole tiles and each is handed to one worker.
            unsafe { tiles.pack_tile(view, tile) }
        }
        Ok(())
    })?;
    Ok(Some(Weights::Tiles(tiles)))
}

/// Chunks that workers claim start on this many rows.
pub(crate) const CHUNK_OF: usize = 16;
/// Bytes of a chunk, about.
pub(crate) const CHUNK_BYTES: usize = 1 << 18;

/// Runs `f` on all rows of `view` in chunks, on the whole team; the error of the first chunk that has one.
pub(crate) fn in_row_chunks(
    team: &Team,
    view: &TensorView<'_>,
    f: impl Fn(&TensorView<'_>, Range<usize>) -> Result<()> + Sync,
) -> Result<()> {
    let row_bytes = view.format.row_bytes(view.cols).unwrap_or(0);
    let rows = (CHUNK_BYTES / row_bytes.max(1)).next_multiple_of(CHUNK_OF).max(CHUNK_OF);
    if !is_sliceable(view) || view.rows <= rows {
        return f(view, 0..view.rows);
    }
    let next = AtomicUsize::new(0);
    let first_error: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    team.run(&|_| {
        loop {
            let start = next.fetch_add(rows, Ordering::Relaxed);
            if start >= view.rows {
                return;
            }
            let count = rows.min(view.rows - start);
            if let Err(error) = f(&view.slice_rows(start, count), start..start + count) {
                let mut first = first_error.lock().unwrap_or_else(PoisonError::into_inner);
                if first.as_ref().is_none_or(|(at, _)| start < *at) {
                    *first = Some((start, error));
                }
                return;
            }
        }
    })?;
    match first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// Whether rows can be cut out of a view: it has rows, its lengths are those of its shape, and no scale is copied.
fn is_sliceable(view: &TensorView<'_>) -> bool {
    let shaped = view.format.row_bytes(view.cols).and_then(|b| b.checked_mul(view.rows));
    let scales = match view.scales {
        Scales::None => !takes_scales(view.format),
        Scales::Tensor(_) => matches!(view.format, Format::Fp8E4M3 | Format::GgufNvfp4),
        Scales::Nvfp4 { blocks, .. } => {
            view.format == Format::Nvfp4 && blocks.len() == view.rows * (view.cols / 16)
        }
        Scales::Group32Bf16(bytes) => {
            view.format == Format::Int4G32 && bytes.len() == view.rows * (view.cols / 32) * 2
        }
        _ => false,
    };
    view.rows > 0 && view.cols > 0 && shaped == Some(view.bytes.len()) && scales
}

/// Formats whose scales must come beside the codes.
fn takes_scales(format: Format) -> bool {
    matches!(format, Format::Fp8E4M3 | Format::Nvfp4 | Format::Int4G32)
}
