//! Rows in the bytes of their file format: inside a file map that the backend holds, or in memory of its own.

use std::sync::Arc;

use lapidary_formats::{Format, Scales, TensorView};
use lapidary_ops::{FileMap, Result};

use crate::matrix::in_row_chunks;
use crate::memory::{Aligned, Slabs};
use crate::team::Team;

/// The file maps that the backend holds.
#[derive(Clone, Copy)]
pub(crate) struct Maps<'a>(pub &'a [FileMap]);

impl std::fmt::Debug for Maps<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} maps", self.0.len())
    }
}

/// Rows in the bytes of their file format.
#[derive(Debug)]
pub(crate) struct FileRows {
    /// Points into `codes` and `block_scales`, which live and stay where they are as long as this does.
    view: TensorView<'static>,
    codes: Bytes,
    block_scales: Bytes,
}

/// Bytes that stay where they are.
enum Bytes {
    Owned(Aligned),
    /// Inside a file map, which is kept alive.
    Mapped {
        map: FileMap,
        start: *const u8,
        len: usize,
    },
}

// SAFETY: mapped bytes are only read, and the map behind the pointer is itself `Send` and `Sync`.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bytes::Owned(own) => write!(f, "{} bytes", own.len()),
            Bytes::Mapped { len, .. } => write!(f, "{len} mapped bytes"),
        }
    }
}

/// The map that holds `bytes`.
pub(crate) fn find(maps: Maps<'_>, bytes: &[u8]) -> Option<FileMap> {
    let at = bytes.as_ptr_range();
    let holds = |map: &&FileMap| {
        let all = (***map).as_ref().as_ptr_range();
        all.start <= at.start && at.end <= all.end
    };
    if bytes.is_empty() { None } else { maps.0.iter().find(holds).map(Arc::clone) }
}

impl Bytes {
    /// `bytes` in place where a map holds them, else a copy.
    fn of(bytes: &[u8], maps: Maps<'_>, what: &str) -> Result<Bytes> {
        match find(maps, bytes) {
            Some(map) => Ok(Bytes::Mapped { map, start: bytes.as_ptr(), len: bytes.len() }),
            None => Aligned::copy_of(bytes, what).map(Bytes::Owned),
        }
    }

    /// Asks the system to bring `bytes`, part of these, into memory if they are mapped.
    fn want(&self, bytes: &[u8]) {
        if let Bytes::Mapped { map, .. } = self {
            map.want(bytes);
        }
    }

    /// # Safety
    /// The slice is not used after `self` is dropped.
    unsafe fn lend(&self) -> &'static [u8] {
        match self {
            // SAFETY: `Aligned` memory never moves and is not written after the copy; the caller answers for
            // the lifetime.
            Bytes::Owned(own) => unsafe { std::slice::from_raw_parts(own.start().cast_const(), own.len()) },
            // SAFETY: the map is kept alive and lends its bytes unchanged; the caller answers for the lifetime.
            Bytes::Mapped { start, len, .. } => unsafe { std::slice::from_raw_parts(*start, *len) },
        }
    }

    /// Lets the system take back the memory of `bytes`, part of these, if they are mapped.
    fn release(&self, bytes: &[u8]) {
        if let Bytes::Mapped { map, .. } = self {
            map.release(bytes);
        }
    }

    fn owned(&self) -> usize {
        if let Bytes::Owned(own) = self { own.len() } else { 0 }
    }

    fn mapped(&self) -> usize {
        if let Bytes::Mapped { len, .. } = self { *len } else { 0 }
    }
}

impl FileRows {
    pub fn new(view: &TensorView<'_>, maps: Maps<'_>) -> Result<FileRows> {
        let codes = Bytes::of(view.bytes, maps, &view.name)?;
        let block_scales = match &view.scales {
            Scales::Nvfp4 { blocks, .. } => Bytes::of(blocks, maps, &view.name)?,
            Scales::Group32Bf16(bytes) => Bytes::of(bytes, maps, &view.name)?,
            _ => Bytes::Owned(Aligned::empty()),
        };
        // SAFETY: the view is private, lent out with the lifetime of `&self` only, and dropped with the bytes.
        let (bytes, scale_bytes) = unsafe { (codes.lend(), block_scales.lend()) };
        let scales = match &view.scales {
            Scales::None => Scales::None,
            Scales::Tensor(s) => Scales::Tensor(*s),
            Scales::Row(s) => Scales::Row(s.clone()),
            Scales::Block128 { values, first_row } => {
                Scales::Block128 { values: values.clone(), first_row: *first_row }
            }
            Scales::Nvfp4 { tensor, .. } => Scales::Nvfp4 { blocks: scale_bytes, tensor: *tensor },
            Scales::Group32Bf16(_) => Scales::Group32Bf16(scale_bytes),
        };
        let (name, rows, cols, format) = (view.name.clone(), view.rows, view.cols, view.format);
        let view = TensorView { name, rows, cols, format, bytes, scales };
        Ok(FileRows { view, codes, block_scales })
    }

    /// Whether these are numbers, without scales of their own rows or blocks of the file, inside a map.
    pub fn is_to_move(&self) -> bool {
        matches!(self.view.format, Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8E4M3)
            && self.codes.mapped() > 0
    }

    pub fn move_in(&mut self, team: &Team, slabs: &Slabs) -> Result<()> {
        let Ok(own) = slabs.zeroed(self.view.bytes.len(), &self.view.name) else { return Ok(()) };
        in_row_chunks(team, &self.view, |chunk, rows| {
            let at = rows.start * self.view.row_bytes();
            // SAFETY: chunks are different rows of a block as long as all of them, which nobody else has yet.
            let to = unsafe { std::slice::from_raw_parts_mut(own.start().add(at), chunk.bytes.len()) };
            to.copy_from_slice(chunk.bytes);
            self.codes.release(chunk.bytes);
            Ok(())
        })?;
        self.codes = Bytes::Owned(own);
        // SAFETY: as in `new`; nobody has the view's old bytes any more.
        self.view.bytes = unsafe { self.codes.lend() };
        Ok(())
    }

    /// The rows.
    pub fn view(&self) -> &TensorView<'_> {
        &self.view
    }

    /// Asks the system to bring rows `first .. first + rows` into memory.
    pub fn want(&self, first: usize, rows: usize) {
        let [codes, scales] = self.bytes_of(first, rows);
        self.codes.want(codes);
        self.block_scales.want(scales);
    }

    /// Lets the system take back the memory of rows `first .. first + rows`: they are packed. Whoever reads them again finds
    /// them as before.
    pub fn release(&self, first: usize, rows: usize) {
        let [codes, scales] = self.bytes_of(first, rows);
        self.codes.release(codes);
        self.block_scales.release(scales);
    }

    /// The codes of some rows and the scales beside them.
    fn bytes_of(&self, first: usize, rows: usize) -> [&[u8]; 2] {
        [self.view.bytes, crate::int8::beside(&self.view.scales).0].map(|bytes| {
            let row = bytes.len() / self.view.rows;
            &bytes[first * row..(first + rows) * row]
        })
    }

    pub fn bytes(&self) -> usize {
        let scales = match &self.view.scales {
            Scales::Row(s) => s.len() * size_of::<f32>(),
            Scales::Block128 { values, .. } => values.len() * size_of::<f32>(),
            _ => 0,
        };
        self.codes.owned() + self.block_scales.owned() + scales
    }

    pub fn mapped(&self) -> usize {
        self.codes.mapped() + self.block_scales.mapped()
    }
}
