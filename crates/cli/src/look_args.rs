//! The flags that look inside an answer while it is made, and what is written of it.

use std::collections::BTreeMap;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use lapidary::capture::CaptureSpec;
use lapidary::timings::{Report, chrome_trace};
use lapidary::trace::{TokenTrace, TraceOptions, html};
use lapidary::{AnswerOptions, Gemma};
use serde_json::Value;

use crate::commands::dump;
use crate::speak::Said;

/// Captures and traces.
#[derive(Clone, Debug, Args)]
pub struct LookArgs {
    /// Write activations to a safetensors file: file=FILE,layers=0+3-9|all,
    /// what=hidden+attn+mlp+routes+projections,positions=last|all|generated|A-B
    #[arg(long, value_name = "SPEC", value_parser = capture)]
    pub capture: Option<Capture>,
    /// Tell for each token its probability, the entropy, the likeliest tokens and the chosen experts, on stderr
    #[arg(long)]
    pub trace: bool,
    /// Write the same, with a map of experts, the sizes of the residual stream and a logit lens, as a page
    #[arg(long, value_name = "FILE")]
    pub trace_html: Option<PathBuf>,
    /// Tell where the time of each step went, on stderr
    #[arg(long)]
    pub timings: bool,
    /// Write the time of each step as a Chrome trace, which ui.perfetto.dev opens
    #[arg(long, value_name = "FILE")]
    pub trace_file: Option<PathBuf>,
}

/// A capture and where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capture {
    file: PathBuf,
    spec: CaptureSpec,
}

fn capture(text: &str) -> Result<Capture, String> {
    let (mut file, mut rest) = (None, Vec::new());
    for (i, part) in text.split(',').enumerate() {
        match part.split_once('=') {
            Some((key, value)) if key.trim() == "file" => file = Some(value.trim()),
            None if i == 0 => file = Some(part.trim()),
            _ => rest.push(part),
        }
    }
    let file = file.filter(|f| !f.is_empty()).ok_or("file=PATH is missing")?;
    let spec = rest.join(",").parse::<CaptureSpec>().map_err(|e| e.to_string())?;
    Ok(Capture { file: file.into(), spec })
}

/// Likeliest tokens that a page shows of each layer.
const LENS: usize = 3;

impl LookArgs {
    /// Asks for what the flags need.
    pub fn ask(&self, options: &mut AnswerOptions) {
        options.capture = self.capture.as_ref().map(|c| c.spec.clone());
        if self.trace || self.trace_html.is_some() {
            let lens = if self.trace_html.is_some() { LENS } else { 0 };
            options.trace = Some(TraceOptions { lens, ..TraceOptions::default() });
        }
    }

    /// Starts the clock where times are wanted.
    pub fn begin(&self, gemma: &mut Gemma) -> anyhow::Result<()> {
        if self.timings || self.trace_file.is_some() {
            gemma.start_profile(self.trace_file.is_some())?;
        }
        Ok(())
    }

    /// Stops the clock and writes the times; the report as JSON.
    pub fn end(&self, gemma: &mut Gemma) -> anyhow::Result<Option<Value>> {
        let Some(profile) = gemma.take_profile() else { return Ok(None) };
        let report = Report::new(&profile);
        if self.timings {
            write!(stderr(), "{}", report.text())?;
        }
        if let Some(path) = &self.trace_file {
            write_file(path, &chrome_trace(&profile).to_string())?;
        }
        Ok(Some(report.json()))
    }

    /// Writes what came of it.
    pub fn tell(&self, said: &Said, prompt: &str, model: &str, gemma: &Gemma) -> anyhow::Result<()> {
        if let (Some(capture), Some(recording)) = (&self.capture, &said.recording) {
            dump::save(&capture.file, &recording.tensors(), &BTreeMap::new())?;
        }
        if self.trace {
            table(&said.traces, gemma)?;
        }
        if let Some(path) = &self.trace_html {
            let experts = gemma.config().moe.map_or(0, |m| m.experts);
            write_file(path, &html(model, prompt, &said.traces, experts, gemma.tokenizer()))?;
        }
        Ok(())
    }
}

pub(crate) fn write_file(path: &Path, page: &str) -> anyhow::Result<()> {
    std::fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))
}

fn table(traces: &[TokenTrace], gemma: &Gemma) -> anyhow::Result<()> {
    let piece = |id: u32| gemma.tokenizer().piece(id).map_or_else(|_| format!("#{id}"), |p| format!("{p:?}"));
    let mut err = stderr().lock();
    writeln!(err, "position  token             probability  entropy  likeliest others; experts by layer")?;
    for t in traces {
        let others = t.alternatives.iter().filter(|a| a.token != t.token).take(3);
        let others: Vec<String> =
            others.map(|a| format!("{} {:.1} %", piece(a.token), 100.0 * a.probability)).collect();
        let layer = |chosen: &Vec<(usize, f32)>| {
            chosen.iter().map(|(e, _)| e.to_string()).collect::<Vec<_>>().join("+")
        };
        let experts: Vec<String> = t.experts.iter().map(layer).collect();
        let experts = if experts.is_empty() { String::new() } else { format!("; {}", experts.join(" ")) };
        writeln!(
            err,
            "{:>8}  {:<16}  {:>9.2} %  {:>7.4}  {}{experts}",
            t.position,
            piece(t.token),
            100.0 * t.probability,
            t.entropy,
            others.join(", "),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captures_are_a_file_and_a_spec() {
        let c = capture("out.safetensors,layers=0+3-4,what=hidden+routes,positions=generated").unwrap();
        assert_eq!(c.file, Path::new("out.safetensors"));
        assert_eq!(c.spec.layers.list(6).unwrap(), [0, 3, 4]);
        assert_eq!(capture("file=x").unwrap().spec, CaptureSpec::default());
        for bad in ["", "layers=1", "x,layers=9-3", "x,what=thoughts", "x,positions=first", "x,loud=1", "x,y"]
        {
            assert!(capture(bad).is_err(), "{bad}");
        }
    }
}
