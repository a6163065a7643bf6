//! The launch shapes of products for 1 to 16 rows: which of a form's kernels runs, how a block's warps share strips and
//! inputs, and into how many planes k is cut. [`Choice::of`] decides; [`MEASURED`] is what a sweep over Gemma's matrices
//! found best (docs/performance.md), a plain model of time serves every other matrix.

use super::skinny_gemm::{MAX_EXPERTS, MAX_PLANES};
use crate::driver::Kernel;
use crate::pack::{Form, PackedShape};

/// Which of a form's kernels runs, and in what shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub(super) variant: Variant,
    /// Column tiles of 8 rows.
    pub(super) tiles: usize,
    /// Log2 of the groups of strips among a block's eight warps.
    pub(super) lwm: usize,
    /// Parts of k whose sums are written apart.
    pub planes: usize,
    /// Blocks of a plane.
    pub(super) blocks: usize,
    /// Whether a block keeps row scales beside its stages.
    pub(super) scaled: bool,
    /// Experts whose inputs one sum runs over; 1 for a plain product.
    pub(super) groups: usize,
    /// Whether the ring has more stages.
    pub(super) deep: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// x from global memory, one strip a warp.
    Global,
    /// Two strips a warp.
    GlobalTwo,
    /// x in shared memory.
    Shared,
    /// Two strips a warp.
    SharedTwo,
    /// One strip a warp and the router in the launch's first blocks; x from global memory.
    Routed,
    /// x in shared memory.
    RoutedShared,
    Up,
    /// x in shared memory.
    UpShared,
    Down,
    /// One row (`kernels/common/row.cuh`); x in shared memory.
    Row,
    /// Two strips a warp.
    RowTwo,
    RowRouted,
    RowUp,
    RowDown,
}

impl Variant {
    fn strips(self) -> usize {
        match self {
            Variant::GlobalTwo | Variant::SharedTwo | Variant::RowTwo => 2,
            _ => 1,
        }
    }

    /// Whether it is a kernel for one row.
    fn one_row(self) -> bool {
        use Variant::{Row, RowDown, RowRouted, RowTwo, RowUp};
        matches!(self, Row | RowTwo | RowRouted | RowUp | RowDown)
    }

    /// What a single row runs on where its form has a kernel for it.
    pub(super) fn for_one_row(self) -> Variant {
        match self {
            Variant::Global | Variant::Shared => Variant::Row,
            Variant::GlobalTwo | Variant::SharedTwo => Variant::RowTwo,
            Variant::Routed | Variant::RoutedShared => Variant::RowRouted,
            Variant::Up | Variant::UpShared => Variant::RowUp,
            Variant::Down => Variant::RowDown,
            other => other,
        }
    }
}

/// Chunks a warp and stage, and stages, of the kernels for one row: those with one strip a warp, then those
/// with two.
const fn row_ring(form: Form) -> Option<[(usize, usize); 2]> {
    match form {
        Form::Nvfp4 => Some([(4, 4), (4, 2)]),
        Form::Int4 | Form::Int4Bf16 | Form::Int4Min => Some([(4, 4), (4, 2)]),
        Form::Q4K => Some([(1, 4), (1, 2)]),
        Form::Fp8 | Form::Fp8Block => Some([(2, 4), (1, 4)]),
        _ => None,
    }
}

/// Stages of the kernels for one row of a matrix that several rings full of it make up.
const fn deep_stages(form: Form) -> Option<usize> {
    match form {
        Form::Fp8 | Form::Fp8Block => Some(6),
        _ => None,
    }
}

/// Whether one row of x has kernels of its own (`kernels/common/row.cuh`).
pub(crate) const fn has_row_kernel(form: Form) -> bool {
    row_ring(form).is_some()
}

