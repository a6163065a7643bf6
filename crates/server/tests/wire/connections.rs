//! What happens on real connections: clients that leave, keep-alives, the end of the server, TLS.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::*;
use lapidary_server::listen::{self, ListenOptions};
use lapidary_server::{App, ServerOptions};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

struct Running {
    server: Server,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    done: JoinHandle<std::io::Result<()>>,
}

async fn start(options: ServerOptions, drain: Duration, plans: Vec<Plan>) -> Running {
    let server = Server::with(options, plans);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has ports");
    let address = listener.local_addr().expect("it is bound");
    let (stop, stopped) = oneshot::channel::<()>();
    let app: App = server.app.clone();
    let options = ListenOptions { drain, ..ListenOptions::default() };
    let done = tokio::spawn(async move {
        listen::serve(listener, None, app, options, async {
            let _ = stopped.await;
        })
        .await
    });
    Running { server, address, stop, done }
}

async fn ask(address: SocketAddr, body: &Value) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(address).await.expect("the server listens");
    let body = body.to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.expect("the server reads");
    BufReader::new(stream)
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < end, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn hello(stream: bool) -> Value {
    json!({ "messages": [{ "role": "user", "content": "hello" }], "stream": stream })
}

#[test]
fn k01_a_client_that_leaves_frees_its_slot_at_once() {
    run(async {
        let times = 50;
        let plans = vec![Plan::Endless(Duration::from_millis(1)); 2 * times];
        let running = start(ServerOptions::default(), Duration::from_secs(1), plans).await;
        let model = running.server.model.clone();
        for stream in [true, false] {
            for round in 0..times {
                let mut client = ask(running.address, &hello(stream)).await;
                if stream {
                    let mut line = String::new();
                    while !line.contains("\"content\":\"x\"") {
                        line.clear();
                        assert_ne!(client.read_line(&mut line).await.expect("it streams"), 0);
                    }
                } else {
                    until("the request runs", || model.live.load(Ordering::SeqCst) == 1).await;
                }
                drop(client);
                let left = Instant::now();
                until("the slot is free", || model.live.load(Ordering::SeqCst) == 0).await;
                let took = left.elapsed();
                assert!(took < Duration::from_millis(200), "stream {stream}, round {round}: {took:?}");
            }
        }
        assert_eq!(model.dropped.load(Ordering::SeqCst), 2 * times);
        let aborted = format!(
            "lapidary_request_success_total{{model_name=\"lapidary\",finished_reason=\"abort\"}} {}\n",
            2 * times
        );
        // The model is let go of before the request is counted.
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let text = running.server.get("/metrics").await.body;
            if text.contains(&aborted) {
                break;
            }
            assert!(Instant::now() < end, "{text}");
        }
    });
}

#[test]
fn k02_a_client_that_leaves_touches_no_other() {
    run(async {
        let plans = vec![Plan::Endless(Duration::from_millis(2)); 2];
        let running = start(ServerOptions::default(), Duration::from_secs(1), plans).await;
        let model = running.server.model.clone();
        let mut stays = ask(running.address, &hello(true)).await;
        let leaves = ask(running.address, &hello(true)).await;
        until("both run", || model.live.load(Ordering::SeqCst) == 2).await;
        drop(leaves);
        until("one has left", || model.live.load(Ordering::SeqCst) == 1).await;
        let mut bytes = [0; 4096];
        for _ in 0..20 {
            assert_ne!(stays.read(&mut bytes).await.expect("the other goes on"), 0);
        }
        assert_eq!(model.live.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_silent_stream_gets_comments_with_the_progress_of_its_prompt() {
    run(async {
        let options = ServerOptions { keep_alive: Duration::from_millis(30), ..ServerOptions::default() };
        let plan = Plan::Feeding(Duration::from_millis(5));
        let running = start(options, Duration::from_secs(1), vec![plan]).await;
        let mut client = ask(running.address, &hello(true)).await;
        let (mut line, mut last) = (String::new(), 0);
        for _ in 0..3 {
            while !line.starts_with(": prefill ") {
                line.clear();
                assert_ne!(client.read_line(&mut line).await.expect("it streams"), 0);
            }
            let fed = line.trim_end().strip_prefix(": prefill ").and_then(|l| l.strip_suffix(" of 7 tokens"));
            let fed: usize = fed.expect("the form is this one").parse().expect("a number");
            assert!(fed > last, "{line}");
            last = fed;
            line.clear();
        }
    });
}

#[test]
fn stopping_refuses_what_comes_and_lets_end_what_runs() {
    run(async {
        let plans = vec![Plan::Endless(Duration::from_millis(2))];
        let running = start(ServerOptions::default(), Duration::from_secs(20), plans).await;
        let model = running.server.model.clone();
        let mut client = ask(running.address, &hello(true)).await;
        until("it runs", || model.live.load(Ordering::SeqCst) == 1).await;
        running.stop.send(()).expect("the server waits for it");
        until("it drains", || running.server.app.is_draining()).await;
        let mut refused = String::new();
        let mut late = ask(running.address, &hello(false)).await;
        late.read_line(&mut refused).await.expect("it is answered");
        assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
        let mut bytes = [0; 4096];
        for _ in 0..10 {
            assert_ne!(client.read(&mut bytes).await.expect("what runs goes on"), 0);
        }
        assert!(!running.done.is_finished());
        drop((client, late));
        let ended = tokio::time::timeout(Duration::from_secs(10), running.done).await;
        ended
            .expect("the server ends when nothing runs any more")
            .expect("without a panic")
            .expect("without an error");
        assert!(TcpStream::connect(running.address).await.is_err(), "nobody listens any more");
    });
}

#[test]
fn a_drain_that_takes_too_long_is_cut() {
    run(async {
        let plans = vec![Plan::Endless(Duration::from_millis(2))];
        let running = start(ServerOptions::default(), Duration::from_millis(50), plans).await;
        let model = running.server.model.clone();
        let client = ask(running.address, &hello(true)).await;
        until("it runs", || model.live.load(Ordering::SeqCst) == 1).await;
        running.stop.send(()).expect("the server waits for it");
        let ended = tokio::time::timeout(Duration::from_secs(15), running.done).await;
        ended
            .expect("within the drain and the time to flush")
            .expect("without a panic")
            .expect("without an error");
        drop(client);
    });
}

#[test]
fn tls_with_a_certificate_and_errors_that_name_the_file() {
    use std::path::Path;
    use std::sync::Arc;

    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    let (cert, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    for (cert, key, named) in [
        (&key, &key, &key),
        (&cert, &cert, &cert),
        (&folder.join("none.pem"), &key, &folder.join("none.pem")),
    ] {
        let error = listen::tls(cert, key).err().expect("they do not fit").to_string();
        assert!(error.contains(&named.display().to_string()), "{error}");
    }
    run(async {
        let server = Server::new([]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = listen::tls(&cert, &key).unwrap();
        let app = server.app.clone();
        tokio::spawn(listen::serve(
            listener,
            Some(acceptor),
            app,
            ListenOptions::default(),
            std::future::pending(),
        ));
        // Somebody who does not speak TLS holds nobody up.
        let _silent = TcpStream::connect(address).await.unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&cert).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let stream = TcpStream::connect(address).await.unwrap();
        let mut stream = connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap();
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut text = Vec::new();
        // A server that closes without a word of goodbye is an error to rustls, after all bytes were read.
        let _ = stream.read_to_end(&mut text).await;
        assert!(text.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&text));
    });
}
