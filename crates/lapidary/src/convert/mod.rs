//! A safetensors checkpoint as one GGUF file, or as safetensors in another layout, weights in a format of choice.
//!
//! Keys and names are those that published Gemma 4 and Gemma 3 files have, so other engines read the result too. The
//! same checkpoint and options give the same bytes.
//!
//! What GGUF files leave out: tensors that no engine reads (keys and values of layers that use another layer's, hints for FP8
//! caches, a head equal to the embedding), and everything that isn't text.

mod error;
mod metadata;
mod report;
mod safetensors;
mod tensors;
mod vocabulary;

use std::path::{Path, PathBuf};

pub use crate::mix::Mix;
pub use error::{ConvertError, Result};
use lapidary_formats::Format;
use lapidary_model::{Config, Family};
use lapidary_text::{Builtin, ChatTemplate};
pub use lapidary_weights::export::Layout;
use lapidary_weights::gguf::{GgmlType, GgufError, Version, Writer};
use lapidary_weights::{Checkpoint, ConfigSource, Error as WeightsError};
pub use report::{ConvertReport, EncodingError, Fallback, MatrixReport};
pub use safetensors::to_safetensors;
use serde_json::Value;

use self::tensors::{Planned, plan};
use self::vocabulary::Vocabulary;

/// What a conversion leaves open.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// The types of the matrices. Router and norms are float32 always.
    pub types: Types,
    /// `general.name`; the checkpoint's folder without one.
    pub name: Option<String>,
    /// The chat template to store, as Jinja source. [`chat_template`] gives the project's own.
    pub chat_template: Option<String>,
}

impl ConvertOptions {
    /// This format for all matrices, no chat template.
    pub fn new(format: Format) -> ConvertOptions {
        ConvertOptions { types: Types::All(format), name: None, chat_template: None }
    }
}

/// The types of a GGUF file's matrices. One whose rows aren't whole blocks of its type gets another;
/// [`ConvertReport::fallbacks`] names those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Types {
    /// One format for every matrix, the embedding included; in its place Q8_0, or else BF16.
    All(Format),
    /// llama-quantize's choice, tensor by tensor.
    Mix(Mix),
}

impl Types {
    /// The type of most matrices.
    pub fn base(self) -> Format {
        match self {
            Types::All(format) => format,
            Types::Mix(mix) => mix.base(),
        }
    }
}

/// How far a conversion is: bytes written, and bytes in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// So far.
    pub done: u64,
    /// In all.
    pub total: u64,
}

/// Writes `checkpoint` to the file `out`. The tokenizer is taken from the `tokenizer.json` beside the checkpoint. At any
/// time a few thousand rows are in memory; the file takes its name when it is complete.
///
/// # Errors
/// Any [`ConvertError`]; the file that was at `out` is untouched then.
pub fn to_gguf(checkpoint: &Checkpoint, out: &Path, options: &ConvertOptions) -> Result<ConvertReport> {
    to_gguf_with(checkpoint, out, options, &mut |_| {})
}

/// [`to_gguf`], which tells `progress` how far it is.
///
/// # Errors
/// As [`to_gguf`].
pub fn to_gguf_with(
    checkpoint: &Checkpoint,
    out: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Written),
) -> Result<ConvertReport> {
    let base = options.types.base();
    if GgmlType::of(base).is_none() {
        return Err(ConvertError::NoGgufType { format: base });
    }
    let (config, generation) = described(checkpoint)?;
    expressible(&config)?;
    let mut report = ConvertReport { notes: config.notes.clone(), ..ConvertReport::default() };
    let tensors = plan(checkpoint, &config, options.types, &mut report)?;
    let vocabulary = match &checkpoint.text_files().tokenizer {
        Some(path) => Some(Vocabulary::read(path, config.vocab)?),
        None => {
            report
                .notes
                .push("the checkpoint has no tokenizer.json, so the file has no vocabulary".to_owned());
            None
        }
    };

    let mut writer = Writer::new(Version::V3);
    metadata::general(&mut writer, &config, &name_of(checkpoint, options), options.types)?;
    metadata::architecture(&mut writer, &config)?;
    metadata::sampling(&mut writer, generation)?;
    if let Some(vocabulary) = &vocabulary {
        vocabulary.declare(&mut writer)?;
        if !vocabulary.left_out.is_empty() {
            let names = vocabulary.left_out.join(", ");
            report.notes.push(format!("special tokens without a row in the embedding are left out: {names}"));
        }
    }
    metadata::token_ids(&mut writer, &config, generation, vocabulary.as_ref())?;
    if let Some(template) = &options.chat_template {
        writer.set("tokenizer.chat_template", template.as_str())?;
    }
    for tensor in &tensors {
        let kind = GgmlType::of(tensor.format).expect("fallbacks have types, and the choice was checked");
        writer.tensor(&tensor.name, &tensor.dims, kind)?;
    }
    report.tensors = tensors.len();
    let total = tensors.iter().map(Planned::bytes).sum();
    let mut done = 0;
    report.bytes = write(checkpoint, &config, writer, &tensors, out, &mut |event| match event {
        Event::Bytes(n) => {
            done += n;
            progress(Written { done, total });
        }
        Event::Matrix(matrix) => report.matrices.push(matrix),
    })?;
    Ok(report)
}

