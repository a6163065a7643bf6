//! Times of steps: their parts add up, nothing else changes, and the trace is one that viewers open.

mod common;

use std::path::Path;
use std::time::Instant;

use common::drive::{assert_bits, every_folder, name, score, tokens};
use common::{On, Setup, stepper};
use lapidary::timings::{Report, StepClass, chrome_trace};
use lapidary::{Gemma, LoadOptions};
use lapidary_engine::{Error, Heads, Prompt};
use lapidary_ops::{Batch, Phase, RowSpan};

fn gemma(threads: usize) -> Gemma {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pebble-moe-q8_0.gguf");
    let options =
        LoadOptions { context: Some(300), threads: Some(threads), chunk: 64, ..LoadOptions::default() };
    Gemma::load(file, &options).expect("the model loads")
}

#[test]
fn parts_add_up_to_a_whole_that_is_measured_for_itself() {
    for threads in [1, 2] {
        let mut g = gemma(threads);
        let mut options = g.answer_options(40);
        options.sampling.temperature = 1.0;
        options.ignore_eos = true;
        let start = Instant::now();
        g.start_profile(true).unwrap();
        let mut answer = g.complete(&"It was a rainy day. ".repeat(30), &options).unwrap();
        while answer.next_piece(&mut |_| {}).unwrap().is_some() {}
        let prompt = answer.prompt_tokens();
        let profile = g.take_profile().unwrap();
        let whole = start.elapsed();
        assert!(profile.total <= whole && whole.as_secs_f64() < profile.total.as_secs_f64() * 1.03 + 1e-3);
        let report = Report::new(&profile);
        let unaccounted = report.unaccounted();
        assert!(
            unaccounted.abs() < 0.03,
            "{threads} threads: {unaccounted} is not accounted for\n{}",
            report.text()
        );
        let classes: Vec<_> = report.classes.iter().map(|c| (c.class, c.steps, c.rows)).collect();
        // The last token is fed for its keys and values.
        let steps = (StepClass::Decode, 40, 40);
        assert_eq!(classes, [(StepClass::Prefill, prompt.div_ceil(64), prompt), steps], "{threads} threads");
        for class in &report.classes {
            let phases: f64 = class.phases.iter().map(|p| p.time.total.as_secs_f64()).sum();
            let device = class.device.total.as_secs_f64();
            assert!((phases - device).abs() <= 1e-6 * device, "phases are the whole of the pass");
            assert!(class.step.p50 <= class.step.p90 && class.step.p90 <= class.step.p99);
            let found: Vec<Phase> = class.phases.iter().map(|p| p.phase).collect();
            for phase in
                [Phase::Embed, Phase::Qkv, Phase::Attention, Phase::Router, Phase::Experts, Phase::Head]
            {
                assert!(found.contains(&phase), "{phase:?} is missing from {found:?}");
            }
            let calls = class.phases.iter().find(|p| p.phase == Phase::Qkv).unwrap().calls;
            assert_eq!(calls, 6 * class.steps as u64, "once a layer");
        }
        assert!(g.take_profile().is_none());
        let json = report.json();
        assert_eq!(json["classes"][1]["class"], "decode");
        assert!(json["classes"][1]["phases"][0]["seconds"]["p99"].as_f64().unwrap() > 0.0);
        assert!(report.text().contains("decode: 40 steps of 1.0 rows"));
        check_trace(&chrome_trace(&profile), profile.steps.len());
    }
}

/// Every event has what the format asks for, and on no track do two lie over each other.
fn check_trace(trace: &serde_json::Value, steps: usize) {
    let events = trace["traceEvents"].as_array().unwrap();
    let mut by_track: std::collections::BTreeMap<u64, Vec<(f64, f64)>> = std::collections::BTreeMap::new();
    let mut drawn = 0;
    for e in events {
        assert!(e["name"].is_string() && e["pid"] == 1, "{e}");
        match e["ph"].as_str().unwrap() {
            "M" => assert!(e["args"]["name"].is_string()),
            "X" => {
                let (ts, dur) = (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap());
                assert!(ts >= 0.0 && dur >= 0.0, "{e}");
                by_track.entry(e["tid"].as_u64().unwrap()).or_default().push((ts, ts + dur));
                drawn += usize::from(e["tid"] == 1);
            }
            other => panic!("event of kind {other}"),
        }
    }
    assert_eq!((by_track.len(), drawn), (3, steps));
    for (track, spans) in &mut by_track {
        spans.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        for pair in spans.windows(2) {
            // Times are whole nanoseconds, told in microseconds.
            assert!(pair[1].0 >= pair[0].1 - 1e-3, "track {track}: {pair:?} overlap");
        }
    }
}

#[test]
fn a_clock_changes_no_bit() {
    for folder in every_folder() {
        for threads in [1, 2] {
            let on = On::Cpu { threads };
            let mut s = stepper(&folder, on, Setup::default());
            let prompt = Prompt::from(&tokens(&s, 1, 30)[..]);
            let plain = score(&mut s, &prompt).0;
            s.reset();
            s.start_profile(false).unwrap();
            let (timed, outcomes) = score(&mut s, &prompt);
            let profile = s.take_profile().unwrap();
            assert_bits(&name(&folder), &timed, &plain);
            assert!(outcomes.iter().all(|o| o.timing.is_some()));
            assert!(profile.steps.iter().all(|s| s.spans.is_empty() && s.device > std::time::Duration::ZERO));
            // And off again.
            s.reset();
            assert!(score(&mut s, &prompt).1.iter().all(|o| o.timing.is_none()));
            // A pass without a head has no head phase.
            s.reset();
            s.start_profile(true).unwrap();
            s.prefill_each(&prompt, Heads::None, &mut |_| {}).unwrap();
            let steps = s.take_profile().unwrap().steps;
            assert_eq!(steps.len(), 1);
            assert_eq!(
                (steps[0].class, steps[0].rows, steps[0].phases[Phase::Head.index()].0),
                (StepClass::Prefill, 30, 0)
            );
        }
        let mut judge = stepper(&folder, On::Reference, Setup::default());
        let error = judge.start_profile(false).unwrap_err();
        assert!(matches!(error, Error::Backend(lapidary_ops::Error::Unsupported { .. })), "{error}");
    }
}

#[test]
fn classes_are_told_by_the_rows_of_each_sequence() {
    let of = |rows: &[usize]| {
        let mut b = Batch::default();
        b.spans.extend(rows.iter().map(|&rows| RowSpan { first_row: 0, rows, tables: Default::default() }));
        StepClass::of(&b)
    };
    assert_eq!(of(&[1]), StepClass::Decode);
    assert_eq!(of(&[1, 1, 1]), StepClass::Decode);
    assert_eq!(of(&[2, 9]), StepClass::Prefill);
    assert_eq!(of(&[1, 9, 1]), StepClass::Mixed);
    assert_eq!(Phase::ALL.map(Phase::index), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
}
