//! Incremental decoding: whatever arrives when, deltas are whole characters and add up.

mod common;

use common::{corpus, pebble};
use std::sync::Arc;

use lapidary_text::{ChatTemplate, Specials, StreamDecoder, Tokenizer};

const TEXTS: [&str; 6] = [
    "😀",
    "👨‍👩‍👧‍👦 and 🏳️‍🌈",
    "你好，世界",
    "e\u{301}\u{302}x\u{323}\u{30a}",
    "مرحبا 🇫🇷\u{10ffff}",
    "Once upon a time",
];

/// Byte tokens of a text, as a model without a piece for any of it would emit them.
fn byte_ids(text: &str) -> Vec<u32> {
    let tokenizer = pebble();
    text.bytes().map(|b| tokenizer.token_id(&format!("<0x{b:02X}>")).unwrap()).collect()
}

#[test]
fn d08_deltas_are_whole_characters_and_add_up_at_every_split() {
    let tokenizer = pebble();
    for text in TEXTS {
        for ids in [byte_ids(text), tokenizer.encode(text, Specials::Plain)] {
            for split in 0..=ids.len() {
                // Both halves are taken as steps of their own: what a step returns is what its ids made certain.
                let mut decoder = StreamDecoder::new(&tokenizer);
                let mut step =
                    |ids: &[u32]| ids.iter().map(|&id| decoder.push(id).unwrap()).collect::<String>();
                let (first, second) = (step(&ids[..split]), step(&ids[split..]));
                assert!(text.starts_with(&first), "{first:?} after {split} of {text:?}");
                assert_eq!(first + &second + &decoder.finish(), text);
                assert!(!text.contains('\u{fffd}'));
            }
        }
    }
}

#[test]
fn the_text_of_a_step_is_never_later_than_needed() {
    let tokenizer = pebble();
    let mut decoder = StreamDecoder::new(&tokenizer);
    let deltas: Vec<String> = byte_ids("aé😀b").into_iter().map(|id| decoder.push(id).unwrap()).collect();
    assert_eq!(deltas, ["a", "", "é", "", "", "", "😀", "b"]);
}

#[test]
fn broken_bytes_become_replacement_characters_as_in_the_full_decode() {
    let tokenizer = pebble();
    let byte = |b: u8| tokenizer.token_id(&format!("<0x{b:02X}>")).unwrap();
    let a = tokenizer.token_id("a").unwrap();
    for bytes in [
        &[0xf0, 0x9f, 0x98][..],
        &[0xff, 0xfe],
        &[0xe4, 0xbd, 0xf0, 0x9f, 0x98, 0x80, 0xc3],
        &[0x80],
        &[0xed, 0xa0, 0x80],
    ] {
        for tail in [vec![], vec![a], vec![a, byte(0xc3)]] {
            let ids: Vec<u32> = bytes.iter().map(|&b| byte(b)).chain(tail).collect();
            let mut decoder = StreamDecoder::new(&tokenizer);
            let mut text: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
            text += &decoder.finish();
            assert_eq!(text, tokenizer.decode(&ids).unwrap(), "{bytes:x?}");
            assert!(text.contains('\u{fffd}'));
        }
    }
}

#[test]
fn control_tokens_print_or_vanish_as_asked() {
    let tokenizer = pebble();
    let ids = tokenizer.encode("<|turn>user\nHi<turn|>\n", Specials::Parse);
    let collect = |mut decoder: StreamDecoder<&Tokenizer>| {
        ids.iter().map(|&id| decoder.push(id).unwrap()).collect::<String>()
    };
    assert_eq!(collect(StreamDecoder::new(&tokenizer)), "<|turn>user\nHi<turn|>\n");
    assert_eq!(collect(StreamDecoder::without_specials(&tokenizer)), "user\nHi\n");
}

#[test]
fn an_unknown_id_is_an_error_and_changes_nothing() {
    let tokenizer = pebble();
    let mut decoder = StreamDecoder::new(&tokenizer);
    let ids = byte_ids("é");
    decoder.push(ids[0]).unwrap();
    assert!(decoder.push(4096).is_err());
    assert_eq!(decoder.push(ids[1]).unwrap(), "é");
}

#[test]
fn d01_the_corpus_survives_the_round_trip_in_a_stream() {
    let tokenizer = pebble();
    for text in corpus(2_000) {
        let mut decoder = StreamDecoder::new(&tokenizer);
        let mut back: String =
            tokenizer.encode(&text, Specials::Plain).iter().map(|&id| decoder.push(id).unwrap()).collect();
        back += &decoder.finish();
        assert_eq!(back, text.replace('\u{2581}', " "));
    }
}

#[test]
fn a_tokenizer_is_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>(value: T) -> Arc<T> {
        Arc::new(value)
    }
    shared(ChatTemplate::new("").unwrap());
    let tokenizer = shared(pebble());
    let id = tokenizer.token_id("a").unwrap();
    let mut decoder = StreamDecoder::new(tokenizer);
    let text = std::thread::spawn(move || decoder.push(id).unwrap()).join().unwrap();
    assert_eq!(text, "a");
}