/// The project's own chat template as a file can carry it: the switch between sizes of Gemma 4, which is a variable of
/// the built-in template, is set in the text.
pub fn chat_template(builtin: Builtin) -> String {
    let source = ChatTemplate::builtin(builtin).source().to_owned();
    let empty_channel = match builtin {
        Builtin::Gemma4 => true,
        Builtin::Gemma4Small => false,
        Builtin::Gemma3 => return source,
    };
    // Engines that find these words pass tool results on as messages of their own, which this template expects.
    let words = "{#- Messages and tools in the form of OpenAI Chat Completions. -#}";
    format!("{words}\n{{%- set empty_channel = {empty_channel} -%}}\n{source}")
}

fn described(checkpoint: &Checkpoint) -> Result<(Config, Option<&Value>)> {
    match checkpoint.config() {
        ConfigSource::Json { config, generation, .. } => {
            Ok((Config::from_json(config)?, generation.as_ref()))
        }
        _ => Err(WeightsError::NotSupported {
            path: checkpoint.path().to_owned(),
            what: "converting anything but safetensors checkpoints is".to_owned(),
            remedy: "convert from the safetensors form of the model".to_owned(),
        }
        .into()),
    }
}

/// What files of an architecture don't state is the same in all published models; another value must not get lost.
fn expressible(config: &Config) -> Result<()> {
    let refuse =
        |field, found: String, expected: String| Err(ConvertError::NotExpressible { field, found, expected });
    if config.activation != lapidary_ops::Activation::GeluTanh {
        return refuse("hidden_activation", format!("{:?}", config.activation), "GeluTanh".to_owned());
    }
    let [sliding, full] = config.rope;
    if (sliding.rotated, sliding.factor) != (1.0, 1.0) {
        return refuse("rope_parameters.sliding_attention", format!("{sliding:?}"), "no scaling".to_owned());
    }
    if config.family == Family::Gemma3 {
        if full.rotated != 1.0 {
            return refuse(
                "rope_parameters.full_attention",
                format!("{full:?}"),
                "whole rotation".to_owned(),
            );
        }
        let (count, head_dim) = (config.layers.len(), config.layers[0].head_dim);
        let scalar = if count == 62 { config.hidden / config.heads } else { head_dim };
        let expected = (1.0 / (scalar as f64).sqrt()) as f32;
        if config.score_scale != expected {
            let found = format!("{}", config.score_scale.powi(-2));
            return refuse("query_pre_attn_scalar", found, scalar.to_string());
        }
    }
    Ok(())
}

fn name_of(checkpoint: &Checkpoint, options: &ConvertOptions) -> String {
    let folder = || Some(checkpoint.path().canonicalize().ok()?.file_name()?.to_string_lossy().into_owned());
    options.name.clone().or_else(folder).unwrap_or_else(|| "model".to_owned())
}

/// What happens while a file is written.
enum Event {
    Bytes(u64),
    Matrix(MatrixReport),
}

/// Writes beside `out` and renames, so that an error leaves no half a model and a mapped file stays whole.
fn write(
    checkpoint: &Checkpoint,
    config: &Config,
    writer: Writer,
    tensors: &[Planned],
    out: &Path,
    tell: &mut dyn FnMut(Event),
) -> Result<u64> {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = Part(out.with_file_name(name));
    let in_file = |error| GgufError::InFile { path: part.0.clone(), source: Box::new(error) };
    let mut body = writer.create(&part.0)?;
    for tensor in tensors {
        let matrix = tensor.write(checkpoint, config, &mut |bytes| {
            body.write(&tensor.name, bytes).map_err(|error| ConvertError::from(in_file(error)))?;
            tell(Event::Bytes(bytes.len() as u64));
            Ok(())
        })?;
        matrix.into_iter().for_each(|m| tell(Event::Matrix(m)));
    }
    let io = |source| ConvertError::Io { path: part.0.clone(), source };
    let file = body.finish().map_err(in_file)?;
    let bytes = file.get_ref().metadata().map_err(io)?.len();
    file.get_ref().sync_all().map_err(io)?;
    drop(file);
    std::fs::rename(&part.0, out).map_err(|source| ConvertError::Io { path: out.to_owned(), source })?;
    Ok(bytes)
}

/// A file that is removed again unless it was renamed.
struct Part(PathBuf);

impl Drop for Part {
    fn drop(&mut self) {
        // It is gone when the conversion succeeded, and there is nobody to tell when it can't be removed.
        let _ = std::fs::remove_file(&self.0);
    }
}
