//! The folder that models live in, in the layout of the Hugging Face cache, so that files are shared with
//! other tools:
//!
//! ```text
//! models--owner--name/
//!     blobs/<etag>                  contents, named by hash; <etag>.incomplete while they come
//!     refs/<revision>               text: the commit that a branch or tag stood for when last asked
//!     snapshots/<commit>/<file>     symbolic links to ../../blobs/<etag>
//! .locks/models--owner--name/<etag>.lock
//! ```
//!
//! Where symbolic links can't be made, the snapshot holds the file itself and no blob is kept.
//! Paths are opaque to the system: nothing here turns the root into a string except for messages.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::spec::{Repo, check_path};
use super::{HubError, Spec};

/// Makes a link at the second path that leads to the first, or says why not.
type Linker = fn(&Path, &Path) -> io::Result<()>;

/// The layout under one root.
#[derive(Debug, Clone)]
pub(super) struct Store {
    pub root: PathBuf,
    /// Replaced in tests to behave like a system without symbolic links.
    pub linker: Linker,
}

/// A model in the store: one commit of one repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The repository.
    pub repo: Repo,
    /// The commit.
    pub commit: String,
    /// Branches and tags that stand for this commit in the store.
    pub revisions: Vec<String>,
    /// Files by name, with their sizes in bytes.
    pub files: Vec<(String, u64)>,
    /// The folder that holds them.
    pub path: PathBuf,
}

impl Stored {
    /// Bytes of all files. A file that another commit shares counts in both.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// What a removal freed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Files that are gone from snapshots.
    pub files: usize,
    /// Bytes given back to the disk; less than the files' sizes if another snapshot still uses some.
    pub bytes: u64,
}

impl Store {
    pub fn new(root: PathBuf) -> Self {
        Self { root, linker: symlink }
    }

    fn folder(repo: &Repo) -> String {
        format!("models--{}--{}", repo.owner, repo.name)
    }

    pub fn repo(&self, repo: &Repo) -> PathBuf {
        self.root.join(Self::folder(repo))
    }

    pub fn blob(&self, repo: &Repo, etag: &str) -> PathBuf {
        self.repo(repo).join("blobs").join(etag)
    }

    pub fn lock(&self, repo: &Repo, etag: &str) -> PathBuf {
        self.root.join(".locks").join(Self::folder(repo)).join(format!("{etag}.lock"))
    }

    pub fn snapshot(&self, repo: &Repo, commit: &str) -> PathBuf {
        self.repo(repo).join("snapshots").join(commit)
    }

    /// The commit that a revision stands for in the store.
    pub fn commit(&self, repo: &Repo, revision: &str) -> Result<Option<String>, HubError> {
        let path = self.repo(repo).join("refs").join(revision);
        match fs::read_to_string(&path) {
            Ok(text) if is_commit(text.trim()) => Ok(Some(text.trim().to_owned())),
            Ok(_) => Err(HubError::Io {
                action: "use",
                path,
                source: io::Error::other("it doesn't hold a commit; delete it and download again"),
            }),
            Err(e) if is_absent(&e) => {
                let named = is_commit(revision) && self.snapshot(repo, revision).is_dir();
                Ok(named.then(|| revision.to_owned()))
            }
            Err(e) => Err(HubError::io("read", path)(e)),
        }
    }

    /// Remembers which commit a revision stands for.
    pub fn set_commit(&self, repo: &Repo, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.repo(repo).join("refs").join(revision);
        create_parent(&path)?;
        let partial = path.with_extension(format!("{}.incomplete", std::process::id()));
        fs::write(&partial, commit).map_err(HubError::io("write", &partial))?;
        fs::rename(&partial, &path).map_err(HubError::io("write", &path))
    }

