//! A trace as one HTML file that needs nothing else: the data as JSON inside, a little script that draws it.

use std::collections::BTreeMap;

use lapidary_text::Tokenizer;
use serde_json::json;

use super::TokenTrace;

const PAGE: &str = include_str!("report.html");

/// The page for `tokens`, the answer to `prompt`. `model` is what the page calls the model; `experts` their number in a
/// layer, 0 for none.
pub fn html(
    model: &str,
    prompt: &str,
    tokens: &[TokenTrace],
    experts: usize,
    tokenizer: &Tokenizer,
) -> String {
    let mut texts = BTreeMap::new();
    for t in tokens {
        let others = t.alternatives.iter().chain(t.lens.iter().flatten()).map(|a| a.token);
        for id in others.chain([t.token]) {
            texts.entry(id).or_insert_with(|| shown(tokenizer, id));
        }
    }
    let data =
        json!({"model": model, "prompt": prompt, "experts": experts, "tokens": tokens, "texts": texts});
    // Inside a script element nothing but a "<" could end the data early or hide its end.
    let data = data.to_string().replace('<', "\\u003c");
    PAGE.replace("{{DATA}}", &data)
}

/// A token as text; bytes that are no text by themselves as the vocabulary spells them.
fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    let mut bytes = Vec::new();
    match tokenizer.append_bytes(id, &mut bytes).ok().and_then(|()| String::from_utf8(bytes).ok()) {
        Some(text) if !text.is_empty() => text,
        _ => tokenizer.piece(id).map_or_else(|_| format!("#{id}"), str::to_owned),
    }
}
