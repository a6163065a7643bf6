//! Settles the types of arguments: by the declared schema where there is one, else by what the text looks like.
//!
//! Nothing is converted with loss. A number keeps its digits; a value that does not fit its declared type stays what it
//! was, for the tool to complain about.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::Value;

/// How far references and alternatives of a schema are followed.
const MAX_HOPS: usize = 16;

/// The declared tools.
#[derive(Debug, Clone, Default)]
pub struct Tools(HashMap<String, Json>);

impl Tools {
    /// Takes declarations in the form of OpenAI's chat completions, `{"function": {"name", "parameters"}}`. Entries
    /// without a name are left out.
    pub fn new(declarations: &[Json]) -> Self {
        let entry = |tool: &Json| {
            let function = tool.get("function").unwrap_or(tool);
            Some((function["name"].as_str()?.to_owned(), function["parameters"].clone()))
        };
        Self(declarations.iter().filter_map(entry).collect())
    }

    /// The names of the declared tools.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(super) fn parameters(&self, name: &str) -> &Json {
        self.0.get(name).unwrap_or(&Json::Null)
    }
}

/// The types that a schema allows; none at all means that it does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Types {
    string: bool,
    integer: bool,
    number: bool,
    boolean: bool,
    null: bool,
    array: bool,
    object: bool,
}

/// Writes values as JSON under a schema.
pub(super) struct Typed<'a> {
    /// Where `$ref` starts.
    root: &'a Json,
}

impl<'a> Typed<'a> {
    pub fn new(root: &'a Json) -> Self {
        Self { root }
    }

    /// The JSON text of the arguments of a call.
    pub fn json(&self, arguments: &Value) -> String {
        let mut out = String::new();
        self.write(arguments, self.root, &mut out);
        out
    }

    /// Whether a quoted argument is a string whatever stands in the quotes.
    pub fn keeps_quotes(&self, key: &str) -> bool {
        let types = self.types(self.member(self.root, 0, &|schema| named(schema, key)), 0);
        types.string || types == Types::default()
    }

    fn write(&self, value: &Value, schema: &'a Json, out: &mut String) {
        let types = self.types(schema, 0);
        match value {
            Value::Quoted(text) => match types.unquoted(text) {
                Some(json) => out.push_str(json),
                None => push_string(text, out),
            },
            Value::Bare(text) => match types.bare(text) {
                Some(json) => out.push_str(json),
                None => push_string(text, out),
            },
            Value::Array(_) | Value::Object(_) if types.only_string() => {
                let mut text = String::new();
                self.write(value, &Json::Null, &mut text);
                push_string(&text, out);
            }
            Value::Array(items) => {
                let schema = self.member(schema, 0, &|s| s.get("items").filter(|items| items.is_object()));
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i > 0 { "," } else { "" });
                    self.write(item, schema, out);
                }
                out.push(']');
            }
            Value::Object(members) => {
                out.push('{');
                for (i, (key, item)) in members.iter().enumerate() {
                    out.push_str(if i > 0 { "," } else { "" });
                    push_string(key, out);
                    out.push(':');
                    self.write(item, self.member(schema, 0, &|schema| named(schema, key)), out);
                }
                out.push('}');
            }
        }
    }

    /// The first schema that `find` sees in `schema` or its alternatives.
    fn member(
        &self,
        schema: &'a Json,
        hops: usize,
        find: &impl Fn(&'a Json) -> Option<&'a Json>,
    ) -> &'a Json {
        let found = find(schema).or_else(|| {
            let others = self.alternatives(schema).filter(|_| hops < MAX_HOPS);
            others.map(|other| self.member(other, hops + 1, find)).find(|found| !found.is_null())
        });
        found.unwrap_or(&Json::Null)
    }

    fn types(&self, schema: &'a Json, hops: usize) -> Types {
        let mut types = Types::default();
        let declared = match &schema["type"] {
            Json::Array(list) => list.as_slice(),
            Json::Null => &[],
            one => std::slice::from_ref(one),
        };
        declared.iter().filter_map(Json::as_str).for_each(|name| types.allow(name));
        if declared.is_empty() {
            let values = schema["enum"].as_array().map_or(&[][..], Vec::as_slice);
            values.iter().chain(schema.get("const")).for_each(|value| types.allow(type_name(value)));
            if hops < MAX_HOPS {
                self.alternatives(schema).for_each(|other| types = types.or(self.types(other, hops + 1)));
            }
        }
        types.null |= schema["nullable"] == true && types != Types::default();
        types
    }

    /// The schemas that stand for this one or beside it.
    fn alternatives(&self, schema: &'a Json) -> impl Iterator<Item = &'a Json> {
        let reference = schema["$ref"].as_str().and_then(|path| self.root.pointer(path.strip_prefix('#')?));
        let lists =
            ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema[key].as_array()).flatten();
        reference.into_iter().chain(lists)
    }
}

