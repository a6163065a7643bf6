//! Grammars for answers: JSON by a schema, any JSON object, a regular expression, Lark, calls of declared tools.
//!
//! A [`GrammarCompiler`] turns a [`Grammar`] into a [`Matcher`], which says at every place which tokens may follow. The
//! work is llguidance's; what is here is the vocabulary it runs over, the check that names the place of what a schema
//! asks for and cannot have, and the grammar of Gemma's own notation for calls.
//!
//! - Between two tokens of JSON stands at most [`MAX_WHITESPACE`] characters of white space: JSON permits any number, and
//!   models that may pad do so until their limit. Inside strings everything is free. Nested `%json` parts of a Lark
//!   grammar follow their own `x-guidance`.
//! - Whatever is asked for, compiling ends within [`TIME_LIMIT`] and either gives a matcher or an error that names the
//!   place. Sizes are bounded before, work by fuel, and the clock by a thread that is left behind.
//! - The index of the vocabulary takes a second for 262,144 pieces. It is built by the first grammar.

mod calls;
mod schema;
mod vocabulary;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, earley::SlicedBiasComputer};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
pub use calls::CallGrammar;

/// Most characters of white space between two tokens of JSON.
pub const MAX_WHITESPACE: usize = 8;
/// Longest text of a schema, an expression or a grammar, in bytes.
pub const MAX_SOURCE: usize = 256 * 1024;
/// Longest time that compiling takes, the first index of the vocabulary not counted.
pub const TIME_LIMIT: Duration = Duration::from_millis(1500);

/// Compiled grammars that are kept: requests tend to come with the same few schemas.
const KEPT: usize = 32;

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON by a schema.
    JsonSchema(Value),
    /// A text that the whole regular expression matches.
    Regex(String),
    /// A text of the grammar, in llguidance's dialect of Lark.
    Lark(String),
    /// Calls of declared tools, markers included.
    Calls(CallGrammar),
}

/// Makes matchers for one vocabulary. Cheap until the first grammar; meant to be shared.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    factory: OnceLock<Result<Arc<ParserFactory>, String>>,
    kept: Mutex<VecDeque<(String, Matcher)>>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler that has done nothing yet.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, factory: OnceLock::new(), kept: Mutex::default() }
    }

    /// Compiles a grammar, or takes it from those compiled lately.
    ///
    /// # Errors
    /// [`Error::Grammar`] with the place and what is wrong there; nothing has changed then.
    pub fn compile(&self, grammar: &Grammar) -> Result<Matcher> {
        let (key, source, ends) = match grammar {
            Grammar::JsonObject => {
                ("json".to_owned(), json_grammar(json!({ "type": "object" })), Ends::AtClose)
            }
            Grammar::JsonSchema(schema) => {
                let text = schema.to_string();
                bounded("schema", text.len())?;
                let schema = schema::prepare(schema)?;
                (format!("schema {text}"), json_grammar(schema), Ends::AtClose)
            }
            Grammar::Regex(regex) => {
                bounded("regex", regex.len())?;
                let whole = schema::without_anchors(regex);
                (format!("regex {regex}"), TopLevelGrammar::from_regex(whole), Ends::WhenNothingFollows)
            }
            Grammar::Lark(lark) => {
                bounded("grammar", lark.len())?;
                (format!("lark {lark}"), TopLevelGrammar::from_lark(lark.clone()), Ends::WhenNothingFollows)
            }
            Grammar::Calls(calls) => {
                let lark = calls.lark(self.tokenizer.specials())?;
                bounded("tools", lark.len())?;
                (format!("calls {lark}"), TopLevelGrammar::from_lark(lark), Ends::WhenNothingFollows)
            }
        };
        if let Some(matcher) = self.kept(&key) {
            return Ok(matcher);
        }
        let place = match grammar {
            Grammar::JsonObject | Grammar::JsonSchema(_) => "schema",
            Grammar::Regex(_) => "regex",
            Grammar::Lark(_) => "grammar",
            Grammar::Calls(_) => "tools",
        };
        let matcher = self.compile_bounded(source, ends, place)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.truncate(KEPT - 1);
        kept.push_front((key, matcher.clone()));
        Ok(matcher)
    }

    fn kept(&self, key: &str) -> Option<Matcher> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let place = kept.iter().position(|(k, _)| k == key)?;
        let entry = kept.remove(place)?;
        let matcher = entry.1.clone();
        kept.push_front(entry);
        Some(matcher)
    }

    fn factory(&self) -> Result<Arc<ParserFactory>> {
        let made = self.factory.get_or_init(|| {
            let build = || {
                let env = vocabulary::environment(Arc::clone(&self.tokenizer))?;
                let slices = SlicedBiasComputer::general_slices();
                let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
                    .map_err(|e| e.to_string())?;
                factory.quiet();
                *factory.limits_mut() = limits();
                Ok(Arc::new(factory))
            };
            catch_unwind(AssertUnwindSafe(build))
                .unwrap_or_else(|_| Err("the vocabulary cannot be indexed".to_owned()))
        });
        made.clone().map_err(|problem| Error::Grammar { place: "vocabulary".to_owned(), problem })
    }

    /// Compiles on a thread of its own. One that is over its time goes on until its fuel is used up, and nobody waits
    /// for it.
    fn compile_bounded(&self, source: TopLevelGrammar, ends: Ends, place: &'static str) -> Result<Matcher> {
        let factory = self.factory()?;
        let (send, receive) = mpsc::sync_channel(1);
        let work = move || {
            let compiled = catch_unwind(AssertUnwindSafe(|| {
                let parser = factory.create_parser(source);
                let mut matcher = llguidance::Matcher::new(parser);
                // The first mask is where a grammar that compiles and cannot run shows it.
                match matcher.get_error() {
                    Some(problem) => Err(problem),
                    None => matcher.compute_mask_or_eos().map(|_| matcher).map_err(|e| e.to_string()),
                }
            }));
            let _ = send.send(compiled.unwrap_or_else(|_| Err("it cannot be compiled".to_owned())));
        };
        // Schemas nest, and the compiler recurses.
        let builder = std::thread::Builder::new().name("grammar".to_owned()).stack_size(16 << 20);
        let error = |problem: String| Error::Grammar { place: place.to_owned(), problem };
        builder.spawn(work).map_err(|e| error(format!("no thread to compile it on: {e}")))?;
        match receive.recv_timeout(TIME_LIMIT) {
            Ok(Ok(matcher)) => {
                Ok(Matcher { matcher, ends, last: Vec::new(), tokenizer: self.tokenizer.clone() })
            }
            Ok(Err(problem)) => Err(error(first_lines(&problem))),
            Err(_) => Err(error(format!(
                "it is too complex: compiling takes more than {} ms",
                TIME_LIMIT.as_millis()
            ))),
        }
    }
}

