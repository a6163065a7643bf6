//! What is said to the server: the listing of a repository, the data of a file, its bytes from an offset.
//!
//! Redirects are followed by hand, for two reasons. The token may only go to the endpoint it was issued for,
//! never to the storage host a file is redirected to. And the size, hash and commit of a large file are in
//! the headers of the endpoint's redirect, not in the storage host's answer.

use std::fmt;
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::http::{HeaderMap, Response, Uri, header};
use ureq::{Agent, Body};

use super::spec::{Repo, check_path};
use super::store::{is_blob_name, is_commit};
use super::{HubError, Spec};

/// Redirects until a server is taken to be going round in circles.
const MOST_REDIRECTS: usize = 10;
/// A listing of a repository is some kilobytes; this is where a wrong server is cut off.
const LONGEST_LISTING: u64 = 64 << 20;

/// How patient the client is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Attempts without progress before giving up.
    pub attempts: u32,
    /// Wait before the second attempt; doubled before each further one.
    pub backoff: Duration,
    /// Longest wait for a connection, an answer, or the next bytes.
    pub timeout: Duration,
}

pub(super) struct Client {
    agent: Agent,
    endpoint: Uri,
    token: Option<String>,
    pub patience: Patience,
}

/// The token stays out of logs.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "set"))
            .field("patience", &self.patience)
            .finish()
    }
}

/// A revision as the server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listing {
    pub commit: String,
    pub files: Vec<String>,
}

/// What the server says about a file before it is downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileData {
    /// Names the blob: the SHA-256 of large files, git's hash of small ones.
    pub etag: String,
    pub bytes: u64,
}

impl FileData {
    /// The SHA-256 of the contents, where the tag is one.
    pub fn sha256(&self) -> Option<&str> {
        (self.etag.len() == 64 && self.etag.bytes().all(|b| b.is_ascii_hexdigit())).then_some(&self.etag)
    }
}

/// Bytes of a file from `start` on.
pub(super) struct Bytes {
    pub start: u64,
    pub body: Box<dyn Read>,
}

/// Why one attempt failed: for good, or for a reason that may pass.
pub(super) enum Failure {
    Final(HubError),
    Passing { error: HubError, wait: Option<Duration> },
}

