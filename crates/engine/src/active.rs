//! A request under way, as far as choosing and handing over its tokens goes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use lapidary_model::Config;
use lapidary_ops::Draw;

use crate::error::Result;
use crate::guide::{Allowed, Guide, StopCause, Verdict};
use crate::look::{Steered, Watch};
use crate::prompt::{Prompt, check_token};
use crate::request::{
    EngineEvent, EngineRequest, EngineUsage, FailureKind, PromptScores, Score, ScoreEvent, ScoreRequest,
    ScoreSink, Sink,
};
use crate::sampling::{Limits, Sampled, Sampler, SamplingError, SamplingParams, TokenCounts, TokenMask};

/// A request that has not ended.
pub(crate) struct Active {
    sink: Out,
    /// Tokens whose probabilities are wanted, with what comes before them.
    scored: Vec<u32>,
    /// What the batch that was just run said of them.
    pub scores: Vec<Score>,
    guide: Option<Box<dyn Guide>>,
    sampler: Sampler,
    /// Reports the prompt's tokens.
    scorer: Option<Sampler>,
    /// Edits of its rows, and where the device holds them.
    pub steered: Option<Steered>,
    pub steer_place: Option<usize>,
    pub watch: Option<Watch>,
    counts: TokenCounts,
    stop_ids: Vec<u32>,
    min_tokens: usize,
    /// Tokens that can be fed back.
    vocab: usize,
    allowed: Next,
    /// The mask that the guide gave, when `allowed` says so.
    mask: TokenMask,
    pub usage: EngineUsage,
    pub submitted: Instant,
    pub deadline: Option<Instant>,
    pub started: bool,
    /// Rows of the prompt that the sink knows of.
    pub fed: usize,
    pub last_token: Option<Instant>,
    /// What the batch that was just run gave, until the scheduler has said what it means.
    pub chosen: Option<Chosen>,
}

/// Where events go.
enum Out {
    Answer(Box<dyn Sink>),
    Scores(Box<dyn ScoreSink>),
}

/// A token, and whether the guide ends the answer with it.
pub(crate) struct Chosen {
    pub sampled: Sampled,
    pub stop: Option<StopCause>,
}

/// What the guide said of the next token.
#[derive(Clone, Copy, PartialEq)]
enum Next {
    Free,
    Masked,
    Force(u32),
}

/// What a head row must be read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Nothing: the token is certain.
    Nothing,
    /// Its logits.
    Logits,
}

/// What a token is chosen from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ChooseFrom<'a> {
    /// What the device chose.
    Device(u32),
    /// Logits, and the token with the largest of them where that is known.
    Logits { logits: &'a [f32], best: Option<u32> },
}

impl Active {
    /// Checks what the scheduler does not look at.
    pub fn new(
        config: &Config,
        prompt: &Prompt,
        request: EngineRequest,
        submitted: Instant,
    ) -> Result<Active> {
        let EngineRequest { mut sampling, min_tokens, mut stop_ids, guide, sink, .. } = request;
        let count = |n: usize| Some(u32::try_from(n).unwrap_or(u32::MAX));
        if let Some(n) = request.logprobs {
            sampling.logprobs = count(n);
        }
        let scorer = match request.prompt_scores {
            Some(scores) => Some(Sampler::new(
                SamplingParams { logprobs: count(scores.top), ..SamplingParams::greedy() },
                config.vocab,
            )?),
            None => None,
        };
        for &token in &stop_ids {
            if token as usize >= config.vocab {
                let out = SamplingError::TokenOutOfRange { name: "stop_ids", token, vocab: config.vocab };
                return Err(out.into());
            }
        }
        if !request.ignore_eos {
            stop_ids.extend(&config.eos);
        }
        let sampler = Sampler::new(sampling, config.vocab)?;
        let mut counts = TokenCounts::new();
        if sampler.params().penalises() {
            prompt.tokens.iter().try_for_each(|&t| check_token(config, t))?;
            counts.record_prompt(&prompt.tokens);
        }
        Ok(Active {
            sink: Out::Answer(sink),
            scored: if scorer.is_some() { prompt.tokens.clone() } else { Vec::new() },
            scores: Vec::new(),
            guide,
            sampler,
            scorer,
            steered: request.steering.and_then(Steered::new),
            steer_place: None,
            watch: request.observer.map(Watch::new),
            counts,
            stop_ids,
            min_tokens,
            vocab: config.per_layer.map_or(config.vocab, |p| p.vocab.min(config.vocab)),
            allowed: Next::Free,
            mask: TokenMask::default(),
            usage: EngineUsage { prompt_tokens: prompt.tokens.len(), ..EngineUsage::default() },
            submitted,
            deadline: request.timeout.and_then(|t| submitted.checked_add(t)),
            started: false,
            fed: 0,
            last_token: None,
            chosen: None,
        })
    }

