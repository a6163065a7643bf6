//! The engine's pace on real devices: a long prompt among running streams, and what the engine itself costs.

mod common;

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::client::{Pending, drawn, greedy, submit};
use common::drive::{Random, tiny_folder};
use common::{On, Setup, runner};
use lapidary::LoadOptions;
use lapidary::service::{
    CompletionPrompt, CompletionRequest, Format, GenerationParams, Service, ServiceOptions,
};
use lapidary_cpu::{Compute, CpuBackend, CpuOptions};
use lapidary_engine::{Engine, EngineEvent, EngineOptions, EngineRequest, Runner};
use lapidary_model::{BuildOptions, Config, EmbedScale, Limits, Model};
use lapidary_ops::{Backend, KvFormat};
use lapidary_reference::tiny::Variant;
use lapidary_weights::Checkpoint;
use serde_json::json;

fn ids(seed: u64, len: usize, vocab: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| 3 + (random.next() % (vocab as u64 - 30)) as u32).collect()
}

/// Streams, a long prompt in their midst, and what became of both.
struct Race {
    /// The longest time between two tokens of any stream while the prompt was fed.
    gap: Duration,
    /// From the prompt's submission to its first token.
    first: Duration,
}

fn race(engine: &Engine, streams: usize, prompt: usize) -> Race {
    let vocab = engine.config().vocab;
    let pending: Vec<_> = (0..streams)
        .map(|i| {
            let (to, events) = channel();
            let mut request = greedy(&ids(i as u64, 20 + 7 * i, vocab), 100_000);
            request.sink = Box::new(move |event| match event {
                EngineEvent::Token(_) => to.send(Instant::now()).is_ok(),
                _ => true,
            });
            (engine.submit(request).unwrap(), events)
        })
        .collect();
    // All of them run, and the pace is known.
    for (_, events) in &pending {
        (0..20).for_each(|_| {
            events.recv().unwrap();
        });
    }
    let begun = Instant::now();
    submit(engine, greedy(&ids(99, prompt, vocab), 1)).wait();
    let first = begun.elapsed();
    let mut gap = Duration::ZERO;
    for (ticket, events) in pending {
        ticket.cancel();
        let mut last = begun;
        for time in events.iter().filter(|time| (begun..begun + first).contains(time)) {
            gap = gap.max(time - last);
            last = time;
        }
        gap = gap.max((begun + first).saturating_duration_since(last));
    }
    Race { gap, first }
}

#[test]
fn c04_streams_go_on_while_a_long_prompt_is_fed() {
    let setup = Setup { rows: 512, head_rows: 9, context: 6000, ..Setup::default() };
    let start = |max_stall| {
        let runner = runner(&tiny_folder(Variant::Dense), On::Cpu { threads: 1 }, setup);
        let mut options = EngineOptions::new(&runner, setup.context, 9);
        options.scheduler.max_stall = max_stall;
        Engine::start(runner, options).unwrap()
    };
    let alone = race(&start(Duration::from_secs(1000)), 0, 5900).first;
    // Far less than the prompt takes, far more than the machine's moods.
    let bound = alone / 8;
    let race = race(&start(bound), 8, 5900);
    println!("alone {alone:.0?}; bound {bound:.0?}: gap {:.0?}, first token {:.0?}", race.gap, race.first);
    assert!(race.gap < alone / 2, "a gap of {:?} where the prompt takes {alone:?}", race.gap);
}

/// Host time by step while `streams` streams run.
fn cost(engine: &Engine, requests: impl Iterator<Item = EngineRequest>) -> (Duration, Duration, usize) {
    let pending: Vec<Pending> = requests.map(|request| submit(engine, request)).collect();
    pending.iter().for_each(|p| drop(p.event()));
    let before = engine.stats();
    let tokens: usize = pending.into_iter().map(|p| p.wait().usage.answer_tokens).sum();
    let after = engine.stats();
    let steps = (after.scheduler.steps - before.scheduler.steps).max(1) as u32;
    let (host, device) = (after.host_time - before.host_time, after.device_time - before.device_time);
    (host / steps, device / steps, tokens)
}

fn costs(engine: &Engine, streams: u64, tokens: usize) {
    let vocab = engine.config().vocab;
    for (name, sampled) in [("greedy", false), ("drawn", true)] {
        let (host, device, tokens) = cost(
            engine,
            (0..streams).map(|i| {
                let prompt = ids(i, 20, vocab);
                if sampled { drawn(&prompt, tokens, i) } else { greedy(&prompt, tokens) }
            }),
        );
        let share = 100.0 * host.as_secs_f64() / (host + device).as_secs_f64();
        println!(
            "{streams} {name} streams, {tokens} tokens: {host:.1?} a step beside {device:.1?} ({share:.1} %)"
        );
    }
}

