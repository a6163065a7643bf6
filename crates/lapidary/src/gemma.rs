//! A loaded model with its text: the type that most users need.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use lapidary_engine::generate::{Generation, Request};
use lapidary_engine::{Prompt, Runner, Stepper};
use lapidary_model::{BuildOptions, Config, Family, Limits, Model, Progress};
use lapidary_ops::SteerSet;
use lapidary_text::{
    Builtin, ChatInput, ChatTemplate, OutputOptions, OutputParser, Specials, StreamDecoder, Tokenizer, Tools,
};
use lapidary_weights::Checkpoint;
use serde_json::Value;

use crate::answer::{Answer, Reader};
use crate::capture::Recording;
use crate::defaults::Defaults;
use crate::error::{Error, Result};
use crate::options::{AnswerOptions, LoadOptions};
use crate::text_source;
use crate::timings::Profile;
use crate::trace::Tracing;

/// Where the chat template came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateSource {
    /// The checkpoint brought it.
    Checkpoint,
    /// The checkpoint has none; this is the project's own.
    BuiltIn,
}

/// A model that can be asked.
///
/// ```no_run
/// use lapidary::{Gemma, LoadOptions, Piece};
///
/// let mut gemma = Gemma::load("path/to/model", &LoadOptions::default())?;
/// let options = gemma.answer_options(200);
/// for piece in gemma.complete("Once upon a time", &options)? {
///     if let Piece::Text(text) = piece? {
///         print!("{text}");
///     }
/// }
/// # Ok::<(), lapidary::Error>(())
/// ```
#[derive(Debug)]
pub struct Gemma {
    stepper: Stepper,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    template_source: TemplateSource,
    defaults: Defaults,
    notes: Vec<String>,
    load_time: Duration,
    /// Ids whose keys and values the stepper holds.
    fed: Vec<u32>,
    /// How the stepper's rows were steered.
    fed_steered: Option<SteerSet>,
}

impl Gemma {
    /// Loads a folder, a `.gguf` or a `.safetensors` file.
    ///
    /// # Errors
    /// Names the file, tensor or field that is missing, damaged or not supported.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Gemma> {
        Gemma::from_checkpoint(&Checkpoint::open(path)?, options, &mut |_| {})
    }

    /// Loads an opened checkpoint and tells `progress` how far it is.
    ///
    /// # Errors
    /// As [`Gemma::load`].
    pub fn from_checkpoint(
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Gemma> {
        let start = Instant::now();
        let (runner, text) = load_with_text(checkpoint, options, progress)?;
        let context = options.context_for(&runner.model().config);
        let stepper = Stepper::new(runner, context);
        let LoadedText { tokenizer, template, template_source, defaults, notes } = text;
        Ok(Gemma {
            stepper,
            tokenizer,
            template,
            template_source,
            defaults,
            notes,
            load_time: start.elapsed(),
            fed: Vec::new(),
            fed_steered: None,
        })
    }

    /// Completes raw text: the prompt gets exactly one BOS and no template. Markers spelled in it are read as
    /// the control tokens that they spell.
    ///
    /// # Errors
    /// What the engine refuses; nothing has run then.
    pub fn complete(&mut self, prompt: &str, options: &AnswerOptions) -> Result<Answer<'_>> {
        let ids = self.tokenizer.encode_prompt(prompt, Specials::Parse)?;
        self.complete_ids(&ids, options)
    }

    /// Completes a prompt of ids, as they stand.
    ///
    /// # Errors
    /// What the engine refuses.
    pub fn complete_ids(&mut self, ids: &[u32], options: &AnswerOptions) -> Result<Answer<'_>> {
        self.steer(options)?;
        let Gemma { stepper, tokenizer, fed, defaults, .. } = self;
        let reader = Reader::Raw(StreamDecoder::without_specials(tokenizer));
        start(stepper, fed, &defaults.stop_ids, reader, ids, options)
    }

    /// Answers a conversation through the chat template. What the sequence already holds of it is not run
    /// again: a next turn costs its own tokens, unless sliding layers have forgotten what a change would need.
    ///
    /// # Errors
    /// [`Error::UnreadablePart`] for a picture or a sound, which are not read; what the template or the engine
    /// refuses.
    pub fn chat(&mut self, input: &ChatInput, options: &AnswerOptions) -> Result<Answer<'_>> {
        refuse_unreadable_parts(input)?;
        let prompt = self.template.encode(&self.tokenizer, input)?;
        self.steer(options)?;
        let Gemma { stepper, tokenizer, fed, defaults, .. } = self;
        let output = OutputOptions {
            tools: Tools::new(&input.tools),
            stop_ids: defaults.stop_ids.clone(),
            ..OutputOptions::default()
        };
        let reader = Reader::Reply(Box::new(OutputParser::new(tokenizer, &prompt.ids, output)));
        start(stepper, fed, &defaults.stop_ids, reader, &prompt.ids, options)
    }

    /// Answer options with the checkpoint's own sampling.
    pub fn answer_options(&self, max_tokens: usize) -> AnswerOptions {
        AnswerOptions {
            sampling: self.defaults.sampling.clone(),
            max_tokens,
            ignore_eos: false,
            steering: None,
            capture: None,
            trace: None,
        }
    }

    /// The checkpoint's own choices.
    pub fn defaults(&self) -> &Defaults {
        &self.defaults
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Where the chat template came from; a base model may have none of its own.
    pub fn template_source(&self) -> TemplateSource {
        self.template_source
    }

    /// The model's description.
    pub fn config(&self) -> &Config {
        &self.stepper.model().config
    }

    /// The step API, at the start of an empty single sequence without steering; the next answer starts afresh too.
    pub fn stepper(&mut self) -> &mut Stepper {
        self.fed.clear();
        self.fed_steered = None;
        self.stepper.reset();
        // The set no longer applies even where a device fails to give its memory back.
        let _ = self.stepper.set_steering(None);
        self.stepper.set_capture(&[]);
        &mut self.stepper
    }

    /// Steers what comes as `options` ask. Rows that were steered otherwise are not what a prompt's would be, so they
    /// are run again.
    fn steer(&mut self, options: &AnswerOptions) -> Result<()> {
        let steering = options.steering.as_deref().filter(|s| !s.vectors.is_empty());
        let set = match steering {
            None => None,
            Some(steering) => Some(steering.plan(&self.stepper.model().config)?.set),
        };
        self.stepper.set_steering(set.as_ref())?;
        if set != self.fed_steered {
            self.fed.clear();
            self.stepper.reset();
            self.fed_steered = set;
        }
        Ok(())
    }

    /// Notes from here on where the time of each step goes; with `keep_spans` each pass in detail, for a
    /// [Chrome trace](crate::timings::chrome_trace).
    ///
    /// # Errors
    /// A device that cannot tell.
    pub fn start_profile(&mut self, keep_spans: bool) -> Result<()> {
        Ok(self.stepper.start_profile(keep_spans)?)
    }

    /// Ends the profile; `None` where none was on.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.stepper.take_profile()
    }

    /// The runner, for reports.
    pub fn runner(&self) -> &Runner {
        self.stepper.runner()
    }

    /// What the user should know about the checkpoint: assumptions, fallbacks, ignored tensors.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Time from the opened checkpoint to a model that can run.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }
}

