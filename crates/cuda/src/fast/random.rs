//! Random weights of a matrix's shape, for measurements without a checkpoint.
//!
//! A few rows are drawn, encoded and packed on the host; the device copies them over and over until the matrix is
//! full. Every matrix has memory of its own, so reading it costs what reading real weights costs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use lapidary_formats::{Encoded, Format, encode_rows};
use lapidary_ops::{Error, Result};

use crate::driver::{Arena, DevPtr, Stream};
use crate::kernels::skinny_gemm::Weights;
use crate::matrix::Tied;
use crate::pack::{PackedShape, pack_strips};

/// Rows that are drawn.
const TILE_ROWS: usize = 64;

/// Rows that were drawn before, by width.
#[derive(Debug)]
pub(crate) struct Tiles {
    format: Format,
    drawn: HashMap<(Format, usize), Encoded>,
}

impl Tiles {
    /// Tiles of `format`.
    pub fn new(format: Format) -> Tiles {
        Tiles { format, drawn: HashMap::new() }
    }

    /// The format of a matrix: the head of an NVFP4 model is FP8, as in published ones, and a format whose blocks do
    /// not divide the width gives way as in converted files.
    fn format_for(&self, cols: usize, tied: Tied) -> Format {
        let wanted = match self.format {
            Format::Nvfp4 if tied == Tied::Yes => Format::Fp8E4M3,
            f => f,
        };
        match wanted {
            f if cols.is_multiple_of(f.block_len()) => f,
            Format::Q4K => Format::Q5_0,
            Format::Q5K | Format::Q6K => Format::Q8_0,
            _ => Format::Bf16,
        }
    }

    /// The rows that are repeated to fill a matrix of this width.
    pub fn tile(&mut self, cols: usize, tied: Tied) -> Result<&Encoded> {
        let format = self.format_for(cols, tied);
        let key = (format, cols);
        match self.drawn.entry(key) {
            Entry::Occupied(drawn) => Ok(drawn.into_mut()),
            Entry::Vacant(place) => {
                let values = draw(TILE_ROWS * cols, (cols as f32).sqrt().recip());
                let encoded = encode_rows(format, &values, TILE_ROWS, cols)
                    .map_err(|e| Error::Tensor { tensor: "random weights".into(), reason: e.to_string() })?;
                Ok(place.insert(encoded))
            }
        }
    }

    /// The shape that random values for `parts` are packed into.
    pub fn shape(&mut self, rows: usize, cols: usize, tied: Tied) -> Result<PackedShape> {
        let view = self.tile(cols, tied)?.view("tile");
        Ok(PackedShape { rows, ..PackedShape::of(&view) })
    }

    /// A full matrix of random strips.
    pub fn fill(
        &mut self,
        arena: &mut Arena,
        stream: &Stream,
        shape: PackedShape,
        tied: Tied,
    ) -> Result<Weights> {
        let view = self.tile(shape.cols, tied)?.view("tile");
        let own = PackedShape::of(&view);
        let mut tile = vec![0; own.bytes()];
        pack_strips(&view, 0..own.strips(), &mut tile);
        let strips = arena.take(shape.bytes())?;
        repeat(stream, strips, shape.bytes(), &tile)?;
        let row_scales = match crate::pack::row_scales(&view) {
            None => DevPtr::NULL,
            Some(scales) => {
                let bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                let ptr = arena.take(shape.rows * 4)?;
                repeat(stream, ptr, shape.rows * 4, &bytes)?;
                ptr
            }
        };
        Ok(Weights { shape, strips, row_scales })
    }
}

/// Fills `len` bytes with copies of `tile`.
pub(crate) fn repeat(stream: &Stream, to: DevPtr, len: usize, tile: &[u8]) -> Result<()> {
    let mut done = tile.len().min(len);
    // SAFETY: `to` has `len` bytes; source and target of a copy do not overlap, the source being what is done.
    unsafe {
        stream.upload(to, &tile[..done])?;
        while done < len {
            // Whole tiles until the last copy, so that the period holds.
            let n = done.min(len - done);
            stream.copy(to.at(done), to, n)?;
            done += n;
        }
    }
    Ok(())
}

/// Values of deviation `size`, even in their range.
fn draw(n: usize, size: f32) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| 3f32.sqrt() * size * next()).collect()
}
