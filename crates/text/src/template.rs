//! Chat templates: a conversation becomes the text of a prompt.
//!
//! Checkpoints bring their template as Jinja source written for Python's jinja2, and the text must be the one that jinja2
//! makes, byte for byte. minijinja runs it with the differences evened out in [`python`]. A template is data from a file
//! of unknown origin, so it runs on a budget and can reach nothing but its arguments.

mod clock;
mod history;
mod python;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::tokenizer::{Tokenizer, is_control_name};
pub(crate) use history::{Continuation, map_strings, unused_char, without_thoughts};
pub use history::{fold_tool_messages, parse_call_arguments};

/// Steps a template may take. Google's needs about 400 a message, so this is far above any prompt that fits a context,
/// and below a few seconds.
const FUEL: u64 = 20_000_000;

/// The project's own templates, for checkpoints that bring none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builtin {
    /// Gemma 4 12B, 26B-A4B and 31B: without thinking the prompt ends in an empty thought.
    Gemma4,
    /// Gemma 4 E2B and E4B: without thinking the prompt ends at the model's header.
    Gemma4Small,
    /// Gemma 3.
    Gemma3,
}

/// A conversation and how to render it.
#[derive(Debug, Clone)]
pub struct ChatInput {
    /// Messages in the form of OpenAI's chat completions, arguments of calls as objects
    /// ([`parse_call_arguments`] turns JSON text into them).
    pub messages: Vec<Value>,
    /// Tool declarations in the same form; none is the same as no tools.
    pub tools: Vec<Value>,
    /// Whether the prompt ends where the model begins to answer.
    pub add_generation_prompt: bool,
    /// Whether the last message, if it is the assistant's, is the beginning of the answer. An empty one is ignored.
    pub continue_final: bool,
    /// Asks for thoughts. Templates treat none as no.
    pub enable_thinking: Option<bool>,
    /// Keeps the thoughts of earlier turns with calls.
    pub preserve_thinking: Option<bool>,
    /// Further variables of the template.
    pub extra: Map<String, Value>,
    /// The template's `bos_token`.
    pub bos_token: String,
    /// The template's `eos_token`.
    pub eos_token: String,
}

impl Default for ChatInput {
    fn default() -> Self {
        Self {
            messages: Vec::new(),
            tools: Vec::new(),
            add_generation_prompt: true,
            continue_final: false,
            enable_thinking: None,
            preserve_thinking: None,
            extra: Map::new(),
            bos_token: "<bos>".to_owned(),
            eos_token: "<eos>".to_owned(),
        }
    }
}

/// Which conventions a template follows, told from its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Generation {
    /// Not a Gemma 4 template.
    Other,
    /// Gemma 4 as of its launch: tool messages must be folded into `tool_responses` for it.
    Gemma4Launch,
    /// Gemma 4 with tool messages as everyone sends them.
    Gemma4,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    generation: Generation,
    /// Whether `empty_channel` is set, the one variable of the built-in templates.
    empty_channel: Option<bool>,
}

impl ChatTemplate {
    /// Compiles the Jinja source that a checkpoint brings.
    pub fn new(source: &str) -> Result<Self> {
        let generation = match source {
            s if !s.contains("<|tool_call>call:") => Generation::Other,
            // Templates that fold tool messages themselves say so in a comment; it is also how other engines tell.
            s if s.contains("OpenAI Chat Completions") => Generation::Gemma4,
            _ => Generation::Gemma4Launch,
        };
        Self::compile(source, generation, None)
    }

    /// The project's own template.
    pub fn builtin(builtin: Builtin) -> Self {
        let gemma4 =
            |empty| Self::compile(include_str!("../templates/gemma4.jinja"), Generation::Gemma4, Some(empty));
        let template = match builtin {
            Builtin::Gemma4 => gemma4(true),
            Builtin::Gemma4Small => gemma4(false),
            Builtin::Gemma3 => {
                Self::compile(include_str!("../templates/gemma3.jinja"), Generation::Other, None)
            }
        };
        template.expect("built-in templates compile; the tests render them")
    }

