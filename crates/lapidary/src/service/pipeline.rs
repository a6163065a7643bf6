//! From tokens to events: parser, stop strings, alignment of logprobs, counts.
//!
//! One pipeline belongs to one reply. Its guide, when there is one, feeds it each token before the engine goes on, since
//! what the text says decides whether the reply ends; its sink takes the events out. Without a guide the sink does both.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use lapidary_engine::sampling::Sampled;
use lapidary_text::{Event, Finish, OutputParser, StopStrings, StreamDecoder, Tokenizer};

use super::align::Aligner;
use super::event::{ServiceEvent, TokenLogprob, TopLogprob};

/// What turns ids into parts of a reply.
#[derive(Debug)]
pub(super) enum Reader {
    /// A chat reply.
    Chat(Box<OutputParser<Arc<Tokenizer>>>),
    /// Text as it stands, without control tokens.
    Raw(StreamDecoder<Arc<Tokenizer>>),
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct Pipeline {
    tokenizer: Arc<Tokenizer>,
    reader: Reader,
    stops: StopStrings,
    /// Tokens that are passed over instead of ending the reply.
    ignored_ends: Vec<u32>,
    /// The part of a call's id that tells replies apart.
    call_key: String,
    logprobs: Option<Logprobs>,
    reasoning_tokens: usize,
    tokens: usize,
    delivered: usize,
    calls: usize,
    parts: Vec<Part>,
}

/// What is ready to be handed out. Tokens are named by their place in the reply, since the engine hands them over after
/// the guide has seen them.
#[derive(Debug)]
enum Part {
    Text(String, Vec<usize>),
    Thought(String, Vec<usize>),
    CallBegin { index: usize, name: String },
    CallArguments { index: usize, delta: String },
}

#[derive(Debug, Default)]
struct Logprobs {
    aligner: Aligner,
    /// Tokens of answer that stop strings hold back, with where they begin in the answer.
    held: VecDeque<(usize, usize)>,
    /// Bytes of answer that came from the parser, and those of them that were shown.
    seen: usize,
    shown: usize,
    sampled: HashMap<usize, Sampled>,
}

impl Pipeline {
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        reader: Reader,
        stops: Vec<String>,
        ignored_ends: Vec<u32>,
        call_key: String,
        logprobs: bool,
    ) -> Self {
        Pipeline {
            tokenizer,
            reader,
            stops: StopStrings::new(stops),
            ignored_ends,
            call_key,
            logprobs: logprobs.then(Logprobs::default),
            reasoning_tokens: 0,
            tokens: 0,
            delivered: 0,
            calls: 0,
            parts: Vec::new(),
        }
    }

