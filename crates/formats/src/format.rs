//! What a checkpoint file may contain.

use std::fmt;

/// How the codes of one matrix are stored.
///
/// Block formats store `block_len` consecutive inputs of a row in `block_bytes` bytes; a row is a whole
/// number of blocks. Scales that are not inside the blocks travel in [`Scales`](crate::Scales).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of the file formats")]
pub enum Format {
    F32,
    F16,
    Bf16,
    /// FP8 E4M3 (finite only, 448 the largest); one scale for the tensor, a row, or a 128 x 128 block.
    Fp8E4M3,
    /// E2M1 codes, two a byte with the even column in the low nibble; an E4M3 scale for 16 inputs and one
    /// float32 scale for the matrix, always held as a multiplier. The safetensors form.
    Nvfp4,
    /// Four-bit codes stored with +8, eight in a little-endian 32-bit word, lowest bits first; one bf16
    /// scale for each 32 inputs. The compressed-tensors `pack-quantized` form.
    Int4G32,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    /// GGUF type 39: 32 E2M1 codes under one E8M0 scale.
    Mxfp4,
    /// GGUF type 40: 64 E2M1 codes under four unsigned E4M3 scales inside the block, and perhaps one float32 scale
    /// for the matrix.
    GgufNvfp4,
}

impl Format {
    /// Every format, in the order of declaration.
    pub const ALL: [Format; 20] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Fp8E4M3,
        Format::Nvfp4,
        Format::Int4G32,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q2K,
        Format::Q3K,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
        Format::Iq4Nl,
        Format::Iq4Xs,
        Format::Mxfp4,
        Format::GgufNvfp4,
    ];

    /// Inputs in one block of codes.
    pub const fn block_len(self) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8E4M3 => 1,
            Format::Nvfp4 => 16,
            Format::Int4G32
            | Format::Q4_0
            | Format::Q4_1
            | Format::Q5_0
            | Format::Q5_1
            | Format::Q8_0
            | Format::Iq4Nl
            | Format::Mxfp4 => 32,
            Format::GgufNvfp4 => 64,
            Format::Q2K | Format::Q3K | Format::Q4K | Format::Q5K | Format::Q6K | Format::Iq4Xs => 256,
        }
    }

    /// Bytes of one block of codes, without scales that are stored elsewhere.
    pub const fn block_bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Fp8E4M3 => 1,
            Format::Nvfp4 => 8,
            Format::Int4G32 => 16,
            Format::Q4_0 | Format::Iq4Nl => 18,
            Format::Q4_1 => 20,
            Format::Q5_0 => 22,
            Format::Q5_1 => 24,
            Format::Q8_0 => 34,
            Format::Q2K => 84,
            Format::Q3K => 110,
            Format::Q4K => 144,
            Format::Q5K => 176,
            Format::Q6K => 210,
            Format::Iq4Xs => 136,
            Format::Mxfp4 => 17,
            Format::GgufNvfp4 => 36,
        }
    }

    /// Bytes of a row of `cols` codes, or `None` when `cols` is not a whole number of blocks.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if cols.is_multiple_of(self.block_len()) {
            (cols / self.block_len()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// The name that users meet in files, flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Format::F32 => "F32",
            Format::F16 => "F16",
            Format::Bf16 => "BF16",
            Format::Fp8E4M3 => "FP8_E4M3",
            Format::Nvfp4 => "NVFP4",
            Format::Int4G32 => "INT4_G32",
            Format::Q4_0 => "Q4_0",
            Format::Q4_1 => "Q4_1",
            Format::Q5_0 => "Q5_0",
            Format::Q5_1 => "Q5_1",
            Format::Q8_0 => "Q8_0",
            Format::Q2K => "Q2_K",
            Format::Q3K => "Q3_K",
            Format::Q4K => "Q4_K",
            Format::Q5K => "Q5_K",
            Format::Q6K => "Q6_K",
            Format::Iq4Nl => "IQ4_NL",
            Format::Iq4Xs => "IQ4_XS",
            Format::Mxfp4 => "MXFP4",
            Format::GgufNvfp4 => "NVFP4_GGUF",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
