//! The service over a scripted engine: what a reply becomes, whatever the tokens are. Text, ends, thoughts, stop strings and
//! probabilities; `service_calls.rs`, `service_formats.rs` and `service_requests.rs` have the rest of sections C to G, J
//! and K of the hard cases as far as neither a model nor a wire format is needed.

#[allow(dead_code, reason = "each file uses some of it")]
#[path = "common/said.rs"]
mod said;

use lapidary::ChatTemplate;
use lapidary::service::scripted::{Scripted, Speaker};
use lapidary::service::{CompletionPrompt, CompletionRequest, FinishKind, ServiceEvent, ServiceOptions};
use lapidary_engine::sampling::TokenMask;
use lapidary_text::Specials;
use said::{
    STOP, ask, bad_field, formatted, ids, person, refusal, run, says, says_text, says_with, thinking,
    tokenizer, with_tools,
};
use serde_json::json;

#[test]
fn text_comes_in_deltas_and_ends_with_counts() {
    let service = says_text("Hello there, é😀!<turn|>never");
    let (whole, events) = run(&service, ask("hi"));
    assert_eq!(whole.text, "Hello there, é😀!");
    assert_eq!(whole.reason, Some(STOP));
    assert!(events.iter().filter(|e| matches!(e, ServiceEvent::Text { .. })).count() > 2);
    let prompt = service.apply_template(&ask("hi").input).unwrap().1.len();
    assert_eq!(whole.usage.prompt_tokens, prompt);
    assert_eq!(whole.usage.completion_tokens, ids("Hello there, é😀!").len());
    assert!(whole.usage.first_token.unwrap() <= whole.usage.total);
}

#[test]
fn d07_every_end_stops_and_none_is_shown() {
    for end in ["<eos>", "<turn|>", "<|tool_response>", "<|turn>"] {
        let (whole, _) = run(&says_text(&format!("answer{end}more")), ask("q"));
        assert_eq!((whole.text.as_str(), whole.reason), ("answer", Some(STOP)), "{end}");
        let completion = CompletionRequest {
            prompt: CompletionPrompt::Text("q".to_owned()),
            ..CompletionRequest::default()
        };
        if end != "<|turn>" {
            let whole = says_text(&format!("answer{end}more"))
                .complete(completion)
                .unwrap()
                .remove(0)
                .collect_blocking();
            assert_eq!(whole.unwrap().text, "answer", "{end}");
        }
    }
}

#[test]
fn d08_characters_in_bytes_come_whole_at_every_split() {
    // Byte tokens for an emoji family with joiners, cut off after each.
    let text = "a👨\u{200d}👩\u{200d}👧é日";
    let tokenizer = tokenizer();
    let all: Vec<u32> = text
        .bytes()
        .map(|b| tokenizer.token_id(&format!("<0x{b:02X}>")).expect("byte pieces are there"))
        .collect();
    let mut end = all.clone();
    end.extend(ids("<turn|>"));
    let (service, _) = says(vec![end]);
    let (whole, events) = run(&service, ask("q"));
    assert_eq!(whole.text, text);
    for event in events {
        if let ServiceEvent::Text { delta, .. } = event {
            assert!(!delta.contains('\u{fffd}'));
        }
    }
}

#[test]
fn e01_thoughts_go_to_their_own_events() {
    for (reply, thought, text) in [
        ("<|channel>thought\nso it is\n<channel|>Yes.<turn|>", "so it is", "Yes."),
        ("<|channel>thought\n<channel|>Yes.<turn|>", "", "Yes."),
        ("Yes.<turn|>", "", "Yes."),
        ("Yes.<channel|> No.<turn|>", "", "Yes. No."),
        ("<|channel>thought\nnever ends", "never ends", ""),
    ] {
        for request in [ask("q"), thinking(ask("q"))] {
            let (whole, _) = run(&says_text(reply), request);
            assert_eq!((whole.thought.as_str(), whole.text.as_str()), (thought, text), "{reply}");
        }
    }
}

