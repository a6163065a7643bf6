//! Reads the tool calls that Gemma 4 writes and turns their arguments into JSON.
//!
//! ```text
//! call    := "call:" name [ object ]
//! object  := "{" [ key ":" value { "," key ":" value } [ "," ] ] "}"
//! array   := "[" [ value { "," value } [ "," ] ] "]"
//! value   := Q raw Q | object | array | string | bare
//! key     := Q raw Q | string | characters up to ":"
//! ```
//!
//! Q is the quote token: one id, so nothing inside can end the string early and nothing is escaped. The model also writes
//! JSON and Python strings, `True` and `None`, and leaves values out; all of it is taken as meant. Regular expressions
//! fail here, because objects nest and strings hold braces.

mod schema;
mod written;

use std::collections::HashMap;

use crate::error::{Error, Result};
pub use schema::Tools;
use schema::Typed;
pub use written::Written;

/// How deep arguments may nest; the bound keeps a looping model from overflowing the stack.
const MAX_DEPTH: usize = 100;

/// The quote token spelled out.
const QUOTE: &str = "<|\"|>";

/// A call that parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// The arguments: the text of a JSON object. Text, because numbers keep all the digits that the model wrote.
    pub arguments: String,
}

/// What stands between the markers of a call, with quote tokens told from characters that look like them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallText(Vec<Symbol>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Symbol {
    Char(char),
    Quote,
}

impl CallText {
    /// Adds ordinary text.
    pub fn push_str(&mut self, text: &str) {
        self.0.extend(text.chars().map(Symbol::Char));
    }

    /// Adds a quote token.
    pub fn push_quote(&mut self) {
        self.0.push(Symbol::Quote);
    }

    /// Takes a text in which quote tokens are spelled out.
    pub fn from_spelled(text: &str) -> Self {
        let mut out = Self::default();
        for (i, run) in text.split(QUOTE).enumerate() {
            if i > 0 {
                out.push_quote();
            }
            out.push_str(run);
        }
        out
    }

    /// The text with quote tokens spelled out.
    pub fn spelled(&self) -> String {
        let mut out = String::new();
        for symbol in &self.0 {
            match symbol {
                Symbol::Char(c) => out.push(*c),
                Symbol::Quote => out.push_str(QUOTE),
            }
        }
        out
    }

    /// Parses a whole call. The schemas in `tools` decide where the notation leaves a type open; an undeclared tool is
    /// read without.
    pub fn parse(&self, tools: &Tools) -> Result<ToolCall> {
        let mut parser = Parser { symbols: &self.0, at: 0 };
        parser.skip_space();
        for c in "call:".chars() {
            parser.expect(c, "expected call:NAME")?;
        }
        parser.skip_space();
        let name = parser.take_while(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
        if name.is_empty() {
            return Err(parser.error("expected the name of a tool"));
        }
        parser.skip_space();
        let arguments = match parser.peek() {
            None => Value::Object(Vec::new()),
            _ => parser.object(0)?,
        };
        parser.skip_space();
        if parser.peek().is_some() {
            return Err(parser.error("expected the end of the call"));
        }
        let arguments = Typed::new(tools.parameters(&name)).json(&arguments);
        Ok(ToolCall { name, arguments })
    }
}

/// A value before its type is settled.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    /// A string, in whichever quotes.
    Quoted(String),
    /// Characters without quotes, trimmed.
    Bare(String),
    Array(Vec<Value>),
    /// Keys are unique.
    Object(Vec<(String, Value)>),
}

struct Parser<'a> {
    symbols: &'a [Symbol],
    at: usize,
}

