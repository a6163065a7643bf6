//! Scripted replies through the parser. Sections D, E and F of the hard cases as far as no server is needed.

mod common;

use common::{Rng, pebble};
use lapidary_text::{Event, Finish, OutputOptions, OutputParser, Reply, Specials, Tokenizer, Tools};
use serde_json::{Value, json};

const PLAIN_PROMPT: &str = "<bos><|turn>user\nq<turn|>\n<|turn>model\n";

fn tools() -> Tools {
    Tools::new(&[
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}),
        json!({"type": "function", "function": {"name": "f"}}),
        json!({"type": "function", "function": {"name": "g"}}),
    ])
}

fn options() -> OutputOptions {
    OutputOptions { tools: tools(), ..OutputOptions::default() }
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, Specials::Parse)
}

/// Everything that one run shows: the reply, why it ended, the events in order.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    reply: Reply,
    finish: Finish,
    unparsed: usize,
    events: Vec<Event>,
}

fn run_ids(tokenizer: &Tokenizer, prompt: &str, options: OutputOptions, reply_ids: &[u32]) -> Run {
    let mut parser = OutputParser::new(tokenizer, &ids(tokenizer, prompt), options);
    let mut events = Vec::new();
    for &id in reply_ids {
        events.extend(parser.push(id).unwrap());
    }
    events.extend(parser.finish());
    let mut reply = Reply::default();
    reply.extend(events.clone());
    Run { reply, finish: parser.finished().unwrap(), unparsed: parser.unparsed_calls(), events }
}

fn run(prompt: &str, reply: &str) -> Run {
    let tokenizer = pebble();
    run_ids(&tokenizer, prompt, options(), &ids(&tokenizer, reply))
}

fn arguments(run: &Run) -> Vec<Value> {
    run.reply.calls.iter().map(|call| serde_json::from_str(&call.arguments).unwrap()).collect()
}

#[test]
fn d07_every_end_id_stops_and_none_is_shown() {
    let tokenizer = pebble();
    let own_stop = ids(&tokenizer, "Z")[0];
    let ends = [
        ("<eos>", Finish::Stop),
        ("<turn|>", Finish::Stop),
        ("<|tool_response>", Finish::Stop),
        ("<|turn>", Finish::Stop),
    ];
    for (end, finish) in ends {
        let run = run(PLAIN_PROMPT, &format!("Hello.{end} more"));
        assert_eq!((run.reply.content.as_str(), run.finish), ("Hello.", finish), "{end}");
    }
    let with_stop = OutputOptions { stop_ids: vec![own_stop], ..options() };
    let script = [ids(&tokenizer, "Hello."), vec![own_stop], ids(&tokenizer, "x")].concat();
    let run = run_ids(&tokenizer, PLAIN_PROMPT, with_stop, &script);
    assert_eq!((run.reply.content.as_str(), run.finish), ("Hello.", Finish::Stop));
}

#[test]
fn d08_characters_in_byte_tokens_come_whole_in_every_state() {
    let tokenizer = pebble();
    for text in ["😀", "👨‍👩‍👧‍👦", "你好", "e\u{301}"] {
        let script = format!(
            "<|channel>thought\n{text}\n<channel|>{text}<|tool_call>call:f{{a:<|\"|>{text}<|\"|>}}<tool_call|>"
        );
        let run = run(PLAIN_PROMPT, &script);
        assert_eq!((run.reply.reasoning.as_str(), run.reply.content.as_str()), (text, text));
        assert_eq!(arguments(&run), [json!({"a": text})]);
        assert!(!format!("{:?}", run.events).contains('\u{fffd}'));
        assert_eq!(tokenizer.decode(&ids(&tokenizer, &script)).unwrap(), script);
    }
}

