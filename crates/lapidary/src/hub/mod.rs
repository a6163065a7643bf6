//! Models by name: a store on disk in the layout of the Hugging Face cache, filled from the hub.
//!
//! ```no_run
//! use lapidary::hub::{Hub, Spec, Watch};
//!
//! let hub = Hub::from_env()?;
//! let spec = Spec::parse("google/gemma-4-E2B-it")?;
//! let model = hub.get(&spec, &mut Watch::default())?;
//! println!("{}", model.path().display());
//! # Ok::<(), lapidary::hub::HubError>(())
//! ```
//!
//! Invariants: a file in a snapshot is complete and has the announced size and, for large files, the
//! announced SHA-256. The token goes to the endpoint and nowhere else. Pickled weights are never fetched.
//! Offline, nothing here opens a connection.
//!
//! Deliberately absent: uploads, data sets, and reading the files.

mod choose;
mod client;
mod download;
mod error;
mod spec;
mod store;

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub use error::HubError;
pub use spec::{MAIN, Repo, Spec};
pub use store::{Removed, Stored};

use client::{Client, Patience, stopper};
use download::Download;
use store::Store;

/// The store, and the server that fills it.
#[derive(Debug)]
pub struct Hub {
    store: Store,
    /// `None` offline.
    client: Option<Client>,
    lock_wait: Duration,
}

/// Settings of a [`Hub`]; made by [`Hub::builder`].
#[derive(Clone)]
pub struct HubBuilder {
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
    offline: bool,
    patience: Patience,
    lock_wait: Duration,
}

/// How far a file has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file's name in the repository.
    pub file: &'a str,
    /// Bytes that are there, those of an earlier, resumed attempt included. It falls back to 0 if the server
    /// can't resume.
    pub done: u64,
    /// Bytes of the whole file.
    pub total: u64,
}

/// Watches a download and can stop it. The default does neither.
#[derive(Default)]
pub struct Watch<'a> {
    /// Called at the start and end of each file that is fetched, and after every read.
    pub progress: Option<&'a mut dyn FnMut(&Progress<'_>)>,
    /// Set from another thread to end the download with [`HubError::Cancelled`]; seen between reads and
    /// waits. What came stays for a later resume.
    pub cancel: Option<&'a AtomicBool>,
}

/// A model's files on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The commit they belong to.
    pub commit: String,
    /// The snapshot's folder.
    pub folder: PathBuf,
    /// The chosen files, parts of a split set in order.
    pub files: Vec<PathBuf>,
    /// Why the server couldn't be asked, if the stored copy was taken without it.
    pub unreachable: Option<String>,
}

impl Snapshot {
    /// What a loader opens: the (first) GGUF file, else the folder.
    pub fn path(&self) -> &Path {
        let gguf = |p: &&PathBuf| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        self.files.iter().find(gguf).unwrap_or(&self.folder)
    }
}

impl Hub {
    /// The store and server that the environment names, as other tools read it: `HF_HUB_CACHE` or
    /// `HF_HOME/hub` or `~/.cache/huggingface/hub`; `HF_ENDPOINT`; `HF_TOKEN` or the file `HF_TOKEN_PATH` or
    /// `HF_HOME/token`; `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// [`HubError::Setting`] for a value that can't be used, or if there is no home folder.
    pub fn from_env() -> Result<Self, HubError> {
        HubBuilder::from_env()?.build()
    }

    /// Settings for a store at `cache` (the folder with the `models--*` folders in it), with nothing taken
    /// from the environment.
    pub fn builder(cache: impl Into<PathBuf>) -> HubBuilder {
        HubBuilder {
            cache: cache.into(),
            endpoint: "https://huggingface.co".to_owned(),
            token: None,
            offline: false,
            patience: Patience {
                attempts: 5,
                backoff: Duration::from_millis(500),
                timeout: Duration::from_secs(30),
            },
            lock_wait: Duration::from_secs(5),
        }
    }

