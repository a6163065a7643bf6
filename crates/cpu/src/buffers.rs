//! Activation buffers, shared by the team.
//!
//! A buffer is rows of float32. A buffer of kind `Input` in the fast mode keeps beside each row its int8
//! [blocks](crate::int8::activations), which whoever writes the row fills once; weights that are not packed
//! read the floats. Inside a verb each row, or each range of columns of a row, has one worker that writes it;
//! the meeting between verbs makes it visible to the others.

use lapidary_ops::{ActKind, ActSpec, Result};

use crate::int8::activations::{QuantRows, quantise_at, row_bytes};
use crate::level::Isa;
use crate::memory::Aligned;

/// Rows start on this many floats, so that no two workers' rows share a cache line.
const STRIDE: usize = 16;

/// Floats from one row of `width` values to the next.
pub(crate) fn row_floats(width: usize) -> usize {
    width.next_multiple_of(STRIDE)
}

/// One activation buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// What it was made for.
    pub spec: ActSpec,
    stride: usize,
    floats: Aligned,
    /// Bytes of a row in int8 blocks; 0 where there are none.
    blocks_stride: usize,
    blocks: Aligned,
    rounds: bool,
}

impl Buffer {
    /// Allocates a buffer, all zeros; `int8` where inputs are kept in int8 blocks too.
    pub fn new(spec: ActSpec, int8: bool) -> Result<Buffer> {
        let stride = row_floats(spec.width);
        let bytes = stride.saturating_mul(spec.max_rows).saturating_mul(size_of::<f32>());
        let floats = Aligned::zeroed(bytes, spec.name)?;
        let blocks_stride = if int8 && spec.kind == ActKind::Input { row_bytes(spec.width) } else { 0 };
        let blocks = Aligned::zeroed(blocks_stride.saturating_mul(spec.max_rows), spec.name)?;
        let rounds = int8 && spec.kind == ActKind::Input;
        Ok(Buffer { spec, stride, floats, blocks_stride, blocks, rounds })
    }

    /// Floats from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.floats.len() + self.blocks.len()
    }

    /// Whether rows are kept in int8 blocks beside the floats.
    pub fn has_blocks(&self) -> bool {
        self.blocks_stride > 0
    }

    /// Whether products may round what they read here.
    pub fn rounds(&self) -> bool {
        self.rounds
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.spec.width
    }

    fn at(&self, row: usize, col: usize, len: usize) -> *mut f32 {
        assert!(
            row < self.spec.max_rows && col <= self.spec.width && len <= self.spec.width - col,
            "row {row}, columns {col} + {len} leave {} [{}, {}]",
            self.spec.name,
            self.spec.max_rows,
            self.spec.width
        );
        // SAFETY: inside the allocation by the assertion; the start is aligned for f32.
        unsafe { self.floats.start().cast::<f32>().add(row * self.stride + col) }
    }

    /// Row `row`.
    ///
    /// # Safety
    /// Nobody writes to the row while the reference lives.
    pub unsafe fn row(&self, row: usize) -> &[f32] {
        // SAFETY: `at` checks the bounds; the caller answers for writers.
        unsafe { std::slice::from_raw_parts(self.at(row, 0, self.spec.width), self.spec.width) }
    }

    /// Columns `col .. col + len` of row `row`.
    ///
    /// # Safety
    /// Nobody else reads or writes these values while the reference lives.
    #[allow(clippy::mut_from_ref, reason = "workers write disjoint parts of one buffer")]
    pub unsafe fn part_mut(&self, row: usize, col: usize, len: usize) -> &mut [f32] {
        // SAFETY: `at` checks the bounds; the caller answers for other users.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, col, len), len) }
    }

    /// Row `row`.
    ///
    /// # Safety
    /// Nobody else reads or writes the row while the reference lives.
    #[allow(clippy::mut_from_ref, reason = "workers write disjoint rows of one buffer")]
    pub unsafe fn row_mut(&self, row: usize) -> &mut [f32] {
        // SAFETY: the caller's promise is the one that `part_mut` asks for.
        unsafe { self.part_mut(row, 0, self.spec.width) }
    }

    /// Rows `first .. first + rows`, [`stride`](Buffer::stride) floats apart (the last one's padding included).
    ///
    /// # Safety
    /// Nobody writes to these rows while the reference lives.
    pub unsafe fn rows(&self, first: usize, rows: usize) -> &[f32] {
        assert!(
            first <= self.spec.max_rows && rows <= self.spec.max_rows - first,
            "rows {first} + {rows} leave {}",
            self.spec.name
        );
        // SAFETY: inside the allocation by the assertion; the caller answers for writers.
        unsafe {
            let start = self.floats.start().cast::<f32>().add(first * self.stride);
            std::slice::from_raw_parts(start, rows * self.stride)
        }
    }

    /// Rows `first .. first + rows` in int8 blocks, if they are kept.
    ///
    /// # Safety
    /// Nobody writes to these rows while the reference lives.
    pub unsafe fn block_rows(&self, first: usize, rows: usize) -> Option<QuantRows<'_>> {
        assert!(first <= self.spec.max_rows && rows <= self.spec.max_rows - first);
        let (stride, width) = (self.blocks_stride, self.spec.width);
        self.has_blocks().then(|| {
            // SAFETY: inside the allocation by the assertion; the caller answers for writers.
            let bytes =
                unsafe { std::slice::from_raw_parts(self.blocks.start().add(first * stride), rows * stride) };
            QuantRows { bytes, stride, count: rows, width }
        })
    }

    /// Brings the int8 blocks of columns `col .. col + len` of a row up to date, if they are kept.
    ///
    /// # Panics
    /// When the columns are not whole blocks.
    ///
    /// # Safety
    /// Nobody else uses these columns meanwhile.
    pub unsafe fn quantise_part(&self, isa: Isa, row: usize, col: usize, len: usize) {
        if !self.has_blocks() {
            return;
        }
        // SAFETY: `at` checks the bounds; the caller answers for other users.
        unsafe {
            let x = std::slice::from_raw_parts(self.at(row, col, len), len);
            quantise_at(isa, self.blocks.start().add(row * self.blocks_stride), self.spec.width, col, x);
        }
    }

    /// Brings the int8 blocks of a row up to date, if they are kept.
    ///
    /// # Safety
    /// Nobody else uses the row meanwhile.
    pub unsafe fn quantise_row(&self, isa: Isa, row: usize) {
        // SAFETY: the caller's.
        unsafe { self.quantise_part(isa, row, 0, self.spec.width) }
    }

    /// Moves row `from` to row `to`, int8 blocks too.
    ///
    /// # Safety
    /// Nobody else uses either row meanwhile.
    pub unsafe fn move_row(&self, from: usize, to: usize) {
        if from == to {
            return;
        }
        // SAFETY: the rows are inside the allocations (`row` checks) and differ.
        unsafe {
            self.row_mut(to).copy_from_slice(self.row(from));
            let blocks = self.blocks.start();
            let (a, b) = (blocks.add(from * self.blocks_stride), blocks.add(to * self.blocks_stride));
            std::ptr::copy_nonoverlapping(a, b, self.blocks_stride);
        }
    }
}
