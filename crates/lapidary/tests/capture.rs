//! What requests capture and trace: the right rows, whatever runs beside them, and not a bit changed by it.

mod common;

use std::path::Path;

use common::drive::{
    assert_bits, every_folder, golden, golden_ids, logits, name, score, tiny_folder, tokens, values,
};
use common::{EVERY, On, Setup, stepper};
use lapidary::capture::{CapturePositions, CaptureSpec, Captured, LayerChoice, Recording, Values, What};
use lapidary::trace::{TraceOptions, html};
use lapidary::{AnswerOptions, Compute, Gemma, LoadOptions};
use lapidary_engine::{Error, Heads, Prompt, Stepper};
use lapidary_ops::{Batch, Outcome, RowSpan, TailRows, TapPoint, TapSet};
use lapidary_reference::tiny::Variant;
use lapidary_reference::{Limits, assert_close, compare};

const HIDDEN: Limits = Limits { rel: 5e-5, max: f64::INFINITY };

fn gemma(compute: Compute) -> Gemma {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pebble-moe-q8_0.gguf");
    let options =
        LoadOptions { context: Some(200), threads: Some(2), chunk: 7, compute, ..LoadOptions::default() };
    Gemma::load(file, &options).expect("the model loads")
}

fn floats<'a>(tensors: &'a [Captured], name: &str) -> (&'a [usize], &'a [f32]) {
    let found = tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
    match &found.values {
        Values::F32(v) => (&found.shape, v),
        Values::I64(_) => panic!("{name} holds ids"),
    }
}

fn integers<'a>(tensors: &'a [Captured], name: &str) -> &'a [i64] {
    let found = tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
    match &found.values {
        Values::I64(v) => v,
        Values::F32(_) => panic!("{name} holds numbers"),
    }
}

/// Feeds a prompt as a single sequence with a recording.
fn recorded(s: &mut Stepper, spec: &CaptureSpec, prompt: &[u32]) -> Vec<Captured> {
    let mut recording = Recording::new(spec, &s.model().config.clone(), prompt.len(), &[]).unwrap();
    s.reset();
    s.set_capture(recording.points(0..prompt.len()));
    s.prefill_each(&Prompt::from(prompt), Heads::Last, &mut |chunk| {
        recording.take(chunk.batch, 0..chunk.positions.len(), chunk.positions, chunk.outcome);
    })
    .unwrap();
    s.set_capture(&[]);
    recording.tensors()
}

#[test]
fn the_goldens_hidden_states_in_single_and_chunked_runs() {
    let spec = CaptureSpec { positions: CapturePositions::All, ..CaptureSpec::default() };
    for variant in ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"] {
        let Some(golden) = golden(variant) else { continue };
        let ids = golden_ids(&golden, "input_ids");
        let hidden = golden.f32("hidden").unwrap();
        let layers = hidden.shape[0] - 1;
        let each = hidden.values.len() / (layers + 1);
        for on in EVERY {
            for rows in [64, 9, 1] {
                let setup = Setup { rows, head_rows: 1, ..Setup::default() };
                let mut s = stepper(golden.folder(), on, setup);
                let tensors = recorded(&mut s, &spec, &ids);
                for layer in 0..layers {
                    let (shape, found) = floats(&tensors, &format!("hidden.{layer}"));
                    assert_eq!(shape, [ids.len(), each / ids.len()]);
                    let what = format!("{variant} {on:?} {rows} rows, layer {layer}");
                    assert_close(
                        &what,
                        &compare(found, &hidden.values[(layer + 1) * each..][..each]),
                        HIDDEN,
                    );
                }
            }
        }
    }
}

