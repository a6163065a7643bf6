//! Attention over paged keys and values, against float64 over what the pages hold.
//!
//! Allowed error of one output: weights are rounded to bf16 (2^-8 of each at most), the result too, scores carry at most 1e-4
//! and so do the weights' exponentials: `(2 * 2^-8 + 2e-4) sum p |v|`. All together stay below 3e-3, since roundings of
//! weights have either sign.

use half::bf16;
use lapidary_cuda::driver::{Block, DevPtr};
use lapidary_cuda::kernels::attn_decode::{
    AttnDecode, KvColumns, PageShape, attn_decode, finish_and_attend, workspace_bytes,
};
use lapidary_cuda::kernels::attn_prefill::attn_prefill;
use lapidary_cuda::kernels::producers::{Finish, finish};
use lapidary_formats::fp8::{e4m3_from_f32, e4m3_to_f32};

use crate::lab::{Judge, Lab, random, random_bf16};

/// A row: sequence, position, last visible key + 1.
type Row = (usize, usize, usize);

/// Pages of several sequences of `keys` tokens, scattered over one pool.
pub struct Cache {
    pub pages: PageShape,
    pub pool: Block,
    /// Page tables one after the other.
    pub tables: Vec<i32>,
    pub starts: Vec<i32>,
    values: Vec<f32>,
}

impl Cache {
    /// Keys and values are the row's `k_scale` and `v_scale` times what is stored.
    pub fn new(lab: &Lab, pages: PageShape, keys: &[usize]) -> Cache {
        let blocks: Vec<usize> = keys.iter().map(|k| k.div_ceil(32)).collect();
        let total: usize = blocks.iter().sum::<usize>() + 1;
        // A fixed shuffle of 1 .. total; page 0 belongs to nobody.
        let mut order: Vec<i32> = (1..total as i32).collect();
        order.sort_by_key(|&p| (p as u32).wrapping_mul(0x9E37_79B9));
        let (mut tables, mut starts) = (Vec::new(), Vec::new());
        for &n in &blocks {
            starts.push(tables.len() as i32);
            tables.extend(order.drain(..n));
        }
        let mut bytes = vec![0u8; total * pages.page_bytes()];
        let n = pages.head_dim;
        let mut values = Vec::new();
        for (s, &keys) in keys.iter().enumerate() {
            for token in 0..keys {
                for side in 0..2 {
                    for head in 0..pages.kv_heads {
                        let seed = ((s * 1_000_003 + token) * 2 + side) * 64 + head;
                        for (i, v) in random(n, seed as u64).into_iter().enumerate() {
                            let v = v * if side == 0 { 1.7 } else { 1.5 };
                            let page = tables[starts[s] as usize + token / 32] as usize;
                            let at = pages.offset(page, head, side, token % 32, i);
                            values.push(if pages.fp8 {
                                bytes[at] = e4m3_from_f32(v);
                                e4m3_to_f32(bytes[at])
                            } else {
                                let v = bf16::from_f32(v);
                                bytes[at..at + 2].copy_from_slice(&v.to_le_bytes());
                                v.to_f32()
                            });
                        }
                    }
                }
            }
        }
        Cache { pages, pool: lab.bytes(&bytes), tables, starts, values }
    }

    /// A stored head; `first` is the token's place among all sequences' tokens.
    fn head(&self, first: usize, side: usize, head: usize) -> &[f32] {
        let d = self.pages.head_dim;
        &self.values[((first * 2 + side) * self.pages.kv_heads + head) * d..][..d]
    }

