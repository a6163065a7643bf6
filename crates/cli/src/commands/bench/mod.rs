//! `lapidary bench`

mod gpu;
mod hooks;

use std::collections::BTreeMap;
use std::io::{Write, stdout};
use std::time::{Duration, Instant};

use lapidary::bandwidth::{ReadBandwidth, read_bandwidth};
use lapidary::plan::MemoryPlan;
use lapidary::timings::{Profile, Report};
use lapidary::{Checkpoint, Config, TapPoint};
use lapidary_engine::{Heads, Prompt, Stepper};
use serde_json::{Value, json};

use self::hooks::Cost;
use crate::commands::bench_serve;
use crate::load;
use crate::model_args::{ComputeFlag, DeviceArgs, ModelArgs};
use crate::report::{Align, Table, bytes, count, median};
use crate::source;

/// Measure prompt and decode speed.
///
/// Measures how many tokens a second a model reads (pp, prompt processing) and writes (tg, text generation), and how near
/// writing is to the memory's speed: each written token reads the weights once, so bandwidth / bytes is the limit.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  lapidary bench -m MODEL -p 512 -n 128 -t 1,2,4 -r 5\n  lapidary bench -m MODEL -p 0 -n 128 -d 0,4096\n\n\
t/s is the median of the repetitions, with the slowest and the fastest beside it. One more run, not counted, comes first."
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompt lengths to measure, separated by commas; 0 for none
    #[arg(short = 'p', long, value_name = "N", value_delimiter = ',', default_value = "512", value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub prompt: Vec<u32>,
    /// Numbers of tokens to write, separated by commas; 0 for none
    #[arg(short = 'n', long, value_name = "N", value_delimiter = ',', default_value = "128", value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub generate: Vec<u32>,
    /// Numbers of sequences that write side by side, one token each in a step, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub batch: Vec<u16>,
    /// Numbers of tokens that are read before each test starts and not timed, separated by commas
    #[arg(short = 'd', long, value_name = "N", value_delimiter = ',', default_value = "0", value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub depth: Vec<u32>,
    /// Thread counts, separated by commas; as many as cores may be used when not given
    #[arg(short = 't', long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Vec<u16>,
    /// Repetitions of each test
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: u32,
    /// Most prompt tokens in one batch
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub chunk: u32,
    /// Run prompts through every layer for every token, as engines without the shortcut do: nobody reads what layers behind
    /// the last key and value write make of tokens whose logits aren't wanted, so they are left out otherwise
    #[arg(long)]
    pub no_tail_skip: bool,
    #[command(flatten)]
    pub compute: ComputeFlag,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Measure a model of real shapes and random weights that are made on the GPU, such as 31b:fp8
    #[arg(long, value_name = "SIZE:FORMAT", conflicts_with = "model")]
    pub synthetic: Option<gpu::Synthetic>,
    /// Tell where the time of each test went; the clocks take a little of it
    #[arg(long)]
    pub profile: bool,
    /// Measure as well what it costs to capture and to steer this layer of every row
    #[arg(long, value_name = "LAYER")]
    pub hooks: Option<u16>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// One line of the table.
struct Measured {
    threads: usize,
    test: Test,
    /// Tokens a second of each repetition.
    rates: Vec<f64>,
    /// Bytes a second that memory was read with beside each repetition, where one sequence writes.
    bandwidths: Vec<f64>,
    profile: Option<Report>,
}

impl Measured {
    /// Tokens a second at which `bytes` a token take all that memory gives, and the share of it that was reached; `None` where
    /// it was not measured. Both are of the middle repetition: a shared machine's memory is twice as fast at one moment as
    /// at the next, so each repetition is held to what was read beside it.
    fn limit(&self, bytes: u64) -> Option<(f64, f64)> {
        let limits: Vec<f64> = self.bandwidths.iter().map(|b| b / bytes as f64).collect();
        let shares: Vec<f64> = self.rates.iter().zip(&limits).map(|(rate, limit)| rate / limit).collect();
        (!limits.is_empty()).then(|| (median(&limits), median(&shares)))
    }
}

/// One test: what is timed, and after how many tokens it starts.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Test {
    work: Work,
    depth: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Prompt(usize),
    Generate { tokens: usize, sequences: usize },
}

