//! Arguments of calls in every notation that models have been seen to use.

use lapidary_text::{CallText, Tools};
use serde_json::{Value, json};

fn parse(body: &str) -> Result<String, String> {
    parse_with(body, json!(null))
}

fn parse_with(body: &str, parameters: Value) -> Result<String, String> {
    let tools =
        Tools::new(&[json!({"type": "function", "function": {"name": "f", "parameters": parameters}})]);
    let call = CallText::from_spelled(&format!("call:f{body}")).parse(&tools).map_err(|e| e.to_string())?;
    assert_eq!(call.name, "f");
    let _: Value = serde_json::from_str(&call.arguments).expect("arguments are JSON");
    Ok(call.arguments)
}

#[test]
fn f02_mixed_notations_give_clean_json() {
    for (body, expected) in [
        (r#"{a:["a"]}"#, r#"{"a":["a"]}"#),
        ("{a:['a']}", r#"{"a":["a"]}"#),
        (r#"{a:{"mode": "fast"}}"#, r#"{"a":{"mode":"fast"}}"#),
        ("{a:{'mode': 'fast', 'n': None}}", r#"{"a":{"mode":"fast","n":null}}"#),
        (
            "{a:True,b:False,c:None,d:nil,e:null,f:true}",
            r#"{"a":true,"b":false,"c":null,"d":null,"e":null,"f":true}"#,
        ),
        (r#"{a:[<|"|>x<|"|>,"y",'z',w]}"#, r#"{"a":["x","y","z","w"]}"#),
        (r#"{<|"|>a b<|"|>:1,"c d":2,'e':3,f g:4}"#, r#"{"a b":1,"c d":2,"e":3,"f g":4}"#),
        ("{ a : 1 ,\n\t b : [ 1 , 2 , ] , }", r#"{"a":1,"b":[1,2]}"#),
        ("{a:[],b:{},c:[[],[{}]]}", r#"{"a":[],"b":{},"c":[[],[{}]]}"#),
        ("{city:New York,n:5}", r#"{"city":"New York","n":5}"#),
        (r#"{a:"q\"\\\n\u00e9\ud83d\ude00\/",b:'it\'s "x"'}"#, r#"{"a":"q\"\\\né😀/","b":"it's \"x\""}"#),
        (r#"{a:"\d\ud800x"}"#, r#"{"a":"\\d\\ud800x"}"#),
        (r#"{a:"x" and "y",b:'tis,c:"open}"#, r#"{"a":"\"x\" and \"y\"","b":"'tis","c":"\"open"}"#),
        ("{a:,b:1,c:}", r#"{"a":"","b":1,"c":""}"#),
        ("{a:1,a:2}", r#"{"a":2}"#),
        ("{a:http://x.y/z?q=1}", r#"{"a":"http://x.y/z?q=1"}"#),
    ] {
        assert_eq!(parse(body).unwrap(), expected, "{body}");
    }
}

#[test]
fn numbers_keep_the_digits_that_were_written() {
    for number in
        ["9007199254740993", "123456789012345678901234567890", "108.20", "-0.0", "1e-07", "1E300", "0"]
    {
        assert_eq!(parse(&format!("{{n:{number}}}")).unwrap(), format!("{{\"n\":{number}}}"));
    }
    for text in ["00713", "1.", ".5", "+1", "0x1F", "1_000", "NaN", "1E400", "12 apples"] {
        assert_eq!(parse(&format!("{{n:{text}}}")).unwrap(), format!("{{\"n\":\"{text}\"}}"));
    }
}

#[test]
fn f04_the_declared_schema_settles_types() {
    let q = |text: &str| format!("<|\"|>{text}<|\"|>");
    for (kind, written, expected) in [
        (json!({"type": "integer"}), "5".to_owned(), "5"),
        (json!({"type": "integer"}), "9007199254740993".to_owned(), "9007199254740993"),
        (json!({"type": "integer"}), q("9007199254740993"), "9007199254740993"),
        (json!({"type": "integer"}), q("5.5"), "\"5.5\""),
        (json!({"type": "integer"}), "00713".to_owned(), "\"00713\""),
        (json!({"type": "number"}), q("108.20"), "108.20"),
        (json!({"type": "number"}), "108.20".to_owned(), "108.20"),
        (json!({"type": "boolean"}), q("true"), "true"),
        (json!({"type": "boolean"}), "True".to_owned(), "true"),
        (json!({"type": "array"}), "[1,2]".to_owned(), "[1,2]"),
        (json!({"type": "array"}), q("[1, 2]"), "[1, 2]"),
        (json!({"type": "array"}), q("[1, 2"), "\"[1, 2\""),
        (json!({"type": "object"}), q("{\"a\": 1}"), "{\"a\": 1}"),
        (json!({"type": "object"}), "{a:00713}".to_owned(), "{\"a\":\"00713\"}"),
        (json!({"type": "string"}), "00713".to_owned(), "\"00713\""),
        (json!({"type": "string"}), "5".to_owned(), "\"5\""),
        (json!({"type": "string"}), "9007199254740993".to_owned(), "\"9007199254740993\""),
        (json!({"type": "string"}), "true".to_owned(), "\"true\""),
        (json!({"type": "string"}), "[1,2]".to_owned(), "\"[1,2]\""),
        (json!({"type": "string"}), q("[1,2]"), "\"[1,2]\""),
        (json!({"type": "string"}), "null".to_owned(), "null"),
        (json!({"type": "STRING"}), "5".to_owned(), "\"5\""),
        (json!({"type": ["string", "null"]}), "5".to_owned(), "\"5\""),
        (json!({"type": ["string", "integer"]}), "5".to_owned(), "5"),
        (json!({"type": ["integer", "null"]}), q("null"), "null"),
        (json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), "5".to_owned(), "\"5\""),
        (json!({"enum": ["5", "6"]}), "5".to_owned(), "\"5\""),
        (json!({"enum": [5, 6]}), q("5"), "5"),
        (json!({"$ref": "#/$defs/zip"}), "00100".to_owned(), "\"00100\""),
        (json!({"$ref": "#/$defs/zip"}), "100".to_owned(), "\"100\""),
        (json!({"$ref": "#/$defs/loop"}), "100".to_owned(), "100"),
        (
            json!({"type": "array", "items": {"type": "string"}}),
            "[1,00713,x]".to_owned(),
            "[\"1\",\"00713\",\"x\"]",
        ),
        (
            json!({"type": "object", "properties": {"k": {"type": "string"}}}),
            "{k:1,l:1}".to_owned(),
            "{\"k\":\"1\",\"l\":1}",
        ),
        (
            json!({"type": "object", "additionalProperties": {"type": "string"}}),
            "{k:1}".to_owned(),
            "{\"k\":\"1\"}",
        ),
        (json!({"type": "object", "additionalProperties": false}), "{k:1}".to_owned(), "{\"k\":1}"),
        (json!("nonsense"), "5".to_owned(), "5"),
    ] {
        let defs = json!({"zip": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}});
        let parameters = json!({"type": "object", "properties": {"v": kind}, "$defs": defs});
        assert_eq!(
            parse_with(&format!("{{v:{written}}}"), parameters).unwrap(),
            format!("{{\"v\":{expected}}}"),
            "{kind} {written}"
        );
    }
}

#[test]
fn what_cannot_be_a_call_is_an_error_with_a_place() {
    for body in [
        "{",
        "{a",
        "{a:",
        "{a:1",
        "{a:[1",
        "{a:1}x",
        "{a:<|\"|>x",
        "{a:x<|\"|>y<|\"|>}",
        "{,}",
        "{:1}",
        "{a:1 b:2}{",
        "[1]",
        "{a:[1}]",
        "{a}",
    ] {
        let error = parse(body).unwrap_err();
        assert!(error.starts_with("tool call does not parse at character "), "{body}: {error}");
    }
    for name in ["", "é", "a b", "a/b"] {
        assert!(
            CallText::from_spelled(&format!("call:{name}{{}}")).parse(&Tools::default()).is_err(),
            "{name}"
        );
    }
    for name in ["a", "a.b-c_9", "X"] {
        assert_eq!(
            CallText::from_spelled(&format!(" call: {name} {{}} ")).parse(&Tools::default()).unwrap().name,
            name
        );
    }
}

#[test]
fn nesting_is_bounded() {
    let nested = |n: usize| format!("{{a:{}{}}}", "[".repeat(n), "]".repeat(n));
    assert!(parse(&nested(90)).is_ok());
    assert!(parse(&nested(100_000)).unwrap_err().contains("too deeply"));
    assert!(parse(&format!("{{a:{}", "{a:".repeat(100_000))).is_err());
}

#[test]
fn spelling_round_trips() {
    let text = "call:f{a:<|\"|>x<|\"|>,<|\"|><|\"|>}";
    assert_eq!(CallText::from_spelled(text).spelled(), text);
}
