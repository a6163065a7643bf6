//! `lapidary chat`

use std::io::{IsTerminal, stdin};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use lapidary::steering::Steering;
use lapidary::{ChatInput, Gemma};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::failure;
use crate::interrupt::Interrupt;
use crate::load;
use crate::model_args::{ComputeFlag, LoadArgs, ModelArgs};
use crate::sampling_args::SamplingArgs;
use crate::source;
use crate::speak::{Said, Show, speak};
use crate::steer_args::SteerArgs;

/// Hold a conversation.
///
/// Holds a conversation. Ctrl-C stops an answer, Ctrl-D ends the chat; the arrow keys bring back earlier lines. What the
/// model has read of the conversation is not read again in the next turn.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Let the model think before each answer; thoughts go to stderr
    #[arg(long)]
    pub think: bool,
    /// Go on with a conversation that /save wrote
    #[arg(long, value_name = "FILE")]
    pub load_chat: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub steer: SteerArgs,
    #[command(flatten)]
    pub compute: ComputeFlag,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Tell speeds, times and memory after each answer, on stderr
    #[arg(long)]
    pub stats: bool,
}

const HELP: &str = "In the chat:
  /reset         forget the conversation, keep the system text
  /system TEXT   set the system text and forget the conversation; without TEXT, take it away
  /save FILE     write the conversation as JSON
  /load FILE     go on with a conversation from a file
  /stats         speeds, times and memory of the last answer
  /help          this list
  /quit          end, as Ctrl-D does
A line that is to begin with a slash is written with two.";

