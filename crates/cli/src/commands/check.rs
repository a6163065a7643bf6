//! `lapidary check`

use std::io::{Write, stdout};
use std::process::ExitCode;

use lapidary::check::{self, Finding, Level};
use lapidary::{Checkpoint, Config};
use serde_json::json;

use crate::load;
use crate::model_args::{ComputeFlag, LoadArgs, ModelArgs};
use crate::progress::{Bar, Unit};
use crate::source;

/// Check that this machine and a model are ready.
///
/// Checks the machine and, with a model, that it fits and computes: kernels are really run. Prints a line OK, WARN or FAIL
/// for each thing, and a verdict; the exit code is 0 for READY and 1 for NOT READY.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lapidary check                       the machine\n  \
lapidary check -m MODEL --full       also every value of the model's files, which reads them whole")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub compute: ComputeFlag,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Read and validate every tensor of the model
    #[arg(long)]
    pub full: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut report = Report { findings: Vec::new(), json: args.json };
    report.all(check::host())?;
    report.all(args.load.device.device.findings())?;
    match source::open(&args.model) {
        Ok(checkpoint) => {
            report.add(Finding::new(Level::Ok, "files", files(&checkpoint)))?;
            model(args, &checkpoint, &mut report)?;
        }
        Err(e) => report.add(Finding::failed("files", &crate::failure::line(&e)))?,
    }
    report.verdict()
}

fn files(checkpoint: &Checkpoint) -> String {
    let size = crate::report::bytes(checkpoint.total_bytes());
    format!("{}: {size}, headers are sound", checkpoint.path().display())
}

/// Everything that needs a model. A failure of one part does not keep the others from being looked at, as far as they do
/// not build on it.
fn model(args: &Args, checkpoint: &Checkpoint, report: &mut Report) -> anyhow::Result<()> {
    let options = args.load.options(args.compute.compute);
    let config = match Config::from_checkpoint(checkpoint) {
        Ok(config) => config,
        Err(e) => return report.add(Finding::failed("config", &crate::failure::line(&e.into()))),
    };
    for note in checkpoint.notes().into_iter().chain(config.notes.iter().cloned()) {
        report.add(Finding::new(Level::Warn, "note", note))?;
    }
    report.add(check::inventory(checkpoint, &config))?;
    let plan = load::plan(checkpoint, &config, &options, &args.load.device);
    report.add(check::fit(&plan, options.context_for(&config), load::memory(&args.load.device)))?;
    if args.full {
        let mut bar = Bar::new("reading", Unit::Bytes);
        let findings = check::tensors(checkpoint, &mut |done, total| bar.at(done, total));
        drop(bar);
        report.all(findings)?;
    }
    if report.failed() {
        return Ok(());
    }
    let mut stepper = match load::stepper(checkpoint, &options, &args.load.device) {
        Ok(stepper) => stepper,
        Err(e) => return report.add(Finding::failed("load", &crate::failure::line(&e))),
    };
    let formats: Vec<_> = checkpoint.formats().iter().map(|f| f.format).collect();
    report.all(check::device(&stepper.runner().report(), &formats))?;
    report.add(check::forward(&mut stepper))?;
    #[cfg(feature = "pebble")]
    if args.model.model.is_none() {
        report.add(check::forward_sums(&mut stepper, &check::BUILTIN_SUMS))?;
    }
    // Two slots of two windows and a bit: both groups' pages wrap and border on one another.
    let context = (2 * config.window + 33).min(options.context_for(&config));
    report.add(check::slots(&mut stepper, 2, context))
}

struct Report {
    findings: Vec<Finding>,
    json: bool,
}

impl Report {
    /// Prints at once, since later parts may take long.
    fn add(&mut self, finding: Finding) -> anyhow::Result<()> {
        if !self.json {
            let Finding { level, what, detail } = &finding;
            writeln!(stdout().lock(), "{level:<5}{what:<11}{}", detail.replace(['\n', '\r'], " "))?;
        }
        self.findings.push(finding);
        Ok(())
    }

    fn all(&mut self, findings: Vec<Finding>) -> anyhow::Result<()> {
        findings.into_iter().try_for_each(|f| self.add(f))
    }

    fn failed(&self) -> bool {
        self.findings.iter().any(|f| f.level == Level::Fail)
    }

    fn verdict(&self) -> anyhow::Result<ExitCode> {
        let ready = !self.failed();
        let verdict = if ready { "READY" } else { "NOT READY" };
        let mut out = stdout().lock();
        match self.json {
            true => {
                let findings: Vec<_> = self
                    .findings
                    .iter()
                    .map(|f| json!({"level": f.level.to_string(), "what": f.what, "detail": f.detail}))
                    .collect();
                writeln!(out, "{:#}", json!({"verdict": verdict, "ready": ready, "findings": findings}))?;
            }
            false => writeln!(out, "{verdict}")?,
        }
        Ok(if ready { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}