/// Three prompts of unequal lengths in one batch, of which two capture, each something else.
#[test]
fn ragged_batches_give_each_request_its_own_rows() {
    for variant in ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"] {
        let Some(golden) = golden(variant) else { continue };
        let prompts = ["b0.", "b1.", "b2."].map(|p| golden_ids(&golden, &format!("{p}input_ids")));
        for on in EVERY {
            let setup = Setup { rows: 96, head_rows: 3, context: 96, ..Setup::default() };
            let mut runner = common::runner(golden.folder(), on, setup);
            let config = runner.model().config.clone();
            runner.resize([32, 32]).unwrap();
            let spec = |positions, what| CaptureSpec { positions, what, layers: LayerChoice::All };
            let routes =
                if config.moe.is_some() { vec![What::Hidden, What::Routes] } else { vec![What::Hidden] };
            let specs = [
                spec(CapturePositions::All, vec![What::Hidden, What::Attn]),
                spec(CapturePositions::Last, routes),
                spec(CapturePositions::Range(3..11), vec![What::Mlp]),
            ];
            let recordings: Vec<Recording> = specs
                .iter()
                .zip(&prompts)
                .map(|(spec, prompt)| Recording::new(spec, &config, prompt.len(), &[]).unwrap())
                .collect();
            let mut b = Batch::default();
            let mut taps = TapSet::default();
            for (i, prompt) in prompts.iter().enumerate() {
                let first_row = b.tokens.len();
                let pages = prompt.len().div_ceil(32);
                let mut tables = [lapidary_ops::PageTable::default(); 2];
                for (table, list) in tables.iter_mut().zip(&mut b.pages) {
                    *table = lapidary_ops::PageTable { start: list.len(), count: pages, first_block: 0 };
                    list.extend((0..pages).map(|p| (1 + 8 * i + p) as i32));
                }
                for (position, &token) in prompt.iter().enumerate() {
                    b.tokens.push(token as i32);
                    b.per_layer_tokens.push(token as i32);
                    b.positions.push(position as i32);
                    b.visible_to.iter_mut().for_each(|v| v.push(position as i32 + 1));
                }
                b.spans.push(RowSpan { first_row, rows: prompt.len(), tables });
                b.heads.push((first_row + prompt.len() - 1) as i32);
                for point in recordings[i].points(0..prompt.len()) {
                    if !taps.points.contains(point) {
                        taps.points.push(*point);
                    }
                }
            }
            b.taps = taps;
            for tail in [TailRows::All, TailRows::Heads] {
                let shape = b.shape(config.layers.len(), tail);
                let outcome: Outcome = runner.run(&b, &shape).unwrap();
                let mut found = recordings.clone();
                for (i, span) in b.spans.iter().enumerate() {
                    let rows = span.first_row..span.first_row + span.rows;
                    found[i].take(&b, rows, 0..span.rows, &outcome);
                }
                // Only a tail of all rows has them all; head rows are there either way.
                let which: &[usize] = if tail == TailRows::All { &[0, 1, 2] } else { &[1] };
                for &i in which {
                    let mut s = stepper(golden.folder(), on, Setup { rows: 64, ..setup });
                    let alone = recorded(&mut s, &specs[i], &prompts[i]);
                    let together = found[i].tensors();
                    assert_eq!(alone.len(), together.len());
                    let what = format!("{variant} {on:?} prompt {i} {tail:?}");
                    for (a, b) in alone.iter().zip(&together) {
                        assert_eq!((&a.name, &a.shape), (&b.name, &b.shape), "{what}");
                        match (&a.values, &b.values) {
                            (Values::F32(a), Values::F32(b)) => assert_bits(&what, b, a),
                            (a, b) => assert_eq!(a, b, "{what}"),
                        }
                    }
                }
            }
        }
    }
}

fn greedy(gemma: &Gemma, tokens: usize) -> AnswerOptions {
    let mut options = gemma.answer_options(tokens);
    options.sampling.temperature = 0.0;
    options
}

const PROMPT: &str = "Once upon a time there was a little owl who lived near the river.";

fn answer(gemma: &mut Gemma, options: &AnswerOptions) -> (Vec<u32>, Option<Recording>, usize) {
    let mut answer = gemma.complete(PROMPT, options).unwrap();
    while answer.next_piece(&mut |_| {}).unwrap().is_some() {}
    (answer.ids().to_vec(), answer.recording().cloned(), answer.prompt_tokens())
}

