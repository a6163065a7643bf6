//! Products: of few rows as they are launched and in every other shape, of chosen experts, of many rows.

use lapidary_cuda::driver::{Block, DevPtr};
use lapidary_cuda::kernels::skinny_experts::{ExpertsDown, ExpertsUp, experts_down, experts_up};
use lapidary_cuda::kernels::skinny_gemm::{
    Choice, Chosen, Gate, Linear, MAX_PLANES, Output, Weights, linear, linear_as,
};
use lapidary_cuda::kernels::{gemm_prefill, gemm_wide};
use lapidary_cuda::pack::{Form, PackedShape};

use crate::bench::{Bench, POOL, ROTATION, launches};

/// One form of each class that the table of shapes tells apart.
const CLASSES: &str = "bf16,fp8,nvfp4,int4,q4_k,sub16";

/// Gemma's matrices: outputs, inputs, whether gate and up.
const MATRICES: [(&str, usize, usize, bool); 36] = [
    ("31B qkv", 16384, 5376, false),
    ("31B full qkv", 18432, 5376, false),
    ("31B o", 5376, 8192, false),
    ("31B full o", 5376, 16384, false),
    ("31B gate+up", 43008, 5376, true),
    ("31B down", 5376, 21504, false),
    ("31B head", 262_144, 5376, false),
    ("12B qkv", 8192, 3840, false),
    ("12B full qkv", 8704, 3840, false),
    ("12B o", 3840, 4096, false),
    ("12B full o", 3840, 8192, false),
    ("12B gate+up", 30720, 3840, true),
    ("12B down", 3840, 15360, false),
    ("12B head", 262_144, 3840, false),
    ("26B qkv", 8192, 2816, false),
    ("26B o", 2816, 4096, false),
    ("26B gate+up", 4224, 2816, true),
    ("26B down", 2816, 2112, false),
    ("E4B qkv", 3072, 2560, false),
    ("E4B full qkv", 6144, 2560, false),
    ("E4B q", 2048, 2560, false),
    ("E4B full q", 4096, 2560, false),
    ("E4B o", 2560, 2048, false),
    ("E4B full o", 2560, 4096, false),
    ("E4B gate+up", 20480, 2560, true),
    ("E4B down", 2560, 10240, false),
    ("E2B qkv", 2560, 1536, false),
    ("E2B full qkv", 5120, 1536, false),
    ("E2B q", 2048, 1536, false),
    ("E2B full q", 4096, 1536, false),
    ("E2B o", 1536, 2048, false),
    ("E2B full o", 1536, 4096, false),
    ("E2B gate+up", 12288, 1536, true),
    ("E2B down", 1536, 6144, false),
    ("E2B gate+up wide", 24576, 1536, true),
    ("E2B down wide", 1536, 12288, false),
];

impl Bench {
    pub fn gemm(&self) {
        let shapes = [
            ("31B qkv", 16384, 5376, false, 1),
            ("31B o sliding", 5376, 8192, false, MAX_PLANES),
            ("31B o full", 5376, 16384, false, MAX_PLANES),
            ("31B gate+up", 43008, 5376, true, 1),
            ("31B down", 5376, 21504, false, MAX_PLANES),
            ("head", 262_144, 5376, false, 1),
            ("26B qkv", 8192, 2816, false, MAX_PLANES),
            ("26B o", 2816, 4096, false, MAX_PLANES),
            ("26B gate+up", 4224, 2816, true, 1),
            ("26B down", 2816, 2112, false, MAX_PLANES),
            ("E2B qkv", 2560, 1536, false, MAX_PLANES),
            ("E2B o", 1536, 2048, false, MAX_PLANES),
            ("E2B gate+up", 12288, 1536, true, 1),
            ("E2B down", 1536, 6144, false, MAX_PLANES),
            ("E2B per-layer gate", 256, 1536, false, 1),
            ("E2B per-layer projection", 1536, 256, false, MAX_PLANES),
        ];
        for form in Form::ALL {
            for (name, rows, cols, gated, most_planes) in shapes {
                if cols % form.chunk_inputs() != 0 {
                    continue;
                }
                let shape = PackedShape { form, rows, cols };
                let copies = (ROTATION / shape.bytes() + 1).clamp(2, 64).min(POOL / shape.bytes());
                for n in [1, 4, 8, 16] {
                    let call = |i: usize| Linear {
                        weights: Weights {
                            shape,
                            strips: self.pool.ptr().at(i % copies * shape.bytes()),
                            row_scales: if form == Form::Fp8 { self.aux.ptr() } else { DevPtr::NULL },
                        },
                        x: self.x.ptr(),
                        x_stride: cols,
                        rows: n,
                        out: self.out.ptr(),
                        out_stride: rows,
                        output: if gated {
                            Output::Gated(Gate::GeluTanh)
                        } else {
                            Output::F32 { softcap: 0.0 }
                        },
                        most_planes,
                    };
                    let guess = shape.bytes() as f64 / 4e6 + 2.0;
                    // SAFETY: the buffers are large enough for every shape above.
                    let us = self.lab.time(launches(guess, copies.max(8)), |i| unsafe {
                        linear(self.lab.queue(), &call(i)).unwrap();
                    });
                    self.line(&format!("{name} {} {n} rows", form.name()), shape.bytes() as f64, us);
                }
            }
        }
    }

