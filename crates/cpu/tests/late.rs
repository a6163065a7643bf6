//! Weights in a file that passes pack when they need them: the bits of packed ones at every stage, and the file's memory
//! given back once, when its rows are packed.

mod common;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use common::*;
use lapidary_cpu::{Compute, CpuOptions, Level};
use lapidary_formats::{Encoded, encode_rows};
use lapidary_ops::*;

fn fast(threads: usize, level: Level) -> CpuOptions {
    CpuOptions { level: Some(level), compute: Compute::Fast, ..options(threads) }
}

fn weights(format: Format, rows: usize, cols: usize, seed: u64) -> Encoded {
    encode_rows(format, &values(rows * cols, seed), rows, cols).expect("finite values in whole blocks")
}

/// A file in memory that notes what was given back.
#[derive(Default)]
struct Released {
    bytes: Vec<u8>,
    ranges: Mutex<Vec<Range<usize>>>,
}

impl AsRef<[u8]> for Released {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl FileBytes for Released {
    fn release(&self, bytes: &[u8]) {
        let start = bytes.as_ptr() as usize - self.bytes.as_ptr() as usize;
        if !bytes.is_empty() {
            self.ranges.lock().expect("no panic holds it").push(start..start + bytes.len());
        }
    }
}

impl Released {
    /// What was given back, in order, what touches joined; nothing twice.
    fn released(&self) -> Vec<Range<usize>> {
        let mut ranges = self.ranges.lock().expect("no panic holds it").clone();
        ranges.sort_by_key(|r| r.start);
        assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "given back twice: {ranges:?}");
        ranges.dedup_by(|b, a| {
            a.end == b.start && {
                a.end = b.end;
                true
            }
        });
        ranges
    }

    /// Whether all of it was given back.
    fn is_released(&self) -> bool {
        self.released().iter().map(Range::len).sum::<usize>() == self.bytes.len()
    }
}

/// The bytes of the matrices one after the other, codes and then scales, and where they are.
fn file_of(parts: &[Encoded]) -> (Arc<Released>, Vec<[Range<usize>; 2]>) {
    let mut file = Released::default();
    let mut add = |bytes: &[u8]| {
        let start = file.bytes.len();
        file.bytes.extend_from_slice(bytes);
        start..file.bytes.len()
    };
    let places = parts.iter().map(|part| match part.view("part").scales {
        Scales::Nvfp4 { blocks, .. } => [add(&part.bytes), add(blocks)],
        Scales::Group32Bf16(bytes) => [add(&part.bytes), add(bytes)],
        _ => [add(&part.bytes), 0..0],
    });
    let places = places.collect();
    (Arc::new(file), places)
}

/// The view over the file's bytes.
fn in_file<'a>(part: &'a Encoded, file: &'a Released, place: &[Range<usize>; 2]) -> TensorView<'a> {
    let view = part.view("part");
    let scales = match view.scales {
        Scales::Nvfp4 { tensor, .. } => Scales::Nvfp4 { blocks: &file.bytes[place[1].clone()], tensor },
        Scales::Group32Bf16(_) => Scales::Group32Bf16(&file.bytes[place[1].clone()]),
        other => other,
    };
    TensorView { bytes: &file.bytes[place[0].clone()], scales, ..view }
}

/// A matrix of stacked parts; the large ones are given back in several pieces.
fn parts(k: usize) -> Vec<Encoded> {
    let formats: &[(Format, usize)] = if k.is_multiple_of(256) {
        &[
            (Format::Q4K, 1205),
            (Format::Q6K, 37),
            (Format::Q5K, 16),
            (Format::Q2K, 19),
            (Format::Q3K, 5),
            (Format::GgufNvfp4, 33),
            (Format::Iq4Xs, 21),
        ]
    } else {
        &[
            (Format::Q8_0, 1003),
            (Format::Q4_0, 37),
            (Format::Q5_0, 19),
            (Format::Q4_1, 16),
            (Format::Q5_1, 5),
            (Format::Mxfp4, 21),
            (Format::Nvfp4, 33),
            (Format::Int4G32, 47),
            (Format::Iq4Nl, 18),
        ]
    };
    let encoded = |(i, &(format, rows)): (usize, &(Format, usize))| weights(format, rows, k, i as u64 + 11);
    formats.iter().enumerate().map(encoded).collect()
}

