//! Device memory from arenas, and pinned host memory.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, cu};
use crate::error::{Error, Result};

/// Where something is on the device. A plain number: it neither owns nor checks anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DevPtr(pub u64);

impl DevPtr {
    /// No place; kernels see a null pointer.
    pub const NULL: DevPtr = DevPtr(0);

    /// The place `bytes` further on.
    pub const fn at(self, bytes: usize) -> DevPtr {
        DevPtr(self.0 + bytes as u64)
    }
}

/// One allocation on the device, freed when dropped. The owner waits for work that uses it first.
#[derive(Debug)]
pub struct Block {
    context: Arc<Context>,
    ptr: DevPtr,
    len: usize,
}

impl Block {
    /// Allocates `len` bytes (none for 0), contents unknown.
    ///
    /// # Errors
    /// `OutOfMemory` with `what` in its message.
    pub fn new(context: &Arc<Context>, what: &str, len: usize) -> Result<Block> {
        context.bind()?;
        let mut ptr = 0;
        if len > 0 {
            // SAFETY: the driver writes one address.
            match unsafe { sys::cuMemAlloc_v2(&mut ptr, len) } {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    let available = context.free_bytes().unwrap_or(0);
                    return Err(Error::OutOfMemory { what: what.into(), needed: len, available });
                }
                code => super::check("cuMemAlloc", code)?,
            }
        }
        Ok(Block { context: context.clone(), ptr: DevPtr(ptr), len })
    }

    /// Its first byte.
    pub fn ptr(&self) -> DevPtr {
        self.ptr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.len > 0 && self.context.bind().is_ok() {
            // SAFETY: allocated in `new` and not freed since.
            unsafe {
                let _ = cu!(cuMemFree_v2(self.ptr.0));
            }
        }
    }
}

/// Where pieces start.
const ALIGNMENT: usize = 256;

/// Device memory handed out in pieces and freed all at once, so that a piece's address stays what it is.
#[derive(Debug)]
pub struct Arena {
    context: Arc<Context>,
    what: &'static str,
    /// Bytes of an ordinary block; a larger piece gets a block of its own.
    block: usize,
    blocks: Vec<Block>,
    /// Blocks that pieces are cut from, and the bytes used of each.
    open: Vec<(usize, usize)>,
}

impl Arena {
    /// An empty arena that grows by `block` bytes at a time.
    pub fn new(context: &Arc<Context>, what: &'static str, block: usize) -> Arena {
        Arena { context: context.clone(), what, block, blocks: Vec::new(), open: Vec::new() }
    }

    /// A piece of `len` bytes, aligned to 256, contents unknown.
    ///
    /// # Errors
    /// `OutOfMemory`; the arena is what it was.
    pub fn take(&mut self, len: usize) -> Result<DevPtr> {
        let len = len.max(1).next_multiple_of(ALIGNMENT);
        if len > self.block / 2 {
            self.blocks.push(Block::new(&self.context, self.what, len)?);
            return Ok(self.blocks[self.blocks.len() - 1].ptr());
        }
        // The first block with room: small pieces fill what large ones left.
        let block = self.block;
        let place = match self.open.iter().position(|(_, used)| len <= block - used) {
            Some(place) => place,
            None => {
                self.blocks.push(Block::new(&self.context, self.what, block)?);
                self.open.push((self.blocks.len() - 1, 0));
                self.open.len() - 1
            }
        };
        let (at, used) = &mut self.open[place];
        let ptr = self.blocks[*at].ptr().at(*used);
        *used += len;
        Ok(ptr)
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(Block::len).sum()
    }
}

/// Host memory that the device can copy from and to while the host goes on.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    ptr: *mut u8,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `len` bytes of zeros.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Pinned> {
        context.bind()?;
        let len = len.max(1);
        let mut ptr = std::ptr::null_mut();
        // SAFETY: the driver writes one address; the memory is zeroed before anybody can read it.
        unsafe {
            cu!(cuMemHostAlloc(&mut ptr, len, 0))?;
            std::ptr::write_bytes(ptr.cast::<u8>(), 0, len);
        }
        Ok(Pinned { context: context.clone(), ptr: ptr.cast(), len })
    }

    /// The bytes. The owner knows whether the device still writes to them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialised in `new`.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// The same as whole numbers of four bytes.
    pub fn floats(&self) -> &[f32] {
        // SAFETY: the driver aligns to pages, every pattern is a float, and the length is rounded down.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len / 4) }
    }

    /// Where kernels find it: with unified addressing, which every 64-bit system has, at the host's own address.
    pub fn device(&self) -> DevPtr {
        DevPtr(self.ptr as u64)
    }

    /// The bytes, to be written while the device does not read them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new` and not freed since.
            unsafe {
                let _ = cu!(cuMemFreeHost(self.ptr.cast()));
            }
        }
    }
}