#[test]
fn e05_a_budget_closes_a_thought_and_an_answer_follows() {
    let tokenizer = tokenizer();
    let open = tokenizer.specials().channel_open.unwrap();
    for budget in [0, 1, 7, 64] {
        // Thinks for ever: whenever it can, it opens a thought, and it never closes one by itself.
        let word = ids(" hmm")[0];
        let answer = ids("Done.<turn|>");
        let casting = move |_: &[u32], _: usize| -> Box<dyn Speaker> {
            let answer = answer.clone();
            let mut said = 0;
            let mut answering = 0;
            Box::new(move |mask: Option<&TokenMask>| {
                let may_open = mask.is_none_or(|mask| mask.allows(open));
                if said == 0 && may_open {
                    said += 1;
                    return Some(open);
                }
                // The guide forces the closer in its own time; afterwards opening is forbidden.
                if mask.is_some() && !may_open {
                    answering += 1;
                    return answer.get(answering - 1).copied();
                }
                said += 1;
                Some(word)
            })
        };
        let engine = Scripted::new(2000, tokenizer.vocab_size() as usize, Box::new(casting));
        let service = engine.service(self::tokenizer(), ServiceOptions::default()).unwrap();
        let mut request = thinking(ask("q"));
        request.thinking_budget = Some(budget);
        request.generation.max_tokens = Some(500);
        let (whole, _) = run(&service, request);
        assert_eq!(whole.text, "Done.", "budget {budget}");
        assert_eq!(whole.usage.reasoning_tokens, budget);
        // Opener, thought, closer, answer. Without any budget no thought opens.
        let thought = if budget == 0 { 0 } else { 1 + budget + 1 };
        assert_eq!(whole.usage.completion_tokens, thought + ids("Done.").len());
        assert_eq!(whole.reason, Some(STOP));
    }
}

#[test]
fn e05_a_short_thought_is_left_alone_and_the_default_holds() {
    let reply = "<|channel>thought\nshort\n<channel|>Yes.<turn|>";
    let counted = ids("thought\nshort\n").len();
    let (whole, _) = run(&says_text(reply), thinking(ask("q")));
    assert_eq!(whole.usage.reasoning_tokens, counted);
    let options = ServiceOptions { default_thinking_budget: Some(2), ..ServiceOptions::default() };
    let (service, _) = says_with(vec![ids(reply)], options);
    let (whole, _) = run(&service, thinking(ask("q")));
    assert_eq!(whole.usage.reasoning_tokens, 2);
    let mut request = thinking(ask("q"));
    request.thinking_budget = Some(100);
    assert_eq!(run(&service, request).0.thought, "short");
}

#[test]
fn e06_a_template_of_another_family_is_refused_when_asked_to() {
    let template =
        || ChatTemplate::new("{{ bos_token }}<|im_start|>{{ messages[0].content }}<|im_end|>").unwrap();
    let start = |strict_template| {
        let engine = Scripted::new(64, 4096, Box::new(|_, _| Box::new(Vec::new().into_iter())));
        let options = ServiceOptions { strict_template, ..ServiceOptions::default() };
        engine.service_with(tokenizer(), template(), options)
    };
    let error = start(true).expect_err("the markers are unknown").to_string();
    assert!(error.contains("<|im_start|>") && error.contains("<|im_end|>"), "{error}");
    start(false).unwrap();
}

#[test]
fn e07_a_trailing_assistant_message_is_continued() {
    let (service, log) = says(vec![ids(" and more<turn|>")]);
    let mut request = ask("q");
    request.input.messages.push(json!({ "role": "assistant", "content": "Once upon" }));
    request.input.continue_final = true;
    let (whole, _) = run(&service, request.clone());
    assert_eq!(whole.text, " and more");
    let prompt = tokenizer().decode(&log.all()[0].prompt).unwrap();
    assert!(prompt.ends_with("Once upon"), "{prompt}");
    // A contradiction is refused with its place.
    request.input.messages[1]["content"] = json!("<|channel>thought\nhalf a thought");
    assert_eq!(bad_field(refusal(&service, request)), "messages[1].content");
}

