//! Brings a conversation into the form that a template expects: arguments parsed, results folded into their call, an
//! unfinished answer set apart.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::python::is_space;
use super::{ChatInput, ChatTemplate};
use crate::error::{Error, Result};

const THOUGHT_OPEN: &str = "<|channel>";
const THOUGHT_CLOSE: &str = "<channel|>";

/// Parses the arguments of calls that arrive as JSON text, as OpenAI's clients send them. Templates want an object, and
/// Gemma's refuse anything else. Empty text counts as no arguments.
pub fn parse_call_arguments(messages: &mut [Value]) -> Result<()> {
    for (m, message) in messages.iter_mut().enumerate() {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for (c, call) in calls.into_iter().flatten().enumerate() {
            let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
            if let Value::String(text) = arguments {
                *arguments = match text.trim() {
                    "" => json!({}),
                    text => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned())),
                };
            }
            if !arguments.is_object() && !arguments.is_null() {
                return Err(Error::Conversation {
                    field: format!("messages[{m}].tool_calls[{c}].function.arguments"),
                    problem: "expected a JSON object".to_owned(),
                });
            }
        }
    }
    Ok(())
}

/// Moves the tool messages that follow an assistant's calls into its `tool_responses`, the form of Google's documents. A
/// result that is the text of a JSON object becomes that object. Templates from Gemma 4's launch know no other form.
pub fn fold_tool_messages(messages: Vec<Value>) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        let caller = out.last_mut().filter(|last| message["role"] == "tool" && !names_by_id(last).is_empty());
        match caller {
            Some(caller) => {
                let response = json!({ "name": response_name(caller, &message), "response": response_value(&message["content"]) });
                match caller.get_mut("tool_responses").and_then(Value::as_array_mut) {
                    Some(responses) => responses.push(response),
                    None => caller["tool_responses"] = json!([response]),
                }
            }
            None => out.push(message),
        }
    }
    out
}

/// Ids and names of a message's calls.
fn names_by_id(message: &Value) -> Vec<(&Value, &Value)> {
    let calls = message["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
    calls.iter().map(|call| (&call["id"], &call["function"]["name"])).collect()
}

fn response_name(caller: &Value, message: &Value) -> Value {
    let by_id = names_by_id(caller).into_iter().rev().find(|(id, _)| **id == message["tool_call_id"]);
    let named = || message.get("name").filter(|name| name.as_str().is_some_and(|n| !n.is_empty()));
    by_id.map(|(_, name)| name).or_else(named).cloned().unwrap_or_else(|| "unknown".into())
}

fn response_value(content: &Value) -> Value {
    let text = match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        Value::Object(_) => return content.clone(),
        other => return json!({ "value": other }),
    };
    match serde_json::from_str(&text) {
        Ok(Value::Object(object)) => Value::Object(object),
        _ => json!({ "value": text }),
    }
}

/// Removes the thoughts written into a text, as Gemma 4's templates do with what an assistant said.
pub(crate) fn without_thoughts(text: &str) -> String {
    text.split(THOUGHT_CLOSE).map(|piece| piece.split(THOUGHT_OPEN).next().unwrap_or_default()).collect()
}

/// An answer that the conversation leaves unfinished.
#[derive(Debug)]
pub(crate) enum Continuation {
    /// There is none.
    None,
    /// The last message is the beginning of the answer.
    LastMessage,
    /// The answer has only begun to think; the message is taken off the conversation.
    Thought(String),
}

