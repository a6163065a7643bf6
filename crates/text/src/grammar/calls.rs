//! The grammar of calls: Gemma's notation, with arguments by the tools' schemas.
//!
//! ```text
//! start: call            or call+
//! call:  <|tool_call> "call:NAME" object <tool_call|>
//! ```
//!
//! Members come in the order in which the template prints a call's arguments (by name, whatever the case), which is the one
//! that models have learned. Optional ones may be left out. Where a schema declares properties, there are no others
//! unless `additionalProperties` asks for them. There is no white space: the notation has none.
//!
//! Carried out are types, `nullable`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`,
//! `prefixItems`, `minItems`, `maxItems`, `anyOf`, `oneOf`, `$ref`, `minLength`, `maxLength` and `pattern`. What else a
//! schema says (bounds of numbers, formats) is left to the tool, as it is when nothing is forced; a tool that asks for
//! `strict` gets an error instead.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::schema::{error, resolve};
use crate::error::{Error, Result};
use crate::tokenizer::SpecialIds;

/// Most levels of a schema that the grammar follows.
const MAX_DEPTH: usize = 64;
/// Most rules, which bounds the work for schemas whose references multiply.
const MAX_RULES: usize = 20_000;

/// Which calls an answer consists of.
#[derive(Clone, Debug, PartialEq)]
pub struct CallGrammar {
    /// Declarations in the form of OpenAI's chat completions; the tools that may be called.
    pub tools: Vec<Value>,
    /// Whether several calls may follow one another.
    pub several: bool,
}

impl CallGrammar {
    /// The grammar as Lark.
    pub(super) fn lark(&self, specials: &SpecialIds) -> Result<String> {
        let need = |id: Option<u32>, name| id.ok_or(Error::MissingToken(name));
        let open = need(specials.tool_call_open, "<|tool_call>")?;
        let close = need(specials.tool_call_close, "<tool_call|>")?;
        let quote = need(specials.quote, "<|\"|>")?;
        if self.tools.is_empty() {
            return Err(error("tools", "a call is asked for and no tool is declared".to_owned()));
        }
        let mut bodies = Vec::new();
        let mut rules = String::new();
        let mut count = 0;
        for (i, tool) in self.tools.iter().enumerate() {
            let function = tool.get("function").unwrap_or(tool);
            let place = format!("tools[{i}].function");
            let Some(name) = function["name"].as_str().filter(|name| is_callable(name)) else {
                let problem = "expected a name of letters, digits, '_', '-' and '.'".to_owned();
                return Err(error(&format!("{place}.name"), problem));
            };
            let root = &function["parameters"];
            let mut writer = Writer {
                root,
                strict: function["strict"] == true,
                quote,
                prefix: i,
                rules: &mut rules,
                count: &mut count,
                references: HashMap::new(),
            };
            let object = match root {
                Value::Null => "\"{}\"".to_owned(),
                Value::Object(map) => writer.object(map, &format!("{place}.parameters"), 0)?,
                _ => return Err(error(&format!("{place}.parameters"), "expected a schema".to_owned())),
            };
            bodies.push(format!("{} {object}", literal(&format!("call:{name}"))));
        }
        let repeat = if self.several { "+" } else { "" };
        Ok(format!(
            "start: call{repeat}\ncall: <[{open}]> ({}) <[{close}]>\n{rules}",
            bodies.join("\n    | ")
        ))
    }
}

/// Whether the parser of replies reads a name whole.
fn is_callable(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
}

struct Writer<'a> {
    /// Where `$ref` starts.
    root: &'a Value,
    strict: bool,
    /// The quote token.
    quote: u32,
    /// Tells the rules of this tool from others'.
    prefix: usize,
    rules: &'a mut String,
    count: &'a mut usize,
    /// Rules by what they refer to.
    references: HashMap<&'a str, String>,
}

