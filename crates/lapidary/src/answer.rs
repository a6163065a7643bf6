//! An answer as it comes: text, thoughts and tool calls, told apart token by token.

use std::collections::VecDeque;

use lapidary_engine::generate::{Event, FinishReason, Generation, Usage};
use lapidary_ops::Projections;
use lapidary_text::{Event as Part, OutputParser, StreamDecoder, Tokenizer, ToolCall};

use crate::capture::Recording;
use crate::error::Result;
use crate::trace::{TokenTrace, Tracing};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Text for the user.
    Text(String),
    /// A thought.
    Thought(String),
    /// A whole tool call.
    ToolCall(ToolCall),
    /// The end, exactly once.
    Finished(FinishReason),
}

/// What turns ids into pieces.
#[derive(Debug)]
pub(crate) enum Reader<'a> {
    /// Text as it stands, without control tokens.
    Raw(StreamDecoder<&'a Tokenizer>),
    /// A chat reply.
    Reply(Box<OutputParser<&'a Tokenizer>>),
}

/// An answer in progress; iterate over its pieces. Dropping it stops it.
#[derive(Debug)]
pub struct Answer<'a> {
    pub(crate) generation: Generation<'a>,
    pub(crate) reader: Reader<'a>,
    /// What the sequence has been given, kept for the next prompt.
    pub(crate) fed: &'a mut Vec<u32>,
    pub(crate) prompt_tokens: usize,
    pub(crate) reused: usize,
    pub(crate) ids: Vec<u32>,
    pub(crate) call: Option<ToolCall>,
    pub(crate) recording: Option<Recording>,
    pub(crate) tracing: Option<Tracing>,
    pub(crate) ready: VecDeque<Piece>,
    pub(crate) done: bool,
}

impl Answer<'_> {
    /// The next piece; `progress` is told the prompt's fed tokens after each batch.
    ///
    /// # Errors
    /// What a step can fail with; the answer is over then.
    pub fn next_piece(&mut self, progress: &mut dyn FnMut(usize)) -> Result<Option<Piece>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            if self.done {
                return Ok(None);
            }
            if let Err(error) = self.advance(progress) {
                self.done = true;
                // How far the sequence came is unknown to the next prompt, which therefore starts afresh.
                self.fed.clear();
                return Err(error);
            }
        }
    }

    /// Ids of the answer so far, markers included.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Counts and times; of the prompt, the tokens that were run and not those that were reused.
    pub fn usage(&self) -> Usage {
        self.generation.usage()
    }

    /// What the rows of the last step projected onto the directions of
    /// [`AnswerOptions::steering`](crate::AnswerOptions::steering) before each edit; the plan's
    /// [`edits`](crate::steering::SteerPlan::edits) say which is which.
    pub fn projections(&self) -> &Projections {
        self.generation.stepper().projections()
    }

    /// What [`AnswerOptions::capture`](crate::AnswerOptions::capture) asked for, as far as it has run.
    pub fn recording(&self) -> Option<&Recording> {
        self.recording.as_ref()
    }

    /// What [`AnswerOptions::trace`](crate::AnswerOptions::trace) asked for, a token after the other.
    pub fn traces(&self) -> &[TokenTrace] {
        self.tracing.as_ref().map_or(&[], |t| &t.tokens)
    }

    /// Tokens of the whole prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens of the prompt that the sequence held already.
    pub fn reused_tokens(&self) -> usize {
        self.reused
    }

    fn advance(&mut self, progress: &mut dyn FnMut(usize)) -> Result<()> {
        let upcoming = self.generation.upcoming();
        let mut points = self.recording.as_ref().map_or(&[][..], |r| r.points(upcoming)).to_vec();
        if let Some(tracing) = &self.tracing {
            let stepper = self.generation.stepper();
            points.extend(
                tracing
                    .points(stepper.model())
                    .into_iter()
                    .filter(|p| !points.contains(p))
                    .collect::<Vec<_>>(),
            );
        }
        self.generation.stepper_mut().set_capture(&points);
        let recording = &mut self.recording;
        let event = self.generation.step_watched(progress, &mut |chunk| {
            if let Some(recording) = recording {
                recording.take(chunk.batch, 0..chunk.positions.len(), chunk.positions, chunk.outcome);
            }
        })?;
        match event {
            Some(Event::Token(sampled)) => {
                if let Some(tracing) = &mut self.tracing {
                    tracing.note(self.generation.stepper_mut(), sampled.token)?;
                }
                self.ids.push(sampled.token);
                self.fed.push(sampled.token);
                match &mut self.reader {
                    Reader::Raw(decoder) => {
                        let text = decoder.push(sampled.token)?;
                        self.text(text);
                    }
                    Reader::Reply(parser) => {
                        let parts = parser.push(sampled.token)?;
                        parts.into_iter().for_each(|part| self.part(part));
                    }
                }
            }
            Some(Event::Finished(reason)) => {
                match &mut self.reader {
                    Reader::Raw(decoder) => {
                        let text = decoder.finish();
                        self.text(text);
                    }
                    Reader::Reply(parser) => {
                        let parts = parser.finish();
                        parts.into_iter().for_each(|part| self.part(part));
                    }
                }
                self.end_call();
                self.ready.push_back(Piece::Finished(reason));
                self.done = true;
            }
            None => self.done = true,
        }
        Ok(())
    }

    fn text(&mut self, text: String) {
        if !text.is_empty() {
            self.ready.push_back(Piece::Text(text));
        }
    }

    fn part(&mut self, part: Part) {
        if let Part::CallArguments { delta, .. } = &part {
            if let Some(call) = &mut self.call {
                call.arguments += delta;
            }
            return;
        }
        self.end_call();
        match part {
            Part::Reasoning(text) => self.ready.push_back(Piece::Thought(text)),
            Part::Content(text) => self.ready.push_back(Piece::Text(text)),
            Part::CallBegin { name, .. } => self.call = Some(ToolCall { name, arguments: String::new() }),
            Part::CallArguments { .. } => {}
        }
    }

    fn end_call(&mut self) {
        self.ready.extend(self.call.take().map(Piece::ToolCall));
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece(&mut |_| {}).transpose()
    }
}