#[test]
fn e01_thoughts_go_to_their_own_field_only() {
    for (reply, reasoning, content) in [
        ("<|channel>thought\nwhy\n<channel|>Because.<turn|>", "why", "Because."),
        ("<|channel>thought\na\n\nb\n\n<channel|>\nBecause.", "a\n\nb\n", "\nBecause."),
        ("<|channel>thought\n<channel|>Because.", "", "Because."),
        ("<|channel><channel|>Because.", "", "Because."),
        ("<|channel>thought<channel|>Because.", "", "Because."),
        ("Because.", "", "Because."),
        ("Because.<channel|>", "", "Because."),
        ("<channel|>Because.", "", "Because."),
        ("<|channel>analysis\nwhy<channel|>Because.", "analysis\nwhy", "Because."),
        ("<|channel>thoughts are<channel|>Because.", "thoughts are", "Because."),
        ("<|channel>thought\na<|channel>b<channel|>c", "ab", "c"),
        ("<|channel>thought\nnever ends\n", "never ends", ""),
        ("<|channel>thought\na<channel|>x<|channel>thought\nb<channel|>y", "ab", "xy"),
        ("a<|think|>b<|image|>c<tool_call|>d<pad>", "", "abcd"),
        ("say <|\"|>hi<|\"|>", "", "say \"hi\""),
        ("", "", ""),
    ] {
        let run = run(PLAIN_PROMPT, reply);
        assert_eq!(
            (run.reply.reasoning.as_str(), run.reply.content.as_str()),
            (reasoning, content),
            "{reply}"
        );
        assert!(run.reply.calls.is_empty());
    }
}

#[test]
fn e01_a_thought_spelled_in_ordinary_tokens_is_one_at_the_beginning_only() {
    let tokenizer = pebble();
    let spelled = |reply: &str| {
        run_ids(&tokenizer, PLAIN_PROMPT, options(), &tokenizer.encode(reply, Specials::Plain)).reply
    };
    let split = spelled("<|channel>thought\nwhy\n<channel|>Because.");
    assert_eq!((split.reasoning.as_str(), split.content.as_str()), ("why", "Because."));
    let open = spelled("<|channel>thought\nwhy <chan");
    assert_eq!((open.reasoning.as_str(), open.content.as_str()), ("why <chan", ""));
    // An answer about the markers keeps them.
    for text in ["The opener is <|channel>thought\nand <channel|> closes.", "<|chan", "<|channels>"] {
        let reply = spelled(text);
        if text.starts_with("The") || text == "<|chan" {
            assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("", text));
        }
    }
    // So does a thought about them, when it was opened by the real marker.
    let script = [
        ids(&tokenizer, "<|channel>thought\n"),
        tokenizer.encode("is <channel|> it?", Specials::Plain),
        ids(&tokenizer, "<channel|>yes"),
    ];
    let reply = run_ids(&tokenizer, PLAIN_PROMPT, options(), &script.concat()).reply;
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("is <channel|> it?", "yes"));
}

#[test]
fn e02_the_start_state_comes_from_the_end_of_the_prompt() {
    let head = "<bos><|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_response>response:f{}<tool_response|>";
    for (prompt, reasoning, content) in [
        (format!("{head}<|channel>thought\n"), "cold", "Take a coat."),
        (format!("{head}<|channel>thought\nIt is "), "cold", "Take a coat."),
        (head.to_owned(), "", "coldTake a coat."),
        (format!("{PLAIN_PROMPT}<|channel>thought\n<channel|>"), "", "coldTake a coat."),
        ("<bos><|turn>user\n<|channel>thought\nx<turn|>\n<|turn>model\n".to_owned(), "", "coldTake a coat."),
    ] {
        let run = run(&prompt, "cold\n<channel|>Take a coat.<turn|>");
        let content = if reasoning.is_empty() { "cold\nTake a coat." } else { content };
        assert_eq!(
            (run.reply.reasoning.as_str(), run.reply.content.as_str()),
            (reasoning, content),
            "{prompt}"
        );
    }
    let labelled = run(&format!("{head}<|channel>"), "thought\ncold\n<channel|>Take a coat.");
    assert_eq!(labelled.reply.reasoning, "cold");
}

