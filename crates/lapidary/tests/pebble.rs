//! The two small trained models against the replies of the published implementation.
//!
//! The bf16 checkpoints are too large for the repository: their tests read the folder that
//! `LAPIDARY_PEBBLES` names (`moe` and `e` inside it) and say so when it isn't set. The Q8_0 files are here.

use std::path::{Path, PathBuf};

use lapidary::{ChatInput, Compute, FinishReason, Gemma, KvFormat, LoadOptions, Piece, Prompt};
use serde_json::Value;

/// Replies with a larger gap between the best two logits must be equal in float32 over the same weights.
const MARGIN_F32: f64 = 1e-3;
/// The same where weights, activations or KV are rounded.
const MARGIN_ROUNDED: f64 = 0.5;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

struct Sample {
    input: Option<ChatInput>,
    rendered: String,
    prompt_ids: Vec<u32>,
    reply_ids: Vec<u32>,
    min_margin: f64,
}

fn samples(model: &str) -> Vec<Sample> {
    let path = root().join("tests/pebble").join(model).join("samples.json");
    let list: Vec<Value> = serde_json::from_slice(&std::fs::read(path).expect("samples")).expect("JSON");
    let ids = |v: &Value| v.as_array().expect("ids").iter().map(|v| v.as_u64().expect("id") as u32).collect();
    let array = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let sample = |s: &Value| Sample {
        input: s.get("messages").map(|messages| ChatInput {
            messages: array(messages),
            tools: array(&s["tools"]),
            enable_thinking: s.get("enable_thinking").and_then(Value::as_bool),
            ..ChatInput::default()
        }),
        rendered: s["rendered"].as_str().expect("text").to_owned(),
        prompt_ids: ids(&s["prompt_ids"]),
        reply_ids: ids(&s["reply_ids"]),
        min_margin: s["min_margin"].as_f64().expect("margin"),
    };
    let samples: Vec<Sample> = list.iter().map(sample).collect();
    assert_eq!(samples.len(), 20);
    samples
}

fn q8_0(model: &str) -> PathBuf {
    root().join("models").join(format!("pebble-{model}-q8_0.gguf"))
}

fn bf16(model: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("LAPIDARY_PEBBLES").map(|p| Path::new(&p).join(model));
    if folder.is_none() {
        eprintln!("skipped: LAPIDARY_PEBBLES does not name the folder of the bf16 checkpoints");
    }
    folder
}

fn options(compute: Compute, kv: Option<KvFormat>) -> LoadOptions {
    LoadOptions { compute, kv, context: Some(512), threads: Some(2), chunk: 100, ..LoadOptions::default() }
}

/// The reply's ids, its stop token included as in the samples.
fn reply(gemma: &mut Gemma, sample: &Sample) -> Vec<u32> {
    let mut options = gemma.answer_options(sample.reply_ids.len());
    options.sampling.temperature = 0.0;
    let mut answer = gemma.complete_ids(&sample.prompt_ids, &options).expect("the prompt is accepted");
    let mut stop = None;
    while let Some(piece) = answer.next_piece(&mut |_| {}).expect("a step") {
        if let Piece::Finished(FinishReason::Stop(id)) = piece {
            stop = Some(id);
        }
    }
    answer.ids().iter().copied().chain(stop).collect()
}

fn check_replies(gemma: &mut Gemma, model: &str, margin: f64, what: &str) {
    let mut held = 0;
    for sample in samples(model) {
        if sample.min_margin > margin {
            assert_eq!(reply(gemma, &sample), sample.reply_ids, "{model} {what}: {}", sample.rendered);
            held += 1;
        }
    }
    assert!(held >= 15, "{held} replies were held");
}

#[test]
fn replies_of_the_q8_0_files_in_every_mode() {
    for model in ["moe", "e"] {
        for compute in [Compute::F32, Compute::Fast] {
            for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, KvFormat::Q8_0] {
                let mut gemma = Gemma::load(q8_0(model), &options(compute, Some(kv))).expect("loads");
                check_replies(&mut gemma, model, MARGIN_ROUNDED, &format!("{compute:?} {kv:?}"));
            }
        }
    }
}

