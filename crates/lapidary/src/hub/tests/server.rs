//! A web server for tests: one thread a connection, one request a connection, every request remembered. On
//! top of it a model hub with a storage host of its own, whose answers a test may change.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};

#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }
}

#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Break the connection after so many bytes of the body.
    pub cut_at: Option<usize>,
    pub delay: Duration,
}

impl Reply {
    pub fn new(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.retain(|h| h.0 != name);
        self.headers.push((name, value.into()));
        self
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

pub struct Server {
    pub url: String,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let handler: Arc<Handler> = Arc::new(handler);
        let (seen, stopped) = (requests.clone(), stop.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let (handler, seen) = (handler.clone(), seen.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &*handler, &seen));
            }
        });
        Self { url, requests, stop }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the listener, which then closes its port.
        let _ = TcpStream::connect(self.url.trim_start_matches("http://"));
    }
}

fn serve(stream: TcpStream, handler: &Handler, seen: &Mutex<Vec<Request>>) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.push((name.to_owned(), value.to_owned()));
    }
    let request = Request { method, path, headers };
    seen.lock().unwrap().push(request.clone());
    let reply = handler(&request);
    std::thread::sleep(reply.delay);
    let mut head = format!("HTTP/1.1 {} Whatever\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if !reply.headers.iter().any(|h| h.0 == "Content-Length") {
        head.push_str(&format!("Content-Length: {}\r\n", reply.body.len()));
    }
    head.push_str("\r\n");
    let mut stream = stream;
    stream.write_all(head.as_bytes()).ok()?;
    if request.method != "HEAD" {
        let sent = reply.cut_at.unwrap_or(reply.body.len()).min(reply.body.len());
        stream.write_all(&reply.body[..sent]).ok()?;
    }
    stream.flush().ok()
}

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A file of the pretended repository; `large` ones are on the storage host.
#[derive(Debug, Clone)]
pub struct HubFile {
    pub name: &'static str,
    pub contents: Vec<u8>,
    pub large: bool,
}

pub fn small(name: &'static str, contents: &str) -> HubFile {
    HubFile { name, contents: contents.into(), large: false }
}

/// `len` bytes without a short period.
pub fn large(name: &'static str, len: usize) -> HubFile {
    let contents = (0..len as u64).map(|i| ((i * i + 7 * i) >> 5) as u8 ^ name.len() as u8).collect();
    HubFile { name, contents, large: true }
}

impl HubFile {
    pub fn etag(&self) -> String {
        let hash: String = Sha256::digest(&self.contents).iter().map(|b| format!("{b:02x}")).collect();
        if self.large { hash } else { hash[..40].to_owned() }
    }
}

/// The hub `o/n` and the storage host that it redirects to.
pub struct Site {
    pub hub: Server,
    pub storage: Server,
}

/// Serves `files` as the one commit of `o/n`. `change` sees each request, how often the same method and path
/// came before, and the right answer, and says what is answered.
pub fn site(
    files: Vec<HubFile>,
    change: impl Fn(&Request, usize, Reply) -> Reply + Send + Sync + 'static,
) -> Site {
    let change = Arc::new(change);
    let counted = move |counts: &Mutex<Vec<String>>, request: &Request, reply: Reply| {
        let key = format!("{} {}", request.method, request.path);
        let mut counts = counts.lock().unwrap();
        let before = counts.iter().filter(|k| **k == key).count();
        counts.push(key);
        drop(counts);
        change(request, before, reply)
    };
    let counted = Arc::new(counted);

    let (stored, counts, changed) = (files.clone(), Mutex::default(), counted.clone());
    let storage = Server::start(move |request| {
        let etag = request.path.split('?').next().unwrap().trim_start_matches("/blob/");
        let Some(file) = stored.iter().find(|f| f.etag() == etag) else {
            return Reply::new(404);
        };
        let total = file.contents.len();
        let range =
            request.header("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let reply = match range {
            Some(start) if start < total => Reply::new(206)
                .with("Content-Range", format!("bytes {start}-{}/{total}", total - 1))
                .body(&file.contents[start..]),
            Some(_) => Reply::new(416),
            None => Reply::new(200).body(file.contents.as_slice()),
        };
        changed(&counts, request, reply)
    });

    let (storage_url, counts) = (storage.url.clone(), Mutex::default());
    let hub = Server::start(move |request| {
        let reply = match request.path.strip_prefix(&format!("/o/n/resolve/{COMMIT}/")) {
            _ if request.path.starts_with("/api/models/o/n/revision/") => listing(&files),
            Some(name) => match files.iter().find(|f| f.name.replace(' ', "%20") == name) {
                Some(file) if file.large => Reply::new(302)
                    .with("Location", format!("{storage_url}/blob/{}?signature=secret", file.etag()))
                    .with("ETag", "\"of the redirect\"")
                    .with("X-Linked-ETag", format!("\"{}\"", file.etag()))
                    .with("X-Linked-Size", file.contents.len().to_string())
                    .with("X-Repo-Commit", COMMIT),
                Some(file) => Reply::new(200)
                    .with("ETag", format!("W/\"{}\"", file.etag()))
                    .with("X-Repo-Commit", COMMIT)
                    .body(file.contents.as_slice()),
                None => Reply::new(404).with("X-Error-Code", "EntryNotFound"),
            },
            None => Reply::new(404).with("X-Error-Code", "RepoNotFound"),
        };
        counted(&counts, request, reply)
    });
    Site { hub, storage }
}

fn listing(files: &[HubFile]) -> Reply {
    let siblings: Vec<String> = files.iter().map(|f| format!("{{\"rfilename\": {:?}}}", f.name)).collect();
    let text = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", siblings.join(", "));
    Reply::new(200).with("Content-Type", "application/json").body(text)
}
