//! The bytes of a file: mapped, or part of the program.

use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use lapidary_formats::{FileBytes, FileMap};
use memmap2::Mmap;

/// What the readers of both kinds of file hold.
#[derive(Clone)]
pub(crate) enum Mapped {
    File(Arc<FileMapping>),
    Static(&'static [u8]),
}

impl Mapped {
    /// Maps a file for reading. An empty file gives no bytes.
    pub fn open(path: &Path) -> std::io::Result<Mapped> {
        let file = std::fs::File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(std::io::ErrorKind::IsADirectory.into());
        }
        if metadata.len() == 0 {
            return Ok(Mapped::from_static(&[]));
        }
        // SAFETY: the map is read-only, and `Mmap` lives as long as any view into it, since every holder has a clone
        // of the `Arc`. Another process that shortens the file meanwhile can still fault us; model files are written
        // once, and copying 60 GB to exclude that is no trade a user would make.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Mapped::File(Arc::new(FileMapping(map))))
    }

    /// Bytes that are part of the program.
    pub fn from_static(bytes: &'static [u8]) -> Mapped {
        Mapped::Static(bytes)
    }

    /// The map, to be held by others too.
    pub fn share(&self) -> FileMap {
        match self {
            Mapped::File(map) => map.clone(),
            Mapped::Static(bytes) => Arc::new(*bytes),
        }
    }

    /// Lets the system take back the memory of `bytes` if they lie in this map: whoever reads them again finds them as
    /// before, from the file. Says whether they lie here.
    pub fn release(&self, bytes: &[u8]) -> bool {
        let Some(offset) = (bytes.as_ptr() as usize).checked_sub(self.as_ptr() as usize) else {
            return false;
        };
        if offset + bytes.len() > self.len() {
            return false;
        }
        if let Mapped::File(map) = self {
            map.release(bytes);
        }
        true
    }
}

/// A read-only, shared map of a file.
pub(crate) struct FileMapping(Mmap);

impl AsRef<[u8]> for FileMapping {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(unix)]
impl FileMapping {
    /// Where `bytes` start, if they lie in this map.
    fn offset(&self, bytes: &[u8]) -> Option<usize> {
        let offset = (bytes.as_ptr() as usize).checked_sub(self.0.as_ptr() as usize)?;
        (offset + bytes.len() <= self.0.len()).then_some(offset)
    }
}

// Both are advice: a system that does not take it keeps pages a while longer, or reads them when they are needed.
#[cfg(unix)]
impl FileBytes for FileMapping {
    fn release(&self, bytes: &[u8]) {
        if let Some(offset) = self.offset(bytes) {
            let dont_need = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the map is a read-only, shared one of a file, so dropped pages are read from the file again on
            // the next access and no view ever sees other bytes.
            let _ = unsafe { self.0.unchecked_advise_range(dont_need, offset, bytes.len()) };
        }
    }

    fn want(&self, bytes: &[u8]) {
        if let Some(offset) = self.offset(bytes) {
            let _ = self.0.advise_range(memmap2::Advice::WillNeed, offset, bytes.len());
        }
    }
}

#[cfg(not(unix))]
impl FileBytes for FileMapping {}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Mapped::File(map) => &map.0,
            Mapped::Static(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_bytes_read_as_before_and_foreign_ones_are_told_apart() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let bytes: Vec<u8> = (0..40_001u32).map(|i| ((i * i) >> 3) as u8).collect();
        std::fs::write(file.path(), &bytes).expect("it is written");
        let map = Mapped::open(file.path()).expect("it opens");
        // Neither end on a page border.
        assert!(map.release(&map[4_099..33_333]));
        assert!(map.release(&map[..]));
        let shared = map.share();
        shared.want(&map[5_001..39_999]);
        shared.want(&bytes);
        assert_eq!(&map[..], &bytes[..]);
        assert!(!map.release(&bytes));
        let of_the_program = Mapped::from_static(b"abc");
        assert!(of_the_program.release(&of_the_program[1..]));
        assert_eq!(&of_the_program[..], b"abc");
    }
}