/// A template writes a marker for a picture; without the picture's rows behind it, the model would answer as if none
/// had been sent.
fn refuse_unreadable_parts(input: &ChatInput) -> Result<()> {
    for (message, value) in input.messages.iter().enumerate() {
        let parts = value.get("content").and_then(Value::as_array);
        for part in parts.into_iter().flatten() {
            let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
            if kind != "text" {
                return Err(Error::UnreadablePart { message, kind: kind.to_owned() });
            }
        }
    }
    Ok(())
}

/// Rewinds to what the prompt and the sequence have in common and begins with the rest.
fn start<'a>(
    stepper: &'a mut Stepper,
    fed: &'a mut Vec<u32>,
    stop_ids: &[u32],
    reader: Reader<'a>,
    ids: &[u32],
    options: &AnswerOptions,
) -> Result<Answer<'a>> {
    let recording = match &options.capture {
        None => None,
        Some(spec) => {
            let config = &stepper.model().config;
            let steering = options.steering.as_deref().map(|steering| steering.plan(config)).transpose()?;
            let edits = steering.map(|plan| plan.edits).unwrap_or_default();
            Some(Recording::new(spec, config, ids.len(), &edits)?)
        }
    };
    let common = ids.iter().zip(fed.iter()).take_while(|(a, b)| a == b).count();
    // At least one token must run to have logits, and all that are captured.
    let keep = common.min(ids.len().saturating_sub(1)).min(stepper.cursor());
    let keep = recording.as_ref().map_or(keep, |r| keep.min(r.first_of_prompt()));
    let reused = match stepper.rewind(keep) {
        Ok(()) => keep,
        Err(_) => {
            stepper.reset();
            0
        }
    };
    fed.truncate(reused);
    let request = Request {
        prompt: Prompt::from(&ids[reused..]),
        sampling: options.sampling.clone(),
        max_tokens: options.max_tokens,
        stop_ids: if options.ignore_eos { Vec::new() } else { stop_ids.to_vec() },
    };
    let generation = Generation::new(stepper, request)?;
    fed.extend_from_slice(&ids[reused..]);
    Ok(Answer {
        generation,
        reader,
        fed,
        prompt_tokens: ids.len(),
        reused,
        ids: Vec::new(),
        call: None,
        recording,
        tracing: options.trace.map(Tracing::new),
        ready: VecDeque::new(),
        done: false,
    })
}

