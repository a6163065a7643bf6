//! An answer on its way to the terminal, and what is told about it afterwards.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::time::Duration;

use lapidary::capture::Recording;
use lapidary::trace::TokenTrace;
use lapidary::{Answer, FinishReason, Gemma, Piece, ToolCall, Usage};
use serde_json::{Value, json};

use crate::interrupt::Interrupt;
use crate::progress::{Bar, Unit};
use crate::report::bytes;

/// What was said.
#[derive(Clone, Debug, Default)]
pub struct Said {
    pub text: String,
    pub thought: String,
    pub calls: Vec<ToolCall>,
    /// `None` when Ctrl-C ended it.
    pub finish: Option<FinishReason>,
    pub usage: Usage,
    /// Tokens of the whole prompt, those that were reused included.
    pub prompt_tokens: usize,
    pub reused_tokens: usize,
    pub recording: Option<Recording>,
    pub traces: Vec<TokenTrace>,
}

/// Whether pieces are printed as they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    Stream,
    Nothing,
}

/// Runs an answer to its end or to Ctrl-C. Text goes to stdout; thoughts and calls, which are not the answer, to stderr.
pub fn speak(mut answer: Answer<'_>, show: Show, interrupt: Option<&Interrupt>) -> anyhow::Result<Said> {
    let mut said = Said {
        prompt_tokens: answer.prompt_tokens(),
        reused_tokens: answer.reused_tokens(),
        ..Said::default()
    };
    let mut thinking = Aside::default();
    let total = (said.prompt_tokens - said.reused_tokens) as u64;
    let mut bar = Some(Bar::new("reading the prompt", Unit::Tokens));
    while let Some(piece) = answer.next_piece(&mut |fed| {
        if let Some(bar) = &mut bar {
            bar.at(fed as u64, total);
        }
    })? {
        bar = None;
        match piece {
            Piece::Text(text) => {
                if show == Show::Stream {
                    thinking.end()?;
                    let mut out = stdout().lock();
                    out.write_all(text.as_bytes())?;
                    out.flush()?;
                }
                said.text += &text;
            }
            Piece::Thought(text) => {
                if show == Show::Stream {
                    thinking.more(&text)?;
                }
                said.thought += &text;
            }
            Piece::ToolCall(call) => {
                if show == Show::Stream {
                    thinking.end()?;
                    eprintln!("[calls {} {}]", call.name, call.arguments);
                }
                said.calls.push(call);
            }
            Piece::Finished(reason) => said.finish = Some(reason),
        }
        if interrupt.is_some_and(Interrupt::asked) {
            break;
        }
    }
    said.usage = answer.usage();
    said.recording = answer.recording().cloned();
    said.traces = answer.traces().to_vec();
    if show == Show::Stream {
        thinking.end()?;
        let mut out = stdout().lock();
        if !said.text.ends_with('\n') {
            out.write_all(b"\n")?;
        }
        out.flush()?;
    }
    Ok(said)
}

/// Text beside the answer, dimmed where stderr is a terminal.
#[derive(Debug, Default)]
struct Aside {
    open: bool,
}

impl Aside {
    fn more(&mut self, text: &str) -> std::io::Result<()> {
        let mut err = stderr().lock();
        if !self.open {
            self.open = true;
            err.write_all(if err.is_terminal() { b"\x1b[2m" } else { b"[thought] " })?;
        }
        err.write_all(text.as_bytes())?;
        err.flush()
    }

    fn end(&mut self) -> std::io::Result<()> {
        if std::mem::take(&mut self.open) {
            let mut err = stderr().lock();
            err.write_all(if err.is_terminal() { b"\x1b[0m\n" } else { b"\n" })?;
        }
        Ok(())
    }
}

impl Said {
    /// Why it ended, in a word.
    pub fn reason(&self) -> &'static str {
        match self.finish {
            Some(FinishReason::Stop(_)) => "stop",
            Some(FinishReason::Length) => "length",
            Some(FinishReason::ContextFull) => "context_full",
            None => "interrupted",
        }
    }

    /// What a user should know of an end that was not the model's.
    pub fn remark(&self, context: usize) -> Option<String> {
        match self.finish {
            Some(FinishReason::Length) => {
                Some(format!("stopped after {} tokens; -n asks for more", self.usage.answer_tokens))
            }
            Some(FinishReason::ContextFull) => {
                Some(format!("stopped at the end of the context of {context} tokens; --ctx makes it longer"))
            }
            _ => None,
        }
    }

    fn prompt_rate(&self) -> f64 {
        rate(self.usage.prompt_tokens, self.usage.prompt_time)
    }

    fn decode_rate(&self) -> f64 {
        rate(self.usage.decode_steps, self.usage.decode_time)
    }

    /// The figures on lines.
    pub fn stats(&self, gemma: &Gemma) -> String {
        let m = gemma.runner().memory();
        let reused = match self.reused_tokens {
            0 => String::new(),
            n => format!(" ({n} more were held already)"),
        };
        let mapped = match m.mapped {
            0 => String::new(),
            n => format!(", read in place from the file {}", bytes(n as u64)),
        };
        let host = match m.host {
            0 => String::new(),
            n => format!(", tables in the host's memory {}", bytes(n as u64)),
        };
        format!(
            "load    {:.2} s ({:.2} GB/s of weights)\n\
             prompt  {} tokens{reused}, {:.2} t/s, first token after {:.3} s\n\
             answer  {} tokens, {:.2} t/s\n\
             memory  {}: weights {}, keys and values {}, activations {}{mapped}{host}\n",
            gemma.load_time().as_secs_f64(),
            (m.weights + m.mapped + m.host) as f64 / 1e9 / gemma.load_time().as_secs_f64().max(1e-9),
            self.usage.prompt_tokens,
            self.prompt_rate(),
            self.usage.prompt_time.as_secs_f64(),
            self.usage.answer_tokens,
            self.decode_rate(),
            bytes((m.weights + m.kv + m.activations) as u64),
            bytes(m.weights as u64),
            bytes(m.kv as u64),
            bytes(m.activations as u64),
        )
    }

    /// Everything, for programs.
    pub fn json(&self, gemma: &Gemma, seed: u64) -> Value {
        let m = gemma.runner().memory();
        let call = |c: &ToolCall| {
            let arguments: Value = serde_json::from_str(&c.arguments).unwrap_or(Value::Null);
            json!({"name": c.name, "arguments": arguments})
        };
        json!({
            "text": self.text,
            "thought": self.thought,
            "tool_calls": self.calls.iter().map(call).collect::<Vec<_>>(),
            "finish_reason": self.reason(),
            "seed": seed,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "reused_tokens": self.reused_tokens,
                "answer_tokens": self.usage.answer_tokens,
            },
            "stats": {
                "load_seconds": gemma.load_time().as_secs_f64(),
                "prompt_tokens_per_second": self.prompt_rate(),
                "first_token_seconds": self.usage.prompt_time.as_secs_f64(),
                "decode_tokens_per_second": self.decode_rate(),
                "weight_bytes": m.weights,
                "mapped_bytes": m.mapped,
                "host_bytes": m.host,
                "kv_bytes": m.kv,
                "activation_bytes": m.activations,
            },
        })
    }
}

/// Tokens a second; 0 where nothing was timed.
fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}
