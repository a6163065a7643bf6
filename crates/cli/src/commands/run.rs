//! `lapidary run`

use std::ffi::OsString;
use std::io::{IsTerminal, Read, Write, stdin, stdout};

use anyhow::{Context, bail};
use lapidary::{ChatInput, Gemma, TemplateSource};
use serde_json::json;

use crate::load;
use crate::look_args::LookArgs;
use crate::model_args::{ComputeFlag, LoadArgs, ModelArgs};
use crate::sampling_args::SamplingArgs;
use crate::source;
use crate::speak::{Show, speak};
use crate::steer_args::SteerArgs;

/// Answer or complete one prompt.
///
/// Answers a prompt through the model's chat template, or completes it as it stands: with --raw, and for base models, which
/// have no template. The answer streams to stdout, everything else goes to stderr.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  lapidary run \"Once upon a time\"                   the built-in model, offline\n  \
lapidary run -m google/gemma-4-E2B-it \"Why is the sky blue?\" --stats\n  \
lapidary run -m model.gguf --raw \"def fibonacci(n):\" -n 80 --greedy\n  \
lapidary run -m MODEL --system \"Answer in French\" < question.txt"
)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt; stdin when not given
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<OsString>,
    /// Complete the prompt as it stands, without a chat template
    #[arg(long, conflicts_with_all = ["system", "think"])]
    pub raw: bool,
    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Let the model think first; thoughts go to stderr
    #[arg(long)]
    pub think: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub steer: SteerArgs,
    #[command(flatten)]
    pub look: LookArgs,
    #[command(flatten)]
    pub compute: ComputeFlag,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Tell speeds, times and memory afterwards, on stderr
    #[arg(long)]
    pub stats: bool,
    /// Print the answer, its thought and the figures as one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// Tokens of a completion unless asked otherwise: a base model hardly ever ends by itself.
const COMPLETION_TOKENS: usize = 256;

pub fn run(args: &Args) -> anyhow::Result<()> {
    let prompt = prompt(args)?;
    let mut gemma = load::gemma(&args.model, &args.load, args.compute.compute)?;
    let raw = raw(args, &gemma);
    let context = args.load.options(args.compute.compute).context_for(gemma.config());
    let mut options = args.sampling.options(&gemma, if raw { COMPLETION_TOKENS } else { usize::MAX });
    args.look.ask(&mut options);
    options.steering = args.steer.steering(gemma.config())?;
    let show = if args.json { Show::Nothing } else { Show::Stream };
    args.look.begin(&mut gemma)?;
    let said = match raw {
        true => speak(gemma.complete(&prompt, &options)?, show, None)?,
        false => {
            let mut messages = Vec::new();
            messages.extend(args.system.as_ref().map(|text| json!({"role": "system", "content": text})));
            // The newline that ends a line of input is no part of what is said.
            messages.push(json!({"role": "user", "content": prompt.strip_suffix('\n').unwrap_or(&prompt)}));
            let input = ChatInput { messages, enable_thinking: Some(args.think), ..ChatInput::default() };
            speak(gemma.chat(&input, &options)?, show, None)?
        }
    };
    let timings = args.look.end(&mut gemma)?;
    args.look.tell(&said, &prompt, &source::name(&args.model), &gemma)?;
    if args.json {
        let mut result = said.json(&gemma, options.sampling.seed);
        if let Some(timings) = timings {
            result["timings"] = timings;
        }
        if args.look.trace {
            result["trace"] = serde_json::to_value(&said.traces)?;
        }
        result["mode"] = json!(if raw { "completion" } else { "chat" });
        writeln!(stdout().lock(), "{result:#}")?;
    } else if let Some(remark) = said.remark(context) {
        eprintln!("note: {remark}");
    }
    if args.stats {
        eprint!("{}", said.stats(&gemma));
    }
    Ok(())
}

fn raw(args: &Args, gemma: &Gemma) -> bool {
    let chat_flags = args.system.is_some() || args.think;
    if args.raw || gemma.template_source() == TemplateSource::Checkpoint || chat_flags {
        return args.raw;
    }
    eprintln!(
        "note: the model has no chat template, so the prompt is completed as it stands; lapidary chat answers it"
    );
    true
}

fn prompt(args: &Args) -> anyhow::Result<String> {
    let text = match &args.prompt {
        Some(text) => text.to_str().context("the prompt is not UTF-8; give it in UTF-8")?.to_owned(),
        None => {
            if stdin().is_terminal() {
                eprintln!("reading the prompt from the terminal, Ctrl-D on a line of its own ends it");
            }
            let mut text = String::new();
            stdin().read_to_string(&mut text).context("cannot read a prompt in UTF-8 from stdin")?;
            text
        }
    };
    if text.is_empty() && !args.raw {
        bail!("the prompt is empty; give one as an argument or on stdin");
    }
    Ok(text)
}