/// Chunks a warp and stage, and stages, for one strip a warp and for two; as in `kernels/skinny_FORM_sm90.cu`.
const fn ring(form: Form, two: bool) -> Option<(usize, usize)> {
    match (form, two) {
        (Form::Bf16, false) => Some((1, 5)),
        (Form::Fp8 | Form::Fp8Block | Form::Int8 | Form::Int8Min, false) => Some((2, 4)),
        (Form::Nvfp4 | Form::Int4 | Form::Int4Bf16 | Form::Int4Min, false) => Some((4, 4)),
        (Form::Q4K, false) => Some((1, 4)),
        (Form::Q5K | Form::Sub16, false) => Some((1, 2)),
        (Form::Bf16 | Form::Q4K, true) => Some((1, 2)),
        (Form::Fp8 | Form::Fp8Block | Form::Int8 | Form::Int8Min, true) => Some((1, 4)),
        (Form::Nvfp4 | Form::Int4 | Form::Int4Bf16 | Form::Int4Min, true) => Some((2, 4)),
        (Form::Q5K | Form::Sub16, true) => None,
    }
}

/// Nanoseconds that a warp takes for 64 inputs of a strip, beside 7 others.
const fn chunk_ns(form: Form) -> f64 {
    match form {
        Form::Bf16 | Form::Fp8 | Form::Fp8Block => 51.0,
        Form::Int8 | Form::Int8Min => 60.0,
        Form::Nvfp4 | Form::Int4 | Form::Int4Bf16 | Form::Int4Min => 64.0,
        Form::Q4K | Form::Q5K | Form::Sub16 => 77.0,
    }
}

/// Most strips of a unit: with more, adding up their sums takes longer than the next unit's products.
const MAX_UNIT: usize = 4;
/// Above this a launch is bound by the memory and not by its own latency.
const LARGE_BYTES: usize = 32 << 20;
/// Shared memory of one of a multiprocessor's two blocks.
pub(super) const SHARED_OF_TWO: usize = 113 << 10;
/// With less a third block would find place on a multiprocessor: of the next product, which then has three on some and one on others.
const NO_THIRD: usize = 76 << 10;
/// From here on a deeper ring is worth the place that it takes from the small kernels between products.
const DEEP_BYTES: usize = 24 << 20;