impl Test {
    fn name(self) -> String {
        let name = match self.work {
            Work::Prompt(n) => format!("pp{n}"),
            Work::Generate { tokens, sequences: 1 } => format!("tg{tokens}"),
            Work::Generate { tokens, sequences } => format!("tg{tokens} x{sequences}"),
        };
        if self.depth == 0 { name } else { format!("{name} @ d{}", self.depth) }
    }
}

/// What else can be measured.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Serve(bench_serve::Args),
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(Command::Serve(args)) = &args.command {
        return bench_serve::run(args);
    }
    if matches!(args.device.device, lapidary::Device::Cuda { .. }) {
        return gpu::run(args);
    }
    if args.synthetic.is_some() {
        anyhow::bail!(
            "--synthetic makes its weights on a GPU: add --device cuda; `lapidary synth` writes a file for the processor"
        );
    }
    let checkpoint = source::open(&args.model)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let prompts = args.prompt.iter().filter(|&&n| n > 0).map(|&n| Work::Prompt(n as usize));
    let side_by_side = |&n: &u32| {
        let work = move |&s: &u16| Work::Generate { tokens: n as usize, sequences: s.into() };
        args.batch.iter().map(work)
    };
    let generates = args.generate.iter().filter(|&&n| n > 0).flat_map(side_by_side);
    let works: Vec<Work> = prompts.chain(generates).collect();
    let most_sequences = args.batch.iter().copied().max().unwrap_or(1) as usize;
    let at = |&depth: &u32| works.iter().map(move |&work| Test { work, depth: depth as usize });
    let tests: Vec<Test> = args.depth.iter().flat_map(at).collect();
    let longest = args.prompt.iter().chain(&args.generate).copied().max().unwrap_or(0) as usize;
    let deepest = args.depth.iter().copied().max().unwrap_or(0) as usize;
    let mut options = args.device.options(args.compute.compute);
    // A batch has no more rows than the context has positions.
    options.context = Some((deepest + longest + 1).max(most_sequences));
    options.chunk = (args.chunk as usize).max(most_sequences);
    options.head_rows = options.head_rows.max(most_sequences);
    let plan = load::plan(&checkpoint, &config, &options, &args.device);
    let threads: Vec<usize> = match args.threads.is_empty() {
        true => vec![lapidary::host::available_cores()],
        false => args.threads.iter().map(|&t| t.into()).collect(),
    };
    let (mut measured, mut costs, mut memory) = (Vec::new(), Vec::new(), BTreeMap::new());
    let mut level = String::new();
    for &threads in &threads {
        options.threads = Some(threads);
        let mut reads = Vec::new();
        let mut stepper = load::stepper(&checkpoint, &options, &args.device)?;
        stepper.settle()?;
        if level.is_empty() {
            load::tell_notes(&stepper);
        }
        level = stepper.runner().report().level;
        for &test in &tests {
            // The first run pays for page faults and warms caches.
            rate(&mut stepper, test, args)?;
            let mut steps = Vec::new();
            let (mut rates, mut total, mut rest) = (Vec::new(), Duration::ZERO, Duration::ZERO);
            // Several sequences share what is read of the weights, and not all of it where experts are chosen.
            let limited = matches!(test.work, Work::Generate { sequences: 1, .. });
            let first = reads.len();
            reads.extend(limited.then(|| read_bandwidth(threads)));
            for _ in 0..args.repetitions {
                let (rate, profile) = rate(&mut stepper, test, args)?;
                rates.push(rate);
                if let Some(profile) = profile {
                    steps.extend(profile.steps);
                    (total, rest) = (total + profile.total, rest + profile.rest);
                }
                reads.extend(limited.then(|| read_bandwidth(threads)));
            }
            let around = reads[first..].windows(2);
            let bandwidths =
                around.map(|two| (two[0].bytes_per_second + two[1].bytes_per_second) / 2.0).collect();
            let profile = args.profile.then(|| Report::new(&Profile { steps, total, rest }));
            measured.push(Measured { threads, test, rates, bandwidths, profile });
        }
        if let Some(layer) = args.hooks {
            for &depth in &args.depth {
                let at = (threads, depth as usize);
                costs.push(Cost::measure(&mut stepper, at, longest.max(1), layer.into())?);
            }
        }
        drop(stepper);
        if reads.is_empty() {
            reads.push(read_bandwidth(threads));
        }
        reads.sort_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
        memory.entry(threads).or_insert(reads[reads.len() / 2]);
    }
    let mut out = stdout().lock();
    let about = About { name: source::name(&args.model), checkpoint: &checkpoint, plan: &plan, args, level };
    match args.json {
        true => {
            let mut value = about.json(&measured, &memory);
            if let Some(layer) = args.hooks {
                value["hooks"] = costs.iter().map(|c| c.json(layer)).collect();
            }
            writeln!(out, "{value:#}")?;
        }
        false => {
            out.write_all(about.text(&measured, &memory).as_bytes())?;
            if let Some(layer) = args.hooks {
                costs.iter().try_for_each(|c| out.write_all(c.text(layer).as_bytes()))?;
            }
        }
    }
    Ok(())
}

