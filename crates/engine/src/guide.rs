//! What steers a request's tokens from outside: grammars, budgets for thoughts, stop strings.
//!
//! A guide is asked before a token is chosen and told which one was. It runs on the engine's thread, while the
//! device is busy with the forward pass where the device works on its own. One that fails or panics ends its own
//! request and no other.

use std::fmt;

use crate::sampling::TokenMask;

/// Says which tokens may come next, and takes in what was chosen. One object a request.
pub trait Guide: Send {
    /// Before a token is chosen. Called once for each token, in order.
    ///
    /// # Errors
    /// What makes going on impossible; the request ends with it.
    fn next(&mut self) -> Result<Allowed<'_>, GuideError>;

    /// After it. Not called for a token that is one of the request's stop ids.
    ///
    /// # Errors
    /// What makes going on impossible; the request ends with it, without this token.
    fn accept(&mut self, token: u32) -> Result<Verdict, GuideError>;
}

/// Tokens that may come next.
#[derive(Clone, Copy, Debug)]
pub enum Allowed<'a> {
    /// Any.
    Free,
    /// Those in the mask. Sampling parameters choose among them; that they leave at least one is the guide's duty.
    Mask(&'a TokenMask),
    /// This one, whatever the logits say.
    Force(u32),
}

/// What a guide makes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The answer goes on.
    Continue,
    /// The answer ends.
    Stop(StopCause),
}

/// Why a guide ended an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopCause {
    /// Whether the token that was just accepted is given to the sink; it counts as generated either way.
    pub keep_token: bool,
    /// The guide's own meaning, handed back with the end.
    pub code: u32,
}

/// Why a guide cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuideError(pub String);

impl fmt::Display for GuideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GuideError {}
