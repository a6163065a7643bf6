//! Owned memory that vector kernels like: 64-byte aligned, zeroed, counted.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use lapidary_ops::{Error, Result};

const ALIGN: usize = 64;

/// A zeroed block of bytes on a 64-byte border. It never moves, so pointers into it stay good for as long as
/// it lives.
#[derive(Debug)]
pub(crate) struct Aligned {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the block is plain bytes with one owner; sharing is governed by the borrow of the methods below and
// by the safety conditions of `start`.
unsafe impl Send for Aligned {}
// SAFETY: as above.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// Allocates `bytes` zero bytes for `what`.
    pub fn zeroed(bytes: usize, what: &str) -> Result<Aligned> {
        let none = || Error::OutOfMemory { what: what.to_string(), needed: bytes, available: 0 };
        if bytes == 0 {
            return Ok(Aligned { start: NonNull::dangling(), bytes });
        }
        let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| none())?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        Ok(Aligned { start: NonNull::new(start).ok_or_else(none)?, bytes })
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8], what: &str) -> Result<Aligned> {
        let mut own = Aligned::zeroed(bytes.len(), what)?;
        own.as_mut_slice().copy_from_slice(bytes);
        Ok(own)
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The first byte. Whoever writes through it must be the only user of the bytes that it writes.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// All bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the block has `bytes` initialised bytes; nobody writes while `&self` users only read, which
        // the callers of `start` ensure.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// All bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the block has `bytes` initialised bytes and `&mut self` is the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let layout = Layout::from_size_align(self.bytes, ALIGN).expect("this layout was allocated");
            // SAFETY: allocated with this layout and not freed before.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

/// A float32 buffer that only grows, for a worker's own intermediate values.
#[derive(Debug, Default)]
pub(crate) struct Grow(Vec<f32>);

impl Grow {
    /// The first `len` values, whatever they hold.
    pub fn get(&mut self, len: usize) -> &mut [f32] {
        if self.0.len() < len {
            self.0.resize(len, 0.0);
        }
        &mut self.0[..len]
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<f32>()
    }
}
