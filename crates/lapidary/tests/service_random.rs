//! A model that says anything at all, under random requests: whatever it says, a reply keeps its promises.

use lapidary::service::scripted::{Scripted, Speaker};
use lapidary::service::{
    ChatRequest, FinishKind, Format, ParallelCalls, ServiceEvent, ServiceOptions, ToolChoice, WholeReply,
};
use lapidary::{ChatInput, Tokenizer};
use lapidary_engine::sampling::TokenMask;
use lapidary_text::Specials;
use serde_json::{Value, json};

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

fn tokenizer() -> Tokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/pebble/moe/tokenizer.json");
    Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap()
}

/// Says markers, bits of calls and any other token, one as likely as the other.
fn babbler(seed: u64, vocab: usize, likes: Vec<u32>) -> Box<dyn Speaker> {
    let mut rng = Rng(seed | 1);
    Box::new(move |mask: Option<&TokenMask>| {
        let allows = |id: u32| mask.is_none_or(|mask| mask.allows(id));
        for _ in 0..40 {
            let id = match rng.below(4) {
                0 => rng.below(vocab) as u32,
                _ => likes[rng.below(likes.len())],
            };
            if allows(id) {
                return Some(id);
            }
        }
        let allowed: Vec<u32> = (0..vocab as u32).filter(|&id| allows(id)).collect();
        Some(allowed[rng.below(allowed.len())])
    })
}

fn random_request(rng: &mut Rng) -> ChatRequest {
    let mut request = ChatRequest {
        input: ChatInput {
            messages: vec![json!({ "role": "user", "content": "q" })],
            enable_thinking: [None, Some(false), Some(true)][rng.below(3)],
            ..ChatInput::default()
        },
        ..ChatRequest::default()
    };
    if rng.below(2) == 0 {
        let strict = rng.below(2) == 0;
        request.input.tools = vec![
            json!({ "function": { "name": "f", "strict": strict, "parameters": { "type": "object", "properties": { "a": { "type": "integer" }, "b": { "enum": ["x", "y z"] } }, "required": ["b"] } } }),
            json!({ "function": { "name": "g" } }),
        ];
        request.tool_choice = match rng.below(4) {
            0 => ToolChoice::Required,
            1 => ToolChoice::Named("g".to_owned()),
            2 => ToolChoice::None,
            _ => ToolChoice::Auto,
        };
    }
    request.parallel_tool_calls = [ParallelCalls::Many, ParallelCalls::One][rng.below(2)];
    request.format = match rng.below(4) {
        0 => Format::JsonSchema { schema: schema(), name: None, strict: true },
        1 => Format::Regex("[a-d]{1,4}( [a-d]{1,4})*".to_owned()),
        _ => Format::Text,
    };
    request.thinking_budget = [None, Some(rng.below(12))][rng.below(2)];
    request.generation.max_tokens = Some(1 + rng.below(80));
    request.generation.ignore_eos = rng.below(5) == 0;
    request.generation.logprobs = [None, Some(2)][rng.below(2)];
    if rng.below(2) == 0 {
        request.generation.stop = ["e", "\n", "ab", "}", "call:", "the", "é"][rng.below(6)..]
            .iter()
            .map(|s| (*s).to_owned())
            .collect();
    }
    request
}

fn schema() -> Value {
    json!({ "type": "object", "properties": { "k": { "enum": ["v", 1, null] }, "l": { "type": "array", "items": { "type": "boolean" }, "maxItems": 2 } }, "required": ["k"], "additionalProperties": false })
}

