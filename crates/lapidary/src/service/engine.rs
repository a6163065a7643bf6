//! What a service needs of a token engine. There is one that matters, and a scripted one for tests.

use std::time::Duration;

use lapidary_engine::metrics::EngineStats;
use lapidary_engine::{Engine, EngineRequest, Error};
use lapidary_model::Config;

/// Takes back a request.
pub type Cancel = Box<dyn FnOnce() + Send + Sync>;

/// Answers requests of ids with ids. The contract is [`Engine`]'s.
pub trait TokenEngine: Send + Sync {
    /// Hands a request over; the answer goes to its sink.
    ///
    /// # Errors
    /// Why it is refused; nothing was queued then.
    fn submit(&self, request: EngineRequest) -> Result<Cancel, Error>;

    /// Positions of one sequence.
    fn context(&self) -> usize;

    /// The model's description, for what names its layers; `None` where there is no model.
    fn config(&self) -> Option<&Config> {
        None
    }

    /// Tokens of the model's vocabulary.
    fn vocab(&self) -> usize;

    /// What goes on.
    fn stats(&self) -> EngineStats;

    /// Takes no more requests, waits until those that were taken have ended, `limit` long at most, and ends the rest.
    fn drain(&self, limit: Duration);
}

impl TokenEngine for Engine {
    fn submit(&self, request: EngineRequest) -> Result<Cancel, Error> {
        let ticket = Engine::submit(self, request)?;
        Ok(Box::new(move || ticket.cancel()))
    }

    fn context(&self) -> usize {
        self.options().context
    }

    fn config(&self) -> Option<&Config> {
        Some(Engine::config(self))
    }

    fn vocab(&self) -> usize {
        Engine::config(self).vocab
    }

    fn stats(&self) -> EngineStats {
        Engine::stats(self)
    }

    fn drain(&self, limit: Duration) {
        Engine::drain(self, limit);
        self.shutdown();
    }
}
