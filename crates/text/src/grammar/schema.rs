//! Holds a JSON schema against what can be honoured, and names the place of what cannot.
//!
//! The compiler would refuse most of it too, without the place. Here every keyword is looked at once: its type, whether
//! it is one that is carried out, where references lead, and whether a document could ever end.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

/// How deep a schema may nest.
const MAX_DEPTH: usize = 64;
/// Schemas that are looked at while asking whether documents end.
const MAX_VISITS: usize = 500_000;

/// Keywords that hold one schema.
const ONE: [&str; 2] = ["additionalProperties", "additionalItems"];
/// Keywords that hold a list of schemas, at least one.
const LIST: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];
/// Keywords that hold schemas by name.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];
const NUMBERS: [&str; 2] = ["minimum", "maximum"];
/// Keywords that say nothing about what a document looks like.
const NOTES: [&str; 18] = [
    "$schema",
    "$comment",
    "$anchor",
    "$vocabulary",
    "title",
    "description",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
    "example",
    "examples",
    "contentMediaType",
    "contentEncoding",
    "discriminator",
    "externalDocs",
    "xml",
    "markdownDescription",
];
const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Checks a schema and writes it with the keywords of the compiler only.
pub(super) fn prepare(schema: &Value) -> Result<Value> {
    let mut check = Check { references: Vec::new() };
    let prepared = check.schema(schema, "schema", 0)?;
    for (place, target) in &check.references {
        if resolve(schema, target).is_none() {
            return Err(error(place, format!("{target:?} leads nowhere in this schema")));
        }
    }
    Ends::new(schema).check()?;
    Ok(prepared)
}

/// Whole-text matching needs no anchors, and the compiler knows none; those around the whole expression say nothing.
pub(super) fn without_anchors(regex: &str) -> &str {
    // With alternatives at the top, an anchor belongs to one of them only.
    if regex.contains('|') && !regex.starts_with("^(") {
        return regex;
    }
    let inner = regex.strip_prefix('^').unwrap_or(regex);
    match inner.strip_suffix('$') {
        Some(rest) if rest.chars().rev().take_while(|&c| c == '\\').count() % 2 == 0 => rest,
        _ => inner,
    }
}

struct Check {
    /// Where a reference stands and where it leads.
    references: Vec<(String, String)>,
}

impl Check {
    fn schema(&mut self, schema: &Value, place: &str, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(error(place, format!("it nests deeper than {MAX_DEPTH}")));
        }
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            other => {
                return Err(error(
                    place,
                    format!("expected a schema (an object, true or false), found {}", short(other)),
                ));
            }
        };
        let mut out = Map::new();
        let mut nullable = false;
        for (key, value) in map {
            let place = &format!("{place}.{key}");
            let wrong =
                |expected: &str| Err(error(place, format!("expected {expected}, found {}", short(value))));
            let kept = match key.as_str() {
                k if ONE.contains(&k) => self.schema(value, place, depth + 1)?,
                "items" if !value.is_array() => self.schema(value, place, depth + 1)?,
                k if LIST.contains(&k) => {
                    let Some(list) = value.as_array().filter(|list| !list.is_empty()) else {
                        return wrong("a list of schemas");
                    };
                    let each = list.iter().enumerate();
                    let each = each.map(|(i, s)| self.schema(s, &format!("{place}[{i}]"), depth + 1));
                    Value::Array(each.collect::<Result<_>>()?)
                }
                k if NAMED.contains(&k) => {
                    let Some(named) = value.as_object() else { return wrong("an object of schemas") };
                    let each = named.iter().map(|(name, s)| {
                        Ok((name.clone(), self.schema(s, &format!("{place}.{name}"), depth + 1)?))
                    });
                    Value::Object(each.collect::<Result<_>>()?)
                }
                "type" => {
                    let known = |v: &Value| v.as_str().is_some_and(|name| TYPES.contains(&name));
                    let fits = known(value)
                        || value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(known));
                    if !fits {
                        return wrong(
                            "one or several of null, boolean, integer, number, string, array, object",
                        );
                    }
                    value.clone()
                }
                "enum" => match value.as_array() {
                    Some(list) if !list.is_empty() => value.clone(),
                    _ => return wrong("a list of at least one value"),
                },
                "const" => value.clone(),
                "required" => match value.as_array().is_some_and(|list| list.iter().all(Value::is_string)) {
                    true => value.clone(),
                    false => return wrong("a list of names"),
                },
                "$ref" => match value.as_str() {
                    Some(target) if target.starts_with('#') => {
                        self.references.push((place.clone(), target.to_owned()));
                        value.clone()
                    }
                    Some(_) => return wrong("a reference into this schema, beginning with #"),
                    None => return wrong("a string"),
                },
                k if COUNTS.contains(&k) => match value.as_u64() {
                    Some(_) => value.clone(),
                    None => return wrong("a whole number from 0 up"),
                },
                k if NUMBERS.contains(&k) => match value.is_number() {
                    true => value.clone(),
                    false => return wrong("a number"),
                },
                "exclusiveMinimum" | "exclusiveMaximum" => match value.is_number() || value.is_boolean() {
                    true => value.clone(),
                    false => return wrong("a number"),
                },
                "multipleOf" => match value.as_f64() {
                    Some(step) if step > 0.0 => value.clone(),
                    _ => return wrong("a number above 0"),
                },
                "pattern" | "format" => match value.is_string() {
                    true => value.clone(),
                    false => return wrong("a string"),
                },
                "nullable" => match value.as_bool() {
                    Some(yes) => {
                        nullable = yes;
                        continue;
                    }
                    None => return wrong("true or false"),
                },
                "uniqueItems" if value == false => continue,
                // An identifier changes what references mean; without any it is a note.
                "$id" | "id" if depth == 0 && value.is_string() => continue,
                k if NOTES.contains(&k) || (k.starts_with("x-") && k != "x-guidance") => continue,
                _ => return Err(error(place, "this keyword is not supported".to_owned())),
            };
            out.insert(key.clone(), kept);
        }
        Ok(match nullable {
            true => json!({ "anyOf": [out, { "type": "null" }] }),
            false => Value::Object(out),
        })
    }
}

