//! Times of the kernels that decode with, at Gemma's shapes: microseconds in a graph of dependent launches over
//! rotating weights, and the share of the device's read bandwidth.
//!
//! `cargo bench -p lapidary-cuda --features cuda --bench kernels [-- gemm|experts|attention|producers]`

#[cfg(not(feature = "cuda"))]
fn main() {}

#[cfg(feature = "cuda")]
#[path = "../tests/gpu/lab.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod lab;

#[cfg(feature = "cuda")]
use on_device::gpu;

#[cfg(feature = "cuda")]
fn main() {
    on_device::main();
}

#[cfg(feature = "cuda")]
mod on_device {
    use std::sync::Arc;

    use lapidary_cuda::driver::{Block, Context, DevPtr};
    use lapidary_cuda::kernels::attn_decode::{
        AttnDecode, KvColumns, PageShape, attn_decode, workspace_bytes,
    };
    use lapidary_cuda::kernels::attn_prefill::attn_prefill;
    use lapidary_cuda::kernels::bandwidth::read_all;
    use lapidary_cuda::kernels::gemm_prefill;
    use lapidary_cuda::kernels::producers::{
        Argmax, Branch, Finish, NormOut, Residual, Router, argmax, argmax_workspace_bytes, finish, residual,
        router,
    };
    use lapidary_cuda::kernels::skinny_gemm::{
        Choice, Chosen, ExpertsDown, ExpertsUp, Gate, Linear, MAX_PLANES, Output, Weights, experts_down,
        experts_up, linear, linear_as,
    };
    use lapidary_cuda::pack::{Form, PackedShape};

    use crate::lab::Lab;

    const POOL: usize = 8 << 30;
    /// Several times the second-level cache.
    const ROTATION: usize = 320 << 20;

    pub fn gpu() -> Option<Arc<Context>> {
        Context::new(0).map_err(|e| println!("skipped: {e}")).ok()
    }

    struct Bench {
        lab: Lab,
        pool: Block,
        x: Block,
        out: Block,
        aux: Block,
        big: Block,
        ceiling: f64,
    }

    pub fn main() {
        let Some(lab) = Lab::new() else { return };
        let wanted = std::env::args().nth(1).filter(|a| !a.starts_with('-'));
        let wants = |name: &str| wanted.as_deref().is_none_or(|w| w == name);
        let pool = lab.bytes(&[]);
        drop(pool);
        let pool = big(&lab);
        let ceiling = [2, 3, 4, 8]
            .map(|blocks| {
                let sink = lab.poisoned(16);
                // SAFETY: the pool is larger.
                let us = lab.time(4, |_| unsafe {
                    read_all(lab.queue(), pool.ptr(), 4 << 30, sink.ptr(), blocks).unwrap()
                });
                (4u64 << 30) as f64 / us * 1e-3
            })
            .into_iter()
            .fold(0.0, f64::max);
        println!("read bandwidth {ceiling:.0} GB/s");
        let x = lab.bf16(&vec![0.5; 16 * 32768]);
        let out = lab.poisoned(3 * 16 * 262_144 * 4);
        let big = lab.bytes(&vec![0; 1 << 30]);
        let aux = lab.bytes(&vec![0; 8 << 20]);
        let bench = Bench { lab, pool, x, out, aux, big, ceiling };
        if wants("gemm") {
            bench.gemm();
        }
        if wanted.as_deref() == Some("sweep") {
            bench.sweep();
        }
        if wants("experts") {
            bench.experts();
        }
        if wants("attention") {
            bench.attention();
        }
        if wants("prefill") {
            bench.prefill();
        }
        if wants("producers") {
            bench.producers();
        }
    }

    /// Bytes that are valid in every form: no NaN code, no large exponent.
    fn big(lab: &Lab) -> Block {
        let seed: Vec<u8> =
            (0..16 << 20).map(|i: u32| (i.wrapping_mul(0x9E37_79B9) >> 24) as u8 & 0xBF).collect();
        let small = lab.bytes(&seed);
        let pool = lab.poisoned(POOL);
        for at in (0..POOL).step_by(seed.len()) {
            // SAFETY: both places have the bytes.
            unsafe { lab.stream.copy(pool.ptr().at(at), small.ptr(), seed.len()).unwrap() };
        }
        lab.stream.wait().unwrap();
        pool
    }

    fn launches(us: f64, least: usize) -> usize {
        ((300.0 / us) as usize).clamp(least, 128)
    }

