//! `qkv_finish` and `attention` against f64, and the rule that a row's bits are its own sequence's.

mod common;

use common::*;
use lapidary_cpu::{Compute, CpuOptions, Level, native_kv};
use lapidary_ops::*;

struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    format: KvFormat,
}

const CACHE: KvRef = KvRef { group: Group::Sliding, index: 0, writes: true };

impl Case {
    fn plan(&self, pages: usize) -> KvPlan {
        let layers = vec![KvLayerShape { kv_heads: self.kv_heads, head_dim: self.d }];
        let group = |layers, pages| KvGroupPlan { layers, format: self.format, pages, window: self.window };
        KvPlan { groups: [group(layers, pages), group(vec![], 0)] }
    }

    fn spec(&self) -> AttnSpec {
        AttnSpec {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.d,
            scale: 1.7 / (self.d as f32).sqrt(),
            softcap: self.softcap,
            window: self.window,
            cache: CACHE,
        }
    }

    fn q_width(&self) -> usize {
        self.heads * self.d
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.d
    }
}

const CASES: [Case; 7] = [
    Case { heads: 4, kv_heads: 1, d: 64, window: None, softcap: None, format: KvFormat::F32 },
    Case { heads: 4, kv_heads: 2, d: 96, window: Some(37), softcap: None, format: KvFormat::F16 },
    Case { heads: 3, kv_heads: 3, d: 32, window: None, softcap: Some(5.0), format: KvFormat::Bf16 },
    Case { heads: 6, kv_heads: 2, d: 256, window: Some(600), softcap: None, format: KvFormat::Q8_0 },
    Case { heads: 2, kv_heads: 1, d: 512, window: None, softcap: None, format: KvFormat::F16 },
    Case { heads: 5, kv_heads: 5, d: 18, window: Some(64), softcap: None, format: KvFormat::F32 },
    Case { heads: 14, kv_heads: 2, d: 96, window: Some(300), softcap: None, format: KvFormat::Bf16 },
];

const MODES: [Compute; 2] = [Compute::F32, Compute::Fast];

/// Whether queries and weights are rounded to bf16.
fn rounds(case: &Case, compute: Compute, level: Level) -> bool {
    compute == Compute::Fast && case.format == KvFormat::Bf16 && native_kv(Some(level)) == KvFormat::Bf16
}

/// Stores `n` positions and returns them as the cache holds them.
fn fill(rig: &mut Rig, case: &Case, pages: &[i32], n: usize) -> (Vec<f32>, Vec<f32>) {
    let w = case.kv_width();
    let (mut keys, mut vals) = (values(n * w, 11), values(n * w, 12));
    for p in 0..n {
        let (page, at) = (pages[p / PAGE_TOKENS] as usize, p % PAGE_TOKENS);
        let (k, v) = (&mut keys[p * w..(p + 1) * w], &mut vals[p * w..(p + 1) * w]);
        rig.cpu.kv_store(CACHE, page, at, k, v).expect("a cell of the pool");
        rig.cpu.kv_load(CACHE, page, at, k, v).expect("a cell of the pool");
    }
    (keys, vals)
}

/// Page numbers in no order.
fn pages(n: usize) -> Vec<i32> {
    (0..n).map(|i| (i * 11 % n) as i32 + 1).collect()
}

