//! `lapidary serve`

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use lapidary::service::{PrefixDir, PrefixOptions, ServiceOptions};
use lapidary_server::listen::{self, ListenOptions};
use lapidary_server::{App, Keys, ServerOptions};
use tokio::net::TcpListener;
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::prelude::*;

use crate::failure::Usage;
use crate::model_args::{ComputeFlag, LoadArgs, ModelArgs};
use crate::{load, source};

/// Serve a model over HTTP, as OpenAI and Anthropic do.
///
/// Answers many requests at once: chat completions, completions, responses, messages, and a chat page for the browser at /.
/// GET /openapi.json describes all of it.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  lapidary serve                               the built-in model on http://127.0.0.1:8000\n  \
lapidary serve -m MODEL --ctx 32768 --served-model-name gemma\n  \
lapidary serve -m MODEL --host 0.0.0.0 --api-key-file keys.txt --tls-cert cert.pem --tls-key key.pem\n\n\
SIGTERM and Ctrl-C: requests that run come to their end, others are refused with 503."
)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub compute: ComputeFlag,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub service: ServiceArgs,
    /// The address to listen on; only this machine when not given
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// The port to listen on; 0 for one that is free
    #[arg(short = 'p', long, default_value_t = 8000)]
    pub port: u16,
    /// A name under which the model answers, the first one in replies; the model's own when not given
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Refuse requests with fields that have no effect, and templates that do not fit the vocabulary
    #[arg(long)]
    pub strict: bool,
    /// A file of API keys, one a line; LAPIDARY_API_KEY holds a further one
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Most bytes of a request
    #[arg(long, value_name = "BYTES", default_value_t = 32 << 20)]
    pub body_limit: usize,
    /// Most seconds of a request that names no timeout of its own; no limit when not given
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: Option<u64>,
    /// Milliseconds without a byte after which a stream gets a comment, so that proxies do not close it
    #[arg(long, value_name = "MS", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(10..))]
    pub keep_alive_ms: u64,
    /// Seconds that running requests have after the signal to stop
    #[arg(long, value_name = "S", default_value_t = 30)]
    pub drain: u64,
    /// An origin whose pages may read replies, or * for all; none when not given
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// The certificate chain for TLS, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The key of the certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// The form of the log on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// How much to log
    #[arg(long, value_enum, default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,
    /// Write conversations into the log, which otherwise holds none of their text
    #[arg(long)]
    pub log_text: bool,
}

/// How the engine shares the device among requests.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceArgs {
    /// Most replies that are made side by side
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub parallel: u32,
    /// Most requests that wait beside them; one more is refused with 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub queue: u32,
    /// Memory for keys and values, in sequences of the whole context; more replies fit while they are shorter
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub sequences: u32,
    /// Milliseconds within which running streams get a token while a long prompt is read
    #[arg(long, value_name = "MS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub max_stall_ms: u64,
    /// Times that a step of running streams may take longer while prompts are read, within that bound: larger reads
    /// prompts sooner, smaller keeps streams even
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub max_slowdown: u32,
    /// Most bytes of sliding keys and values that are kept so that later requests need not compute a beginning again; the
    /// larger of 256 MiB and four windows when not given
    #[arg(long, value_name = "BYTES", conflicts_with = "no_prefix_cache")]
    pub prefix_bytes: Option<usize>,
    /// A folder in which beginnings are kept too, so that they outlive the process; several servers may share it
    #[arg(long, value_name = "FOLDER", conflicts_with = "no_prefix_cache")]
    pub prefix_dir: Option<PathBuf>,
    /// Most bytes of the files in that folder
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30, requires = "prefix_dir")]
    pub prefix_dir_bytes: u64,
    /// Keep nothing of earlier requests
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// A folder of control vectors that requests may steer by, each named by its file without the ending
    #[arg(long, value_name = "FOLDER")]
    pub steering_dir: Option<PathBuf>,
    /// Take control vectors inside requests too
    #[arg(long)]
    pub steering_inline: bool,
    /// Most bytes of activations that one request may have copied out
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20)]
    pub capture_bytes: usize,
    /// Most tokens of thought when a request does not say; no bound when not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub thinking_budget: Option<u32>,
}

impl ServiceArgs {
    /// The choices as the library takes them.
    pub fn options(&self, strict: bool) -> ServiceOptions {
        ServiceOptions {
            strict_template: strict,
            default_thinking_budget: self.thinking_budget.map(|n| n as usize),
            sequences: self.sequences as usize,
            running: self.parallel as usize,
            waiting: self.queue as usize,
            max_stall: Duration::from_millis(self.max_stall_ms),
            max_slowdown: self.max_slowdown,
            vectors: self.steering_dir.clone(),
            inline_vectors: self.steering_inline,
            max_capture_bytes: self.capture_bytes,
            prefix: PrefixOptions {
                enabled: !self.no_prefix_cache,
                snapshot_bytes: self.prefix_bytes,
                dir: self.prefix_dir.as_ref().map(|path| PrefixDir {
                    path: path.clone(),
                    bytes: self.prefix_dir_bytes,
                    model: String::new(),
                }),
                ..PrefixOptions::default()
            },
            ..ServiceOptions::default()
        }
    }
}

