//! Owned memory that vector kernels like: 64-byte aligned, zeroed, counted, and on huge pages where there is much of
//! it.
//!
//! Weights are read once a token from end to end; on 4 KiB pages the walks through page tables cost some of the
//! read bandwidth (`docs/performance.md`). Linux gives huge pages to those who ask before the first touch. Matrices
//! of a small model are smaller than a huge page, so weights are cut from [slabs](Slabs) that are not.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
#[cfg(target_os = "linux")]
use std::sync::{Arc, Mutex, PoisonError};

use lapidary_ops::{Error, Result};

const ALIGN: usize = 64;

/// Bytes of a line of the caches.
pub(crate) const LINE: usize = 64;

/// Asks for the line at `at` into the nearest cache. Any address will do: nothing is read.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 has the instruction, and it may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// From this many bytes on, memory is mapped: the allocator would clear it here and now, though some of it is never
/// used and most of it is overwritten first.
#[cfg(target_os = "linux")]
const MAPPED: usize = 64 << 10;

/// A zeroed block of bytes on a 64-byte border. It never moves, so pointers into it stay good for as long as
/// it lives.
#[derive(Debug)]
pub(crate) struct Aligned {
    start: NonNull<u8>,
    bytes: usize,
    home: Home,
}

/// Where a block came from.
#[derive(Debug)]
enum Home {
    Nowhere,
    Allocator,
    #[cfg(target_os = "linux")]
    Mapping {
        /// Kept until its last block is gone.
        _mapping: Arc<mapping::Mapping>,
    },
}