impl<'a> Writer<'a> {
    /// An expression for a value of a schema.
    fn value(&mut self, schema: &'a Value, place: &str, depth: usize) -> Result<String> {
        if depth > MAX_DEPTH {
            return Err(error(place, format!("it nests deeper than {MAX_DEPTH}")));
        }
        let map = match schema {
            Value::Bool(true) | Value::Null => return self.any(),
            Value::Object(map) => map,
            Value::Bool(false) => return Err(error(place, "no value fits false".to_owned())),
            other => return Err(error(place, format!("expected a schema, found {other}"))),
        };
        if let Some(target) = map.get("$ref") {
            return self.reference(target, &format!("{place}.$ref"), depth);
        }
        let mut options = Vec::new();
        if let Some(value) = map.get("const") {
            options.push(self.fixed(value));
        } else if let Some(values) = map.get("enum") {
            let values = values.as_array().filter(|v| !v.is_empty());
            let values =
                values.ok_or_else(|| error(&format!("{place}.enum"), "expected values".to_owned()))?;
            for value in values {
                options.push(self.fixed(value));
            }
        } else if let Some((key, list)) = ["anyOf", "oneOf"].iter().find_map(|k| Some((*k, map.get(*k)?))) {
            let list = list.as_array().filter(|list| !list.is_empty());
            let list = list.ok_or_else(|| error(&format!("{place}.{key}"), "expected schemas".to_owned()))?;
            for (i, option) in list.iter().enumerate() {
                options.push(self.value(option, &format!("{place}.{key}[{i}]"), depth + 1)?);
            }
        } else {
            self.typed(map, place, depth, &mut options)?;
        }
        if map.get("nullable") == Some(&Value::Bool(true)) {
            options.push("\"null\"".to_owned());
        }
        self.rule(&options.join(" | "), place)
    }

    fn typed(
        &mut self,
        map: &'a Map<String, Value>,
        place: &str,
        depth: usize,
        options: &mut Vec<String>,
    ) -> Result<()> {
        self.refuse_if_strict(map, place)?;
        let described = ["properties", "required"].iter().any(|k| map.contains_key(*k));
        let types = match map.get("type") {
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None if described => {
                options.push(self.object(map, place, depth)?);
                return Ok(());
            }
            None if map.contains_key("items") => {
                options.push(self.array(map, place, depth)?);
                return Ok(());
            }
            None => {
                options.push(self.any()?);
                return Ok(());
            }
        };
        for kind in types {
            // Google's declarations write types in upper case.
            let name = kind.as_str().unwrap_or_default().to_ascii_lowercase();
            options.push(match name.as_str() {
                "string" => self.string(map, place)?,
                "integer" => "/-?(0|[1-9][0-9]*)/".to_owned(),
                "number" => NUMBER.to_owned(),
                "boolean" => "\"true\" | \"false\"".to_owned(),
                "null" => "\"null\"".to_owned(),
                "array" => self.array(map, place, depth)?,
                "object" => self.object(map, place, depth)?,
                _ => return Err(error(&format!("{place}.type"), format!("{kind} is no type"))),
            });
        }
        Ok(())
    }

    fn string(&mut self, map: &Map<String, Value>, place: &str) -> Result<String> {
        let count = |key: &str| map.get(key).and_then(Value::as_u64);
        let (least, most) = (count("minLength").unwrap_or(0), count("maxLength"));
        if let Some(pattern) = map.get("pattern").and_then(Value::as_str) {
            if least > 0 || most.is_some() {
                let problem = "a pattern together with a length is not supported in a forced call".to_owned();
                return Err(error(&format!("{place}.pattern"), problem));
            }
            let (starts, ends) = (pattern.starts_with('^'), pattern.ends_with('$'));
            let inner = super::schema::without_anchors(pattern);
            let before = if starts { "" } else { "(?s:.*)" };
            let after = if ends { "" } else { "(?s:.*)" };
            let regex = llguidance::regex_to_lark(&format!("{before}({inner}){after}"), "dw");
            return Ok(format!("<[{0}]> /{regex}/ <[{0}]>", self.quote));
        }
        let body = match (least, most) {
            (0, None) => "/(?s:.+)/?".to_owned(),
            (0, Some(0)) => String::new(),
            (0, Some(most)) => format!("/(?s:.{{1,{most}}})/?"),
            (least, None) => format!("/(?s:.{{{least},}})/"),
            (least, Some(most)) if least <= most => format!("/(?s:.{{{least},{most}}})/"),
            _ => return Err(error(&format!("{place}.minLength"), "it is above maxLength".to_owned())),
        };
        Ok(format!("<[{0}]> {body} <[{0}]>", self.quote))
    }

