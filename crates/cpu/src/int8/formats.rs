//! The formats that are packed: what their codes and scales are, and where the file keeps them.

use std::ops::Range;

use lapidary_formats::codec::iq4_nl::LEVELS;
use lapidary_formats::fp4::E2M1_DOUBLED;
use lapidary_formats::{Format, Scales};

use super::activations::BLOCK;
use super::codes::{Codes, Eight, Five, Four, Six, Three, Two, Words};
use super::scaling::{self, Scaling};

/// A packed format: a value is `scale * (code - OFFSET)`, or `scale * (LEVELS[code] - OFFSET)`, and perhaps a minimum.
pub(crate) trait Kind {
    /// As the file has it.
    const FORMAT: Format;
    /// Bytes of a row's super-block in the file.
    const FILE_BYTES: usize =
        Self::Scaling::BLOCKS * BLOCK / Self::FORMAT.block_len() * Self::FORMAT.block_bytes();
    /// Subtracted from every code or level.
    const OFFSET: i32 = 0;
    /// Whether codes (or levels) are signed bytes.
    const SIGNED: bool = false;
    /// What codes index, if they do.
    const LEVELS: Option<&'static [i8; 16]> = None;
    /// Whether code 8 is a negative zero when a row is decoded.
    const NEGATIVE_ZERO: bool = false;
    /// Layout of the codes.
    type Codes: Codes;
    /// Rule of the scales.
    type Scaling: Scaling;

    /// Where in the file's super-block the codes are.
    const CODES: Range<usize>;

    /// The codes of 32 inputs, the `block`th of the file's super-block.
    fn words(file: &impl Source, block: usize) -> Words;
}

/// A row's super-block as the file has it.
pub(crate) trait Source {
    /// The four bytes from `at` on.
    fn word(&self, at: usize) -> u32;
}

impl Source for &[u8] {
    #[inline(always)]
    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self[at..at + 4].try_into().expect("four bytes"))
    }
}

/// 16 bytes from `at` on: inputs 0 to 15 in the low nibbles, 16 to 31 in the high ones.
#[inline(always)]
fn nibbles(file: &impl Source, at: usize) -> Words {
    std::array::from_fn(|v| file.word(at + 4 * (v % 4)) >> (4 * (v / 4)) & 0x0F0F_0F0F)
}

/// 16 bytes, each with two neighbouring inputs, the even one in the low nibble.
#[inline(always)]
fn neighbours(file: &impl Source) -> Words {
    std::array::from_fn(|v| {
        let x = file.word(v / 2 * 4) >> (16 * (v % 2));
        x & 15 | (x & 0xF0) << 4 | (x & 0xF00) << 8 | (x & 0xF000) << 12
    })
}

/// 16 bytes from `at` on, eight for each half: inputs 0 to 7 in the low nibbles, 8 to 15 in the high ones.
#[inline(always)]
fn eights(file: &impl Source, at: usize) -> Words {
    std::array::from_fn(|v| file.word(at + 8 * (v / 4) + 4 * (v % 2)) >> (4 * (v / 2 % 2)) & 0x0F0F_0F0F)
}

/// The bits of the 32-bit word at `at`, bit i for input i, as the fifth bits of the codes.
#[inline(always)]
fn fifth_bits(file: &impl Source, at: usize) -> Words {
    let bits = file.word(at);
    // A product spreads four bits over four bytes.
    std::array::from_fn(|v| (bits >> (4 * v) & 15).wrapping_mul(0x0020_4081) << 4 & 0x1010_1010)
}

#[inline(always)]
fn joined(a: Words, b: Words) -> Words {
    std::array::from_fn(|v| a[v] | b[v])
}

/// 32 bytes from `at` on, one an input: the nibble at bit `shift` of each.
#[inline(always)]
fn nibble_of(file: &impl Source, at: usize, shift: u32) -> Words {
    std::array::from_fn(|v| file.word(at + 4 * v) >> shift & 0x0F0F_0F0F)
}

/// 32 bytes from `at` on, one an input: the two bits at bit `shift` of each, moved up by `to`.
#[inline(always)]
fn two_bits_of(file: &impl Source, at: usize, shift: usize, to: u32) -> Words {
    std::array::from_fn(|v| (file.word(at + 4 * v) >> shift & 0x0303_0303) << to)
}

/// 32 bytes from `at` on, one an input: the bit `shift` of each, moved up by `to`.
#[inline(always)]
fn bit_of(file: &impl Source, at: usize, shift: usize, to: u32) -> Words {
    std::array::from_fn(|v| (file.word(at + 4 * v) >> shift & 0x0101_0101) << to)
}

