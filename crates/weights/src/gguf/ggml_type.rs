//! The tensor types that GGUF files name by number, read or not.

use std::fmt;

use lapidary_formats::Format;

/// A tensor type by its number in the file. Any number can stand here; what is known of it is in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GgmlType(pub u32);

struct Known {
    number: u32,
    name: &'static str,
    kind: Kind,
}

enum Kind {
    /// Decoded by `lapidary-formats`.
    Weights(Format),
    /// Block length and bytes are known, decoding isn't there.
    Sized(u64, u64),
    /// Integers and f64: a plain array of elements of so many bytes.
    Plain(u64),
    /// Taken out of GGUF, or never given a file layout.
    Removed,
}

use Kind::{Plain, Removed, Sized, Weights};

const fn known(number: u32, name: &'static str, kind: Kind) -> Known {
    Known { number, name, kind }
}

/// Sizes are block length and bytes of a block.
const TABLE: [Known; 42] = [
    known(0, "F32", Weights(Format::F32)),
    known(1, "F16", Weights(Format::F16)),
    known(2, "Q4_0", Weights(Format::Q4_0)),
    known(3, "Q4_1", Weights(Format::Q4_1)),
    known(4, "Q4_2", Removed),
    known(5, "Q4_3", Removed),
    known(6, "Q5_0", Weights(Format::Q5_0)),
    known(7, "Q5_1", Weights(Format::Q5_1)),
    known(8, "Q8_0", Weights(Format::Q8_0)),
    known(9, "Q8_1", Sized(32, 40)),
    known(10, "Q2_K", Weights(Format::Q2K)),
    known(11, "Q3_K", Weights(Format::Q3K)),
    known(12, "Q4_K", Weights(Format::Q4K)),
    known(13, "Q5_K", Weights(Format::Q5K)),
    known(14, "Q6_K", Weights(Format::Q6K)),
    known(15, "Q8_K", Sized(256, 292)),
    known(16, "IQ2_XXS", Sized(256, 66)),
    known(17, "IQ2_XS", Sized(256, 74)),
    known(18, "IQ3_XXS", Sized(256, 98)),
    known(19, "IQ1_S", Sized(256, 50)),
    known(20, "IQ4_NL", Weights(Format::Iq4Nl)),
    known(21, "IQ3_S", Sized(256, 110)),
    known(22, "IQ2_S", Sized(256, 82)),
    known(23, "IQ4_XS", Weights(Format::Iq4Xs)),
    known(24, "I8", Plain(1)),
    known(25, "I16", Plain(2)),
    known(26, "I32", Plain(4)),
    known(27, "I64", Plain(8)),
    known(28, "F64", Plain(8)),
    known(29, "IQ1_M", Sized(256, 56)),
    known(30, "BF16", Weights(Format::Bf16)),
    known(31, "Q4_0_4_4", Removed),
    known(32, "Q4_0_4_8", Removed),
    known(33, "Q4_0_8_8", Removed),
    known(34, "TQ1_0", Sized(256, 54)),
    known(35, "TQ2_0", Sized(256, 66)),
    known(36, "IQ4_NL_4_4", Removed),
    known(37, "IQ4_NL_4_8", Removed),
    known(38, "IQ4_NL_8_8", Removed),
    known(39, "MXFP4", Weights(Format::Mxfp4)),
    known(40, "NVFP4", Weights(Format::GgufNvfp4)),
    known(41, "Q1_0", Sized(128, 18)),
];

impl GgmlType {
    /// The type in which GGUF stores a format; none for the formats that only safetensors files have.
    pub fn of(format: Format) -> Option<GgmlType> {
        let entry = TABLE.iter().find(|known| matches!(known.kind, Weights(f) if f == format))?;
        Some(GgmlType(entry.number))
    }

    /// The format that decodes this type, if there is one.
    pub fn format(self) -> Option<Format> {
        match self.known()?.kind {
            Weights(format) => Some(format),
            _ => None,
        }
    }

    /// Whether this is a plain array of integers or f64, data that isn't weights.
    pub fn is_plain(self) -> bool {
        matches!(self.known(), Some(Known { kind: Plain(_), .. }))
    }

    /// Elements and bytes of a block; none for types that were removed or aren't known.
    pub fn block(self) -> Option<(u64, u64)> {
        match self.known()?.kind {
            Weights(format) => Some((format.block_len() as u64, format.block_bytes() as u64)),
            Sized(len, bytes) => Some((len, bytes)),
            Plain(bytes) => Some((1, bytes)),
            Removed => None,
        }
    }

    fn known(self) -> Option<&'static Known> {
        TABLE.get(self.0 as usize)
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some(known) => f.write_str(known.name),
            None => write!(f, "number {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_of_numbers() {
        assert!(TABLE.iter().enumerate().all(|(i, known)| known.number == i as u32));
    }

    #[test]
    fn formats_and_types_map_onto_each_other() {
        let gguf = Format::ALL.into_iter().filter_map(GgmlType::of).count();
        assert_eq!(gguf, Format::ALL.len() - 3);
        for format in Format::ALL {
            assert!(GgmlType::of(format).is_none_or(|kind| kind.format() == Some(format)));
        }
        assert_eq!(GgmlType::of(Format::GgufNvfp4), Some(GgmlType(40)));
        assert_eq!(GgmlType(77).to_string(), "number 77");
    }
}