    /// `(output, sum p |v|)` of one query head.
    pub fn attend(
        &self,
        keys: &[usize],
        (sequence, position, to): Row,
        window: Option<usize>,
        head: usize,
        scale: f64,
        q: &[f32],
    ) -> (Vec<f64>, Vec<f64>) {
        let from = window.map_or(0, |w| (position + 1).saturating_sub(w));
        let base: usize = keys[..sequence].iter().sum();
        let scores: Vec<f64> = (from..to)
            .map(|j| {
                let k = self.head(base + j, 0, head);
                q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * scale
            })
            .collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let p: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let total: f64 = p.iter().sum();
        let mut out = vec![0.0; q.len()];
        let mut size = vec![0.0; q.len()];
        for (j, p) in (from..to).zip(p) {
            for (i, &v) in self.head(base + j, 1, head).iter().enumerate() {
                out[i] += p / total * f64::from(v);
                size[i] += p / total * f64::from(v).abs();
            }
        }
        (out, size)
    }
}

/// What a batch says about its rows, on the device.
pub struct Columns {
    _blocks: [Block; 4],
    pub columns: KvColumns,
}

impl Columns {
    pub fn new(lab: &Lab, cache: &Cache, rows: &[Row]) -> Columns {
        let column = |f: &dyn Fn(&Row) -> i32| lab.i32(&rows.iter().map(f).collect::<Vec<_>>());
        let blocks = [
            column(&|r| r.1 as i32),
            column(&|r| r.2 as i32),
            column(&|r| cache.starts[r.0]),
            lab.i32(&cache.tables),
        ];
        let columns = KvColumns {
            positions: blocks[0].ptr(),
            visible_to: blocks[1].ptr(),
            table: blocks[2].ptr(),
            pages: blocks[3].ptr(),
            map: DevPtr::NULL,
        };
        Columns { _blocks: blocks, columns }
    }
}

struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    keys: Vec<usize>,
    rows: Vec<Row>,
}

fn check(lab: &Lab, workspace: &Block, case: &Case, fp8: bool, many: bool) {
    let Case { heads, kv_heads, head_dim, window, keys, rows } = case;
    let pages = PageShape { kv_heads: *kv_heads, head_dim: *head_dim, fp8 };
    let cache = Cache::new(lab, pages, keys);
    let columns = Columns::new(lab, &cache, rows);
    let (q_stride, out_stride) = (heads * head_dim + 8, heads * head_dim + 4);
    let q: Vec<f32> =
        random_bf16(rows.len() * q_stride, 17).iter().map(|v| bf16::from_f32(v * 1.9).to_f32()).collect();
    let device_q = lab.bf16(&q);
    let out = lab.poisoned(rows.len() * out_stride * 2);
    let (k_scale, v_scale) = if fp8 { (0.75, 1.25) } else { (1.0, 1.0) };
    let scale = 1.0 / (*head_dim as f32).sqrt();
    let call = AttnDecode {
        heads: *heads,
        pages,
        pool: cache.pool.ptr(),
        q: device_q.ptr(),
        q_stride,
        out: out.ptr(),
        out_stride,
        columns: columns.columns,
        rows: rows.len(),
        batch_rows: rows.len(),
        window: *window,
        scale: scale * k_scale,
        v_scale,
        workspace: workspace.ptr(),
    };
    // SAFETY: the buffers are as large as the call says.
    lab.twice(&out, || unsafe {
        match many {
            false => attn_decode(lab.queue(), &call).unwrap(),
            true => attn_prefill(lab.queue(), &call).unwrap(),
        }
    });
    let found = lab.read_bf16(&out, rows.len() * out_stride);
    let what =
        format!("{heads} heads of {head_dim} over {kv_heads}, keys {keys:?}, rows {rows:?}, fp8 {fp8}");
    let mut judge = Judge::new(what);
    for (r, &row) in rows.iter().enumerate() {
        for h in 0..*heads {
            let q = &q[r * q_stride + h * head_dim..][..*head_dim];
            let (expected, size) =
                cache.attend(keys, row, *window, h / (heads / kv_heads), f64::from(scale * k_scale), q);
            for i in 0..*head_dim {
                let v = f64::from(v_scale);
                let allowed = (2.0 * 2f64.powi(-8) + 2e-4) * size[i] * v + 1e-6;
                judge.see((r, h, i), found[r * out_stride + h * head_dim + i], expected[i] * v, allowed);
            }
        }
    }
    judge.finish(4e-3);
}