#[test]
fn the_parser_says_when_it_is_in_a_thought() {
    let tokenizer = pebble();
    let mut parser = OutputParser::new(&tokenizer, &ids(&tokenizer, PLAIN_PROMPT), options());
    let counted = |parser: &mut OutputParser<&Tokenizer>, text: &str| {
        let thinking = |id: u32| {
            let before = parser.in_thought();
            parser.push(id).unwrap();
            before
        };
        ids(&tokenizer, text).into_iter().map(thinking).filter(|&t| t).count()
    };
    let inside = ids(&tokenizer, "thought\nwhy not\n<channel|>").len();
    assert_eq!(counted(&mut parser, "<|channel>thought\nwhy not\n<channel|>Because."), inside);
}

#[test]
fn f01_quoted_strings_are_taken_literally() {
    let code = "fn main() {\n    let s = \"{}\\n\"; // ': , ]} \u{1f}\n}\n".repeat(120);
    assert!(code.len() > 5_000);
    for text in [
        "say \"hi\"",
        "{a: [1, 2]}",
        "a:b,c",
        "back\\slash\\n",
        "line\nbreak\ttab",
        "你好，世界",
        "'",
        "",
        " padded ",
        "null",
        "12",
        &code,
    ] {
        let run = run(
            PLAIN_PROMPT,
            &format!("<|tool_call>call:f{{text:<|\"|>{text}<|\"|>,n:1}}<tool_call|><|tool_response>"),
        );
        assert_eq!(arguments(&run), [json!({"text": text, "n": 1})]);
        assert_eq!(run.finish, Finish::ToolCalls);
        assert_eq!(run.reply.content, "");
    }
}

#[test]
fn f03_calls_without_arguments() {
    for (body, expected) in [
        ("{x:null}", "{\"x\":null}"),
        ("{}", "{}"),
        ("", "{}"),
        ("{ }", "{}"),
        ("{x:}", "{\"x\":\"\"}"),
        ("{x:None}", "{\"x\":null}"),
    ] {
        let run = run(PLAIN_PROMPT, &format!("<|tool_call>call:f{body}<tool_call|>"));
        assert_eq!(run.reply.calls[0].arguments, expected, "{body}");
    }
}

/// Replies that visit every state, for the tests of splits.
const REPLIES: [&str; 6] = [
    "<|channel>thought\nneed the tool 😀\n<channel|>Let me see.<|tool_call>call:get_weather{city:<|\"|>Oslo {\"é\"}<|\"|>}<tool_call|><|tool_call>call:f{a:[1,{b:true}],c:{}}<tool_call|><|tool_response>",
    "<|channel>thought\nneed it<|tool_call>call:g{}<tool_call|>after<turn|>",
    "<|channel>thought\n<channel|>call:f{x:1}<tool_call|><turn|>",
    "call:nobody{x:1}<turn|>",
    "a<|tool_call>call:f{x:<|\"|>cut off",
    "<|tool_call>call:f{x:1}<|tool_call>call:g{y:2}<turn|>",
];

#[test]
fn f05_f06_deltas_are_the_same_whatever_arrives_in_one_step() {
    let tokenizer = pebble();
    let prompt = ids(&tokenizer, PLAIN_PROMPT);
    let mut rng = Rng(11);
    for reply in REPLIES {
        let script = ids(&tokenizer, reply);
        let whole = run_ids(&tokenizer, PLAIN_PROMPT, options(), &script);
        for _ in 0..200 {
            let mut parser = OutputParser::new(&tokenizer, &prompt, options());
            let mut steps: Vec<Vec<Event>> = Vec::new();
            let mut rest = &script[..];
            while !rest.is_empty() {
                let (step, later) = rest.split_at(1 + rng.below(rest.len().min(6)));
                steps.push(step.iter().flat_map(|&id| parser.push(id).unwrap()).collect());
                rest = later;
            }
            steps.push(parser.finish());
            let events: Vec<Event> = steps.into_iter().flatten().collect();
            assert_eq!(events, whole.events);
            assert_eq!(parser.finished(), Some(whole.finish));
        }
        assert_calls_are_well_formed(&whole);
    }
}