#[test]
fn a_reply_keeps_its_promises_whatever_the_model_says() {
    let tokenizer = tokenizer();
    let vocab = tokenizer.vocab_size() as usize;
    let mut likes = tokenizer.encode(
        "<|channel><|channel>thought\n<channel|><channel|><|tool_call>call:f{b:<|\"|>x<|\"|>,a:1}<tool_call|>call:g{}<tool_call|>{\"k\":\"v\"}ab é the\n<turn|>",
        Specials::Parse,
    );
    // Half a character now and then.
    likes.extend(["<0xF0>", "<0x9F>", "<0xC3>"].iter().filter_map(|piece| tokenizer.token_id(piece)));
    let casting = move |_: &[u32], number: usize| babbler(number as u64 * 7919 + 13, vocab, likes.clone());
    let engine = Scripted::new(4096, vocab, Box::new(casting));
    let service = engine.service(tokenizer, ServiceOptions::default()).unwrap();
    let mut rng = Rng(20_261_130);
    let (mut calls, mut documents, mut stopped, mut thoughts) = (0, 0, 0, 0);
    for round in 0..3000 {
        let request = random_request(&mut rng);
        let context = || format!("round {round}: {request:?}");
        let mut reply =
            service.chat(request.clone()).unwrap_or_else(|e| panic!("{e}: {}", context())).remove(0);
        let mut whole = WholeReply::new(0);
        let mut ends = 0;
        while let Some(event) = reply.next_blocking() {
            assert_eq!(ends, 0, "{}", context());
            ends += usize::from(matches!(event, ServiceEvent::Finished { .. } | ServiceEvent::Failed(_)));
            whole.add(event).unwrap_or_else(|e| panic!("{e}: {}", context()));
        }
        assert_eq!(ends, 1, "{}", context());
        let reason = whole.reason.clone().unwrap();
        let g = &request.generation;
        let usage = whole.usage;
        assert!(usage.completion_tokens <= g.max_tokens.unwrap());
        assert!(usage.reasoning_tokens <= usage.completion_tokens);
        assert!(usage.reasoning_tokens <= request.thinking_budget.unwrap_or(usize::MAX), "{}", context());
        for stop in &g.stop {
            assert!(!whole.text.contains(stop.as_str()), "{stop:?} in {:?}: {}", whole.text, context());
        }
        for (id, call) in &whole.calls {
            assert!(id.starts_with("call_"));
            let arguments: Value = match serde_json::from_str(&call.arguments) {
                Ok(arguments) => arguments,
                // A call that was streamed while it was written and that a limit cut.
                Err(e) => {
                    let cut = e.is_eof() && Some(id) == whole.calls.last().map(|(id, _)| id);
                    assert!(cut && reason == FinishKind::Length, "{e}: {call:?}: {}", context());
                    continue;
                }
            };
            assert!(arguments.is_object());
            let strict = request.input.tools.first().is_some_and(|t| t["function"]["strict"] == true);
            let forced = matches!(request.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
            if call.name == "f" && (strict || forced) {
                assert!(
                    ["x", "y z"].contains(&arguments["b"].as_str().unwrap()),
                    "{arguments}: {}",
                    context()
                );
            }
        }
        let one = request.parallel_tool_calls == ParallelCalls::One;
        assert!(!one || whole.calls.len() <= 1, "{}", context());
        match &request.tool_choice {
            ToolChoice::None => assert!(whole.calls.is_empty(), "{}", context()),
            ToolChoice::Required | ToolChoice::Named(_) => {
                // Cut short by a limit, there is text of a call that never closed; never anything else.
                let cut =
                    reason == FinishKind::Length || matches!(reason, FinishKind::Stop { matched: Some(_) });
                assert!(cut || !whole.calls.is_empty(), "{reason:?} {}", context());
            }
            ToolChoice::Auto => {}
        }
        let complete = reason == FinishKind::Stop { matched: None };
        let formed = matches!(request.tool_choice, ToolChoice::Auto | ToolChoice::None);
        match &request.format {
            Format::JsonSchema { .. } if complete && formed && whole.calls.is_empty() => {
                let value: Value = serde_json::from_str(&whole.text)
                    .unwrap_or_else(|e| panic!("{:?}: {e}: {}", whole.text, context()));
                assert!(value.get("k").is_some());
                documents += 1;
            }
            Format::Regex(_) if complete && formed && whole.calls.is_empty() => {
                let fits = whole
                    .text
                    .split(' ')
                    .all(|w| (1..=4).contains(&w.len()) && w.bytes().all(|b| (b'a'..=b'd').contains(&b)));
                assert!(fits, "{:?}: {}", whole.text, context());
            }
            _ => {}
        }
        if g.logprobs.is_some() && !whole.text.contains('\u{fffd}') {
            // The tokens spell the text; the last may go beyond it where a stop string begins inside.
            let bytes: Vec<u8> = whole.tokens.iter().flat_map(|t| t.bytes.clone()).collect();
            let spelled = String::from_utf8_lossy(&bytes).replace("<|\"|>", "\"");
            let text = whole.text.replace("<|\"|>", "\"");
            assert!(spelled.starts_with(&text), "{spelled:?} {text:?}: {}", context());
            let last = whole.tokens.last().map_or(0, |t| t.bytes.len());
            assert!(spelled.len() < text.len() + last.max(1), "{spelled:?} {text:?}: {}", context());
            assert!(whole.tokens.windows(2).all(|w| w[0].logprob > w[1].logprob), "in order: {}", context());
        }
        calls += whole.calls.len();
        stopped += usize::from(matches!(reason, FinishKind::Stop { matched: Some(_) }));
        thoughts += usize::from(!whole.thought.is_empty());
    }
    eprintln!(
        "{calls} calls, {documents} documents, {stopped} stopped by a string, {thoughts} with thoughts"
    );
    assert!(calls > 100 && documents > 50 && stopped > 100 && thoughts > 200);
}
