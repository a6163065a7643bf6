//! What requests may ask of a service, over a scripted engine: refusals by field, defaults, choices, ends from outside.

#[allow(dead_code, reason = "each file uses some of it")]
#[path = "common/said.rs"]
mod said;

use std::time::Duration;

use lapidary::service::scripted::Scripted;
use lapidary::service::{
    Bos, ChatRequest, CompletionPrompt, CompletionRequest, FinishKind, GenerationParams, Markers,
    RequestError, ServiceEvent, ServiceOptions, choice_seed,
};
use said::{STOP, ask, bad_field, ids, refusal, run, says, says_text, tokenizer};
use serde_json::{Value, json};

#[test]
fn j04_pictures_and_sounds_are_refused_by_place() {
    let service = says_text("x");
    for (kind, tower) in [("image_url", "vision"), ("input_audio", "audio"), ("video", "vision")] {
        let mut request = ask("q");
        request.input.messages[0]["content"] =
            json!([{ "type": "text", "text": "see" }, { "type": kind, kind: { "url": "data:" } }]);
        let RequestError::Unsupported { what } = refusal(&service, request) else { panic!("{kind}") };
        assert!(what.contains("messages[0].content[1]") && what.contains(tower), "{what}");
    }
}

#[test]
fn k03_a_prompt_without_room_is_refused_with_both_counts_and_a_wish_is_clamped() {
    let service = says_text("x<turn|>");
    let prompt = |tokens: usize| CompletionRequest {
        prompt: CompletionPrompt::Ids(vec![5; tokens]),
        generation: GenerationParams { max_tokens: Some(1_000_000), ..GenerationParams::default() },
        ..CompletionRequest::default()
    };
    for tokens in [512, 513, 5000] {
        assert_eq!(
            service.complete(prompt(tokens)).unwrap_err(),
            RequestError::PromptTooLong { tokens, context: 512 }
        );
    }
    let mut reply = service.complete(prompt(500)).unwrap().remove(0);
    let Some(ServiceEvent::Started { prompt_tokens: 500, max_tokens: 12, .. }) = reply.next_blocking() else {
        panic!("the reply is granted the rest of the context")
    };
    let long = "word ".repeat(600);
    assert!(matches!(refusal(&service, ask(&long)), RequestError::PromptTooLong { context: 512, .. }));
}

#[test]
fn k05_ids_out_of_range_are_refused_by_field() {
    let service = says_text("x<turn|>");
    let vocab = i64::from(tokenizer().vocab_size());
    for id in [-1, vocab, 1 << 31, (1 << 32) + 5, i64::MIN, i64::MAX] {
        let generation = |g: GenerationParams| ChatRequest { generation: g, ..ask("q") };
        let bias = GenerationParams { logit_bias: vec![(3, 1.0), (id, 1.0)], ..GenerationParams::default() };
        assert_eq!(bad_field(refusal(&service, generation(bias))), "logit_bias");
        let stop = GenerationParams { stop_ids: vec![3, id], ..GenerationParams::default() };
        assert_eq!(bad_field(refusal(&service, generation(stop))), "stop_ids[1]");
        let prompt = CompletionPrompt::Ids(vec![3, 4, id]);
        let request = CompletionRequest { prompt, ..CompletionRequest::default() };
        assert_eq!(bad_field(service.complete(request).unwrap_err()), "prompt[2]");
        assert_eq!(bad_field(service.detokenize(&[id]).unwrap_err()), "tokens[0]");
    }
    assert_eq!(run(&service, ask("q")).0.text, "x");
}

#[test]
fn parameters_out_of_range_are_refused_by_field() {
    let service = says_text("x");
    type Change = fn(&mut GenerationParams);
    let cases: [(&str, Change); 16] = [
        ("temperature", |g| g.temperature = Some(-0.1)),
        ("temperature", |g| g.temperature = Some(f32::NAN)),
        ("top_p", |g| g.top_p = Some(1.5)),
        ("min_p", |g| g.min_p = Some(-1.0)),
        ("repetition_penalty", |g| g.repetition_penalty = Some(0.0)),
        ("presence_penalty", |g| g.presence_penalty = Some(3.0)),
        ("frequency_penalty", |g| g.frequency_penalty = Some(f32::INFINITY)),
        ("logit_bias", |g| g.logit_bias = vec![(1, f32::NAN)]),
        ("logit_bias", |g| g.logit_bias = vec![(1, 1.0), (1, 2.0)]),
        ("n", |g| g.n = 0),
        ("n", |g| g.n = 1000),
        ("max_tokens", |g| g.max_tokens = Some(0)),
        ("logprobs", |g| g.logprobs = Some(21)),
        ("stop", |g| g.stop = vec!["a".to_owned(); 33]),
        ("stop[1]", |g| g.stop = vec!["a".to_owned(), String::new()]),
        ("min_tokens", |g| (g.min_tokens, g.max_tokens) = (5, Some(4))),
    ];
    for (field, change) in cases {
        let mut request = ask("q");
        change(&mut request.generation);
        assert_eq!(bad_field(refusal(&service, request)), field);
    }
}

