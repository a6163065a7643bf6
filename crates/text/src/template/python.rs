//! What Python's jinja2 does and minijinja does differently, as far as chat templates can tell.
//!
//! Printing (`str` and `repr` of Python), what counts as a sequence, white space as Python defines it, JSON as
//! `json.dumps` writes it, and the functions that transformers adds: `raise_exception` and `strftime_now`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::clock;

/// Sets an environment up.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_formatter(|out, _, value| {
        let written = match value.as_str() {
            Some(text) => out.write_str(text),
            None => out.write_str(&to_str(value)),
        };
        written.map_err(|_| ErrorKind::WriteFailure.into())
    });
    env.set_unknown_method_callback(|state, value, method, args| match (value.as_str(), method, args) {
        (Some(text), "strip", []) => Ok(text.trim_matches(is_space).into()),
        (Some(text), "lstrip", []) => Ok(text.trim_start_matches(is_space).into()),
        (Some(text), "rstrip", []) => Ok(text.trim_end_matches(is_space).into()),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    });
    env.add_filter("upper", |value: &Value| to_str(value).to_uppercase());
    env.add_filter("lower", |value: &Value| to_str(value).to_lowercase());
    env.add_filter("string", |value: &Value| to_str(value));
    env.add_filter("trim", trim);
    env.add_filter("tojson", to_json);
    env.add_test("sequence", |value: &Value| {
        value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    env.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = to_str(message);
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    env.add_function("strftime_now", |format: &str| clock::strftime(format, std::time::SystemTime::now()));
}

/// A conversation that the template itself refused.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// The message given to `raise_exception`, when that is why rendering stopped.
pub(super) fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        source = error.source();
    }
    None
}

/// `{% generation %}` marks the assistant's words for training; for rendering it is a block like any other.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + length];
        let name = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let replacement = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => name,
        };
        out.push_str(&rest[..start + 2]);
        match replacement == name {
            true => out.push_str(tag),
            false => out.push_str(&tag.replace(name, replacement)),
        }
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out + rest
}

/// A JSON value as a template sees it.
pub(super) fn value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => ().into(),
        serde_json::Value::Bool(b) => (*b).into(),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => n.into(),
            (_, Some(n)) => n.into(),
            _ => n.as_f64().unwrap_or(f64::NAN).into(),
        },
        serde_json::Value::String(s) => s.as_str().into(),
        serde_json::Value::Array(items) => items.iter().map(value).collect(),
        serde_json::Value::Object(map) => Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), value(v)))),
    }
}

/// Python's `str(value)`.
fn to_str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let mut out = String::new();
            write_repr(value, &mut out);
            out
        }
    }
}

/// Python's `repr(value)`; undefined prints nothing, as jinja2 has it.
fn write_repr(value: &Value, out: &mut String) {
    let items = |out: &mut String, open: char, close: char| {
        out.push(open);
        for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
            out.push_str(if i > 0 { ", " } else { "" });
            write_repr(&item, out);
        }
        if value.is_tuple() && value.len() == Some(1) {
            out.push(',');
        }
        out.push(close);
    };
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float_repr));
        }
        ValueKind::Seq if value.is_tuple() => items(out, '(', ')'),
        ValueKind::Seq => items(out, '[', ']'),
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(&key, out);
                out.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => _ = write!(out, "{value}"),
    }
}

fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => _ = write!(out, "\\{c}"),
            c if c.is_control() || (c != ' ' && is_space(c)) => {
                let code = u32::from(c);
                _ = if code < 0x100 { write!(out, "\\x{code:02x}") } else { write!(out, "\\u{code:04x}") };
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Python's `repr` of a float: the shortest digits that read back, with an exponent outside 1e-4 to 1e16.
fn float_repr(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() { "nan".to_owned() } else { format!("{value}") };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the e format writes an e");
    let exponent: i32 = exponent.parse().expect("an exponent is a small integer");
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}

/// Python's `str.isspace`: Unicode white space and the four ASCII separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = to_str(value);
    match chars {
        None => text.trim_matches(is_space).to_owned(),
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
    }
}

/// `tojson` as transformers defines it: `json.dumps` with `ensure_ascii` off unless asked for.
fn to_json(state: &State, value: &Value, args: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let separators: Option<Value> = options.get("separators")?;
    let part = |index| separators.as_ref().and_then(|s| s.get_item_by_index(index).ok()).map(|s| to_str(&s));
    let indent = match options.get::<Option<usize>>("indent")? {
        Some(width) => Some(width),
        None => args.first().and_then(Value::as_usize),
    };
    let writer = JsonWriter {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        between: part(0).unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.to_owned()),
        after_key: part(1).unwrap_or_else(|| ": ".to_owned()),
        indent,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    writer.write(state, value, 0, &mut out)?;
    Ok(out)
}