    fn compile(source: &str, generation: Generation, empty_channel: Option<bool>) -> Result<Self> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.expect("the default delimiters are valid"));
        env.set_fuel(Some(FUEL));
        python::install(&mut env);
        env.add_template_owned("chat template", python::without_generation_tags(source))
            .map_err(template_error)?;
        Ok(Self { env, source: source.to_owned(), generation, empty_channel })
    }

    /// The prompt's text. Markers in messages render as they stand; to keep them from becoming control tokens use
    /// [`encode`](Self::encode).
    pub fn render(&self, input: &ChatInput) -> Result<String> {
        let mut input = self.prepare(input);
        let continuation = Continuation::split_off(&mut input, self.is_gemma4())?;
        let end = history::unused_char(&input, &[]);
        continuation.finish(self, input, end, &str::to_owned)
    }

    /// Renders exactly the given input.
    pub(crate) fn render_prepared(&self, input: &ChatInput) -> Result<String> {
        let mut variables: Vec<(String, minijinja::Value)> = Vec::new();
        let mut set = |name: &str, value| variables.push((name.to_owned(), value));
        for (name, value) in &input.extra {
            set(name, python::value(value));
        }
        set("messages", input.messages.iter().map(python::value).collect());
        set(
            "tools",
            if input.tools.is_empty() { ().into() } else { input.tools.iter().map(python::value).collect() },
        );
        set("add_generation_prompt", input.add_generation_prompt.into());
        set("bos_token", input.bos_token.clone().into());
        set("eos_token", input.eos_token.clone().into());
        let switches = [
            ("enable_thinking", input.enable_thinking),
            ("preserve_thinking", input.preserve_thinking),
            ("empty_channel", self.empty_channel),
        ];
        for (name, value) in switches {
            if let Some(value) = value {
                set(name, value.into());
            }
        }
        let template = self.env.get_template("chat template").map_err(template_error)?;
        let mut text = template.render(minijinja::Value::from_pairs(variables)).map_err(template_error)?;
        // Launch templates close the turn after a tool result and then forget to open the model's.
        if self.generation == Generation::Gemma4Launch
            && input.add_generation_prompt
            && text.ends_with("<turn|>\n")
        {
            text.push_str("<|turn>model\n");
        }
        Ok(text)
    }

    /// Brings messages into the form that the template's generation expects.
    pub(crate) fn prepare(&self, input: &ChatInput) -> ChatInput {
        let mut input = input.clone();
        if self.generation == Generation::Gemma4Launch {
            input.messages = fold_tool_messages(input.messages);
        }
        input
    }

    /// The Jinja source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether thoughts, calls and results are written as Gemma 4 writes them.
    pub fn is_gemma4(&self) -> bool {
        self.generation != Generation::Other
    }

    /// The markers in the template that are no control tokens of the vocabulary: signs of a template made for another
    /// family of models. Callers warn about them, or refuse the pair.
    pub fn unknown_markers(&self, tokenizer: &Tokenizer) -> Vec<String> {
        let mut unknown = Vec::new();
        for (start, _) in self.source.match_indices('<') {
            let Some(length) = self.source[start..].find('>') else { break };
            let marker = &self.source[start..=start + length];
            let known = || tokenizer.token_id(marker).is_some_and(|id| tokenizer.is_special(id));
            if is_control_name(marker) && !known() && !unknown.iter().any(|seen| seen == marker) {
                unknown.push(marker.to_owned());
            }
        }
        unknown
    }
}

fn template_error(error: minijinja::Error) -> Error {
    if let Some(message) = python::raised(&error) {
        return Error::Refused(message);
    }
    let mut innermost = &error;
    while let Some(source) =
        std::error::Error::source(innermost).and_then(|s| s.downcast_ref::<minijinja::Error>())
    {
        innermost = source;
    }
    if error.kind() == ErrorKind::OutOfFuel || innermost.kind() == ErrorKind::OutOfFuel {
        return Error::Fuel(FUEL);
    }
    Error::Template(innermost.to_string())
}
