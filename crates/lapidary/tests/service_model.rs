//! The service over the real engine and the built-in model: what a client of the library sees, and all pairs of features
//! that could be in each other's way.

#[allow(dead_code, reason = "each file uses some of it")]
#[path = "common/served.rs"]
mod served;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapidary::capture::Captured;
use lapidary::service::{
    ChatRequest, CompletionPrompt, CompletionRequest, FinishKind, Format, GenerationParams, Markers,
    ParallelCalls, PromptToken, Reply, RequestError, Service, ServiceEvent, ServiceOptions, ToolChoice,
    WholeReply, choice_seed,
};
use lapidary::steering::{ControlVector, SteerSpec};
use lapidary::{KvFormat, LoadOptions};
use serde_json::{Value, json};
use served::{ask, greedy, load, one, pebble, start, thinking, wave};

const PATIENCE: Duration = Duration::from_secs(60);

fn weather() -> Value {
    let description = |text: &str| json!({ "type": "string", "description": text });
    json!({ "type": "function", "function": { "name": "get_weather", "description": "Get the weather in a city.", "parameters": {
        "type": "object", "properties": { "city": description("The name of the city.") }, "required": ["city"] } } })
}

const STOP: FinishKind = FinishKind::Stop { matched: None };

#[test]
fn a_conversation_is_answered_and_streams_as_it_is_made() {
    let service = pebble();
    let whole = one(&service, ask("What is the capital of Peru?"));
    assert_eq!((whole.text.as_str(), &whole.reason), ("The capital of Peru is Lima.", &Some(STOP)));
    let mut reply = service.chat(ask("What is the capital of Peru?")).unwrap().remove(0);
    let (mut streamed, mut deltas) = (WholeReply::new(0), 0);
    while let Some(event) = reply.next_blocking() {
        deltas += usize::from(matches!(event, ServiceEvent::Text { .. }));
        streamed.add(event).unwrap();
    }
    assert!(deltas > 3);
    assert_eq!((&streamed.text, &streamed.reason), (&whole.text, &whole.reason));
    assert_eq!(streamed.usage.completion_tokens, whole.usage.completion_tokens);
    let completion = CompletionRequest {
        prompt: CompletionPrompt::Text("Once upon a time".to_owned()),
        generation: GenerationParams { max_tokens: Some(12), ..greedy() },
        ..CompletionRequest::default()
    };
    let whole = service.complete(completion).unwrap().remove(0).collect_blocking().unwrap();
    assert!(whole.text.starts_with(" there was a"), "{:?}", whole.text);
    assert_eq!((whole.reason, whole.usage.completion_tokens), (Some(FinishKind::Length), 12));
}

#[test]
fn thoughts_are_split_counted_and_bounded() {
    let service = pebble();
    let request = thinking(ask("What is the capital of Kenya?"));
    let free = one(&service, request.clone());
    assert_eq!(free.thought, "The user asks about Kenya. Its capital is Nairobi.");
    assert_eq!(free.text, "The capital of Kenya is Nairobi.");
    assert!(free.usage.reasoning_tokens > 5 && free.usage.reasoning_tokens < free.usage.completion_tokens);
    for budget in [0, 1, 3, 5] {
        let whole = one(&service, ChatRequest { thinking_budget: Some(budget), ..request.clone() });
        assert_eq!(whole.usage.reasoning_tokens, budget);
        assert!(!whole.text.is_empty(), "budget {budget}");
    }
}

