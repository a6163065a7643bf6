//! Prints how fast a product of one row, or of some, reads weights that no cache holds, beside a plain read of as many bytes in turn.
//!
//! `cargo run --release -p lapidary-cpu --example read_speed [threads] [columns] [format,format] [rows]`; GB/s, best and median of the
//! rounds. A shared machine's memory gives more at one moment than at another, so only figures of one run compare.

use std::hint::black_box;
use std::time::Instant;

use lapidary_cpu::{Compute, CpuBackend, CpuOptions};
use lapidary_formats::encode_rows;
use lapidary_ops::*;

const BYTES: usize = 256 << 20;
const ROUNDS: usize = 9;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let threads: usize = args.get(1).and_then(|t| t.parse().ok()).unwrap_or(1);
    let columns: usize = args.get(2).and_then(|t| t.parse().ok()).unwrap_or(1536);
    let names = args.get(3).map_or("Q4_0,Q5_0,Q8_0,Q4_K,Q6_K,F16,BF16", String::as_str);
    let rows: usize = args.get(4).and_then(|t| t.parse().ok()).unwrap_or(1);
    let plain: Vec<u64> = (0..(BYTES / 8) as u64).collect();
    for name in names.split(',') {
        let Some(format) = Format::ALL.into_iter().find(|f| f.name() == name) else {
            println!("no format is called {name}");
            continue;
        };
        let mut cpu = CpuBackend::new(CpuOptions {
            threads: Some(threads),
            compute: Compute::Fast,
            level: None,
            ..CpuOptions::default()
        })?;
        let weights: Vec<f32> =
            (0..256 * columns).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect();
        let encoded = encode_rows(format, &weights, 256, columns).expect("whole blocks");
        let view = encoded.view("w");
        let copies = BYTES / view.bytes.len();
        let outputs = 256 * copies;
        let mats: Vec<Mat> =
            (0..copies / 16).map(|_| cpu.pack(&vec![view.clone(); 16], 256 * 16)).collect::<Result<_>>()?;
        let act = |width, kind| ActSpec { name: "a", width, kind, rows: ActRows::Batch, max_rows: rows };
        let x = cpu.activation(act(columns, ActKind::Input))?;
        let from = cpu.activation(act(columns, ActKind::F32))?;
        let out = cpu.activation(act(256 * 16, ActKind::F32))?;
        let batch = Batch {
            tokens: vec![0; rows],
            per_layer_tokens: vec![0; rows],
            positions: (0..rows as i32).collect(),
            spans: vec![RowSpan {
                first_row: 0,
                rows,
                tables: [PageTable { start: 0, count: 0, first_block: 0 }; 2],
            }],
            visible_to: [vec![1; rows], vec![1; rows]],
            soft_rows: (0..rows as i32).collect(),
            soft_values: (0..rows * columns).map(|i| (i % 97) as f32 / 48.0 - 1.0).collect(),
            ..Batch::default()
        };
        cpu.upload(&batch)?;
        let shape = batch.shape(1, TailRows::All);
        cpu.run(&shape, &|ops| {
            ops.inject_soft(from);
            ops.cast(x, from);
        })?;
        let bytes = (view.bytes.len() * 16 * mats.len()) as f64;
        let (mut products, mut reads) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let start = Instant::now();
            cpu.run(&shape, &|ops| mats.iter().for_each(|&m| ops.linear(out, x, m)))?;
            products.push(bytes / start.elapsed().as_secs_f64() / 1e9);
            let start = Instant::now();
            std::thread::scope(|scope| {
                for stripe in plain.chunks(plain.len() / threads) {
                    scope.spawn(move || black_box(sum(black_box(stripe))));
                }
            });
            reads.push((plain.len() * 8) as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        let summary = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            (values[values.len() - 1], values[values.len() / 2])
        };
        let (product, read) = (summary(&mut products), summary(&mut reads));
        println!(
            "{name:>6} [{outputs}, {columns}] {threads} threads: best {:.1} median {:.1}, plain read {:.1} and {:.1}: {:.0} % and {:.0} %",
            product.0,
            product.1,
            read.0,
            read.1,
            100.0 * product.0 / read.0,
            100.0 * product.1 / read.1
        );
    }
    Ok(())
}

fn sum(words: &[u64]) -> u64 {
    let mut lanes = [0u64; 16];
    let (chunks, rest) = words.as_chunks::<16>();
    for chunk in chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.iter().chain(rest).fold(0, |s, w| s.wrapping_add(*w))
}
