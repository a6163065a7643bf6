//! What the measurements share: a pool of weights in rotation, the read bandwidth, a line of output.

use std::sync::Arc;

use lapidary_cuda::driver::{Block, Context};
use lapidary_cuda::kernels::bandwidth::read_all;

use crate::lab::Lab;

pub const POOL: usize = 8 << 30;
/// Several times the second-level cache.
pub const ROTATION: usize = 320 << 20;

pub fn gpu() -> Option<Arc<Context>> {
    Context::new(0).map_err(|e| println!("skipped: {e}")).ok()
}

/// What every measurement needs: a pool of weights, inputs, room for results.
pub struct Bench {
    pub lab: Lab,
    pub pool: Block,
    pub x: Block,
    pub out: Block,
    pub aux: Block,
    pub big: Block,
    pub ceiling: f64,
}

pub fn main() {
    let Some(lab) = Lab::new() else { return };
    let wanted = std::env::args().nth(1).filter(|a| !a.starts_with('-'));
    let wants = |name: &str| wanted.as_deref().is_none_or(|w| w == name);
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
        let named = |i| std::env::args().nth(i);
        bench.sweep(named(2).as_deref(), named(3).as_deref(), named(4).as_deref());
    }
    if wants("experts") {
        bench.experts();
    }
    if wants("attention") {
        bench.attention();
    }
    if wants("prefill") {
        bench.prefill();
        bench.prefill_attention();
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

pub fn launches(us: f64, least: usize) -> usize {
    ((300.0 / us) as usize).clamp(least, 128)
}

impl Bench {
    pub fn line(&self, what: &str, bytes: f64, us: f64) {
        let rate = bytes / us * 1e-3;
        println!(
            "{what:44} {:9.2} MB {us:9.2} us {rate:6.0} GB/s {:5.1} %",
            bytes / 1e6,
            rate / self.ceiling * 100.0
        );
    }
}
