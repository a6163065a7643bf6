//! The bytes of a file: mapped, or part of the program.

use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

/// The bytes of one whole file, kept alive by whoever holds a clone. A backend that reads matrices in place holds the
/// maps that its matrices point into.
pub type FileMap = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// What the readers of both kinds of file hold.
#[derive(Clone)]
pub(crate) struct Mapped {
    map: FileMap,
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
        Ok(Mapped { map: Arc::new(map) })
    }

    /// Bytes that are part of the program.
    pub fn from_static(bytes: &'static [u8]) -> Mapped {
        Mapped { map: Arc::new(bytes) }
    }

    /// The map, to be held by others too.
    pub fn share(&self) -> FileMap {
        self.map.clone()
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        (*self.map).as_ref()
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
