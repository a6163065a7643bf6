//! Plain matrices in another format, made while they are loaded.
//!
//! What becomes of which matrix is what a conversion to the same format does, so the result is that of loading the
//! converted file.

use lapidary_ops::{Format, TensorView};
use lapidary_weights::{LayerRole, Role};

use lapidary_formats::{Encoded, EncodedScales, Scaling, decode_row, encode_rows_scaled};

use crate::error::{Error, Result};

/// Which matrices get another format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requantise {
    /// The layers' linear matrices, experts included; the router keeps its own.
    pub linear: Option<Encoding>,
    /// The embedding, which is the head where they are tied, and the head.
    pub embedding: Option<Encoding>,
    /// The table of per-layer inputs and the projection beside it.
    pub per_layer: Option<Encoding>,
}

/// A format and where its scales go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// The format.
    pub format: Format,
    /// Where scales beside the codes go.
    pub scaling: Scaling,
}

const FP8: Encoding = Encoding { format: Format::Fp8E4M3, scaling: Scaling::Row };
const NVFP4: Encoding = Encoding { format: Format::Nvfp4, scaling: Scaling::Usual };
const Q8_0: Encoding = Encoding { format: Format::Q8_0, scaling: Scaling::Usual };

impl Requantise {
    /// As `convert fp8`: FP8 with a scale a row.
    pub fn fp8() -> Requantise {
        Requantise { linear: Some(FP8), ..Requantise::default() }
    }

    /// As `convert nvfp4`.
    pub fn nvfp4() -> Requantise {
        Requantise { linear: Some(NVFP4), ..Requantise::default() }
    }

    /// As `convert q8_0`: every matrix but the router; one whose rows are not whole blocks becomes bf16.
    pub fn q8_0() -> Requantise {
        Requantise { linear: Some(Q8_0), embedding: Some(Q8_0), per_layer: Some(Q8_0) }
    }

    /// With embedding and head in FP8, a scale a row.
    pub fn with_fp8_head(self) -> Requantise {
        Requantise { embedding: Some(FP8), ..self }
    }

    /// What the matrix of `role` gets; `None` leaves it as it is.
    pub fn of(&self, role: Role) -> Option<Encoding> {
        use LayerRole::*;
        match role {
            Role::Embed | Role::Head => self.embedding,
            Role::PerLayerTable | Role::PerLayerModelProj => self.per_layer,
            Role::Layer(
                _,
                QProj
                | KProj
                | VProj
                | OProj
                | Gate
                | Up
                | Down
                | PerLayerGate
                | PerLayerProj
                | ExpertsGateUp
                | ExpertsGate
                | ExpertsUp
                | ExpertsDown
                | Expert { .. },
            ) => self.linear,
            _ => None,
        }
    }

    /// The format that a matrix of `role`, stored in `format` with rows of `cols`, ends up in.
    pub fn format_of(&self, role: Role, format: Format, cols: usize) -> Format {
        self.of(role).map_or(format, |to| to.fitting(cols).format)
    }
}

impl Encoding {
    /// Itself, or bf16 in the place of GGUF blocks that rows of `cols` are no whole number of.
    fn fitting(self, cols: usize) -> Encoding {
        match self.format == Format::Q8_0 && self.format.row_bytes(cols).is_none() {
            true => Encoding { format: Format::Bf16, scaling: Scaling::Usual },
            false => self,
        }
    }

    /// Encodes parts of one matrix, each for itself, with as many threads as there are cores.
    ///
    /// # Errors
    /// `Tensor` for a part that is quantised already, and for one that the format cannot hold.
    pub(crate) fn encode(self, parts: &[TensorView<'_>]) -> Result<Vec<Encoded>> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        if parts.len() < cores {
            return parts.iter().map(|part| self.encode_part(part, cores)).collect();
        }
        let each = parts.len().div_ceil(cores);
        let encode = |some: &[TensorView<'_>]| -> Result<Vec<Encoded>> {
            some.iter().map(|part| self.encode_part(part, 1)).collect()
        };
        std::thread::scope(|s| {
            let workers: Vec<_> = parts.chunks(each).map(|some| s.spawn(move || encode(some))).collect();
            let done = workers.into_iter().map(|w| w.join().expect("encoding does not panic"));
            done.collect::<Result<Vec<_>>>().map(|all| all.into_iter().flatten().collect())
        })
    }

    fn encode_part(self, part: &TensorView<'_>, threads: usize) -> Result<Encoded> {
        let problem = |problem: String| Error::Tensor { tensor: part.name.clone(), problem };
        if !matches!(part.format, Format::F32 | Format::F16 | Format::Bf16) {
            let is = part.format;
            return Err(problem(format!("it is {is} already; quantising at load takes plain checkpoints")));
        }
        let to = self.fitting(part.cols);
        // Scales of a whole matrix need all of it; those of rows and blocks inside rows do not.
        let apart = to.format != Format::Nvfp4;
        let threads = if apart { threads.min(part.rows) } else { 1 };
        let border = |t: usize| part.rows * t / threads.max(1);
        let piece = |t: usize| {
            let rows = border(t)..border(t + 1);
            let mut values = vec![0.0; rows.len() * part.cols];
            for (row, out) in rows.clone().zip(values.chunks_exact_mut(part.cols)) {
                decode_row(part, row, out);
            }
            encode_rows_scaled(to.format, to.scaling, &values, rows.len(), part.cols)
        };
        let pieces = std::thread::scope(|s| {
            let workers: Vec<_> = (0..threads.max(1)).map(|t| s.spawn(move || piece(t))).collect();
            let done = workers.into_iter().map(|w| w.join().expect("encoding does not panic"));
            done.collect::<std::result::Result<Vec<_>, _>>()
        });
        let pieces = pieces.map_err(|e| problem(e.to_string()))?;
        Ok(joined(pieces).expect("there is a piece for each thread"))
    }
}

/// Pieces of one matrix, one below the other.
fn joined(pieces: Vec<Encoded>) -> Option<Encoded> {
    pieces
        .into_iter()
        .reduce(|mut all, next| {
            all.rows += next.rows;
            all.bytes.extend(next.bytes);
            match (&mut all.scales, next.scales) {
                (EncodedScales::Row(all), EncodedScales::Row(next)) => all.extend(next),
                (EncodedScales::None, EncodedScales::None) => {}
                (a, b) => unreachable!("{a:?} and {b:?} are not scales of rows"),
            }
            all
        })
        .map(as_stored)
}

/// Files of NVFP4 hold the divisor, which is read back as its reciprocal.
fn as_stored(mut encoded: Encoded) -> Encoded {
    if let EncodedScales::Nvfp4 { tensor, .. } = &mut encoded.scales {
        *tensor = 1.0 / (1.0 / *tensor);
    }
    encoded
}
