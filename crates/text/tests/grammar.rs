//! Grammars: what they allow, when they end, and what is refused. Section G of the hard cases as far as no engine is
//! needed.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Rng, pebble};
use lapidary_text::{
    CallGrammar, CallText, Error, Grammar, GrammarCompiler, MAX_WHITESPACE, Matcher, Specials, Tokenizer,
    Tools,
};
use serde_json::{Value, json};

fn compiler() -> (Arc<Tokenizer>, GrammarCompiler) {
    let tokenizer = Arc::new(pebble());
    (Arc::clone(&tokenizer), GrammarCompiler::new(tokenizer))
}

/// The tokens that may come next.
struct Mask(Vec<u32>);

impl Mask {
    fn of(matcher: &mut Matcher) -> Mask {
        let mut words = vec![7; 3];
        matcher.mask(&mut words).unwrap();
        Mask(words)
    }

    fn allows(&self, id: u32) -> bool {
        self.0[id as usize / 32] >> (id % 32) & 1 == 1
    }

    fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }
}

/// Whether a text is in the grammar: every token allowed, and the end too.
fn takes(tokenizer: &Tokenizer, mut matcher: Matcher, text: &str) -> bool {
    for id in tokenizer.encode(text, Specials::Parse) {
        match matcher.accept(id) {
            Ok(()) => {}
            Err(_) => return false,
        }
    }
    matcher.may_end()
}

/// Lets a model speak that takes the first token of its liking, else any at random. Gives the text and whether it ended.
fn speak(
    tokenizer: &Tokenizer,
    matcher: &mut Matcher,
    rng: &mut Rng,
    liking: impl Fn(u32) -> bool,
    limit: usize,
) -> (String, bool) {
    let mut ids = Vec::new();
    for _ in 0..limit {
        if matcher.is_complete() {
            return (tokenizer.decode(&ids).unwrap(), true);
        }
        let mask = Mask::of(matcher);
        let allowed: Vec<u32> = (0..tokenizer.vocab_size()).filter(|&id| mask.allows(id)).collect();
        assert!(!allowed.is_empty());
        let liked: Vec<u32> = allowed.iter().copied().filter(|&id| liking(id)).collect();
        let among = if liked.is_empty() { &allowed } else { &liked };
        let id = among[rng.below(among.len())];
        if tokenizer.specials().end_ids().any(|end| end == id) {
            assert!(matcher.may_end());
            return (tokenizer.decode(&ids).unwrap(), true);
        }
        matcher.accept(id).unwrap();
        ids.push(id);
    }
    (tokenizer.decode(&ids).unwrap(), false)
}

fn refused(compiler: &GrammarCompiler, grammar: &Grammar) -> (String, String) {
    match compiler.compile(grammar) {
        Err(Error::Grammar { place, problem }) => (place, problem),
        other => panic!("{grammar:?} gave {other:?}"),
    }
}

#[test]
fn a_schema_takes_what_fits_and_nothing_else() {
    let (tokenizer, compiler) = compiler();
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string" },
            "age": { "type": "integer", "minimum": 0 },
            "tags": { "type": "array", "items": { "enum": ["a", "b c"] } },
            "next": { "$ref": "#/$defs/node" },
            "gone": { "type": "string", "nullable": true },
        },
        "required": ["name", "age"],
        "additionalProperties": false,
        "$defs": { "node": { "type": "object", "properties": { "next": { "$ref": "#/$defs/node" } }, "additionalProperties": false } },
    });
    let matcher = compiler.compile(&Grammar::JsonSchema(schema)).unwrap();
    for yes in [
        r#"{"name":"x","age":3}"#,
        r#"{ "name" : "é😀\n", "age": 0, "tags": ["a","b c"] }"#,
        r#"{"name":"","age":12,"next":{"next":{"next":{}}}}"#,
        r#"{"name":"","age":12,"gone":null}"#,
    ] {
        assert!(takes(&tokenizer, matcher.clone(), yes), "{yes}");
    }
    for no in [
        r#"{"name":"x"}"#,
        r#"{"name":"x","age":-3}"#,
        r#"{"name":"x","age":3.5}"#,
        r#"{"name":"x","age":3,"tags":["c"]}"#,
        r#"{"name":"x","age":3,"more":1}"#,
        r#"{"name":"x","age":3"#,
        r#" {"name":"x","age":3}"#,
        "hello",
        "",
    ] {
        assert!(!takes(&tokenizer, matcher.clone(), no), "{no}");
    }
}