/// What the sweep over Gemma's matrices found best (`cargo bench ... sweep`, one H200, 2026-11-30, one row of four bits
/// 2026-12-01, where more planes have to gain 0.1 us each): outputs, inputs, gated,
/// then for bf16, FP8, NVFP4, four-bit integers, Q4_K and Sub16 the shape for 1 row and for 2 to 7: where x is kept and strips
/// a warp (G global, T global and two, S shared, D shared and two; in the kernels for one row S and G are one strip, D and T
/// two), log2 of the groups of strips, planes. `---` leaves the choice to the model of time.
#[rustfmt::skip]
static MEASURED: &[(usize, usize, bool, &str)] = &[
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
static IN_A_STEP: &[(Form, usize, usize, &str)] = &[
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
static EXPERTS_IN_A_STEP: &[(Form, usize, usize, &str)] =
    &[(Form::Fp8, 2816, 704, "X02"), (Form::Nvfp4, 1408, 2816, "U21"), (Form::Nvfp4, 2816, 704, "X01")];

/// The measured shape of a product, if there is one that may be used.
fn measured(work: Work) -> Option<Choice> {
    let Work { shape, rows, gated, most_planes, sms, .. } = work;
    if rows >= 8 || sms != 132 {
        return None;
    }
    let one_row = rows == 1 && has_row_kernel(shape.form);
    let (.., codes) = MEASURED.iter().find(|m| (m.0, m.1, m.2) == (shape.rows, shape.cols, gated))?;
    let class = match shape.form {
        Form::Bf16 => 0,
        Form::Fp8 | Form::Fp8Block | Form::Int8 | Form::Int8Min => 1,
        Form::Nvfp4 => 2,
        Form::Int4 | Form::Int4Bf16 | Form::Int4Min => 3,
        Form::Q4K => 4,
        Form::Q5K | Form::Sub16 => 5,
    };
    let in_a_step = |m: &&(Form, usize, usize, &str)| (m.0, m.1, m.2) == (shape.form, shape.rows, shape.cols);
    let code = match IN_A_STEP.iter().filter(|_| rows == 1).find(in_a_step) {
        Some((.., code)) => code,
        None => codes.split(' ').nth(2 * class + usize::from(rows > 1))?,
    };
    let code = code.as_bytes();
    let variant = match code[0] {
        b'G' => Variant::Global,
        b'T' => Variant::GlobalTwo,
        b'S' => Variant::Shared,
        b'D' => Variant::SharedTwo,
        _ => return None,
    };
    let variant = if one_row { variant.for_one_row() } else { variant };
    let (lwm, planes) = (usize::from(code[1] - b'0'), usize::from(code[2] - b'0'));
    let (list, fits) = (work.candidates(variant), |c: &Choice| c.fits(shape, rows));
    let wanted =
        list.into_iter().map(|(c, _)| c).find(|c| c.lwm == lwm && c.planes == planes.min(most_planes));
    wanted.filter(fits)
}

impl Choice {
    /// The shape of a product: `groups` matrices of `shape` (1, or the experts that a batch may choose), their sums in
    /// at most `most_planes` planes, on `multiprocessors`.
    pub fn of(
        shape: PackedShape,
        rows: usize,
        gated: bool,
        most_planes: usize,
        multiprocessors: usize,
    ) -> Choice {
        let form = shape.form;
        let integer = !matches!(form, Form::Bf16 | Form::Fp8 | Form::Fp8Block | Form::Nvfp4);
        let two = ring(form, true).is_some();
        let four_bits = matches!(form, Form::Nvfp4 | Form::Int4 | Form::Int4Bf16 | Form::Int4Min);
        // Inputs that are no whole chunk need the zeros that only the copy in shared memory has.
        let ragged = !shape.cols.is_multiple_of(form.chunk_inputs());
        let work = Work { shape, rows, gated, most_planes, sms: multiprocessors, groups: 1, scaled: false };
        if !ragged && let Some(choice) = measured(work) {
            return choice;
        }
        if rows == 1 && has_row_kernel(form) {
            let two = shape.bytes() >= LARGE_BYTES && !matches!(form, Form::Fp8 | Form::Fp8Block);
            let wanted = if two { Variant::RowTwo } else { Variant::Row };
            let fits = |c: &Choice| c.fits(shape, rows);
            if let Some(choice) = [wanted, Variant::Row].map(|v| work.balance(v)).into_iter().find(fits) {
                return choice;
            }
        }
        if ragged {
            return work.balance(Variant::Shared);
        }
        let variant = match rows {
            _ if !two => Variant::Global,
            1 if shape.bytes() >= LARGE_BYTES && four_bits => Variant::SharedTwo,
            1 if shape.bytes() >= LARGE_BYTES => Variant::Shared,
            _ if form == Form::Q4K || rows > 8 && integer => Variant::Global,
            _ => Variant::GlobalTwo,
        };
        let choice = work.balance(variant);
        match variant {
            Variant::Shared | Variant::SharedTwo if choice.shared(shape, rows) > SHARED_OF_TWO => {
                work.balance(if variant == Variant::SharedTwo { Variant::GlobalTwo } else { Variant::Global })
            }
            _ => choice,
        }
    }

    /// The shape in the words of the table of measured ones.
    pub fn code(self) -> String {
        let variant = match self.variant {
            Variant::Global => 'G',
            Variant::GlobalTwo => 'T',
            Variant::Routed | Variant::RoutedShared | Variant::RowRouted => 'R',
            Variant::Shared | Variant::Row => 'S',
            Variant::SharedTwo | Variant::RowTwo => 'D',
            Variant::Up | Variant::UpShared | Variant::RowUp => 'U',
            Variant::Down | Variant::RowDown => 'X',
        };
        format!("{variant}{}{}", self.lwm, self.planes)
    }

    /// Strips of a unit.
    pub(super) fn unit(self) -> usize {
        (1 << self.lwm) * self.variant.strips()
    }

    /// Every shape that a plain product could take, for sweeps.
    pub fn all(
        shape: PackedShape,
        rows: usize,
        gated: bool,
        most_planes: usize,
        multiprocessors: usize,
    ) -> Vec<Choice> {
        let two = ring(shape.form, true).is_some();
        let work = Work { shape, rows, gated, most_planes, sms: multiprocessors, groups: 1, scaled: false };
        let one_row = rows == 1 && has_row_kernel(shape.form);
        let variants: &[Variant] = match one_row {
            true => &[Variant::Row, Variant::RowTwo],
            false => &[Variant::Global, Variant::GlobalTwo, Variant::Shared, Variant::SharedTwo],
        };
        variants
            .iter()
            .copied()
            .filter(|v| {
                (two || v.strips() == 1) && (rows <= 8 || matches!(v, Variant::Global | Variant::GlobalTwo))
            })
            .flat_map(|v| work.candidates(v))
            .map(|(choice, _)| choice)
            .filter(|c| c.fits(shape, rows))
            .collect()
    }

    pub(super) fn kernel(self, form: Form) -> Kernel {
        let entries = ENTRIES.iter().find(|e| e.form == form).expect("every form has its kernels");
        let n2 = self.tiles > 1;
        let entry = match self.variant {
            Variant::Global => entries.global[usize::from(n2)],
            Variant::GlobalTwo => entries.global_two[usize::from(n2)],
            Variant::Shared => entries.shared,
            Variant::SharedTwo => entries.shared_two,
            Variant::Routed => entries.routed[usize::from(n2)],
            Variant::RoutedShared => entries.routed_shared,
            Variant::Up => entries.up[usize::from(n2)],
            Variant::UpShared => entries.up_shared,
            Variant::Down => entries.down[usize::from(n2)],
            Variant::Row => entries.row[if self.deep { 5 } else { 0 }],
            Variant::RowTwo => entries.row[if self.deep { 6 } else { 1 }],
            Variant::RowRouted => entries.row[2],
            Variant::RowUp => entries.row[3],
            Variant::RowDown => entries.row[4],
        };
        Kernel::new(entries.family, entry)
    }

    /// Whether its blocks fit a multiprocessor together.
    fn fits(&self, shape: PackedShape, rows: usize) -> bool {
        self.shared(shape, rows) <= SHARED_OF_TWO
    }

    /// Shared memory that a kernel for one row takes for the inputs of so many chunks.
    pub(super) fn row_inputs(self, form: Form, chunks: usize) -> usize {
        match form {
            Form::Fp8 | Form::Fp8Block => {
                let (cw, _) = row_ring(form).expect("these have one")[self.variant.strips() - 1];
                chunks.next_multiple_of((cw * 8) >> self.lwm) * form.chunk_inputs() * 2
            }
            _ => chunks * form.chunk_inputs() / 4 + chunks * form.chunk_inputs() * 2,
        }
    }

    /// Shared memory of a block.
    pub(super) fn shared(self, shape: PackedShape, rows: usize) -> usize {
        let strips = self.variant.strips();
        if self.variant.one_row() {
            let (cw, ns) = row_ring(shape.form).expect("chosen only where there is one")[strips - 1];
            let ns = deep_stages(shape.form).filter(|_| self.deep).unwrap_or(ns);
            let own =
                ns * 8 * cw * strips * shape.form.chunk_bytes() + 2 * 8 * strips * 64 + (2 * ns + 6) * 8;
            let of_experts =
                if self.variant == Variant::RowDown { MAX_EXPERTS * 4 + ns * 8 * cw * 64 } else { 0 };
            let inputs = self.row_inputs(shape.form, (shape.chunks() * self.groups).div_ceil(self.planes));
            return (own + of_experts + inputs).max(NO_THIRD);
        }
        let (cw, ns) = ring(shape.form, strips == 2).expect("chosen only where there is one");
        let scratch = if matches!(shape.form, Form::Q4K | Form::Q5K) { 1024 } else { 0 };
        let own = ns * 8 * cw * strips * shape.form.chunk_bytes()
            + 8 * strips * scratch
            + 2 * 8 * strips * self.tiles * 512
            + (2 * ns + 4) * 8;
        let inputs = (shape.chunks().div_ceil(self.planes) + 1) * shape.form.chunk_inputs();
        let (x, list) = (rows * (inputs * 2 + 16), MAX_EXPERTS * 4 + MAX_EXPERTS * 64);
        let x = match self.variant {
            Variant::Shared | Variant::SharedTwo | Variant::RoutedShared => x,
            Variant::Up => list,
            Variant::UpShared => list + x,
            Variant::Down if self.scaled => ns * 8 * cw * strips * 64,
            _ => 0,
        };
        own + x
    }
}

/// What is to be done, for the choice of a shape.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub shape: PackedShape,
    pub rows: usize,
    pub gated: bool,
    pub most_planes: usize,
    pub sms: usize,
    /// Experts that a batch is likely to choose; 1 for a plain product.
    pub groups: usize,
    /// Whether experts' sums are scaled by row as they are added up.
    pub scaled: bool,
}

impl Work {
    /// The groups of strips and planes with the shortest time by a plain model: the bytes of the fullest multiprocessor,
    /// or the rounds of a warp.
    pub fn balance(self, variant: Variant) -> Choice {
        let mut list = self.candidates(variant);
        let of_step = |m: &&(Form, usize, usize, &str)| {
            (m.0, m.1, m.2) == (self.shape.form, self.shape.rows, self.shape.cols)
        };
        let kind = match variant {
            Variant::RowUp => 'U',
            Variant::RowDown => 'X',
            _ => '-',
        };
        let code =
            EXPERTS_IN_A_STEP.iter().filter(|m| self.sms == 132 && m.3.starts_with(kind)).find(of_step);
        if let Some((.., code)) = code
            && list.iter().any(|(c, _)| c.code() == *code)
        {
            list.retain(|(c, _)| c.code() == *code);
        }
        let best = list.into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
        best.expect("one plane and eight groups of strips are always possible").0
    }

    /// Every shape and its time in nanoseconds by the model.
    fn candidates(self, variant: Variant) -> Vec<(Choice, f64)> {
        let Work { shape, rows, sms, .. } = self;
        let pieces = shape.form.chunk_inputs() / 64;
        let down = matches!(variant, Variant::Down | Variant::RowDown);
        let chunks = shape.chunks() * if down { self.groups } else { 1 };
        let mut list = Vec::new();
        for lwm in 0..4 {
            let unit = (1 << lwm) * variant.strips();
            if self.gated && unit < 2 || lwm > 0 && unit > MAX_UNIT {
                continue;
            }
            let up = matches!(variant, Variant::Up | Variant::RowUp);
            let units = shape.strips().div_ceil(unit) * if up { self.groups } else { 1 };
            for planes in 1..=self.most_planes.clamp(1, MAX_PLANES) {
                if planes > 1 && chunks * pieces / planes < 4 {
                    continue;
                }
                let blocks = units.min(2 * sms / planes);
                let (cut, rounds) = (chunks.div_ceil(planes), units.div_ceil(blocks));
                let bytes = (units * planes).div_ceil(sms) * unit * cut * shape.form.chunk_bytes();
                let memory = bytes as f64 / 33.0;
                let steps = cut.div_ceil(8 >> lwm) * pieces * variant.strips();
                // The sums of a unit: eight warps' parts, added up by as many warps as there are rows.
                let sums = (unit * 16 * rows).div_ceil(32 * rows.min(8)) as f64 * 60.0;
                let warps = rounds as f64 * (steps as f64 * chunk_ns(shape.form) + 290.0 + sums);
                let time = memory.max(warps) + 0.25 * memory.min(warps) + 60.0 * planes as f64;
                let (tiles, groups) = (rows.div_ceil(8), if down { self.groups } else { 1 });
                let choice =
                    Choice { variant, tiles, lwm, planes, blocks, scaled: self.scaled, groups, deep: false };
                let deep = Choice { deep: true, ..choice };
                let long = matches!(variant, Variant::Row | Variant::RowTwo)
                    && deep_stages(shape.form).is_some()
                    && shape.bytes() >= DEEP_BYTES;
                let choice = if long && deep.fits(shape, rows) { deep } else { choice };
                list.push((choice, time));
            }
        }
        list
    }
}

struct Entries {
    form: Form,
    family: &'static str,
    global: [&'static str; 2],
    global_two: [&'static str; 2],
    shared: &'static str,
    shared_two: &'static str,
    routed: [&'static str; 2],
    routed_shared: &'static str,
    up: [&'static str; 2],
    up_shared: &'static str,
    down: [&'static str; 2],
    /// There for the forms that [`row_ring`] names.
    row: [&'static str; 7],
}

macro_rules! entries {
    ($($form:ident $name:literal),*) => {
        [$(Entries {
            form: Form::$form,
            family: concat!("skinny_", $name, "_sm90"),
            global: [concat!("skinny_", $name, "_n1_g1"), concat!("skinny_", $name, "_n2_g1")],
            global_two: [concat!("skinny_", $name, "_n1_g2"), concat!("skinny_", $name, "_n2_g2")],
            shared: concat!("skinny_", $name, "_n1_s1"),
            shared_two: concat!("skinny_", $name, "_n1_s2"),
            routed: [
                concat!("skinny_", $name, "_n1_routed_g"),
                concat!("skinny_", $name, "_n2_routed_g"),
            ],
            routed_shared: concat!("skinny_", $name, "_n1_routed_s"),
            up: [concat!("skinny_", $name, "_n1_up"), concat!("skinny_", $name, "_n2_up")],
            up_shared: concat!("skinny_", $name, "_n1_ups"),
            down: [concat!("skinny_", $name, "_n1_down"), concat!("skinny_", $name, "_n2_down")],
            row: [
                concat!("skinny_", $name, "_r1"),
                concat!("skinny_", $name, "_r2"),
                concat!("skinny_", $name, "_r_routed"),
                concat!("skinny_", $name, "_r_up"),
                concat!("skinny_", $name, "_r_down"),
                concat!("skinny_", $name, "_r1_deep"),
                concat!("skinny_", $name, "_r2_deep"),
            ],
        }),*]
    };
}

static ENTRIES: [Entries; 12] = entries![
    Bf16 "bf16", Fp8 "fp8", Fp8Block "fp8_block", Nvfp4 "nvfp4", Int4 "int4", Int4Bf16 "int4_bf16",
    Int4Min "int4_min", Int8 "int8", Int8Min "int8_min", Q4K "q4_k", Q5K "q5_k", Sub16 "sub16"
];

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(form: Form, rows: usize, cols: usize, n: usize, planes: usize) -> (usize, usize, usize) {
        let c = Choice::of(PackedShape { form, rows, cols }, n, false, planes, 132);
        (1 << c.lwm, c.planes, c.blocks)
    }

    #[test]
    fn small_matrices_get_one_unit_a_block() {
        // As the sweep in docs/cuda-prototypes.md found best, and for the first whole steps.
        assert_eq!(choice(Form::Nvfp4, 2816, 4096, 1, 3), (2, 2, 88));
        assert_eq!(choice(Form::Bf16, 1536, 6144, 1, 3), (1, 2, 96));
        assert_eq!(choice(Form::Fp8, 2816, 2112, 1, 3), (2, 3, 44));
    }

    #[test]
    fn what_is_faster_in_a_step_is_taken_for_one_row() {
        for &(form, rows, cols, code) in IN_A_STEP {
            let gated = MEASURED.iter().any(|m| (m.0, m.1, m.2) == (rows, cols, true));
            let choice = Choice::of(PackedShape { form, rows, cols }, 1, gated, 3, 132);
            assert_eq!(choice.code(), code, "{form:?} {rows} x {cols}");
        }
    }

    #[test]
    fn shared_memory_always_fits() {
        for form in Form::ALL {
            for cols in [256, 768, 1536, 2816, 5376, 8192, 21504, 22528] {
                for rows in [16, 1536, 2816, 5376, 8192, 43008, 262144] {
                    for n in 1..=16 {
                        let shape = PackedShape { form, rows, cols };
                        let c = Choice::of(shape, n, false, 3, 132);
                        assert!(c.shared(shape, n) <= SHARED_OF_TWO, "{form:?} {rows} x {cols}, {n} rows");
                    }
                }
            }
        }
    }
}
