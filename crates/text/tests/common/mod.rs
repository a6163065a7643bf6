//! What several test files share: the pebble tokenizer in both forms, a mixed corpus, a reader of GGUF vocabularies.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod chat;

use std::path::PathBuf;

use lapidary_text::{GgufVocab, Tokenizer};
use serde_json::Value;

pub fn pebble_json() -> Vec<u8> {
    std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/pebble/moe/tokenizer.json"))
        .expect("the pebble tokenizer is committed")
}

pub fn pebble() -> Tokenizer {
    Tokenizer::from_json(&pebble_json()).expect("the pebble tokenizer loads")
}

/// A `tokenizer.json` as a converter would store it in a GGUF file of model `gemma4`.
pub fn as_gguf(json: &[u8]) -> GgufVocab {
    let file: Value = serde_json::from_slice(json).unwrap();
    let mut entries: Vec<(u64, String, i32)> = file["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(text, id)| (id.as_u64().unwrap(), text.clone(), 1))
        .collect();
    entries.sort();
    for token in file["added_tokens"].as_array().unwrap() {
        let (id, text) = (token["id"].as_u64().unwrap(), token["content"].as_str().unwrap());
        if let Some(entry) = entries.get_mut(id as usize) {
            // Converters mark the tokens of channels, calls and quotes as user-defined.
            let visible =
                ["channel", "tool_call", "tool_response", "\""].iter().any(|name| text.contains(name));
            entry.2 = match token["special"] == true {
                true if visible => 4,
                true => 3,
                false => 1,
            };
        }
    }
    let merge = |m: &Value| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap());
    GgufVocab {
        model: "gemma4".into(),
        pre: None,
        scores: vec![-1000.0; entries.len()],
        token_types: entries
            .iter()
            .map(|(_, text, kind)| if text.starts_with("<0x") { 6 } else { *kind })
            .collect(),
        tokens: entries.into_iter().map(|(_, text, _)| text).collect(),
        merges: file["model"]["merges"].as_array().unwrap().iter().map(merge).collect(),
        bos: Some(2),
        eos: Some(1),
        unk: Some(3),
        pad: Some(0),
        add_space_prefix: Some(false),
    }
}

/// A small generator of repeatable numbers (xorshift).
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

/// Lines that mix scripts, code, markup, emoji and white space, in every neighbourhood.
pub fn corpus(lines: usize) -> Vec<String> {
    const FRAGMENTS: [&str; 61] = [
        "Once upon a time",
        " there was",
        " a fox",
        " named Ada.",
        "The capital of Peru is Lima.",
        "12 + 30 = 42",
        " 3.14159",
        "1e-07",
        "fn main() {",
        "    println!(\"{}\", x[i]);",
        "}",
        "\tif (a && b)",
        "\t\treturn NULL;",
        "def f(x):",
        "    pass",
        "<div class=\"a\">",
        "<code>",
        "</code>",
        "</s>",
        "<br/>",
        "&lt;code>",
        "<table><tr><td>",
        "你好，世界",
        "日本語のテキスト",
        "한국어 문장",
        "مرحبا بالعالم",
        "שלום",
        "हिन्दी वाक्य",
        "ไทย",
        "Привет",
        "Ελλάδα",
        "café",
        "cafe\u{301}",
        "e\u{301}\u{302}",
        "👨‍👩‍👧‍👦",
        "🏳️‍🌈",
        "👍🏽",
        "😀",
        "🇫🇷",
        "\u{200b}",
        "\u{feff}",
        "\u{a0}",
        "\u{3000}",
        "\u{2581}",
        "\u{2581}\u{2581}",
        " \u{2581}",
        "\u{1}",
        "\u{7f}",
        "\r\n",
        "\r",
        "\u{2028}",
        "<0x0A>",
        "<|",
        "|>",
        "<|turn",
        "<unused7>",
        "[multimodal]",
        "<unk",
        "\u{10ffff}",
        "naïve façade",
        "don't we'll I'm",
    ];
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let blank = |rng: &mut Rng| match rng.below(6) {
        0 => "\n".repeat(1 + rng.below(40)),
        1 => "\t".repeat(1 + rng.below(40)),
        2 => " ".repeat(1 + rng.below(40)),
        3 => format!("{}\n{}", " ".repeat(rng.below(4)), "\t".repeat(rng.below(4))),
        _ => " ".to_owned(),
    };
    (0..lines)
        .map(|_| {
            let mut line = String::new();
            for _ in 0..1 + rng.below(12) {
                line += FRAGMENTS[rng.below(FRAGMENTS.len())];
                if rng.below(3) == 0 {
                    line += &blank(&mut rng);
                }
                if rng.below(9) == 0 {
                    line.extend(char::from_u32(rng.below(0x11_0000) as u32));
                }
            }
            line
        })
        .collect()
}