#[test]
fn replies_of_the_bf16_checkpoints() {
    for model in ["moe", "e"] {
        let Some(folder) = bf16(model) else { return };
        // The stored replies were made in float32, which does not round the embedding scale; sqrt(256) is exact.
        let mut gemma = Gemma::load(&folder, &options(Compute::F32, None)).expect("loads");
        check_replies(&mut gemma, model, MARGIN_F32, "f32");
        let mut gemma = Gemma::load(&folder, &options(Compute::Fast, None)).expect("loads");
        check_replies(&mut gemma, model, MARGIN_ROUNDED, "fast");
    }
}

#[test]
fn every_reply_token_is_within_a_thousandth_of_the_best() {
    for model in ["moe", "e"] {
        let Some(folder) = bf16(model) else { return };
        let mut gemma = Gemma::load(&folder, &options(Compute::F32, None)).expect("loads");
        for sample in samples(model) {
            let ids: Vec<u32> = sample.prompt_ids.iter().chain(&sample.reply_ids).copied().collect();
            let first = sample.prompt_ids.len() - 1;
            let mut worst = 0.0f32;
            let mut each = |position: usize, logits: &[f32]| {
                if let Some(&next) = ids.get(position + 1).filter(|_| position >= first) {
                    assert!(logits.iter().all(|l| l.is_finite()));
                    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    worst = worst.max(best - logits[next as usize]);
                }
            };
            let prompt = Prompt::from(&ids[..]);
            gemma.stepper().score(&prompt, &mut each, &mut |_, _| {}).expect("the reply runs");
            assert!(worst <= 1e-3, "{model}: {worst} in {}", sample.rendered);
        }
    }
}

#[test]
fn messages_render_to_the_stored_prompts() {
    for model in ["moe", "e"] {
        let gemma = Gemma::load(q8_0(model), &options(Compute::F32, None)).expect("loads");
        for sample in samples(model) {
            let ids = match &sample.input {
                Some(input) => gemma.template().encode(gemma.tokenizer(), input).expect("renders").ids,
                None => {
                    let text = sample.rendered.trim_start_matches("<bos>");
                    gemma.tokenizer().encode_prompt(text, lapidary_text::Specials::Parse).expect("ids")
                }
            };
            assert_eq!(ids, sample.prompt_ids, "{model}: {}", sample.rendered);
        }
    }
}

#[test]
fn thoughts_calls_and_recall_through_the_chat() {
    let (mut thoughts, mut calls, mut recalled) = (0, 0, 0);
    for model in ["moe", "e"] {
        let mut gemma = Gemma::load(q8_0(model), &options(Compute::F32, None)).expect("loads");
        for sample in samples(model) {
            let Some(input) = &sample.input else { continue };
            let mut options = gemma.answer_options(100);
            options.sampling.temperature = 0.0;
            let pieces: Vec<Piece> =
                gemma.chat(input, &options).expect("chat").map(|p| p.expect("a piece")).collect();
            let joined = |f: fn(&Piece) -> Option<&str>| pieces.iter().filter_map(f).collect::<String>();
            let text = joined(|p| if let Piece::Text(t) = p { Some(t) } else { None });
            let thought = joined(|p| if let Piece::Thought(t) = p { Some(t) } else { None });
            assert!(!text.contains("<|") && !text.contains("|>"), "{text}");
            if sample.rendered.contains("Kenya") {
                assert_eq!(thought, "The user asks about Kenya. Its capital is Nairobi.");
                assert_eq!(text, "The capital of Kenya is Nairobi.");
                thoughts += 1;
            }
            let last = input.messages.last().expect("a message");
            if !input.tools.is_empty() && last["role"] == "user" {
                let call =
                    pieces.iter().find_map(|p| if let Piece::ToolCall(c) = p { Some(c) } else { None });
                let call = call.expect("a call");
                let arguments: Value = serde_json::from_str(&call.arguments).expect("JSON");
                assert_eq!(call.name, "get_weather");
                assert_eq!(arguments, serde_json::json!({"city": "Oslo"}));
                calls += 1;
            }
            for word in ["garden", "engine", "silver"] {
                if sample.rendered.contains(&format!("The secret word is {word}.")) {
                    assert_eq!(text, format!("The secret word is {word}."));
                    // The longest prompt hides the word beyond two windows of 128.
                    recalled += usize::from(sample.prompt_ids.len() > 2 * 128);
                }
            }
        }
    }
    assert_eq!((thoughts, calls, recalled), (2, 2, 2));
}