// SAFETY: the block is plain bytes with one owner; sharing is governed by the borrow of the methods below and
// by the safety conditions of `start`.
unsafe impl Send for Aligned {}
// SAFETY: as above.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// No bytes.
    pub fn empty() -> Aligned {
        Aligned { start: NonNull::<Line>::dangling().cast(), bytes: 0, home: Home::Nowhere }
    }

    /// Allocates `bytes` zero bytes for `what`.
    pub fn zeroed(bytes: usize, what: &str) -> Result<Aligned> {
        let none = || Error::OutOfMemory { what: what.to_string(), needed: bytes, available: 0 };
        if bytes == 0 {
            return Ok(Aligned::empty());
        }
        #[cfg(target_os = "linux")]
        if bytes >= MAPPED {
            let mapping = mapping::Mapping::new(bytes).ok_or_else(none)?;
            let (start, mapping) = (mapping.start(), Arc::new(mapping));
            return Ok(Aligned { start, bytes, home: Home::Mapping { _mapping: mapping } });
        }
        let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| none())?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        Ok(Aligned { start: NonNull::new(start).ok_or_else(none)?, bytes, home: Home::Allocator })
    }

    /// As [`zeroed`](Aligned::zeroed), on small pages where it is large: for what is first written here and there, one piece at a
    /// time in many blocks. A huge page is cleared when its first byte is written, and blocks that are filled in step
    /// reach their next one in the same moment.
    pub fn zeroed_in_steps(bytes: usize, what: &str) -> Result<Aligned> {
        let block = Aligned::zeroed(bytes, what)?;
        #[cfg(target_os = "linux")]
        if let Home::Mapping { _mapping: mapping } = &block.home {
            mapping.on_small_pages();
        }
        Ok(block)
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

/// Something with the alignment of every block.
#[repr(align(64))]
struct Line;

impl Drop for Aligned {
    fn drop(&mut self) {
        if matches!(self.home, Home::Allocator) {
            let layout = Layout::from_size_align(self.bytes, ALIGN).expect("this layout was allocated");
            // SAFETY: allocated with this layout and not freed before.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

/// Cuts blocks from large mappings, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Slabs {
    #[cfg(target_os = "linux")]
    last: Mutex<Option<Slab>>,
}

#[cfg(target_os = "linux")]
#[derive(Debug)]
struct Slab {
    mapping: Arc<mapping::Mapping>,
    used: usize,
}

/// Bytes of a slab. What is never cut from it takes no memory.
#[cfg(target_os = "linux")]
const SLAB: usize = 64 << 20;

impl Slabs {
    /// As [`Aligned::zeroed`], from a slab if the block is smaller than one.
    pub fn zeroed(&self, bytes: usize, what: &str) -> Result<Aligned> {
        #[cfg(target_os = "linux")]
        if (1..SLAB).contains(&bytes)
            && let Some(block) = self.cut(bytes)
        {
            return Ok(block);
        }
        Aligned::zeroed(bytes, what)
    }

    /// The next block, if there is memory for a slab.
    #[cfg(target_os = "linux")]
    fn cut(&self, bytes: usize) -> Option<Aligned> {
        let mut slab = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let room = slab.as_ref().is_some_and(|slab| bytes <= SLAB - slab.used);
        if !room {
            *slab = Some(Slab { mapping: Arc::new(mapping::Mapping::new(SLAB)?), used: 0 });
        }
        let slab = slab.as_mut()?;
        // SAFETY: inside the mapping, of which `used` bytes are taken.
        let start = unsafe { slab.mapping.start().add(slab.used) };
        slab.used = (slab.used + bytes).next_multiple_of(ALIGN).min(SLAB);
        Some(Aligned { start, bytes, home: Home::Mapping { _mapping: slab.mapping.clone() } })
    }
}

/// Anonymous mappings.
#[cfg(target_os = "linux")]
mod mapping {
    use std::ptr::{NonNull, null_mut};

    /// Bytes of a huge page on x86-64 and, with 4 KiB base pages, on aarch64.
    const HUGE: usize = 2 << 20;

    /// Mappings are whole multiples of this, the largest base page in use.
    const SMALL: usize = 64 << 10;

    /// Zero bytes that take no memory before they are touched, on huge pages where they fill some.
    #[derive(Debug)]
    pub struct Mapping {
        start: NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: a mapping is plain memory; whoever uses it answers for how.
    unsafe impl Send for Mapping {}
    // SAFETY: as above.
    unsafe impl Sync for Mapping {}

    impl Mapping {
        /// Maps `bytes` bytes; on a border of huge pages if they are as many as one has.
        pub fn new(bytes: usize) -> Option<Mapping> {
            let kept = bytes.checked_next_multiple_of(SMALL)?;
            let align = if bytes >= HUGE { HUGE } else { SMALL };
            let reserved = kept.checked_add(align)?;
            let (access, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a fresh anonymous mapping that touches no other memory.
            let start = unsafe { libc::mmap(null_mut(), reserved, access, kind, -1, 0) };
            if start == libc::MAP_FAILED {
                return None;
            }
            let before = start.align_offset(align);
            // SAFETY: both cuts and the advice stay inside the fresh mapping; a failure of any of them leaves
            // memory that is only larger or slower than it could be.
            let first = unsafe {
                let first = start.byte_add(before);
                if before > 0 {
                    libc::munmap(start, before);
                }
                if before + kept < reserved {
                    libc::munmap(first.byte_add(kept), reserved - before - kept);
                }
                if bytes >= HUGE {
                    libc::madvise(first, kept, libc::MADV_HUGEPAGE);
                }
                first
            };
            Some(Mapping { start: NonNull::new(first.cast())?, bytes: kept })
        }

        /// Takes back that huge pages were asked for; for a mapping that nobody has touched.
        pub fn on_small_pages(&self) {
            // SAFETY: advice about a mapping of ours, which changes nothing in it; without it memory is what it was.
            unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_NOHUGEPAGE) };
        }

        /// The first byte.
        pub fn start(&self) -> NonNull<u8> {
            self.start
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: mapped with this length, not freed before, and nobody is left who uses it.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
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

    /// `len` bytes on a 64-byte border, whatever they hold.
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        let floats = self.get((len + ALIGN).div_ceil(size_of::<f32>()));
        let start = floats.as_ptr().align_offset(ALIGN) * size_of::<f32>();
        // SAFETY: a float is four initialised bytes, and every four bytes are a float.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<u8>(), size_of_val(floats)) };
        &mut bytes[start..start + len]
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_block_that_is_filled_in_steps_takes_memory_step_by_step() {
        let bytes = 64 << 20;
        let mut block = Aligned::zeroed_in_steps(bytes, "a pool").expect("there is memory");
        for place in (0..bytes).step_by(2 << 20) {
            block.as_mut_slice()[place] = 1;
        }
        // One flag a page of at least 4 KiB; pages are larger on some machines, and then fewer flags are set.
        let mut pages = vec![0u8; bytes / 4096];
        // SAFETY: the block is mapped from a page's border on, and there is a flag for each of its pages.
        let answer = unsafe { libc::mincore(block.start().cast(), bytes, pages.as_mut_ptr()) };
        assert_eq!(answer, 0);
        let taken = pages.iter().filter(|flags| *flags & 1 == 1).count();
        assert!((32..=64).contains(&taken), "{taken} pages for 32 bytes");
    }

    #[test]
    fn blocks_are_zero_aligned_and_apart_and_outlive_their_slabs() {
        let slabs = Slabs::default();
        let sizes = [1usize, 63, 64, 65, 4097, 70_001, (2 << 20) + 3, 65 << 20, 63 << 20, 5 << 20];
        let mut blocks: Vec<Aligned> =
            sizes.iter().map(|&bytes| slabs.zeroed(bytes, "a block").expect("memory")).collect();
        drop(slabs);
        for (i, block) in blocks.iter_mut().enumerate() {
            assert_eq!((block.len(), block.start() as usize % ALIGN), (sizes[i], 0));
            let bytes = block.as_mut_slice();
            assert!(bytes.iter().step_by(997).chain(bytes.last()).all(|&b| b == 0), "block {i}");
            bytes.fill(i as u8 + 1);
        }
        for (i, block) in blocks.iter().enumerate() {
            assert!(block.as_slice().iter().all(|&b| b == i as u8 + 1), "block {i} is its own");
        }
        assert_eq!(Aligned::empty().start() as usize % ALIGN, 0);
    }
}
