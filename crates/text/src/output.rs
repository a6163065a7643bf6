//! Tells apart what a Gemma 4 model says: thoughts, answer, tool calls.
//!
//! The parser works on token ids, because there a marker is one token that text cannot contain by accident, and consumes
//! them one at a time, so that the result does not depend on how many arrive in one step. States and their borders:
//!
//! ```text
//! content --<|channel>--> label --"thought\n"--> thought --<channel|>--> content
//! content --<|tool_call>--> call --<tool_call|>--> content          any --end of turn--> done
//! ```
//!
//! A call is handed out when it is closed and parsed, its name first: what a client has been told about a call cannot be
//! taken back, and one that is cut off or garbled must come out as text instead. Where a grammar keeps calls to their
//! notation, none can be garbled, and a call is handed out while it is written; one that is cut then stays unfinished.

mod thought;

use std::ops::Deref;

use crate::error::Result;
use crate::stream::HeldBytes;
use crate::tokenizer::{SpecialIds, Tokenizer};
use crate::tools::{CallText, ToolCall, Tools, Written};
use thought::Thought;

/// A piece of the reply, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// More of the thoughts.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A call begins; its arguments follow.
    CallBegin {
        /// Which call of the reply, from 0.
        index: usize,
        /// The tool's name.
        name: String,
    },
    /// More of the arguments of a call, as JSON text.
    CallArguments {
        /// Which call of the reply.
        index: usize,
        /// The text to append.
        delta: String,
    },
}

/// Why a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    Stop,
    /// The model waits for the results of its calls.
    ToolCalls,
    /// Nothing ended it; a limit was reached.
    Length,
}

/// How to read a reply.
#[derive(Debug, Clone)]
pub struct OutputOptions {
    /// The declared tools; their schemas settle the types of arguments.
    pub tools: Tools,
    /// Whether the reply may hold several calls. Otherwise it is done after the first.
    pub parallel_calls: bool,
    /// Whether a grammar keeps calls to their notation and names no argument twice: then they are told while they are
    /// written.
    pub held_calls: bool,
    /// Ids that end the reply besides those that the vocabulary implies: what generation config and file metadata name.
    pub stop_ids: Vec<u32>,
}

impl Default for OutputOptions {
    fn default() -> Self {
        Self { tools: Tools::default(), parallel_calls: true, held_calls: false, stop_ids: Vec::new() }
    }
}

/// Reads one reply. `T` is a reference to the tokenizer or an `Arc` of it.
#[derive(Debug)]
pub struct OutputParser<T> {
    tokenizer: T,
    ids: SpecialIds,
    options: OutputOptions,
    state: State,
    bytes: HeldBytes,
    calls: usize,
    unparsed_calls: usize,
    finish: Option<Finish>,
    events: Vec<Event>,
}

#[derive(Debug)]
enum State {
    /// The very beginning of an answer, where two things may come spelled in ordinary tokens: a thought's opener, and a
    /// call without its marker. The text is kept until it is certain that it is neither.
    Opening(String),
    Content,
    Thought(Thought),
    Call {
        text: CallText,
        /// Whether a marker opened it.
        marked: bool,
        /// How much of its arguments was handed out, once its name was.
        told: Option<String>,
    },
}

impl<T: Deref<Target = Tokenizer>> OutputParser<T> {
    /// A parser for the reply to a prompt. A prompt may end inside a thought, and then the reply begins in it.
    pub fn new(tokenizer: T, prompt_ids: &[u32], options: OutputOptions) -> Self {
        let ids = *tokenizer.specials();
        let state = match open_thought(&tokenizer, prompt_ids) {
            Some(text) => State::Thought(Thought::resumed(&text)),
            None => State::Opening(String::new()),
        };
        Self {
            tokenizer,
            ids,
            options,
            state,
            bytes: HeldBytes::default(),
            calls: 0,
            unparsed_calls: 0,
            finish: None,
            events: Vec::new(),
        }
    }

    /// Takes the next id and returns what became certain. After the end of the reply ids are ignored; an id without a
    /// piece is an error and changes nothing.
    pub fn push(&mut self, id: u32) -> Result<Vec<Event>> {
        self.tokenizer.piece(id)?;
        if self.finish.is_none() {
            if self.ends_reply(id) {
                self.end(true);
            } else if self.tokenizer.is_special(id) {
                let text = self.bytes.take_all();
                self.text(&text);
                self.marker(id);
            } else {
                self.tokenizer.append_bytes(id, &mut self.bytes.bytes)?;
                let text = self.bytes.take_certain();
                self.text(&text);
            }
        }
        Ok(std::mem::take(&mut self.events))
    }

