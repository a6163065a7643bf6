//! Owned memory that vector kernels like: 64-byte aligned, zeroed, counted, and on huge pages where it is large.
//!
//! Weights are read once a token from end to end; on 4 KiB pages the walks through page tables cost some of the
//! read bandwidth (`docs/performance.md`). Linux gives huge pages to those who ask before the first touch.

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
        #[cfg(target_os = "linux")]
        if bytes >= huge::PAGE {
            return Ok(Aligned { start: huge::map(bytes).ok_or_else(none)?, bytes });
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
        #[cfg(target_os = "linux")]
        if self.bytes >= huge::PAGE {
            // SAFETY: mapped with this length and not freed before.
            return unsafe { huge::unmap(self.start, self.bytes) };
        }
        if self.bytes > 0 {
            let layout = Layout::from_size_align(self.bytes, ALIGN).expect("this layout was allocated");
            // SAFETY: allocated with this layout and not freed before.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

/// Anonymous mappings on huge pages.
#[cfg(target_os = "linux")]
mod huge {
    use std::ptr::{NonNull, null_mut};

    /// Bytes of a huge page on x86-64 and, with 4 KiB base pages, on aarch64.
    pub const PAGE: usize = 2 << 20;

    /// Maps `bytes` zero bytes that start on a huge page.
    pub fn map(bytes: usize) -> Option<NonNull<u8>> {
        let reserved = bytes.checked_add(PAGE + SMALL)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping that touches no other memory.
        let start = unsafe { libc::mmap(null_mut(), reserved, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let before = start.align_offset(PAGE);
        let kept = bytes.next_multiple_of(SMALL);
        // SAFETY: both cuts and the advice stay inside the fresh mapping; a failure of any of them leaves
        // memory that is only larger or slower than it could be.
        unsafe {
            let first = start.byte_add(before);
            if before > 0 {
                libc::munmap(start, before);
            }
            if before + kept < reserved {
                libc::munmap(first.byte_add(kept), reserved - before - kept);
            }
            libc::madvise(first, kept, libc::MADV_HUGEPAGE);
            NonNull::new(first.cast())
        }
    }

    /// Frees what `map` gave.
    ///
    /// # Safety
    /// `start` came from `map(bytes)`, and nobody uses the memory any more.
    pub unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's; this is what `map` kept.
        unsafe { libc::munmap(start.as_ptr().cast(), bytes.next_multiple_of(SMALL)) };
    }

    /// Mappings are whole multiples of this, the largest base page in use.
    const SMALL: usize = 64 << 10;
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
