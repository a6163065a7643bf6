//! A token engine that says what a script tells it to, for tests of everything above the engine.
//!
//! It keeps the engine's contract: guides are asked before each token and told after it, stop ids end a reply, events
//! come in order and end once. What it chooses is a [`Speaker`]'s, as far as the guide allows.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapidary_engine::metrics::EngineStats;
use lapidary_engine::sampling::{Sampled, TokenMask};
use lapidary_engine::{
    Allowed, EngineEvent, EngineFinish, EngineRequest, EngineUsage, Error, FailureKind, Verdict,
};
use lapidary_text::{Builtin, ChatTemplate, Tokenizer};

use super::{Cancel, Service, ServiceOptions, TokenEngine};
use crate::gemma::LoadedText;
use crate::{Defaults, Result, SamplingParams, TemplateSource};

/// Chooses the tokens of one reply.
pub trait Speaker: Send {
    /// The next token, one of those in `mask` when there is one; `None` has nothing more to say, and ends the reply by
    /// a limit.
    fn next(&mut self, mask: Option<&TokenMask>) -> Option<u32>;
}

/// Says a list. Tokens that the mask forbids are skipped; after the list comes the first token that is allowed, if a
/// grammar still wants one.
impl Speaker for std::vec::IntoIter<u32> {
    fn next(&mut self, mask: Option<&TokenMask>) -> Option<u32> {
        let allows = |token: &u32| mask.is_none_or(|mask| mask.allows(*token));
        let said = self.find(allows);
        let first = |mask: &TokenMask| {
            let word = mask.words().iter().position(|word| *word != 0)?;
            Some(word as u32 * 32 + mask.words()[word].trailing_zeros())
        };
        said.or_else(|| mask.and_then(first))
    }
}

impl<F: FnMut(Option<&TokenMask>) -> Option<u32> + Send> Speaker for F {
    fn next(&mut self, mask: Option<&TokenMask>) -> Option<u32> {
        self(mask)
    }
}

/// Makes the speaker of a reply from the request's prompt and the number of requests before it.
pub type Casting = Box<dyn Fn(&[u32], usize) -> Box<dyn Speaker> + Send + Sync>;

/// See the module's page.
pub struct Scripted {
    casting: Casting,
    context: usize,
    vocab: usize,
    /// Time between two tokens.
    pace: Duration,
    /// Requests that are taken while others run.
    limit: usize,
    count: AtomicUsize,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    closed: AtomicBool,
    active: AtomicUsize,
    /// What the last requests asked for, for tests to look at.
    seen: Mutex<Vec<Seen>>,
}

/// What a request asked of the engine.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens.
    pub max_tokens: usize,
    /// Fewest tokens.
    pub min_tokens: usize,
    /// Tokens that end the reply.
    pub stop_ids: Vec<u32>,
    /// Whether something steers it.
    pub guided: bool,
}

impl Scripted {
    /// An engine with room for `context` positions.
    pub fn new(context: usize, vocab: usize, casting: Casting) -> Self {
        Scripted {
            casting,
            context,
            vocab,
            pace: Duration::ZERO,
            limit: usize::MAX,
            count: AtomicUsize::new(0),
            shared: Arc::default(),
        }
    }

    /// Waits that long before each token.
    pub fn paced(self, pace: Duration) -> Self {
        Scripted { pace, ..self }
    }

    /// Takes no more than that many requests at a time.
    pub fn limited(self, limit: usize) -> Self {
        Scripted { limit, ..self }
    }

    /// A look at what requests asked for.
    pub fn log(&self) -> RequestLog {
        RequestLog(Arc::clone(&self.shared))
    }

    /// A service over this engine, with the built-in Gemma 4 template, default sampling and the vocabulary's own ends.
    ///
    /// # Errors
    /// As for [`Service::start`].
    pub fn service(self, tokenizer: Tokenizer, options: ServiceOptions) -> Result<Service> {
        self.service_with(tokenizer, ChatTemplate::builtin(Builtin::Gemma4), options)
    }

    /// The same with another template.
    ///
    /// # Errors
    /// As for [`Service::start`].
    pub fn service_with(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        options: ServiceOptions,
    ) -> Result<Service> {
        let stop_ids = tokenizer.specials().end_ids().collect();
        let defaults = Defaults { sampling: SamplingParams::default(), stop_ids };
        let text = LoadedText {
            tokenizer,
            template,
            template_source: TemplateSource::BuiltIn,
            defaults,
            notes: Vec::new(),
        };
        Service::over(Box::new(self), text, options, Path::new("scripted"))
    }
}

/// What requests asked for, in order.
#[derive(Clone)]
pub struct RequestLog(Arc<Shared>);

