//! One file from the server into the store: resumed where an earlier attempt stopped, checked, and only then
//! given its name. A reader of the store never sees a part of a file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::client::{Client, Failure, FileData, stopper};
use super::spec::Repo;
use super::store::{Store, create_parent};
use super::{HubError, Progress, Watch};

const BUFFER_BYTES: usize = 1 << 18;

/// A download's surroundings.
pub(super) struct Download<'a> {
    pub client: &'a Client,
    pub store: &'a Store,
    /// How long to wait for another process that downloads the same file.
    pub lock_wait: Duration,
    pub repo: &'a Repo,
    pub commit: &'a str,
    pub file: &'a str,
}

impl Download<'_> {
    /// Brings the file into the commit's snapshot.
    pub fn run(&self, watch: &mut Watch<'_>) -> Result<(), HubError> {
        let stop = stopper(watch.cancel);
        let data = self.client.file_data(self.repo, self.commit, self.file, &stop)?;
        let _lock = self.lock(&data.etag, &stop)?;
        let blob = self.store.blob(self.repo, &data.etag);
        // The blob may be another commit's, or another process's that held the lock before.
        if !fs::metadata(&blob).is_ok_and(|d| d.len() == data.bytes) {
            self.fetch(&data, &blob, watch)?;
        }
        self.store.link(self.repo, self.commit, self.file, &data.etag)
    }

    /// The system releases the lock when the process ends, however it ends.
    fn lock(&self, etag: &str, stop: &dyn Fn() -> bool) -> Result<File, HubError> {
        let path = self.store.lock(self.repo, etag);
        create_parent(&path)?;
        let open = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let lock = open.map_err(HubError::io("open", &path))?;
        let until = Instant::now() + self.lock_wait;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::WouldBlock) if stop() => return Err(self.cancelled()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(HubError::Busy { file: self.file.to_owned(), path });
                }
                // Some network file systems have no locks; a download by one process works without.
                Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => {
                    return Ok(lock);
                }
                Err(TryLockError::Error(e)) => return Err(HubError::io("lock", path)(e)),
            }
        }
    }

    fn fetch(&self, data: &FileData, blob: &Path, watch: &mut Watch<'_>) -> Result<(), HubError> {
        let mut path = blob.as_os_str().to_owned();
        path.push(".incomplete");
        let mut partial = Partial::open(PathBuf::from(path), data.bytes)?;
        self.check_space(&partial.path, data.bytes - partial.len)?;
        self.report(data, partial.len, watch);

        let (mut failed, mut furthest) = (0, partial.len);
        while partial.len < data.bytes {
            let Err(failure) = self.attempt(data, &mut partial, watch) else { continue };
            if partial.len > furthest {
                // An attempt that came further than all before it wasn't in vain.
                (failed, furthest) = (0, partial.len);
            }
            self.client.wait_after(failure, &mut failed, self.file, &stopper(watch.cancel))?;
        }
        // An empty file takes no attempt.
        self.report(data, partial.len, watch);
        partial.file.sync_all().map_err(HubError::io("write", &partial.path))?;
        if let Some(expected) = data.sha256() {
            let got = partial.sha256()?;
            if !got.eq_ignore_ascii_case(expected) {
                fs::remove_file(&partial.path).map_err(HubError::io("remove", &partial.path))?;
                let expected = expected.to_owned();
                return Err(HubError::HashMismatch { file: self.file.to_owned(), expected, got });
            }
        }
        fs::rename(&partial.path, blob).map_err(HubError::io("write", blob))
    }

    /// Reads one answer to its end. Bytes are kept in `partial` as they come.
    fn attempt(&self, data: &FileData, partial: &mut Partial, watch: &mut Watch<'_>) -> Result<(), Failure> {
        if stopper(watch.cancel)() {
            return Err(Failure::Final(self.cancelled()));
        }
        let mut bytes = match self.client.bytes(self.repo, self.commit, self.file, partial.len) {
            Err(Failure::Final(HubError::Status { status: 416, .. })) => {
                let reason = format!("the server can't continue at byte {}", partial.len);
                partial.restart().map_err(Failure::Final)?;
                return Err(self.broken(reason));
            }
            other => other?,
        };
        if bytes.start != partial.len {
            let reason = format!("asked for byte {}, it begins at {}", partial.len, bytes.start);
            partial.restart().map_err(Failure::Final)?;
            // Beginning at 0 is what servers do that know no ranges.
            if bytes.start != 0 {
                return Err(self.broken(reason));
            }
        }
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            if stopper(watch.cancel)() {
                return Err(Failure::Final(self.cancelled()));
            }
            let n = match bytes.body.read(&mut buffer) {
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(self.broken(e.to_string())),
            };
            if n == 0 && partial.len < data.bytes {
                let reason = format!("the connection ended at byte {} of {}", partial.len, data.bytes);
                return Err(self.broken(reason));
            }
            if n == 0 {
                return Ok(());
            }
            let got = partial.len + n as u64;
            if got > data.bytes {
                partial.restart().map_err(Failure::Final)?;
                let (file, expected) = (self.file.to_owned(), data.bytes);
                return Err(Failure::Final(HubError::SizeMismatch { file, expected, got }));
            }
            partial.append(&buffer[..n]).map_err(Failure::Final)?;
            self.report(data, partial.len, watch);
        }
    }

    fn report(&self, data: &FileData, done: u64, watch: &mut Watch<'_>) {
        if let Some(progress) = &mut watch.progress {
            progress(&Progress { file: self.file, done, total: data.bytes });
        }
    }

    fn check_space(&self, path: &Path, needed: u64) -> Result<(), HubError> {
        let folder = path.parent().expect("blobs lie in a folder");
        match available_bytes(folder) {
            Some(available) if available < needed => Err(HubError::NoSpace {
                file: self.file.to_owned(),
                path: self.store.root.clone(),
                needed,
                available,
            }),
            _ => Ok(()),
        }
    }

    fn broken(&self, reason: String) -> Failure {
        let url = self.client.address(self.repo, self.commit, self.file);
        Failure::Passing { error: HubError::Unreachable { url, reason, attempts: 1 }, wait: None }
    }

    fn cancelled(&self) -> HubError {
        HubError::Cancelled { file: self.file.to_owned() }
    }
}