#[test]
fn objects_expressions_and_lark_take_what_they_should() {
    let (tokenizer, compiler) = compiler();
    let cases = [
        (Grammar::JsonObject, vec![r#"{}"#, r#"{"a":[1,{"b":null}]}"#], vec!["[]", "1", r#"{"a":}"#]),
        (
            Grammar::Regex(r"(\d{3})-\d{2}/x".to_owned()),
            vec!["123-45/x"],
            vec!["123-4", "123-45/xy", "a123-45/x"],
        ),
        (Grammar::Regex("^(yes|no)$".to_owned()), vec!["yes", "no"], vec!["maybe", "yesno", ""]),
        (
            Grammar::Lark(
                "start: greeting \" \" NAME\ngreeting: \"hello\" | \"bye\"\nNAME: /[A-Z][a-z]+/".to_owned(),
            ),
            vec!["hello Bob", "bye Al"],
            vec!["hello", "hello bob", "hi Bob"],
        ),
    ];
    for (grammar, yes, no) in cases {
        let matcher = compiler.compile(&grammar).unwrap();
        for text in yes {
            assert!(takes(&tokenizer, matcher.clone(), text), "{grammar:?} {text}");
        }
        for text in no {
            assert!(!takes(&tokenizer, matcher.clone(), text), "{grammar:?} {text}");
        }
    }
}

#[test]
fn g01_white_space_between_json_tokens_is_bounded() {
    let (tokenizer, compiler) = compiler();
    let blank = |id: u32| {
        let mut bytes = Vec::new();
        !tokenizer.is_special(id)
            && tokenizer.append_bytes(id, &mut bytes).is_ok()
            && !bytes.is_empty()
            && bytes.iter().all(u8::is_ascii_whitespace)
    };
    let schemas = [
        json!({ "type": "object", "properties": { "a": { "type": "integer" }, "b": { "enum": [["x", 1], null] } }, "required": ["a", "b"], "additionalProperties": false }),
        json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 3, "maxItems": 3 }),
        json!({ "anyOf": [{ "type": "object", "properties": { "k": { "type": "null" } }, "required": ["k"], "additionalProperties": false }, { "const": [true] }] }),
    ];
    let mut rng = Rng(7);
    let mut longest = 0;
    for schema in schemas {
        let compiled = compiler.compile(&Grammar::JsonSchema(schema.clone())).unwrap();
        for _ in 0..20 {
            // Numbers have no bound of their own, so a digit is liked less than an end.
            let mut matcher = compiled.clone();
            let (text, ended) = speak(&tokenizer, &mut matcher, &mut rng, blank, 400);
            if ended {
                serde_json::from_str::<Value>(&text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
            }
            let run = text.split(|c: char| !c.is_ascii_whitespace()).map(str::len).max().unwrap_or(0);
            assert!(run <= MAX_WHITESPACE, "{text:?}");
            longest = longest.max(run);
        }
    }
    assert!(longest > 1, "the model did not even try");
    // Inside strings blanks are free.
    let matcher = compiler.compile(&Grammar::JsonSchema(json!({ "type": "string" }))).unwrap();
    assert!(takes(&tokenizer, matcher, &format!("\"{}\"", " ".repeat(50))));
}

#[test]
fn json_ends_at_its_closing_bracket() {
    let (tokenizer, compiler) = compiler();
    for (schema, text) in [
        (json!({ "type": "object" }), r#"{"a": "}"}"#),
        (json!({ "type": "array" }), "[1, [2]]"),
        (json!({ "type": "string" }), r#""a\"b""#),
        (json!({ "const": null }), "null"),
    ] {
        let mut matcher = compiler.compile(&Grammar::JsonSchema(schema)).unwrap();
        let ids = tokenizer.encode(text, Specials::Plain);
        for (i, id) in ids.iter().enumerate() {
            assert!(!matcher.is_complete(), "{text} after {i}");
            matcher.accept(*id).unwrap();
        }
        if text != "null" {
            assert!(matcher.is_complete(), "{text}");
        }
        assert!(matcher.may_end(), "{text}");
    }
}

#[test]
fn a_mask_and_what_is_accepted_are_the_same() {
    let (tokenizer, compiler) = compiler();
    let schema = json!({ "type": "object", "properties": { "é": { "type": "string", "maxLength": 3 } }, "required": ["é"] });
    let mut rng = Rng(3);
    let mut matcher = compiler.compile(&Grammar::JsonSchema(schema)).unwrap();
    for _ in 0..12 {
        if matcher.is_complete() {
            break;
        }
        let mask = Mask::of(&mut matcher);
        assert_eq!(mask.0.len(), (tokenizer.vocab_size() as usize).div_ceil(32));
        assert!(mask.count() > 0);
        let mut allowed = Vec::new();
        for id in 0..tokenizer.vocab_size() {
            if mask.allows(id) {
                matcher.clone().accept(id).unwrap_or_else(|e| panic!("{id}: {e}"));
                if !tokenizer.specials().end_ids().any(|end| end == id) {
                    allowed.push(id);
                }
            } else if rng.below(50) == 0 && mask.count() > 1 {
                // A mask of one is a forced token; others may still fit the text.
                assert!(matcher.clone().accept(id).is_err(), "{id} {:?}", tokenizer.piece(id));
            }
        }
        if allowed.is_empty() {
            break;
        }
        matcher.accept(allowed[rng.below(allowed.len())]).unwrap();
    }
}

#[test]
fn g03_what_cannot_be_honoured_is_refused_by_its_place_and_in_time() {
    let (_, compiler) = compiler();
    compiler.compile(&Grammar::JsonObject).unwrap();
    let deep = (0..200).fold(json!({ "type": "null" }), |inner, _| json!({ "items": inner }));
    let big = json!({ "enum": (0..120_000).map(|i| format!("value {i}")).collect::<Vec<_>>() });
    let schemas = [
        (json!("bar"), "schema"),
        (json!({ "type": "object", "properties": { "foo": "bar" } }), "schema.properties.foo"),
        (json!({ "properties": ["a"] }), "schema.properties"),
        (json!({ "type": "text" }), "schema.type"),
        (json!({ "properties": { "a": { "not": {} } } }), "schema.properties.a.not"),
        (json!({ "properties": { "a": { "if": {}, "then": {} } } }), "schema.properties.a.if"),
        (json!({ "items": { "uniqueItems": true } }), "schema.items.uniqueItems"),
        (json!({ "x-guidance": { "whitespace_pattern": " +" } }), "schema.x-guidance"),
        (json!({ "anyOf": [] }), "schema.anyOf"),
        (json!({ "enum": [] }), "schema.enum"),
        (json!({ "required": "a" }), "schema.required"),
        (json!({ "minLength": -1 }), "schema.minLength"),
        (json!({ "$ref": "#/$defs/none" }), "schema.$ref"),
        (json!({ "$ref": "https://example.org/s.json" }), "schema.$ref"),
        (json!({ "$ref": "#" }), "schema.$ref"),
        (
            json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } }),
            "schema.$defs.a.$ref",
        ),
        (
            json!({ "type": "object", "properties": { "next": { "$ref": "#" } }, "required": ["next"] }),
            "schema.properties.next.$ref",
        ),
        (json!({ "type": "string", "pattern": "(" }), "schema"),
        (json!({ "type": "string", "format": "nothing" }), "schema"),
        (deep, "schema.items"),
        (big, "schema"),
    ];
    for (schema, place) in schemas {
        let start = Instant::now();
        let (found, problem) = refused(&compiler, &Grammar::JsonSchema(schema));
        assert!(start.elapsed() < Duration::from_secs(2), "{place}");
        assert!(found.starts_with(place), "{found} instead of {place}: {problem}");
        assert!(!problem.is_empty() && problem.len() < 600, "{place}: {problem}");
    }
    for (grammar, place) in [
        (Grammar::Regex("(".to_owned()), "regex"),
        (Grammar::Regex("(?<=a)b".to_owned()), "regex"),
        (Grammar::Regex("x".repeat(1 << 20)), "regex"),
        (Grammar::Lark("start: \"a".to_owned()), "grammar"),
        (Grammar::Lark("begin: \"a\"".to_owned()), "grammar"),
        (Grammar::Lark("start: missing".to_owned()), "grammar"),
        (Grammar::Lark(String::new()), "grammar"),
    ] {
        let start = Instant::now();
        let (found, _) = refused(&compiler, &grammar);
        assert!(start.elapsed() < Duration::from_secs(2), "{grammar:?}");
        assert_eq!(found, place);
    }
    // And the next request is served.
    compiler.compile(&Grammar::Regex("ok".to_owned())).unwrap();
}