/// A file named by an environment variable. Such files are too large for the project; without them the test says so.
pub fn outside_file(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        eprintln!("skipped: {variable} does not name a file");
    }
    path
}

/// Reads the `tokenizer.ggml.*` keys of a GGUF file (version 3, little endian), enough for a vocabulary.
pub fn read_gguf_vocab(bytes: &[u8]) -> GgufVocab {
    struct Reader<'a>(&'a [u8]);
    impl Reader<'_> {
        fn take<const N: usize>(&mut self) -> [u8; N] {
            let (head, tail) = self.0.split_first_chunk().unwrap();
            self.0 = tail;
            *head
        }
        fn u32(&mut self) -> u32 {
            u32::from_le_bytes(self.take())
        }
        fn u64(&mut self) -> u64 {
            u64::from_le_bytes(self.take())
        }
        fn text(&mut self) -> String {
            let length = self.u64() as usize;
            let (head, tail) = self.0.split_at(length);
            self.0 = tail;
            String::from_utf8(head.to_vec()).unwrap()
        }
        fn value(&mut self, kind: u32) -> Value {
            match kind {
                0 | 1 | 7 => self.take::<1>()[0].into(),
                2 | 3 => u16::from_le_bytes(self.take()).into(),
                4 => self.u32().into(),
                5 => i32::from_le_bytes(self.take()).into(),
                6 => f32::from_le_bytes(self.take()).into(),
                8 => self.text().into(),
                9 => {
                    let (kind, n) = (self.u32(), self.u64());
                    (0..n).map(|_| self.value(kind)).collect()
                }
                _ => self.u64().into(),
            }
        }
    }
    let mut reader = Reader(&bytes[16..]);
    let mut vocab = GgufVocab::default();
    for _ in 0..reader.u64() {
        let key = reader.text();
        let kind = reader.u32();
        let value = reader.value(kind);
        let list = || value.as_array().unwrap().iter();
        let id = || value.as_u64().map(|id| id as u32);
        match key.strip_prefix("tokenizer.ggml.") {
            Some("model") => vocab.model = value.as_str().unwrap().into(),
            Some("pre") => vocab.pre = value.as_str().map(Into::into),
            Some("tokens") => vocab.tokens = list().map(|v| v.as_str().unwrap()).collect(),
            Some("scores") => vocab.scores = list().map(|v| v.as_f64().unwrap() as f32).collect(),
            Some("token_type") => vocab.token_types = list().map(|v| v.as_i64().unwrap() as i32).collect(),
            Some("merges") => vocab.merges = list().map(|v| v.as_str().unwrap()).collect(),
            Some("bos_token_id") => vocab.bos = id(),
            Some("eos_token_id") => vocab.eos = id(),
            Some("unknown_token_id") => vocab.unk = id(),
            Some("padding_token_id") => vocab.pad = id(),
            Some("add_space_prefix") => vocab.add_space_prefix = Some(value == 1),
            _ => {}
        }
    }
    vocab
}