/// Follows `#` and `#/a/b` with the escapes of JSON pointers in URIs.
pub(super) fn resolve<'a>(root: &'a Value, target: &str) -> Option<&'a Value> {
    let pointer = target.strip_prefix('#')?;
    match pointer.contains('%') {
        true => root.pointer(&percent_decoded(pointer)?),
        false => root.pointer(pointer),
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let (high, low) = (bytes.next()? as char, bytes.next()? as char);
                (high.to_digit(16)? * 16 + low.to_digit(16)?) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

/// Whether a finite document exists. A reference that is needed in every document that it stands in, directly or through
/// others, would let a model open brackets for ever.
struct Ends<'a> {
    root: &'a Value,
    /// References whose target is known to have a finite document.
    finite: HashSet<&'a str>,
    visits: usize,
}

impl<'a> Ends<'a> {
    fn new(root: &'a Value) -> Self {
        Self { root, finite: HashSet::new(), visits: 0 }
    }

    fn check(mut self) -> Result<()> {
        let mut references = HashMap::new();
        collect_references(self.root, "schema", &mut references);
        // The least fixed point: what is finite if only what is known to be is.
        loop {
            let before = self.finite.len();
            for target in references.keys().copied() {
                if !self.finite.contains(target) && self.ends(resolve(self.root, target))? {
                    self.finite.insert(target);
                }
            }
            if self.finite.len() == before {
                break;
            }
        }
        let endless = references.into_iter().filter(|(target, _)| !self.finite.contains(target));
        match endless.min_by(|a, b| a.1.cmp(&b.1)) {
            None => Ok(()),
            Some((target, place)) => Err(error(
                &place,
                format!("{target:?} contains itself without an end: no document is finite"),
            )),
        }
    }

    fn ends(&mut self, schema: Option<&'a Value>) -> Result<bool> {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return Err(error("schema", "its references are too many to follow".to_owned()));
        }
        let Some(Value::Object(map)) = schema else {
            return Ok(schema != Some(&Value::Bool(false)));
        };
        // `prepare` bounds the depth of what is written; references are not followed here.
        if let Some(target) = map.get("$ref").and_then(Value::as_str)
            && !self.finite.contains(target)
        {
            return Ok(false);
        }
        for option in map.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            if !self.ends(Some(option))? {
                return Ok(false);
            }
        }
        for key in ["anyOf", "oneOf"] {
            let Some(options) = map.get(key).and_then(Value::as_array) else { continue };
            let mut any = false;
            for option in options {
                any = any || self.ends(Some(option))?;
            }
            if !any {
                return Ok(false);
            }
        }
        if !may_be_container_only(map) {
            return Ok(true);
        }
        let required = map.get("required").and_then(Value::as_array).into_iter().flatten();
        for name in required.filter_map(Value::as_str) {
            let property = map.get("properties").and_then(|p| p.get(name));
            if let Some(property) = property
                && !self.ends(Some(property))?
            {
                return Ok(false);
            }
        }
        let needed = map.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
        let first = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for item in first.iter().take(needed) {
            if !self.ends(Some(item))? {
                return Ok(false);
            }
        }
        if needed > first.len()
            && let Some(items) = map.get("items")
        {
            return self.ends(Some(items));
        }
        Ok(true)
    }
}

/// Whether a schema leaves nothing but objects and arrays, whose members then decide.
fn may_be_container_only(map: &Map<String, Value>) -> bool {
    let container = |v: &Value| v == "object" || v == "array";
    match map.get("type") {
        Some(Value::Array(list)) => list.iter().all(container),
        Some(one) => container(one),
        // Without a type, the compiler allows any value beside the described ones.
        None => map.contains_key("required") || map.contains_key("minItems"),
    }
}

fn collect_references<'a>(schema: &'a Value, place: &str, out: &mut HashMap<&'a str, String>) {
    match schema {
        Value::Object(map) => {
            for (key, value) in map {
                match value.as_str() {
                    Some(target) if key == "$ref" => {
                        out.entry(target).or_insert_with(|| format!("{place}.$ref"));
                    }
                    _ => collect_references(value, &format!("{place}.{key}"), out),
                }
            }
        }
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| collect_references(v, &format!("{place}[{i}]"), out));
        }
        _ => {}
    }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.chars().count() > 60 {
        true => text.chars().take(60).collect::<String>() + " ...",
        false => text,
    }
}

pub(super) fn error(place: &str, problem: String) -> Error {
    let place = match place.chars().count() > 200 {
        true => place.chars().take(200).collect::<String>() + " ...",
        false => place.to_owned(),
    };
    Error::Grammar { place, problem }
}