#[test]
fn g03_schemas_made_to_be_costly_end_in_time() {
    let (_, compiler) = compiler();
    compiler.compile(&Grammar::JsonObject).unwrap();
    let many = |n: usize| -> Value {
        Value::Object((0..n).map(|i| (format!("p{i}"), json!({ "type": "string" }))).collect())
    };
    let mut doubling = json!({ "type": "string" });
    for _ in 0..12 {
        doubling = json!({ "anyOf": [doubling, { "type": "array", "items": doubling }] });
    }
    let costly = [
        json!({ "type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}" }),
        json!({ "type": "string", "minLength": 1_000_000_000 }),
        json!({ "type": "array", "items": { "type": "string" }, "minItems": 1_000_000_000_u64 }),
        json!({ "type": "object", "properties": many(3000) }),
        json!({ "type": "string", "pattern": "(.*a){30}(.*b){30}(.*c){30}" }),
        json!({ "enum": (0..9000).map(|i| format!("{i:020}")).collect::<Vec<_>>() }),
        json!({ "type": "integer", "multipleOf": 9_999_991 }),
        json!({ "allOf": (0..200).map(|i| json!({ "type": "string", "pattern": format!("a.*{i}") })).collect::<Vec<_>>() }),
        doubling,
    ];
    for (i, schema) in costly.into_iter().enumerate() {
        let start = Instant::now();
        let compiled = compiler.compile(&Grammar::JsonSchema(schema));
        let took = start.elapsed();
        assert!(took < Duration::from_secs(2), "schema {i} took {took:?}");
        if let Err(error) = compiled {
            assert!(matches!(error, Error::Grammar { .. }), "{error}");
        }
    }
    for regex in ["(a*)*b".to_owned(), "(.{1,300}){1,300}".to_owned(), "(a|b|ab)*".repeat(300)] {
        let start = Instant::now();
        let _ = compiler.compile(&Grammar::Regex(regex.clone()));
        assert!(start.elapsed() < Duration::from_secs(2), "{regex}");
    }
}