    /// A request for scores alone.
    pub fn scoring(config: &Config, request: ScoreRequest, submitted: Instant) -> Result<Active> {
        let ScoreRequest { prompt, from, top, steering, timeout, sink, .. } = request;
        let unheard: Box<dyn Sink> = Box::new(|_| true);
        let prompt_scores = Some(PromptScores { from, top });
        let answer = EngineRequest {
            prompt_scores,
            steering,
            timeout,
            ..EngineRequest::new(Prompt::default(), unheard)
        };
        let active = Active::new(config, &prompt, answer, submitted)?;
        Ok(Active { sink: Out::Scores(sink), ..active })
    }

    /// Says how likely the prompt's token at `position` is, given the logits of the row before it.
    pub fn score(&mut self, logits: &[f32], position: usize) -> Result<(), FailureKind> {
        let token = self.scored[position];
        let scorer = self.scorer.as_ref().expect("scores were asked for");
        let report = scorer.report(logits, position as u64, token);
        let report = report.map_err(|_| FailureKind::NonFinite { position: position - 1 })?;
        let logprob = report.logprob.expect("scoring asks for it");
        self.scores.push(Score { position, token, logprob, top: report.top });
        Ok(())
    }

    /// Whose kept beginnings it may go on from.
    pub fn family(&self) -> [u8; 32] {
        self.steered.as_ref().map_or([0; 32], |steered| steered.digest)
    }

    /// Tokens that end the answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Asks the guide what the next token may be; its answer is kept until [`Active::choose`].
    pub fn ask_guide(&mut self) -> Result<(), FailureKind> {
        let Some(guide) = &mut self.guide else { return Ok(()) };
        let mask = &mut self.mask;
        let next = guarded(|| match guide.next() {
            Ok(Allowed::Free) => Ok(Next::Free),
            Ok(Allowed::Force(token)) => Ok(Next::Force(token)),
            Ok(Allowed::Mask(given)) => {
                mask.clone_from(given);
                Ok(Next::Masked)
            }
            Err(error) => Err(FailureKind::Guide(error.0)),
        })?;
        self.allowed = next?;
        Ok(())
    }

    /// How the device may draw the token for `position`, `None` where that takes more than it can.
    pub fn draw(&self, position: usize) -> Option<Draw> {
        let params = self.sampler.params();
        if params.is_plain_greedy() { None } else { params.draw(position as u64) }
    }

    /// What [`Active::choose`] will want to see of a row whose token the device has drawn, or not.
    pub fn reads(&self, drawn: bool) -> Reads {
        let params = self.sampler.params();
        let certain = match self.allowed {
            Next::Force(_) => params.logprobs.is_none(),
            Next::Masked => false,
            Next::Free => (drawn || params.is_plain_greedy()) && !self.too_early(),
        };
        if certain { Reads::Nothing } else { Reads::Logits }
    }

    /// Whether the device, which `draws` or does not, can go on from the token that it chooses while nobody looks: no
    /// guide has a say in it, and rows are neither edited nor copied out.
    pub fn goes_on_alone(&self, draws: bool) -> bool {
        self.allowed == Next::Free
            && self.reads(draws && self.draw(0).is_some()) == Reads::Nothing
            && self.steered.is_none()
            && self.watch.is_none()
    }

    /// Chooses the token for `position` and tells the guide, from what [`Active::reads`] asked for.
    pub fn choose(&mut self, from: ChooseFrom<'_>, position: usize) -> Result<Chosen, FailureKind> {
        guarded(|| {
            let sampled = self.sample(from, position)?;
            let ends = self.stop_ids.contains(&sampled.token);
            let mut stop = None;
            if let Some(guide) = self.guide.as_mut().filter(|_| !ends) {
                match guide.accept(sampled.token).map_err(|e| FailureKind::Guide(e.0))? {
                    Verdict::Continue => {}
                    Verdict::Stop(cause) => stop = Some(cause),
                }
            }
            if !ends {
                self.counts_token(sampled.token);
            }
            Ok(Chosen { sampled, stop })
        })?
    }