    /// Makes `blobs/<etag>` appear as `file` of a commit.
    pub fn link(&self, repo: &Repo, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let blob = self.blob(repo, etag);
        let path = self.snapshot(repo, commit).join(file);
        create_parent(&path)?;
        match fs::remove_file(&path) {
            Err(e) if !is_absent(&e) => return Err(HubError::io("replace", path)(e)),
            _ => {}
        }
        let up = std::iter::repeat_n("..", 2 + file.matches('/').count());
        let target: PathBuf = up.chain(["blobs", etag]).collect();
        match (self.linker)(&target, &path) {
            Ok(()) => Ok(()),
            // Another process was faster with the same link.
            Err(_) if path.exists() => Ok(()),
            Err(_) => fs::rename(&blob, &path).map_err(HubError::io("write", &path)),
        }
    }

    /// Files of a commit with their sizes, by name; links to blobs that are gone are left out.
    pub fn files(&self, repo: &Repo, commit: &str) -> Result<Vec<(String, u64)>, HubError> {
        let mut files = Vec::new();
        walk(&self.snapshot(repo, commit), "", &mut |name, path| {
            if let Ok(data) = fs::metadata(path) {
                files.push((name.to_owned(), data.len()));
            }
        })?;
        files.sort();
        Ok(files)
    }

    /// Everything in the store, by repository and commit.
    pub fn list(&self) -> Result<Vec<Stored>, HubError> {
        let mut all = Vec::new();
        for folder in entries(&self.root)? {
            let name = folder.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let Some((owner, name)) = name.strip_prefix("models--").and_then(|n| n.split_once("--")) else {
                continue;
            };
            let repo = Repo { owner: owner.to_owned(), name: name.to_owned() };
            let refs = self.refs(&repo)?;
            for snapshot in entries(&folder.join("snapshots"))? {
                let Some(commit) = snapshot.file_name().and_then(|n| n.to_str()).map(str::to_owned) else {
                    continue;
                };
                let files = self.files(&repo, &commit)?;
                let revisions = refs.iter().filter(|r| r.1 == commit).map(|r| r.0.clone()).collect();
                all.push(Stored { repo: repo.clone(), commit, revisions, files, path: snapshot });
            }
        }
        all.sort_by(|a, b| (&a.repo, &a.commit).cmp(&(&b.repo, &b.commit)));
        Ok(all)
    }

    /// Removes a repository, or one revision of it, or the files that `chosen` names of a commit's; then every
    /// blob that no snapshot uses any more.
    pub fn remove(
        &self,
        spec: &Spec,
        chosen: impl Fn(&[String]) -> Result<Vec<String>, HubError>,
    ) -> Result<Removed, HubError> {
        let repo = &spec.repo;
        let commits: Vec<String> = match &spec.revision {
            Some(revision) => self.commit(repo, revision)?.into_iter().collect(),
            None => entries(&self.repo(repo).join("snapshots"))?
                .iter()
                .filter_map(|p| Some(p.file_name()?.to_str()?.to_owned()))
                .collect(),
        };
        let mut paths = Vec::new();
        let mut refusal = None;
        for commit in &commits {
            let mut present = Vec::new();
            walk(&self.snapshot(repo, commit), "", &mut |name, _| present.push(name.to_owned()))?;
            match chosen(&present) {
                Ok(names) => paths.extend(names.iter().map(|n| self.snapshot(repo, commit).join(n))),
                Err(e) => refusal = Some(e),
            }
        }
        if paths.is_empty() {
            let absent = HubError::NotStored { model: spec.to_string(), path: self.root.clone() };
            return Err(refusal.unwrap_or(absent));
        }

        let mut removed = Removed { files: paths.len(), bytes: 0 };
        for path in &paths {
            let data = fs::symlink_metadata(path).map_err(HubError::io("read", path))?;
            fs::remove_file(path).map_err(HubError::io("remove", path))?;
            if data.is_file() {
                removed.bytes += data.len();
            }
        }
        remove_empty_folders(&self.repo(repo).join("snapshots"));
        self.forget_refs(repo)?;
        removed.bytes += self.remove_unused_blobs(repo)?;
        Ok(removed)
    }

