//! RMS norm of one row or head.
//!
//! `x * (mean(x^2) + eps)^(-1/2) * gain`. The squares go to 16 lanes by position and one fixed tree.

use crate::level::for_level;

for_level! {
    /// `(mean((x * by)^2) + eps)^(-1/2)`.
    pub fn inv_rms(x: &[f32], by: f32, eps: f32) -> f32 {
        let mut lanes = [0.0f32; 16];
        let (parts, rest) = x.as_chunks::<16>();
        for part in parts {
            for (l, &v) in lanes.iter_mut().zip(part) {
                let v = v * by;
                *l += v * v;
            }
        }
        for (l, &v) in lanes.iter_mut().zip(rest) {
            let v = v * by;
            *l += v * v;
        }
        let mut half = 8;
        while half > 0 {
            for l in 0..half {
                lanes[l] += lanes[l + half];
            }
            half /= 2;
        }
        1.0 / (lanes[0] / x.len() as f32 + eps).sqrt()
    }
}

for_level! {
    /// `out = x * factor * gain`.
    pub fn apply(x: &[f32], factor: f32, gain: &[f32], out: &mut [f32]) {
        for ((o, &v), &g) in out.iter_mut().zip(x).zip(gain) {
            *o = v * factor * g;
        }
    }
}

for_level! {
    /// `x = x * factor * gain`.
    pub fn apply_in_place(x: &mut [f32], factor: f32, gain: &[f32]) {
        for (v, &g) in x.iter_mut().zip(gain) {
            *v = *v * factor * g;
        }
    }
}

for_level! {
    /// Rotates pairs `(i, i + n / 2)`: `[a cos - b sin, b cos + a sin]`, with `table = [cos.., sin..]`.
    pub fn rotate(x: &mut [f32], table: &[f32]) {
        let half = x.len() / 2;
        let (a, b) = x.split_at_mut(half);
        let (cos, sin) = table.split_at(half);
        for (((a, b), &c), &s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            let (p, q) = (*a, *b);
            *a = p * c - q * s;
            *b = q * c + p * s;
        }
    }
}
