//! Files with a real Gemma 4 model's shapes and types and random weights: for speed and load tests where no checkpoint
//! is at hand.
//!
//! [`write()`] makes a GGUF file as converters and quantisers make it: the tensors of a published model in their order,
//! each in the type that the mix gives it. Values have mean 0 and such a size that every matrix has about unit gain, so
//! activations and logits stay finite and experts get an even load. What comes out is noise.

mod metadata;
mod shape;
mod values;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use lapidary_formats::Format;
use lapidary_weights::gguf::{Body, GgmlType, GgufError, Version, Writer};

use self::shape::{Fill, Shape, Tensor};
use self::values::{Filler, Rng};
use crate::error::{Error, Result};
use crate::mix::{self, Matrix, Model};

pub use self::shape::Size;
pub use crate::mix::Mix;

/// What a file leaves open.
#[derive(Clone, Debug, Default)]
pub struct SynthOptions {
    /// Layers, when not the model's own number.
    pub layers: Option<usize>,
    /// Chooses the random values; equal seeds give equal files.
    pub seed: u64,
    /// Leaves the matrices as holes of zeros that take no room on the disk: for looks at the header.
    pub sparse: bool,
    /// A GGUF file whose vocabulary is taken; a stand-in of the right size is written without one.
    pub tokenizer: Option<PathBuf>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SynthReport {
    /// Number of tensors.
    pub tensors: usize,
    /// Number of values in them.
    pub parameters: u64,
    /// Bytes of each format's tensors, without padding.
    pub bytes: BTreeMap<&'static str, u64>,
}

/// Writes a model of this size and mix to the file `out`, tensor by tensor. `progress` hears bytes done and bytes in all.
///
/// # Errors
/// [`Error::Synth`] for a number of layers that the model cannot have, or a tokenizer file without a vocabulary of the
/// right size; [`Error::Weights`] and [`Error::Io`] for files that can't be read or written. A file that was at `out` is
/// untouched then.
pub fn write(
    size: Size,
    mix: Mix,
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SynthReport> {
    let shape = size.shape(options.layers)?;
    let name = format!("synthetic gemma 4 {} {}", size.name(), mix.name());
    write_shape(&shape, &name, mix, out, options, progress)
}

/// Bytes of one write: whole blocks of this much at most.
const PIECE_BYTES: usize = 1 << 18;

fn write_shape(
    shape: &Shape,
    name: &str,
    mix: Mix,
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SynthReport> {
    let tensors = assign(mix, shape, shape.tensors())?;
    let mut writer = Writer::new(Version::V3);
    metadata::model(&mut writer, shape, name, mix).map_err(weights)?;
    match &options.tokenizer {
        Some(path) => metadata::copied_vocabulary(&mut writer, path, shape.vocab)?,
        None => metadata::stand_in_vocabulary(&mut writer, shape.vocab).map_err(weights)?,
    }
    let mut report = SynthReport { tensors: tensors.len(), parameters: 0, bytes: BTreeMap::new() };
    for (tensor, format) in &tensors {
        let kind = GgmlType::of(*format).expect("mixes are of GGUF's formats");
        writer.tensor(&tensor.name, &tensor.dims, kind).map_err(weights)?;
        report.parameters += tensor.values();
        *report.bytes.entry(format.name()).or_default() += tensor.bytes(*format);
    }
    let total = report.bytes.values().sum();

    let part = Part::beside(out);
    let file = File::create(&part.0).map_err(|source| Error::Io { path: part.0.clone(), source })?;
    let in_file = |e| weights(GgufError::InFile { path: part.0.clone(), source: Box::new(e) });
    let mut body = writer.begin(BufWriter::new(Holes { file, zeros: 0 })).map_err(in_file)?;
    let mut rng = Rng::new(options.seed);
    let mut done = 0;
    for (tensor, format) in &tensors {
        write_tensor(&mut body, tensor, *format, options.sparse, &mut rng).map_err(in_file)?;
        done += tensor.bytes(*format);
        progress(done, total);
    }
    body.finish().map_err(in_file)?;
    std::fs::rename(&part.0, out).map_err(|source| Error::Io { path: out.to_owned(), source })?;
    Ok(report)
}

/// Gives every tensor its type.
fn assign(mix: Mix, shape: &Shape, tensors: Vec<Tensor>) -> Result<Vec<(Tensor, Format)>> {
    let is_matrix = |t: &&Tensor| matches!(t.fill, Fill::Matrix { .. });
    let matrix = |t| -> Matrix<'_> {
        let t: &Tensor = t;
        Matrix { name: &t.name, cols: t.dims[0] as usize }
    };
    let matrices: Vec<Matrix<'_>> = tensors.iter().filter(is_matrix).map(matrix).collect();
    let experts = shape.moe.map_or(0, |m| m.experts);
    let model = Model { layers: shape.layers, experts, plain: Format::F16 };
    let mut formats = Vec::with_capacity(matrices.len());
    for (matrix, wanted) in matrices.iter().zip(mix.formats(model, &matrices)) {
        let problem = || {
            format!("tensor {} has rows of {} values, which {wanted} can't hold", matrix.name, matrix.cols)
        };
        let whole = mix::whole_blocks(wanted, matrix.cols);
        formats.push(whole.ok_or_else(|| Error::Synth { problem: problem() })?);
    }
    let mut formats = formats.into_iter();
    let typed = tensors.into_iter().map(|t| {
        let format = if is_matrix(&&t) { formats.next().expect("one each") } else { Format::F32 };
        (t, format)
    });
    Ok(typed.collect())
}

fn write_tensor<W: Write>(
    body: &mut Body<W>,
    tensor: &Tensor,
    format: Format,
    sparse: bool,
    rng: &mut Rng,
) -> Result<(), GgufError> {
    let Fill::Matrix { fan_in } = tensor.fill else {
        let values = tensor.fill.values(tensor.values() as usize, rng);
        return body.write(&tensor.name, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    };
    let filler = Filler::new(format, (fan_in as f32).sqrt().recip(), rng);
    let mut piece = vec![0u8; PIECE_BYTES / format.block_bytes() * format.block_bytes()];
    let mut left = tensor.bytes(format);
    while left > 0 {
        let n = left.min(piece.len() as u64) as usize;
        if !sparse {
            filler.fill(&mut piece[..n], rng);
        }
        body.write(&tensor.name, &piece[..n])?;
        left -= n as u64;
    }
    Ok(())
}

fn weights(error: GgufError) -> Error {
    Error::Weights(error.into())
}

/// A file in which runs of zeros are skipped instead of written.
struct Holes {
    file: File,
    /// Zeros that were passed over since the last write.
    zeros: u64,
}

impl Write for Holes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.iter().fold(0, |all, byte| all | byte) == 0 {
            self.zeros += bytes.len() as u64;
            return Ok(bytes.len());
        }
        let at = self.file.seek(SeekFrom::Current(self.zeros as i64));
        at.and_then(|_| self.file.write_all(bytes))?;
        self.zeros = 0;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let end = self.file.stream_position()? + self.zeros;
        self.file.set_len(end)
    }
}

/// The file while it is being written; taken away if it doesn't get its name.
struct Part(PathBuf);

impl Part {
    fn beside(out: &Path) -> Part {
        let mut name = out.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        Part(out.with_file_name(name))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // After the rename there is nothing of this name.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests;