    /// Removes blobs that no snapshot leads to. Partial downloads go with the last snapshot only: while there
    /// is one, they may be on their way into it.
    fn remove_unused_blobs(&self, repo: &Repo) -> Result<u64, HubError> {
        let snapshots = self.repo(repo).join("snapshots");
        let mut used = BTreeSet::new();
        walk(&snapshots, "", &mut |_, path| {
            used.extend(fs::read_link(path).ok().and_then(|t| Some(t.file_name()?.to_owned())));
        })?;
        let last = !snapshots.exists();
        let mut freed = 0;
        for blob in entries(&self.repo(repo).join("blobs"))? {
            let partial = blob.extension().is_some_and(|e| e == "incomplete");
            let name = blob.file_name().unwrap_or_default();
            if used.contains(name) || (partial && !last) {
                continue;
            }
            freed += fs::metadata(&blob).map_or(0, |d| d.len());
            fs::remove_file(&blob).map_err(HubError::io("remove", &blob))?;
        }
        if last {
            remove_empty_folders(&self.repo(repo));
        }
        Ok(freed)
    }

    fn refs(&self, repo: &Repo) -> Result<Vec<(String, String)>, HubError> {
        let mut refs = Vec::new();
        walk(&self.repo(repo).join("refs"), "", &mut |name, path| {
            if let Ok(commit) = fs::read_to_string(path) {
                refs.push((name.to_owned(), commit.trim().to_owned()));
            }
        })?;
        refs.sort();
        Ok(refs)
    }

    /// Removes the refs that lead to no snapshot.
    fn forget_refs(&self, repo: &Repo) -> Result<(), HubError> {
        let folder = self.repo(repo).join("refs");
        for (name, commit) in self.refs(repo)? {
            if !self.snapshot(repo, &commit).exists() {
                let path = folder.join(name);
                fs::remove_file(&path).map_err(HubError::io("remove", &path))?;
            }
        }
        remove_empty_folders(&folder);
        Ok(())
    }
}

/// Whether a text can be a commit, and a folder's name on any system.
pub(super) fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether an entity tag can name a blob.
pub(super) fn is_blob_name(etag: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    (1..=128).contains(&etag.len()) && etag.bytes().all(legal)
}

pub(super) fn create_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().expect("paths in the store lie under its root");
    fs::create_dir_all(parent).map_err(HubError::io("create", parent))
}

/// A missing folder on the way is absence too, and so is a file where a folder would be.
fn is_absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory)
}

/// What a folder holds, sorted; nothing if it isn't there.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, HubError> {
    let read = match fs::read_dir(folder) {
        Ok(read) => read,
        Err(e) if is_absent(&e) => return Ok(Vec::new()),
        Err(e) => return Err(HubError::io("read", folder)(e)),
    };
    let mut paths =
        read.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>().map_err(HubError::io("read", folder))?;
    paths.sort();
    Ok(paths)
}

/// Calls `visit` with the name (relative, with slashes) and path of everything under a folder that isn't a
/// folder itself. Links aren't followed. Names that no repository can have are passed over.
fn walk(folder: &Path, prefix: &str, visit: &mut dyn FnMut(&str, &Path)) -> Result<(), HubError> {
    for path in entries(folder)? {
        let Some(name) = path.file_name().and_then(|n| n.to_str()).filter(|n| check_path(n).is_ok()) else {
            continue;
        };
        let name = format!("{prefix}{name}");
        let data = fs::symlink_metadata(&path).map_err(HubError::io("read", &path))?;
        match data.is_dir() {
            true => walk(&path, &format!("{name}/"), visit)?,
            false => visit(&name, &path),
        }
    }
    Ok(())
}