    impl Bench {
        fn line(&self, what: &str, bytes: f64, us: f64) {
            let rate = bytes / us * 1e-3;
            println!(
                "{what:44} {:9.2} MB {us:9.2} us {rate:6.0} GB/s {:5.1} %",
                bytes / 1e6,
                rate / self.ceiling * 100.0
            );
        }

        fn gemm(&self) {
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

        /// Every launch shape of a product beside the chosen one.
        fn sweep(&self) {
            let shapes = [
                ("31B qkv", 16384, 5376, false, 1),
                ("31B o", 5376, 8192, false, MAX_PLANES),
                ("31B gate+up", 43008, 5376, true, 1),
                ("31B down", 5376, 21504, false, MAX_PLANES),
                ("26B qkv", 8192, 2816, false, MAX_PLANES),
                ("26B o", 2816, 4096, false, MAX_PLANES),
                ("26B gate+up", 4224, 2816, true, 1),
                ("26B down", 2816, 2112, false, MAX_PLANES),
                ("E2B qkv", 2560, 1536, false, MAX_PLANES),
                ("E2B o", 1536, 2048, false, MAX_PLANES),
                ("E2B gate+up", 12288, 1536, true, 1),
                ("E2B down", 1536, 6144, false, MAX_PLANES),
                ("E2B gate+up wide", 24576, 1536, true, 1),
                ("E2B down wide", 1536, 12288, false, MAX_PLANES),
                ("E2B head", 262_144, 1536, false, 1),
            ];
            for form in [Form::Bf16, Form::Fp8, Form::Nvfp4, Form::Int4, Form::Q4K, Form::Sub16] {
                for (name, rows, cols, gated, most_planes) in shapes {
                    if cols % form.chunk_inputs() != 0 {
                        continue;
                    }
                    let shape = PackedShape { form, rows, cols };
                    let copies = (ROTATION / shape.bytes() + 1).clamp(2, 64).min(POOL / shape.bytes());
                    for n in [1, 4] {
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
                                x_stride: cols,
                                rows: n,
                                out: self.out.ptr(),
                                out_stride: rows,
                                output,
                                most_planes,
                            };
                            let guess = shape.bytes() as f64 / 4e6 + 2.0;
                            // SAFETY: the buffers are large enough for every shape above.
                            self.lab.time(launches(guess, copies.max(8)), |i| unsafe {
                                linear_as(self.lab.queue(), &call(i), choice).unwrap();
                            })
                        };
                        let chosen = Choice::of(shape, n, gated, most_planes, 132);
                        let mut list: Vec<_> = Choice::all(shape, n, gated, most_planes, 132)
                            .into_iter()
                            .map(|c| (time(c), c))
                            .collect();
                        list.sort_by(|a, b| a.0.total_cmp(&b.0));
                        let rank = list.iter().position(|(_, c)| *c == chosen);
                        println!(
                            "{name} {} {n} rows: chosen {:.2} us, rank {rank:?} of {}",
                            form.name(),
                            time(chosen),
                            list.len()
                        );
                        for (us, c) in list.iter().take(4) {
                            println!("    {us:.2} {c:?}");
                        }
                    }
                }
            }
        }

