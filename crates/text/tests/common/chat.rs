//! Random conversations, for comparing templates.

use lapidary_text::ChatInput;
use serde_json::{Map, Value, json};

use super::Rng;

/// Conversations of every shape, also odd ones.
pub fn random_input(rng: &mut Rng) -> ChatInput {
    fn pick<'a>(rng: &mut Rng, options: &'a [Value]) -> &'a Value {
        &options[rng.below(options.len())]
    }
    fn value(rng: &mut Rng, depth: usize) -> Value {
        match rng.below(if depth == 0 { 8 } else { 11 }) {
            0 => json!(rng.below(99)),
            1 => json!(-3.5),
            2 => json!(1e-7),
            3 => json!("a\"b{é"),
            4 => json!(rng.below(2) == 0),
            5 => Value::Null,
            6 => json!(10_000_000_000_000_000_000_u64),
            7 => json!(3.0),
            8 => (0..rng.below(3)).map(|_| value(rng, depth - 1)).collect(),
            _ => Value::Object(
                (0..rng.below(4))
                    .map(|_| (["b", "A", "a_", "C"][rng.below(4)].to_owned(), value(rng, depth - 1)))
                    .collect(),
            ),
        }
    }
    fn schema(rng: &mut Rng, depth: usize) -> Value {
        let kinds = [
            json!("string"),
            json!("integer"),
            json!("array"),
            json!("object"),
            json!("object"),
            json!(["string", "null"]),
            Value::Null,
        ];
        let mut out = Map::new();
        if rng.below(8) > 0 {
            out.insert("type".into(), pick(rng, &kinds).clone());
        }
        let mut some = |rng: &mut Rng, key: &str, options: &[Value]| {
            if rng.below(3) == 0 {
                out.insert(key.into(), pick(rng, options).clone());
            }
        };
        some(rng, "description", &[json!("d"), json!(""), json!("x {y}")]);
        some(rng, "enum", &[json!(["a", "B"]), json!([1, 2]), json!([])]);
        some(rng, "nullable", &[json!(true), json!(false)]);
        some(rng, "default", &[json!({"b": 1, "A": {"z": null}}), json!([1, "q"]), json!(1e22)]);
        some(rng, "title", &[json!("T")]);
        some(rng, "additionalProperties", &[json!(false), json!({"type": "string"})]);
        some(rng, "required", &[json!(["b", "A"]), json!([])]);
        if depth > 0 && rng.below(2) == 0 {
            let fields = (0..rng.below(4))
                .map(|_| (["b", "A", "a_", "type", "Zed"][rng.below(5)].to_owned(), schema(rng, depth - 1)));
            let fields = Value::Object(fields.collect());
            out.insert("properties".into(), fields);
        }
        if depth > 0 && rng.below(2) == 0 {
            out.insert("items".into(), schema(rng, depth - 1));
        }
        Value::Object(out)
    }
    let contents = [
        json!("hi"),
        json!(" hi\n"),
        json!(""),
        Value::Null,
        json!("<|channel>thought\nx<channel|> y"),
        json!("a<channel|>b<channel|>c"),
        json!([{"type": "text", "text": " t "}, {"type": "image"}, {"type": "text", "text": "u<|channel>z"}]),
        json!([]),
        json!([{"type": "input_audio"}, {"type": "video"}, {"type": "other"}]),
    ];
    let mut messages = Vec::new();
    for _ in 0..rng.below(7) {
        let role =
            ["user", "assistant", "assistant", "assistant", "tool", "tool", "system", "developer", "model"]
                [rng.below(9)];
        let mut message = json!({"role": role, "content": pick(rng, &contents)});
        if role == "assistant" && rng.below(2) == 0 {
            let call = |rng: &mut Rng| {
                let arguments = if rng.below(4) == 0 {
                    Value::Null
                } else {
                    Value::Object(value(rng, 2).as_object().cloned().unwrap_or_default())
                };
                json!({"id": rng.below(3), "function": {"name": (["f", "g"][rng.below(2)]), "arguments": arguments}})
            };
            message["tool_calls"] = (0..rng.below(3)).map(|_| call(rng)).collect();
        }
        if role == "assistant" && rng.below(5) == 0 {
            message["tool_responses"] = (0..rng.below(3))
                .map(|_| json!({"name": pick(rng, &[json!("f"), Value::Null]), "response": value(rng, 2)}))
                .collect();
        }
        if role == "assistant" && rng.below(3) == 0 {
            message[["reasoning", "reasoning_content"][rng.below(2)]] =
                pick(rng, &[json!("r"), json!(""), Value::Null]).clone();
        }
        if role == "tool" && rng.below(3) > 0 {
            message["tool_call_id"] = rng.below(4).into();
        }
        if role == "tool" && rng.below(4) == 0 {
            message["name"] = "n".into();
        }
        messages.push(message);
    }
    let tool =
        |rng: &mut Rng| json!({"function": {"name": "f", "description": "D", "parameters": schema(rng, 3)}});
    ChatInput {
        messages,
        tools: (0..rng.below(3)).map(|_| tool(rng)).collect(),
        add_generation_prompt: rng.below(5) > 0,
        enable_thinking: [None, Some(false), Some(true)][rng.below(3)],
        preserve_thinking: [None, Some(true)][rng.below(2)],
        ..ChatInput::default()
    }
}