/// Each call begins with its index and name, in order, and only arguments of that call follow.
fn assert_calls_are_well_formed(run: &Run) {
    let mut begun = 0;
    for event in &run.events {
        match event {
            Event::CallBegin { index, name } => {
                assert_eq!(*index, begun);
                assert!(!name.is_empty());
                begun += 1;
            }
            Event::CallArguments { index, .. } => assert_eq!(index + 1, begun),
            Event::Reasoning(text) | Event::Content(text) => assert!(!text.is_empty()),
        }
    }
    assert_eq!(begun, run.reply.calls.len());
}

#[test]
fn replies_with_calls_come_apart_as_meant() {
    let parts = |i: usize| {
        let run = run(PLAIN_PROMPT, REPLIES[i]);
        let calls: Vec<String> =
            run.reply.calls.iter().map(|c| format!("{}{}", c.name, c.arguments)).collect();
        (run.reply.reasoning, run.reply.content, calls, run.finish)
    };
    let strings = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let (get, f) = ("get_weather{\"city\":\"Oslo {\\\"é\\\"}\"}", "f{\"a\":[1,{\"b\":true}],\"c\":{}}");
    assert_eq!(
        parts(0),
        ("need the tool 😀".into(), "Let me see.".into(), strings(&[get, f]), Finish::ToolCalls)
    );
    assert_eq!(parts(1), ("need it".into(), "after".into(), strings(&["g{}"]), Finish::ToolCalls));
    assert_eq!(parts(2), (String::new(), String::new(), strings(&["f{\"x\":1}"]), Finish::ToolCalls));
    assert_eq!(parts(3), (String::new(), "call:nobody{x:1}".into(), vec![], Finish::Stop));
    assert_eq!(parts(4), (String::new(), "acall:f{x:<|\"|>cut off".into(), vec![], Finish::Length));
    assert_eq!(
        parts(5),
        (String::new(), String::new(), strings(&["f{\"x\":1}", "g{\"y\":2}"]), Finish::ToolCalls)
    );
}

#[test]
fn f07_without_parallel_calls_the_reply_is_done_after_the_first() {
    let tokenizer = pebble();
    let script = ids(&tokenizer, &"<|tool_call>call:f{x:1}<tool_call|>".repeat(9));
    let nine = run_ids(&tokenizer, PLAIN_PROMPT, options(), &script);
    assert_eq!(nine.reply.calls.len(), 9);
    let single = OutputOptions { parallel_calls: false, ..options() };
    let one = run_ids(&tokenizer, PLAIN_PROMPT, single.clone(), &script);
    assert_eq!((one.reply.calls.len(), one.finish), (1, Finish::ToolCalls));
    let mut parser = OutputParser::new(&tokenizer, &[], single);
    let done = script.iter().position(|&id| {
        parser.push(id).unwrap();
        parser.finished().is_some()
    });
    assert_eq!(
        done,
        script.iter().position(|&id| Some(id) == tokenizer.specials().tool_call_close),
        "stops right there"
    );
}

