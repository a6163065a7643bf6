//! Offline work: a file of requests becomes a file of replies, a line each, in OpenAI's batch format.
//!
//! Lines go through the same routes as requests of the network, so they mean the same. The output is only ever appended
//! to, a whole line at a time; a run that was interrupted goes on where it was, and every id is answered exactly once.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use axum::body::Body;
use axum::http::{Request, header};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::app::App;
use crate::ids;
use crate::routes::router;

/// The routes that a line may ask for.
const ROUTES: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

/// Why a batch did not run, or not to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A file.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A line of the input that is no request. Nothing has run.
    #[error("{path}, line {line}: {problem}")]
    Line {
        /// The input.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong and what was expected.
        problem: String,
    },
    /// A line of an output that was there before and was not written by a batch.
    #[error("{path}, line {line}: not a reply of a batch; name another output, or take the file away")]
    Output {
        /// The output.
        path: PathBuf,
        /// From 1.
        line: usize,
    },
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Lines answered by this run.
    pub answered: usize,
    /// Those of them that were refused or failed.
    pub failed: usize,
    /// Lines that the output had before.
    pub skipped: usize,
}

#[derive(Debug, Deserialize)]
struct Line {
    custom_id: String,
    method: Option<String>,
    url: String,
    body: Value,
}

/// Answers the lines of `input` that `output` has no reply to, `parallel` at a time. `progress` is told how many of how
/// many are done.
///
/// # Errors
/// A file that cannot be read or written, or a line that is no request.
pub async fn run(
    app: &App,
    input: &Path,
    output: &Path,
    parallel: usize,
    mut progress: impl FnMut(usize, usize),
) -> Result<Tally, BatchError> {
    let lines = read(input)?;
    let (mut file, done) = open_output(output)?;
    let total = lines.len();
    let todo: Vec<Line> = lines.into_iter().filter(|line| !done.contains(&line.custom_id)).collect();
    let mut tally = Tally { skipped: total - todo.len(), ..Tally::default() };
    let mut waiting = todo.into_iter();
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < parallel.max(1)
            && let Some(line) = waiting.next()
        {
            running.push(answer(app, line));
        }
        let Some((ok, reply)) = running.next().await else { break };
        let text = format!("{reply}\n");
        file.write_all(text.as_bytes())
            .map_err(|source| BatchError::Io { path: output.to_owned(), source })?;
        tally.answered += 1;
        tally.failed += usize::from(!ok);
        progress(tally.skipped + tally.answered, total);
    }
    file.sync_all().map_err(|source| BatchError::Io { path: output.to_owned(), source })?;
    Ok(tally)
}

/// All lines, checked before the first one runs: a mistake at the end of a long file should not show after hours.
fn read(input: &Path) -> Result<Vec<Line>, BatchError> {
    let io = |source| BatchError::Io { path: input.to_owned(), source };
    let mut lines = Vec::new();
    let mut seen: HashMap<String, usize> = HashMap::new();
    for (place, text) in BufReader::new(File::open(input).map_err(io)?).lines().enumerate() {
        let text = text.map_err(io)?;
        if text.trim().is_empty() {
            continue;
        }
        let wrong = |problem: String| BatchError::Line { path: input.to_owned(), line: place + 1, problem };
        let line: Line = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        if line.method.as_deref().is_some_and(|method| method != "POST") {
            return Err(wrong("expected the method POST".to_owned()));
        }
        if !ROUTES.contains(&line.url.as_str()) {
            return Err(wrong(format!("url {:?}: expected one of {}", line.url, ROUTES.join(", "))));
        }
        if line.body.get("stream").is_some_and(|stream| *stream == true) {
            return Err(wrong("stream: a line of a file is not streamed; leave it out".to_owned()));
        }
        if let Some(first) = seen.insert(line.custom_id.clone(), place + 1) {
            return Err(wrong(format!("custom_id {:?} is that of line {first} too", line.custom_id)));
        }
        lines.push(line);
    }
    Ok(lines)
}

/// The output, at its end, and the ids that it answers. A last line without an end was cut by an interruption: it is
/// taken off, and its request runs again.
fn open_output(path: &Path) -> Result<(File, HashSet<String>), BatchError> {
    let io = |source| BatchError::Io { path: path.to_owned(), source };
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
    let mut done = HashSet::new();
    let mut whole = 0;
    let mut reader = BufReader::new(&mut file);
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let read = reader.read_until(b'\n', &mut text).map_err(io)?;
        if read == 0 || text.last() != Some(&b'\n') {
            break;
        }
        let reply: Option<Value> = serde_json::from_slice(&text).ok();
        let id = reply.as_ref().and_then(|reply| reply.get("custom_id")).and_then(Value::as_str);
        let Some(id) = id else { return Err(BatchError::Output { path: path.to_owned(), line }) };
        done.insert(id.to_owned());
        whole += read as u64;
    }
    file.set_len(whole).map_err(io)?;
    file.seek(SeekFrom::End(0)).map_err(io)?;
    Ok((file, done))
}

async fn answer(app: &App, line: Line) -> (bool, Value) {
    let request = Request::post(&line.url)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(line.body.to_string()))
        .expect("the url is one of ours");
    let response = router(app.clone()).oneshot(request).await.unwrap_or_else(|never| match never {});
    let status = response.status();
    let request_id = response.headers().get("x-request-id").and_then(|v| v.to_str().ok()).map(str::to_owned);
    let bytes = response.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let reply = json!({
        "id": ids::fresh("batch_req_"),
        "custom_id": line.custom_id,
        "response": { "status_code": status.as_u16(), "request_id": request_id, "body": body },
        "error": null,
    });
    (status.is_success(), reply)
}