/// What a schema says of a member.
fn named<'a>(schema: &'a Json, key: &str) -> Option<&'a Json> {
    schema.get("properties").and_then(|p| p.get(key)).or_else(|| schema.get("additionalProperties"))
}

impl Types {
    fn allow(&mut self, name: &str) {
        match name.to_ascii_lowercase().as_str() {
            "string" => self.string = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => {}
        }
    }

    fn or(self, other: Self) -> Self {
        Self {
            string: self.string || other.string,
            integer: self.integer || other.integer,
            number: self.number || other.number,
            boolean: self.boolean || other.boolean,
            null: self.null || other.null,
            array: self.array || other.array,
            object: self.object || other.object,
        }
    }

    fn only_string(self) -> bool {
        self.string && !self.array && !self.object
    }

    /// The JSON of characters without quotes; None for a string. A null is one whatever the schema says, because leaving
    /// an argument out is how models say that they have none.
    fn bare(self, text: &str) -> Option<&str> {
        let literal = literal(text)?;
        let wanted = match literal {
            "null" => true,
            "true" | "false" => self.boolean,
            _ => self.number || self.integer,
        };
        (wanted || !self.string).then_some(literal)
    }

    /// The JSON of a quoted text where a string is not what the schema asks for; None for a string.
    fn unquoted(self, text: &str) -> Option<&str> {
        if self.string || self == Self::default() {
            return None;
        }
        let text = text.trim();
        match literal(text) {
            Some("null") => self.null.then_some("null"),
            Some(literal @ ("true" | "false")) => self.boolean.then_some(literal),
            Some(number) if self.number || (self.integer && !number.contains(['.', 'e', 'E'])) => {
                Some(number)
            }
            Some(_) => None,
            None => {
                let opens = (self.array && text.starts_with('[')) || (self.object && text.starts_with('{'));
                (opens && serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()).then_some(text)
            }
        }
    }
}

/// The JSON literal that characters without quotes spell, in JSON's or Python's words.
fn literal(text: &str) -> Option<&str> {
    match text {
        "true" | "True" => Some("true"),
        "false" | "False" => Some("false"),
        "null" | "None" | "nil" => Some("null"),
        _ => is_number(text).then_some(text),
    }
}

/// Whether a text is a number as JSON spells them: `00713`, `.5` and `+1` are not. Nor is `1e400`: it fits the grammar, but
/// readers fail on what no double can hold.
fn is_number(text: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) =
        unsigned.split_once(['e', 'E']).map_or((unsigned, None), |(m, e)| (m, Some(e)));
    let (whole, fraction) = mantissa.split_once('.').map_or((mantissa, None), |(w, f)| (w, Some(f)));
    digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && fraction.is_none_or(digits)
        && exponent.is_none_or(|e| digits(e.strip_prefix(['+', '-']).unwrap_or(e)))
        && text.parse().is_ok_and(f64::is_finite)
}

fn type_name(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Number(n) if n.is_f64() => "number",
        Json::Number(_) => "integer",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    }
}

fn push_string(text: &str, out: &mut String) {
    out.push_str(&Json::from(text).to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_what_json_takes() {
        for yes in ["0", "-0.0", "5", "9007199254740993", "108.20", "1e5", "1E-07", "-12.5e+3"] {
            assert!(is_number(yes), "{yes}");
        }
        for no in [
            "", "-", "00713", "1.", ".5", "+1", "1e", "0x10", "1e400", "1_000", "NaN", "inf", "--1", "1 2",
            "１",
        ] {
            assert!(!is_number(no), "{no}");
        }
    }
}
