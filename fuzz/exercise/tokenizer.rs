//! What a loader does with a tokenizer file, on any bytes: read it, encode, decode, stream.

use lapidary_text::{GgufVocab, Specials, StreamDecoder, Tokenizer};

/// Panics if a promise is broken: plain text that becomes a control token, ids that don't decode, a stream that differs
/// from the whole.
pub fn tokenizer(bytes: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json(bytes).or_else(|_| Tokenizer::from_gguf(vocab(bytes))) else {
        return;
    };
    for text in ["", "a b  c\n\n<|turn>user\nhé😀\u{2581}<bos>", "<0x0A>\t\t<unused1></code>"] {
        let plain = tokenizer.encode(text, Specials::Plain);
        assert!(!plain.iter().any(|&id| tokenizer.is_special(id) && tokenizer.specials().unk != Some(id)));
        for ids in [plain, tokenizer.encode(text, Specials::Parse)] {
            let mut stream = StreamDecoder::new(&tokenizer);
            let mut streamed: String =
                ids.iter().map(|&id| stream.push(id).expect("own ids decode")).collect();
            streamed += &stream.finish();
            assert_eq!(streamed, tokenizer.decode(&ids).expect("own ids decode"));
        }
        let _ = tokenizer.encode_prompt(text, Specials::Parse);
    }
    for id in [0, 1, tokenizer.vocab_size(), u32::MAX] {
        let _ = (tokenizer.piece(id), tokenizer.is_special(id), tokenizer.decode(&[id]));
    }
}

/// A vocabulary as a GGUF file would have it, from lines of text: algorithm and pre-tokenizer, then for each token its
/// type and score and text, or `m` and a merge.
fn vocab(bytes: &[u8]) -> GgufVocab {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default();
    let (model, pre) = head.split_once(' ').map_or((head, None), |(model, pre)| (model, Some(pre)));
    let mut vocab =
        GgufVocab { model: model.into(), pre: pre.map(Into::into), unk: Some(0), ..GgufVocab::default() };
    for line in lines {
        let mut fields = line.splitn(3, ' ');
        match (fields.next().unwrap_or_default(), fields.next(), fields.next()) {
            ("m", left, right) => {
                vocab.merges.push(&format!("{} {}", left.unwrap_or_default(), right.unwrap_or_default()))
            }
            (kind, score, text) => {
                vocab.token_types.push(kind.parse().unwrap_or(1));
                vocab.scores.push(score.and_then(|s| s.parse().ok()).unwrap_or_default());
                vocab.tokens.push(text.unwrap_or_default());
            }
        }
    }
    vocab
}