#[test]
fn attention_reads_what_each_row_sees() {
    let Some(lab) = Lab::new() else { return };
    let widest = PageShape { kv_heads: 16, head_dim: 512, fp8: false };
    let workspace = lab.bytes(&vec![0; workspace_bytes(16, 128, widest, 132) * 2]);
    let last = |s: usize, keys: usize| (s, keys - 1, keys);
    let single = |heads, kv_heads, head_dim, window, keys: usize| Case {
        heads,
        kv_heads,
        head_dim,
        window,
        keys: vec![keys],
        rows: vec![last(0, keys)],
    };
    let mut cases = vec![
        single(8, 1, 512, None, 1),
        single(8, 1, 512, None, 33),
        single(8, 1, 512, None, 2077),
        single(8, 1, 256, Some(512), 1101),
        single(16, 2, 512, None, 707),
        single(16, 8, 256, Some(1024), 1500),
        single(32, 4, 512, None, 300),
        single(32, 16, 256, Some(1024), 91),
        single(8, 2, 512, None, 129),
        // Sixteen heads of one kv head, as in 12B; five, an odd group.
        single(16, 1, 512, None, 450),
        single(5, 1, 256, None, 200),
    ];
    let keys = vec![70, 1, 333, 1200, 64];
    cases.push(Case {
        heads: 8,
        kv_heads: 2,
        head_dim: 256,
        window: Some(130),
        rows: (0..5).map(|s| last(s, keys[s])).collect(),
        keys: keys.clone(),
    });
    // Rows of one sequence in a row (drafts), and a row that sees beyond itself (a vision block).
    cases.push(Case {
        heads: 8,
        kv_heads: 1,
        head_dim: 512,
        window: None,
        rows: vec![(0, 95, 96), (0, 96, 97), (0, 97, 98), (1, 40, 57), (1, 41, 57), (2, 0, 1)],
        keys: vec![98, 57, 1],
    });
    cases.push(Case {
        heads: 32,
        kv_heads: 16,
        head_dim: 256,
        window: Some(96),
        rows: (0..13).map(|r| (r % 3, 100 + 7 * r, 101 + 7 * r)).collect(),
        keys: vec![190, 191, 192],
    });
    for case in &cases {
        for fp8 in [false, true] {
            check(&lab, &workspace, case, fp8, false);
        }
    }
}

/// Heads that attention finishes by itself: shape of the layer, then of its own keys and values.
struct Own {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    keys: &'static [usize],
    planes: usize,
    writes: bool,
    values_are_keys: bool,
    norm_values: bool,
    /// A row whose key goes nowhere.
    nowhere: Option<usize>,
}