#[test]
fn answers_capture_the_positions_that_were_asked_for() {
    for compute in [Compute::F32, Compute::Fast] {
        let mut g = gemma(compute);
        let plain = greedy(&g, 12);
        let (ids, none, prompt) = answer(&mut g, &plain);
        assert!(none.is_none() && ids.len() == 12 && prompt > 14, "several batches of 7");
        // The whole sequence in one go, as the judge of every other.
        let whole: Vec<u32> = {
            let tokenizer = g.tokenizer();
            let mut whole = tokenizer.encode_prompt(PROMPT, lapidary_text::Specials::Parse).unwrap();
            whole.extend(&ids);
            whole
        };
        let everything = vec![What::Hidden, What::Attn, What::Mlp, What::Routes];
        let all = CaptureSpec {
            positions: CapturePositions::All,
            what: everything.clone(),
            layers: LayerChoice::All,
        };
        let expected = recorded(g.stepper(), &all, &whole);
        let end = prompt + 12;
        for positions in [
            CapturePositions::All,
            CapturePositions::Last,
            CapturePositions::Generated,
            CapturePositions::Range(3..5),
            CapturePositions::Range(prompt - 2..prompt + 3),
        ] {
            let wanted: Vec<usize> = (0..end).filter(|&p| positions.wants(p, prompt)).collect();
            let mut options = plain.clone();
            options.capture = Some(CaptureSpec {
                positions: positions.clone(),
                what: everything.clone(),
                layers: LayerChoice::All,
            });
            // The second time the sequence holds the prompt already.
            for again in 0..2 {
                let (same, recording, _) = answer(&mut g, &options);
                assert_eq!(same, ids, "{positions:?}: the answer is what it is without");
                let tensors = recording.unwrap().tensors();
                let found: Vec<usize> = integers(&tensors, "positions").iter().map(|&p| p as usize).collect();
                assert_eq!(found, wanted, "{positions:?} {again}");
                for t in tensors.iter().filter(|t| t.name != "positions") {
                    let e = expected.iter().find(|e| e.name == t.name).unwrap();
                    let each = e.shape[1..].iter().product::<usize>();
                    assert_eq!((t.shape[0], &t.shape[1..]), (wanted.len(), &e.shape[1..]), "{}", t.name);
                    match (&t.values, &e.values) {
                        (Values::F32(t), Values::F32(e)) => {
                            let e: Vec<f32> =
                                wanted.iter().flat_map(|p| &e[p * each..(p + 1) * each]).copied().collect();
                            assert_bits(&format!("{compute:?} {positions:?}"), t, &e);
                        }
                        (Values::I64(t), Values::I64(e)) => {
                            let e: Vec<i64> =
                                wanted.iter().flat_map(|p| &e[p * each..(p + 1) * each]).copied().collect();
                            assert_eq!(*t, e);
                        }
                        _ => panic!("{} has another type", t.name),
                    }
                }
            }
        }
    }
}

#[test]
fn captures_that_cannot_be_are_refused_by_name() {
    let mut g = gemma(Compute::Fast);
    let spec = |layers: &str| CaptureSpec { layers: layers.parse().unwrap(), ..CaptureSpec::default() };
    let mut options = greedy(&g, 2);
    options.capture = Some(spec("2+5-6"));
    let error = g.complete(PROMPT, &options).unwrap_err().to_string();
    assert!(error.contains("layer 6") && error.contains("0 to 5"), "{error}");
    let dense = stepper(&tiny_folder(Variant::Dense), On::Reference, Setup::default());
    let routes = CaptureSpec { what: vec![What::Routes], ..CaptureSpec::default() };
    assert!(
        Recording::new(&routes, &dense.model().config, 3, &[])
            .unwrap_err()
            .to_string()
            .contains("no experts")
    );
    let config = g.config();
    assert_eq!(spec("0+2-3").bytes_per_position(config, &[]).unwrap(), 3 * 256 * 4);
    let json = r#"{"layers": "0+2-3", "what": ["routes"], "positions": "3-9"}"#;
    let read: CaptureSpec = serde_json::from_str(json).unwrap();
    assert_eq!(read, "layers=0+2-3,what=routes,positions=3-9".parse().unwrap());
    assert_eq!(serde_json::from_str::<CaptureSpec>(&serde_json::to_string(&read).unwrap()).unwrap(), read);
    assert_eq!(read.bytes_per_position(config, &[]).unwrap(), 3 * 4 * 4);
    for bad in [
        r#"{"layers": 3}"#,
        r#"{"layers": "3-1"}"#,
        r#"{"what": ["x"]}"#,
        r#"{"positions": "first"}"#,
        r#"{"x": 1}"#,
    ] {
        assert!(serde_json::from_str::<CaptureSpec>(bad).is_err(), "{bad}");
    }
}