impl Client {
    pub fn new(endpoint: &str, token: Option<String>, patience: Patience) -> Result<Self, HubError> {
        let bad = |name, reason: String| HubError::Setting { name, reason };
        let trimmed = endpoint.trim_end_matches('/');
        let expected = "expected an address such as https://huggingface.co";
        let uri: Uri =
            trimmed.parse().map_err(|e| bad("HF_ENDPOINT", format!("\"{endpoint}\": {e}; {expected}")))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.query().is_some() {
            return Err(bad("HF_ENDPOINT", format!("\"{endpoint}\" isn't one; {expected}")));
        }
        if let Some(t) = &token
            && !t.bytes().all(|b| b.is_ascii_graphic())
        {
            return Err(bad("HF_TOKEN", "a token has letters, digits and '_' only".to_owned()));
        }
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("lapidary/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(patience.timeout))
            .timeout_recv_response(Some(patience.timeout))
            .timeout_per_read(Some(patience.timeout));
        if matches!(uri.host(), Some("localhost" | "127.0.0.1" | "[::1]")) {
            // A proxy can't reach this machine's own servers.
            config = config.proxy(None);
        }
        Ok(Self { agent: config.build().into(), endpoint: uri, token, patience })
    }

    /// Commit and files of a revision.
    pub fn listing(&self, spec: &Spec, stop: &dyn Fn() -> bool) -> Result<Listing, HubError> {
        let url =
            self.url(&["api", "models", &spec.repo.owner, &spec.repo.name, "revision"], spec.revision());
        let text = self.retried(&spec.to_string(), stop, || {
            let (mut answer, at) = self.send(Method::Get, &url, None, &spec.repo)?;
            let body = answer.body_mut().with_config().limit(LONGEST_LISTING);
            body.read_to_string().map_err(|e| passing(&at, e.to_string()))
        })?;
        parse_listing(&text).map_err(|reason| HubError::BadAnswer { url: shown(&url), reason })
    }

    /// Size and entity tag of a file.
    pub fn file_data(
        &self,
        repo: &Repo,
        commit: &str,
        file: &str,
        stop: &dyn Fn() -> bool,
    ) -> Result<FileData, HubError> {
        let url = self.file_url(repo, commit, file);
        let seen = self.retried(file, stop, || self.head(&url, repo))?;
        seen.file_data().map_err(|reason| HubError::BadAnswer { url: shown(&url), reason })
    }

    /// The bytes of a file from `start`, or from its beginning if the server doesn't do ranges. One attempt.
    pub fn bytes(&self, repo: &Repo, commit: &str, file: &str, start: u64) -> Result<Bytes, Failure> {
        let url = self.file_url(repo, commit, file);
        let (answer, at) = self.send(Method::Get, &url, Some(start).filter(|s| *s > 0), repo)?;
        let start = match answer.status().as_u16() {
            206 => range_start(answer.headers()).ok_or_else(|| {
                let reason = "206 without a Content-Range that can be read".to_owned();
                Failure::Final(HubError::BadAnswer { url: shown(&at), reason })
            })?,
            _ => 0,
        };
        Ok(Bytes { start, body: Box::new(answer.into_body().into_reader()) })
    }

    /// Follows a HEAD request until the large file's data are known or the end of the redirects.
    fn head(&self, url: &Uri, repo: &Repo) -> Result<Seen, Failure> {
        let mut seen = Seen::default();
        let mut at = url.clone();
        for _ in 0..MOST_REDIRECTS {
            let answer = self.once(Method::Head, &at, None)?;
            let next = redirect(&at, &answer)?;
            seen.note(answer.headers(), next.is_none());
            match next {
                Some(next) if !seen.complete() => at = next,
                Some(_) => return Ok(seen),
                None => return self.check(answer, &at, repo).map(|_| seen),
            }
        }
        Err(circles(url))
    }

    /// Sends a request and follows its redirects to an answer that is a success.
    fn send(
        &self,
        method: Method,
        url: &Uri,
        start: Option<u64>,
        repo: &Repo,
    ) -> Result<(Response<Body>, Uri), Failure> {
        let mut at = url.clone();
        for _ in 0..MOST_REDIRECTS {
            let answer = self.once(method, &at, start)?;
            match redirect(&at, &answer)? {
                Some(next) => at = next,
                None => return Ok((self.check(answer, &at, repo)?, at)),
            }
        }
        Err(circles(url))
    }

    fn once(&self, method: Method, url: &Uri, start: Option<u64>) -> Result<Response<Body>, Failure> {
        let mut request = match method {
            Method::Get => self.agent.get(url),
            Method::Head => self.agent.head(url),
        };
        // Compression would hide the size, and ranges count stored bytes.
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if let Some(token) = self.token.as_ref().filter(|_| origin(url) == origin(&self.endpoint)) {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(start) = start {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        request.call().map_err(|e| match e {
            // Without a name service nothing is gained by trying again.
            ureq::Error::HostNotFound => {
                Failure::Final(HubError::Unreachable { url: shown(url), reason: e.to_string(), attempts: 1 })
            }
            ureq::Error::BadUri(reason) => Failure::Final(HubError::BadAnswer { url: shown(url), reason }),
            other => passing(url, other.to_string()),
        })
    }

    /// Turns an answer that isn't a success into the error that says what to do.
    fn check(&self, answer: Response<Body>, url: &Uri, repo: &Repo) -> Result<Response<Body>, Failure> {
        let status = answer.status().as_u16();
        if answer.status().is_success() {
            return Ok(answer);
        }
        let shown = shown(url);
        let page = format!("{}/{repo}", self.endpoint.to_string().trim_end_matches('/'));
        let code = text(answer.headers(), "x-error-code").unwrap_or_default();
        let ours = origin(url) == origin(&self.endpoint);
        Err(match status {
            401 | 403 if ours => Failure::Final(HubError::AccessDenied {
                url: shown,
                status,
                remedy: self.access_remedy(&page, status, &code),
            }),
            404 => Failure::Final(HubError::NotFound {
                url: shown,
                remedy: match code.as_str() {
                    "RevisionNotFound" => format!("{page} has no such revision, check the part after '@'"),
                    "EntryNotFound" => format!("{page} has no such file in this revision"),
                    _ => format!("check the spelling of owner, name and revision on {page}"),
                },
            }),
            408 | 429 | 500 | 502 | 503 | 504 => Failure::Passing {
                error: HubError::Status { url: shown, status },
                wait: text(answer.headers(), "retry-after")
                    .and_then(|s| s.parse().ok())
                    .map(|s: u64| Duration::from_secs(s.min(60))),
            },
            _ => Failure::Final(HubError::Status { url: shown, status }),
        })
    }

    fn access_remedy(&self, page: &str, status: u16, code: &str) -> String {
        let licence = format!("accept the licence at {page}");
        match (&self.token, code, status) {
            (None, "GatedRepo", _) | (None, _, 403) => format!("{licence} and set HF_TOKEN"),
            (None, _, _) => {
                format!("check the name; if it is right, {licence} and set HF_TOKEN")
            }
            (Some(_), "GatedRepo", _) | (Some(_), _, 403) => {
                format!(
                    "{licence} with the account that the token belongs to, and let the token read gated repositories"
                )
            }
            (Some(_), _, _) => format!(
                "check the name and that HF_TOKEN is valid; for a gated model, {licence} with the token's account"
            ),
        }
    }

    /// Calls `attempt` until it succeeds, fails for good, or has failed as often as patience allows.
    pub fn retried<T>(
        &self,
        what: &str,
        stop: &dyn Fn() -> bool,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let mut failed = 0;
        loop {
            if stop() {
                return Err(HubError::Cancelled { file: what.to_owned() });
            }
            match attempt() {
                Ok(value) => return Ok(value),
                Err(failure) => self.wait_after(failure, &mut failed, what, stop)?,
            }
        }
    }

    /// Waits before the next attempt, or gives the error if there is to be none.
    pub fn wait_after(
        &self,
        failure: Failure,
        failed: &mut u32,
        what: &str,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), HubError> {
        let (mut error, wait) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing { error, wait } => (error, wait),
        };
        *failed += 1;
        if *failed >= self.patience.attempts {
            if let HubError::Unreachable { attempts, .. } = &mut error {
                *attempts = *failed;
            }
            return Err(error);
        }
        let doubled = self.patience.backoff * 2u32.saturating_pow((*failed - 1).min(10));
        let until = Instant::now() + wait.unwrap_or(doubled);
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) {
            if stop() {
                return Err(HubError::Cancelled { file: what.to_owned() });
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
        Ok(())
    }

    /// A file's address for messages.
    pub fn address(&self, repo: &Repo, commit: &str, file: &str) -> String {
        shown(&self.file_url(repo, commit, file))
    }

    fn file_url(&self, repo: &Repo, commit: &str, file: &str) -> Uri {
        let encoded = file.split('/').map(percent_encoded).collect::<Vec<_>>().join("/");
        let mut url = self.url(&[&repo.owner, &repo.name, "resolve"], commit).to_string();
        url.push('/');
        url.push_str(&encoded);
        url.parse().expect("percent-encoded parts after a valid address make a valid address")
    }

    /// The endpoint followed by `parts` and `last`, whose slashes are encoded.
    fn url(&self, parts: &[&str], last: &str) -> Uri {
        let mut url = self.endpoint.to_string().trim_end_matches('/').to_owned();
        for part in parts.iter().chain([&last]) {
            url.push('/');
            url.push_str(&percent_encoded(part));
        }
        url.parse().expect("percent-encoded parts after a valid address make a valid address")
    }
}

#[derive(Clone, Copy)]
enum Method {
    Get,
    Head,
}

/// What the answers on the way to a file said. The endpoint's redirect speaks of the file ("linked"), the
/// headers of the last answer are the file's own.
#[derive(Default)]
struct Seen {
    linked_etag: Option<String>,
    linked_size: Option<u64>,
    etag: Option<String>,
    size: Option<u64>,
}

impl Seen {
    fn note(&mut self, headers: &HeaderMap, last: bool) {
        let linked_size = text(headers, "x-linked-size").and_then(|s| s.parse().ok());
        self.linked_etag = self.linked_etag.take().or_else(|| text(headers, "x-linked-etag"));
        self.linked_size = self.linked_size.or(linked_size);
        if last {
            self.etag = text(headers, "etag");
            self.size = text(headers, "content-length").and_then(|s| s.parse().ok());
        }
    }

    fn complete(&self) -> bool {
        self.linked_etag.is_some() && self.linked_size.is_some()
    }

    fn file_data(self) -> Result<FileData, String> {
        let tag = self.linked_etag.or(self.etag).ok_or("there is no ETag, is this a model hub?")?;
        let etag = tag.trim().trim_start_matches("W/").trim_matches('"').to_owned();
        if !is_blob_name(&etag) {
            return Err(format!("the ETag {tag:?} can't name a file"));
        }
        let bytes =
            self.linked_size.or(self.size).ok_or("there is neither X-Linked-Size nor Content-Length")?;
        Ok(FileData { etag, bytes })
    }
}

fn parse_listing(text: &str) -> Result<Listing, String> {
    let json: Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
    let commit = json["sha"].as_str().filter(|c| is_commit(c)).ok_or("\"sha\" holds no commit")?.to_owned();
    let siblings = json["siblings"].as_array().ok_or("\"siblings\" isn't a list")?;
    let mut files = Vec::with_capacity(siblings.len());
    for sibling in siblings {
        let name = sibling["rfilename"].as_str().ok_or("a sibling has no \"rfilename\"")?;
        // A name that leaves the folder is an attack and not merely a file that can't be stored.
        if name.split('/').any(|part| part == "..") || name.starts_with('/') {
            return Err(format!("the file name {name:?} leads out of the store"));
        }
        // Names that some system can't store are no part of a model.
        if check_path(name).is_ok() {
            files.push(name.to_owned());
        }
    }
    Ok(Listing { commit, files })
}

/// Where an answer redirects to, if it does.
fn redirect(from: &Uri, answer: &Response<Body>) -> Result<Option<Uri>, Failure> {
    if !matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let bad = |reason: String| Failure::Final(HubError::BadAnswer { url: shown(from), reason });
    let location =
        text(answer.headers(), "location").ok_or_else(|| bad("a redirect to nowhere".to_owned()))?;
    let base =
        format!("{}://{}", from.scheme_str().unwrap_or("https"), from.authority().map_or("", |a| a.as_str()));
    let absolute = if location.starts_with("http://") || location.starts_with("https://") {
        location.clone()
    } else if location.starts_with("//") {
        format!("{}:{location}", from.scheme_str().unwrap_or("https"))
    } else if location.starts_with('/') {
        base + &location
    } else {
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{base}{folder}/{location}")
    };
    let next: Uri = absolute.parse().map_err(|e| bad(format!("a redirect to {location:?}: {e}")))?;
    if from.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
        return Err(bad(format!("a redirect from https to {}", shown(&next))));
    }
    Ok(Some(next))
}

/// Scheme, host and port: what a token is bound to.
fn origin(url: &Uri) -> (Option<String>, Option<String>, Option<u16>) {
    let scheme = url.scheme_str().map(str::to_ascii_lowercase);
    let usual = if scheme.as_deref() == Some("https") { 443 } else { 80 };
    (scheme, url.host().map(str::to_ascii_lowercase), Some(url.port_u16().unwrap_or(usual)))
}

/// An address for messages. The query can hold a signature that opens the file, so it is left out.
fn shown(url: &Uri) -> String {
    url.to_string().split('?').next().unwrap_or_default().to_owned()
}

fn passing(url: &Uri, reason: String) -> Failure {
    Failure::Passing { error: HubError::Unreachable { url: shown(url), reason, attempts: 1 }, wait: None }
}

fn circles(url: &Uri) -> Failure {
    let reason = format!("more than {MOST_REDIRECTS} redirects");
    Failure::Final(HubError::BadAnswer { url: shown(url), reason })
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// `bytes 500-999/1000` starts at 500.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = text(headers, "content-range")?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}

/// Everything but the unreserved characters of RFC 3986 as %XX.
fn percent_encoded(part: &str) -> String {
    let mut out = String::with_capacity(part.len());
    for b in part.bytes() {
        match b.is_ascii_alphanumeric() || b"-_.~".contains(&b) {
            true => out.push(char::from(b)),
            false => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

/// A closure for [`Client`]'s `stop` from a flag that another thread may set.
pub(super) fn stopper(flag: Option<&AtomicBool>) -> impl Fn() -> bool + '_ {
    move || flag.is_some_and(|f| f.load(Ordering::Relaxed))
}
