//! Kept pages on disk, so that they outlive the process.
//!
//! One file holds one page of one block: `FOLDER/IDENTITY/KEY.full` or `KEY.sliding`. The key names all that the
//! block's rows and those before them brought (see `chain`), the identity what computed them: model, device, number
//! formats, layout. So a file's name says what it must hold, whoever wrote it, and nothing ever needs updating.
//!
//! ```text
//! magic 8 | identity 32 | group 1 | key 32 | length 8, little endian | page | SHA-256 of all that 32
//! ```
//!
//! Files are written under another name and renamed, so a process that dies leaves no half of one. One that is
//! damaged, cut or of another origin is removed and counted, never used. Under the size cap the files that were
//! used longest ago go first; the time of last use is the file's own. A thread of its own reads and writes: the
//! engine hands pages over and gets them back.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

use lapidary_ops::{GROUPS, Group};
use sha2::{Digest, Sha256};

use super::chain::BlockKey;
use crate::error::{Error, Result};

/// Where pages are stored, and how much of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixDir {
    /// The folder; made if it is not there. Several processes may share it.
    pub path: PathBuf,
    /// Most bytes of all files in it.
    pub bytes: u64,
    /// What tells this model's weights from all others.
    pub model: String,
}

/// Counts and sizes of what is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Files of this engine's identity.
    pub files: usize,
    /// Bytes of all files in the folder.
    pub bytes: u64,
    /// Pages that were written.
    pub saved: u64,
    /// Pages that were read back and used.
    pub loaded: u64,
    /// Files that were removed because they were not what their name says.
    pub damaged: u64,
    /// Files that were removed for the size cap.
    pub evicted: u64,
    /// Writes that failed, or were given up because the disk was too slow.
    pub failed: u64,
}

const MAGIC: &[u8; 8] = b"lapidkv1";
const HEAD: usize = 8 + 32 + 1 + 32 + 8;
const TAIL: usize = 32;
/// Pages that may wait to be written; more are given up.
const MOST_QUEUED: usize = 512 << 20;

/// Names a page of a block.
pub(crate) type PageName = (Group, BlockKey);

/// Pages of a sequence's beginning: by block number.
#[derive(Debug, Default)]
pub(crate) struct LoadedPages {
    pub sliding: Vec<(usize, Vec<u8>)>,
    pub full: Vec<(usize, Vec<u8>)>,
}

/// The engine's side.
#[derive(Debug)]
pub(crate) struct Store {
    jobs: Option<Sender<Job>>,
    index: Arc<Mutex<Index>>,
    thread: Option<JoinHandle<()>>,
}

enum Job {
    Save(PageName, Vec<u8>),
    Load { wanted: [Vec<(usize, BlockKey)>; GROUPS], done: Box<dyn FnOnce(Option<LoadedPages>) + Send> },
}

#[derive(Debug)]
struct Index {
    folder: PathBuf,
    identity: [u8; 32],
    page_bytes: [usize; GROUPS],
    most_bytes: u64,
    /// Files of this identity; `None` while one waits to be written.
    pages: HashMap<PageName, Option<Stored>>,
    /// Files of others, which count too.
    others: HashMap<PathBuf, Stored>,
    queued: usize,
    stats: StoreStats,
}

#[derive(Clone, Copy, Debug)]
struct Stored {
    bytes: u64,
    used: SystemTime,
}

impl Store {
    /// Opens or makes the folder and looks at what is there. `identity` names what computed the pages, whose sizes
    /// by group are `page_bytes`.
    ///
    /// # Errors
    /// `PrefixFolder` when it cannot be made, read or written.
    pub fn open(dir: &PrefixDir, identity: [u8; 32], page_bytes: [usize; GROUPS]) -> Result<Store> {
        let folder = dir.path.join(hex(&identity[..8]));
        let index = Index::read(&dir.path, folder.clone(), identity, page_bytes, dir.bytes)
            .map_err(|error| Error::PrefixFolder { path: dir.path.clone(), problem: error.to_string() })?;
        let index = Arc::new(Mutex::new(index));
        let (jobs, inbox) = channel();
        let theirs = index.clone();
        let thread = std::thread::Builder::new()
            .name("lapidary-prefix".into())
            .spawn(move || serve(&inbox, &theirs))
            .map_err(|error| Error::PrefixFolder { path: dir.path.clone(), problem: error.to_string() })?;
        Ok(Store { jobs: Some(jobs), index, thread: Some(thread) })
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }

    /// Whether a page is stored, or waits to be.
    pub fn has(&self, name: PageName) -> bool {
        self.index().pages.contains_key(&name)
    }