    fn sample(&mut self, from: ChooseFrom<'_>, position: usize) -> Result<Sampled, FailureKind> {
        let failed = |error: SamplingError| match error {
            SamplingError::NonFiniteLogit { .. } => FailureKind::NonFinite { position: position - 1 },
            other => FailureKind::Guide(other.to_string()),
        };
        let at = position as u64;
        if let Next::Force(token) = self.allowed
            && token as usize >= self.vocab
        {
            let vocab = self.vocab;
            return Err(FailureKind::Guide(format!("token {token} was forced, the vocabulary has {vocab}")));
        }
        let (logits, best) = match from {
            ChooseFrom::Device(chosen) => {
                let token = if let Next::Force(token) = self.allowed { token } else { chosen };
                return Ok(Sampled { token, logprob: None, top: Vec::new() });
            }
            ChooseFrom::Logits { logits, best } => (logits, best),
        };
        if let Next::Force(token) = self.allowed {
            return self.sampler.report(logits, at, token).map_err(failed);
        }
        let mask = (self.allowed == Next::Masked).then_some(&self.mask);
        let without: &[u32] = if self.too_early() { &self.stop_ids } else { &[] };
        let chosen = self.sampler.sample_limited(logits, best, at, &self.counts, Limits { mask, without });
        match chosen {
            // A grammar that is complete allows nothing but the end.
            Err(SamplingError::NothingLeft { .. }) if !without.is_empty() && mask.is_some() => {
                let limits = Limits { mask, without: &[] };
                self.sampler.sample_limited(logits, best, at, &self.counts, limits).map_err(failed)
            }
            other => other.map_err(failed),
        }
    }

    fn counts_token(&mut self, token: u32) {
        self.usage.answer_tokens += 1;
        if self.sampler.params().penalises() {
            self.counts.record(token);
        }
    }

    /// Whether the answer may not end yet.
    fn too_early(&self) -> bool {
        self.usage.answer_tokens < self.min_tokens && !self.stop_ids.is_empty()
    }

    /// Hands an event over; whether anybody listens, or what the sink panicked with.
    pub fn tell(&mut self, event: EngineEvent) -> Result<bool, FailureKind> {
        guarded(|| match (&mut self.sink, event) {
            (Out::Answer(sink), event) => sink.event(event),
            (Out::Scores(sink), EngineEvent::Finished { reason, usage }) => {
                sink.event(ScoreEvent::Finished { reason, usage })
            }
            // The scores themselves say how far it is.
            (Out::Scores(_), _) => true,
        })
    }

    /// Hands over the scores of the batch that was just run.
    pub fn tell_scores(&mut self) -> Result<bool, FailureKind> {
        let scores = std::mem::take(&mut self.scores);
        if scores.is_empty() {
            return Ok(true);
        }
        guarded(|| match &mut self.sink {
            Out::Scores(sink) => sink.event(ScoreEvent::Scores(scores)),
            Out::Answer(sink) => sink.event(EngineEvent::PromptScores(scores)),
        })
    }

    /// Notes that a token was handed over at `now`; how long after submission, or after the token before.
    pub fn token_at(&mut self, now: Instant) -> TokenTime {
        let since_submission = now.saturating_duration_since(self.submitted);
        match self.last_token.replace(now) {
            Some(before) => TokenTime::After(now.saturating_duration_since(before)),
            None => {
                self.usage.first_token = Some(since_submission);
                TokenTime::First(since_submission)
            }
        }
    }
}

/// How long a token took.
pub(crate) enum TokenTime {
    First(Duration),
    After(Duration),
}

/// Runs what belongs to one request and turns a panic into its failure.
///
/// Nothing of the engine's own is changed half-way: what unwinds is the request's, and it ends.
pub(crate) fn guarded<T>(run: impl FnOnce() -> T) -> Result<T, FailureKind> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| FailureKind::Panicked(message(&*panic)))
}

/// What a panic said.
pub(crate) fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