    /// Takes the next token. Fails for an id without a piece.
    pub fn advance(&mut self, token: u32) -> lapidary_text::Result<()> {
        let index = self.tokens;
        self.tokens += 1;
        if self.ignored_ends.contains(&token) || self.is_over() {
            return Ok(());
        }
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.aligner.push(&self.tokenizer, index, token);
        }
        let thinking = self.in_thought();
        match &mut self.reader {
            Reader::Raw(decoder) => {
                let text = decoder.push(token)?;
                self.answer(&text);
            }
            Reader::Chat(parser) => {
                let events = parser.push(token)?;
                self.reasoning_tokens += usize::from(thinking && parser.in_thought());
                let settled =
                    self.tokenizer.is_special(token) && !parser.in_call() && parser.undecided().is_empty();
                self.take(events);
                self.look_ahead();
                // Behind a marker everything before it is known to be text, thought or call, unless it is held still.
                if let Some(logprobs) = self.logprobs.as_mut().filter(|_| settled) {
                    logprobs.aligner.pass();
                }
            }
        }
        Ok(())
    }

    /// A stop string may be complete in text that the parser cannot place yet. As the reply ends here, the text is answer.
    fn look_ahead(&mut self) {
        let Reader::Chat(parser) = &mut self.reader else { return };
        let held = parser.undecided();
        if held.is_empty() || self.stops.is_empty() || self.stops.stopped() {
            return;
        }
        let mut probe = self.stops.clone();
        probe.push(held);
        if probe.stopped() {
            let events = parser.complete();
            self.take(events);
        }
    }

    /// Whether the next token belongs to a thought.
    pub fn in_thought(&self) -> bool {
        matches!(&self.reader, Reader::Chat(parser) if parser.in_thought())
    }

    /// Whether the next token belongs to a call.
    pub fn in_call(&self) -> bool {
        matches!(&self.reader, Reader::Chat(parser) if parser.in_call())
    }

    /// Tokens inside thoughts so far.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// The stop string that ended the reply.
    pub fn matched(&self) -> Option<&str> {
        self.stops.matched()
    }

    /// Why the reply has ended by its own words, if it has.
    pub fn finished(&self) -> Option<Finish> {
        match &self.reader {
            Reader::Chat(parser) => parser.finished(),
            Reader::Raw(_) => None,
        }
    }

    /// Calls that did not parse.
    pub fn unparsed_calls(&self) -> usize {
        match &self.reader {
            Reader::Chat(parser) => parser.unparsed_calls(),
            Reader::Raw(_) => 0,
        }
    }

    fn is_over(&self) -> bool {
        self.stops.stopped() || self.finished().is_some()
    }

    /// The token that the engine hands over; it was taken before, or is taken now. Gives what has become ready.
    pub fn deliver(&mut self, sampled: Sampled) -> lapidary_text::Result<Vec<ServiceEvent>> {
        let index = self.delivered;
        self.delivered += 1;
        if self.tokens == index {
            self.advance(sampled.token)?;
        }
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.sampled.insert(index, sampled);
        }
        Ok(self.ready())
    }

    /// The model ended the reply with this token, which is not part of it.
    pub fn end_by(&mut self, token: u32) -> lapidary_text::Result<Vec<ServiceEvent>> {
        match &mut self.reader {
            Reader::Chat(parser) => {
                let mut events = parser.push(token)?;
                // A stop token of the request's own is no end to the parser unless it was told.
                events.extend(parser.complete());
                self.take(events);
            }
            Reader::Raw(decoder) => {
                let text = decoder.finish();
                self.answer(&text);
            }
        }
        Ok(self.rest())
    }

    /// The reply is complete as it stands.
    pub fn complete(&mut self) -> Vec<ServiceEvent> {
        match &mut self.reader {
            Reader::Chat(parser) => {
                let events = parser.complete();
                self.take(events);
            }
            Reader::Raw(decoder) => {
                let text = decoder.finish();
                self.answer(&text);
            }
        }
        self.rest()
    }

    /// A limit cut the reply.
    pub fn cut(&mut self) -> Vec<ServiceEvent> {
        match &mut self.reader {
            Reader::Chat(parser) => {
                let events = parser.finish();
                self.take(events);
            }
            Reader::Raw(decoder) => {
                let text = decoder.finish();
                self.answer(&text);
            }
        }
        self.rest()
    }

    /// What was held back only in case.
    fn rest(&mut self) -> Vec<ServiceEvent> {
        let text = self.stops.finish();
        self.show(text);
        self.ready()
    }

    fn take(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Content(text) => self.answer(&text),
                Event::Reasoning(text) => {
                    let tokens = match &mut self.logprobs {
                        Some(l) => l.aligner.take(&text).into_iter().map(|(_, index)| index).collect(),
                        None => Vec::new(),
                    };
                    self.parts.push(Part::Thought(text, tokens));
                }
                // What follows a stop string is not part of the reply.
                Event::CallBegin { .. } | Event::CallArguments { .. } if self.stops.stopped() => {}
                Event::CallBegin { index, name } => {
                    self.calls += 1;
                    self.parts.push(Part::CallBegin { index, name });
                }
                Event::CallArguments { index, delta } => {
                    self.parts.push(Part::CallArguments { index, delta });
                }
            }
        }
    }

    fn answer(&mut self, text: &str) {
        if text.is_empty() || self.stops.stopped() {
            return;
        }
        if let Some(l) = &mut self.logprobs {
            let seen = l.seen;
            l.held.extend(l.aligner.take(text).into_iter().map(|(at, index)| (seen + at, index)));
            l.seen += text.len();
        }
        let visible = self.stops.push(text);
        self.show(visible);
    }

    fn show(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        let mut tokens = Vec::new();
        if let Some(l) = &mut self.logprobs {
            l.shown += text.len();
            while l.held.front().is_some_and(|(at, _)| *at < l.shown) {
                tokens.extend(l.held.pop_front().map(|(_, index)| index));
            }
        }
        match self.parts.last_mut() {
            Some(Part::Text(last, known)) => {
                last.push_str(&text);
                known.extend(tokens);
            }
            _ => self.parts.push(Part::Text(text, tokens)),
        }
    }

    fn ready(&mut self) -> Vec<ServiceEvent> {
        let parts = std::mem::take(&mut self.parts);
        parts.into_iter().map(|part| self.event(part)).collect()
    }

    fn event(&mut self, part: Part) -> ServiceEvent {
        match part {
            Part::Text(delta, tokens) => ServiceEvent::Text { delta, tokens: self.reported(&tokens) },
            Part::Thought(delta, tokens) => ServiceEvent::Thought { delta, tokens: self.reported(&tokens) },
            Part::CallBegin { index, name } => {
                ServiceEvent::CallBegin { index, id: format!("call_{}{index:04x}", self.call_key), name }
            }
            Part::CallArguments { index, delta } => ServiceEvent::CallArguments { index, delta },
        }
    }

    fn reported(&mut self, tokens: &[usize]) -> Vec<TokenLogprob> {
        let Some(logprobs) = &mut self.logprobs else { return Vec::new() };
        let sampled: Vec<Sampled> = tokens.iter().filter_map(|i| logprobs.sampled.remove(i)).collect();
        for i in logprobs.aligner.passed.drain(..) {
            logprobs.sampled.remove(&i);
        }
        sampled.into_iter().filter_map(|s| token_logprob(&self.tokenizer, s)).collect()
    }
}

/// A sampled token in words; none when no logprob was asked for.
fn token_logprob(tokenizer: &Tokenizer, sampled: Sampled) -> Option<TokenLogprob> {
    let (text, bytes) = spelled(tokenizer, sampled.token);
    let top = top_logprobs(tokenizer, sampled.top);
    Some(TokenLogprob { token: sampled.token, text, bytes, logprob: sampled.logprob?, top })
}

/// The likeliest tokens in words.
pub(super) fn top_logprobs(tokenizer: &Tokenizer, top: Vec<(u32, f32)>) -> Vec<TopLogprob> {
    let each = top.into_iter().map(|(token, logprob)| {
        let (text, bytes) = spelled(tokenizer, token);
        TopLogprob { token, text, bytes, logprob }
    });
    each.collect()
}

/// Text and bytes of a token; both empty for a row of the embedding without a piece.
pub(super) fn spelled(tokenizer: &Tokenizer, token: u32) -> (String, Vec<u8>) {
    let mut bytes = Vec::new();
    let _ = tokenizer.append_bytes(token, &mut bytes);
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}