/// Forms of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for people
    Text,
    /// An object a line
    Json,
}

/// Amounts of log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What needs attention
    Warn,
    /// Every request
    Info,
    /// Probes, scrapes and connections too
    Debug,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let options = options(args)?;
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(listen::tls(cert, key).context("TLS")?),
        _ => None,
    };
    if !args.host.is_loopback() && options.keys.is_empty() {
        eprintln!("note: everybody who reaches {} may use the model; --api-key-file sets keys", args.host);
    }
    let _spans = start_log(args)?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    // Few threads: each that wakes takes a core from the workers of the model, and passing tokens on takes little.
    let threads = available_parallelism().map_or(1, |cores| (cores.get() / 8).clamp(1, 8));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let address = SocketAddr::new(args.host, args.port);
    // The port is taken before the model is loaded: a probe sees a server that lives and is not ready, and a port in
    // use shows at once.
    let listener = runtime.block_on(TcpListener::bind(address));
    let listener = listener.with_context(|| format!("cannot listen on {address}"))?;
    let bound = listener.local_addr()?;
    let app = App::new(options);
    let stop = runtime.block_on(async { listen::stop_signal() })?;
    let limits = ListenOptions { drain: Duration::from_secs(args.drain), ..ListenOptions::default() };
    let serving = runtime.spawn(listen::serve(listener, tls, app.clone(), limits, stop));
    let service =
        load::service(&args.model, &args.load, args.compute.compute, args.service.options(args.strict))?;
    app.serve(Arc::new(service));
    // Only now: whoever waits for this line may ask at once.
    eprintln!("serving {} on {scheme}://{bound}", app.options().names.join(", "));
    runtime.block_on(serving)??;
    Ok(())
}

fn options(args: &Args) -> anyhow::Result<ServerOptions> {
    let mut keys = Keys::default();
    if let Some(path) = &args.api_key_file {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let file = Keys::from_lines(&text);
        if file.is_empty() {
            bail!(Usage(format!("{} holds no key; write one a line", path.display())));
        }
        keys.extend(file);
    }
    if let Ok(key) = std::env::var("LAPIDARY_API_KEY") {
        keys.extend(Keys::from_lines(&key));
    }
    let mut names = args.served_model_name.clone();
    if names.is_empty() {
        names.push(source::short_name(&args.model));
    }
    Ok(ServerOptions {
        names,
        strict: args.strict,
        keys,
        body_limit: args.body_limit,
        keep_alive: Duration::from_millis(args.keep_alive_ms),
        timeout: args.timeout.map(Duration::from_secs),
        cors: args.cors_origin.clone(),
        log_text: args.log_text,
        ..ServerOptions::default()
    })
}

/// Starts the log and, where the environment names a collector, the spans; those left are sent when the result is dropped.
fn start_log(args: &Args) -> anyhow::Result<Spans> {
    let level = match args.log_level {
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    let log = tracing_subscriber::fmt::layer().with_target(false).with_writer(std::io::stderr);
    let log = match args.log_format {
        LogFormat::Text => log.boxed(),
        LogFormat::Json => log.json().flatten_event(true).boxed(),
    };
    // Spans are the collector's; the log has a line for each request.
    let log = log.with_filter(filter_fn(|of| of.is_event())).with_filter(level);
    let (spans, layer) = spans()?;
    tracing_subscriber::registry().with(layer).with(log).init();
    Ok(spans)
}

#[cfg(feature = "otel")]
type Spans = Option<crate::spans::Exporter>;
/// Nothing to send, where spans were left out.
#[cfg(not(feature = "otel"))]
struct Spans;

type Layer = Box<dyn tracing_subscriber::Layer<tracing_subscriber::Registry> + Send + Sync>;

#[cfg(feature = "otel")]
fn spans() -> anyhow::Result<(Spans, Option<Layer>)> {
    let exporter = crate::spans::Exporter::from_env()?;
    let layer = exporter.as_ref().map(|exporter| {
        let layer = tracing_opentelemetry::layer().with_tracer(exporter.tracer());
        layer.with_filter(filter_fn(|of| of.target() == "lapidary::spans")).boxed()
    });
    Ok((exporter, layer))
}

#[cfg(not(feature = "otel"))]
fn spans() -> anyhow::Result<(Spans, Option<Layer>)> {
    if std::env::var("OTEL_EXPORTER_OTLP_ENDPOINT").is_ok_and(|url| !url.is_empty()) {
        eprintln!(
            "note: OTEL_EXPORTER_OTLP_ENDPOINT is set, but this build sends no spans; feature otel does"
        );
    }
    Ok((Spans, None))
}