#[test]
fn conversations_of_the_wrong_form_are_refused_by_field() {
    let service = says_text("x");
    let call =
        |arguments: Value| json!([{ "id": "1", "function": { "name": "now", "arguments": arguments } }]);
    for (messages, field) in [
        (json!([]), "messages"),
        (json!(["hi"]), "messages[0]"),
        (json!([{ "content": "hi" }]), "messages[0].role"),
        (json!([{ "role": "user", "content": 7 }]), "messages[0].content"),
        (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "messages[0].content[0].text"),
        (json!([{ "role": "user", "content": [{ "type": "odd" }] }]), "messages[0].content[0]"),
        (
            json!([{ "role": "user", "content": "q" }, { "role": "assistant", "tool_calls": call(json!("[1]")) }]),
            "messages[1].tool_calls[0].function.arguments",
        ),
    ] {
        let mut request = ask("q");
        request.input.messages = messages.as_array().unwrap().clone();
        assert_eq!(bad_field(refusal(&service, request)), field, "{messages}");
    }
    for (tools, field) in [
        (json!([{ "function": {} }]), "tools[0].function.name"),
        (json!([{ "function": { "name": "a b" } }]), "tools[0].function.name"),
        (json!([{ "function": { "name": "a" } }, { "function": { "name": "a" } }]), "tools[1].function.name"),
        (json!([{ "function": { "name": "a", "parameters": 3 } }]), "tools[0].function.parameters"),
    ] {
        let mut request = ask("q");
        request.input.tools = tools.as_array().unwrap().clone();
        assert_eq!(bad_field(refusal(&service, request)), field, "{tools}");
    }
}

#[test]
fn k07_seeds_of_choices_are_derived_and_each_is_its_own_reply() {
    let (service, log) = says(vec![ids("one<turn|>"), ids("two<turn|>"), ids("three<turn|>")]);
    let mut request = ask("q");
    (request.generation.n, request.generation.seed) = (3, Some(7));
    let replies = service.chat(request).unwrap();
    let texts: Vec<(usize, String)> =
        replies.into_iter().map(|r| r.collect_blocking().unwrap()).map(|w| (w.index, w.text)).collect();
    assert_eq!(texts.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1, 2]);
    let mut seeds: Vec<u64> = log.all().iter().map(|s| s.sampling.seed).collect();
    assert_eq!(seeds, [7, choice_seed(7, 1), choice_seed(7, 2)]);
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
    // Without a seed two requests differ.
    run(&service, ask("q"));
    run(&service, ask("q"));
    let all = log.all();
    assert_ne!(all[3].sampling.seed, all[4].sampling.seed);
}

#[test]
fn the_models_defaults_hold_where_a_request_is_silent() {
    let (service, log) = says(vec![ids("x<turn|>")]);
    let mut request = ask("q");
    request.generation.top_k = Some(3);
    request.generation.logit_bias = vec![(9, -100.0)];
    run(&service, request);
    let seen = log.all().remove(0);
    let defaults = &service.model_info().defaults;
    assert_eq!(
        (seen.sampling.temperature, seen.sampling.top_p),
        (defaults.sampling.temperature, defaults.sampling.top_p)
    );
    assert_eq!((seen.sampling.top_k, seen.sampling.logit_bias), (3, vec![(9, -100.0)]));
    assert_eq!(seen.max_tokens, 512 - seen.prompt.len());
    assert!(defaults.stop_ids.iter().all(|id| seen.stop_ids.contains(id)));
    assert!(!seen.guided);
}