fn tools() -> Vec<Value> {
    vec![
        json!({ "type": "function", "function": { "name": "get_weather", "parameters": {
            "type": "object",
            "properties": {
                "city": { "type": "string" },
                "Unit": { "type": "string", "enum": ["C", "F"] },
                "days": { "type": "integer" },
                "at": { "type": "object", "properties": { "lat": { "type": "number" }, "lon": { "type": "number" } }, "required": ["lat", "lon"] },
                "tags": { "type": "array", "items": { "type": "string" }, "maxItems": 2 },
            },
            "required": ["city", "days"],
        } } }),
        json!({ "type": "function", "function": { "name": "now" } }),
        json!({ "type": "function", "function": { "name": "free", "parameters": { "type": "object", "properties": {} } } }),
    ]
}

#[test]
fn forced_calls_are_in_the_models_notation_and_by_the_schema() {
    let (tokenizer, compiler) = compiler();
    let one = Grammar::Calls(CallGrammar { tools: tools(), several: false });
    let matcher = compiler.compile(&one).unwrap();
    let call = |body: &str| format!("<|tool_call>call:{body}<tool_call|>");
    for yes in [
        r#"get_weather{city:<|"|>Paris, "the" {city}<|"|>,days:3}"#,
        r#"get_weather{at:{lat:1.5,lon:-2},city:<|"|><|"|>,days:0,tags:[<|"|>a<|"|>,<|"|>b<|"|>],Unit:<|"|>C<|"|>}"#,
        r#"get_weather{city:<|"|>é<|"|>,days:3,tags:[]}"#,
        "now{}",
        "free{}",
        r#"free{a:1,b c:[true,null,{x:<|"|>y<|"|>}]}"#,
    ] {
        assert!(takes(&tokenizer, matcher.clone(), &call(yes)), "{yes}");
    }
    for no in [
        r#"get_weather{days:3}"#,
        r#"get_weather{city:<|"|>x<|"|>,days:3.5}"#,
        r#"get_weather{city:"x",days:3}"#,
        r#"get_weather{days:3,city:<|"|>x<|"|>}"#,
        r#"get_weather{city:<|"|>x<|"|>,days:3,Unit:<|"|>K<|"|>}"#,
        r#"get_weather{city:<|"|>x<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>,<|"|>c<|"|>]}"#,
        r#"get_weather{city:<|"|>x<|"|>,days:3,more:1}"#,
        "now{a:1}",
        "other{}",
    ] {
        assert!(!takes(&tokenizer, matcher.clone(), &call(no)), "{no}");
    }
    assert!(!takes(&tokenizer, matcher.clone(), "hello"));
    assert!(!takes(&tokenizer, matcher, &(call("now{}") + &call("now{}"))));
    let several = compiler.compile(&Grammar::Calls(CallGrammar { tools: tools(), several: true })).unwrap();
    assert!(takes(&tokenizer, several, &(call("now{}") + &call("now{}"))));
}