/// The head on the last layer's output is the model's own, and nothing moves.
#[test]
fn the_lens_of_the_last_layer_is_the_logits() {
    for folder in every_folder() {
        for on in EVERY {
            let setup = Setup { rows: 16, head_rows: 5, ..Setup::default() };
            let mut s = stepper(&folder, on, setup);
            let last = s.model().layers.len() - 1;
            let vocab = s.model().config.vocab;
            let prompt = Prompt::from(&tokens(&s, 3, 23)[..]);
            s.set_capture(&[TapPoint::LayerOut(last)]);
            let (expected, outcomes) = score(&mut s, &prompt);
            let hidden: Vec<f32> = outcomes.iter().flat_map(|o| o.taps[0].values.clone()).collect();
            s.set_capture(&[]);
            let mut found = Vec::new();
            s.lens(&hidden, &mut |row, logits| {
                assert_eq!(row * vocab, found.len());
                found.extend_from_slice(logits);
            })
            .unwrap();
            assert_bits(&format!("{} {on:?}", name(&folder)), &found, &expected);
            assert!(matches!(s.logits_into(&mut vec![0.0; vocab]), Err(Error::NoLogits)));
            assert_eq!(s.cursor(), 23);
            s.decode_step(5, 23).unwrap();
            let after = logits(&mut s);
            let mut fresh = stepper(&folder, on, setup);
            fresh.prefill(&prompt.tokens).unwrap();
            fresh.decode_step(5, 23).unwrap();
            assert_bits(&name(&folder), &after, &logits(&mut fresh));
            let width = s.model().config.hidden;
            assert!(matches!(s.lens(&values(1, width + 1), &mut |_, _| {}), Err(Error::Length { .. })));
            assert!(matches!(s.lens(&[], &mut |_, _| {}), Err(Error::Length { .. })));
            let mut bad = values(1, 2 * width);
            bad[width + 3] = f32::NAN;
            assert!(matches!(s.lens(&bad, &mut |_, _| {}), Err(Error::SoftNotFinite { index: 1 })));
        }
    }
}

#[test]
fn a_trace_tells_each_tokens_distribution_experts_and_layers() {
    let mut g = gemma(Compute::Fast);
    let plain = greedy(&g, 9);
    let (ids, ..) = answer(&mut g, &plain);
    let mut options = plain.clone();
    options.trace = Some(TraceOptions { alternatives: 4, lens: 2 });
    options.capture = Some("layers=2,what=routes,positions=all".parse().unwrap());
    let mut traced = g.complete(PROMPT, &options).unwrap();
    while traced.next_piece(&mut |_| {}).unwrap().is_some() {}
    assert_eq!(traced.ids(), ids, "tracing changes no token");
    let (traces, prompt) = (traced.traces().to_vec(), traced.prompt_tokens());
    let routes = integers(&traced.recording().unwrap().tensors(), "router_idx.2").to_vec();
    assert_eq!(traces.len(), 9);
    for (i, t) in traces.iter().enumerate() {
        assert_eq!((t.token, t.position), (ids[i], prompt + i));
        assert_eq!(t.alternatives[0].token, t.token, "greedy takes the likeliest");
        assert!((t.alternatives[0].probability - t.probability).abs() < 1e-6);
        assert!(t.alternatives.windows(2).all(|p| p[0].probability >= p[1].probability));
        let sum: f64 = t.alternatives.iter().map(|a| a.probability).sum();
        assert!(t.alternatives.len() == 4 && sum <= 1.0 + 1e-6);
        assert!(t.entropy >= -t.probability * t.probability.ln() && t.entropy < (4096f64).ln());
        assert_eq!((t.norms.len(), t.experts.len(), t.lens.len()), (6, 6, 6));
        assert!(t.norms.iter().all(|n| *n > 0.0));
        // The row that the token was chosen from is the one before it.
        let row = (prompt + i - 1) * 2;
        let chosen: Vec<i64> = t.experts[2].iter().map(|(e, _)| *e as i64).collect();
        assert_eq!(chosen, routes[row..row + 2]);
        // The last layer's lens is the distribution itself.
        let last = t.lens[5][0];
        assert_eq!(last.token, t.token);
        assert!((last.probability - t.probability).abs() < 1e-6);
    }
    assert!(traces.iter().any(|t| t.lens[0][0].token != t.token), "early layers say something else");
    let page = html("pebble </script><!--", "a < b", &traces, 8, g.tokenizer());
    let data = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["model"], "pebble </script><!--");
    assert_eq!(data["tokens"].as_array().unwrap().len(), 9);
    assert!(data["texts"][ids[0].to_string()].is_string());
    assert!(!page.contains("src=") && !page.contains("http"), "the page needs nothing else");
}