#[test]
fn attention_matches_f64() {
    for level in levels() {
        for (c, case) in CASES.iter().enumerate() {
            for (workers, compute) in [1, 2].into_iter().flat_map(|w| MODES.map(|m| (w, m))) {
                let mut rig = Rig::new(CpuOptions { level: Some(level), compute, ..options(workers) });
                let (n, rows) = (1153usize, 13);
                let pages = pages(n.div_ceil(PAGE_TOKENS));
                rig.cpu.kv(&case.plan(pages.len() + 1)).expect("a small cache");
                let (keys, vals) = fill(&mut rig, case, &pages, n);
                let (qw, kw, d) = (case.q_width(), case.kv_width(), case.d);
                let (qkv, out) = (rig.act(qw), rig.act(qw));
                let q = values(rows * qw, 13);
                let spec = case.spec();
                let start = n - rows;
                rig.sequence(rows, start, &[&pages[..], &[]]);
                // A block in which everyone sees to its end.
                for r in 4..9 {
                    rig.batch.visible_to[0][r] = (start + 9) as i32;
                }
                rig.batch.soft_rows = (0..rows as i32).collect();
                rig.batch.soft_values = q.clone();
                rig.run(&|ops| {
                    ops.inject_soft(qkv);
                    ops.attention(out, qkv, &spec);
                });
                let found = rig.read(out, rows);
                let mut exact = Vec::new();
                for r in 0..rows {
                    let to = rig.batch.visible_to[0][r] as usize;
                    let from = spec.window.map_or(0, |w| (start + r + 1).saturating_sub(w));
                    for h in 0..case.heads {
                        let kv = h / (case.heads / case.kv_heads);
                        let row = |m: &[f32], j: usize, e: usize| f64::from(m[j * kw + kv * d + e]);
                        let scores: Vec<f64> = (from..to)
                            .map(|j| {
                                let dot = (0..d).map(|e| f64::from(q[r * qw + h * d + e]) * row(&keys, j, e));
                                let s = dot.sum::<f64>() * f64::from(spec.scale);
                                spec.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
                            })
                            .collect();
                        let max = scores.iter().fold(f64::MIN, |m, &s| m.max(s));
                        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                        // A query's values are each off by 2^-8 of themselves, which the cap does not enlarge, and so
                        // are the weights; what is common to all of a row's weights cancels.
                        let sizes = (from..to).map(|j| {
                            let terms =
                                (0..d).map(|e| (f64::from(q[r * qw + h * d + e]) * row(&keys, j, e)).abs());
                            terms.sum::<f64>() * f64::from(spec.scale)
                        });
                        let off = sizes.fold(0.0, f64::max) / 256.0;
                        let off = off.exp() * (1.0 + 1.0 / 256.0) - 1.0;
                        let off = if rounds(case, compute, level) { off / (1.0 - off) } else { 0.0 };
                        for e in 0..d {
                            let v =
                                (from..to).map(|j| (scores[j - from] - max).exp() / sum * row(&vals, j, e));
                            // Probabilities carry the scores' error (|s| < 6 in units of d / 8 + 8 roundings, and
                            // 4 of the exponential) and the sum of values that of a page, of pages and of segments;
                            // all weights together are 1 and no value exceeds 1.
                            let roundings = 6.0 * (d as f64 / 8.0 + 8.0).sqrt() * 4.0 + 4.0 + 32.0 + 40.0;
                            let mean = v.sum::<f64>();
                            let spread = (from..to).map(|j| {
                                (scores[j - from] - max).exp() / sum * (row(&vals, j, e) - mean).abs()
                            });
                            exact.push((mean, roundings * EPS + off * spread.sum::<f64>()));
                        }
                    }
                }
                assert_near(&format!("{level} {compute:?} case {c} workers {workers}"), &found, exact);
            }
        }
    }
}

type Program = Box<dyn Fn(&mut dyn Ops) + Sync>;

/// Projections to attention, as a layer does it.
struct Layer {
    rig: Rig,
    program: Program,
    qkv: Act,
    out: Act,
}

fn layer(case: &Case, options: CpuOptions, pages: usize) -> Layer {
    let mut rig = Rig::new(options);
    rig.cpu.kv(&case.plan(pages)).expect("a small cache");
    let d = case.d;
    let (qkv, out) = (rig.act(case.q_width() + 2 * case.kv_width()), rig.act(case.q_width()));
    let rope = rig.act(d);
    let freq: Vec<f32> = (0..d / 2).map(|i| 100f32.powf(-2.0 * i as f32 / d as f32)).collect();
    let freq = rig.gain(&freq);
    let (q_gain, k_gain) = (rig.gain(&values(d, 21)), rig.gain(&values(d, 22)));
    let spec = case.spec();
    let finish = QkvSpec {
        heads: case.heads,
        kv_heads: case.kv_heads,
        head_dim: d,
        q_norm: Norm { gain: q_gain, eps: 1e-6 },
        kv: Some(KvSpec {
            k_norm: Norm { gain: k_gain, eps: 1e-6 },
            values: ValueSource::Projected,
            v_norm_eps: Some(1e-6),
            cache: CACHE,
        }),
        rope,
    };
    let program = Box::new(move |ops: &mut dyn Ops| {
        ops.inject_soft(qkv);
        ops.rope_table(rope, freq);
        ops.qkv_finish(qkv, &finish);
        ops.attention(out, qkv, &spec);
    });
    Layer { rig, program, qkv, out }
}