struct JsonWriter {
    ensure_ascii: bool,
    sort_keys: bool,
    between: String,
    after_key: String,
    indent: Option<usize>,
}

impl JsonWriter {
    fn write(&self, state: &State, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::String => self.quote(value.as_str().unwrap_or_default(), out),
            ValueKind::Number => {
                let text = to_str(value);
                let text = text.replace("inf", "Infinity").replace("nan", "NaN");
                out.push_str(&text);
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.items(value.try_iter()?, ['[', ']'], depth, out, |item, out| {
                    self.write(state, &item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort_by_key(to_str);
                }
                self.items(keys.into_iter(), ['{', '}'], depth, out, |key, out| {
                    self.quote(&to_str(&key), out);
                    out.push_str(&self.after_key);
                    self.write(state, &value.get_item(&key)?, depth + 1, out)
                })?;
            }
            kind => {
                return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} has no JSON form")));
            }
        }
        Ok(())
    }

    fn items(
        &self,
        items: impl Iterator<Item = Value>,
        [open, close]: [char; 2],
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(width) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', width.min(16) * depth));
            }
        };
        out.push(open);
        let mut empty = true;
        for item in items {
            if !empty {
                out.push_str(&self.between);
            }
            empty = false;
            line(depth + 1, out);
            write(item, out)?;
        }
        if !empty {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn quote(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(source: &str) -> String {
        let mut env = Environment::new();
        install(&mut env);
        env.render_str(source, ()).unwrap()
    }

    #[test]
    fn values_print_as_python_prints_them() {
        for (value, text) in [
            (1e-7, "1e-07"),
            (3.0, "3.0"),
            (-0.0, "-0.0"),
            (0.5, "0.5"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001234, "1.234e-05"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_repr(value), text);
        }
        assert_eq!(
            rendered("{{ [none, true, 'a', \"it's\", 'q\"\\'', 1.0, {'k': [1]}, 'x\\ny'] }}"),
            r#"[None, True, 'a', "it's", 'q"\'', 1.0, {'k': [1]}, 'x\ny']"#
        );
        assert_eq!(rendered("{{ none }}|{{ false }}|{{ nothing }}|{{ (1,) }}"), "None|False||(1,)");
        assert_eq!(rendered("{{ ['string', none] | upper }}"), "['STRING', NONE]");
    }

    #[test]
    fn sequences_are_what_jinja2_takes_for_them() {
        let source = "{% for v in ['s', {}, [], 1, none, true] %}{{ v is sequence }} {% endfor %}{{ nothing is sequence }}";
        assert_eq!(rendered(source), "True True True False False False True");
        assert_eq!(
            rendered(
                "{{ 5['type'] | upper }}|{{ 'abc'['type'] }}|{{ true['x'] is defined }}|{{ 'abcd'[1:3] }}"
            ),
            "||False|bc"
        );
    }

    #[test]
    fn white_space_is_pythons() {
        assert_eq!(rendered("[{{ '\u{1c}\u{a0}\u{2003} a\u{200b}\u{1f}\\n' | trim }}]"), "[a\u{200b}]");
        assert_eq!(rendered("[{{ '\u{1d} a \u{85}'.strip() }}]"), "[a]");
        assert_eq!(rendered("[{{ 'xxaxx' | trim('x') }}]"), "[a]");
    }

    #[test]
    fn json_is_what_json_dumps_writes() {
        assert_eq!(
            rendered(r#"{{ {"b": [1, 2.0, none], "a": "é<\"\n"} | tojson }}"#),
            r#"{"b": [1, 2.0, null], "a": "é<\"\n"}"#
        );
        assert_eq!(
            rendered(r#"{{ {"b": [], "a": [1]} | tojson(indent=2, sort_keys=true) }}"#),
            "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}"
        );
        assert_eq!(
            rendered("{{ ['é', '😀'] | tojson(ensure_ascii=true, separators=(',', ':')) }}"),
            r#"["\u00e9","\ud83d\ude00"]"#
        );
    }

    #[test]
    fn generation_tags_are_plain_blocks() {
        assert_eq!(
            without_generation_tags("a{%- generation -%}b{% endgeneration %}{% if generation %}"),
            "a{%- if true -%}b{% endif %}{% if generation %}"
        );
    }
}
