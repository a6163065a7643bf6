//! What steers one reply: a budget for thoughts, a grammar for what follows, and the ends that only its text shows.
//!
//! A thought is free but for its budget. When the budget is used up, the closing marker is forced and no thought may
//! open again, so that an answer follows. A grammar begins where the answer begins, behind the thought if there is one;
//! until then nothing may end the reply, which would leave the grammar unfulfilled.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lapidary_engine::sampling::TokenMask;
use lapidary_engine::{Allowed, Guide, GuideError, StopCause, Verdict};
use lapidary_text::{Matcher, SpecialIds};

use super::pipeline::Pipeline;

/// Why a guide ended a reply, as the engine hands it back.
pub(super) mod code {
    /// A stop string was found.
    pub const STOP_STRING: u32 = 1;
    /// The one call that was allowed is there.
    pub const ONE_CALL: u32 = 2;
    /// The grammar is fulfilled.
    pub const GRAMMAR: u32 = 3;
}

/// What a grammar is for.
#[derive(Debug)]
pub(super) struct AnswerGrammar {
    pub matcher: Matcher,
    /// Whether a thought may open before the answer.
    pub thought_first: bool,
    /// Whether the reply may call tools in place of the answer.
    pub or_calls: bool,
    /// Whether the answer is calls, after which the model asks for their results in place of ending its turn.
    pub is_calls: bool,
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct ReplyGuide {
    pipeline: Arc<Mutex<Pipeline>>,
    specials: SpecialIds,
    /// Most tokens of thought.
    budget: Option<usize>,
    answer: Option<AnswerGrammar>,
    /// Whether the answer's grammar has taken a token.
    begun: bool,
    /// A fresh matcher of one call, for tools that ask for their schema to be kept to.
    calls: Option<Matcher>,
    /// The matcher of the call that is open.
    call: Option<Matcher>,
    /// Tokens that end the reply.
    ends: Vec<u32>,
    vocab: usize,
    mask: TokenMask,
}

impl ReplyGuide {
    pub fn new(
        pipeline: Arc<Mutex<Pipeline>>,
        specials: SpecialIds,
        budget: Option<usize>,
        answer: Option<AnswerGrammar>,
        calls: Option<Matcher>,
        ends: Vec<u32>,
        vocab: usize,
    ) -> Self {
        ReplyGuide {
            pipeline,
            specials,
            budget,
            answer,
            begun: false,
            calls,
            call: None,
            ends,
            vocab,
            mask: TokenMask::none(vocab),
        }
    }

    fn all_but(&mut self, excluded: impl Iterator<Item = u32>) {
        let words = self.mask.words_mut();
        words.clear();
        words.resize(self.vocab.div_ceil(32), u32::MAX);
        for token in excluded {
            if let Some(word) = words.get_mut(token as usize / 32) {
                *word &= !(1 << (token % 32));
            }
        }
    }

    fn only(&mut self, allowed: impl Iterator<Item = u32>) {
        let words = self.mask.words_mut();
        words.clear();
        words.resize(self.vocab.div_ceil(32), 0);
        allowed.for_each(|token| self.mask.allow(token));
    }