/// The part of a file that is there.
struct Partial {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Partial {
    fn open(path: PathBuf, bytes: u64) -> Result<Self, HubError> {
        create_parent(&path)?;
        let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = open.map_err(HubError::io("open", &path))?;
        let len = file.seek(SeekFrom::End(0)).map_err(HubError::io("read", &path))?;
        let mut partial = Self { path, file, len };
        if len > bytes {
            partial.restart()?;
        }
        Ok(partial)
    }

    fn restart(&mut self) -> Result<(), HubError> {
        self.len = 0;
        self.file.set_len(0).map_err(HubError::io("write", &self.path))?;
        self.file.rewind().map_err(HubError::io("write", &self.path))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::io("write", &self.path))?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Hashes what is on the disk, so that a fault there is found too and a resumed part counts.
    fn sha256(&mut self) -> Result<String, HubError> {
        self.file.rewind().map_err(HubError::io("read", &self.path))?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match self.file.read(&mut buffer).map_err(HubError::io("read", &self.path))? {
                0 => break,
                n => hash.update(&buffer[..n]),
            }
        }
        Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
    }
}

/// Bytes that this user may still write where `folder` is; `None` where the system isn't asked.
#[cfg(unix)]
fn available_bytes(folder: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path is a string with a final zero, and `stat` has room for what is written.
    let answer = unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) };
    if answer != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it filled the structure.
    let stat = unsafe { stat.assume_init() };
    // The fields' widths differ by platform.
    #[allow(clippy::unnecessary_cast)]
    Some((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64))
}

#[cfg(not(unix))]
fn available_bytes(_folder: &Path) -> Option<u64> {
    None
}