/// One matrix and its product.
struct Product {
    rig: Rig,
    k: usize,
    rows: usize,
    w: Mat,
    x: Act,
    input: Act,
    out: Act,
    soft: Vec<f32>,
}

impl Product {
    fn new(options: CpuOptions, file: Option<FileMap>, views: &[TensorView<'_>]) -> Product {
        let mut rig = Rig::new(options);
        rig.cpu.hold(file.as_slice());
        let (k, rows) = (views[0].cols, views.iter().map(|v| v.rows).sum());
        let w = rig.cpu.pack(views, rows).expect("a valid matrix");
        let (x, input, out) = (rig.act(k), rig.input(k), rig.act(rows));
        Product { rig, k, rows, w, x, input, out, soft: values(MAX_ROWS * k, 5) }
    }

    /// The products of the first `n` rows, in a pass that wants logits of `heads` of them.
    fn run(&mut self, n: usize, heads: usize) -> Vec<f32> {
        let (x, input, out, w) = (self.x, self.input, self.out, self.w);
        self.rig.rows(n, &self.soft[..n * self.k]);
        self.rig.batch.heads = (0..heads as i32).collect();
        self.rig.run(&|ops| {
            ops.inject_soft(x);
            ops.cast(input, x);
            ops.linear(out, input, w);
        });
        self.rig.read(out, n)
    }

    /// Rows `0 .. n` of the matrix, looked up.
    fn look_up(&mut self, n: usize) -> Vec<f32> {
        let (x, w) = (self.x, self.w);
        self.rig.sequence(n, 0, &[[0; 0], [0; 0]]);
        self.rig.batch.tokens = (0..n).map(|i| (i * 97 % self.rows) as i32).collect();
        self.rig.run(&|ops| ops.embed(x, w, 1.0));
        self.rig.read(x, n)
    }
}

#[test]
fn weights_of_a_file_have_the_bits_of_packed_ones_before_while_and_after_they_are_packed() {
    for level in levels() {
        for k in [544, 512] {
            let parts = parts(k);
            let views: Vec<_> = parts.iter().map(|p| p.view("part")).collect();
            let mut packed = Product::new(fast(2, level), None, &views);
            let (all, rows) = (packed.run(65, 1), packed.look_up(9));
            let bytes = packed.rig.cpu.memory();
            for threads in 1..=3 {
                let (file, places) = file_of(&parts);
                let views: Vec<_> = parts.iter().zip(&places).map(|(p, at)| in_file(p, &file, at)).collect();
                let mut late = Product::new(fast(threads, level), Some(file.clone()), &views);
                let memory = late.rig.cpu.memory();
                assert_eq!((memory.weights, memory.mapped), (bytes.weights, bytes.mapped));
                assert!(late.rig.cpu.reads_later(late.w) && !packed.rig.cpu.reads_later(packed.w));
                let check = |late: &mut Product, n: usize, heads: usize| {
                    let what = format!("{level} {k}, {threads} threads, {n} rows");
                    assert_bits(&what, &late.run(n, heads), &all[..n * late.rows]);
                };
                // The first pass, and later ones without logits, leave everything in the file.
                for (n, heads) in [(5, 1), (64, 0), (1, 0)] {
                    check(&mut late, n, heads);
                    assert_eq!(file.released(), [], "{level} {k} {n} rows");
                }
                assert_bits("looked up in the file", &late.look_up(9), &rows);
                // Others pack for as long as the first one took.
                let mut passes = 0;
                while !file.is_released() {
                    check(&mut late, 1 + passes % 3, 1);
                    passes += 1;
                    assert!(passes < 1000, "packing comes to no end");
                }
                for n in [1, 2, 4, 33, 65] {
                    check(&mut late, n, 1);
                }
                assert_bits("looked up in tiles", &late.look_up(9), &rows);
                let memory = late.rig.cpu.memory();
                assert_eq!((memory.weights, memory.mapped), (bytes.weights, bytes.mapped));
                assert!(!late.rig.cpu.reads_later(late.w));
            }
        }
    }
}

#[test]
fn many_rows_and_whoever_asks_for_it_pack_everything() {
    for threads in [1, 3] {
        let parts = parts(544);
        let level = Level::detect();
        let views: Vec<_> = parts.iter().map(|p| p.view("part")).collect();
        let all = Product::new(fast(2, level), None, &views).run(65, 1);
        for at_once in [false, true] {
            let (file, places) = file_of(&parts);
            let views: Vec<_> = parts.iter().zip(&places).map(|(p, at)| in_file(p, &file, at)).collect();
            let mut late = Product::new(fast(threads, level), Some(file.clone()), &views);
            if at_once {
                late.rig.cpu.settle().expect("the team runs");
            } else {
                assert_bits("many rows", &late.run(65, 0), &all);
            }
            assert!(file.is_released());
            assert_bits("after that", &late.run(65, 1), &all);
            late.rig.cpu.settle().expect("the team runs");
            assert!(file.is_released(), "nothing is left to pack");
        }
    }
}

#[test]
fn damage_is_found_before_any_pass() {
    let part = weights(Format::Q4_0, 301, 96, 3);
    let mut damaged = part.bytes.clone();
    // The scale of the last block of row 290 is an infinity.
    let at = 291 * 3 * 18 - 18;
    damaged[at..at + 2].copy_from_slice(&[0, 0x7C]);
    let file: FileMap = Arc::new(damaged);
    let mut rig = Rig::new(fast(2, Level::detect()));
    rig.cpu.hold(std::slice::from_ref(&file));
    let error =
        rig.cpu.pack(&[view(Format::Q4_0, 301, 96, (*file).as_ref())], 301).expect_err("it is damaged");
    assert!(matches!(&error, Error::Tensor { tensor, .. } if tensor == "matrix"), "{error}");
}

/// An expert that nobody chooses is never packed, and those that are chosen have the bits of packed ones.
#[test]
fn only_experts_that_are_chosen_are_packed() {
    let (experts, k, hidden, width) = (7, 2, 96, 160);
    let level = Level::detect();
    let formats = [(Format::Q8_0, experts * 2 * width, hidden), (Format::Q5_1, experts * hidden, width)];
    let parts = formats.map(|(format, rows, cols)| weights(format, rows, cols, 71));
    let router = values(experts * hidden, 73);
    let soft = values(3 * hidden, 74);
    let run = |file: Option<&Arc<Released>>, views: [TensorView<'_>; 2]| {
        let mut rig = Rig::new(fast(2, level));
        rig.cpu.hold(file.map(|f| f.clone() as FileMap).as_slice());
        let router = rig.matrix(experts, hidden, &router);
        // An expert's rows are parts of their own, so that each is given back alone.
        let [gate_up, down] = [(0, 2 * width), (1, hidden)].map(|(m, rows): (usize, usize)| {
            let own: Vec<_> = (0..experts).map(|e| views[m].slice_rows(e * rows, rows)).collect();
            rig.cpu.pack(&own, rows).expect("a valid matrix")
        });
        let spec = ExpertSpec { experts, top_k: k, width, gate_up, down, activation: Activation::GeluTanh };
        let scale = rig.gain(&vec![1.0; experts]);
        let (x, input) = (rig.act(hidden), rig.input(hidden));
        let (logits, routes, out) = (rig.act(experts), rig.act(2 * k), rig.act(hidden));
        let mut outs = Vec::new();
        for pass in 0..201 {
            rig.rows(1 + pass % 3, &soft[..(1 + pass % 3) * hidden]);
            rig.batch.heads = vec![0];
            rig.run(&|ops| {
                ops.inject_soft(x);
                ops.cast(input, x);
                ops.linear(logits, x, router);
                ops.route(routes, logits, &RouteSpec { experts, top_k: k, per_expert_scale: scale });
                ops.experts(out, input, routes, &spec);
            });
            outs.extend(rig.read(out, 1 + pass % 3));
        }
        (outs, rig.read(routes, 3))
    };
    let (packed, _) = run(None, [parts[0].view("gate_up"), parts[1].view("down")]);
    let (file, places) = file_of(&parts);
    let views = [0, 1].map(|m| in_file(&parts[m], &file, &places[m]));
    let (outs, routes) = run(Some(&file), views);
    assert_bits("experts", &outs, &packed);
    let chosen = |e: usize| routes.chunks_exact(2 * k).any(|r| r[..k].iter().any(|&id| id as usize == e));
    let mut wanted: Vec<Range<usize>> = Vec::new();
    for [codes, _] in &places {
        let each = codes.len() / experts;
        for start in (0..experts).filter(|&e| chosen(e)).map(|e| codes.start + e * each) {
            match wanted.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end += each,
                None => wanted.push(start..start + each),
            }
        }
    }
    assert!((0..experts).any(|e| !chosen(e)), "an expert is left out");
    assert_eq!(file.released(), wanted);
}

