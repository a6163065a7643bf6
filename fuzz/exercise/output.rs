//! What a server does with a model's reply, on any reply: tokens through parser and stop strings, in any cut of the text.

use std::sync::OnceLock;

use lapidary_text::{
    Event, Finish, OutputOptions, OutputParser, Reply, Specials, StopStrings, StreamDecoder, Tokenizer, Tools,
};
use serde_json::{Value, json};

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let file = include_bytes!("../../tests/pebble/moe/tokenizer.json");
        Tokenizer::from_json(file).expect("the pebble tokenizer loads")
    })
}

/// The first byte says how text is cut and what the prompt leaves open, the rest is the reply, markers spelled. Panics if a
/// promise is broken: a result that depends on the cut, a shown stop string, arguments that are no JSON object, text that
/// is lost or shown twice.
pub fn output(bytes: &[u8]) {
    let Some((&first, text)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(text);
    let tokenizer = tokenizer();
    let whole = tokenizer.encode(&text, Specials::Parse);
    let cut = recut(tokenizer, &whole, 1 + usize::from(first % 7));
    let prompt = match first & 0x80 {
        0 => "<bos><|turn>model\n",
        _ => "<bos><|turn>model\n<|channel>thought\n",
    };
    let prompt = tokenizer.encode(prompt, Specials::Parse);
    for parallel_calls in [true, false] {
        let (one, finish) = reply(tokenizer, &prompt, &whole, parallel_calls);
        let (other, other_finish) = reply(tokenizer, &prompt, &cut, parallel_calls);
        assert_eq!(one, other, "{text:?}");
        assert_eq!(finish, other_finish);
        for call in &one.calls {
            match serde_json::from_str::<Value>(&call.arguments) {
                Ok(arguments) => assert!(arguments.is_object()),
                Err(error) => assert!(error.to_string().contains("recursion limit"), "{error}"),
            }
        }
        assert!(parallel_calls || one.calls.len() <= 1);
        stops(&one.content);
    }
    // The plain decoder shows the same text in either cut.
    let decoded = |ids: &[u32]| {
        let mut decoder = StreamDecoder::without_specials(tokenizer);
        let mut out: String = ids.iter().map(|&id| decoder.push(id).expect("own ids decode")).collect();
        out += &decoder.finish();
        out
    };
    assert_eq!(decoded(&whole), decoded(&cut));
}

/// The same text in other tokens: what lies between markers is encoded in pieces of some characters.
fn recut(tokenizer: &Tokenizer, ids: &[u32], chars: usize) -> Vec<u32> {
    let mut out = Vec::new();
    for run in ids.split_inclusive(|&id| tokenizer.is_special(id)) {
        let (text, marker) = match run.split_last() {
            Some((&last, rest)) if tokenizer.is_special(last) => (rest, Some(last)),
            _ => (run, None),
        };
        let text: Vec<char> = tokenizer.decode(text).expect("own ids decode").chars().collect();
        for piece in text.chunks(chars) {
            out.extend(tokenizer.encode(&piece.iter().collect::<String>(), Specials::Plain));
        }
        out.extend(marker);
    }
    out
}

fn reply(
    tokenizer: &Tokenizer,
    prompt: &[u32],
    ids: &[u32],
    parallel_calls: bool,
) -> (Reply, Option<Finish>) {
    let fields = json!({"a": {"type": "integer"}, "b": {"type": "string"}});
    let tools = Tools::new(&[
        json!({"function": {"name": "f", "parameters": {"type": "object", "properties": fields}}}),
    ]);
    let options = OutputOptions { tools, parallel_calls, ..OutputOptions::default() };
    let mut parser = OutputParser::new(tokenizer, prompt, options);
    let mut events = Vec::new();
    for &id in ids {
        events.extend(parser.push(id).expect("own ids parse"));
    }
    events.extend(parser.finish());
    let mut begun = 0;
    for event in &events {
        match event {
            Event::CallBegin { index, .. } => {
                assert_eq!(*index, begun);
                begun += 1;
            }
            Event::CallArguments { index, .. } => assert_eq!(index + 1, begun),
            Event::Content(text) | Event::Reasoning(text) => assert!(!text.is_empty()),
        }
    }
    let mut reply = Reply::default();
    reply.extend(events);
    (reply, parser.finished())
}

/// No part of a stop string is shown, and what comes before it is whole, in every cut into two.
fn stops(text: &str) {
    let stops = ["\nUser:", "END", "ab", "aab", "\u{e9}"];
    let end = stops.iter().filter_map(|s| text.find(s).map(|at| (at + s.len(), at))).min();
    let expected = end.map_or(text, |(_, at)| &text[..at]);
    for at in text.char_indices().map(|(at, _)| at).take(64) {
        let mut watch = StopStrings::new(stops.map(str::to_owned));
        let mut shown = watch.push(&text[..at]);
        shown += &watch.push(&text[at..]);
        shown += &watch.finish();
        assert_eq!(shown, expected);
        assert_eq!(watch.stopped(), end.is_some());
    }
}