macro_rules! kinds {
    ($($name:ident: $at:expr, $codes:ty, $scaling:ty, { $($const:ident = $value:expr),* }, |$file:ident, $block:ident| $words:expr;)*) => {
        $(
            pub(crate) struct $name;
            impl Kind for $name {
                const FORMAT: Format = Format::$name;
                kinds!(@consts $($const = $value),*);
                const CODES: Range<usize> = $at;
                type Codes = $codes;
                type Scaling = $scaling;
                #[inline(always)]
                fn words($file: &impl Source, $block: usize) -> Words {
                    $words
                }
            }
        )*

        /// Whether matrices of this format are packed for int8 products.
        pub(crate) fn is_packed(format: Format) -> bool {
            matches!(format, $(Format::$name)|*)
        }

        /// Runs the body with `K` the kind of `format`, if it is packed.
        macro_rules! with_kind {
            ($format:expr, $k:ident => $body:expr) => {
                match $format {
                    $(lapidary_formats::Format::$name => {
                        type $k = $crate::int8::formats::$name;
                        Some($body)
                    })*
                    _ => None,
                }
            };
        }
        pub(crate) use with_kind;
    };
    (@consts $($const:ident = $value:expr),*) => {
        $(kinds!(@const $const = $value);)*
    };
    (@const OFFSET = $value:expr) => { const OFFSET: i32 = $value; };
    (@const SIGNED = $value:expr) => { const SIGNED: bool = $value; };
    (@const NEGATIVE_ZERO = $value:expr) => { const NEGATIVE_ZERO: bool = $value; };
    (@const LEVELS = $value:expr) => { const LEVELS: Option<&'static [i8; 16]> = Some($value); };
}

/// The largest E2M1 number doubled.
const TWELVE: i32 = 12;

/// The E2M1 numbers doubled, by code, moved up by [`TWELVE`]: without signs they are multiplied as they are.
const DOUBLED: &[i8; 16] = &{
    let mut levels = E2M1_DOUBLED;
    let mut code = 0;
    while code < 16 {
        levels[code] += TWELVE as i8;
        code += 1;
    }
    levels
};

kinds! {
    Q4_0: 2..18, Four, scaling::Plain, { OFFSET = 8 }, |f, _b| nibbles(f, 2);
    Q4_1: 4..20, Four, scaling::Affine, {}, |f, _b| nibbles(f, 4);
    Q5_0: 2..22, Five, scaling::Plain, { OFFSET = 16 }, |f, _b| joined(nibbles(f, 6), fifth_bits(f, 2));
    Q5_1: 4..24, Five, scaling::Affine, {}, |f, _b| joined(nibbles(f, 8), fifth_bits(f, 4));
    Q8_0: 2..34, Eight, scaling::Plain, { SIGNED = true }, |f, _b| std::array::from_fn(|v| f.word(2 + 4 * v));
    Iq4Nl: 2..18, Four, scaling::Plain, { SIGNED = true, LEVELS = &LEVELS }, |f, _b| nibbles(f, 2);
    Mxfp4: 1..17, Four, scaling::Exponent, { OFFSET = TWELVE, LEVELS = DOUBLED }, |f, _b| nibbles(f, 1);
    Nvfp4: 0..16, Four, scaling::E4m3Beside, { OFFSET = TWELVE, LEVELS = DOUBLED, NEGATIVE_ZERO = true },
        |f, _b| neighbours(f);
    GgufNvfp4: 4..36, Four, scaling::E4m3Inside, { OFFSET = TWELVE, LEVELS = DOUBLED }, |f, b| eights(f, 4 + 16 * b);
    Int4G32: 0..16, Four, scaling::Bf16Beside, { OFFSET = 8 }, |f, _b| neighbours(f);
    Q2K: 16..80, Two, scaling::NibbleHalves, {}, |f, b| two_bits_of(f, 16 + b / 4 * 32, b % 4 * 2, 0);
    Q3K: 0..96, Three, scaling::SignedHalves<true>, { OFFSET = 4 },
        |f, b| joined(two_bits_of(f, 32 + b / 4 * 32, b % 4 * 2, 0), bit_of(f, 0, b, 2));
    Q4K: 16..144, Four, scaling::Six, {}, |f, b| nibble_of(f, 16 + b / 2 * 32, b as u32 % 2 * 4);
    Q5K: 16..176, Five, scaling::Six, {},
        |f, b| joined(nibble_of(f, 48 + b / 2 * 32, b as u32 % 2 * 4), bit_of(f, 16, b, 4));
    Q6K: 0..192, Six, scaling::SignedHalves<false>, { OFFSET = 32 },
        |f, b| joined(
            nibble_of(f, b / 4 * 64 + b % 2 * 32, b as u32 % 4 / 2 * 4),
            two_bits_of(f, 128 + b / 4 * 32, b % 4 * 2, 4),
        );
    Iq4Xs: 8..136, Four, scaling::Signed, { SIGNED = true, LEVELS = &LEVELS }, |f, b| nibbles(f, 8 + 16 * b);
}

/// Scales beside the codes, as packing takes them: bytes that go with the blocks, and one multiplier for all.
pub(crate) fn beside<'a>(scales: &Scales<'a>) -> (&'a [u8], f32) {
    match scales {
        Scales::Nvfp4 { blocks, tensor } => (blocks, *tensor),
        Scales::Group32Bf16(bytes) => (bytes, 1.0),
        Scales::Tensor(scale) => (&[], *scale),
        _ => (&[], 1.0),
    }
}