/// Tokens a second of one run, and its profile where one is wanted.
fn rate(
    stepper: &mut Stepper,
    test: Test,
    args: &Args,
) -> Result<(f64, Option<Profile>), lapidary_engine::Error> {
    start_at(stepper, test.depth)?;
    match test.work {
        Work::Prompt(n) => {
            let prompt = Prompt::from(&ids(stepper, n)[..]);
            // Whoever reads the last layer's output reads every row of it.
            let last = stepper.model().layers.len() - 1;
            let whole = [TapPoint::LayerOut(last)];
            stepper.set_capture(if args.no_tail_skip { &whole } else { &[] });
            if args.profile {
                stepper.start_profile(false)?;
            }
            let start = Instant::now();
            let run = stepper.prefill_each(&prompt, Heads::Last, &mut |_| {});
            let seconds = start.elapsed().as_secs_f64();
            stepper.set_capture(&[]);
            let profile = stepper.take_profile();
            run?;
            Ok((n as f64 / seconds, profile))
        }
        Work::Generate { tokens, sequences } if sequences > 1 => {
            Ok((side_by_side(stepper, test.depth, tokens, sequences)?, None))
        }
        Work::Generate { tokens: n, .. } => {
            let bos = stepper.model().config.bos;
            let mut token = stepper.decode_step(bos, test.depth)?;
            if args.profile {
                stepper.start_profile(false)?;
            }
            let start = Instant::now();
            for position in test.depth + 1..=test.depth + n {
                token = stepper.decode_step(token, position)?;
            }
            let seconds = start.elapsed().as_secs_f64();
            Ok((n as f64 / seconds, stepper.take_profile()))
        }
    }
}

/// Tokens a second of all sequences together, each of its own first token.
fn side_by_side(
    stepper: &mut Stepper,
    depth: usize,
    tokens: usize,
    sequences: usize,
) -> Result<f64, lapidary_engine::Error> {
    let context = depth + tokens + 1;
    stepper.alloc_slots(sequences, context)?;
    let slots: Vec<usize> = (0..sequences).collect();
    let mut next = ids(stepper, sequences);
    for &slot in slots.iter().filter(|_| depth > 0) {
        stepper.prefill_slot(slot, &ids(stepper, depth))?;
    }
    let mut step = |position: usize| {
        let fed = next.clone();
        stepper.decode_batch(&fed, &vec![position; sequences], &slots, &mut next)
    };
    step(depth)?;
    let start = Instant::now();
    for position in depth + 1..=depth + tokens {
        step(position)?;
    }
    Ok((tokens * sequences) as f64 / start.elapsed().as_secs_f64())
}

/// Goes back to where the last repetition of the same depth began, or reads as many tokens anew.
fn start_at(stepper: &mut Stepper, depth: usize) -> Result<(), lapidary_engine::Error> {
    if stepper.rewind(depth).is_ok() {
        return Ok(());
    }
    stepper.reset();
    let prompt = Prompt::from(&ids(stepper, depth)[..]);
    stepper.prefill_each(&prompt, Heads::None, &mut |_| {})
}

/// The ids do not matter for the time; different ones keep experts and table rows from being the same.
fn ids(stepper: &Stepper, n: usize) -> Vec<u32> {
    let config = &stepper.model().config;
    let vocab = config.vocab.min(config.per_layer.map_or(usize::MAX, |p| p.vocab));
    (0..n).map(|i| ((i * 7919 + 13) % vocab) as u32).collect()
}

/// What the figures belong to.
struct About<'a> {
    name: String,
    checkpoint: &'a Checkpoint,
    plan: &'a MemoryPlan,
    args: &'a Args,
    level: String,
}