    /// Most blocks of `keys`, above `least` and at most `most`, after which a sequence can go on from stored pages.
    /// The first `known` full pages need not be stored; `first_block` gives the first of the window's blocks.
    pub fn depth(
        &self,
        keys: &[BlockKey],
        known: usize,
        least: usize,
        most: usize,
        first_block: impl Fn(usize) -> Option<usize>,
    ) -> Option<usize> {
        let index = self.index();
        let stored = |group, key: &BlockKey| matches!(index.pages.get(&(group, *key)), Some(Some(_)));
        let needs_full = index.page_bytes[Group::Full.index()] > 0;
        let full = |b: &usize| *b < known || !needs_full || stored(Group::Full, &keys[*b]);
        let reach = (0..most.min(keys.len())).take_while(full).count();
        // Blocks in a row, up to each, whose sliding pages are stored.
        let mut row = 0;
        let rows: Vec<usize> = keys[..reach]
            .iter()
            .map(|key| {
                row = if stored(Group::Sliding, key) { row + 1 } else { 0 };
                row
            })
            .collect();
        let whole =
            |blocks: &usize| first_block(*blocks).is_none_or(|first| rows[*blocks - 1] >= blocks - first);
        (least + 1..=reach).rev().find(whole)
    }

    /// Hands a page over to be written.
    pub fn save(&self, name: PageName, page: Vec<u8>) {
        let mut index = self.index();
        if index.pages.contains_key(&name) {
            return;
        }
        if index.queued + page.len() > MOST_QUEUED {
            index.stats.failed += 1;
            return;
        }
        index.queued += page.len();
        index.pages.insert(name, None);
        drop(index);
        self.send(Job::Save(name, page));
    }

    /// Has pages read; `done` gets them, or nothing when one of them turned out to be damaged or gone.
    pub fn load(
        &self,
        wanted: [Vec<(usize, BlockKey)>; GROUPS],
        done: impl FnOnce(Option<LoadedPages>) + Send + 'static,
    ) {
        self.send(Job::Load { wanted, done: Box::new(done) });
    }

    fn send(&self, job: Job) {
        // The thread lives as long as the sender, unless it panicked: then nothing is stored any more.
        if let Some(jobs) = &self.jobs
            && let Err(lost) = jobs.send(job)
            && let Job::Load { done, .. } = lost.0
        {
            done(None);
        }
    }

    /// Counts and sizes.
    pub fn stats(&self) -> StoreStats {
        let index = self.index();
        StoreStats { files: index.pages.values().flatten().count(), ..index.stats }
    }
}

impl Drop for Store {
    /// Waits until everything that was handed over is written.
    fn drop(&mut self) {
        self.jobs.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(index: &Mutex<Index>) -> MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(inbox: &Receiver<Job>, index: &Mutex<Index>) {
    for job in inbox {
        match job {
            Job::Save(name, page) => save(index, name, &page),
            Job::Load { wanted, done } => done(load(index, &wanted)),
        }
    }
}

fn save(index: &Mutex<Index>, name: PageName, page: &[u8]) {
    let (path, identity) = {
        let mut index = lock(index);
        index.queued -= page.len();
        (index.path(name), index.identity)
    };
    // No lock while the disk works.
    let written = write(&path, &seal(&identity, name, page));
    let mut index = lock(index);
    match written {
        Ok(bytes) => {
            index.stats.bytes += bytes;
            index.stats.saved += 1;
            index.pages.insert(name, Some(Stored { bytes, used: SystemTime::now() }));
            index.evict();
        }
        Err(_) => {
            index.stats.failed += 1;
            index.pages.remove(&name);
        }
    }
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<u64> {
    let unfinished = path.with_extension(format!("{}.unfinished", std::process::id()));
    let result = fs::File::create(&unfinished)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&unfinished, path));
    if result.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    result.map(|()| bytes.len() as u64)
}

fn load(index: &Mutex<Index>, wanted: &[Vec<(usize, BlockKey)>; GROUPS]) -> Option<LoadedPages> {
    let mut found = LoadedPages::default();
    for group in Group::ALL {
        for &(block, key) in &wanted[group.index()] {
            let name = (group, key);
            let (path, identity, length) = {
                let index = lock(index);
                (index.path(name), index.identity, index.page_bytes[group.index()])
            };
            let page = fs::read(&path).ok().map(|bytes| unseal(&identity, name, length, bytes));
            let Some(Some(page)) = page else {
                lock(index).drop_damaged(name, page.is_some());
                return None;
            };
            let now = SystemTime::now();
            // Only the order in which files are given up hangs on this.
            let _ = fs::File::options().append(true).open(&path).and_then(|f| f.set_modified(now));
            let mut index = lock(index);
            if let Some(Some(stored)) = index.pages.get_mut(&name) {
                stored.used = now;
            }
            index.stats.loaded += 1;
            match group {
                Group::Sliding => found.sliding.push((block, page)),
                Group::Full => found.full.push((block, page)),
            }
        }
    }
    Some(found)
}

/// A file's bytes.
fn seal(identity: &[u8; 32], (group, key): PageName, page: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + page.len() + TAIL);
    bytes.extend(MAGIC);
    bytes.extend(identity);
    bytes.push(group as u8);
    bytes.extend(key.0);
    bytes.extend((page.len() as u64).to_le_bytes());
    bytes.extend(page);
    let sum: [u8; 32] = Sha256::digest(&bytes).into();
    bytes.extend(sum);
    bytes
}