/// Fuel for half a second of compiling and 10 ms a token, and some tens of megabytes.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 50_000, verbose_errors: false, ..ParserLimits::default() }
}

fn json_grammar(mut schema: Value) -> TopLevelGrammar {
    // A schema of `true` or `false` has no place for options.
    if !schema.is_object() {
        schema = json!({ "anyOf": [schema] });
    }
    schema["x-guidance"] = json!({
        "whitespace_flexible": true,
        "whitespace_pattern": format!(r"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"),
    });
    TopLevelGrammar::from_json_schema(schema)
}

fn bounded(place: &str, bytes: usize) -> Result<()> {
    match bytes <= MAX_SOURCE {
        true => Ok(()),
        false => Err(Error::Grammar {
            place: place.to_owned(),
            problem: format!("it has {bytes} bytes, at most {MAX_SOURCE} are taken"),
        }),
    }
}

/// Messages of the compiler end in listings and back traces.
fn first_lines(problem: &str) -> String {
    let text: Vec<&str> = problem
        .lines()
        .take_while(|line| !line.starts_with("<backtrace>") && !line.starts_with("<state>"))
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .take(6)
        .collect();
    let mut text = text.join("; ");
    if text.len() > 400 {
        let cut = (0..=400).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(cut);
        text.push_str(" ...");
    }
    text
}

/// When an answer is known to be complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// JSON: at the bracket or quote that closes it, although white space could follow.
    AtClose,
    /// When the grammar allows nothing more.
    WhenNothingFollows,
}

/// Follows one answer through a grammar.
pub struct Matcher {
    matcher: llguidance::Matcher,
    ends: Ends,
    /// Bytes of the last token.
    last: Vec<u8>,
    tokenizer: Arc<Tokenizer>,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("ends", &self.ends).finish_non_exhaustive()
    }
}

impl Clone for Matcher {
    /// The clone shares nothing with the original, so that two requests do not wait for one another.
    fn clone(&self) -> Self {
        Self {
            matcher: self.matcher.deep_clone(),
            ends: self.ends,
            last: self.last.clone(),
            tokenizer: Arc::clone(&self.tokenizer),
        }
    }
}

impl Matcher {
    /// Which tokens may come next: bit `t % 32` of word `t / 32` for token `t`, for every id of the tokenizer. The ends
    /// of a turn are among them where the answer may end.
    ///
    /// # Errors
    /// [`Error::Grammar`] when nothing may follow or the grammar is too complex at this place.
    pub fn mask(&mut self, words: &mut Vec<u32>) -> Result<()> {
        let mask = catch_unwind(AssertUnwindSafe(|| self.matcher.compute_mask_or_eos()));
        match mask {
            Ok(Ok(mask)) => {
                words.clear();
                // The set has room for one token more than there are.
                let count = (self.tokenizer.vocab_size() as usize).div_ceil(32);
                words.extend(mask.as_slice().iter().take(count));
                Ok(())
            }
            Ok(Err(problem)) => Err(answer_error(&problem.to_string())),
            Err(_) => Err(answer_error("the grammar broke at this place")),
        }
    }

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// [`Error::Grammar`] for one that the mask did not allow.
    pub fn accept(&mut self, token: u32) -> Result<()> {
        self.last.clear();
        self.tokenizer.append_bytes(token, &mut self.last)?;
        let taken = catch_unwind(AssertUnwindSafe(|| self.matcher.consume_token(token)));
        match taken {
            Ok(Ok(())) => Ok(()),
            Ok(Err(problem)) => Err(answer_error(&problem.to_string())),
            Err(_) => Err(answer_error("the grammar broke at this place")),
        }
    }

    /// Whether the answer could end here.
    pub fn may_end(&mut self) -> bool {
        self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether the answer ends here.
    pub fn is_complete(&mut self) -> bool {
        if self.matcher.is_stopped() {
            return true;
        }
        let closed = || self.last.iter().rev().find(|b| !b.is_ascii_whitespace()).copied();
        self.ends == Ends::AtClose
            && matches!(closed(), Some(b'}' | b']' | b'"'))
            && self.matcher.is_accepting().unwrap_or(false)
    }
}

fn answer_error(problem: &str) -> Error {
    Error::Grammar { place: "answer".to_owned(), problem: first_lines(problem) }
}
