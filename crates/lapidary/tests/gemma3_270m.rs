//! A real model file, Gemma 3 270M in Q4_K_M, against stored values of the published implementation in float32.
//!
//! The file (250 MB) is not part of the project: the test runs where `LAPIDARY_GEMMA3_GGUF` says where it is.

mod common;

use common::{On, Setup, stepper};
use lapidary::{
    Checkpoint, Compute, EmbedScale, Heads, KvFormat, LoadOptions, Prompt, Stepper, load_stepper, text_source,
};
use lapidary_text::Specials;
use serde_json::Value;

/// Logits are of size 20 and float32 sums of 640 products; orders of summing differ by about 2e-5 in them, and the
/// stored values are rounded to 1e-6.
const LOGIT_TOLERANCE: f64 = 1e-3;

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/goldens/gemma3_270m_q4_k_m.json");
    serde_json::from_slice(&std::fs::read(path).expect("the golden is part of the project")).expect("JSON")
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().expect("a list").iter().map(|v| v.as_u64().expect("an id") as u32).collect()
}

/// The logits after each token.
fn all_logits(stepper: &mut Stepper, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    stepper.reset();
    stepper
        .score(&Prompt::from(ids), &mut |_, row| rows.push(row.to_vec()), &mut |_, _| {})
        .expect("the prompt runs");
    assert!(rows.iter().flatten().all(|v| v.is_finite()));
    rows
}

#[test]
fn logits_and_greedy_text_are_those_of_the_published_implementation() {
    let Some(path) = std::env::var_os("LAPIDARY_GEMMA3_GGUF") else {
        println!("skipped: LAPIDARY_GEMMA3_GGUF does not say where gemma-3-270m-q4_k_m.gguf is");
        return;
    };
    let golden = golden();
    let (prompt, expected) = (ids(&golden["prompt_ids"]), &golden["f32_reference"]);
    let setup = Setup { rows: 64, head_rows: 64, context: 64, scale: EmbedScale::F32, kv: KvFormat::F32 };
    let mut stepper = stepper(path.as_ref(), On::Cpu { threads: 2 }, setup);

    let logits = all_logits(&mut stepper, &prompt).pop().expect("the prompt has tokens");
    let first = &expected["first_logits"];
    let listed = first["top10"].as_array().expect("a list").iter();
    let listed =
        listed.map(|e| (e["id"].as_u64().expect("an id") as usize, e["logit"].as_f64().expect("a logit")));
    let at = first["at"].as_object().expect("logits by id").iter();
    let at = at.map(|(id, logit)| (id.parse().expect("an id"), logit.as_f64().expect("a logit")));
    let (mut worst, mut count) = (0f64, 0);
    for (id, expected) in listed.chain(at) {
        let off = (f64::from(logits[id]) - expected).abs();
        assert!(off <= LOGIT_TOLERANCE, "logit of {id} is {}, expected {expected}", logits[id]);
        (worst, count) = (worst.max(off), count + 1);
    }
    let n = logits.len() as f64;
    let mean = logits.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let rms = (logits.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n).sqrt();
    for (name, found) in [("mean", mean), ("rms", rms)] {
        let expected = first[name].as_f64().expect("a number");
        assert!((found - expected).abs() <= LOGIT_TOLERANCE, "{name} is {found}, expected {expected}");
    }
    println!("{count} first logits, furthest off by {worst:.2e}; mean {mean:.6}, rms {rms:.6}");

    let greedy = ids(&expected["greedy_ids"]);
    stepper.reset();
    let mut found = vec![stepper.prefill_prompt(&Prompt::from(&prompt[..])).expect("prefill")];
    while found.len() < greedy.len() {
        let token = *found.last().expect("there is one");
        found.push(stepper.decode_step(token, stepper.cursor()).expect("step"));
    }
    assert_eq!(found, greedy);

    let whole = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
    let rows = all_logits(&mut stepper, &whole);
    let mut worst = 0f64;
    for (i, expected) in expected["greedy_logits"].as_array().expect("a list").iter().enumerate() {
        let (expected, found) =
            (expected.as_f64().expect("a logit"), rows[prompt.len() - 1 + i][greedy[i] as usize]);
        let off = (f64::from(found) - expected).abs();
        assert!(off <= LOGIT_TOLERANCE, "step {i}: logit {found}, expected {expected}");
        worst = worst.max(off);
    }
    println!("{} greedy tokens equal, their logits furthest off by {worst:.2e}", greedy.len());
}

/// The text that the stored perplexity is of: from the file that `LAPIDARY_PERPLEXITY_TEXT` names (`data/eighty.txt`
/// of crate esaxx-rs 0.1.10) the bytes from 4163 on, line ends as LF, the first 88,000 bytes of that.
fn perplexity_text() -> Option<String> {
    let path = std::env::var_os("LAPIDARY_PERPLEXITY_TEXT")?;
    let bytes = std::fs::read(path).expect("the text is there");
    let text = String::from_utf8_lossy(&bytes[4163..]).replace("\r\n", "\n");
    Some(
        text.chars()
            .scan(0, |n, c| {
                *n += c.len_utf8();
                (*n <= 88_000).then_some(c)
            })
            .collect(),
    )
}

/// 40 chunks of 512 tokens, the first of each replaced by BOS; positions 256 to 510 predict 257 to 511.
fn perplexity(stepper: &mut Stepper, tokens: &[u32]) -> f64 {
    let (mut sum, mut count) = (0f64, 0);
    for chunk in tokens.chunks_exact(512).take(40) {
        let mut ids = chunk.to_vec();
        ids[0] = 2;
        stepper.reset();
        let (given, scored) = (Prompt::from(&ids[..256]), Prompt::from(&ids[256..511]));
        stepper.prefill_each(&given, Heads::None, &mut |_| {}).expect("runs");
        let mut each = |position: usize, row: &[f32]| {
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f64 = row.iter().map(|&v| f64::from(v - best).exp()).sum();
            sum -= f64::from(row[ids[position + 1] as usize] - best) - total.ln();
            count += 1;
        };
        stepper.score(&scored, &mut each, &mut |_, _| {}).expect("runs");
    }
    assert_eq!(count, 40 * 255);
    (sum / f64::from(count)).exp()
}