impl Continuation {
    /// Looks at the last message when the caller wants it continued.
    pub fn split_off(input: &mut ChatInput, is_gemma4: bool) -> Result<Self> {
        let index = input.messages.len().saturating_sub(1);
        let Some(last) =
            input.messages.last_mut().filter(|m| input.continue_final && m["role"] == "assistant")
        else {
            return Ok(Self::None);
        };
        let field = |name: &str| format!("messages[{index}].{name}");
        let filled = |key: &str| {
            last.get(key).is_some_and(|v| !matches!(v, Value::Null) && *v != json!("") && *v != json!([]))
        };
        if filled("tool_calls") {
            let problem =
                "an answer that already calls tools cannot be continued; add the results of the calls"
                    .to_owned();
            return Err(Error::Conversation { field: field("tool_calls"), problem });
        }
        let text = match &last["content"] {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            // Parts are kept; only text parts can be continued, and the last one is where it happens.
            Value::Array(parts) if parts.iter().all(|part| part["text"].is_string()) => {
                parts.iter().filter_map(|part| part["text"].as_str()).collect()
            }
            _ => {
                let problem = "only text can be continued; expected a string or text parts".to_owned();
                return Err(Error::Conversation { field: field("content"), problem });
            }
        };
        let text = text.trim_matches(is_space);
        if text.is_empty() && !filled("reasoning") && !filled("reasoning_content") {
            input.messages.pop();
            input.add_generation_prompt = true;
            return Ok(Self::None);
        }
        let Some(thought) = text.strip_prefix(THOUGHT_OPEN).filter(|_| is_gemma4) else {
            return Ok(Self::LastMessage);
        };
        let thought = thought.strip_prefix("thought\n").unwrap_or(thought);
        match thought.split_once(THOUGHT_CLOSE) {
            Some((thought, answer)) => {
                let (reasoning, answer) = (thought.trim_end_matches('\n').to_owned(), answer.to_owned());
                last["content"] = answer.into();
                if !reasoning.is_empty() {
                    last["reasoning"] = reasoning.into();
                }
                Ok(Self::LastMessage)
            }
            None if input.enable_thinking == Some(true) => {
                let thought = thought.to_owned();
                input.messages.pop();
                Ok(Self::Thought(thought))
            }
            None => {
                let problem = "the answer begins with an open thought, but thinking is off; close the thought or turn thinking on";
                Err(Error::Conversation { field: field("content"), problem: problem.to_owned() })
            }
        }
    }

    /// Renders the prompt up to where the answer goes on. `end` must occur nowhere in the conversation; `protect` is what
    /// was done to the texts of the messages.
    pub fn finish(
        self,
        template: &ChatTemplate,
        mut input: ChatInput,
        end: char,
        protect: &dyn Fn(&str) -> String,
    ) -> Result<String> {
        match self {
            Self::None => template.render_prepared(&input),
            Self::Thought(thought) => {
                input.add_generation_prompt = true;
                let mut text = template.render_prepared(&input)?;
                let opener = "<|channel>thought\n";
                if !text.ends_with(opener) {
                    text.push_str(opener);
                }
                Ok(text + &protect(&thought))
            }
            Self::LastMessage => {
                input.add_generation_prompt = false;
                if let Some(last) = input.messages.last_mut() {
                    mark_end(last, end);
                }
                let mut text = template.render_prepared(&input)?;
                let Some(at) = text.find(end) else {
                    let problem = "it does not print the last message, so the answer cannot be continued";
                    return Err(Error::Template(problem.to_owned()));
                };
                text.truncate(at);
                Ok(text)
            }
        }
    }
}

/// Puts a character behind the text of a message. Trailing space goes first, as the template would have removed it.
fn mark_end(message: &mut Value, end: char) {
    let marked = |text: &str| Value::String(format!("{}{end}", text.trim_end_matches(is_space)));
    let text = match &mut message["content"] {
        Value::Array(parts) if !parts.is_empty() => &mut parts.last_mut().expect("just checked")["text"],
        content => content,
    };
    *text = marked(text.as_str().unwrap_or_default());
}

/// A private-use character that occurs nowhere in the input nor among `taken`. There are 137,468 of them.
pub(crate) fn unused_char(input: &ChatInput, taken: &[char]) -> char {
    let mut seen: HashSet<char> = taken.iter().copied().collect();
    let mut note = |text: &str| seen.extend(text.chars().filter(|c| is_private_use(*c)));
    input
        .messages
        .iter()
        .chain(&input.tools)
        .chain(input.extra.values())
        .for_each(|value| each_string(value, &mut note));
    let candidates =
        ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}');
    // A conversation that uses up every one of them loses only the last, and only when it spells a marker.
    candidates.into_iter().find(|c| !seen.contains(c)).unwrap_or('\u{10fffd}')
}

fn is_private_use(c: char) -> bool {
    matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..='\u{ffffd}' | '\u{100000}'..='\u{10fffd}')
}

fn each_string(value: &Value, visit: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(items) => items.iter().for_each(|item| each_string(item, visit)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            visit(key);
            each_string(item, visit);
        }),
        _ => {}
    }
}

/// Applies `change` to every string of a value, keys included.
pub(crate) fn map_strings(value: &Value, change: &impl Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => change(text).into(),
        Value::Array(items) => items.iter().map(|item| map_strings(item, change)).collect(),
        Value::Object(map) => {
            let entries = map.iter().map(|(key, item)| (change(key), map_strings(item, change)));
            Value::Object(entries.collect::<Map<_, _>>())
        }
        other => other.clone(),
    }
}