/// The page in a file's bytes, if they are what they should be.
fn unseal(identity: &[u8; 32], name: PageName, length: usize, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    if bytes.len() != HEAD + length + TAIL {
        return None;
    }
    let sum: [u8; 32] = Sha256::digest(&bytes[..HEAD + length]).into();
    let mut head = seal(identity, name, &[]);
    head.truncate(HEAD - 8);
    let sound = bytes[..HEAD - 8] == head[..]
        && bytes[HEAD - 8..HEAD] == (length as u64).to_le_bytes()
        && bytes[HEAD + length..] == sum;
    if !sound {
        return None;
    }
    bytes.truncate(HEAD + length);
    bytes.drain(..HEAD);
    Some(bytes)
}

impl Index {
    fn read(
        root: &Path,
        folder: PathBuf,
        identity: [u8; 32],
        page_bytes: [usize; GROUPS],
        most_bytes: u64,
    ) -> io::Result<Index> {
        fs::create_dir_all(&folder)?;
        // Better told at start than at every page.
        let probe = folder.join(format!("{}.unfinished", std::process::id()));
        fs::write(&probe, b"")?;
        fs::remove_file(&probe)?;
        let mut index = Index {
            folder,
            identity,
            page_bytes,
            most_bytes,
            pages: HashMap::new(),
            others: HashMap::new(),
            queued: 0,
            stats: StoreStats::default(),
        };
        for origin in fs::read_dir(root)? {
            let origin = origin?.path();
            if !origin.is_dir() {
                continue;
            }
            for entry in fs::read_dir(&origin)? {
                let entry = entry?;
                let path = entry.path();
                // Another process may have removed it meanwhile.
                let Ok(about) = entry.metadata() else { continue };
                let used = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let stored = Stored { bytes: about.len(), used };
                match named(&path) {
                    // What a process that died left behind; one that lives is quicker than this.
                    None if path.extension().is_some_and(|e| e == "unfinished")
                        && used.elapsed().is_ok_and(|age| age.as_secs() > 60) =>
                    {
                        let _ = fs::remove_file(&path);
                    }
                    // Not ours to touch.
                    None => {}
                    Some(name) if origin == index.folder => {
                        index.stats.bytes += stored.bytes;
                        index.pages.insert(name, Some(stored));
                    }
                    Some(_) => {
                        index.stats.bytes += stored.bytes;
                        index.others.insert(path, stored);
                    }
                }
            }
        }
        index.evict();
        Ok(index)
    }

    fn path(&self, (group, key): PageName) -> PathBuf {
        let kind = if group == Group::Full { "full" } else { "sliding" };
        self.folder.join(format!("{}.{kind}", hex(&key.0)))
    }

    /// Removes the files that were used longest ago until the rest is below the cap.
    fn evict(&mut self) {
        if self.stats.bytes <= self.most_bytes {
            return;
        }
        let own =
            self.pages.iter().filter_map(|(name, s)| s.map(|s| (s.used, Some(*name), self.path(*name))));
        let others = self.others.iter().map(|(path, s)| (s.used, None, path.clone()));
        let mut all: Vec<_> = own.chain(others).collect();
        all.sort_by(|a, b| (a.0, &a.2).cmp(&(b.0, &b.2)));
        for (_, name, path) in all {
            // A tenth more than needed, so that not every page costs a look at all files.
            if self.stats.bytes <= self.most_bytes / 10 * 9 {
                return;
            }
            let stored = match name {
                Some(name) => self.pages.remove(&name).flatten(),
                None => self.others.remove(&path),
            };
            let _ = fs::remove_file(&path);
            self.stats.bytes -= stored.map_or(0, |s| s.bytes);
            self.stats.evicted += 1;
        }
    }

    fn drop_damaged(&mut self, name: PageName, was_there: bool) {
        let _ = fs::remove_file(self.path(name));
        if let Some(stored) = self.pages.remove(&name).flatten() {
            self.stats.bytes -= stored.bytes;
        }
        self.stats.damaged += u64::from(was_there);
    }
}

/// The page that a file's name stands for.
fn named(path: &Path) -> Option<PageName> {
    let group = match path.extension()?.to_str()? {
        "full" => Group::Full,
        "sliding" => Group::Sliding,
        _ => return None,
    };
    let digits = path.file_stem()?.to_str()?.as_bytes();
    let mut key = [0; 32];
    if digits.len() != 64 {
        return None;
    }
    for (byte, pair) in key.iter_mut().zip(digits.as_chunks::<2>().0) {
        let digit = |d: u8| (d as char).to_digit(16).filter(|_| !d.is_ascii_uppercase());
        *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
    }
    Some((group, BlockKey(key)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests;