#[test]
fn perplexity_in_float32_and_with_quantised_activations() {
    let (Some(path), Some(text)) = (std::env::var_os("LAPIDARY_GEMMA3_GGUF"), perplexity_text()) else {
        println!("skipped: LAPIDARY_GEMMA3_GGUF or LAPIDARY_PERPLEXITY_TEXT is not set");
        return;
    };
    let expected = golden()["perplexity"]["f32_reference"].as_f64().expect("a number");
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let tokenizer = text_source::tokenizer(&checkpoint).expect("a tokenizer");
    let tokens = tokenizer.encode_prompt(&text, Specials::Plain).expect("ids");
    assert_eq!(tokens.len() as u64, golden()["perplexity"]["tokens_with_bos"].as_u64().expect("a count"));
    for (compute, tolerance) in [(Compute::F32, 0.01), (Compute::Fast, 0.01 * expected)] {
        let options = LoadOptions {
            compute,
            context: Some(512),
            chunk: 256,
            head_rows: 64,
            threads: Some(2),
            ..LoadOptions::default()
        };
        let mut stepper = load_stepper(&checkpoint, &options, &mut |_| {}).expect("loads");
        let found = perplexity(&mut stepper, &tokens);
        println!("{compute:?}: perplexity {found:.4}, stored {expected}");
        assert!((found - expected).abs() <= tolerance, "{compute:?}: {found}, stored {expected}");
    }
}

/// Positions that are compared with the float32 path.
const COMPARED: usize = 500;

/// What docs/performance.md records of these positions: mean divergence in nats, and the share of positions at which
/// another token is the most likely one. Figures may be half as large again before something is wrong.
const RECORDED: [(KvFormat, f64, f64); 3] =
    [(KvFormat::Bf16, 0.002005, 0.020), (KvFormat::F16, 0.001996, 0.020), (KvFormat::Q8_0, 0.002668, 0.032)];
const MARGIN: f64 = 1.5;

/// Chunks of 512 tokens as for the perplexity; positions 256 to 510 of each until there are enough.
fn compared_chunks(tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut left = COMPARED;
    let chunks = tokens.chunks_exact(512).map_while(|chunk| {
        let scored = left.min(255);
        left -= scored;
        (scored > 0).then(|| [&[2], &chunk[1..256 + scored]].concat())
    });
    chunks.collect()
}

fn log_probabilities(row: &[f32]) -> Vec<f64> {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total = row.iter().map(|&v| f64::from(v - best).exp()).sum::<f64>().ln();
    row.iter().map(|&v| f64::from(v - best) - total).collect()
}

fn most_likely(row: &[f64]) -> usize {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("a vocabulary").0
}

#[test]
fn quantised_activations_stay_as_near_to_float32_as_recorded() {
    let (Some(path), Some(text)) = (std::env::var_os("LAPIDARY_GEMMA3_GGUF"), perplexity_text()) else {
        println!("skipped: LAPIDARY_GEMMA3_GGUF or LAPIDARY_PERPLEXITY_TEXT is not set");
        return;
    };
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let tokenizer = text_source::tokenizer(&checkpoint).expect("a tokenizer");
    let chunks = compared_chunks(&tokenizer.encode_prompt(&text, Specials::Plain).expect("ids"));
    let load = |compute, kv| {
        let options = LoadOptions {
            compute,
            kv: Some(kv),
            context: Some(512),
            chunk: 256,
            head_rows: 64,
            threads: Some(2),
            ..LoadOptions::default()
        };
        load_stepper(&checkpoint, &options, &mut |_| {}).expect("loads")
    };
    let mut exact = load(Compute::F32, KvFormat::F32);
    let mut others = RECORDED.map(|(kv, ..)| (load(Compute::Fast, kv), 0.0, 0usize));
    let mut count = 0;
    for ids in &chunks {
        let (given, scored) = (Prompt::from(&ids[..256]), Prompt::from(&ids[256..]));
        let rows = |stepper: &mut Stepper| {
            let mut rows = Vec::new();
            stepper.reset();
            stepper.prefill_each(&given, Heads::None, &mut |_| {}).expect("runs");
            stepper.score(&scored, &mut |_, row| rows.push(row.to_vec()), &mut |_, _| {}).expect("runs");
            assert!(rows.iter().flatten().all(|v| v.is_finite()));
            rows
        };
        let reference = rows(&mut exact);
        count += reference.len();
        for (stepper, divergence, differ) in &mut others {
            for (p, q) in reference.iter().zip(rows(stepper)) {
                let (p, q) = (log_probabilities(p), log_probabilities(&q));
                *divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
                *differ += usize::from(most_likely(&p) != most_likely(&q));
            }
        }
    }
    assert_eq!(count, COMPARED);
    for ((kv, mean, differing), (_, divergence, differ)) in RECORDED.iter().zip(&others) {
        let (found, share) = (divergence / count as f64, *differ as f64 / count as f64);
        println!("{kv:?}: mean KL {found:.6}, another token at {:.1} %", 100.0 * share);
        assert!(found > 0.0 && found <= MARGIN * mean, "{kv:?}: mean KL {found}, recorded {mean}");
        assert!(share <= MARGIN * differing, "{kv:?}: {share} of positions differ, recorded {differing}");
    }
}
