//! `serve` and `batch` as programs, over the built-in model.
#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{command, lapidary};

/// A server that ends with the test.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str], key: Option<&str>) -> Server {
        let mut command = command();
        command.args(["serve", "--port", "0", "--ctx", "256", "-t", "1"]).args(flags);
        command.env_remove("LAPIDARY_API_KEY");
        if let Some(key) = key {
            command.env("LAPIDARY_API_KEY", key);
        }
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the binary runs");
        let mut lines = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert_ne!(lines.read_line(&mut line).expect("it is text"), 0, "it ended before it served");
            if let Some((_, address)) = line.trim_end().split_once(" on http://") {
                break address.to_owned();
            }
        };
        // Its log is read to the end, so that it never waits for a reader.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        Server { child, address }
    }

    fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + body).as_bytes()).expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        text
    }

    fn terminate(&mut self) -> Option<i32> {
        let kill = format!("kill -TERM {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("there is a shell").success());
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status.code();
            }
            assert!(Instant::now() < end, "it ends within 20 s of SIGTERM");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const JSON: &str = "content-type: application/json\r\n";
const CHAT: &str =
    r#"{"messages":[{"role":"user","content":"What is the capital of Kenya?"}],"temperature":0}"#;

#[test]
fn a_server_answers_and_ends_with_code_0_on_sigterm() {
    let mut server = Server::start(&["--served-model-name", "a", "--served-model-name", "b/c"], None);
    let reply = server.ask("POST", "/v1/chat/completions", JSON, CHAT);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(
        reply.contains("The capital of Kenya is Nairobi.") && reply.contains(r#""model":"a""#),
        "{reply}"
    );
    assert!(server.ask("GET", "/v1/models", "", "").contains("b/c"));
    assert!(server.ask("GET", "/health", "", "").starts_with("HTTP/1.1 200"));
    assert!(server.ask("GET", "/", "", "").contains("<title>lapidary</title>"));
    let busy = lapidary(["serve", "--port", server.address.rsplit(':').next().expect("a port")]).failure();
    assert!(busy.contains("cannot listen on 127.0.0.1") && busy.contains("in use"), "{busy}");
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn keys_come_from_the_environment_and_from_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "# keys\nfrom-file\n").expect("it is ours");
    let server = Server::start(&["--api-key-file", file.to_str().expect("text")], Some("from-env"));
    for (key, status) in [("from-file", "200"), ("from-env", "200"), ("other", "401")] {
        let reply = server.ask("GET", "/v1/models", &format!("authorization: Bearer {key}\r\n"), "");
        assert!(reply.starts_with(&format!("HTTP/1.1 {status}")), "{key}: {reply}");
    }
    std::fs::write(&file, "\n").expect("it is ours");
    let empty = lapidary(["serve", "--port", "0", "--api-key-file", file.to_str().expect("text")]);
    assert_eq!(empty.code, Some(2), "{empty:?}");
    assert!(empty.err.contains("holds no key"), "{empty:?}");
}

#[test]
fn a_batch_is_answered_line_by_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let line =
        |id: &str| format!("{{\"custom_id\":\"{id}\",\"url\":\"/v1/chat/completions\",\"body\":{CHAT}}}\n");
    std::fs::write(&input, [line("x"), line("y")].concat()).expect("it is ours");
    let args =
        ["batch", "-t", "1", "--ctx", "256", input.to_str().expect("text"), output.to_str().expect("text")];
    let first = lapidary(args);
    assert!(first.err.contains("2 answered, 0 of them"), "{first:?}");
    let text = std::fs::read_to_string(&output).expect("it was written");
    assert_eq!(text.matches("The capital of Kenya is Nairobi.").count(), 2, "{text}");
    assert!(lapidary(args).err.contains("0 answered, 0 of them refused or failed; 2 were answered before"));
    std::fs::write(&input, "{}\n").expect("it is ours");
    assert!(lapidary(args).failure().contains("line 1"), "a line that is no request is named");
}

#[test]
fn a_stored_beginning_outlives_the_server_and_a_damaged_one_is_dropped() {
    let folder = tempfile::tempdir().expect("a folder");
    let flags = ["--prefix-dir", folder.path().to_str().expect("text")];
    let long = "The dog sat by the valley. ".repeat(20);
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"{long}What is the capital of Kenya?"}}],"temperature":0}}"#
    );
    let ask = |server: &Server| {
        let reply = server.ask("POST", "/v1/chat/completions", JSON, &body);
        let json: serde_json::Value =
            serde_json::from_str(reply.split_once("\r\n\r\n").expect("a body").1).expect("it is JSON");
        let cached = json["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        (json["choices"][0]["message"]["content"].clone(), cached)
    };
    let metric = |server: &Server, name: &str| -> f64 {
        let page = server.ask("GET", "/metrics", "", "");
        let line =
            page.lines().find(|line| line.starts_with(&format!("{name}{{"))).expect("it is there").to_owned();
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    };
    let mut first = Server::start(&flags, None);
    let (answer, cold) = ask(&first);
    assert_eq!(cold, 0);
    assert_eq!(first.terminate(), Some(0));
    let mut second = Server::start(&flags, None);
    let (again, cached) = ask(&second);
    assert_eq!(again, answer);
    assert!(cached > 0 && metric(&second, "lapidary_prefix_store_loaded_total") > 0.0, "{cached}");
    assert_eq!(second.terminate(), Some(0));
    // One bit of every file: none may be used.
    let mut stack = vec![folder.path().to_owned()];
    while let Some(path) = stack.pop() {
        if path.is_dir() {
            stack.extend(
                std::fs::read_dir(&path).expect("it is ours").map(|entry| entry.expect("it is there").path()),
            );
        } else {
            let mut bytes = std::fs::read(&path).expect("it is ours");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(&path, bytes).expect("it is ours");
        }
    }
    let third = Server::start(&flags, None);
    assert_eq!(ask(&third), (answer, 0));
    assert!(metric(&third, "lapidary_prefix_store_damaged_total") > 0.0);
}

#[test]
fn bench_serve_measures_a_server() {
    let server = Server::start(&[], None);
    let url = format!("http://{}", server.address);
    let args =
        ["bench", "serve", "--url", &url, "--requests", "3", "--prompt-words", "5-9", "--output-tokens", "4"];
    let figures: serde_json::Value = serde_json::from_str(&lapidary(args).ok()).expect("it is JSON");
    assert_eq!((&figures["completed"], &figures["output_tokens"]), (&3.into(), &12.into()), "{figures}");
    assert!(figures["first_token_ms"]["p50"].as_f64().expect("a number") > 0.0);
    assert!(lapidary(["bench", "serve", "--url", "https://x"]).failure().contains("TLS"));
}
