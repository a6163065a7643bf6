//! What a loaded model tells its user of: a softcap put in place of the file's (A05), towers that are not read (H05), a
//! head that is not the embedding (H06). And a picture, which it refuses (J04).

mod common;

use std::path::{Path, PathBuf};

use common::files::{Tensor, decoded_tensors, rewritten, save};
use lapidary::{ChatInput, Compute, Error, Gemma, LoadOptions};
use lapidary_reference::{Limits, assert_close, compare};
use lapidary_weights::Checkpoint;
use serde_json::json;

const PROMPT: [u32; 5] = [2, 60, 71, 99, 130];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn options() -> LoadOptions {
    let compute = Compute::F32;
    LoadOptions { compute, context: Some(64), threads: Some(2), chunk: 16, ..LoadOptions::default() }
}

fn load(path: &Path, options: &LoadOptions) -> (Gemma, Vec<f32>) {
    let mut gemma = Gemma::load(path, options).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut logits = vec![0.0; gemma.config().vocab];
    let stepper = gemma.stepper();
    stepper.prefill(&PROMPT).unwrap();
    stepper.logits_into(&mut logits).unwrap();
    assert!(logits.iter().all(|z| z.is_finite()));
    (gemma, logits)
}

/// The notes that hold `part`.
fn with<'a>(gemma: &'a Gemma, part: &str) -> Vec<&'a String> {
    gemma.notes().iter().filter(|n| n.contains(part)).collect()
}

#[test]
fn a05_a_final_cap_that_was_asked_for_wins_and_is_noted() {
    let file = root().join("models/pebble-moe-q8_0.gguf");
    let (plain, own) = load(&file, &options());
    assert!(with(&plain, "softcap").is_empty(), "{:?}", plain.notes());
    let (capped, logits) = load(&file, &LoadOptions { final_softcap: Some(2.0), ..options() });
    let note = with(&capped, "final logit softcap 2 ");
    assert!(note.len() == 1 && note[0].contains("30"), "{:?}", capped.notes());
    let expected: Vec<f32> = own.iter().map(|z| 2.0 * (30.0 * (z / 30.0).atanh() / 2.0).tanh()).collect();
    assert!(own.iter().any(|z| z.abs() > 2.0));
    assert_close("another cap", &compare(&logits, &expected), Limits::FLOAT32);
}

#[test]
fn h05_towers_and_unknown_keys_are_passed_over_and_the_towers_counted() {
    let file = root().join("models/pebble-e-q8_0.gguf");
    let (plain, expected) = load(&file, &options());
    assert!(with(&plain, "not read").is_empty(), "{:?}", plain.notes());
    let folder = tempfile::tempdir().unwrap();
    let all = |_: &str, bytes: &[u8]| Some(bytes.to_vec());
    let norm = "output_norm.weight";
    let towers = [
        ("v.blk.0.attn_q.weight", norm),
        ("v.patch_embd.weight", "token_embd.weight"),
        ("a.conv1d.0.weight", norm),
        ("mm.input_projection.weight", norm),
    ];
    let keys = [("gemma4.field_of_tomorrow", "x"), ("clip.vision.projector_type", "gemma4v")];
    let more = folder.path().join("more.gguf");
    rewritten(&file, &more, all, &towers, &keys);
    let (gemma, logits) = load(&more, &options());
    assert!(logits == expected, "text is what it was");
    let note = with(&gemma, "not read");
    assert!(note.len() == 1 && note[0].contains("2 tensors of vision, 1 of audio and 1 "), "{note:?}");

    for name in ["blk.0.attn_q.bias", "blk.1.v.weight", "blk.0.ffn_latent.weight"] {
        let odd = folder.path().join("odd.gguf");
        rewritten(&file, &odd, all, &[(name, norm)], &[]);
        let error = Gemma::load(&odd, &options()).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains("odd.gguf") && error.contains("unknown"), "{error}");
    }
}

/// The head of a tied model: absent, the embedding again, half of it. In both kinds of file.
#[test]
fn h06_a_head_is_used_and_noted_when_it_differs() {
    let file = root().join("models/pebble-moe-q8_0.gguf");
    let folder = tempfile::tempdir().unwrap();
    let differs = "differs from the embedding";
    let check = |paths: [&Path; 3], what: &str| {
        let [tied, equal, half] = paths.map(|path| load(path, &options()));
        assert!(equal.1 == tied.1, "{what}: an equal head changes nothing");
        let expected: Vec<f32> = tied.1.iter().map(|z| 30.0 * ((z / 30.0).atanh() / 2.0).tanh()).collect();
        assert_close(what, &compare(&half.1, &expected), Limits::FLOAT32);
        let counts = [&tied, &equal, &half].map(|(gemma, _)| with(gemma, differs).len());
        assert_eq!(counts, [0, 0, 1], "{what}: {:?}", half.0.notes());
    };

    let tensors = decoded_tensors(&Checkpoint::open(&file).unwrap());
    let embed = tensors["model.language_model.embed_tokens.weight"].clone();
    let halved = |t: &Tensor| {
        let values: Vec<f32> = t.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) * 0.5).collect();
        Tensor::f32s(&t.shape, &values)
    };
    let source = root().join("tests/pebble/moe");
    let folders = [("tied", None), ("equal", Some(embed.clone())), ("half", Some(halved(&embed)))].map(
        |(name, head)| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            let mut tensors = tensors.clone();
            tensors.extend(head.map(|head| ("lm_head.weight".to_owned(), head)));
            save(&path, &source.join("config.json"), &tensors);
            std::fs::copy(source.join("tokenizer.json"), path.join("tokenizer.json")).unwrap();
            path
        },
    );
    check(folders.each_ref().map(PathBuf::as_path), "safetensors");

    // Half of a Q8_0 block is the block with half its scale, which stands first in it.
    let half_block = |bytes: &[u8]| -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for block in bytes.chunks_exact_mut(34) {
            let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32() / 2.0;
            block[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
        }
        bytes
    };
    let head = [("output.weight", "token_embd.weight")];
    let [equal, half] = ["equal.gguf", "half.gguf"].map(|name| folder.path().join(name));
    rewritten(&file, &equal, |_, b| Some(b.to_vec()), &head, &[]);
    let edit = |name: &str, b: &[u8]| Some(if name == "output.weight" { half_block(b) } else { b.to_vec() });
    rewritten(&file, &half, edit, &head, &[]);
    check([&file, &equal, &half], "GGUF");
}

#[test]
fn j04_a_picture_or_a_sound_is_refused_by_its_place() {
    let mut gemma = load(&root().join("models/pebble-moe-q8_0.gguf"), &options()).0;
    let answer = gemma.answer_options(3);
    let text = json!({"type": "text", "text": "Hi"});
    let mut ask = |part: serde_json::Value| {
        let messages = vec![
            json!({"role": "system", "content": "Be kind."}),
            json!({"role": "user", "content": [text, part]}),
        ];
        let input = ChatInput { messages, ..ChatInput::default() };
        gemma.chat(&input, &answer).map(drop)
    };
    for kind in ["image", "image_url", "input_audio", "video", "file"] {
        let error = ask(json!({"type": kind, "url": "x"})).unwrap_err();
        assert!(matches!(&error, Error::UnreadablePart { message: 1, kind: k } if k == kind), "{error}");
        assert!(error.to_string().contains(kind));
    }
    assert!(matches!(ask(json!({"text": "x"})), Err(Error::UnreadablePart { message: 1, .. })));
    ask(json!({"type": "text", "text": "there"})).unwrap();
}