    fn array(&mut self, map: &'a Map<String, Value>, place: &str, depth: usize) -> Result<String> {
        let count = |key: &str| map.get(key).and_then(Value::as_u64).map(|n| n as usize);
        let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
        let first = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        if most.is_some_and(|most| most < least) {
            return Err(error(&format!("{place}.minItems"), "it is above maxItems".to_owned()));
        }
        if first.is_empty() {
            let item = match map.get("items") {
                Some(items) => self.value(items, &format!("{place}.items"), depth + 1)?,
                None => self.any()?,
            };
            let rest = match most {
                Some(0) => return Ok("\"[]\"".to_owned()),
                Some(most) => format!("{{{},{}}}", least.saturating_sub(1), most - 1),
                None => format!("{{{},}}", least.saturating_sub(1)),
            };
            let optional = if least == 0 { "?" } else { "" };
            return Ok(format!("\"[\" ({item} (\",\" {item}){rest}){optional} \"]\""));
        }
        let mut items = Vec::new();
        for (i, item) in first.iter().enumerate() {
            items.push(self.value(item, &format!("{place}.prefixItems[{i}]"), depth + 1)?);
        }
        Ok(format!("\"[\" {} \"]\"", items.join(" \",\" ")))
    }

    fn object(&mut self, map: &'a Map<String, Value>, place: &str, depth: usize) -> Result<String> {
        let properties = match map.get("properties") {
            None | Some(Value::Null) => None,
            Some(Value::Object(properties)) => Some(properties).filter(|p| !p.is_empty()),
            Some(other) => {
                let problem = format!("expected an object of schemas, found {other}");
                return Err(error(&format!("{place}.properties"), problem));
            }
        };
        let required = |name: &str| {
            map.get("required").and_then(Value::as_array).is_some_and(|list| list.iter().any(|v| v == name))
        };
        let more = map.get("additionalProperties");
        let Some(properties) = properties else {
            return match more {
                Some(Value::Bool(false)) => Ok("\"{}\"".to_owned()),
                Some(schema @ Value::Object(_)) => {
                    let value = self.value(schema, &format!("{place}.additionalProperties"), depth + 1)?;
                    let member = self.free_member(&value);
                    Ok(format!("\"{{\" ({member} (\",\" {member})*)? \"}}\""))
                }
                _ => self.any_object(),
            };
        };
        let mut names: Vec<&'a String> = properties.keys().collect();
        names.sort_by_key(|name| name.to_lowercase());
        let mut members = Vec::new();
        for name in names {
            let value = self.value(&properties[name], &format!("{place}.properties.{name}"), depth + 1)?;
            members.push((format!("{} \":\" {value}", self.key(name)), required(name)));
        }
        if let Some(schema) = more.filter(|more| **more != Value::Bool(false)) {
            let value = self.value(schema, &format!("{place}.additionalProperties"), depth + 1)?;
            let member = self.free_member(&value);
            members.push((format!("{member} (\",\" {member})*"), false));
        }
        // `first` begins at a place where nothing stands before, `next` behind a member.
        let (mut first, mut next) = (String::new(), String::new());
        for (member, required) in members.iter().rev() {
            let member = self.rule(member, place)?;
            let (behind, skipped) = (next, first);
            next = match required {
                true => self.rule(&format!("\",\" {member} {behind}"), place)?,
                false => self.rule(&format!("(\",\" {member})? {behind}"), place)?,
            };
            first = match (required, skipped.is_empty()) {
                (true, _) => self.rule(&format!("{member} {behind}"), place)?,
                (false, true) => self.rule(&format!("({member} {behind})?"), place)?,
                (false, false) => self.rule(&format!("({member} {behind}) | {skipped}"), place)?,
            };
        }
        Ok(format!("\"{{\" {first} \"}}\""))
    }

    /// A key as the template prints it; one that would not be read back whole stands in quotes.
    fn key(&self, name: &str) -> String {
        let plain = !name.is_empty()
            && name.trim() == name
            && !name.contains([':', '{', '}', '[', ']', ',', '"', '\'']);
        match plain {
            true => literal(name),
            false => format!("<[{0}]> {1} <[{0}]>", self.quote, literal(name)),
        }
    }

