//! Measures a server from outside, with the eyes of its clients: any URL that speaks OpenAI's completions.
//!
//! Arrivals are an open loop: requests are sent at times drawn beforehand (a Poisson process), whether or not earlier
//! ones have been answered, because clients of a real service do not wait for each other. Lengths and times come from a
//! seed, so that two servers get the same work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// What to send.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// Such as `http://127.0.0.1:8000`. TLS is not spoken.
    pub url: String,
    /// The API key, if one is needed.
    pub key: Option<String>,
    /// The model's name; left out when not given.
    pub model: Option<String>,
    /// How many requests.
    pub requests: usize,
    /// Requests a second; all at once when not finite.
    pub rate: f64,
    /// Requests in flight at most: further ones are sent as earlier ones end, and their times count from then. It makes
    /// the loop a closed one, for comparisons at a fixed number of streams.
    pub streams: Option<usize>,
    /// Words of a prompt, from and to.
    pub prompt_words: (usize, usize),
    /// Tokens of a reply, from and to. Servers that know `ignore_eos` give exactly that many.
    pub output_tokens: (usize, usize),
    /// Words at the beginning of every prompt, the same for all.
    pub shared_words: usize,
    /// Seed of lengths, texts and times.
    pub seed: u64,
    /// A reply is good if its first token came within this time ...
    pub good_first: Duration,
    /// ... and the mean time between its tokens is within this one.
    pub good_token: Duration,
    /// Longest time of one request.
    pub timeout: Duration,
}

/// One request as it went.
#[derive(Debug, Clone)]
struct Trace {
    prompt_tokens: usize,
    output_tokens: usize,
    first: Duration,
    last: Duration,
    /// Between two deltas.
    gaps: Vec<Duration>,
    error: Option<String>,
}

/// Sends all requests and sums up.
///
/// # Errors
/// A URL that cannot be used. Requests that fail are counted instead.
pub async fn run(options: &BenchOptions) -> Result<Value, String> {
    let (host, path) = split_url(&options.url)?;
    let mut random = Random(options.seed);
    let shared = words(&mut random, options.shared_words);
    let streams = Arc::new(Semaphore::new(options.streams.unwrap_or(Semaphore::MAX_PERMITS)));
    let start = Instant::now();
    let mut at = 0.0;
    let mut tasks = Vec::with_capacity(options.requests);
    for _ in 0..options.requests {
        let prompt_words = random.between(options.prompt_words);
        let max_tokens = random.between(options.output_tokens);
        let prompt = format!("{shared}{}", words(&mut random, prompt_words));
        if options.rate.is_finite() {
            at += -(1.0 - random.unit()).ln() / options.rate;
        }
        let mut body = json!({
            "prompt": prompt, "max_tokens": max_tokens, "min_tokens": max_tokens, "ignore_eos": true, "temperature": 0,
            "stream": true, "stream_options": { "include_usage": true },
        });
        if let Some(model) = &options.model {
            body["model"] = model.clone().into();
        }
        let (host, path, key, limit) = (host.clone(), path.clone(), options.key.clone(), options.timeout);
        let due = start + Duration::from_secs_f64(at);
        let streams = options.streams.is_some().then(|| streams.clone());
        tasks.push(tokio::spawn(async move {
            tokio::time::sleep_until(due.into()).await;
            let (_permit, due) = match streams {
                None => (None, due),
                Some(streams) => (streams.acquire_owned().await.ok(), Instant::now()),
            };
            let mut trace = Trace {
                prompt_tokens: 0,
                output_tokens: 0,
                first: Duration::ZERO,
                last: Duration::ZERO,
                gaps: Vec::new(),
                error: None,
            };
            let asked = ask(&host, &path, key.as_deref(), body.to_string(), due, &mut trace);
            trace.error = match tokio::time::timeout(limit, asked).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(_) => Some("timeout".to_owned()),
            };
            trace
        }));
    }
    let mut traces = Vec::with_capacity(tasks.len());
    for task in tasks {
        traces.push(task.await.map_err(|error| error.to_string())?);
    }
    Ok(summary(options, &traces, start.elapsed()))
}

fn split_url(url: &str) -> Result<(String, String), String> {
    let Some(rest) = url.strip_prefix("http://") else {
        return Err(format!("{url}: expected http://HOST:PORT; TLS is not spoken, measure behind it"));
    };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let host = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let path = path.trim_end_matches('/');
    let path = if path.is_empty() { "/v1/completions".to_owned() } else { format!("/{path}/completions") };
    Ok((host, path))
}

