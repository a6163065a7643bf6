//! Which tensor gets which type: the choice that llama-quantize makes for Gemma 4.

use lapidary_formats::Format;

use super::shape::{Fill, Shape, Tensor};
use crate::error::{Error, Result};

/// A choice of types, named as files of it are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants are the mixes' names")]
pub enum Mix {
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4KM,
}

impl Mix {
    /// Every mix.
    pub const ALL: [Mix; 5] = [Mix::F16, Mix::Bf16, Mix::Q8_0, Mix::Q4_0, Mix::Q4KM];

    /// Its name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Mix::F16 => "f16",
            Mix::Bf16 => "bf16",
            Mix::Q8_0 => "q8_0",
            Mix::Q4_0 => "q4_0",
            Mix::Q4KM => "q4_k_m",
        }
    }

    /// The mix of this name.
    pub fn from_name(name: &str) -> Option<Mix> {
        Mix::ALL.into_iter().find(|mix| mix.name() == name)
    }

    /// The number by which files name it.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Mix::F16 => 1,
            Mix::Q4_0 => 2,
            Mix::Q8_0 => 7,
            Mix::Q4KM => 15,
            Mix::Bf16 => 32,
        }
    }

    /// The type of most matrices.
    fn base(self) -> Format {
        match self {
            Mix::F16 => Format::F16,
            Mix::Bf16 => Format::Bf16,
            Mix::Q8_0 => Format::Q8_0,
            Mix::Q4_0 => Format::Q4_0,
            Mix::Q4KM => Format::Q4K,
        }
    }

    /// Gives every tensor its type.
    pub(super) fn assign(self, shape: &Shape, tensors: Vec<Tensor>) -> Result<Vec<(Tensor, Format)>> {
        let is_values = |t: &Tensor| t.name.ends_with("attn_v.weight");
        let values = tensors.iter().filter(|t| is_values(t)).count();
        let mut values_so_far = 0;
        let mut assigned = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let (place, of) = match (is_values(&tensor), tensor.layer()) {
                (true, _) => (values_so_far, values),
                (false, layer) => (layer.unwrap_or(0), shape.layers),
            };
            values_so_far += usize::from(is_values(&tensor));
            let format = whole_blocks(self.wanted(&tensor, place, of), &tensor)?;
            assigned.push((tensor, format));
        }
        Ok(assigned)
    }

    /// The type of a tensor that is number `place` of `of` of its kind.
    fn wanted(self, tensor: &Tensor, place: usize, of: usize) -> Format {
        if !matches!(tensor.fill, Fill::Matrix { .. }) {
            return Format::F32;
        }
        let name = tensor.name.as_str();
        let is_table = name == "token_embd.weight" || name == "per_layer_token_embd.weight";
        let is_sensitive = name.contains("attn_v.") || name.contains("ffn_down");
        match self {
            Mix::Bf16 => Format::Bf16,
            _ if name == "per_layer_model_proj.weight" => Format::F16,
            Mix::Q4_0 | Mix::Q4KM if is_table => Format::Q6K,
            Mix::Q4KM if is_sensitive && more_bits(place, of) => Format::Q6K,
            mix => mix.base(),
        }
    }
}

/// Whether a matrix at this place gets more bits than most: the first and the last eighth, and every third between.
pub(crate) fn more_bits(place: usize, of: usize) -> bool {
    let eighth = of / 8;
    place < eighth || place >= 7 * of / 8 || (place - eighth) % 3 == 2
}

/// K-quants have blocks of 256; a row that isn't whole blocks gets the type of blocks of 32 that comes nearest.
fn whole_blocks(format: Format, tensor: &Tensor) -> Result<Format> {
    let cols = tensor.dims[0] as usize;
    let fallback = match format {
        f if cols.is_multiple_of(f.block_len()) => return Ok(f),
        Format::Q4K => Format::Q5_0,
        Format::Q6K => Format::Q8_0,
        f => f,
    };
    if cols.is_multiple_of(fallback.block_len()) {
        return Ok(fallback);
    }
    let problem = format!("tensor {} has rows of {cols} values, which {fallback} can't hold", tensor.name);
    Err(Error::Synth { problem })
}
