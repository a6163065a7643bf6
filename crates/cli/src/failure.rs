//! Errors as one line: the cause with its numbers, then what to do.
//!
//! Library errors say what is wrong; what a user of this command can do about it is said here, in one table, unless
//! the library's own message says it already.

use std::fmt;
use std::io;
use std::process::ExitCode;

/// A mistake in the arguments that only became visible later than parsing.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Prints an error and says how the program ends.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if broken_pipe(error) {
        // The reader of stdout has seen enough, as with `| head`.
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {}", line(error));
    ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
}

/// A panic is a bug of ours; it too is told in one line, and the backtrace on request.
pub fn one_line_panics() {
    if std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0") {
        return;
    }
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().map(|s| s.to_string());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        let place = info.location().map_or(String::new(), |l| format!(" at {}:{}", l.file(), l.line()));
        eprintln!(
            "error: internal error{place}: {}; report it, with RUST_BACKTRACE=1 for more",
            one_line(&text)
        );
    }));
}

/// An error in one line.
pub fn line(error: &anyhow::Error) -> String {
    let cause = error.chain().map(ToString::to_string).fold(Vec::<String>::new(), |mut said, next| {
        // Some errors repeat their source's text.
        if !said.last().is_some_and(|s| s.contains(&next)) {
            said.push(next);
        }
        said
    });
    let cause = one_line(&cause.join(": "));
    match remedy(error) {
        Some(remedy) => format!("{cause}; {remedy}"),
        None => cause,
    }
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// Whether the reader of stdout is gone.
pub fn broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|e| e.downcast_ref::<io::Error>());
    io.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// What to do, where the message does not say it.
fn remedy(error: &anyhow::Error) -> Option<&'static str> {
    let any = error.chain().find_map(|e| {
        let weights = e.downcast_ref().map(of_weights);
        let model = e.downcast_ref().map(of_model);
        let device = e.downcast_ref().map(of_device);
        let engine = e.downcast_ref().map(of_engine);
        let front = e.downcast_ref().map(of_front);
        weights.or(model).or(device).or(engine).or(front)
    });
    any.flatten()
}

fn of_weights(error: &lapidary_weights::Error) -> Option<&'static str> {
    use lapidary_weights::Error::*;
    match error {
        Io { source, .. } | Write { source, .. } => of_io(source.kind()),
        BadHeader { .. }
        | BadTensor { .. }
        | Overlap { .. }
        | Hole { .. }
        | BadScale { .. }
        | NotFinite { .. } => Some("the file is damaged, fetch it again"),
        BadIndex { .. } | MissingTensor { .. } => Some("fetch the model's files again, all of one revision"),
        BadConfig { .. } => Some("fetch the file again"),
        WrongShape { .. } => Some("check that config.json and the weights belong together"),
        WrongDtype { .. } => Some("take another conversion of the model"),
        UnknownTensor { .. } => Some("this kind of model is not supported"),
        // These say it themselves.
        _ => None,
    }
}

fn of_io(kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::NotFound => Some("check the path"),
        io::ErrorKind::PermissionDenied => Some("give this user permission for it"),
        io::ErrorKind::StorageFull => Some("free some space"),
        _ => None,
    }
}

fn of_model(error: &lapidary_model::Error) -> Option<&'static str> {
    use lapidary_model::Error::*;
    match error {
        Config { .. } => Some("check that config.json belongs to a Gemma model and is complete"),
        NotSupported { .. } => Some("run a Gemma 3 or Gemma 4 text model"),
        Weights(e) => of_weights(e),
        Backend(e) => of_device(e),
        Tensor { .. } => Some("fetch the model's files again, all of one revision"),
        Program(_) => Some("this is a bug, report it with the output of inspect"),
        _ => None,
    }
}

fn of_device(error: &lapidary_ops::Error) -> Option<&'static str> {
    use lapidary_ops::Error::*;
    match error {
        OutOfMemory { .. } => Some("lower --ctx, or take a smaller quantisation"),
        Tensor { .. } => Some("the file is damaged, fetch it again"),
        Unsupported { .. } => {
            Some("leave out --device, --level, --compute and --kv to get what this machine can do")
        }
        _ => None,
    }
}

fn of_engine(error: &lapidary_engine::Error) -> Option<&'static str> {
    use lapidary_engine::Error::*;
    match error {
        ContextFull { .. } => Some("raise --ctx or shorten the prompt"),
        NonFiniteLogits { .. } => Some("check the model's files with check --full"),
        Backend(e) => of_device(e),
        _ => None,
    }
}

fn of_front(error: &lapidary::Error) -> Option<&'static str> {
    use lapidary::Error::*;
    match error {
        Weights(e) => of_weights(e),
        Model(e) => of_model(e),
        Backend(e) => of_device(e),
        Engine(e) => of_engine(e),
        Io { source, .. } => of_io(source.kind()),
        NoTokenizer { .. } => Some("put it beside the weights"),
        GenerationConfig { .. } => Some("correct the file or take it away"),
        VocabularyMismatch { .. } => Some("check that tokenizer and weights belong together"),
        Text(_) => Some("fetch the tokenizer's and template's files again"),
        _ => None,
    }
}
