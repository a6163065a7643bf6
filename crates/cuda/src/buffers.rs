//! Activations on the device.

use lapidary_ops::{ActKind, ActSpec, Result};

use crate::args::Rows;
use crate::driver::{Arena, Stream};
use crate::footprint::activation_bytes;

/// Rows start at multiples of this many values, so that kernels may read them 16 bytes at a time.
const STRIDE: usize = 64;

/// Values from one row of `width` values to the next.
pub(crate) fn stride(width: usize) -> usize {
    width.next_multiple_of(STRIDE)
}

/// One activation buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// What it was made for.
    pub spec: ActSpec,
    /// What kernels take.
    pub rows: Rows,
}

impl Buffer {
    /// Allocates a buffer, all zeros; inputs of products in bf16 where `half` is set.
    pub fn new(arena: &mut Arena, stream: &Stream, spec: ActSpec, half: bool) -> Result<Buffer> {
        let bf16 = half && spec.kind == ActKind::Input;
        let stride = stride(spec.width);
        let bytes = activation_bytes(&spec, half);
        let ptr = arena.take(bytes)?;
        // SAFETY: the memory was just taken.
        unsafe { stream.fill(ptr, 0, bytes)? };
        let (stride, width) = (stride as i32, spec.width as i32);
        Ok(Buffer { spec, rows: Rows { ptr, stride, width, bf16: bf16.into(), pad: 0 } })
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.spec.width
    }

    /// Bytes from one row to the next.
    pub fn stride_bytes(&self) -> usize {
        self.rows.stride as usize * if self.rows.bf16 == 1 { 2 } else { 4 }
    }

    /// The first `rows` rows as float32, waiting for what is queued.
    pub fn read(&self, stream: &Stream, rows: usize) -> Result<Vec<f32>> {
        let mut bytes = vec![0u8; self.stride_bytes() * rows];
        // SAFETY: the buffer has `rows` rows; the wait comes before the bytes are used or dropped.
        unsafe { stream.download(&mut bytes, self.rows.ptr)? };
        stream.wait()?;
        let mut values = Vec::with_capacity(rows * self.width());
        for row in bytes.chunks_exact(self.stride_bytes().max(1)) {
            if self.rows.bf16 == 1 {
                let halves = row.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
                values.extend(halves.take(self.width()));
            } else {
                values
                    .extend(row.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).take(self.width()));
            }
        }
        Ok(values)
    }
}
