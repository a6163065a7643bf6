//! The packed forms and the sizes that follow from them.

use lapidary_formats::{Format, Scales, TensorView};

use super::STRIP_ROWS;

/// How a packed matrix is laid out and which kernels multiply with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// bf16: BF16 exactly, F16, F32, Q2_K and MXFP4 rounded (MXFP4 exactly).
    Bf16,
    /// FP8 E4M3 with a scale for the matrix or a row, applied to the sum.
    Fp8,
    /// FP8 E4M3 with a scale for 128 x 128.
    Fp8Block,
    /// NVFP4 of either file kind.
    Nvfp4,
    /// Four bits around 8, f16 scale for 32: Q4_0.
    Int4,
    /// The same with a bf16 scale: INT4.
    Int4Bf16,
    /// Four bits, f16 scale and minimum for 32: Q4_1.
    Int4Min,
    /// Signed bytes, f16 scale for 32: Q8_0, Q5_0, IQ4_NL.
    Int8,
    /// Bytes, f16 scale and minimum for 32: Q5_1.
    Int8Min,
    /// Q4_K with its headers as in the file.
    Q4K,
    /// Q5_K's headers, codes as bytes.
    Q5K,
    /// Signed bytes, a signed byte scale for 16 under an f16 one for 256: Q6_K, Q3_K, IQ4_XS.
    Sub16,
}

impl Form {
    /// Every form.
    pub const ALL: [Form; 12] = [
        Form::Bf16,
        Form::Fp8,
        Form::Fp8Block,
        Form::Nvfp4,
        Form::Int4,
        Form::Int4Bf16,
        Form::Int4Min,
        Form::Int8,
        Form::Int8Min,
        Form::Q4K,
        Form::Q5K,
        Form::Sub16,
    ];

    /// The form that a matrix is packed into.
    pub fn of(view: &TensorView<'_>) -> Form {
        match (view.format, &view.scales) {
            (Format::Fp8E4M3, Scales::Block128 { .. }) => Form::Fp8Block,
            (Format::Fp8E4M3, _) => Form::Fp8,
            (Format::Nvfp4 | Format::GgufNvfp4, _) => Form::Nvfp4,
            (Format::Q4_0, _) => Form::Int4,
            (Format::Int4G32, _) => Form::Int4Bf16,
            (Format::Q4_1, _) => Form::Int4Min,
            (Format::Q8_0 | Format::Q5_0 | Format::Iq4Nl, _) => Form::Int8,
            (Format::Q5_1, _) => Form::Int8Min,
            (Format::Q4K, _) => Form::Q4K,
            (Format::Q5K, _) => Form::Q5K,
            (Format::Q6K | Format::Q3K | Format::Iq4Xs, _) => Form::Sub16,
            _ => Form::Bf16,
        }
    }

    /// Whether a matrix of `format` decodes to the same numbers after packing.
    pub fn is_exact(format: Format) -> bool {
        !matches!(format, Format::F32 | Format::F16 | Format::Q2K)
    }

    /// The name in kernel files: `kernels/skinny_NAME_sm90.cu`.
    pub const fn name(self) -> &'static str {
        match self {
            Form::Bf16 => "bf16",
            Form::Fp8 => "fp8",
            Form::Fp8Block => "fp8_block",
            Form::Nvfp4 => "nvfp4",
            Form::Int4 => "int4",
            Form::Int4Bf16 => "int4_bf16",
            Form::Int4Min => "int4_min",
            Form::Int8 => "int8",
            Form::Int8Min => "int8_min",
            Form::Q4K => "q4_k",
            Form::Q5K => "q5_k",
            Form::Sub16 => "sub16",
        }
    }

    /// Inputs of a chunk.
    pub const fn chunk_inputs(self) -> usize {
        match self {
            Form::Q4K | Form::Q5K | Form::Sub16 => 256,
            _ => 64,
        }
    }

    /// Bytes of a chunk, a multiple of 16.
    pub const fn chunk_bytes(self) -> usize {
        match self {
            Form::Bf16 => 2048,
            Form::Fp8 => 1024,
            Form::Fp8Block => 1040,
            Form::Nvfp4 | Form::Int4 | Form::Int4Bf16 => 576,
            Form::Int4Min => 640,
            Form::Int8 => 1088,
            Form::Int8Min => 1152,
            Form::Q4K => 2304,
            Form::Q5K => 4352,
            Form::Sub16 => 4384,
        }
    }

    /// Bytes of a packed matrix beyond those in the file, scales beside the codes counted in both; negative where
    /// it shrinks.
    pub fn added_bytes(view: &TensorView<'_>) -> i64 {
        let beside = match &view.scales {
            Scales::None | Scales::Tensor(_) => 0,
            Scales::Row(scales) => scales.len() * 4,
            Scales::Block128 { .. } => view.rows.div_ceil(128) * view.cols.div_ceil(128) * 4,
            Scales::Nvfp4 { blocks, .. } => blocks.len(),
            Scales::Group32Bf16(bytes) => bytes.len(),
        };
        let scales = super::row_scales(view).map_or(0, |s| s.len() * 4);
        (PackedShape::of(view).bytes() + scales) as i64 - (view.bytes.len() + beside) as i64
    }
}

/// The size of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedShape {
    /// Layout.
    pub form: Form,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

impl PackedShape {
    /// The shape that `view` gets.
    pub fn of(view: &TensorView<'_>) -> PackedShape {
        PackedShape { form: Form::of(view), rows: view.rows, cols: view.cols }
    }

    /// Strips of 16 outputs, the last filled up with zeros.
    pub const fn strips(self) -> usize {
        self.rows.div_ceil(STRIP_ROWS)
    }

    /// Chunks of a strip, the last filled up with zeros.
    pub const fn chunks(self) -> usize {
        self.cols.div_ceil(self.form.chunk_inputs())
    }

    /// Bytes of a strip.
    pub const fn strip_bytes(self) -> usize {
        self.chunks() * self.form.chunk_bytes()
    }

    /// Bytes of all strips.
    pub const fn bytes(self) -> usize {
        self.strips() * self.strip_bytes()
    }
}