/// Results, and bytes of the pool, of heads finished in a kernel of their own and in attention's.
fn check_own(lab: &Lab, workspace: &Block, case: &Own, fp8: bool) {
    let &Own { heads, kv_heads, head_dim: d, window, keys, planes, .. } = case;
    let pages = PageShape { kv_heads, head_dim: d, fp8 };
    let rows: Vec<Row> = keys.iter().enumerate().map(|(s, &n)| (s, n - 1, n)).collect();
    let parts = if case.values_are_keys { 1 } else { 2 } * usize::from(case.writes);
    let (stride, rope_stride) = ((heads + parts * kv_heads) * d + 4, d + 12);
    let plane_stride = rows.len() * stride + 16;
    let qkv = lab.f32(&random(planes * plane_stride, 41));
    let gains = [42, 43].map(|seed| lab.f32(&random(d, seed).iter().map(|v| 1.5 + v).collect::<Vec<_>>()));
    let turn = |i: usize| (i % rope_stride) as f32 * 0.37;
    let rope: Vec<f32> = (0..rows.len() * rope_stride)
        .map(|i| if i % rope_stride < d / 2 { turn(i).cos() } else { turn(i - d / 2).sin() })
        .collect();
    let rope = lab.f32(&rope);
    let mut runs = Vec::new();
    for one in [false, true] {
        let cache = Cache::new(lab, pages, keys);
        let columns = Columns::new(lab, &cache, &rows);
        let cell = |&(s, position, _): &Row| {
            let page = cache.tables[cache.starts[s] as usize + position / 32];
            if case.nowhere == Some(s) { -1 } else { page * 32 + position as i32 % 32 }
        };
        let cells = lab.i32(&rows.iter().map(cell).collect::<Vec<_>>());
        let (q, out) = (lab.poisoned(rows.len() * heads * d * 2), lab.poisoned(rows.len() * heads * d * 2));
        let kv_scales = if fp8 { [0.5, 0.25] } else { [1.0, 1.0] };
        let made = Finish {
            qkv: qkv.ptr(),
            qkv_stride: stride,
            plane_stride,
            planes,
            store_q: false,
            rows: rows.len(),
            heads,
            pages,
            writes: case.writes,
            values_are_keys: case.values_are_keys,
            q_norm: (gains[0].ptr(), 1e-6),
            k_norm: (gains[1].ptr(), 1e-6),
            v_eps: case.norm_values.then_some(1e-6),
            rope: rope.ptr(),
            rope_stride,
            cell: cells.ptr(),
            map: DevPtr::NULL,
            pool: cache.pool.ptr(),
            kv_scales,
            q: q.ptr(),
            q_stride: heads * d,
        };
        let call = AttnDecode {
            heads,
            pages,
            pool: cache.pool.ptr(),
            q: q.ptr(),
            q_stride: heads * d,
            out: out.ptr(),
            out_stride: heads * d,
            columns: columns.columns,
            rows: rows.len(),
            batch_rows: rows.len(),
            window,
            scale: kv_scales[0],
            v_scale: kv_scales[1],
            workspace: workspace.ptr(),
        };
        // SAFETY: the buffers are as large as the calls say, and every row has a sequence of its own.
        unsafe {
            if one {
                finish_and_attend(lab.queue(), &made, &call).unwrap();
            } else {
                finish(lab.queue(), &made).unwrap();
                attn_decode(lab.queue(), &call).unwrap();
            }
        }
        let pool = lab.read(&cache.pool, cache.pool.len());
        runs.push((lab.read_bf16(&out, rows.len() * heads * d), pool));
    }
    let what =
        format!("{heads} heads of {d} over {kv_heads}, keys {keys:?}, fp8 {fp8}, writes {}", case.writes);
    assert!(runs[0].0.iter().all(|v| v.is_finite()), "{what}");
    assert!(runs[0].1 == runs[1].1, "{what}: keys and values differ");
    let bits = |run: usize| runs[run].0.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(bits(0) == bits(1), "{what}: results differ");
}