    /// The shapes that a product could be launched in, best first, with their codes of the table in
    /// `src/kernels/skinny_shape.rs`: of all classes of forms, 1 and 4 rows and
    /// all matrices, or of those named (matrices by how their names begin).
    pub fn sweep(&self, forms: Option<&str>, rows: Option<&str>, names: Option<&str>) {
        let listed = |list: Option<&str>, name: &str| list.is_none_or(|l| l.split(',').any(|n| n == name));
        for form in Form::ALL.into_iter().filter(|f| listed(forms.or(Some(CLASSES)), f.name())) {
            for (name, m, k, gated) in MATRICES {
                let wanted = names.is_none_or(|l| l.split(',').any(|n| name.starts_with(n)));
                if k % form.chunk_inputs() != 0 || !wanted {
                    continue;
                }
                let most_planes = if gated || m == 262_144 { 1 } else { MAX_PLANES };
                let shape = PackedShape { form, rows: m, cols: k };
                let copies = (ROTATION / shape.bytes() + 1).clamp(2, 64).min(POOL / shape.bytes());
                for n in [1usize, 4].into_iter().filter(|n| listed(rows, &n.to_string())) {
                    let output =
                        if gated { Output::Gated(Gate::GeluTanh) } else { Output::F32 { softcap: 0.0 } };
                    let time = |choice| {
                        let call = |i: usize| Linear {
                            weights: Weights {
                                shape,
                                strips: self.pool.ptr().at(i % copies * shape.bytes()),
                                row_scales: if form == Form::Fp8 { self.aux.ptr() } else { DevPtr::NULL },
                            },
                            x: self.x.ptr(),
                            x_stride: k,
                            rows: n,
                            out: self.out.ptr(),
                            out_stride: m,
                            output,
                            most_planes,
                        };
                        let guess = shape.bytes() as f64 / 4e6 + 2.0;
                        // SAFETY: the buffers are large enough for every shape above.
                        self.lab.time(launches(guess, copies.clamp(8, 32)), |i| unsafe {
                            linear_as(self.lab.queue(), &call(i), choice).unwrap();
                        })
                    };
                    let chosen = Choice::of(shape, n, gated, most_planes, 132);
                    let mut list: Vec<_> = Choice::all(shape, n, gated, most_planes, 132)
                        .into_iter()
                        .map(|c| (time(c), c))
                        .collect();
                    list.sort_by(|a, b| a.0.total_cmp(&b.0));
                    let us = time(chosen);
                    let share = shape.bytes() as f64 / us * 1e-3 / self.ceiling * 100.0;
                    let best: Vec<_> =
                        list.iter().take(5).map(|(us, c)| format!("{} {us:.2}", c.code())).collect();
                    println!(
                        "sweep {name}, {m} x {k}, {} {n} rows: {} {us:.2} us {share:.0} %; {}",
                        form.name(),
                        chosen.code(),
                        best.join(", ")
                    );
                }
            }
        }
    }