    fn from_matcher(mask: &mut TokenMask, vocab: usize, matcher: &mut Matcher) -> Result<(), GuideError> {
        let words = mask.words_mut();
        matcher.mask(words).map_err(|e| GuideError(e.to_string()))?;
        // The embedding may have rows beyond the tokenizer's ids.
        words.resize(vocab.div_ceil(32), 0);
        Ok(())
    }
}

fn lock(pipeline: &Mutex<Pipeline>) -> MutexGuard<'_, Pipeline> {
    pipeline.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guide for ReplyGuide {
    fn next(&mut self) -> Result<Allowed<'_>, GuideError> {
        let (in_thought, in_call, spent, calls) = {
            let p = lock(&self.pipeline);
            let spent = self.budget.is_some_and(|budget| p.reasoning_tokens() >= budget);
            (p.in_thought(), p.in_call(), spent, p.calls())
        };
        let s = self.specials;
        if in_thought {
            if let (true, Some(close)) = (spent, s.channel_close) {
                return Ok(Allowed::Force(close));
            }
            if self.answer.is_none() {
                return Ok(Allowed::Free);
            }
            // A call would end the thought where no call can be, and the end of the turn leaves no answer.
            let ends = self.ends.clone();
            self.all_but(ends.into_iter().chain(s.tool_call_open).chain(s.turn_open));
            return Ok(Allowed::Mask(&self.mask));
        }
        if let Some(call) = &mut self.call {
            Self::from_matcher(&mut self.mask, self.vocab, call)?;
            return Ok(Allowed::Mask(&self.mask));
        }
        if let Some(answer) = &mut self.answer {
            if in_call && answer.or_calls && !self.begun {
                return Ok(Allowed::Free);
            }
            if calls > 0 && answer.or_calls && !self.begun {
                // Calls stand in place of the answer: more of them, or the end.
                let ends = self.ends.clone();
                self.only(ends.into_iter().chain(s.tool_call_open));
                return Ok(Allowed::Mask(&self.mask));
            }
            Self::from_matcher(&mut self.mask, self.vocab, &mut answer.matcher)?;
            if answer.is_calls
                && answer.matcher.may_end()
                && let Some(response) = s.tool_response_open.filter(|id| self.ends.contains(id))
            {
                self.mask.allow(response);
            }
            if !self.begun {
                if answer.thought_first
                    && !spent
                    && let Some(open) = s.channel_open
                {
                    self.mask.allow(open);
                }
                if answer.or_calls
                    && let Some(open) = s.tool_call_open
                {
                    self.mask.allow(open);
                }
            }
            return Ok(Allowed::Mask(&self.mask));
        }
        if let (true, Some(open)) = (spent, s.channel_open) {
            self.all_but(std::iter::once(open));
            return Ok(Allowed::Mask(&self.mask));
        }
        Ok(Allowed::Free)
    }

    fn accept(&mut self, token: u32) -> Result<Verdict, GuideError> {
        let failed = |error: lapidary_text::Error| GuideError(error.to_string());
        let s = self.specials;
        let mut pipeline = lock(&self.pipeline);
        let (in_thought, in_call) = (pipeline.in_thought(), pipeline.in_call());
        pipeline.advance(token).map_err(failed)?;
        let stop = |code| Ok(Verdict::Stop(StopCause { keep_token: true, code }));
        if pipeline.matched().is_some() {
            return stop(code::STOP_STRING);
        }
        if pipeline.finished().is_some() {
            return stop(code::ONE_CALL);
        }
        if let Some(call) = &mut self.call {
            call.accept(token).map_err(failed)?;
            if call.is_complete() {
                self.call = None;
            }
            return Ok(Verdict::Continue);
        }
        if let Some(calls) = self.calls.as_ref().filter(|_| !in_call && Some(token) == s.tool_call_open) {
            let mut call = calls.clone();
            call.accept(token).map_err(failed)?;
            self.call = Some(call);
            return Ok(Verdict::Continue);
        }
        let Some(answer) = &mut self.answer else { return Ok(Verdict::Continue) };
        if !self.begun {
            let opens_thought = Some(token) == s.channel_open && answer.thought_first;
            let opens_call = Some(token) == s.tool_call_open && answer.or_calls;
            if opens_thought {
                // One thought is enough; a second would put off the answer.
                answer.thought_first = false;
                return Ok(Verdict::Continue);
            }
            if in_thought || in_call || opens_call {
                return Ok(Verdict::Continue);
            }
        }
        answer.matcher.accept(token).map_err(failed)?;
        self.begun = true;
        match answer.matcher.is_complete() {
            true => stop(code::GRAMMAR),
            false => Ok(Verdict::Continue),
        }
    }
}