/// Removes folders that hold nothing but such folders.
fn remove_empty_folders(folder: &Path) {
    for path in entries(folder).unwrap_or_default() {
        if path.is_dir() && !path.is_symlink() {
            remove_empty_folders(&path);
        }
    }
    // A folder with something in it stays: that is the point, not a failure.
    let _ = fs::remove_dir(folder);
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_target: &Path, _link: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "1111111111111111111111111111111111111111";
    const NEW: &str = "2222222222222222222222222222222222222222";

    fn repo() -> Repo {
        Repo { owner: "o".to_owned(), name: "n".to_owned() }
    }

    fn add(store: &Store, commit: &str, file: &str, etag: &str, contents: &str) {
        let blob = store.blob(&repo(), etag);
        create_parent(&blob).unwrap();
        fs::write(&blob, contents).unwrap();
        store.link(&repo(), commit, file, etag).unwrap();
    }

    /// Two commits that share one file, under a name that isn't ASCII.
    fn filled(folder: &Path) -> Store {
        let store = Store::new(folder.join("モデル кэш"));
        add(&store, OLD, "config.json", "aaa", "{}");
        add(&store, OLD, "sub/m.gguf", "bbb", "old weights");
        add(&store, NEW, "config.json", "aaa", "{}");
        add(&store, NEW, "sub/m.gguf", "ccc", "the next weights");
        store.set_commit(&repo(), "v1", OLD).unwrap();
        store.set_commit(&repo(), "main", NEW).unwrap();
        store.set_commit(&repo(), "refs/pr/3", NEW).unwrap();
        store
    }

    #[test]
    fn what_is_stored_is_found_by_revision_and_listed() {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        assert_eq!(store.commit(&repo(), "main").unwrap().as_deref(), Some(NEW));
        assert_eq!(store.commit(&repo(), "refs/pr/3").unwrap().as_deref(), Some(NEW));
        assert_eq!(store.commit(&repo(), OLD).unwrap().as_deref(), Some(OLD));
        assert_eq!(store.commit(&repo(), "refs/pr").unwrap(), None);
        assert_eq!(store.commit(&repo(), "nothing").unwrap(), None);
        let text = fs::read_to_string(store.snapshot(&repo(), OLD).join("sub/m.gguf")).unwrap();
        assert_eq!(text, "old weights");

        let list = store.list().unwrap();
        assert_eq!(list.iter().map(|s| s.commit.as_str()).collect::<Vec<_>>(), [OLD, NEW]);
        assert_eq!(list[1].revisions, ["main", "refs/pr/3"]);
        assert_eq!(list[1].files, [("config.json".to_owned(), 2), ("sub/m.gguf".to_owned(), 16)]);
        assert_eq!(list[1].bytes(), 18);
    }

    #[test]
    fn removing_frees_only_what_nothing_else_uses() {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        let all = |names: &[String]| Ok(names.to_vec());
        let removed = store.remove(&Spec::parse("o/n@v1").unwrap(), all).unwrap();
        assert_eq!(removed, Removed { files: 2, bytes: 11 });
        assert!(store.blob(&repo(), "aaa").exists(), "the other commit uses it");
        assert_eq!(store.list().unwrap().len(), 1);
        assert_eq!(store.commit(&repo(), "v1").unwrap(), None);

        fs::write(store.blob(&repo(), "ddd.incomplete"), "half").unwrap();
        let removed = store.remove(&Spec::parse("o/n").unwrap(), all).unwrap();
        assert_eq!(removed, Removed { files: 2, bytes: 2 + 16 + 4 });
        assert!(!store.repo(&repo()).exists(), "nothing is left behind");
        let again = store.remove(&Spec::parse("o/n").unwrap(), all).unwrap_err();
        assert!(matches!(again, HubError::NotStored { .. }), "{again}");
    }

    #[test]
    fn without_symbolic_links_the_snapshot_holds_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::new(folder.path().to_owned());
        store.linker = |_, _| Err(io::ErrorKind::PermissionDenied.into());
        add(&store, OLD, "sub/m.gguf", "bbb", "weights");
        let path = store.snapshot(&repo(), OLD).join("sub/m.gguf");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert_eq!(fs::read_to_string(&path).unwrap(), "weights");
        let removed = store.remove(&Spec::parse("o/n").unwrap(), |n| Ok(n.to_vec())).unwrap();
        assert_eq!(removed, Removed { files: 1, bytes: 7 });
    }

    #[test]
    fn a_damaged_ref_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        fs::write(store.repo(&repo()).join("refs/main"), "../../etc").unwrap();
        let message = store.commit(&repo(), "main").unwrap_err().to_string();
        assert!(message.contains("refs") && message.contains("delete it"), "{message}");
    }

    #[test]
    fn an_empty_or_missing_store_lists_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Store::new(folder.path().join("absent")).list().unwrap().is_empty());
    }
}