impl About<'_> {
    /// Bytes that a token reads on average where one sequence writes: weights, and the keys and values that are there half
    /// way.
    fn bytes_of(&self, test: Test) -> Option<u64> {
        let Work::Generate { tokens, .. } = test.work else { return None };
        Some(self.plan.weight_bytes_per_token + self.plan.kv_bytes_per_token(test.depth + tokens / 2))
    }

    fn formats(&self) -> String {
        let mut largest: Vec<_> = self.plan.weights.iter().collect();
        largest.sort_by_key(|w| std::cmp::Reverse(w.bytes));
        largest.first().map_or("none".into(), |w| w.format.to_string())
    }

    fn text(&self, measured: &[Measured], memory: &BTreeMap<usize, ReadBandwidth>) -> String {
        let mut text = format!(
            "{}: {} parameters, {} of weights, mostly {}, compute {}, level {}\n",
            self.name,
            count(self.checkpoint.parameters()),
            bytes(self.plan.weight_bytes()),
            self.formats(),
            self.args.compute.compute.name(),
            self.level
        );
        let mut table = Table::new(&[
            ("threads", Align::Right),
            ("test", Align::Left),
            ("t/s", Align::Right),
            ("slowest", Align::Right),
            ("fastest", Align::Right),
            ("limit t/s", Align::Right),
            ("share", Align::Right),
        ]);
        for m in measured {
            let limited = self.bytes_of(m.test).and_then(|bytes| m.limit(bytes));
            let (limit, share) = limited.map_or_else(Default::default, |(limit, share)| {
                (format!("{limit:.2}"), format!("{:.0} %", 100.0 * share))
            });
            table.row(vec![
                m.threads.to_string(),
                m.test.name(),
                format!("{:.2}", median(&m.rates)),
                format!("{:.2}", least(&m.rates)),
                format!("{:.2}", most(&m.rates)),
                limit,
                share,
            ]);
        }
        text += &table.render();
        for m in measured {
            if let Some(profile) = &m.profile {
                text += &format!(
                    "{} with {} threads, where the time went:\n{}",
                    m.test.name(),
                    m.threads,
                    profile.text()
                );
            }
        }
        for b in memory.values() {
            text += &format!(
                "memory, {} {}: {:.2} GB/s read, over {}\n",
                b.threads,
                if b.threads == 1 { "thread" } else { "threads" },
                b.bytes_per_second / 1e9,
                bytes(b.bytes as u64)
            );
        }
        text += &format!("a written token reads {} of weights\n", bytes(self.plan.weight_bytes_per_token));
        if lapidary::host::largest_cache().is_some_and(|c| self.plan.weight_bytes_per_token < c) {
            text += "the weights fit the processor's cache, so the limit is no limit here\n";
        }
        text
    }

    fn json(&self, measured: &[Measured], memory: &BTreeMap<usize, ReadBandwidth>) -> Value {
        let tests: Vec<Value> = measured
            .iter()
            .map(|m| {
                let mut test = json!({
                    "threads": m.threads,
                    "test": m.test.name(),
                    "tokens_per_second": median(&m.rates),
                    "slowest": least(&m.rates),
                    "fastest": most(&m.rates),
                    "rates": m.rates,
                });
                if let Some(profile) = &m.profile {
                    test["profile"] = profile.json();
                }
                if let Some(bytes) = self.bytes_of(m.test)
                    && let Some((limit, share)) = m.limit(bytes)
                {
                    test["bytes_per_token"] = json!(bytes);
                    test["limit_tokens_per_second"] = json!(limit);
                    test["share_of_limit"] = json!(share);
                }
                test
            })
            .collect();
        let memory: Vec<Value> = memory
            .values()
            .map(|b| json!({"threads": b.threads, "bytes_per_second": b.bytes_per_second, "bytes": b.bytes}))
            .collect();
        json!({
            "model": self.name,
            "parameters": self.checkpoint.parameters(),
            "weight_bytes": self.plan.weight_bytes(),
            "weight_bytes_per_token": self.plan.weight_bytes_per_token,
            "format": self.formats(),
            "compute": self.args.compute.compute.name(),
            "level": self.level,
            "chunk": self.args.chunk,
            "tail_skip": !self.args.no_tail_skip,
            "repetitions": self.args.repetitions,
            "tests": tests,
            "read_bandwidth": memory,
        })
    }
}

fn least(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(f64::INFINITY, f64::min)
}

fn most(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}