    /// Ends the reply from outside, by a limit or a stop string, and returns what was held back.
    pub fn finish(&mut self) -> Vec<Event> {
        if self.finish.is_none() {
            self.end(false);
        }
        std::mem::take(&mut self.events)
    }

    /// Ends the reply from outside as if the model had ended its turn here: a call that is whole but not closed counts.
    pub fn complete(&mut self) -> Vec<Event> {
        if self.finish.is_none() {
            self.end(true);
        }
        std::mem::take(&mut self.events)
    }

    /// Why the reply ended; none while it goes on. Once there is a reason, generation should stop.
    pub fn finished(&self) -> Option<Finish> {
        self.finish
    }

    /// Whether the next token belongs to a thought; for counting reasoning tokens and bounding them.
    pub fn in_thought(&self) -> bool {
        matches!(self.state, State::Thought(_))
    }

    /// Whether the next token belongs to a call.
    pub fn in_call(&self) -> bool {
        matches!(self.state, State::Call { .. })
    }

    /// Text that is held back because it may turn out to be the spelling of a thought or a call. It is answer if the
    /// reply ends here.
    pub fn undecided(&self) -> &str {
        match &self.state {
            State::Opening(held) => held,
            _ => "",
        }
    }

    /// How many calls did not parse and were handed out as text.
    pub fn unparsed_calls(&self) -> usize {
        self.unparsed_calls
    }

    fn ends_reply(&self, id: u32) -> bool {
        // An opener of another turn ends this one: what follows is not the answer.
        self.options.stop_ids.contains(&id)
            || self.ids.turn_open == Some(id)
            || self.ids.end_ids().any(|end| end == id)
    }

    fn end(&mut self, by_model: bool) {
        let text = self.bytes.take_all();
        self.text(&text);
        self.leave_state(by_model);
        self.state = State::Content;
        // The flag for a single call may have ended the reply already.
        self.finish.get_or_insert(match by_model {
            true if self.calls > 0 => Finish::ToolCalls,
            true => Finish::Stop,
            false => Finish::Length,
        });
    }

    /// Hands out what the state still holds.
    fn leave_state(&mut self, closed: bool) {
        match std::mem::replace(&mut self.state, State::Content) {
            State::Opening(held) => self.content(&held),
            State::Content => {}
            State::Thought(thought) => self.reasoning(thought.rest()),
            State::Call { text, marked, told: None } => self.call(&text, marked, closed),
            State::Call { text, told: Some(told), .. } => self.rest_of_call(&text, &told, closed),
        }
    }

    fn marker(&mut self, id: u32) {
        let id = Some(id);
        if let (State::Call { text, .. }, true) = (&mut self.state, id == self.ids.quote) {
            text.push_quote();
            self.tell_call();
        } else if id == self.ids.quote {
            // Outside of calls the quote token is a quote.
            self.text("\"");
        } else if id == self.ids.channel_open {
            // A second opener inside a thought opens nothing.
            if !self.in_thought() {
                self.leave_state(true);
                self.state = State::Thought(Thought::labelled());
            }
        } else if id == self.ids.channel_close {
            // A stray one in an answer, which the large models leave there at times, closes nothing.
            if self.in_thought() {
                self.leave_state(true);
                self.state = State::Opening(String::new());
            }
        } else if id == self.ids.tool_call_open {
            // Inside a thought it ends the thought: models do this in long prompts with tools.
            self.leave_state(true);
            self.state = State::Call { text: CallText::default(), marked: true, told: None };
        } else if id == self.ids.tool_call_close && matches!(self.state, State::Call { .. }) {
            self.leave_state(true);
        }
        // Other control tokens mean nothing here and are not for showing.
    }

    fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match &mut self.state {
            State::Opening(held) => {
                held.push_str(text);
                let held = std::mem::take(held);
                self.opening(held);
            }
            State::Content => self.content(text),
            State::Call { text: call, .. } => {
                call.push_str(text);
                self.tell_call();
            }
            State::Thought(thought) => {
                let (reasoning, answer) = thought.push(text);
                if let Some(answer) = answer {
                    self.state = State::Opening(String::new());
                    self.reasoning(&reasoning);
                    self.text(&answer);
                } else {
                    self.reasoning(&reasoning);
                }
            }
        }
    }

    /// Decides what an answer begins with, as far as that is certain.
    fn opening(&mut self, held: String) {
        let calls: Vec<String> = self.options.tools.names().map(|name| format!("call:{name}{{")).collect();
        let opener = thought::OPENER;
        let spelled_thought = self.ids.channel_open.is_some() && held.starts_with(opener);
        if spelled_thought {
            let mut thought = Thought::spelled();
            let (reasoning, answer) = thought.push(&held[opener.len()..]);
            self.state = State::Thought(thought);
            self.reasoning(&reasoning);
            if let Some(answer) = answer {
                self.state = State::Opening(String::new());
                self.text(&answer);
            }
        } else if calls.iter().any(|call| held.starts_with(call.as_str())) {
            let mut text = CallText::default();
            text.push_str(&held);
            self.state = State::Call { text, marked: false, told: None };
        } else if opener.starts_with(&held) || calls.iter().any(|call| call.starts_with(&held)) {
            self.state = State::Opening(held);
        } else {
            self.state = State::Content;
            self.content(&held);
        }
    }

    /// Hands out what has become certain of a call that a grammar holds.
    fn tell_call(&mut self) {
        let State::Call { text, marked: true, told } = &mut self.state else { return };
        if !self.options.held_calls {
            return;
        }
        let Some(Written { name, arguments }) = text.written(&self.options.tools) else { return };
        let known = match told {
            Some(told) => told,
            None => {
                self.events.push(Event::CallBegin { index: self.calls, name });
                self.calls += 1;
                told.insert(String::new())
            }
        };
        if let Some(delta) = arguments.strip_prefix(known.as_str()).filter(|delta| !delta.is_empty()) {
            let (index, delta) = (self.calls - 1, delta.to_owned());
            *known = arguments;
            self.events.push(Event::CallArguments { index, delta });
        }
    }

    /// Hands out the rest of a call whose beginning was told. One that was cut stays as it is.
    fn rest_of_call(&mut self, text: &CallText, told: &str, closed: bool) {
        let whole = text.parse(&self.options.tools).ok().filter(|_| closed);
        match whole.as_ref().and_then(|call| call.arguments.strip_prefix(told)) {
            Some(rest) => {
                if !rest.is_empty() {
                    let (index, delta) = (self.calls - 1, rest.to_owned());
                    self.events.push(Event::CallArguments { index, delta });
                }
                if !self.options.parallel_calls {
                    self.finish = Some(Finish::ToolCalls);
                }
            }
            None => self.unparsed_calls += 1,
        }
    }

    /// Hands out a call, or its text when it does not parse or was not closed.
    fn call(&mut self, text: &CallText, marked: bool, closed: bool) {
        match text.parse(&self.options.tools) {
            Ok(ToolCall { name, arguments }) if closed => {
                let index = self.calls;
                self.calls += 1;
                self.events.push(Event::CallBegin { index, name });
                self.events.push(Event::CallArguments { index, delta: arguments });
                if !self.options.parallel_calls {
                    self.finish = Some(Finish::ToolCalls);
                }
            }
            _ => {
                self.unparsed_calls += usize::from(marked);
                self.content(&text.spelled());
            }
        }
    }

    fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(Event::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(Event::Reasoning(text.to_owned())),
        }
    }

    fn content(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(Event::Content(last)) => last.push_str(text),
            _ => self.events.push(Event::Content(text.to_owned())),
        }
    }
}

/// The text of the thought that a prompt leaves open.
fn open_thought(tokenizer: &Tokenizer, prompt_ids: &[u32]) -> Option<String> {
    if !crate::guard::ends_in_thought(tokenizer, prompt_ids) {
        return None;
    }
    let opener = prompt_ids.iter().rposition(|&id| Some(id) == tokenizer.specials().channel_open)?;
    tokenizer.decode(&prompt_ids[opener + 1..]).ok()
}

/// A whole reply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply {
    /// The thoughts.
    pub reasoning: String,
    /// The answer.
    pub content: String,
    /// The calls, in order.
    pub calls: Vec<ToolCall>,
}

impl Reply {
    /// Adds events to what came before.
    pub fn extend(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            match event {
                Event::Reasoning(text) => self.reasoning += &text,
                Event::Content(text) => self.content += &text,
                Event::CallBegin { name, .. } => self.calls.push(ToolCall { name, arguments: String::new() }),
                Event::CallArguments { index, delta } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.arguments += &delta;
                    }
                }
            }
        }
    }
}