        fn experts(&self) {
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
                        experts_up(self.lab.queue(), &call).unwrap();
                    });
                    self.line(
                        &format!("26B experts gate+up {} {n} rows", form.name()),
                        per_call * up.bytes() as f64,
                        us,
                    );
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

        fn attention(&self) {
            let kinds = [
                ("31B sliding", 32, 16, 256, Some(1024)),
                ("31B full", 32, 4, 512, None),
                ("26B sliding", 16, 8, 256, Some(1024)),
                ("26B full", 16, 2, 512, None),
                ("E2B sliding", 8, 1, 256, Some(512)),
                ("E2B full", 8, 1, 512, None),
            ];
            for fp8 in [false, true] {
                for (name, heads, kv_heads, head_dim, window) in kinds {
                    let pages = PageShape { kv_heads, head_dim, fp8 };
                    for context in [512usize, 2048, 8192, 32768] {
                        for rows in [1usize, 4, 16] {
                            let seen = window.map_or(context, |w: usize| w.min(context));
                            let live = seen / 32 + 1;
                            let bytes = (rows * seen * pages.page_bytes() / 32) as f64;
                            let layers = ((ROTATION as f64 / bytes) as usize + 1)
                                .clamp(1, 64)
                                .min(POOL / (live * rows * pages.page_bytes()))
                                .max(1);
                            if live * rows * pages.page_bytes() > POOL || (window.is_some() && context > 2048)
                            {
                                continue;
                            }
                            // Row r's pages stand every `rows` pages; layers use other pools.
                            let first = (context - 1) / 32 + 1 - live;
                            let mut table = Vec::new();
                            let mut starts = Vec::new();
                            for r in 0..rows {
                                starts.push(table.len() as i32 - first as i32);
                                table.extend((0..live).map(|b| ((b * 7 % live) * rows + r) as i32));
                            }
                            let (starts, table) = (self.lab.i32(&starts), self.lab.i32(&table));
                            let positions = self.lab.i32(&vec![context as i32 - 1; rows]);
                            let visible = self.lab.i32(&vec![context as i32; rows]);
                            let workspace =
                                self.lab.bytes(&vec![0; workspace_bytes(rows, heads, pages, 132)]);
                            // SAFETY: the buffers are large enough for every shape above.
                            let us = self.lab.time(launches(bytes / 4e6 + 3.0, layers.max(8)), |i| unsafe {
                                let call = AttnDecode {
                                    heads,
                                    pages,
                                    pool: self.pool.ptr().at(i % layers * live * rows * pages.page_bytes()),
                                    q: self.x.ptr(),
                                    q_stride: heads * head_dim,
                                    out: self.out.ptr(),
                                    out_stride: heads * head_dim,
                                    columns: KvColumns {
                                        positions: positions.ptr(),
                                        visible_to: visible.ptr(),
                                        table: starts.ptr(),
                                        pages: table.ptr(),
                                        map: DevPtr::NULL,
                                    },
                                    rows,
                                    batch_rows: rows,
                                    window,
                                    scale: 0.05,
                                    v_scale: 1.0,
                                    workspace: workspace.ptr(),
                                };
                                attn_decode(self.lab.queue(), &call).unwrap();
                            });
                            let kind = if fp8 { "fp8" } else { "bf16" };
                            self.line(&format!("{name} {kind} context {context} {rows} rows"), bytes, us);
                        }
                    }
                }
            }
        }

        fn prefill(&self) {
            for form in [Form::Bf16, Form::Fp8, Form::Nvfp4, Form::Int4, Form::Q4K, Form::Sub16] {
                for (name, rows, cols, gated) in [
                    ("31B qkv", 16384, 5376, false),
                    ("31B gate+up", 43008, 5376, true),
                    ("31B down", 5376, 21504, false),
                    ("E2B gate+up", 12288, 1536, true),
                ] {
                    let shape = PackedShape { form, rows, cols };
                    for n in [32usize, 128, 512, 2048] {
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
                        // SAFETY: the buffers are large enough for every shape above.
                        let us = self
                            .lab
                            .time(4, |_| unsafe { gemm_prefill::linear(self.lab.queue(), &call).unwrap() });
                        let flops = 2.0 * (n * rows * cols) as f64;
                        println!(
                            "{:44} {us:9.2} us {:6.0} TFLOP/s",
                            format!("{name} {} {n} rows", form.name()),
                            flops / us * 1e-6
                        );
                    }
                }
            }
            for (name, heads, kv_heads, head_dim, window) in [
                ("31B sliding", 32usize, 16usize, 256usize, Some(1024)),
                ("31B full", 32, 4, 512, None),
                ("E2B full", 8, 1, 512, None),
            ] {
                for rows in [64usize, 512, 2048] {
                    let pages = PageShape { kv_heads, head_dim, fp8: false };
                    let column =
                        |f: &dyn Fn(usize) -> i32| self.lab.i32(&(0..rows).map(f).collect::<Vec<_>>());
                    let (positions, visible, table) =
                        (column(&|r| r as i32), column(&|r| r as i32 + 1), column(&|_| 0));
                    let list = self.lab.i32(&(0..rows.div_ceil(32) as i32).collect::<Vec<_>>());
                    let call = AttnDecode {
                        heads,
                        pages,
                        pool: self.pool.ptr(),
                        q: self.pool.ptr(),
                        q_stride: heads * head_dim,
                        out: self.big.ptr(),
                        out_stride: heads * head_dim,
                        columns: KvColumns {
                            positions: positions.ptr(),
                            visible_to: visible.ptr(),
                            table: table.ptr(),
                            pages: list.ptr(),
                            map: DevPtr::NULL,
                        },
                        rows,
                        batch_rows: rows,
                        window,
                        scale: 0.05,
                        v_scale: 1.0,
                        workspace: DevPtr::NULL,
                    };
                    // SAFETY: as above.
                    let us = self.lab.time(4, |_| unsafe { attn_prefill(self.lab.queue(), &call).unwrap() });
                    let seen: usize = (0..rows).map(|r| (r + 1).min(window.unwrap_or(usize::MAX))).sum();
                    let flops = 4.0 * (seen * heads * head_dim) as f64;
                    println!(
                        "{:44} {us:9.2} us {:6.0} TFLOP/s",
                        format!("{name} attention {rows} rows"),
                        flops / us * 1e-6
                    );
                }
            }
        }

        fn producers(&self) {
            let stage = |name: &str, work: &dyn Fn()| {
                let us = self.lab.time(64, |_| work());
                println!("{name:44} {us:9.2} us");
            };
            let gain = self.aux.ptr();
            for (model, width) in [("31B", 5376usize), ("26B", 2816), ("E2B", 1536)] {
                for rows in [1usize, 4, 16] {
                    let out = |at: usize, bf16| NormOut {
                        p: self.out.ptr().at(at << 20),
                        gain,
                        stride: width as i32,
                        bf16,
                    };
                    let branch = |at: usize, planes| Branch {
                        p: self.out.ptr().at(at << 20),
                        gain,
                        plane_stride: (rows * width) as u64,
                        planes,
                        stride: width as i32,
                    };
                    let close = Residual {
                        x: self.out.ptr(),
                        x_stride: width,
                        rows,
                        width,
                        y: branch(2, 3),
                        z: Branch::NONE,
                        post: gain,
                        scalar: 0.9,
                        eps: 1e-6,
                        outs: [out(8, 1), NormOut::NONE, NormOut::NONE],
                    };
                    // SAFETY: every piece lies in the buffer.
                    stage(&format!("{model} residual, one branch, {rows} rows"), &|| unsafe {
                        residual(self.lab.queue(), &close).unwrap()
                    });
                    let moe = Residual { z: branch(4, 3), outs: [out(8, 1), out(9, 1), out(10, 0)], ..close };
                    // SAFETY: as above.
                    stage(&format!("{model} residual, two branches, {rows} rows"), &|| unsafe {
                        residual(self.lab.queue(), &moe).unwrap()
                    });
                }
            }
            for (heads, kv_heads, head_dim) in [(32usize, 16usize, 256usize), (32, 4, 512), (8, 1, 256)] {
                let stride = (heads + 2 * kv_heads) * head_dim;
                let call = Finish {
                    qkv: self.out.ptr(),
                    qkv_stride: stride,
                    plane_stride: stride,
                    planes: 1,
                    store_q: false,
                    rows: 1,
                    heads,
                    pages: PageShape { kv_heads, head_dim, fp8: false },
                    writes: true,
                    values_are_keys: false,
                    q_norm: (gain, 1e-6),
                    k_norm: (gain, 1e-6),
                    v_eps: Some(1e-6),
                    rope: self.aux.ptr(),
                    rope_stride: head_dim,
                    cell: self.aux.ptr(),
                    map: DevPtr::NULL,
                    pool: self.pool.ptr(),
                    kv_scales: [1.0, 1.0],
                    q: self.x.ptr(),
                    q_stride: heads * head_dim,
                };
                // SAFETY: as above; the cell is 0.
                stage(&format!("finish {heads} + {kv_heads} heads of {head_dim}"), &|| unsafe {
                    finish(self.lab.queue(), &call).unwrap()
                });
            }
            for rows in [1usize, 4, 16] {
                let call = Router {
                    weights: self.pool.ptr(),
                    weights_bf16: true,
                    x: self.aux.ptr(),
                    x_stride: 2816,
                    width: 2816,
                    rows,
                    experts: 128,
                    top_k: 8,
                    expert_scale: gain,
                    logits: self.out.ptr(),
                    routes: self.out.ptr().at(1 << 20),
                    groups: self.out.ptr().at(2 << 20),
                    group_weight: self.out.ptr().at(3 << 20),
                };
                // SAFETY: as above.
                stage(&format!("router 128 experts, {rows} rows"), &|| unsafe {
                    router(self.lab.queue(), &call).unwrap()
                });
            }
            let workspace = self.lab.bytes(&vec![0; argmax_workspace_bytes(16)]);
            for rows in [1usize, 16] {
                let call = Argmax {
                    logits: self.pool.ptr(),
                    stride: 262_144,
                    vocab: 262_144,
                    rows,
                    out: self.out.ptr(),
                    workspace: workspace.ptr(),
                    told: None,
                };
                // SAFETY: as above.
                stage(&format!("argmax {rows} rows"), &|| unsafe {
                    argmax(self.lab.queue(), &call).unwrap()
                });
            }
        }
    }
}