#[test]
fn a_prompt_has_the_same_bits_however_it_is_cut_and_shared() {
    for level in levels() {
        for (c, case) in CASES.iter().enumerate() {
            let n = 1100usize;
            let width = case.q_width() + 2 * case.kv_width();
            let projected = values(n * width, 31);
            let table = pages(n.div_ceil(PAGE_TOKENS));
            // The fast mode differs where bf16 is multiplied only.
            let compute = if rounds(case, Compute::Fast, level) { Compute::Fast } else { Compute::F32 };
            let mut whole: Vec<f32> = Vec::new();
            for (workers, chunk) in [(1, 257), (2, 100), (3, 31), (2, 1)] {
                let options = CpuOptions { level: Some(level), compute, ..options(workers) };
                let mut l = layer(case, options, table.len() + 1);
                let mut found = Vec::new();
                // One row at a time only where segments begin and end: the rest is slow and the same.
                let mut start = 0;
                while start < n {
                    let single = chunk == 1 && !(520..1060).contains(&start) && start >= 500;
                    let rows = if single { 1 } else { chunk.max(20) }.min(n - start);
                    l.rig.sequence(rows, start, &[&table[..], &[]]);
                    l.rig.batch.soft_rows = (0..rows as i32).collect();
                    l.rig.batch.soft_values = projected[start * width..(start + rows) * width].to_vec();
                    l.rig.run(&*l.program);
                    found.extend(l.rig.read(l.out, rows));
                    start += rows;
                }
                assert!(found.iter().all(|v| v.is_finite()));
                if whole.is_empty() {
                    whole = found;
                } else {
                    assert_bits(&format!("{level} case {c} {workers} workers, {chunk} rows"), &found, &whole);
                }
            }
        }
    }
}

#[test]
fn sequences_of_one_batch_do_not_see_each_other() {
    let case = &CASES[1];
    let width = case.q_width() + 2 * case.kv_width();
    let soft = values(50 * width, 41);
    let run = |spans: &[(usize, usize)], workers| {
        let mut l = layer(case, options(workers), 9);
        l.rig.batch.clear();
        let mut from = Vec::new();
        for &(first, rows) in spans {
            // Rows 0..29 are one sequence, 29..50 another.
            let table: &[i32] = if first == 0 { &[5] } else { &[2, 8] };
            l.rig.add_sequence(rows, 0, &[table, &[]]);
            from.extend_from_slice(&soft[first * width..(first + rows) * width]);
        }
        l.rig.batch.soft_rows = (0..l.rig.batch.tokens.len() as i32).collect();
        l.rig.batch.soft_values = from;
        l.rig.run(&*l.program);
        let rows = l.rig.batch.tokens.len();
        l.rig.read(l.out, rows)
    };
    for workers in 1..=3 {
        let both = run(&[(0, 29), (29, 21)], workers);
        assert_bits("first", &both[..29 * case.q_width()], &run(&[(0, 29)], 1));
        assert_bits("second", &both[29 * case.q_width()..], &run(&[(29, 21)], 1));
    }
}

#[test]
fn heads_are_normed_rotated_and_stored() {
    for values_from in [ValueSource::Projected, ValueSource::Keys] {
        let case = Case { heads: 2, kv_heads: 2, d: 48, window: None, softcap: None, format: KvFormat::F32 };
        let mut rig = Rig::new(options(2));
        rig.cpu.kv(&case.plan(4)).expect("a small cache");
        let (d, rows, start) = (case.d, 5, 30);
        let parts = if values_from == ValueSource::Keys { 1 } else { 2 };
        let width = case.q_width() + parts * case.kv_width();
        let (qkv, rope) = (rig.act(width), rig.act(d));
        let freq: Vec<f32> = (0..d / 2).map(|i| 0.9f32.powi(i as i32)).collect();
        let (qg, kg) = (values(d, 51), values(d, 52));
        let (freq_gain, q_gain, k_gain) = (rig.gain(&freq), rig.gain(&qg), rig.gain(&kg));
        let soft = values(rows * width, 53);
        rig.sequence(rows, start, &[&[3, 1], &[][..]]);
        rig.batch.soft_rows = (0..rows as i32).collect();
        rig.batch.soft_values = soft.clone();
        let spec = QkvSpec {
            heads: 2,
            kv_heads: 2,
            head_dim: d,
            q_norm: Norm { gain: q_gain, eps: 1e-6 },
            kv: Some(KvSpec {
                k_norm: Norm { gain: k_gain, eps: 1e-6 },
                values: values_from,
                v_norm_eps: Some(1e-6),
                cache: CACHE,
            }),
            rope,
        };
        rig.run(&|ops| {
            ops.inject_soft(qkv);
            ops.rope_table(rope, freq_gain);
            ops.qkv_finish(qkv, &spec);
        });
        let found = rig.read(qkv, rows);
        let normed = |x: &[f32], gain: Option<&[f32]>| -> Vec<f64> {
            let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
            let factor = 1.0 / (mean + 1e-6).sqrt();
            (0..x.len()).map(|i| f64::from(x[i]) * factor * gain.map_or(1.0, |g| f64::from(g[i]))).collect()
        };
        let rotated = |x: Vec<f64>, p: usize| -> Vec<f64> {
            (0..d)
                .map(|i| {
                    // The angle is a float32 product.
                    let angle = f64::from(p as f32 * freq[i % (d / 2)]);
                    let (s, c) = angle.sin_cos();
                    if i < d / 2 { x[i] * c - x[i + d / 2] * s } else { x[i] * c + x[i - d / 2] * s }
                })
                .collect()
        };
        for r in 0..rows {
            let row = &soft[r * width..(r + 1) * width];
            let near = |what: &str, found: &[f32], exact: Vec<f64>| {
                // Squares, root, two factors, table, products, sum; |values| < 2.5 after the norm.
                assert_near(what, found, exact.into_iter().map(|e| (e, 2.5 * 16.0 * EPS)));
            };
            for h in 0..2 {
                let q = &row[h * d..(h + 1) * d];
                near("q", &found[r * width + h * d..][..d], rotated(normed(q, Some(&qg)), start + r));
            }
            let (mut k, mut v) = (vec![0.0; 2 * d], vec![0.0; 2 * d]);
            let p = start + r;
            rig.cpu.kv_load(CACHE, [3, 1][p / 32], p % 32, &mut k, &mut v).expect("a cell of the pool");
            for h in 0..2 {
                let raw = &row[(2 + h) * d..][..d];
                near("k", &k[h * d..][..d], rotated(normed(raw, Some(&kg)), p));
                let raw = if parts == 1 { raw } else { &row[(4 + h) * d..][..d] };
                near("v", &v[h * d..][..d], normed(raw, None));
            }
        }
    }
}

