//! Prints the speed of the main kernels on this machine: products by format and rows, attention by depth.
//!
//! `cargo run --release -p lapidary-cpu --example kernels [threads] [mode] [level] [format, attention or all]`; rates are the best of several
//! passes, since a shared machine only ever adds time.

use std::time::Instant;

use lapidary_cpu::{Compute, CpuBackend, CpuOptions, Level};
use lapidary_formats::encode_rows;
use lapidary_ops::*;

const HIDDEN: usize = 2048;
const OUTPUTS: usize = 8192;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let threads = args.get(1).and_then(|t| t.parse().ok());
    let compute = if args.get(2).is_some_and(|m| m == "fast") { Compute::Fast } else { Compute::F32 };
    let level = args.get(3).and_then(|name| Level::named(name));
    let formats = [
        Format::F32,
        Format::Bf16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Iq4Nl,
        Format::Mxfp4,
        Format::Nvfp4,
        Format::GgufNvfp4,
        Format::Int4G32,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
        Format::Fp8E4M3,
    ];
    let only = args.get(4).map_or("all", |o| o);
    println!("{:>8} {:>6} {:>10} {:>10}", "format", "rows", "GFLOP/s", "GB/s");
    for format in formats.into_iter().filter(|f| only == "all" || only == f.name()) {
        // Of one format alone, all small batches.
        let few = if only == "all" { vec![1, 4, 16] } else { (1..=16).collect() };
        for rows in few.into_iter().chain([64, 256]) {
            product(CpuOptions { threads, compute, level, ..CpuOptions::default() }, format, rows)?;
        }
    }
    let shapes = [(4, 256, 4096, 1, 1), (4, 256, 4096, 1, 40), (8, 512, 4096, 1, 20), (8, 256, 512, 256, 1)];
    for format in [KvFormat::F16, KvFormat::Bf16, KvFormat::Q8_0] {
        for (heads, d, depth, rows, layers) in shapes {
            if only == "all" || only == "attention" {
                let options = CpuOptions { threads, compute, level, ..CpuOptions::default() };
                attention(options, format, heads, d, depth, rows, layers)?;
            }
        }
    }
    Ok(())
}

fn best(passes: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::MAX;
    for _ in 0..passes {
        let start = Instant::now();
        f()?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok(least)
}

fn batch(rows: usize, start: usize) -> Batch {
    let end = start + rows;
    let table = PageTable { start: 0, count: end.div_ceil(PAGE_TOKENS), first_block: 0 };
    let to: Vec<i32> = (start..end).map(|p| p as i32 + 1).collect();
    Batch {
        tokens: vec![0; rows],
        per_layer_tokens: vec![0; rows],
        positions: (start..end).map(|p| p as i32).collect(),
        spans: vec![RowSpan { first_row: 0, rows, tables: [table; 2] }],
        visible_to: [to.clone(), to],
        pages: std::array::from_fn(|_| (1..=table.count as i32).collect()),
        ..Batch::default()
    }
}

fn product(options: CpuOptions, format: Format, rows: usize) -> Result<()> {
    let mut cpu = CpuBackend::new(options)?;
    let weights: Vec<f32> = (0..256 * HIDDEN).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect();
    let encoded = encode_rows(format, &weights, 256, HIDDEN).expect("whole blocks");
    // The same rows over and over, but in memory of their own.
    let view = encoded.view("w");
    let copies = OUTPUTS / 256;
    let w = cpu.pack(&vec![view.clone(); copies], OUTPUTS)?;
    let act = |width, kind| ActSpec { name: "a", width, kind, rows: ActRows::Batch, max_rows: rows };
    let x = cpu.activation(act(HIDDEN, ActKind::Input))?;
    let from = cpu.activation(act(HIDDEN, ActKind::F32))?;
    let out = cpu.activation(act(OUTPUTS, ActKind::F32))?;
    let mut batch = batch(rows, 0);
    batch.pages = Default::default();
    batch.spans[0].tables = Default::default();
    batch.soft_rows = (0..rows as i32).collect();
    batch.soft_values = (0..rows * HIDDEN).map(|i| (i % 97) as f32 / 48.0 - 1.0).collect();
    cpu.upload(&batch)?;
    let shape = batch.shape(1, TailRows::All);
    cpu.run(&shape, &|ops| {
        ops.inject_soft(from);
        ops.cast(x, from);
    })?;
    let bytes = view.bytes.len() as f64 * copies as f64;
    let flops = 2.0 * rows as f64 * OUTPUTS as f64 * HIDDEN as f64;
    let seconds = best(if rows < 64 { 30 } else { 6 }, || cpu.run(&shape, &|ops| ops.linear(out, x, w)))?;
    println!(
        "{:>8} {rows:>6} {:>10.1} {:>10.2}",
        format.name(),
        flops / seconds / 1e9,
        bytes / seconds / 1e9
    );
    Ok(())
}

/// One layer after the other, each with keys and values of its own: with enough of them nothing is found in a cache.
fn attention(
    options: CpuOptions,
    format: KvFormat,
    heads: usize,
    d: usize,
    depth: usize,
    rows: usize,
    layers: usize,
) -> Result<()> {
    let mut cpu = CpuBackend::new(options)?;
    let group = KvGroupPlan {
        layers: vec![KvLayerShape { kv_heads: 1, head_dim: d }; layers],
        format,
        pages: depth / PAGE_TOKENS + 2,
        window: None,
    };
    let none = KvGroupPlan { layers: Vec::new(), ..group.clone() };
    let mut groups = [none.clone(), none];
    groups[Group::Full.index()] = group;
    cpu.kv(&KvPlan { groups })?;
    let cache = |index| KvRef { group: Group::Full, index, writes: true };
    for (layer, p) in (0..layers).flat_map(|l| (0..depth).map(move |p| (l, p))) {
        let k: Vec<f32> = (0..d).map(|i| ((i * p) % 31) as f32 / 15.0 - 1.0).collect();
        cpu.kv_store(cache(layer), 1 + p / PAGE_TOKENS, p % PAGE_TOKENS, &k, &k)?;
    }
    let act = |width| ActSpec { name: "a", width, kind: ActKind::F32, rows: ActRows::Batch, max_rows: rows };
    let (qkv, out) = (cpu.activation(act(heads * d))?, cpu.activation(act(heads * d))?);
    let mut batch = batch(rows, depth - rows);
    batch.soft_rows = (0..rows as i32).collect();
    batch.soft_values = (0..rows * heads * d).map(|i| (i % 97) as f32 / 480.0 - 0.1).collect();
    cpu.upload(&batch)?;
    let shape = batch.shape(1, TailRows::All);
    cpu.run(&shape, &|ops| ops.inject_soft(qkv))?;
    let (scale, softcap, window) = (0.06, None, None);
    let mut layer = 0;
    let seconds = best(20 * layers, || {
        layer = (layer + 1) % layers;
        let cache = cache(layer);
        let spec = AttnSpec { heads, kv_heads: 1, head_dim: d, scale, softcap, window, cache };
        cpu.run(&shape, &|ops| ops.attention(out, qkv, &spec))
    })?;
    let pairs = (depth * rows - rows * (rows - 1) / 2) as f64;
    let flops = 4.0 * pairs * (heads * d) as f64;
    println!(
        "attention {} {heads} x {d}, depth {depth}, rows {rows}, {layers} layers: {:.1} us, {:.1} GFLOP/s, {:.2} GB/s",
        format.name(),
        seconds * 1e6,
        flops / seconds / 1e9,
        (depth * d * 4) as f64 / seconds / 1e9
    );
    Ok(())
}