#[test]
fn f08_a_call_cut_anywhere_is_text() {
    let tokenizer = pebble();
    let reply = "<|tool_call>call:get_weather{city:<|\"|>Os\u{1f600}lo<|\"|>,n:{a:[1,2]}}<tool_call|>";
    let script = ids(&tokenizer, reply);
    for cut in 2..script.len() {
        let run = run_ids(&tokenizer, PLAIN_PROMPT, options(), &script[..cut]);
        assert!(run.reply.calls.is_empty(), "{cut}");
        assert_eq!((run.unparsed, run.finish), (1, Finish::Length));
        let expected = tokenizer.decode(&script[1..cut]).unwrap();
        assert_eq!(run.reply.content, expected);
    }
    for garbled in [
        "call:f{a:1",
        "call:f{a:1}}",
        "call:{}",
        "call:f{a}",
        "f{a:1}",
        "call:f{a:<|\"|>x}",
        "call:f{a:<|\"|>x<|\"|>y}",
        "{\"name\": \"f\"}",
    ] {
        let run = run(PLAIN_PROMPT, &format!("<|tool_call>{garbled}<tool_call|>tail<turn|>"));
        assert_eq!(run.reply.content, format!("{garbled}tail"));
        assert_eq!((run.unparsed, run.finish), (1, Finish::Stop), "{garbled}");
    }
    // Garbage after a good call, ending in half a character.
    let half = tokenizer.token_id("<0xF0>").unwrap();
    let script = [ids(&tokenizer, "<|tool_call>call:f{}<tool_call|>}garbage"), vec![half]].concat();
    let run = run_ids(&tokenizer, PLAIN_PROMPT, options(), &script);
    assert_eq!((run.reply.calls.len(), run.reply.content.as_str()), (1, "}garbage\u{fffd}"));
}

#[test]
fn any_ids_in_any_order_are_survived() {
    let tokenizer = pebble();
    let mut rng = Rng(3);
    for _ in 0..2_000 {
        // Control and byte tokens far more often than a model would emit them.
        let length = rng.below(40);
        let script: Vec<u32> = (0..length)
            .map(|_| {
                let bound = if rng.below(4) > 0 { 300 } else { 4096 };
                rng.below(bound) as u32
            })
            .collect();
        let run = run_ids(&tokenizer, PLAIN_PROMPT, options(), &script);
        assert_calls_are_well_formed(&run);
        arguments(&run);
    }
    let mut parser = OutputParser::new(&tokenizer, &[], options());
    assert!(parser.push(4096).is_err());
}

#[test]
fn pebble_replies_come_apart_as_meant() {
    let tokenizer = pebble();
    let samples: Vec<Value> = serde_json::from_str(include_str!("pebble_prompts.json")).unwrap();
    let replies: Vec<Run> = samples
        .iter()
        .filter(|sample| sample["reply_ids"].is_array())
        .map(|sample| {
            let list = |key: &str| -> Vec<u32> { serde_json::from_value(sample[key].clone()).unwrap() };
            let tools = Tools::new(sample["tools"].as_array().map_or(&[][..], Vec::as_slice));
            let mut parser =
                OutputParser::new(&tokenizer, &list("prompt_ids"), OutputOptions { tools, ..options() });
            let events: Vec<Event> =
                list("reply_ids").iter().flat_map(|&id| parser.push(id).unwrap()).collect();
            let mut reply = Reply::default();
            reply.extend(events.clone());
            Run {
                reply,
                finish: parser.finished().expect("the samples end by themselves"),
                unparsed: 0,
                events,
            }
        })
        .collect();
    let [capital, product, call, answer] = &replies[..] else { panic!("{} replies", replies.len()) };
    assert_eq!(capital.reply.reasoning, "The user asks about Kenya. Its capital is Nairobi.");
    assert_eq!(capital.reply.content, "The capital of Kenya is Nairobi.");
    assert_eq!(product.reply.reasoning, "Multiply the numbers: 3 * 4 gives 12.");
    assert_eq!((call.finish, arguments(call)), (Finish::ToolCalls, vec![json!({"city": "Oslo"})]));
    assert_eq!((call.reply.calls[0].name.as_str(), call.reply.content.as_str()), ("get_weather", ""));
    assert_eq!(answer.reply.content, "It is snowy in Oslo and the temperature is -3 degrees.");
}