#[test]
fn resizing_keeps_contents_and_shapes_are_fixed() {
    let case = &CASES[3];
    let mut rig = Rig::new(options(1));
    rig.cpu.kv(&case.plan(3)).expect("a small cache");
    let w = case.kv_width();
    let (mut k, mut v) = (values(w, 61), values(w, 62));
    rig.cpu.kv_store(CACHE, 2, 31, &k, &v).expect("a cell of the pool");
    rig.cpu.kv_load(CACHE, 2, 31, &mut k, &mut v).expect("a cell of the pool");
    for pages in [9, 3] {
        rig.cpu.kv(&case.plan(pages)).expect("a small cache");
        assert_eq!(rig.cpu.memory().kv, case.plan(pages).bytes());
        let (mut k2, mut v2) = (vec![0.0; w], vec![0.0; w]);
        rig.cpu.kv_load(CACHE, 2, 31, &mut k2, &mut v2).expect("a cell of the pool");
        assert_bits("keys", &k, &k2);
        assert_bits("values", &v, &v2);
    }
    assert!(rig.cpu.kv_store(CACHE, 3, 0, &k, &v).is_err(), "page 3 is gone");
    let other = Case { format: KvFormat::F16, ..CASES[3] };
    assert!(matches!(rig.cpu.kv(&other.plan(3)), Err(Error::Unsupported { .. })));
    assert_eq!(rig.cpu.memory().kv, case.plan(3).bytes(), "the error changed nothing");
    let odd = Case { d: 48, ..CASES[3] };
    assert!(matches!(Rig::new(options(1)).cpu.kv(&odd.plan(3)), Err(Error::Unsupported { .. })));
}

#[test]
fn bad_batches_change_nothing() {
    let case = &CASES[0];
    let mut l = layer(case, options(2), 4);
    let width = case.q_width() + 2 * case.kv_width();
    l.rig.sequence(3, 0, &[&[9], &[][..]]);
    l.rig.batch.soft_values = values(3 * width, 1);
    l.rig.batch.soft_rows = vec![0, 1, 2];
    assert!(matches!(l.rig.try_run(&*l.program), Err(Error::Batch(BatchError::PageRange { .. }))));
    // Two sequences on one page.
    l.rig.sequence(3, 0, &[&[2], &[][..]]);
    l.rig.add_sequence(3, 0, &[&[2], &[][..]]);
    assert!(matches!(l.rig.try_run(&*l.program), Err(Error::Device(_))));
    l.rig.sequence(MAX_ROWS + 1, 0, &[&[1, 2, 3], &[][..]]);
    assert!(matches!(l.rig.try_run(&*l.program), Err(Error::TooManyRows { .. })));
    let qkv = l.qkv;
    l.rig.sequence(3, 0, &[&[2], &[][..]]);
    l.rig.batch.soft_rows = vec![0, 1, 2];
    l.rig.batch.soft_values = values(3 * width, 1);
    l.rig.run(&*l.program);
    assert_eq!(l.rig.read(qkv, 3).len(), 3 * width);
}