/// One request. Times count from when it was due, so that a client which is late itself shows.
async fn ask(
    host: &str,
    path: &str,
    key: Option<&str>,
    body: String,
    due: Instant,
    trace: &mut Trace,
) -> Result<(), String> {
    let stream = TcpStream::connect(host).await.map_err(|error| format!("connect: {error}"))?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    tokio::spawn(connection);
    let mut request =
        Request::post(path).header(header::HOST, host).header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let request = request.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())?;
    let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let status = response.status();
    let mut body = response.into_body();
    if !status.is_success() {
        return Err(format!("status {}", status.as_u16()));
    }
    let mut rest: Vec<u8> = Vec::new();
    let mut previous: Option<Instant> = None;
    let mut ended = false;
    let mut deltas = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| error.to_string())?;
        let Some(data) = frame.data_ref() else { continue };
        let now = Instant::now();
        rest.extend_from_slice(data);
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let Some(data) = line.strip_prefix(b"data: ") else { continue };
            if data.starts_with(b"[DONE]") {
                ended = true;
                continue;
            }
            let chunk: Value = serde_json::from_slice(data).map_err(|error| format!("a chunk: {error}"))?;
            if let Some(error) = chunk.get("error") {
                return Err(format!("in the stream: {}", error["code"].as_str().unwrap_or("error")));
            }
            if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
                let count = |name: &str| usage[name].as_u64().unwrap_or(0) as usize;
                trace.prompt_tokens = count("prompt_tokens");
                trace.output_tokens = count("completion_tokens");
            }
            if chunk["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                deltas += 1;
                match previous.replace(now) {
                    None => trace.first = now - due,
                    Some(before) => trace.gaps.push(now - before),
                }
                trace.last = now - due;
            }
        }
    }
    if trace.output_tokens == 0 {
        // A server that tells no usage: deltas are the best guess.
        trace.output_tokens = deltas;
    }
    match ended {
        true if deltas > 0 => Ok(()),
        true => Err("no text".to_owned()),
        false => Err("cut off".to_owned()),
    }
}

fn summary(options: &BenchOptions, traces: &[Trace], took: Duration) -> Value {
    let seconds = took.as_secs_f64();
    let good: Vec<&Trace> = traces.iter().filter(|t| t.error.is_none()).collect();
    let mut errors = serde_json::Map::new();
    for error in traces.iter().filter_map(|t| t.error.as_ref()) {
        let count = errors.get(error).and_then(Value::as_u64).unwrap_or(0);
        errors.insert(error.clone(), (count + 1).into());
    }
    let per_token = |t: &Trace| (t.last - t.first).as_secs_f64() / (t.output_tokens.max(2) - 1) as f64;
    let prompt_tokens: usize = good.iter().map(|t| t.prompt_tokens).sum();
    let output_tokens: usize = good.iter().map(|t| t.output_tokens).sum();
    let within = good
        .iter()
        .filter(|t| t.first <= options.good_first && per_token(t) <= options.good_token.as_secs_f64())
        .count();
    json!({
        "url": options.url,
        "model": options.model,
        "requests": traces.len(),
        "completed": good.len(),
        "errors": errors,
        "rate": if options.rate.is_finite() { json!(options.rate) } else { json!("all at once") },
        "streams": options.streams,
        "prompt_words": [options.shared_words + options.prompt_words.0, options.shared_words + options.prompt_words.1],
        "output_tokens_asked": [options.output_tokens.0, options.output_tokens.1],
        "seed": options.seed,
        "duration_s": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": good.len() as f64 / seconds,
        "output_tokens_per_s": output_tokens as f64 / seconds,
        "total_tokens_per_s": (prompt_tokens + output_tokens) as f64 / seconds,
        "first_token_ms": spread(good.iter().map(|t| t.first.as_secs_f64() * 1e3).collect()),
        "inter_token_ms": spread(good.iter().flat_map(|t| &t.gaps).map(|g| g.as_secs_f64() * 1e3).collect()),
        "per_output_token_ms": spread(good.iter().map(|t| per_token(t) * 1e3).collect()),
        "whole_ms": spread(good.iter().map(|t| t.last.as_secs_f64() * 1e3).collect()),
        "goodput": {
            "first_token_ms": options.good_first.as_secs_f64() * 1e3,
            "per_output_token_ms": options.good_token.as_secs_f64() * 1e3,
            "requests_per_s": within as f64 / seconds,
            "share": within as f64 / traces.len().max(1) as f64,
        },
    })
}

/// Mean and percentiles; null where there is nothing.
fn spread(mut values: Vec<f64>) -> Value {
    if values.is_empty() {
        return Value::Null;
    }
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[(share * (values.len() - 1) as f64).round() as usize];
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    json!({ "mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0) })
}

/// Words that most vocabularies hold as one token each.
const WORDS: [&str; 32] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week",
    "company", "system", "program", "question", "work", "number", "night", "point", "home",
];

fn words(random: &mut Random, count: usize) -> String {
    (0..count).map(|_| format!("{} ", WORDS[random.below(WORDS.len())])).collect()
}

/// splitmix64: enough for lengths and times.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    fn between(&mut self, (from, to): (usize, usize)) -> usize {
        from + self.below(to.saturating_sub(from) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_with_and_without_a_path() {
        let split = |url| split_url(url).expect("it is one");
        assert_eq!(split("http://h:1"), ("h:1".into(), "/v1/completions".into()));
        assert_eq!(split("http://h/v1/"), ("h:80".into(), "/v1/completions".into()));
        assert!(split_url("https://h").unwrap_err().contains("TLS"));
    }

    #[test]
    fn percentiles_of_one_and_of_many() {
        assert_eq!(spread(vec![2.0])["p99"], 2.0);
        let values = (0..=100).rev().map(f64::from).collect();
        let spread = spread(values);
        assert_eq!(
            (&spread["p50"], &spread["p99"], &spread["max"]),
            (&json!(50.0), &json!(99.0), &json!(100.0))
        );
    }
}
