//! The memory plan of a GPU against what the backend holds after passes of every size.
#![cfg(feature = "cuda")]

mod common;

use std::ops::ControlFlow;
use std::time::Instant;

use lapidary::plan::{MemoryPlan, PlanOptions};
use lapidary::synth::{Mix, Size, SynthOptions, write};
use lapidary::{Checkpoint, Compute, Config, Device, KvFormat, LoadOptions, Requantise, load_stepper};
use lapidary_formats::Format;
use lapidary_model::Limits;

#[test]
fn what_is_held_on_a_gpu_is_within_the_plan() {
    if common::gpu().is_none() {
        return;
    }
    let cases = [
        (Size::Dense31b, Mix::Q8_0, 2, KvFormat::Bf16, Requantise::default()),
        (Size::Moe26b, Mix::Q4_0, 2, KvFormat::Fp8, Requantise::default()),
        (Size::E2b, Mix::Q4KM, 25, KvFormat::Bf16, Requantise::default()),
        (Size::Moe26b, Mix::Bf16, 1, KvFormat::Bf16, Requantise::fp8().with_fp8_head()),
    ];
    for (size, mix, layers, kv, requantise) in cases {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        let options = SynthOptions { layers: Some(layers), seed: 7, ..SynthOptions::default() };
        write(size, mix, &path, &options, &mut |_, _| {}).expect("the file is written");
        let checkpoint = Checkpoint::open(&path).expect("the file opens");
        for compute in [Compute::Fast, Compute::F32] {
            let options = LoadOptions {
                context: Some(331),
                chunk: 171,
                compute,
                kv: Some(kv),
                requantise,
                device: Device::Cuda { ordinal: 0 },
                ..LoadOptions::default()
            };
            let config = Config::from_checkpoint(&checkpoint).expect("config is read");
            let limits = Limits { rows: options.chunk, head_rows: options.head_rows };
            let (kv, device) = ([kv; 2], options.device);
            let (context, sequences, memory) = (331, 1, None);
            let plan = PlanOptions { context, sequences, limits, kv, compute, device, memory, requantise };
            let plan = MemoryPlan::new(&checkpoint, &config, &plan);
            let mut s = load_stepper(&checkpoint, &options, &mut |_| {}).expect("the model loads");
            let loaded = s.runner().memory();
            s.prefill(&(0..300).map(|i| i * 7919 % 262_144).collect::<Vec<u32>>()).expect("the prompt runs");
            for _ in 0..4 {
                s.decode_step(5, s.cursor()).expect("the step runs");
            }
            let held = s.runner().memory();
            let what = format!("{} {} {compute:?}", size.name(), mix.name());
            println!("{what}: held {held:?}, planned {} {:?}", plan.device_bytes, plan.total());
            assert_eq!(loaded.kv as u64, plan.kv_bytes(), "{what}: keys and values");
            // Arenas take memory in blocks of 64 MiB, which the kernels' own share is to cover.
            let block = 64u64 << 20;
            let weights = held.weights as u64;
            let planned = plan.weight_bytes();
            assert!(
                weights <= planned + block && weights >= planned - planned / 50,
                "{what}: weights {planned}"
            );
            let rest = held.activations as u64;
            assert!(
                rest + weights <= planned + plan.activation_bytes() + plan.device_bytes,
                "{what}: the rest"
            );
            assert!(held.weights + held.activations + held.kv <= plan.total() as usize, "{what}");
        }
    }
}

/// With its per-layer table in the host's memory a model says what it says with all on the device, which holds so much less.
#[test]
fn l04_the_per_layer_table_in_the_hosts_memory_changes_no_token() {
    if common::gpu().is_none() {
        return;
    }
    let prompt: Vec<u32> = (0..300).map(|i| i * 7919 % 262_144).collect();
    for format in [Format::Bf16, Format::Q4K, Format::Nvfp4] {
        let (mut kept, mut rates, mut said) = (Vec::new(), Vec::new(), Vec::new());
        for tables_on_host in [false, true] {
            let options = LoadOptions {
                context: Some(700),
                chunk: 171,
                tables_on_host,
                random_weights: Some(format),
                ..LoadOptions::default()
            };
            let mut s = common::random_on_gpu(Size::E2b, None, options);
            let mut tokens = vec![s.prefill(&prompt).expect("the prompt runs")];
            let first = tokens[0];
            let clock = Instant::now();
            let steps = 300;
            s.decode_many(first, steps, &mut |t| {
                tokens.push(t[0]);
                ControlFlow::Continue(())
            })
            .expect("the steps run");
            rates.push(steps as f64 / clock.elapsed().as_secs_f64());
            kept.push(s.runner().memory());
            said.push(tokens);
        }
        let [device, host] = [kept[0], kept[1]];
        println!("E2B {format}: {:.0} tokens/s, with the table on the host {:.0}", rates[0], rates[1]);
        assert!(said[0] == said[1], "{format}: other tokens");
        assert_eq!(device.host, 0, "{format}");
        // Small parts of a table lie in blocks of 64 MiB with others.
        let gone = device.weights - host.weights;
        assert!(gone <= host.host && gone + (64 << 20) >= host.host, "{format}: {gone} of {}", host.host);
        assert!(host.host >= 262_144 * 35 * 256 / 2, "{format}: {}", host.host);
    }
}

/// A measurement: how fast weights get to the device, from a file in memory, and how soon the first token comes. Run with
/// `--ignored --nocapture`; `LAPIDARY_LOAD_LAYERS` says how many layers of 26B-A4B the file has (30 are 27 GB).
#[test]
#[ignore = "a measurement"]
fn how_fast_weights_load() {
    if common::gpu().is_none() {
        return;
    }
    let layers: usize = std::env::var("LAPIDARY_LOAD_LAYERS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    for (mix, layers, requantise) in
        [(Mix::Q8_0, layers, Requantise::default()), (Mix::Bf16, layers.div_ceil(4), Requantise::fp8())]
    {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        let options = SynthOptions { layers: Some(layers), seed: 7, ..SynthOptions::default() };
        let clock = std::time::Instant::now();
        write(Size::Moe26b, mix, &path, &options, &mut |_, _| {}).expect("the file is written");
        let written = clock.elapsed().as_secs_f64();
        let bytes = std::fs::metadata(&path).expect("it is there").len() as f64;
        for again in 0..2 {
            let clock = std::time::Instant::now();
            let checkpoint = Checkpoint::open(&path).expect("the file opens");
            let options = LoadOptions {
                context: Some(4096),
                requantise,
                device: Device::Cuda { ordinal: 0 },
                ..LoadOptions::default()
            };
            let mut s = load_stepper(&checkpoint, &options, &mut |_| {}).expect("the model loads");
            let loaded = clock.elapsed().as_secs_f64();
            s.prefill(&[5, 6, 7]).expect("the prompt runs");
            let first = clock.elapsed().as_secs_f64();
            println!(
                "26b {} {layers} layers, load {again}: {:.2} GB (written in {written:.1} s) in {loaded:.2} s, {:.2} GB/s; first token {:.2} s later",
                mix.name(),
                bytes / 1e9,
                bytes / 1e9 / loaded,
                first - loaded
            );
        }
    }
}