#[test]
fn a_step_costs_the_engine_microseconds() {
    let setup = Setup { rows: 64, head_rows: 16, context: 300, ..Setup::default() };
    let runner = runner(&tiny_folder(Variant::Dense), On::Cpu { threads: 1 }, setup);
    let options = EngineOptions::new(&runner, setup.context, 16);
    let engine = Engine::start(runner, options).unwrap();
    costs(&engine, 16, 200);
    let stats = engine.stats();
    let step = stats.host_time / stats.scheduler.steps as u32;
    assert!(step < Duration::from_millis(5), "{step:?} a step");
}

/// Figures on a real model, where one is named.
#[test]
fn figures_of_gemma3_270m() {
    let Some(path) = std::env::var_os("LAPIDARY_GEMMA3_GGUF") else {
        println!("skipped: LAPIDARY_GEMMA3_GGUF does not say where gemma-3-270m-q4_k_m.gguf is");
        return;
    };
    let start = |context: usize, sequences: usize| {
        let runner = real(Path::new(&path), context);
        let mut options = EngineOptions::new(&runner, context, sequences);
        options.scheduler.max_stall = Duration::from_millis(200);
        Engine::start(runner, options).unwrap()
    };
    let engine = start(2048, 16);
    for streams in [1, 4, 16] {
        costs(&engine, streams, 64);
    }
    drop(engine);
    for streams in [1, 4, 16] {
        schema_costs(Path::new(&path), streams);
    }
    let engine = start(32_768, 2);
    let race = race(&engine, 8, 30_000);
    println!("30,000 tokens among 8 streams: gap {:.0?}, first token {:.1?}", race.gap, race.first);
    assert!(race.gap < Duration::from_secs(2));
}

/// What masks cost: greedy completions through the service, free ones and ones under a JSON schema.
fn schema_costs(path: &Path, streams: usize) {
    let load = LoadOptions { context: Some(512), ..LoadOptions::default() };
    let options = ServiceOptions { running: 16, sequences: 16, ..ServiceOptions::default() };
    let service = Service::start(&Checkpoint::open(path).unwrap(), &load, options, &mut |_| {}).unwrap();
    let text = json!({ "type": "string" });
    let schema = json!({ "type": "object", "required": ["name", "places"], "properties": {
        "name": text, "places": { "type": "array", "minItems": 9, "items": text } } });
    for (name, format) in
        [("free", Format::Text), ("schema", Format::JsonSchema { schema, name: None, strict: true })]
    {
        let request = || CompletionRequest {
            prompt: CompletionPrompt::Text("A person and the places they have been to, as JSON: ".into()),
            format: format.clone(),
            generation: GenerationParams {
                temperature: Some(0.0),
                max_tokens: Some(64),
                ignore_eos: true,
                ..GenerationParams::default()
            },
            ..CompletionRequest::default()
        };
        // The first compiles the grammar.
        service.complete(request()).unwrap().remove(0).collect_blocking().unwrap();
        let before = service.stats().engine;
        let replies: Vec<_> = (0..streams).map(|_| service.complete(request()).unwrap().remove(0)).collect();
        replies.into_iter().for_each(|reply| drop(reply.collect_blocking().unwrap()));
        let after = service.stats().engine;
        let steps = (after.scheduler.steps - before.scheduler.steps).max(1) as u32;
        let host = (after.host_time - before.host_time) / steps;
        let device = (after.device_time - before.device_time) / steps;
        println!("{streams} {name} streams: {host:.1?} a step beside {device:.1?}");
    }
}

fn real(path: &Path, context: usize) -> Runner {
    let checkpoint = Checkpoint::open(path).unwrap();
    let options = CpuOptions { compute: Compute::Fast, ..CpuOptions::default() };
    let mut backend: Box<dyn Backend> = Box::new(CpuBackend::new(options).unwrap());
    let limits = Limits { rows: 512, head_rows: 16 };
    let options = BuildOptions { limits, embed_scale: EmbedScale::F32, requantise: Default::default() };
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let model = Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {}).unwrap();
    Runner::new(model, backend, [KvFormat::F16; 2], context).unwrap()
}
