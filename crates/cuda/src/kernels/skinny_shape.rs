//! The launch shapes of products for 1 to 16 rows: which of a form's kernels runs, how a block's warps share strips and
//! inputs, and into how many planes k is cut. [`Choice::of`] decides; [`MEASURED`] is what a sweep over Gemma's matrices
//! found best (docs/performance.md), a plain model of time serves every other matrix.

mod measured;

use self::measured::{EXPERTS_IN_A_STEP, IN_A_STEP, MEASURED};
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
mod tests;