    /// The store's folder.
    pub fn cache(&self) -> &Path {
        &self.store.root
    }

    /// Whether only the store is used.
    pub fn is_offline(&self) -> bool {
        self.client.is_none()
    }

    /// The files of a model, fetched as far as the store doesn't have them. Without a selector in `spec` this
    /// is the safetensors model with its configuration and tokenizer, or the only GGUF file.
    ///
    /// If the server can't be reached and the store has a complete copy of the revision, that is taken, and
    /// [`Snapshot::unreachable`] says so.
    ///
    /// # Errors
    /// Any [`HubError`]. Files that arrived before an error stay in the store; a part of a file stays for
    /// a resume.
    pub fn get(&self, spec: &Spec, watch: &mut Watch<'_>) -> Result<Snapshot, HubError> {
        let Some(client) = &self.client else {
            return self.stored(spec);
        };
        let listing = match client.listing(spec, &stopper(watch.cancel)) {
            Err(HubError::Unreachable { url, reason, attempts }) => {
                return match self.stored(spec) {
                    Ok(snapshot) => {
                        Ok(Snapshot { unreachable: Some(format!("{url}: {reason}")), ..snapshot })
                    }
                    Err(_) => Err(HubError::Unreachable { url, reason, attempts }),
                };
            }
            other => other?,
        };
        let (commit, repo) = (&listing.commit, &spec.repo);
        let chosen = choose::choose(spec, &listing.files)?;
        let folder = self.store.snapshot(repo, commit);
        for file in &chosen {
            if !folder.join(file).exists() {
                let (store, lock_wait) = (&self.store, self.lock_wait);
                Download { client, store, lock_wait, repo, commit, file }.run(watch)?;
            }
        }
        self.store.set_commit(repo, spec.revision(), commit)?;
        Ok(snapshot_of(folder, commit, &chosen))
    }

    /// The names of all files of a revision, from the server or, offline, of those that are stored.
    ///
    /// # Errors
    /// Those of the server's answer; offline, [`HubError::Offline`] if nothing is stored.
    pub fn files(&self, spec: &Spec) -> Result<Vec<String>, HubError> {
        match &self.client {
            Some(client) => Ok(client.listing(spec, &|| false)?.files),
            None => Ok(self.stored_names(spec)?.1),
        }
    }

    /// Everything in the store.
    ///
    /// # Errors
    /// [`HubError::Io`] if a folder can't be read.
    pub fn list(&self) -> Result<Vec<Stored>, HubError> {
        self.store.list()
    }

    /// Removes a model from the store: all revisions, or the one that `spec` names; all files, or those that
    /// its selector chooses. Contents that another snapshot uses stay.
    ///
    /// # Errors
    /// [`HubError::NotStored`] if there is no such thing, [`HubError::Io`] if it can't be removed.
    pub fn remove(&self, spec: &Spec) -> Result<Removed, HubError> {
        self.store.remove(spec, |names| match &spec.selector {
            // The rest of a split set that never came whole is to go too.
            Some(_) => choose::present(spec, names),
            None => Ok(names.to_vec()),
        })
    }

    /// A model from the store alone.
    fn stored(&self, spec: &Spec) -> Result<Snapshot, HubError> {
        let (commit, names) = self.stored_names(spec)?;
        let chosen = match choose::choose(spec, &names) {
            Err(HubError::NoMatch { .. } | HubError::NoWeights { pickles: false, .. }) => {
                return Err(self.offline(spec));
            }
            other => other?,
        };
        Ok(snapshot_of(self.store.snapshot(&spec.repo, &commit), &commit, &chosen))
    }

    fn stored_names(&self, spec: &Spec) -> Result<(String, Vec<String>), HubError> {
        let commit = self.store.commit(&spec.repo, spec.revision())?.ok_or_else(|| self.offline(spec))?;
        let files = self.store.files(&spec.repo, &commit)?;
        Ok((commit, files.into_iter().map(|(name, _)| name).collect()))
    }