    fn free_member(&self, value: &str) -> String {
        format!("/[^:{{}}\\[\\],\"'\\s]([^:{{}}\\[\\],\"'\\n]*[^:{{}}\\[\\],\"'\\s])?/ \":\" {value}")
    }

    fn reference(&mut self, target: &'a Value, place: &str, depth: usize) -> Result<String> {
        let target = target.as_str().unwrap_or_default();
        if let Some(rule) = self.references.get(target) {
            return Ok(rule.clone());
        }
        let Some(schema) = resolve(self.root, target) else {
            return Err(error(place, format!("{target:?} leads nowhere in this schema")));
        };
        let rule = self.name(place)?;
        self.references.insert(target, rule.clone());
        let value = self.value(schema, place, depth + 1)?;
        if value == rule {
            return Err(error(place, format!("{target:?} leads to itself")));
        }
        let _ = writeln!(self.rules, "{rule}: {value}");
        Ok(rule)
    }

    /// A value that is given.
    fn fixed(&self, value: &Value) -> String {
        match value {
            Value::String(text) if text.is_empty() => format!("<[{0}]> <[{0}]>", self.quote),
            Value::String(text) => format!("<[{0}]> {1} <[{0}]>", self.quote, literal(text)),
            Value::Array(items) if items.is_empty() => "\"[]\"".to_owned(),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(|item| self.fixed(item)).collect();
                format!("\"[\" {} \"]\"", items.join(" \",\" "))
            }
            Value::Object(map) if map.is_empty() => "\"{}\"".to_owned(),
            Value::Object(map) => {
                let mut names: Vec<&String> = map.keys().collect();
                names.sort_by_key(|name| name.to_lowercase());
                let member = |name: &&String| format!("{} \":\" {}", self.key(name), self.fixed(&map[*name]));
                let members: Vec<String> = names.iter().map(member).collect();
                format!("\"{{\" {} \"}}\"", members.join(" \",\" "))
            }
            other => literal(&other.to_string()),
        }
    }

    /// Any value; its rules are shared by all tools.
    fn any(&mut self) -> Result<String> {
        if !self.rules.contains("\nany: ") && !self.rules.starts_with("any: ") {
            let quote = self.quote;
            let member = self.free_member("any");
            let _ = write!(
                self.rules,
                "any: <[{quote}]> /(?s:.+)/? <[{quote}]> | {NUMBER} | \"true\" | \"false\" | \"null\" | any_array | any_object\n\
                 any_array: \"[\" (any (\",\" any)*)? \"]\"\n\
                 any_object: \"{{\" ({member} (\",\" {member})*)? \"}}\"\n",
            );
        }
        Ok("any".to_owned())
    }

    fn any_object(&mut self) -> Result<String> {
        self.any()?;
        Ok("any_object".to_owned())
    }

    /// Gives an expression a name.
    fn rule(&mut self, expression: &str, place: &str) -> Result<String> {
        if expression.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !expression.is_empty() {
            return Ok(expression.to_owned());
        }
        let name = self.name(place)?;
        let _ = writeln!(self.rules, "{name}: {expression}");
        Ok(name)
    }

    fn name(&mut self, place: &str) -> Result<String> {
        *self.count += 1;
        if *self.count > MAX_RULES {
            return Err(error(place, "the declared tools are too large for a forced call".to_owned()));
        }
        Ok(format!("t{}_{}", self.prefix, self.count))
    }

    fn refuse_if_strict(&self, map: &Map<String, Value>, place: &str) -> Result<()> {
        const CARRIED_OUT: [&str; 20] = [
            "type",
            "nullable",
            "properties",
            "required",
            "additionalProperties",
            "items",
            "prefixItems",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
            "pattern",
            "description",
            "title",
            "default",
            "examples",
            "$defs",
            "definitions",
            "$schema",
            "$comment",
        ];
        match map.keys().find(|key| self.strict && !CARRIED_OUT.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                Err(error(&format!("{place}.{key}"), "a strict tool cannot use this keyword".to_owned()))
            }
        }
    }
}

const NUMBER: &str = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/";

/// A string literal of Lark, which reads JSON's escapes.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
