//! What is certain of a call that is still being written, for callers that a grammar keeps to the notation.
//!
//! An argument is certain when its end was seen; a string in quote tokens already while it goes on, since nothing in it can
//! mean anything else. A number may get another digit, and an object another member, so these wait.

use super::schema::{Tools, Typed};
use super::{CallText, Parser, Symbol, Value};

/// The beginning of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The tool's name.
    pub name: String,
    /// The beginning of the arguments' JSON text.
    pub arguments: String,
}

impl CallText {
    /// What whatever follows cannot change, provided that it follows the notation and names no argument twice; `None` while
    /// the name is not.
    pub fn written(&self, tools: &Tools) -> Option<Written> {
        let mut parser = Parser { symbols: &self.0, at: 0 };
        parser.skip_space();
        "call:".chars().try_for_each(|c| parser.eat(c).then_some(()))?;
        parser.skip_space();
        let name = parser.take_while(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
        parser.skip_space();
        if name.is_empty() || !parser.eat('{') {
            return None;
        }
        let parameters = tools.parameters(&name);
        let mut members = Vec::new();
        let open = parser.members_so_far(&mut members);
        let mut arguments = Typed::new(parameters).json(&Value::Object(members.clone()));
        arguments.truncate(arguments.len() - 1);
        if let Some((key, text)) = open.filter(|(key, _)| Typed::new(parameters).keeps_quotes(key)) {
            members.push((key, Value::Quoted(text)));
            let whole = Typed::new(parameters).json(&Value::Object(members));
            // Without the quote and the brace that close it.
            arguments = whole.strip_suffix("\"}")?.to_owned();
        }
        Some(Written { name, arguments })
    }
}

impl Parser<'_> {
    /// Members whose ends were seen; gives the key and the text of a quoted string that goes on.
    fn members_so_far(&mut self, members: &mut Vec<(String, Value)>) -> Option<(String, String)> {
        loop {
            self.skip_space();
            let key = self.key().ok()?;
            self.skip_space();
            let start = self.at;
            let quoted = self.peek() == Some(Symbol::Quote);
            match self.value(1) {
                Ok(value) => {
                    self.skip_space();
                    let ended = matches!(self.peek(), Some(Symbol::Char(',' | '}')));
                    if !quoted && (!ended || self.has_plain_quotes(start)) {
                        return None;
                    }
                    members.push((key, value));
                    if !self.eat(',') {
                        return None;
                    }
                }
                Err(_) if quoted => {
                    self.at = start + 1;
                    let text = self.take_while(|_| true);
                    return Some((key, text));
                }
                Err(_) => return None,
            }
        }
    }
}

impl Parser<'_> {
    /// Whether ordinary quotes stand outside of quote tokens since `start`: where such a string ends, only its end tells.
    fn has_plain_quotes(&self, start: usize) -> bool {
        let mut within = false;
        self.symbols[start..self.at].iter().any(|symbol| {
            within ^= *symbol == Symbol::Quote;
            !within && matches!(symbol, Symbol::Char('"' | '\''))
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// At every cut what is certain is a beginning of what the whole call says, and it only grows.
    #[test]
    fn what_is_certain_at_any_cut_begins_the_whole() {
        let schema = json!({ "type": "object", "properties": {
            "city": { "type": "string" }, "days": { "type": "integer" }, "flag": { "type": "boolean" },
            "deep": { "type": "object", "properties": { "a": { "type": "number" } } },
            "list": { "type": "array", "items": { "type": "string" } }, "either": { "type": ["string", "integer"] },
        } });
        let tools = Tools::new(&[json!({ "function": { "name": "f", "parameters": schema } })]);
        let q = "<|\"|>";
        for (text, strings) in [
            (format!("call:f{{city:{q}Par\"is\n\\ü}}, {{x:1{q},days:31,flag:true}}"), true),
            (format!("call:f{{days:{q}31{q},either:{q}7{q},other:{q}x y{q}}}"), true),
            (format!("call:f{{deep:{{a:1.5,b:{q}c{q}}},list:[{q}a{q},{q}b{q}],city:{q}{q}}}"), true),
            ("call:f{days:7,city:\"a, b\",flag:true}".to_owned(), false),
            ("call:f{deep:{a:\"x}, y\"},flag:true}".to_owned(), false),
            ("call:f{}".to_owned(), false),
            ("call:f{city:Rome,days:7}".to_owned(), false),
        ] {
            let whole = CallText::from_spelled(&text).parse(&tools).unwrap();
            let all = CallText::from_spelled(&text);
            let (mut before, mut within) = (String::new(), false);
            for cut in 0..=all.0.len() {
                let part = CallText(all.0[..cut].to_vec());
                let Some(written) = part.written(&tools) else {
                    assert!(cut < 8 && before.is_empty(), "{text} at {cut}");
                    continue;
                };
                assert_eq!(written.name, "f");
                assert!(whole.arguments.starts_with(&written.arguments), "{text} at {cut}: {written:?}");
                assert!(
                    written.arguments.starts_with(&before),
                    "{text} at {cut}: {written:?} after {before}"
                );
                within |=
                    serde_json::from_str::<serde_json::Value>(&(written.arguments.clone() + "\"}")).is_ok();
                before = written.arguments;
            }
            assert_eq!(within, strings, "{text}: strings are told while they are written");
        }
    }
}