    fn offline(&self, spec: &Spec) -> HubError {
        HubError::Offline { model: spec.to_string(), path: self.store.root.clone() }
    }
}

fn snapshot_of(folder: PathBuf, commit: &str, chosen: &[String]) -> Snapshot {
    let files = chosen.iter().map(|f| folder.join(f)).collect();
    Snapshot { commit: commit.to_owned(), folder, files, unreachable: None }
}

impl HubBuilder {
    /// The settings that [`Hub::from_env`] uses.
    ///
    /// # Errors
    /// As there.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_vars(|name| std::env::var_os(name))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let var = |name: &str| var(name).filter(|v| !v.is_empty());
        let text = |name: &'static str| match var(name).map(OsString::into_string) {
            Some(Ok(text)) => Ok(Some(text.trim().to_owned()).filter(|t| !t.is_empty())),
            Some(Err(_)) => Err(HubError::Setting { name, reason: "it isn't UTF-8".to_owned() }),
            None => Ok(None),
        };
        let user = var("HOME").or_else(|| var("USERPROFILE")).map(PathBuf::from);
        let expanded = |path: OsString| match (Path::new(&path).strip_prefix("~"), &user) {
            (Ok(rest), Some(user)) => user.join(rest),
            _ => PathBuf::from(path),
        };
        let home = var("HF_HOME")
            .map(&expanded)
            .or_else(|| Some(expanded(var("XDG_CACHE_HOME")?).join("huggingface")))
            .or_else(|| Some(user.as_ref()?.join(".cache").join("huggingface")));
        let cache = var("HF_HUB_CACHE").map(&expanded).or_else(|| Some(home.as_ref()?.join("hub")));
        let Some(cache) = cache else {
            let reason = "neither it nor HOME is set, so there is no place for models".to_owned();
            return Err(HubError::Setting { name: "HF_HOME", reason });
        };

        let mut builder = Hub::builder(cache);
        if let Some(endpoint) = text("HF_ENDPOINT")? {
            builder.endpoint = endpoint;
        }
        builder.token = match text("HF_TOKEN")? {
            Some(token) => Some(token),
            None => {
                let path = var("HF_TOKEN_PATH").map(&expanded).or_else(|| Some(home?.join("token")));
                let token = path.and_then(|p| std::fs::read_to_string(p).ok());
                token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty())
            }
        };
        let offline = text("HF_HUB_OFFLINE")?.map(|v| v.to_ascii_lowercase());
        builder.offline = matches!(offline.as_deref(), Some("1" | "true" | "yes" | "on"));
        Ok(builder)
    }

    /// Another server than `https://huggingface.co`.
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.endpoint = url.into();
        self
    }

    /// The access token for gated and private models.
    pub fn token(mut self, token: Option<String>) -> Self {
        self.token = token;
        self
    }

    /// Whether to use the store alone.
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// How often a request that fails for a passing reason is tried in all, and how long to wait before the
    /// second time; the wait doubles each time. 5 and half a second unless set.
    pub fn attempts(mut self, attempts: u32, first_wait: Duration) -> Self {
        self.patience.attempts = attempts.max(1);
        self.patience.backoff = first_wait;
        self
    }

    /// The longest silence of a server, 30 seconds unless set.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.patience.timeout = timeout;
        self
    }

    /// How long to wait for another process that downloads the same file, 5 seconds unless set.
    pub fn lock_wait(mut self, wait: Duration) -> Self {
        self.lock_wait = wait;
        self
    }

    /// The hub with these settings. No connection is made yet.
    ///
    /// # Errors
    /// [`HubError::Setting`] for an endpoint or token that can't be used.
    pub fn build(self) -> Result<Hub, HubError> {
        let client = match self.offline {
            true => None,
            false => Some(Client::new(&self.endpoint, self.token, self.patience)?),
        };
        Ok(Hub { store: Store::new(self.cache), client, lock_wait: self.lock_wait })
    }
}

/// The token stays out of logs.
impl std::fmt::Debug for HubBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubBuilder")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "set"))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}