    pub fn experts(&self) {
        for form in [Form::Bf16, Form::Fp8, Form::Nvfp4, Form::Int4, Form::Int8, Form::Q4K] {
            for n in [1usize, 4, 16] {
                let up = PackedShape { form, rows: 1408, cols: 2816 };
                let down = PackedShape { form, rows: 2816, cols: 704 };
                if up.bytes() * 128 > POOL {
                    continue;
                }
                // Sixteen choices, each row 8 of 128 at random.
                let mut seed = 7u64;
                let mut draw = || {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 33) as i32 % 128
                };
                let mut distinct = 0;
                let lists: Vec<(Block, Block)> = (0..16)
                    .map(|_| {
                        let mut ids: Vec<i32> = Vec::new();
                        for _ in 0..n {
                            let mut row: Vec<i32> = Vec::new();
                            while row.len() < 8 {
                                let id = draw();
                                if !row.contains(&id) {
                                    row.push(id);
                                }
                            }
                            ids.extend(row);
                        }
                        ids.sort_unstable();
                        ids.dedup();
                        distinct += ids.len();
                        let mut list = vec![ids.len() as i32];
                        list.extend(&ids);
                        list.resize(129, 0);
                        (self.lab.i32(&list), self.lab.f32(&vec![0.1; 128 * 16]))
                    })
                    .collect();
                let per_call = distinct as f64 / 16.0;
                let scales = if form == Form::Fp8 { self.aux.ptr() } else { DevPtr::NULL };
                let chosen =
                    |i: usize| Chosen { groups: lists[i % 16].0.ptr(), weights: lists[i % 16].1.ptr() };
                // SAFETY: as above.
                let us = self.lab.time(48, |i| unsafe {
                    let call = ExpertsUp {
                        weights: Weights { shape: up, strips: self.pool.ptr(), row_scales: scales },
                        chosen: chosen(i),
                        top_k: 8,
                        x: self.x.ptr(),
                        x_stride: 2816,
                        rows: n,
                        hidden: self.out.ptr(),
                        hidden_stride: 704,
                        gate: Gate::GeluTanh,
                    };
                    experts_up(self.lab.queue(), &call, None).unwrap();
                });
                self.line(
                    &format!("26B experts gate+up {} {n} rows", form.name()),
                    per_call * up.bytes() as f64,
                    us,
                );
                let dense = PackedShape { form, rows: 2816, cols: 2112 };
                if 2112 % form.chunk_inputs() == 0 {
                    // SAFETY: as above.
                    let us = self.lab.time(48, |i| unsafe {
                        let call = ExpertsUp {
                            weights: Weights { shape: up, strips: self.pool.ptr(), row_scales: scales },
                            chosen: chosen(i),
                            top_k: 8,
                            x: self.x.ptr(),
                            x_stride: 2816,
                            rows: n,
                            hidden: self.out.ptr(),
                            hidden_stride: 704,
                            gate: Gate::GeluTanh,
                        };
                        let strips = self.pool.ptr().at((128 * up.bytes() + i * dense.bytes()) / 256 * 256);
                        let side = Linear {
                            weights: Weights { shape: dense, strips, row_scales: scales },
                            x: self.x.ptr(),
                            x_stride: 2112,
                            rows: n,
                            out: self.out.ptr().at(32 << 20),
                            out_stride: 2816,
                            output: Output::F32 { softcap: 0.0 },
                            most_planes: MAX_PLANES,
                        };
                        experts_up(self.lab.queue(), &call, Some(&side)).unwrap();
                    });
                    self.line(
                        &format!("26B experts gate+up and dense down {} {n} rows", form.name()),
                        per_call * up.bytes() as f64 + dense.bytes() as f64,
                        us,
                    );
                }
                if 704 % form.chunk_inputs() != 0 {
                    continue;
                }
                // SAFETY: as above.
                let us = self.lab.time(48, |i| unsafe {
                    let call = ExpertsDown {
                        weights: Weights { shape: down, strips: self.pool.ptr(), row_scales: scales },
                        chosen: chosen(i),
                        top_k: 8,
                        hidden: self.big.ptr(),
                        hidden_stride: 704,
                        rows: n,
                        out: self.out.ptr(),
                        out_stride: 2816,
                        most_planes: MAX_PLANES,
                    };
                    experts_down(self.lab.queue(), &call).unwrap();
                });
                self.line(
                    &format!("26B experts down {} {n} rows", form.name()),
                    per_call * down.bytes() as f64,
                    us,
                );
            }
        }
    }

    /// Many rows.
    pub fn prefill(&self) {
        for form in [Form::Bf16, Form::Fp8, Form::Nvfp4, Form::Int4, Form::Q4K, Form::Sub16] {
            for (name, rows, cols, gated) in [
                ("31B qkv", 16384, 5376, false),
                ("31B gate+up", 43008, 5376, true),
                ("31B down", 5376, 21504, false),
                ("E2B gate+up", 12288, 1536, true),
            ] {
                let shape = PackedShape { form, rows, cols };
                for n in [32usize, 64, 128, 512, 2048] {
                    let out = if gated { Output::Gated(Gate::GeluTanh) } else { Output::Bf16 };
                    let call = Linear {
                        weights: Weights {
                            shape,
                            strips: self.pool.ptr(),
                            row_scales: if form == Form::Fp8 { self.aux.ptr() } else { DevPtr::NULL },
                        },
                        x: self.pool.ptr(),
                        x_stride: cols,
                        rows: n,
                        out: self.big.ptr(),
                        out_stride: rows,
                        output: out,
                        most_planes: 1,
                    };
                    let flops = 2.0 * (n * rows * cols) as f64;
                    let line = |kernel: &str, us: f64| {
                        println!(
                            "{:44} {us:9.2} us {:6.0} TFLOP/s",
                            format!("{name} {} {n} rows{kernel}", form.name()),
                            flops / us * 1e-6
                        );
                    };
                    // SAFETY: the buffers are large enough for every shape above.
                    let us = self
                        .lab
                        .time(4, |_| unsafe { gemm_prefill::linear(self.lab.queue(), &call).unwrap() });
                    line("", us);
                    let arranged = self.lab.poisoned(gemm_wide::workspace_bytes(shape, n));
                    // SAFETY: as above.
                    let us = self.lab.time(4, |_| unsafe {
                        gemm_wide::linear(self.lab.queue(), &call, arranged.ptr()).unwrap()
                    });
                    line(", wide", us);
                }
            }
        }
    }
}