#[test]
fn k04_no_part_of_a_stop_string_reaches_the_client_in_any_cut() {
    let tokenizer = tokenizer();
    let text = "The quick brown fox.\nUser: é😀 own f";
    for (stops, shown, matched) in [
        (vec!["own fox"], "The quick br", Some("own fox")),
        (vec!["\nUser:"], "The quick brown fox.", Some("\nUser:")),
        (vec!["fox.", "quick brown fox."], "The ", Some("quick brown fox.")),
        (vec!["😀"], "The quick brown fox.\nUser: é", Some("😀")),
        (vec!["own fx"], text, None),
        (vec!["T"], "", Some("T")),
    ] {
        for at in text.char_indices().map(|(at, _)| at) {
            let mut reply = tokenizer.encode(&text[..at], Specials::Plain);
            reply.extend(tokenizer.encode(&text[at..], Specials::Plain));
            let length = reply.len();
            reply.extend(tokenizer.specials().turn_close);
            let (service, _) = says(vec![reply.clone()]);
            let mut request = ask("q");
            request.generation.stop = stops.iter().map(|s| (*s).to_owned()).collect();
            request.generation.logprobs = Some(1);
            let (whole, events) = run(&service, request.clone());
            assert_eq!(whole.text, shown, "{stops:?} {at}");
            let reason = FinishKind::Stop { matched: matched.map(str::to_owned) };
            assert_eq!(whole.reason, Some(reason), "{stops:?} {at}");
            // It ends with the token that completes the string.
            if let Some(matched) = matched {
                let end = text.find(matched).unwrap() + matched.len();
                let mut covered = 0;
                let mut bytes = Vec::new();
                while bytes.len() < end {
                    tokenizer.append_bytes(reply[covered], &mut bytes).unwrap();
                    covered += 1;
                }
                assert_eq!(whole.usage.completion_tokens, covered, "{stops:?} {at}");
            } else {
                assert_eq!(whole.usage.completion_tokens, length);
            }
            // Tokens are those of the visible text.
            let bytes: Vec<u8> = whole.tokens.iter().flat_map(|t| t.bytes.clone()).collect();
            assert!(bytes.starts_with(shown.as_bytes()), "{stops:?} {at}");
            for event in events {
                if let ServiceEvent::Text { delta, .. } = event {
                    assert!(!delta.is_empty());
                }
            }
            // The same for raw completions.
            let completion = CompletionRequest {
                prompt: CompletionPrompt::Text("q".to_owned()),
                generation: request.generation,
                ..CompletionRequest::default()
            };
            let raw = says(vec![reply]).0.complete(completion).unwrap().remove(0).collect_blocking().unwrap();
            assert_eq!((raw.text.as_str(), raw.reason), (shown, whole.reason));
        }
    }
}

#[test]
fn k04_stop_strings_work_behind_thoughts_and_in_json_and_at_an_undecided_place() {
    let mut request = thinking(ask("q"));
    request.generation.stop = vec!["END".to_owned()];
    let (whole, _) =
        run(&says_text("<|channel>thought\nEND of thought\n<channel|>Text END more<turn|>"), request);
    assert_eq!((whole.thought.as_str(), whole.text.as_str()), ("END of thought", "Text "));
    assert_eq!(whole.reason, Some(FinishKind::Stop { matched: Some("END".to_owned()) }));
    let mut request = formatted(ask("q"), person());
    request.generation.stop = vec!["age".to_owned()];
    let (whole, _) = run(&says_text(r#"{"name":"Ada","age":36}"#), request);
    assert_eq!(whole.text, r#"{"name":"Ada",""#);
    // "call:" may begin a call; as a stop string it ends the reply where it is complete.
    let mut request = with_tools(ask("q"));
    request.generation.stop = vec!["call:".to_owned()];
    let (whole, _) = run(&says_text("call:now{}<turn|>"), request);
    assert_eq!((whole.text.as_str(), whole.calls.len()), ("", 0));
    assert_eq!(whole.usage.completion_tokens, ids("call:").len());
}

#[test]
fn logprobs_belong_to_the_tokens_of_the_text() {
    let reply = r#"<|channel>thought
hm
<channel|>Hello é😀 "world" <turn|>"#;
    let mut request = thinking(ask("q"));
    request.generation.logprobs = Some(2);
    let service = says_text(reply);
    let (whole, events) = run(&service, request.clone());
    let bytes: Vec<u8> = whole.tokens.iter().flat_map(|t| t.bytes.clone()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), whole.text);
    // Scripted logprobs count the reply's tokens, so that each shows its place.
    let all = ids(reply);
    for token in &whole.tokens {
        assert_eq!(all[(-token.logprob) as usize - 1], token.token);
        assert_eq!(token.top.len(), 2);
    }
    for event in &events {
        match event {
            ServiceEvent::Text { delta, tokens } => {
                let text: String = tokens.iter().map(|t| t.text.clone()).collect();
                assert!(
                    text.contains('\u{fffd}') || *delta == text || delta.is_empty(),
                    "{delta:?} {text:?}"
                );
            }
            ServiceEvent::Thought { delta, tokens } => {
                assert!(!delta.is_empty());
                assert!(tokens.iter().all(|t| t.logprob < 0.0));
            }
            _ => {}
        }
    }
    request.generation.logprobs = None;
    assert!(run(&service, request).0.tokens.is_empty());
}
