//! Spans of a server's requests at a collector.
#![cfg(all(unix, feature = "otel"))]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use common::command;

/// A collector that says yes to everything; what it was sent comes through the channel: the path and the body.
fn collector() -> (String, mpsc::Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (send, sent) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
            let mut length = 0;
            loop {
                line.clear();
                reader.read_line(&mut line).unwrap();
                let lower = line.to_lowercase();
                if let Some(value) = lower.strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                if line.trim().is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let answer = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            reader.into_inner().write_all(answer.as_bytes()).unwrap();
            send.send((path, body)).unwrap();
        }
    });
    (address, sent)
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn a_request_is_told_as_spans_on_the_clients_trace() {
    let (collector, sent) = collector();
    let mut server = command();
    server.args(["serve", "--port", "0", "--ctx", "256", "-t", "1", "--log-format", "json"]);
    server.env("OTEL_EXPORTER_OTLP_ENDPOINT", collector).env("OTEL_SERVICE_NAME", "spans-test");
    let mut server = server.stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(server.stderr.take().unwrap());
    let mut line = String::new();
    let address = loop {
        line.clear();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended before it served");
        if let Some((_, address)) = line.trim_end().split_once(" on http://") {
            break address.to_owned();
        }
    };
    let body = r#"{"messages":[{"role":"user","content":"What is the capital of Kenya?"}],"max_tokens":9}"#;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         traceparent: 00-{trace}-00f067aa0ba902b7-01\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");

    // Spans are sent when the server ends, if not before.
    let kill = format!("kill -TERM {}", server.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    assert!(server.wait().unwrap().success());
    let mut all = Vec::new();
    while let Ok((path, body)) = sent.recv_timeout(Duration::from_millis(200)) {
        assert_eq!(path, "/v1/traces");
        all.extend(body);
    }
    for part in ["spans-test", "POST /v1/chat/completions", "prompt", "decode", "gen_ai.usage.input_tokens"] {
        assert!(contains(&all, part.as_bytes()), "{part} is missing");
    }
    let id: Vec<u8> = (0..16).map(|i| u8::from_str_radix(&trace[2 * i..2 * i + 2], 16).unwrap()).collect();
    let on_trace = all.windows(16).filter(|window| *window == id).count();
    assert_eq!(on_trace, 4, "exchange, inference, prompt and decode are on the client's trace");
    // The log has lines, not spans.
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"replied\"") && !rest.contains("otel.name"), "{rest}");
}