#[test]
fn a_tool_is_called_and_its_result_told() {
    let service = pebble();
    let mut request = ask("What is the weather in Oslo?");
    request.input.tools = vec![weather()];
    let call = one(&service, request.clone());
    assert_eq!(call.reason, Some(FinishKind::ToolCalls));
    assert_eq!((call.text.as_str(), call.calls.len()), ("", 1));
    let (id, called) = &call.calls[0];
    assert_eq!((called.name.as_str(), called.arguments.as_str()), ("get_weather", r#"{"city":"Oslo"}"#));
    request.input.messages.extend([
        json!({ "role": "assistant", "content": null, "tool_calls": [{ "id": id, "type": "function", "function": { "name": called.name, "arguments": called.arguments } }] }),
        json!({ "role": "tool", "tool_call_id": id, "content": "{\"weather\": \"snowy\", \"temperature\": -3}" }),
    ]);
    let told = one(&service, request);
    assert!(told.text.contains("snowy") && told.text.contains("-3"), "{:?}", told.text);
    assert_eq!(told.reason, Some(STOP));
}

#[test]
fn calls_are_forced_by_schema_where_the_model_would_rather_talk() {
    let service = pebble();
    let mut request = ask("What does a duck say?");
    request.input.tools = vec![weather()];
    request.input.tools[0]["function"]["parameters"]["properties"]["unit"] =
        json!({ "type": "string", "enum": ["C", "F"] });
    request.input.tools[0]["function"]["parameters"]["required"] = json!(["city", "unit"]);
    for choice in [ToolChoice::Required, ToolChoice::Named("get_weather".to_owned())] {
        request.tool_choice = choice;
        request.parallel_tool_calls = ParallelCalls::One;
        let whole = one(&service, request.clone());
        assert_eq!(whole.reason, Some(FinishKind::ToolCalls));
        let arguments: Value = serde_json::from_str(&whole.calls[0].1.arguments).unwrap();
        assert!(arguments["city"].is_string(), "{arguments}");
        assert!(["C", "F"].contains(&arguments["unit"].as_str().unwrap()), "{arguments}");
    }
    request.tool_choice = ToolChoice::None;
    let whole = one(&service, request);
    assert_eq!((whole.calls.len(), whole.text.as_str()), (0, "A duck says quack."));
}

fn person() -> Value {
    json!({ "type": "object", "properties": {
        "name": { "type": "string", "maxLength": 10 },
        "age": { "type": "integer", "minimum": 0, "maximum": 150 },
        "city": { "enum": ["Lima", "Oslo"] },
    }, "required": ["name", "age", "city"], "additionalProperties": false })
}

fn formatted(mut request: ChatRequest) -> ChatRequest {
    request.format = Format::JsonSchema { schema: person(), name: None, strict: true };
    request
}

#[track_caller]
fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    assert!(value["name"].as_str().unwrap().chars().count() <= 10, "{text}");
    assert!((0..=150).contains(&value["age"].as_i64().unwrap()), "{text}");
    assert!(["Lima", "Oslo"].contains(&value["city"].as_str().unwrap()), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 3);
}

#[test]
fn g02_answers_follow_a_schema_with_and_without_a_thought() {
    let service = pebble();
    let asked = ask("Give JSON for a person called Ada, aged 36, living in Lima.");
    let plain = one(&service, formatted(asked.clone()));
    check_person(&plain.text);
    assert_eq!((plain.thought.as_str(), plain.reason), ("", Some(STOP)));
    // Whatever is asked, and however it is drawn.
    for seed in 0..12 {
        let mut request = formatted(thinking(ask("What is the capital of Kenya?")));
        request.generation = GenerationParams {
            seed: Some(seed),
            temperature: Some(1.5),
            max_tokens: Some(600),
            ..GenerationParams::default()
        };
        let whole = one(&service, request);
        check_person(&whole.text);
        assert!(!whole.thought.is_empty(), "seed {seed}");
        assert_eq!(whole.reason, Some(STOP));
    }
}

#[test]
fn a06_logprobs_are_those_of_a_distribution() {
    let vocab = 4096;
    let service = start(load(), ServiceOptions { max_logprobs: vocab, ..ServiceOptions::default() });
    let mut request = ask("What is the capital of Peru?");
    request.generation.logprobs = Some(vocab);
    request.generation.logit_bias = vec![(7, -100.0)];
    let all = one(&service, request.clone());
    assert_eq!(service.model_info().vocab, vocab as usize);
    assert!(!all.tokens.is_empty());
    let text: Vec<u8> = all.tokens.iter().flat_map(|t| t.bytes.clone()).collect();
    assert_eq!(String::from_utf8(text).unwrap(), all.text);
    for token in &all.tokens {
        assert_eq!(token.top.len(), vocab as usize);
        let sum: f64 = token.top.iter().map(|t| f64::from(t.logprob).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{sum}");
        assert!(token.top.windows(2).all(|w| w[0].logprob >= w[1].logprob));
        let own = token.top.iter().find(|t| t.token == token.token).unwrap();
        assert_eq!(own.logprob, token.logprob);
    }
    // Fewer are the first of them.
    request.generation.logprobs = Some(20);
    let some = one(&service, request);
    assert_eq!(some.tokens.len(), all.tokens.len());
    for (some, all) in some.tokens.iter().zip(&all.tokens) {
        assert_eq!(some.top, all.top[..20]);
        assert_eq!((some.token, some.logprob), (all.token, all.logprob));
    }
}

#[test]
fn k07_seeds_reproduce_and_choices_share_one_prompt() {
    let service = pebble();
    let long = format!("{} Tell me a story about Zoe.", "The dog sat by the river. ".repeat(12));
    let drawn = |seed, n| {
        let mut request = ask(&long);
        request.generation = GenerationParams {
            seed: Some(seed),
            n,
            temperature: Some(1.2),
            max_tokens: Some(40),
            ..GenerationParams::default()
        };
        request
    };
    let texts = |request| -> Vec<String> {
        let replies = service.chat(request).unwrap();
        replies.into_iter().map(|r| r.collect_blocking().unwrap().text).collect()
    };
    let (first, again, other) = (texts(drawn(7, 1)), texts(drawn(7, 1)), texts(drawn(8, 1)));
    assert_eq!(first, again);
    assert_ne!(first, other);
    let before = service.stats().engine;
    let four = texts(drawn(99, 4));
    let after = service.stats().engine;
    assert_eq!(four.len(), 4);
    for (i, text) in four.iter().enumerate() {
        assert_eq!(*text, texts(drawn(choice_seed(99, i), 1))[0], "choice {i}");
        assert!(four.iter().filter(|t| *t == text).count() == 1);
    }
    // The prompt was known, so that each choice ran little of it.
    let prompt = service.apply_template(&drawn(99, 1).input).unwrap().1.len() as u64;
    let (asked, cached) =
        (after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens);
    assert_eq!(asked, 4 * prompt);
    assert!(asked - cached <= 4 * 64, "{} of {asked} tokens were run", asked - cached);
}

#[test]
fn k07_choices_of_a_prompt_that_nobody_knows_run_it_once() {
    let service = pebble();
    let mut request = ask(&format!("{} Who is happy?", "A calm tiger walked over the beach. ".repeat(20)));
    request.generation.n = 4;
    request.generation.max_tokens = Some(5);
    let prompt = service.apply_template(&request.input).unwrap().1.len();
    let replies: Vec<WholeReply> =
        service.chat(request).unwrap().into_iter().map(|r| r.collect_blocking().unwrap()).collect();
    let run: usize = replies.iter().map(|r| r.usage.prompt_tokens - r.usage.cached_tokens).sum();
    assert!(run < 2 * prompt, "{run} tokens of 4 x {prompt} were run");
    assert!(replies.iter().all(|r| r.usage.prompt_tokens == prompt));
}

#[test]
fn k04_stop_strings_end_a_reply_and_a_cancelled_one_frees_its_pages() {
    let service = pebble();
    let mut request = ask("What is the capital of Peru?");
    request.generation.stop = vec!["of Pe".to_owned()];
    let whole = one(&service, request);
    assert_eq!(whole.text, "The capital ");
    assert_eq!(whole.reason, Some(FinishKind::Stop { matched: Some("of Pe".to_owned()) }));
    // Dropped before, between and behind tokens.
    for events in [0, 1, 3, 9] {
        let mut request = ask("Tell me a story about Zoe.");
        request.generation.ignore_eos = true;
        request.generation.max_tokens = Some(900);
        let mut reply = service.chat(request).unwrap().remove(0);
        (0..events).for_each(|_| drop(reply.next_blocking()));
        drop(reply);
    }
    wait_until_idle(&service);
    assert!(service.stats().engine.ends.cancelled >= 4);
}

#[track_caller]
fn wait_until_idle(service: &Service) {
    let start = Instant::now();
    loop {
        let stats = service.stats().engine;
        if stats.active == 0 && stats.pages.iter().all(|p| p.live == 0) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{stats:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What one request of the table is, beside the service that it runs on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Case {
    schema: bool,
    thinking: bool,
    penalties: bool,
    n: usize,
    cancel: bool,
    stream: bool,
    steering: bool,
    capture: bool,
    prompt_logprobs: bool,
}

/// All combinations of five things that a request can ask for and that could be in each other's way. The other three are
/// sums of these without carry, so that every two of all eight meet in each of their four ways.
fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for bits in 0..32 {
        let on = |bit: usize| bits >> bit & 1 == 1;
        all.push(Case {
            schema: on(0),
            thinking: on(1),
            penalties: on(2),
            n: if on(3) { 3 } else { 1 },
            cancel: false,
            stream: on(4),
            steering: on(0) ^ on(1) ^ on(2),
            capture: on(2) ^ on(3) ^ on(4),
            prompt_logprobs: on(0) ^ on(3),
        });
    }
    for stream in [false, true] {
        for (schema, thinking) in [(false, false), (true, true)] {
            all.push(Case {
                schema,
                thinking,
                penalties: true,
                n: 3,
                cancel: true,
                stream,
                steering: stream,
                capture: !stream,
                prompt_logprobs: thinking,
            });
        }
    }
    all
}

fn request_of(case: Case, index: usize) -> ChatRequest {
    let subject = ["Zoe", "Jack", "Wren"][index % 3];
    let filler = "The mouse sat by the lake. ".repeat(3 + index % 4);
    let mut request = ask(&format!("{filler}Tell me a story about {subject}."));
    request.generation = GenerationParams {
        seed: Some(index as u64),
        n: case.n,
        // Long enough that those who were let in together outgrow one sequence's pages.
        max_tokens: Some(if case.schema { 160 } else { 110 }),
        ignore_eos: !case.schema,
        ..GenerationParams::default()
    };
    if case.penalties {
        request.generation.repetition_penalty = Some(1.1);
        request.generation.presence_penalty = Some(0.5);
        request.generation.frequency_penalty = Some(0.25);
    }
    if case.steering {
        // Two kinds, so that differently steered requests share a batch.
        let vector = ControlVector::new("v", BTreeMap::from([(1 + index % 2, wave(index % 2))])).unwrap();
        request.generation.vectors = vec![Arc::new(vector)];
        request.generation.steering = vec![SteerSpec { strength: 0.5, ..SteerSpec::new("v") }];
    }
    if case.capture {
        let also = if case.steering { "+projections" } else { "" };
        let spec = format!("layers=1-2,positions=last,what=hidden+routes{also}");
        request.generation.capture = Some(spec.parse().unwrap());
    }
    if case.prompt_logprobs {
        request.generation.prompt_logprobs = Some(2);
    }
    if case.thinking {
        request = thinking(request);
        request.thinking_budget = Some(20);
    }
    if case.schema { formatted(request) } else { request }
}

/// What came of a request: text, thought, tokens, captures and the prompt's probabilities of each choice.
type Outcome = Vec<(String, String, usize, Vec<Captured>, Vec<PromptToken>)>;

fn outcome_of(replies: Vec<Reply>, case: Case) -> Outcome {
    let mut out = Vec::new();
    for mut reply in replies {
        let whole = match case.stream {
            false => reply.collect_blocking().unwrap_or_else(|e| panic!("{case:?}: {e}")),
            true => {
                let mut whole = WholeReply::new(reply.index());
                while let Some(event) = reply.next_blocking() {
                    whole.add(event).unwrap_or_else(|e| panic!("{case:?}: {e}"));
                }
                whole
            }
        };
        if case.schema && whole.reason == Some(STOP) {
            check_person(&whole.text);
        }
        assert!(!case.thinking || whole.usage.reasoning_tokens <= 20, "{case:?}");
        let tensors = if case.capture { 7 + usize::from(case.steering) } else { 0 };
        assert_eq!(whole.captured.len(), tensors, "{case:?}");
        let scored = if case.prompt_logprobs && whole.index == 0 { whole.usage.prompt_tokens } else { 0 };
        assert_eq!(whole.prompt.len(), scored, "{case:?}");
        let tokens = whole.usage.completion_tokens;
        out.push((whole.text, whole.thought, tokens, whole.captured, whole.prompt));
    }
    out
}

/// Prefix x KV format, schema x thinking, cancel x stream, penalties x n, pre-emption x prefix, steering x prefix, capture x
/// stream, steering x n, capture x pre-emption, and with them all other pairs: each request gives in company, over kept prefixes, pre-empted and beside cancelled ones, what it gives alone on
/// an engine without any of that.
#[test]
fn all_pairs_of_features_give_what_each_request_gives_alone() {
    let cases = cases();
    for kv in [KvFormat::F16, KvFormat::F32] {
        let load = || LoadOptions { kv: Some(kv), context: Some(384), ..load() };
        let plain = ServiceOptions {
            prefix: lapidary::service::PrefixOptions::off(),
            sequences: 4,
            inline_vectors: true,
            ..ServiceOptions::default()
        };
        let alone = start(load(), plain.clone());
        let expected: Vec<Outcome> = cases
            .iter()
            .enumerate()
            .filter(|(_, case)| !case.cancel)
            .map(|(i, case)| outcome_of(alone.chat(request_of(*case, i)).unwrap(), *case))
            .collect();
        for prefix in [false, true] {
            for tight in [false, true] {
                let options = ServiceOptions {
                    prefix: if prefix { Default::default() } else { plain.prefix.clone() },
                    // Pages for one sequence of the whole context, wanted by all at once.
                    sequences: if tight { 1 } else { 80 },
                    running: 128,
                    ..plain.clone()
                };
                let service = start(load(), options);
                let under_way: Vec<Vec<Reply>> = cases
                    .iter()
                    .enumerate()
                    .map(|(i, case)| service.chat(request_of(*case, i)).unwrap_or_else(|e| panic!("{e}")))
                    .collect();
                let mut found = Vec::new();
                for (replies, case) in under_way.into_iter().zip(&cases) {
                    match case.cancel {
                        false => found.push(outcome_of(replies, *case)),
                        true if case.stream => replies.into_iter().for_each(|mut r| drop(r.next_blocking())),
                        true => drop(replies),
                    }
                }
                let kept = cases.iter().filter(|case| !case.cancel);
                for ((found, expected), case) in found.iter().zip(&expected).zip(kept) {
                    assert_eq!(found, expected, "{case:?} kv {kv:?} prefix {prefix} tight {tight}");
                }
                wait_until_idle(&service);
                let stats = service.stats().engine;
                assert_eq!((stats.ends.failed, stats.steering_sets), (0, 0));
                assert_eq!(
                    stats.scheduler.preemptions > 0,
                    tight,
                    "prefix {prefix}: {:?} {:?}",
                    stats.scheduler,
                    stats.pages
                );
                assert_eq!(stats.cached_tokens > 0, prefix, "tight {tight}");
            }
        }
    }
}

#[test]
fn a_prompt_is_told_token_by_token_with_its_probabilities() {
    let service = pebble();
    let request = |max_tokens, n| CompletionRequest {
        prompt: CompletionPrompt::Text("Once upon a time there was".to_owned()),
        generation: GenerationParams {
            max_tokens: Some(max_tokens),
            prompt_logprobs: Some(2),
            n,
            ..greedy()
        },
        ..CompletionRequest::default()
    };
    let plain = service.complete(CompletionRequest {
        generation: GenerationParams { prompt_logprobs: None, ..request(5, 1).generation },
        ..request(5, 1)
    });
    let plain = plain.unwrap().remove(0).collect_blocking().unwrap();
    for (max_tokens, n) in [(5, 1), (5, 3), (0, 1)] {
        for (i, reply) in service.complete(request(max_tokens, n)).unwrap().into_iter().enumerate() {
            let whole = reply.collect_blocking().unwrap();
            assert_eq!(whole.text, if max_tokens == 0 { "" } else { &plain.text });
            if i > 0 {
                assert!(whole.prompt.is_empty());
                continue;
            }
            assert_eq!((whole.prompt.len(), whole.usage.cached_tokens), (whole.usage.prompt_tokens, 0));
            let spelled: String = whole.prompt[1..].iter().map(|t| t.text.as_str()).collect();
            assert_eq!((spelled.as_str(), whole.prompt[0].logprob), ("Once upon a time there was", None));
            for token in &whole.prompt[1..] {
                assert!(token.logprob.unwrap() <= token.top[0].logprob && token.top.len() == 2, "{token:?}");
            }
            // The model knows the phrase.
            assert!(whole.prompt.last().unwrap().logprob.unwrap() > -1.0, "{:?}", whole.prompt);
        }
    }
    let mut none = request(0, 1);
    none.generation.prompt_logprobs = None;
    let Err(RequestError::BadRequest { field, .. }) = service.complete(none) else { panic!("refused") };
    assert_eq!(field, "max_tokens");
    let Err(RequestError::BadRequest { field, .. }) = service.complete(request(0, 2)) else {
        panic!("refused")
    };
    assert_eq!(field, "n");
}

#[test]
fn raw_markers_are_text_unless_they_are_asked_for() {
    let service = pebble();
    let prompt =
        "<bos><|turn>user\nWhat is the capital of Peru?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>";
    let complete = |markers| {
        let request = CompletionRequest {
            prompt: CompletionPrompt::Text(prompt.to_owned()),
            markers,
            generation: GenerationParams { max_tokens: Some(20), ..greedy() },
            ..CompletionRequest::default()
        };
        service.complete(request).unwrap().remove(0).collect_blocking().unwrap()
    };
    assert_eq!(complete(Markers::Parse).text, "The capital of Peru is Lima.");
    assert!(complete(Markers::Plain).usage.prompt_tokens > complete(Markers::Parse).usage.prompt_tokens);
}

#[test]
fn a_drained_service_ends_what_runs_and_refuses_what_comes() {
    let service = pebble();
    let mut request = ask("Tell me a story about Zoe.");
    request.generation.max_tokens = Some(5);
    let reply = service.chat(request.clone()).unwrap().remove(0);
    service.drain(PATIENCE);
    assert_eq!(reply.collect_blocking().unwrap().usage.completion_tokens, 5);
    let error = service.chat(request).unwrap_err();
    assert_eq!(error, lapidary::service::RequestError::ShuttingDown);
}