#[test]
fn attention_that_finishes_its_heads_has_the_bits_of_both_kernels() {
    let Some(lab) = Lab::new() else { return };
    let widest = PageShape { kv_heads: 16, head_dim: 512, fp8: false };
    let workspace = lab.bytes(&vec![0; workspace_bytes(16, 128, widest, 132) * 2]);
    let own = Own {
        heads: 8,
        kv_heads: 1,
        head_dim: 256,
        window: None,
        keys: &[],
        planes: 1,
        writes: true,
        values_are_keys: false,
        norm_values: true,
        nowhere: None,
    };
    let cases = [
        // The row's key alone, first and last of a page, in the middle, behind several clusters' worth of pages.
        Own { keys: &[1], planes: 3, ..own },
        Own { keys: &[33], head_dim: 512, planes: 2, ..own },
        Own { keys: &[96], window: Some(70), ..own },
        Own { keys: &[2077], head_dim: 512, planes: 3, values_are_keys: true, ..own },
        Own { heads: 32, kv_heads: 16, keys: &[1500], window: Some(1024), norm_values: false, ..own },
        Own { heads: 32, kv_heads: 4, head_dim: 512, keys: &[300], values_are_keys: true, ..own },
        // Two units of a kv head, of which one stores; seven heads, five, three.
        Own { heads: 16, head_dim: 512, keys: &[450], planes: 2, ..own },
        Own { heads: 7, keys: &[200], ..own },
        Own { heads: 10, kv_heads: 2, keys: &[77], planes: 2, ..own },
        Own { heads: 3, keys: &[64], ..own },
        // Keys of another layer.
        Own { keys: &[130], writes: false, planes: 2, ..own },
        Own { head_dim: 512, keys: &[1999], writes: false, ..own },
        // Rows of several sequences, one of which writes nowhere.
        Own { heads: 16, kv_heads: 8, keys: &[70, 1, 333, 1200, 64], window: Some(130), planes: 3, ..own },
        Own { keys: &[40, 65, 32], head_dim: 512, nowhere: Some(1), ..own },
    ];
    for case in &cases {
        for fp8 in [false, true] {
            check_own(&lab, &workspace, case, fp8);
        }
    }
}

#[test]
fn attention_of_many_rows_reads_what_each_sees() {
    let Some(lab) = Lab::new() else { return };
    let workspace = lab.poisoned(16);
    let case = |heads, kv_heads, head_dim, window, keys: Vec<usize>, rows: Vec<Row>| {
        check(&lab, &workspace, &Case { heads, kv_heads, head_dim, window, keys, rows }, false, true);
    };
    let causal = |sequence: usize, from: usize, to: usize| (from..to).map(move |p| (sequence, p, p + 1));
    case(8, 1, 512, None, vec![17], causal(0, 0, 17).collect());
    case(8, 1, 256, Some(40), vec![129], causal(0, 0, 129).collect());
    case(8, 2, 512, None, vec![300], causal(0, 257, 300).collect());
    case(32, 16, 256, Some(64), vec![150], causal(0, 31, 150).collect());
    case(4, 4, 256, None, vec![257], causal(0, 0, 257).collect());
    case(16, 1, 512, None, vec![90], causal(0, 60, 90).collect());
    case(5, 1, 256, None, vec![77], causal(0, 0, 77).collect());
    // Several sequences in one block, single rows among them, and a vision block that sees to its end.
    let mut rows: Vec<Row> = causal(0, 90, 95).chain(causal(1, 10, 11)).chain(causal(2, 0, 9)).collect();
    rows.extend((3..9).map(|p| (3, p, if p < 7 { 12 } else { p + 1 })));
    rows.extend(causal(4, 64, 66));
    case(8, 2, 256, Some(33), vec![95, 11, 9, 12, 66], rows.clone());
    case(8, 1, 512, None, vec![95, 11, 9, 12, 66], rows);
}

#[test]
fn heads_that_do_not_fit_are_refused_by_name() {
    let Some(lab) = Lab::new() else { return };
    let pages = PageShape { kv_heads: 2, head_dim: 128, fp8: false };
    let none = DevPtr::NULL;
    let columns = KvColumns { positions: none, visible_to: none, table: none, pages: none, map: none };
    let call = AttnDecode {
        heads: 4,
        pages,
        pool: none,
        q: none,
        q_stride: 512,
        out: none,
        out_stride: 512,
        columns,
        rows: 1,
        batch_rows: 1,
        window: None,
        scale: 1.0,
        v_scale: 1.0,
        workspace: none,
    };
    // SAFETY: refused before anything is launched.
    let error = unsafe { attn_decode(lab.queue(), &call).unwrap_err() };
    assert_eq!(error.to_string(), "attn_decode does not take this: 4 heads of 128 over 2 kv heads");
}