#[test]
fn whatever_a_model_says_under_a_forced_call_parses_and_fits() {
    let (tokenizer, compiler) = compiler();
    let matcher = compiler.compile(&Grammar::Calls(CallGrammar { tools: tools(), several: false })).unwrap();
    let declared = Tools::new(&tools());
    let mut rng = Rng(11);
    let mut ended = 0;
    for _ in 0..60 {
        let mut matcher = matcher.clone();
        let quote = tokenizer.specials().quote;
        let closes = |id: u32| {
            let piece = tokenizer.piece(id).unwrap_or_default();
            Some(id) == quote || ["}", "]", "},", "get_weather", "now", "free"].contains(&piece)
        };
        let mut choice = Rng(rng.below(1 << 30) as u64);
        let (text, whole) = speak(&tokenizer, &mut matcher, &mut choice, closes, 600);
        if !whole {
            continue;
        }
        ended += 1;
        let body = text.strip_prefix("<|tool_call>").and_then(|t| t.strip_suffix("<tool_call|>"));
        let body = body.unwrap_or_else(|| panic!("{text:?}"));
        let call = CallText::from_spelled(body).parse(&declared).unwrap_or_else(|e| panic!("{text:?}: {e}"));
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        if call.name == "get_weather" {
            assert!(arguments["city"].is_string() && arguments["days"].is_number(), "{text:?} {arguments}");
        }
    }
    assert!(ended > 10, "only {ended} calls ended");
}

