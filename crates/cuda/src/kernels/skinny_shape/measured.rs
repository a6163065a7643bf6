//! Launch shapes that were measured.

use crate::pack::Form;

/// What the sweep over Gemma's matrices found best (`cargo bench ... sweep`, one H200, 2026-11-30, one row of four bits
/// 2026-12-01, where more planes have to gain 0.1 us each): outputs, inputs, gated,
/// then for bf16, FP8, NVFP4, four-bit integers, Q4_K and Sub16 the shape for 1 row and for 2 to 7: where x is kept and strips
/// a warp (G global, T global and two, S shared, D shared and two; in the kernels for one row S and G are one strip, D and T
/// two), log2 of the groups of strips, planes. `---` leaves the choice to the model of time.
#[rustfmt::skip]
pub(super) static MEASURED: &[(usize, usize, bool, &str)] = &[
    (16384, 5376, false, "G11 T11 D01 T01 D11 T11 S21 T11 S21 G01 S21 G21"), // 31B qkv
    (5376, 8192, false, "S13 S03 S02 S13 D03 T13 S11 T13 D12 G23 S02 G02"), // 31B o
    (43008, 5376, true, "G11 T11 S11 T01 D01 T01 D01 T01 S11 G11 G11 G11"), // 31B gate+up
    (5376, 21504, false, "G13 T03 T03 T03 D13 T13 S13 T03 S03 G13 S13 G13"), // 31B down
    (18432, 5376, false, "--- --- S02 --- D03 --- S01 --- D01 --- --- ---"), // 31B full qkv
    (5376, 16384, false, "--- --- S03 --- D03 --- S02 --- S02 --- --- ---"), // 31B full o
    (262144, 5376, false, "--- --- S11 --- D01 --- D01 --- S11 --- --- ---"), // 31B head
    (8192, 3840, false, "S11 --- T01 --- S22 --- S22 --- S22 --- S01 ---"), // 12B qkv
    (8704, 3840, false, "S23 --- S01 --- D13 --- D13 --- D13 --- S01 ---"), // 12B full qkv
    (3840, 4096, false, "S02 --- T02 --- D02 --- D02 --- D02 --- G12 ---"), // 12B o
    (3840, 8192, false, "S01 --- S12 --- D02 --- S23 --- S23 --- G02 ---"), // 12B full o
    (30720, 3840, true, "D01 --- S21 --- D01 --- S11 --- D01 --- G11 ---"), // 12B gate+up
    (3840, 15360, false, "G03 --- S03 --- D02 --- S02 --- S12 --- S03 ---"), // 12B down
    (262144, 3840, false, "S01 --- S11 --- D01 --- D01 --- D01 --- G01 ---"), // 12B head
    (8192, 2816, false, "S01 G13 D12 T01 S22 T12 S22 T01 S22 G11 S12 S12"), // 26B qkv
    (2816, 4096, false, "T03 T03 T13 T13 D13 T13 D01 T13 D01 G12 G12 G13"), // 26B o
    (4224, 2816, true, "S11 S11 S11 T01 D01 T01 D01 T01 D01 G11 G11 G11"), // 26B gate+up
    (2816, 2112, false, "S12 T02 T13 T13 D13 T13 D13 T13 --- --- --- ---"), // 26B down
    (3072, 2560, false, "S12 --- T02 --- D02 --- D02 --- D02 --- G12 ---"), // E4B qkv
    (20480, 2560, true, "S11 --- S11 --- S21 --- S21 --- S21 --- G11 ---"), // E4B gate+up
    (2560, 10240, false, "G03 --- T03 --- D03 --- S12 --- S12 --- G13 ---"), // E4B down
    (6144, 2560, false, "G12 --- T01 --- S11 --- S11 --- S11 --- G11 ---"), // E4B full qkv
    (2048, 2560, false, "S12 --- G13 --- S02 --- S13 --- S02 --- G13 ---"), // E4B q
    (4096, 2560, false, "T03 --- T13 --- D13 --- D13 --- D13 --- G23 ---"), // E4B full q
    (2560, 2048, false, "D02 --- G12 --- S11 --- S01 --- S01 --- G12 ---"), // E4B o
    (2560, 4096, false, "T03 --- T03 --- D02 --- D02 --- D02 --- G13 ---"), // E4B full o
    (2560, 1536, false, "T13 T02 G13 G12 S11 G12 S01 G12 S01 G12 G13 G12"), // E2B qkv
    (1536, 2048, false, "T02 T02 G02 G02 S02 G02 S02 G02 S02 G13 G02 G02"), // E2B o
    (12288, 1536, true, "S11 S11 T11 T11 D11 T11 S21 T11 S21 G21 G21 G21"), // E2B gate+up
    (1536, 6144, false, "S02 T03 G02 T03 D03 G02 D03 G02 D03 G02 G02 G02"), // E2B down
    (24576, 1536, true, "S11 S11 S11 S11 S21 T11 D11 T21 S21 G31 S11 S11"), // E2B gate+up wide
    (1536, 12288, false, "S02 G02 S02 G02 D03 G02 D03 G02 D03 G02 G02 G02"), // E2B down wide
    (262144, 1536, false, "S11 S11 S11 S11 D11 D11 D11 D11 D21 S21 S11 S11"), // E2B head
    (5120, 1536, false, "T13 --- T01 --- D01 --- D01 --- D01 --- G11 ---"), // E2B full qkv
    (2048, 1536, false, "T13 --- G13 --- D03 --- S01 --- D02 --- G13 ---"), // E2B q
    (4096, 1536, false, "T13 --- T13 --- S01 --- S01 --- S01 --- G12 ---"), // E2B full q
    (1536, 4096, false, "S02 --- G02 --- S02 --- S02 --- S02 --- G02 ---"), // E2B full o
];

/// What was faster for one row in whole steps (`lapidary bench`, one H200, 2026-12-01) than the best alone: form, outputs, inputs,
/// shape. There x from the second-level cache waits behind the weights of the next product, and the kernel behind it adds up planes.
pub(super) static IN_A_STEP: &[(Form, usize, usize, &str)] = &[
    (Form::Fp8, 16384, 5376, "S01"),   // 31B qkv
    (Form::Fp8, 5376, 21504, "S03"),   // 31B down
    (Form::Fp8, 8192, 3840, "S11"),    // 12B qkv
    (Form::Fp8, 3840, 4096, "S12"),    // 12B o
    (Form::Fp8, 30720, 3840, "S11"),   // 12B gate+up
    (Form::Fp8, 8192, 2816, "D12"),    // 26B qkv
    (Form::Fp8, 2816, 4096, "D03"),    // 26B o
    (Form::Nvfp4, 16384, 5376, "D02"), // 31B qkv
    (Form::Nvfp4, 5376, 8192, "S12"),  // 31B o
    (Form::Nvfp4, 5376, 21504, "D03"), // 31B down
    (Form::Nvfp4, 8192, 2816, "D02"),  // 26B qkv
    (Form::Nvfp4, 2816, 4096, "S12"),  // 26B o
];

/// The same for chosen experts: gate and up (U) and down (X).
pub(super) static EXPERTS_IN_A_STEP: &[(Form, usize, usize, &str)] =
    &[(Form::Fp8, 2816, 704, "X02"), (Form::Nvfp4, 1408, 2816, "U21"), (Form::Nvfp4, 2816, 704, "X01")];