/// Numbers leave the file's pages once the first pass is over, and stay there where they are asked to, as tables and experts do.
#[test]
fn numbers_move_out_of_the_file_after_the_first_pass() {
    let k = 160;
    let formats = [(Format::Bf16, 1205), (Format::F16, 37), (Format::F32, 21), (Format::Fp8E4M3, 19)];
    for level in levels() {
        let parts: Vec<_> = formats.iter().map(|&(format, rows)| weights(format, rows, k, 31)).collect();
        let views: Vec<_> = parts.iter().map(|p| p.view("part")).collect();
        for compute in [Compute::Fast, Compute::F32] {
            let options = |threads| CpuOptions { compute, ..fast(threads, level) };
            let mut copied = Product::new(options(2), None, &views);
            let (all, rows) = (copied.run(65, 1), copied.look_up(9));
            for (threads, stay_in_file, at_once) in [(1, false, false), (3, false, true), (2, true, false)] {
                let (file, places) = file_of(&parts);
                let views: Vec<_> = parts.iter().zip(&places).map(|(p, at)| in_file(p, &file, at)).collect();
                let options = CpuOptions { stay_in_file, ..options(threads) };
                let mut late = Product::new(options, Some(file.clone()), &views);
                let first = in_file(&parts[0], &file, &places[0]);
                let table = late.rig.cpu.pack_rows(&first).expect("a valid matrix");
                let experts = late.rig.cpu.pack(&[first.slice_rows(0, 1200)], 400).expect("a valid matrix");
                let before = late.rig.cpu.memory();
                let all_moves = !stay_in_file;
                for (pass, n) in [65, 3, 1, 2, 5, 1, 33].into_iter().enumerate() {
                    if pass == 1 && at_once {
                        late.rig.cpu.settle().expect("the team runs");
                    }
                    let what = format!("{level} {compute:?} pass {pass}");
                    assert_bits(&what, &late.run(n, usize::from(!at_once)), &all[..n * late.rows]);
                    assert_eq!(file.is_released(), all_moves && pass > 0, "{what}");
                }
                assert_bits("looked up", &late.look_up(9), &rows);
                let (after, moved) = (late.rig.cpu.memory(), if all_moves { file.bytes.len() } else { 0 });
                assert_eq!(after.weights, before.weights + moved);
                assert_eq!(after.mapped, before.mapped - moved);
                let _ = (table, experts);
            }
        }
    }
}