#[test]
fn tools_that_cannot_be_forced_are_refused_by_place() {
    let (_, compiler) = compiler();
    let tool = |name: &str, parameters: Value, strict: bool| {
        vec![json!({ "function": { "name": name, "parameters": parameters, "strict": strict } })]
    };
    for (tools, place) in [
        (vec![], "tools"),
        (tool("a b", json!({}), false), "tools[0].function.name"),
        (tool("a", json!("x"), false), "tools[0].function.parameters"),
        (
            tool("a", json!({ "properties": { "x": { "$ref": "#/none" } } }), false),
            "tools[0].function.parameters.properties.x.$ref",
        ),
        (
            tool("a", json!({ "properties": { "x": { "type": "wrong" } } }), false),
            "tools[0].function.parameters.properties.x.type",
        ),
        (
            tool("a", json!({ "properties": { "x": { "type": "number", "minimum": 3 } } }), true),
            "tools[0].function.parameters.properties.x.minimum",
        ),
    ] {
        let (found, _) = refused(&compiler, &Grammar::Calls(CallGrammar { tools, several: false }));
        assert_eq!(found, place);
    }
    // A schema that refers to itself is fine as long as it ends.
    let list = json!({ "properties": { "next": { "$ref": "#" }, "v": { "type": "integer" } } });
    let grammar = Grammar::Calls(CallGrammar { tools: tool("a", list, false), several: false });
    compiler.compile(&grammar).unwrap();
}

#[test]
fn a_compiled_grammar_is_kept_and_two_matchers_do_not_disturb_each_other() {
    let (tokenizer, compiler) = compiler();
    let grammar =
        Grammar::JsonSchema(json!({ "type": "object", "properties": { "a": { "type": "integer" } } }));
    let mut first = compiler.compile(&grammar).unwrap();
    for id in tokenizer.encode("{\"a\":1", Specials::Plain) {
        first.accept(id).unwrap();
    }
    let second = compiler.compile(&grammar).unwrap();
    assert!(takes(&tokenizer, second, "{}"));
    first.accept(tokenizer.encode("}", Specials::Plain)[0]).unwrap();
    assert!(first.is_complete());
}

/// What a grammar costs on a vocabulary of 262,144 pieces; the figures are printed.
#[test]
fn a_large_vocabulary_is_indexed_by_the_first_grammar_only() {
    let Some(path) = std::env::var_os("LAPIDARY_GEMMA3_TOKENIZER") else {
        eprintln!("skipped: LAPIDARY_GEMMA3_TOKENIZER does not name a tokenizer.json");
        return;
    };
    let tokenizer = Arc::new(Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap());
    let start = Instant::now();
    let compiler = GrammarCompiler::new(Arc::clone(&tokenizer));
    assert!(start.elapsed() < Duration::from_millis(1), "nothing is built before it is needed");
    let person = json!({ "type": "object", "properties": { "name": { "type": "string" }, "age": { "type": "integer" }, "tags": { "type": "array", "items": { "type": "string" } } }, "required": ["name", "age", "tags"], "additionalProperties": false });
    let grammar = Grammar::JsonSchema(person);
    let start = Instant::now();
    let mut matcher = compiler.compile(&grammar).unwrap();
    let first = start.elapsed();
    let start = Instant::now();
    compiler.compile(&grammar).unwrap();
    let again = start.elapsed();
    let start = Instant::now();
    compiler.compile(&Grammar::Regex("[a-z]{3,9}( [a-z]{3,9})*".to_owned())).unwrap();
    let other = start.elapsed();
    let (mut words, mut slowest, mut total) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    let ids = tokenizer.encode(
        r#"{"name": "Ada Lovelace, countess of \"Lovelace\"", "age": 36, "tags": ["first", "programmer", "数学"]}"#,
        Specials::Plain,
    );
    for id in &ids {
        let start = Instant::now();
        matcher.mask(&mut words).unwrap();
        let took = start.elapsed();
        slowest = slowest.max(took);
        total += took;
        matcher.accept(*id).unwrap();
    }
    assert!(matcher.is_complete());
    let mean = total / ids.len() as u32;
    eprintln!("first {first:?}, again {again:?}, another {other:?}; mask {mean:?} mean, {slowest:?} slowest");
    assert!(again < first / 10 && other < first);
}
