//! Ids against the `tokenizers` crate run as its authors mean it, for the pebbles' vocabulary and, where the files are
//! at hand, Gemma 3's. Section D of the hard cases as far as a tokenizer can meet it.

mod common;

use std::time::{Duration, Instant};

use common::{as_gguf, corpus, outside_file, pebble, pebble_json, read_gguf_vocab};
use lapidary_text::{Error, GgufVocab, Specials, Strings, Tokenizer};

/// The published behaviour: every added token matched, nothing put in front.
fn oracle_ids(oracle: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
    oracle.encode(text, false).unwrap().get_ids().to_vec()
}

/// Compares ids on the corpus, line by line and joined, and decoding against the text itself.
fn assert_same_ids(oracle: &tokenizers::Tokenizer, ours: &[&Tokenizer], lines: usize) {
    let mut texts = corpus(lines);
    let joined: Vec<String> = texts.chunks(100).map(|lines| lines.join("\n")).collect();
    texts.extend(joined);
    texts.extend(
        (1..=70)
            .flat_map(|n| ["\n", "\t", " ", "\r\n", "a \n"].map(|blank| format!("x{}y", blank.repeat(n)))),
    );
    for text in &texts {
        let expected = oracle_ids(oracle, text);
        for (form, tokenizer) in ours.iter().enumerate() {
            let ids = tokenizer.encode(text, Specials::Parse);
            assert_eq!(ids, expected, "form {form}, text {text:?}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), text.replace('\u{2581}', " "), "form {form}");
        }
    }
}

#[test]
fn d01_ids_equal_the_published_definition_on_20k_lines() {
    let json = pebble_json();
    let oracle = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    assert_same_ids(&oracle, &[&pebble(), &Tokenizer::from_gguf(as_gguf(&json)).unwrap()], 20_000);
}

#[test]
fn d01_newline_runs_mixed_with_blanks() {
    let json = pebble_json();
    let oracle = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    for newlines in 1..=32 {
        for (before, after) in [("", ""), (" ", " "), ("\t", ""), ("", "  \t"), ("a", "b"), (". ", "\tThe")] {
            let text = format!("{before}{}{after}", "\n".repeat(newlines));
            assert_eq!(pebble().encode(&text, Specials::Parse), oracle_ids(&oracle, &text), "{text:?}");
        }
    }
}

#[test]
fn gemma3_ids_from_json_and_from_scores_equal_the_published_ones() {
    let (Some(json), Some(gguf)) =
        (outside_file("LAPIDARY_GEMMA3_TOKENIZER"), outside_file("LAPIDARY_GEMMA3_GGUF"))
    else {
        return;
    };
    let json = std::fs::read(json).unwrap();
    let oracle = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    let from_json = Tokenizer::from_json(&json).unwrap();
    let vocab = read_gguf_vocab(&std::fs::read(gguf).unwrap());
    let from_gguf = Tokenizer::from_gguf(vocab).unwrap();
    assert_eq!(from_gguf.encode("Hello world<end_of_turn>\n", Specials::Parse), [9259, 1902, 106, 107]);
    let as_gemma4 = Tokenizer::from_gguf(as_gguf(&json)).unwrap();
    assert_same_ids(&oracle, &[&from_json, &from_gguf, &as_gemma4], 20_000);
    for text in corpus(2_000) {
        assert_eq!(
            from_json.encode(&text, Specials::Plain),
            from_gguf.encode(&text, Specials::Plain),
            "{text:?}"
        );
        assert_eq!(
            from_json.encode(&text, Specials::Plain),
            as_gemma4.encode(&text, Specials::Plain),
            "{text:?}"
        );
    }
    assert_near_linear(&from_json);
}

#[test]
fn d02_the_declared_names_choose_the_algorithm() {
    let vocab = as_gguf(&pebble_json());
    let ids = |vocab: GgufVocab| {
        Tokenizer::from_gguf(vocab).map(|t| t.encode("Once upon a time there was", Specials::Plain))
    };
    let expected = ids(vocab.clone()).unwrap();
    let llama = GgufVocab { model: "llama".into(), pre: Some("gemma4".into()), ..vocab.clone() };
    assert_eq!(ids(llama).unwrap(), expected);
    for (model, pre) in
        [("gpt2", None), ("llama", Some("llama-bpe")), ("gemma4", Some("qwen2")), ("bert", None), ("", None)]
    {
        let other = GgufVocab { model: model.into(), pre: pre.map(Into::into), ..vocab.clone() };
        let message = ids(other).unwrap_err().to_string();
        assert!(message.contains(&format!("{model:?}")), "{message}");
    }
    // The chosen algorithm's list must be there; the other one's is no substitute.
    let no_merges = GgufVocab { merges: Strings::default(), ..vocab.clone() };
    assert!(ids(no_merges).unwrap_err().to_string().contains("merges"));
    let no_scores = GgufVocab { model: "llama".into(), scores: vec![], ..vocab.clone() };
    assert!(ids(no_scores).unwrap_err().to_string().contains("scores"));
    let prefixed = GgufVocab { add_space_prefix: Some(true), ..vocab };
    assert!(matches!(ids(prefixed), Err(Error::UnsupportedTokenizer { .. })));
}

/// A vocabulary of scored pieces in which the order of merging shows.
fn scored() -> GgufVocab {
    let mut tokens: Vec<String> =
        ["<pad>", "<eos>", "<bos>", "<unk>", "<code>", "  ", "    "].map(String::from).to_vec();
    let mut token_types = vec![3, 3, 3, 2, 4, 4, 4];
    for byte in 0..=255 {
        tokens.push(format!("<0x{byte:02X}>"));
        token_types.push(6);
    }
    let mut scores = vec![-1000.0; 7 + 256];
    for (piece, score) in [
        ("ab", -1.0),
        ("bc", -0.0),
        ("abc", -2.0),
        ("\u{2581}a", -0.5),
        ("a", -9.0),
        ("b", -9.0),
        ("c", -9.0),
        ("\u{2581}", -9.0),
    ] {
        tokens.push(piece.into());
        token_types.push(1);
        scores.push(score);
    }
    GgufVocab {
        model: "llama".into(),
        tokens: tokens.iter().collect(),
        token_types,
        scores,
        bos: Some(2),
        unk: Some(3),
        ..GgufVocab::default()
    }
}

#[test]
fn scores_decide_the_order_of_merges_and_user_defined_pieces_come_first() {
    let tokenizer = Tokenizer::from_gguf(scored()).unwrap();
    let pieces = |text: &str| {
        tokenizer
            .encode(text, Specials::Plain)
            .iter()
            .map(|&id| tokenizer.piece(id).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(pieces("abc"), ["abc"], "bc merges first, then a with it");
    assert_eq!(pieces("abbc"), ["ab", "bc"]);
    assert_eq!(pieces(" abc"), ["\u{2581}a", "bc"]);
    assert_eq!(pieces("a    b"), ["a", "\u{2581}\u{2581}\u{2581}\u{2581}", "b"]);
    assert_eq!(pieces("a   a"), ["a", "\u{2581}\u{2581}", "\u{2581}a"]);
    assert_eq!(pieces("a<code>b"), ["a", "<code>", "b"]);
    assert_eq!(pieces("é"), ["<0xC3>", "<0xA9>"]);
}

#[test]
fn d03_user_defined_pieces_match_the_raw_text_first() {
    let json = pebble_json();
    let oracle = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    let from_gguf = Tokenizer::from_gguf(as_gguf(&json)).unwrap();
    for text in ["a  b and    c", &" ".repeat(27), "<code>", "&lt;code>", "\t\t\ta\t b", "  \n   x"] {
        let expected = oracle_ids(&oracle, text);
        assert_eq!(pebble().encode(text, Specials::Plain), expected);
        assert_eq!(from_gguf.encode(text, Specials::Plain), expected);
    }
}

#[test]
fn d04_d05_raw_prompts_have_exactly_one_bos() {
    for tokenizer in [pebble(), Tokenizer::from_gguf(as_gguf(&pebble_json())).unwrap()] {
        let bos = tokenizer.specials().bos.unwrap();
        for text in ["Once upon a time", "<bos>Once upon a time", "<bos><bos>Once upon a time"] {
            let ids = tokenizer.encode_prompt(text, Specials::Parse).unwrap();
            assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{text}");
            assert_eq!(ids[0], bos);
            assert_eq!(ids, [2, 1375, 1379, 366, 1380], "{text}");
        }
        assert_eq!(tokenizer.with_bos(vec![2, 7, 9]).unwrap(), [2, 7, 9]);
        assert_eq!(tokenizer.with_bos(vec![7, 9]).unwrap(), [2, 7, 9]);
        assert_eq!(tokenizer.with_bos(vec![]).unwrap(), [2]);
        let plain = tokenizer.encode_prompt("<bos>x", Specials::Plain).unwrap();
        assert_eq!(plain.iter().filter(|&&id| id == bos).count(), 1);
        assert_eq!(tokenizer.decode(&plain).unwrap(), "<bos><bos>x", "the typed one stays text");
    }
}

#[test]
fn d06_plain_text_never_becomes_a_control_token() {
    for tokenizer in [pebble(), Tokenizer::from_gguf(as_gguf(&pebble_json())).unwrap()] {
        let markers: Vec<String> = (0..tokenizer.vocab_size())
            .filter(|&id| tokenizer.is_special(id))
            .map(|id| tokenizer.piece(id).unwrap().into())
            .collect();
        assert_eq!(markers.len(), 24);
        for marker in &markers {
            let text = format!("a {marker}b{marker}{marker}");
            let plain = tokenizer.encode(&text, Specials::Plain);
            assert!(!plain.iter().any(|&id| tokenizer.is_special(id)), "{marker}");
            assert_eq!(tokenizer.decode(&plain).unwrap(), text);
            let parsed = tokenizer.encode(&text, Specials::Parse);
            assert_eq!(parsed.iter().filter(|&&id| tokenizer.is_special(id)).count(), 3, "{marker}");
        }
    }
}

fn assert_near_linear(tokenizer: &Tokenizer) {
    // Distinct words and long repeats, a megabyte on one line. Quadratic merging takes minutes; the best of three tries
    // forgives a busy machine.
    let words: String =
        (0..200_000).map(|i: u32| format!(" w{}", i.wrapping_mul(2_654_435_761) % 99_991)).collect();
    for text in [&words[..1 << 20], &"ab".repeat(1 << 19), &"<".repeat(1 << 20), &" ".repeat(1 << 20)] {
        let time = || {
            let start = Instant::now();
            assert!(!tokenizer.encode(text, Specials::Parse).is_empty());
            start.elapsed()
        };
        let best = (0..3).map(|_| time()).min().expect("three tries");
        assert!(best < Duration::from_secs(3), "{best:?} for 1 MiB on one line starting {:?}", &text[..8]);
    }
}

#[test]
fn a_megabyte_on_one_line_takes_no_quadratic_time() {
    assert_near_linear(&pebble());
}

#[test]
fn ids_outside_the_vocabulary_are_errors_that_name_the_id() {
    let tokenizer = pebble();
    assert_eq!(tokenizer.vocab_size(), 4096);
    assert!(matches!(tokenizer.decode(&[5, 4096]), Err(Error::TokenId { id: 4096, vocab_size: 4096 })));
    assert!(tokenizer.piece(u32::MAX).is_err());
    for id in [-1, 4096, 1 << 31, (1 << 32) + 5] {
        assert!(tokenizer.check_id(id).is_err(), "{id}");
    }
    assert_eq!(tokenizer.check_id(4095).unwrap(), 4095);
}

#[test]
fn special_ids_come_from_the_vocabulary() {
    let tokenizer = pebble();
    let ids = tokenizer.specials();
    assert_eq!(
        (ids.pad, ids.eos, ids.bos, ids.turn_open, ids.turn_close),
        (Some(0), Some(1), Some(2), Some(15), Some(16))
    );
    assert_eq!((ids.channel_open, ids.channel_close, ids.quote), (Some(13), Some(14), Some(11)));
    assert_eq!(ids.end_ids().collect::<Vec<_>>(), [1, 16, 9]);
    assert_eq!(tokenizer.token_id("<|turn>"), Some(15));
    assert_eq!(tokenizer.token_id("no such piece"), None);
}

#[test]
fn unfit_files_are_refused_by_name() {
    let good: serde_json::Value = serde_json::from_slice(&pebble_json()).unwrap();
    let refuse = |change: &dyn Fn(&mut serde_json::Value), needle: &str| {
        let mut file = good.clone();
        change(&mut file);
        let message = Tokenizer::from_json(&serde_json::to_vec(&file).unwrap()).unwrap_err().to_string();
        assert!(message.contains(needle), "{needle:?} not in {message:?}");
    };
    refuse(&|f| f["normalizer"] = serde_json::json!({"type": "NFKC"}), "normalizer");
    refuse(&|f| f["normalizer"] = serde_json::Value::Null, "normalizer");
    refuse(&|f| f["pre_tokenizer"] = serde_json::json!({"type": "ByteLevel"}), "pre_tokenizer");
    refuse(&|f| f["decoder"] = serde_json::json!({"type": "Strip"}), "decoder");
    refuse(&|f| f["model"]["type"] = "Unigram".into(), "Unigram");
    refuse(&|f| f["model"] = serde_json::json!({"type": "Unigram", "vocab": [["a", 0.0]]}), "Unigram");
    refuse(&|f| f["model"]["dropout"] = 0.1.into(), "dropout");
    refuse(&|f| f["model"]["merges"][5] = serde_json::json!(["he", "zzz"]), "merge 5");
    refuse(&|f| f["model"]["merges"][5] = serde_json::json!("a b c"), "merge 5");
    refuse(&|f| f["model"]["vocab"]["he"] = 4_000_000_000u32.into(), "4000000000");
    refuse(&|f| f["model"]["vocab"]["he"] = 17.into(), "17");
    refuse(&|f| f["model"]["unk_token"] = "<nothing>".into(), "<nothing>");
    refuse(&|f| f["added_tokens"][3]["id"] = 7.into(), "<unk>");
    refuse(&|f| f["added_tokens"][4]["lstrip"] = true.into(), "<mask>");
    assert!(matches!(Tokenizer::from_json(b"{"), Err(Error::TokenizerJson(_))));
    let short = GgufVocab { token_types: vec![1; 5], ..as_gguf(&pebble_json()) };
    assert!(Tokenizer::from_gguf(short).unwrap_err().to_string().contains("5 token types"));
    let nan = GgufVocab { scores: vec![f32::NAN; scored().scores.len()], ..scored() };
    assert!(Tokenizer::from_gguf(nan).unwrap_err().to_string().contains("finite"));
}