impl RequestLog {
    /// All requests so far.
    pub fn all(&self) -> Vec<Seen> {
        self.0.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Requests that have not ended.
    pub fn active(&self) -> usize {
        self.0.active.load(Ordering::SeqCst)
    }
}

impl TokenEngine for Scripted {
    fn submit(&self, request: EngineRequest) -> std::result::Result<Cancel, Error> {
        if self.shared.closed.load(Ordering::SeqCst) {
            return Err(Error::ShuttingDown);
        }
        if self.shared.active.load(Ordering::SeqCst) >= self.limit {
            return Err(Error::QueueFull { limit: self.limit });
        }
        request.sampling.validate(self.vocab)?;
        self.shared.active.fetch_add(1, Ordering::SeqCst);
        let seen = Seen {
            prompt: request.prompt.tokens.clone(),
            sampling: request.sampling.clone(),
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            stop_ids: request.stop_ids.clone(),
            guided: request.guide.is_some(),
        };
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
        let number = self.count.fetch_add(1, Ordering::SeqCst);
        let speaker = (self.casting)(&request.prompt.tokens, number);
        let cancelled = Arc::new(AtomicBool::new(false));
        let shared = Arc::clone(&self.shared);
        let (flag, pace) = (Arc::clone(&cancelled), self.pace);
        std::thread::spawn(move || {
            perform(request, speaker, &flag, &shared.closed, pace);
            shared.active.fetch_sub(1, Ordering::SeqCst);
        });
        Ok(Box::new(move || cancelled.store(true, Ordering::SeqCst)))
    }

    fn context(&self) -> usize {
        self.context
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn stats(&self) -> EngineStats {
        EngineStats { active: self.shared.active.load(Ordering::SeqCst), ..EngineStats::default() }
    }

    fn drain(&self, limit: Duration) {
        let start = Instant::now();
        while self.shared.active.load(Ordering::SeqCst) > 0 && start.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.shared.closed.store(true, Ordering::SeqCst);
    }
}

/// Runs one reply to its end.
fn perform(
    mut request: EngineRequest,
    mut speaker: Box<dyn Speaker>,
    cancelled: &AtomicBool,
    closed: &AtomicBool,
    pace: Duration,
) {
    let start = Instant::now();
    let prompt_tokens = request.prompt.tokens.len();
    let mut usage = EngineUsage { prompt_tokens, ..EngineUsage::default() };
    let deadline = request.timeout.map(|t| start + t);
    let listening = request.sink.event(EngineEvent::Started { prompt_tokens, cached_tokens: 0 })
        && request.sink.event(EngineEvent::Progress { fed: prompt_tokens });
    if !listening {
        cancelled.store(true, Ordering::SeqCst);
    }
    let reason = loop {
        std::thread::sleep(pace);
        if cancelled.load(Ordering::SeqCst) {
            break EngineFinish::Cancelled;
        }
        if closed.load(Ordering::SeqCst) {
            break EngineFinish::Failed(FailureKind::ShuttingDown);
        }
        if deadline.is_some_and(|d| d <= Instant::now()) {
            break EngineFinish::TimedOut;
        }
        if usage.answer_tokens >= request.max_tokens {
            break EngineFinish::Length;
        }
        let (forced, mask) = match request.guide.as_mut().map(|guide| guide.next()) {
            None | Some(Ok(Allowed::Free)) => (None, None),
            Some(Ok(Allowed::Force(token))) => (Some(token), None),
            Some(Ok(Allowed::Mask(mask))) => (None, Some(mask)),
            Some(Err(error)) => break EngineFinish::Failed(FailureKind::Guide(error.0)),
        };
        let left = without(mask, &request.sampling.suppress);
        let mask = left.as_ref().or(mask);
        let Some(token) = forced.or_else(|| speaker.next(mask)) else { break EngineFinish::Length };
        if forced.is_none() && mask.is_some_and(|mask| !mask.allows(token)) {
            break EngineFinish::Failed(FailureKind::Guide(format!(
                "the script said {token}, which is masked"
            )));
        }
        if request.stop_ids.contains(&token) && usage.answer_tokens >= request.min_tokens {
            break EngineFinish::Stop(token);
        }
        usage.answer_tokens += 1;
        usage.first_token.get_or_insert(start.elapsed());
        let verdict = request.guide.as_mut().map_or(Ok(Verdict::Continue), |guide| guide.accept(token));
        let logprob = request.logprobs.map(|_| -(usage.answer_tokens as f32));
        let top = (0..request.logprobs.unwrap_or(0)).map(|i| (i as u32, -(i as f32))).collect();
        let sampled = Sampled { token, logprob, top };
        match verdict {
            Err(error) => break EngineFinish::Failed(FailureKind::Guide(error.0)),
            Ok(Verdict::Stop(cause)) => {
                if cause.keep_token {
                    request.sink.event(EngineEvent::Token(sampled));
                }
                break EngineFinish::Guide(cause);
            }
            Ok(Verdict::Continue) => {
                if !request.sink.event(EngineEvent::Token(sampled)) {
                    break EngineFinish::Cancelled;
                }
            }
        }
    };
    usage.total = start.elapsed();
    request.sink.event(EngineEvent::Finished { reason, usage });
}

/// The mask without the suppressed tokens; none when there are none.
fn without(mask: Option<&TokenMask>, suppress: &[u32]) -> Option<TokenMask> {
    let largest = *suppress.iter().max()?;
    let mut left = match mask {
        Some(mask) => mask.clone(),
        // Wide enough for any vocabulary that has these tokens.
        None => TokenMask::from_words(vec![u32::MAX; (largest as usize + 1).div_ceil(32).max(1 << 13)]),
    };
    for token in suppress {
        if let Some(word) = left.words_mut().get_mut(*token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }
    Some(left)
}