/// What a model brings beside its weights.
#[derive(Debug)]
pub(crate) struct LoadedText {
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    pub template_source: TemplateSource,
    pub defaults: Defaults,
    pub notes: Vec<String>,
}

/// Builds a checkpoint's model on its device and reads its text.
pub(crate) fn load_with_text(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<(Runner, LoadedText)> {
    // A vocabulary of 262,144 pieces takes longer to index than a small model to pack: side by side.
    let (runner, tokenizer) = std::thread::scope(|scope| {
        let tokenizer = scope.spawn(|| text_source::tokenizer(checkpoint));
        let runner = load_runner(checkpoint, options, progress);
        let tokenizer = tokenizer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (runner, tokenizer)
    });
    let (runner, tokenizer) = (runner?, tokenizer?);
    let config = &runner.model().config;
    if tokenizer.vocab_size() as usize > config.vocab {
        let tokenizer = tokenizer.vocab_size() as usize;
        return Err(Error::VocabularyMismatch { tokenizer, model: config.vocab });
    }
    let defaults = Defaults::new(config, text_source::generation(checkpoint).as_ref(), Some(&tokenizer))?;
    let mut notes = load_notes(checkpoint, config)?;
    let (template, template_source) = match text_source::template(checkpoint)? {
        Some(source) => (ChatTemplate::new(&source)?, TemplateSource::Checkpoint),
        None => {
            let builtin = builtin_template(config);
            notes.push(format!("the checkpoint has no chat template; the built-in {builtin:?} one is used"));
            (ChatTemplate::builtin(builtin), TemplateSource::BuiltIn)
        }
    };
    let unknown = template.unknown_markers(&tokenizer);
    if !unknown.is_empty() {
        let list = unknown.join(" ");
        notes.push(format!("the chat template writes markers that the vocabulary does not have: {list}"));
    }
    Ok((runner, LoadedText { tokenizer, template, template_source, defaults, notes }))
}

/// Builds a checkpoint's model on its device, without any text.
///
/// # Errors
/// As [`Gemma::load`].
pub fn load_stepper(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Stepper> {
    let runner = load_runner(checkpoint, options, progress)?;
    let context = options.context_for(&runner.model().config);
    Ok(Stepper::new(runner, context))
}

fn load_runner(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Runner> {
    let mut config = Config::from_checkpoint(checkpoint)?;
    if let Some(cap) = options.final_softcap {
        let own = config.final_softcap.map_or("none".to_owned(), |own| own.to_string());
        config.notes.push(format!("final logit softcap {cap} as asked, in place of the checkpoint's {own}"));
        config.final_softcap = Some(cap);
    }
    let mut backend = options.device.backend(options)?;
    let context = options.context_for(&config);
    let limits = Limits { rows: options.chunk.clamp(1, context.max(1)), head_rows: options.head_rows.max(1) };
    let requantise = options.requantise;
    let build = BuildOptions { limits, embed_scale: options.embed_scale, requantise };
    let model = Model::build(config, checkpoint, backend.as_mut(), &build, progress)?;
    Ok(Runner::new(model, backend, [options.kv_format(); 2], context)?)
}

/// What the checkpoint and its config give cause to say, once the model is built.
fn load_notes(checkpoint: &Checkpoint, config: &Config) -> Result<Vec<String>> {
    let mut notes = checkpoint.notes();
    notes.extend(config.notes.iter().cloned());
    let ignored = checkpoint.ignored();
    if ignored.tensors() > 0 {
        notes.push(format!(
            "{} tensors of vision, {} of audio and {} between a tower and the text model are not read",
            ignored.vision, ignored.audio, ignored.projector
        ));
    }
    if config.tied && checkpoint.head_differs()? == Some(true) {
        notes.push(
            "the file's output head differs from the embedding that it is tied to elsewhere: the head is used".to_owned(),
        );
    }
    Ok(notes)
}

pub(crate) fn builtin_template(config: &Config) -> Builtin {
    match config.family {
        Family::Gemma3 => Builtin::Gemma3,
        Family::Gemma4 if config.per_layer.is_some() => Builtin::Gemma4Small,
        Family::Gemma4 => Builtin::Gemma4,
    }
}
