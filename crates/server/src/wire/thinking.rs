//! The switches for thinking, under the names that clients use.
//!
//! There are many names for one thing, because every family of clients has its own. All of them work on every endpoint;
//! two that contradict each other are refused.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::ApiError;

/// What a request says about thinking.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Thinking {
    /// Whether to think; none when nothing was said.
    pub on: Option<bool>,
    /// Most tokens of thought.
    pub budget: Option<usize>,
}

/// Collects what the fields say.
#[derive(Debug, Default)]
pub struct Switches {
    said: Thinking,
    /// The field that spoke of it first.
    by: Option<&'static str>,
}

/// `reasoning` of the Responses API and of several gateways.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Reasoning {
    /// How much.
    pub effort: Option<String>,
    /// Most tokens of thought.
    pub max_tokens: Option<usize>,
    /// Whether.
    pub enabled: Option<bool>,
    /// How much to tell of the thoughts; all of them are told.
    #[allow(dead_code, reason = "known, and without effect")]
    pub summary: Option<String>,
}

impl Switches {
    /// Takes in whether to think.
    pub fn on(&mut self, field: &'static str, on: Option<bool>) -> Result<(), ApiError> {
        let Some(on) = on else { return Ok(()) };
        match (self.said.on, self.by) {
            (Some(said), Some(by)) if said != on => {
                let word = |on| if on { "on" } else { "off" };
                let text = format!("it switches thinking {}, and {by} switches it {}", word(on), word(said));
                Err(ApiError::bad_request(Some(field), &text))
            }
            (Some(_), _) => Ok(()),
            (None, _) => {
                self.said.on = Some(on);
                self.by = Some(field);
                Ok(())
            }
        }
    }

    /// Takes in a bound for the thoughts. The tightest one counts.
    pub fn budget(&mut self, field: &'static str, budget: Option<usize>) -> Result<(), ApiError> {
        if let Some(budget) = budget {
            self.on(field, Some(budget > 0))?;
            self.said.budget = Some(self.said.budget.map_or(budget, |own| own.min(budget)));
        }
        Ok(())
    }

    /// Takes in an effort. The model knows on and off; what lies between becomes a budget.
    pub fn effort(&mut self, field: &'static str, effort: Option<&str>) -> Result<(), ApiError> {
        let budget = match effort {
            None => return Ok(()),
            Some("none") => return self.on(field, Some(false)),
            Some("minimal") => Some(128),
            Some("low") => Some(512),
            Some("medium") => Some(2048),
            Some("high" | "xhigh" | "max") => None,
            Some(_) => {
                let text = "expected none, minimal, low, medium, high, xhigh or max";
                return Err(ApiError::bad_request(Some(field), text));
            }
        };
        self.on(field, Some(true))?;
        self.budget(field, budget)
    }

    /// Takes in an effort from an API where it bounds the thoughts and does not ask for them.
    pub fn effort_if_on(&mut self, field: &'static str, effort: Option<&str>) -> Result<(), ApiError> {
        let mut bound = Switches::default();
        bound.effort(field, effort)?;
        match (self.said.on, bound.said.budget) {
            (Some(true), Some(budget)) => self.budget(field, Some(budget)),
            _ => Ok(()),
        }
    }

    /// `thinking`: a truth value, or Anthropic's object.
    pub fn thinking(&mut self, value: Option<&Value>) -> Result<(), ApiError> {
        let field = "thinking";
        let refuse = |text: &str| Err(ApiError::bad_request(Some(field), text));
        match value {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Bool(on)) => self.on(field, Some(*on)),
            Some(Value::Object(object)) => {
                let on = match object.get("type").and_then(Value::as_str) {
                    Some("enabled" | "adaptive" | "auto") => true,
                    Some("disabled") => false,
                    _ => return refuse("expected a type: enabled, adaptive or disabled"),
                };
                self.on(field, Some(on))?;
                match object.get("budget_tokens") {
                    None | Some(Value::Null) => Ok(()),
                    Some(budget) => match budget.as_u64() {
                        Some(budget) if on && budget > 0 => self.budget(field, usize::try_from(budget).ok()),
                        Some(_) if !on => Ok(()),
                        _ => refuse("expected budget_tokens to be a whole number above 0"),
                    },
                }
            }
            Some(_) => refuse("expected true, false or an object with a type"),
        }
    }

    /// `reasoning`.
    pub fn reasoning(&mut self, reasoning: Option<&Reasoning>) -> Result<(), ApiError> {
        let Some(reasoning) = reasoning else { return Ok(()) };
        self.on("reasoning.enabled", reasoning.enabled)?;
        self.effort("reasoning.effort", reasoning.effort.as_deref())?;
        self.budget("reasoning.max_tokens", reasoning.max_tokens)
    }

    /// Takes the switches out of the template's variables, and leaves the others.
    pub fn template(&mut self, variables: &mut Map<String, Value>) -> Result<(), ApiError> {
        for (name, field) in [
            ("enable_thinking", "chat_template_kwargs.enable_thinking"),
            ("thinking", "chat_template_kwargs.thinking"),
        ] {
            match variables.remove(name) {
                None | Some(Value::Null) => {}
                Some(Value::Bool(on)) => self.on(field, Some(on))?,
                Some(_) => return Err(ApiError::bad_request(Some(field), "expected true or false")),
            }
        }
        Ok(())
    }

    /// What was said in all.
    pub fn settle(self) -> Thinking {
        self.said
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn switches_agree_or_are_refused() {
        let mut switches = Switches::default();
        switches.effort("reasoning_effort", Some("low")).unwrap();
        switches.thinking(Some(&json!({"type": "enabled", "budget_tokens": 100}))).unwrap();
        let error = switches.on("enable_thinking", Some(false)).unwrap_err().to_string();
        assert!(error.contains("enable_thinking") && error.contains("reasoning_effort"), "{error}");
        assert_eq!(switches.settle(), Thinking { on: Some(true), budget: Some(100) });
    }

    #[test]
    fn every_off_switch_is_off() {
        let off = Thinking { on: Some(false), budget: None };
        let said = |switch: &dyn Fn(&mut Switches) -> Result<(), ApiError>| {
            let mut switches = Switches::default();
            switch(&mut switches).expect("it is a switch");
            switches.settle()
        };
        let mut kwargs = json!({"enable_thinking": false, "other": 1}).as_object().unwrap().clone();
        assert_eq!(said(&|s| s.effort("reasoning_effort", Some("none"))), off);
        assert_eq!(said(&|s| s.thinking(Some(&json!(false)))), off);
        assert_eq!(said(&|s| s.thinking(Some(&json!({"type": "disabled"})))), off);
        let reasoning = Reasoning { effort: Some("none".into()), ..Reasoning::default() };
        assert_eq!(said(&|s| s.reasoning(Some(&reasoning))), off);
        let mut switches = Switches::default();
        switches.template(&mut kwargs).unwrap();
        assert_eq!(switches.settle(), off);
        assert_eq!(json!(kwargs), json!({"other": 1}));
    }
}
