//! Which tensor of a GGUF file gets which type: the choices that llama-quantize makes for Gemma.

use lapidary_formats::Format;

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

/// A matrix that gets a type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Values in a row.
    pub cols: usize,
}

/// What the choice depends on beside the matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub layers: usize,
    /// 0 for a dense model.
    pub experts: usize,
    /// The type of matrices that every mix leaves plain.
    pub plain: Format,
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
    pub(crate) fn file_type(self) -> u32 {
        match self {
            Mix::F16 => 1,
            Mix::Q4_0 => 2,
            Mix::Q8_0 => 7,
            Mix::Q4KM => 15,
            Mix::Bf16 => 32,
        }
    }

    /// The type of most matrices.
    pub(crate) fn base(self) -> Format {
        match self {
            Mix::F16 => Format::F16,
            Mix::Bf16 => Format::Bf16,
            Mix::Q8_0 => Format::Q8_0,
            Mix::Q4_0 => Format::Q4_0,
            Mix::Q4KM => Format::Q4K,
        }
    }

    /// The type that each of a file's matrices should have, in the file's order; whether its rows are whole blocks of
    /// that is another matter ([`whole_blocks`]).
    pub(crate) fn formats(self, model: Model, matrices: &[Matrix<'_>]) -> Vec<Format> {
        let is_values = |m: &Matrix<'_>| m.name.ends_with("attn_v.weight");
        let values = matrices.iter().filter(|m| is_values(m)).count();
        let mut values_so_far = 0;
        let choose = |m: &Matrix<'_>| {
            let (place, of) = match is_values(m) {
                true => (values_so_far, values),
                false => (layer_of(m.name).unwrap_or(0), model.layers),
            };
            values_so_far += usize::from(is_values(m));
            self.wanted(model, m.name, place, of)
        };
        matrices.iter().map(choose).collect()
    }

    /// The type of a matrix that is number `place` of `of` of its kind.
    fn wanted(self, model: Model, name: &str, place: usize, of: usize) -> Format {
        let is_table = name == "token_embd.weight" || name == "per_layer_token_embd.weight";
        let is_sensitive = name.contains("attn_v.") || name.contains("ffn_down");
        // Models of eight experts have attention so small beside these that it gets more bits.
        let eight = model.experts == 8;
        match self {
            Mix::Bf16 => Format::Bf16,
            _ if name == "per_layer_model_proj.weight" => model.plain,
            Mix::Q4_0 | Mix::Q4KM if is_table || name == "output.weight" => Format::Q6K,
            Mix::Q4_0 | Mix::Q4KM if eight && (name.contains("attn_v.") || name.contains("attn_k.")) => {
                Format::Q8_0
            }
            Mix::Q4KM if eight && name.contains("attn_output.") => Format::Q5K,
            Mix::Q4KM if is_sensitive && more_bits(place, of) => Format::Q6K,
            mix => mix.base(),
        }
    }
}

fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Whether a matrix at this place gets more bits than most: the first and the last eighth, and every third between.
fn more_bits(place: usize, of: usize) -> bool {
    let eighth = of / 8;
    place < eighth || place >= 7 * of / 8 || (place - eighth) % 3 == 2
}

/// K-quants have blocks of 256; a row that isn't whole blocks gets the type of blocks of 32 that comes nearest. `None`
/// for a row that isn't whole blocks of that either.
pub(crate) fn whole_blocks(format: Format, cols: usize) -> Option<Format> {
    let fallback = match format {
        Format::Q4K => Format::Q5_0,
        Format::Q5K => Format::Q5_1,
        Format::Q6K => Format::Q8_0,
        other => other,
    };
    [format, fallback].into_iter().find(|f| cols.is_multiple_of(f.block_len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formats(experts: usize, layers: usize, names: &[String]) -> Vec<Format> {
        let matrices: Vec<Matrix<'_>> = names.iter().map(|name| Matrix { name, cols: 256 }).collect();
        Mix::Q4KM.formats(Model { layers, experts, plain: Format::Bf16 }, &matrices)
    }

    /// Values are counted by themselves, since not every layer has a matrix for them.
    #[test]
    fn the_first_and_last_eighth_and_every_third_get_more_bits() {
        let layers = [0, 1, 2, 4, 5, 6, 8, 9];
        let names: Vec<String> = layers.iter().map(|l| format!("blk.{l}.attn_v.weight")).collect();
        let six: Vec<usize> = (0..8).filter(|&i| formats(0, 24, &names)[i] == Format::Q6K).collect();
        assert_eq!(six, [0, 3, 6, 7]);
        let names: Vec<String> = (0..24).map(|l| format!("blk.{l}.ffn_down.weight")).collect();
        let six: Vec<usize> = (0..24).filter(|&i| formats(0, 24, &names)[i] == Format::Q6K).collect();
        assert_eq!(six, [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]);
    }

    #[test]
    fn eight_experts_leave_attention_more_bits() {
        let names = ["attn_q", "attn_k", "attn_v", "attn_output"].map(|n| format!("blk.3.{n}.weight"));
        assert_eq!(formats(8, 24, &names), [Format::Q4K, Format::Q8_0, Format::Q8_0, Format::Q5K]);
        // The only values of a file are its last, which every model gives more bits.
        assert_eq!(formats(128, 24, &names), [Format::Q4K, Format::Q4K, Format::Q6K, Format::Q4K]);
    }
}
