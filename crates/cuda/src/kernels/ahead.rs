//! What a kernel brings to the second-level cache for the ones after it: `kernels/common/ahead.cuh`.

use crate::driver::DevPtr;

/// Weights that the next products read, to be brought to the second-level cache while memory is idle.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Ahead {
    p: [u64; 3],
    bytes: [u32; 3],
    pad: u32,
}

impl Ahead {
    /// Adds a run of bytes (a multiple of 16) where there is room for one.
    pub fn add(&mut self, at: DevPtr, bytes: usize) {
        if let Some(free) = self.bytes.iter().position(|&b| b == 0) {
            (self.p[free], self.bytes[free]) = (at.0, bytes as u32);
        }
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.bytes.iter().map(|&b| b as usize).sum()
    }

    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
