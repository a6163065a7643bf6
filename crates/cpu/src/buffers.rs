//! Activation buffers, shared by the team.
//!
//! A buffer is rows of float32. Inside a verb each row, or each range of columns of a row, has one worker that
//! writes it; the meeting between verbs makes it visible to the others.

use lapidary_ops::{ActSpec, Result};

use crate::memory::Aligned;

/// Rows start on this many floats, so that no two workers' rows share a cache line.
const STRIDE: usize = 16;

/// One activation buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// What it was made for.
    pub spec: ActSpec,
    stride: usize,
    floats: Aligned,
}

impl Buffer {
    /// Allocates a buffer, all zeros.
    pub fn new(spec: ActSpec) -> Result<Buffer> {
        let stride = spec.width.next_multiple_of(STRIDE);
        let bytes = stride.saturating_mul(spec.max_rows).saturating_mul(size_of::<f32>());
        let floats = Aligned::zeroed(bytes, spec.name)?;
        Ok(Buffer { spec, stride, floats })
    }

    /// Floats from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.floats.len()
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
}
