//! The bytes of a file that views point into.

use std::sync::Arc;

/// The bytes of one whole file, wherever they are. They never move or change while somebody holds them.
pub trait FileBytes: AsRef<[u8]> + Send + Sync {
    /// Lets the system take back the memory of `bytes`, part of these, once they were copied elsewhere. They stay
    /// readable: whoever reads them again waits for the file. Bytes that are in no file stay where they are.
    fn release(&self, _bytes: &[u8]) {}

    /// Asks the system to read `bytes`, part of these, from the file if it has not, while the caller goes on. Bytes that
    /// are in no file are there.
    fn want(&self, _bytes: &[u8]) {}
}

/// A file's bytes, kept alive by whoever holds a clone. A backend that reads matrices in place holds the maps that its
/// matrices point into.
pub type FileMap = Arc<dyn FileBytes>;

impl FileBytes for &'static [u8] {}
impl FileBytes for Vec<u8> {}