impl Parser<'_> {
    fn value(&mut self, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(self.error("arguments nest too deeply"));
        }
        self.skip_space();
        match self.peek() {
            Some(Symbol::Quote) => Ok(Value::Quoted(self.quoted()?)),
            Some(Symbol::Char('{')) => self.object(depth),
            Some(Symbol::Char('[')) => self.array(depth),
            Some(Symbol::Char(quote @ ('"' | '\''))) => {
                let start = self.at;
                if let Some(text) = self.string(quote) {
                    self.skip_space();
                    if matches!(self.peek(), None | Some(Symbol::Char(',' | '}' | ']'))) {
                        return Ok(Value::Quoted(text));
                    }
                }
                // Something like 'tis or "a" and "b": the quotes belong to the text.
                self.at = start;
                self.bare()
            }
            _ => self.bare(),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value> {
        self.expect('{', "expected { before the arguments")?;
        let mut members: Vec<(String, Value)> = Vec::new();
        let mut places = HashMap::new();
        loop {
            self.skip_space();
            if self.eat('}') {
                return Ok(Value::Object(members));
            }
            let key = self.key()?;
            let value = self.value(depth + 1)?;
            // As in every JSON parser, the last of equal keys wins.
            match places.get(&key) {
                Some(&place) => members[place] = (key, value),
                None => {
                    places.insert(key.clone(), members.len());
                    members.push((key, value));
                }
            }
            self.skip_space();
            if !self.eat(',') && self.peek() != Some(Symbol::Char('}')) {
                return Err(self.error("expected , or } after a value"));
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value> {
        self.expect('[', "expected [")?;
        let mut items = Vec::new();
        loop {
            self.skip_space();
            if self.eat(']') {
                return Ok(Value::Array(items));
            }
            items.push(self.value(depth + 1)?);
            self.skip_space();
            if !self.eat(',') && self.peek() != Some(Symbol::Char(']')) {
                return Err(self.error("expected , or ] after an element"));
            }
        }
    }

    fn key(&mut self) -> Result<String> {
        let start = self.at;
        let quoted = match self.peek() {
            Some(Symbol::Quote) => Some(self.quoted()?),
            Some(Symbol::Char(quote @ ('"' | '\''))) => self.string(quote),
            _ => None,
        };
        if let Some(key) = quoted {
            self.skip_space();
            if self.eat(':') {
                return Ok(key);
            }
        }
        self.at = start;
        let key = self.take_while(|c| !":{}[],".contains(c)).trim().to_owned();
        if key.is_empty() {
            return Err(self.error("expected a key"));
        }
        self.expect(':', "expected : after a key")?;
        Ok(key)
    }

    /// A string between quote tokens.
    fn quoted(&mut self) -> Result<String> {
        self.at += 1;
        let text = self.take_while(|_| true);
        if self.peek() != Some(Symbol::Quote) {
            return Err(self.error("expected the closing quote token"));
        }
        self.at += 1;
        Ok(text)
    }

    /// A string in ordinary quotes, with the escapes of JSON and Python. None when it does not end.
    fn string(&mut self, quote: char) -> Option<String> {
        self.at += 1;
        let mut out = String::new();
        loop {
            match self.next_char()? {
                c if c == quote => return Some(out),
                '\\' => match self.next_char()? {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    'b' => out.push('\u{8}'),
                    'f' => out.push('\u{c}'),
                    'u' => self.unicode_escape(&mut out),
                    c @ ('\\' | '/' | '"' | '\'') => out.push(c),
                    // Not an escape in either language, so the backslash is meant.
                    c => out.extend(['\\', c]),
                },
                c => out.push(c),
            }
        }
    }

    /// What follows `\u`: a code unit, or a surrogate pair in two escapes. Anything else stays as written.
    fn unicode_escape(&mut self, out: &mut String) {
        let start = self.at;
        let first = self.hex4();
        let unit = match first {
            Some(high @ 0xd800..=0xdbff) if self.eat('\\') && self.eat('u') => self
                .hex4()
                .filter(|low| (0xdc00..=0xdfff).contains(low))
                .map(|low| 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)),
            other => other,
        };
        match unit.and_then(char::from_u32) {
            Some(c) => out.push(c),
            None => {
                self.at = start;
                out.push_str("\\u");
            }
        }
    }

    fn hex4(&mut self) -> Option<u32> {
        let mut unit = 0;
        for _ in 0..4 {
            unit = unit * 16 + self.next_char()?.to_digit(16)?;
        }
        Some(unit)
    }

    /// Characters up to the next separator. None at all means that the value was left out, which stands for "".
    fn bare(&mut self) -> Result<Value> {
        let text = self.take_while(|c| !",}]".contains(c));
        if self.peek() == Some(Symbol::Quote) {
            return Err(self.error("expected , or } before a quote token"));
        }
        match text.trim() {
            "" => Ok(Value::Quoted(String::new())),
            text => Ok(Value::Bare(text.to_owned())),
        }
    }

    /// Takes characters while they fit; a quote token never does.
    fn take_while(&mut self, fits: impl Fn(char) -> bool) -> String {
        let mut out = String::new();
        while let Some(Symbol::Char(c)) = self.peek().filter(|s| matches!(s, Symbol::Char(c) if fits(*c))) {
            out.push(c);
            self.at += 1;
        }
        out
    }

    fn skip_space(&mut self) {
        self.take_while(char::is_whitespace);
    }

    fn peek(&self) -> Option<Symbol> {
        self.symbols.get(self.at).copied()
    }

    fn next_char(&mut self) -> Option<char> {
        let Some(Symbol::Char(c)) = self.peek() else { return None };
        self.at += 1;
        Some(c)
    }

    fn eat(&mut self, c: char) -> bool {
        let found = self.peek() == Some(Symbol::Char(c));
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, c: char, problem: &'static str) -> Result<()> {
        if self.eat(c) { Ok(()) } else { Err(self.error(problem)) }
    }

    fn error(&self, problem: &'static str) -> Error {
        Error::ToolCall { at: self.at, problem }
    }
}