#[test]
fn ignore_eos_goes_on_and_own_stop_ids_still_end() {
    let (service, log) = says(vec![ids("one<turn|><eos>two Zed three<turn|>")]);
    let mut request = ask("q");
    request.generation.ignore_eos = true;
    let (whole, _) = run(&service, request.clone());
    assert_eq!((whole.text.as_str(), whole.reason), ("onetwo Zed three", Some(FinishKind::Length)));
    let zed = ids(" Zed")[0];
    request.generation.stop_ids = vec![i64::from(zed)];
    let (whole, _) = run(&service, request);
    assert_eq!((whole.text.as_str(), whole.reason), ("onetwo", Some(STOP)));
    assert_eq!(log.all()[1].stop_ids, [zed]);
}

#[test]
fn min_tokens_reaches_the_engine() {
    let (service, log) = says(vec![ids("a<turn|>b<turn|>")]);
    let mut request = ask("q");
    request.generation.min_tokens = 2;
    run(&service, request);
    assert_eq!(log.all()[0].min_tokens, 2);
}

#[test]
fn dropping_a_reply_cancels_it_and_only_it() {
    let tokenizer = tokenizer();
    let word = ids(" on")[0];
    let engine = Scripted::new(
        1 << 20,
        tokenizer.vocab_size() as usize,
        Box::new(move |_, _| Box::new(vec![word; 1 << 19].into_iter())),
    )
    .paced(Duration::from_micros(200));
    let log = engine.log();
    let service = engine.service(tokenizer, ServiceOptions::default()).unwrap();
    let mut kept = service.chat(ask("q")).unwrap().remove(0);
    for _ in 0..20 {
        let mut reply = service.chat(ask("q")).unwrap().remove(0);
        while !matches!(reply.next_blocking(), Some(ServiceEvent::Text { .. })) {}
    }
    let start = std::time::Instant::now();
    while log.active() > 1 {
        assert!(start.elapsed() < Duration::from_secs(5), "{} replies still run", log.active());
        std::thread::sleep(Duration::from_millis(1));
    }
    while !matches!(kept.next_blocking(), Some(ServiceEvent::Text { .. })) {}
    drop(kept);
}

#[test]
fn timeouts_overload_and_shutdown_are_told_apart() {
    let word = ids(" on")[0];
    let engine = || {
        Scripted::new(1 << 20, 4096, Box::new(move |_, _| Box::new(vec![word; 1 << 19].into_iter())))
            .paced(Duration::from_micros(300))
    };
    let service = engine().limited(1).service(tokenizer(), ServiceOptions::default()).unwrap();
    let mut request = ask("q");
    request.generation.timeout = Some(Duration::from_millis(50));
    let reply = service.chat(request.clone()).unwrap().remove(0);
    assert!(matches!(refusal(&service, ask("q")), RequestError::Overloaded { .. }));
    let error = reply.collect_blocking().unwrap_err();
    assert_eq!(error, RequestError::TimedOut { limit: Duration::from_millis(50) });
    let service = engine().service(tokenizer(), ServiceOptions::default()).unwrap();
    let reply = service.chat(ask("q")).unwrap().remove(0);
    service.drain(Duration::from_millis(20));
    assert_eq!(reply.collect_blocking().unwrap_err(), RequestError::ShuttingDown);
    assert_eq!(refusal(&service, ask("q")), RequestError::ShuttingDown);
}

#[test]
fn raw_prompts_have_one_bos_and_plain_markers_unless_told_otherwise() {
    let service = says_text("x");
    let bos = tokenizer().specials().bos.unwrap();
    let turn = tokenizer().specials().turn_open.unwrap();
    let encode = |text, bos, markers| service.tokenize(text, bos, markers).unwrap();
    for text in ["hi", "<bos>hi"] {
        let ids = encode(text, Bos::One, Markers::Plain);
        assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{text}");
        assert_eq!(ids, encode("hi", Bos::One, Markers::Plain));
    }
    assert!(!encode("hi", Bos::AsGiven, Markers::Parse).contains(&bos));
    assert!(!encode("<|turn>hi", Bos::One, Markers::Plain).contains(&turn));
    assert!(encode("<|turn>hi", Bos::One, Markers::Parse).contains(&turn));
    let ids: Vec<i64> = encode("<|turn>é😀", Bos::One, Markers::Parse).into_iter().map(i64::from).collect();
    assert_eq!(service.detokenize(&ids).unwrap(), "<bos><|turn>é😀");
}