pub fn run(args: &Args) -> anyhow::Result<()> {
    let gemma = load::gemma(&args.model, &args.load, args.compute.compute)?;
    let steering = args.steer.steering(gemma.config())?;
    let mut chat =
        Chat { gemma, steering, args, system: args.system.clone(), messages: Vec::new(), last: None };
    if let Some(path) = &args.load_chat {
        chat.load(path)?;
    }
    let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
    let history = history_file();
    if let Some(path) = &history {
        // There is none the first time.
        let _ = editor.load_history(path);
    }
    let terminal = stdin().is_terminal();
    if terminal {
        eprintln!("{}; /help lists commands, Ctrl-D ends", source::name(&args.model));
    }
    loop {
        match editor.readline(if terminal { "> " } else { "" }) {
            Ok(line) => {
                if !line.trim().is_empty() {
                    let _ = editor.add_history_entry(&line);
                }
                if chat.line(&line)? == Next::End {
                    break;
                }
            }
            Err(ReadlineError::Interrupted) => eprintln!("Ctrl-D ends the chat"),
            Err(ReadlineError::Eof) => break,
            Err(e) => return Err(e).context("cannot read a line"),
        }
    }
    if let Some(path) = history.filter(|_| terminal) {
        let saved = path.parent().map_or(Ok(()), std::fs::create_dir_all).is_ok()
            && editor.save_history(&path).is_ok();
        if !saved {
            eprintln!("note: the history could not be written to {}", path.display());
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    End,
}

struct Chat<'a> {
    gemma: Gemma,
    steering: Option<Arc<Steering>>,
    args: &'a Args,
    system: Option<String>,
    /// Turns of user and assistant.
    messages: Vec<Value>,
    last: Option<Said>,
}

impl Chat<'_> {
    /// A line of input. What goes wrong with it is told, and the chat goes on; only a closed stdout ends it.
    fn line(&mut self, line: &str) -> anyhow::Result<Next> {
        let result = match line.strip_prefix('/') {
            _ if line.trim().is_empty() => Ok(Next::GoOn),
            Some(rest) if !rest.starts_with('/') => self.command(rest),
            Some(escaped) => self.turn(escaped).map(|()| Next::GoOn),
            None => self.turn(line).map(|()| Next::GoOn),
        };
        match result {
            Err(e) if failure::broken_pipe(&e) => Err(e),
            Err(e) => {
                eprintln!("error: {}", failure::line(&e));
                Ok(Next::GoOn)
            }
            next => next,
        }
    }

    fn command(&mut self, text: &str) -> anyhow::Result<Next> {
        let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("reset", "") => self.messages.clear(),
            ("system", "") => (self.system, self.messages) = (None, Vec::new()),
            ("system", text) => (self.system, self.messages) = (Some(text.to_string()), Vec::new()),
            ("save" | "load", "") => bail!("/{name} needs a file's name; write /{name} FILE"),
            ("save", path) => self.save(Path::new(path))?,
            ("load", path) => self.load(Path::new(path))?,
            ("stats", "") => match &self.last {
                Some(said) => eprint!("{}", said.stats(&self.gemma)),
                None => eprintln!("nothing was said yet"),
            },
            ("help", "") => eprintln!("{HELP}"),
            ("quit" | "exit", "") => return Ok(Next::End),
            _ => bail!("there is no command /{text}; /help lists them"),
        }
        Ok(Next::GoOn)
    }

    fn turn(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(json!({"role": "user", "content": text}));
        let said = self.answer();
        // A turn without an answer is taken back, so that the next one is not answered on top of it.
        match &said {
            Ok(said) if !said.text.is_empty() => {
                self.messages.push(json!({"role": "assistant", "content": said.text}));
            }
            _ => drop(self.messages.pop()),
        }
        let said = said?;
        match said.finish {
            None if said.text.is_empty() => eprintln!("[stopped; the turn was taken back]"),
            None => eprintln!("[stopped]"),
            Some(_) => {
                let context =
                    self.args.load.options(self.args.compute.compute).context_for(self.gemma.config());
                said.remark(context).iter().for_each(|r| eprintln!("note: {r}"));
            }
        }
        if self.args.stats {
            eprint!("{}", said.stats(&self.gemma));
        }
        self.last = Some(said);
        Ok(())
    }

    fn answer(&mut self) -> anyhow::Result<Said> {
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        let messages = system.into_iter().chain(self.messages.iter().cloned()).collect();
        let input = ChatInput { messages, enable_thinking: Some(self.args.think), ..ChatInput::default() };
        let mut options = self.args.sampling.options(&self.gemma, usize::MAX);
        options.steering = self.steering.clone();
        let interrupt = Interrupt::listen();
        speak(self.gemma.chat(&input, &options)?, Show::Stream, Some(&interrupt))
    }

    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.into_iter().chain(self.messages.iter().cloned()).collect();
        let text = format!("{:#}\n", json!({"messages": messages}));
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("{} messages are in {}", messages.len(), path.display());
        Ok(())
    }

    /// Takes over a conversation; nothing has changed after an error.
    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (system, messages) = conversation(&text).with_context(|| {
            format!("{} holds no conversation; expected what /save writes", path.display())
        })?;
        eprintln!("{} messages from {}", messages.len() + usize::from(system.is_some()), path.display());
        (self.system, self.messages) = (system, messages);
        Ok(())
    }
}

fn conversation(text: &str) -> anyhow::Result<(Option<String>, Vec<Value>)> {
    let file: Value = serde_json::from_str(text)?;
    let list = file.get("messages").and_then(Value::as_array).context("there is no list \"messages\"")?;
    let mut system = None;
    let mut messages = Vec::new();
    for (i, m) in list.iter().enumerate() {
        let field = |name: &str| m.get(name).and_then(Value::as_str);
        match (field("role"), field("content")) {
            (Some("system"), Some(text)) if i == 0 => system = Some(text.to_string()),
            (Some("user" | "assistant"), Some(_)) => messages.push(m.clone()),
            _ => bail!("message {i} is no text of user or assistant"),
        }
    }
    Ok((system, messages))
}

/// Where lines are kept between chats.
fn history_file() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let data = var("XDG_DATA_HOME")
        .or_else(|| var("APPDATA"))
        .or_else(|| Some(var("HOME")?.join(".local").join("share")));
    Some(data?.join("lapidary").join("history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_are_read_or_refused() {
        let good = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}"#;
        let (system, messages) = conversation(good).unwrap();
        assert_eq!((system.as_deref(), messages.len()), (Some("s"), 1));
        for bad in
            ["", "[]", "{}", r#"{"messages": [{"role": "tool", "content": "x"}]}"#, r#"{"messages": [1]}"#]
        {
            assert!(conversation(bad).is_err(), "{bad}");
        }
    }
}
