//! One request on a stepper's single sequence, a token at a time.
//!
//! [`Request`], [`Event`] and [`FinishReason`] are the types of the engine at large: a scheduler of many
//! requests speaks them too.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::prompt::Prompt;
use crate::sampling::{Sampled, Sampler, SamplingParams, TokenCounts};
use crate::stepper::{Chunk, Heads, Stepper};

/// What a caller asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// What comes before the answer, fed from the sequence's cursor on.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens of the answer; the context's end limits it too.
    pub max_tokens: usize,
    /// Tokens that end the answer and are not part of it.
    pub stop_ids: Vec<u32>,
}

/// What happens while a request runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A token of the answer.
    Token(Sampled),
    /// The end, exactly once.
    Finished(FinishReason),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose this stop token.
    Stop(u32),
    /// `max_tokens` were given.
    Length,
    /// The context is full.
    ContextFull,
}

/// Counts and times of a request so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer, a stop token not included.
    pub answer_tokens: usize,
    /// Time to run the prompt, its first sampled token included.
    pub prompt_time: Duration,
    /// Time of all later steps.
    pub decode_time: Duration,
    /// Decode steps that were timed.
    pub decode_steps: usize,
}

/// A request that is being answered.
#[derive(Debug)]
pub struct Generation<'a> {
    stepper: &'a mut Stepper,
    sampler: Sampler,
    counts: TokenCounts,
    request: Request,
    usage: Usage,
    logits: Vec<f32>,
    /// Chosen, and not yet fed back.
    pending: Option<u32>,
    started: bool,
    finished: bool,
}

impl<'a> Generation<'a> {
    /// Checks a request; nothing runs before the first [`Generation::step`].
    ///
    /// # Errors
    /// `Sampling` with the parameter that is out of range.
    pub fn new(stepper: &'a mut Stepper, request: Request) -> Result<Generation<'a>> {
        let vocab = stepper.model().config.vocab;
        let sampler = Sampler::new(request.sampling.clone(), vocab)?;
        let mut counts = TokenCounts::new();
        counts.record_prompt(&request.prompt.tokens);
        let usage = Usage { prompt_tokens: request.prompt.tokens.len(), ..Usage::default() };
        Ok(Generation {
            stepper,
            sampler,
            counts,
            request,
            usage,
            logits: vec![0.0; vocab],
            pending: None,
            started: false,
            finished: false,
        })
    }

    /// The next event; `None` after the end. `progress` is told the prompt's fed tokens after each batch.
    ///
    /// # Errors
    /// What a step can fail with. The request is over then.
    pub fn step(&mut self, progress: &mut dyn FnMut(usize)) -> Result<Option<Event>> {
        self.step_watched(progress, &mut |_| {})
    }

    /// [`Generation::step`], with each batch that runs handed to `watch`: what a capture is read from.
    ///
    /// # Errors
    /// As [`Generation::step`].
    pub fn step_watched(
        &mut self,
        progress: &mut dyn FnMut(usize),
        watch: &mut dyn FnMut(Chunk<'_>),
    ) -> Result<Option<Event>> {
        if self.finished {
            return Ok(None);
        }
        match self.advance(progress, watch) {
            Ok(event) => {
                self.finished = matches!(event, Event::Finished(_));
                Ok(Some(event))
            }
            Err(error) => {
                self.finished = true;
                Err(error)
            }
        }
    }

    /// The stepper that it runs on, for what the last batch left there.
    pub fn stepper(&self) -> &Stepper {
        self.stepper
    }

    /// The same, to choose what the next batch captures. Whoever steps it takes the request's place.
    pub fn stepper_mut(&mut self) -> &mut Stepper {
        self.stepper
    }

    /// The positions that the next [`step`](Generation::step) runs.
    pub fn upcoming(&self) -> Range<usize> {
        let (first, rows) = (self.stepper.cursor(), self.request.prompt.tokens.len());
        if self.started { first..first + 1 } else { first..first + rows }
    }

    /// Counts and times so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    fn advance(
        &mut self,
        progress: &mut dyn FnMut(usize),
        watch: &mut dyn FnMut(Chunk<'_>),
    ) -> Result<Event> {
        if self.usage.answer_tokens >= self.request.max_tokens {
            // The last token's keys and values are written, so that a later turn can go on from here.
            self.flush(watch)?;
            return Ok(Event::Finished(FinishReason::Length));
        }
        let start = Instant::now();
        let prompt_step = !self.started;
        let argmax = match self.pending {
            None => {
                self.started = true;
                let mut fed = 0;
                let mut token = 0;
                self.stepper.prefill_each(&self.request.prompt, Heads::Last, &mut |chunk| {
                    fed += chunk.positions.len();
                    progress(fed);
                    token = chunk.outcome.argmax.last().copied().unwrap_or(0);
                    watch(chunk);
                })?;
                token as u32
            }
            Some(token) => {
                let position = self.stepper.cursor();
                if position >= self.stepper.context() {
                    return Ok(Event::Finished(FinishReason::ContextFull));
                }
                self.pending = None;
                let next = self.stepper.decode_step(token, position)?;
                watch(self.stepper.last_step(true));
                next
            }
        };
        let sampled = self.sample(argmax)?;
        match prompt_step {
            true => self.usage.prompt_time = start.elapsed(),
            false => {
                self.usage.decode_time += start.elapsed();
                self.usage.decode_steps += 1;
            }
        }
        if self.request.stop_ids.contains(&sampled.token) {
            return Ok(Event::Finished(FinishReason::Stop(sampled.token)));
        }
        self.counts.record(sampled.token);
        self.pending = Some(sampled.token);
        self.usage.answer_tokens += 1;
        Ok(Event::Token(sampled))
    }

    fn sample(&mut self, argmax: u32) -> Result<Sampled> {
        if self.sampler.params().is_plain_greedy() {
            return Ok(Sampled { token: argmax, logprob: None, top: Vec::new() });
        }
        self.stepper.logits_into(&mut self.logits)?;
        Ok(self.sampler.sample(&self.logits, self.stepper.cursor() as u64, &self.counts)?)
    }

    fn flush(&mut self, watch: &mut dyn FnMut(Chunk<'_>)) -> Result<()> {
        if let Some(token) = self.pending.take() {
            let position = self.stepper.cursor();
            if position < self.stepper.context() {
                self.stepper.prefill_step(token, position)?;
                watch(self.stepper.last_step(false));
            }
        }
        Ok(())
    }
}
