//! Norms, head norms with rotation and KV write, router and arg max, against float64.

use lapidary_cuda::driver::DevPtr;
use lapidary_cuda::kernels::attn_decode::PageShape;
use lapidary_cuda::kernels::producers::{
    Argmax, Branch, Finish, NormOut, Residual, Router, argmax, argmax_workspace_bytes, finish, residual,
    router,
};
use lapidary_formats::fp8::e4m3_to_f32;

use crate::lab::{Judge, Lab, random};

const EPS: f32 = 1e-6;

fn rms(x: &[f64], gain: Option<&[f32]>) -> Vec<f64> {
    let f = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt();
    x.iter().enumerate().map(|(i, v)| v * f * gain.map_or(1.0, |g| f64::from(g[i]))).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

#[test]
fn the_residual_takes_branches_and_goes_on_normed() {
    let Some(lab) = Lab::new() else { return };
    for width in [12, 256, 1536, 2816, 5376, 5632] {
        for (rows, y_planes, z_planes) in [(1, 1, 0), (3, 3, 0), (16, 2, 3), (2, 0, 0)] {
            let stride = width + 8;
            let plane = rows * stride;
            let gains: Vec<Vec<f32>> =
                (0..5).map(|g| random(width, 50 + g).iter().map(|v| 1.0 + 0.3 * v).collect()).collect();
            let device_gains: Vec<_> = gains.iter().map(|g| lab.f32(g)).collect();
            let x = random(plane, 1);
            let y = random(3 * plane, 2);
            let z = random(3 * plane, 3);
            let (device_y, device_z) = (lab.f32(&y), lab.f32(&z));
            let outs: Vec<_> = (0..3).map(|_| lab.poisoned(plane * 4)).collect();
            let branch = |p: &lapidary_cuda::driver::Block, planes, gain: usize| Branch {
                p: p.ptr(),
                gain: device_gains[gain].ptr(),
                plane_stride: plane as u64,
                planes,
                stride: stride as i32,
            };
            let out = |i: usize, gain, bf16| NormOut { p: outs[i].ptr(), gain, stride: stride as i32, bf16 };
            let scalar = 0.7;
            let run = || {
                let device_x = lab.f32(&x);
                let call = Residual {
                    x: device_x.ptr(),
                    x_out: device_x.ptr(),
                    x_stride: stride,
                    rows,
                    width,
                    y: if y_planes > 0 { branch(&device_y, y_planes, 0) } else { Branch::NONE },
                    z: if z_planes > 0 { branch(&device_z, z_planes, 1) } else { Branch::NONE },
                    post: device_gains[2].ptr(),
                    scalar,
                    eps: EPS,
                    outs: [
                        out(0, device_gains[3].ptr(), 1),
                        out(1, device_gains[4].ptr(), 0),
                        out(2, DevPtr::NULL, 1),
                    ],
                };
                // SAFETY: the buffers are as large as the call says.
                unsafe { residual(lab.queue(), &call).unwrap() };
                (
                    lab.read_f32(&device_x, plane),
                    lab.read_bf16(&outs[0], plane),
                    lab.read_f32(&outs[1], plane),
                )
            };
            let (found, normed, precise) = run();
            assert!(run().0 == found, "two runs differ");
            let cast = lab.read_bf16(&outs[2], plane);
            let mut judges: Vec<_> =
                ["x", "bf16", "f32", "cast"].map(|n| Judge::new(format!("{n} {width} {rows} rows"))).into();
            for r in 0..rows {
                let at = r * stride;
                let sum = |p: &[f32], planes: i32| -> Vec<f64> {
                    (0..width)
                        .map(|i| (0..planes as usize).map(|n| f64::from(p[n * plane + at + i])).sum())
                        .collect()
                };
                let mut v = wide(&x[at..at + width]);
                if y_planes > 0 {
                    let mut branch = sum(&y, y_planes);
                    if z_planes > 0 {
                        let z = rms(&sum(&z, z_planes), Some(&gains[1]));
                        branch = rms(&branch, Some(&gains[0])).iter().zip(z).map(|(a, b)| a + b).collect();
                    }
                    let added = rms(&branch, Some(&gains[2]));
                    v = v.iter().zip(added).map(|(x, y)| (x + y) * f64::from(scalar)).collect();
                }
                let (a, b) = (rms(&v, Some(&gains[3])), rms(&v, Some(&gains[4])));
                for i in 0..width {
                    // A sum of squares of one sign keeps a relative error of width 2^-24 in any order, half of
                    // which reaches the factor; a few roundings more. Here 2e-5 for 5,632 values.
                    let near = |v: f64| 4e-5 * (v.abs() + 1.0);
                    judges[0].see((r, i), found[at + i], v[i], near(v[i]));
                    judges[1].see((r, i), normed[at + i], a[i], near(a[i]) + a[i].abs() * 2f64.powi(-8));
                    judges[2].see((r, i), precise[at + i], b[i], near(b[i]));
                    judges[3].see((r, i), cast[at + i], v[i], near(v[i]) + v[i].abs() * 2f64.powi(-8));
                }
                // What lies beyond a row stays as it was.
                assert!(found[at + width..at + stride] == x[at + width..at + stride]);
            }
            for (judge, allowed) in judges.into_iter().zip([2e-6, 4e-3, 2e-6, 4e-3]) {
                judge.finish(allowed);
            }
        }
    }
}

#[test]
fn heads_are_normed_rotated_and_written() {
    let Some(lab) = Lab::new() else { return };
    // Query heads, kv heads, head dim, own values, value norm, planes, rows.
    let cases = [
        (8, 1, 256, true, true, 1, 1),
        (8, 1, 512, true, true, 2, 3),
        (32, 4, 512, false, true, 1, 2),
        (32, 16, 256, true, false, 3, 5),
        (16, 1, 512, false, true, 2, 16),
        (8, 0, 512, true, true, 1, 4),
    ];
    for (heads, kv_heads, d, own, norm_values, planes, rows) in cases {
        for fp8 in [false, true] {
            let pages = PageShape { kv_heads: kv_heads.max(1), head_dim: d, fp8 };
            let stacked = heads + kv_heads * if own { 2 } else { 1 };
            let (stride, rope_stride) = (stacked * d + 4, d + 12);
            let plane = rows * stride + 16;
            let qkv = random(planes * plane, 21);
            let (q_gain, k_gain) = (random(d, 22), random(d, 23));
            let angle =
                |r: usize, i: usize| (r * 37 + 3) as f64 * 10000f64.powf(-((2 * i) as f64) / d as f64);
            let mut rope = vec![f32::NAN; rows * rope_stride];
            for r in 0..rows {
                for i in 0..d / 2 {
                    rope[r * rope_stride + i] = angle(r, i).cos() as f32;
                    rope[r * rope_stride + d / 2 + i] = angle(r, i).sin() as f32;
                }
            }
            // Row 1 writes nowhere.
            let cells: Vec<i32> = (0..rows as i32)
                .map(|r| if r == 1 { -1 } else { (1 + r % 3) * 32 + (r * 5 + 2) % 32 })
                .collect();
            let pool = lab.poisoned(4 * pages.page_bytes());
            let (device_q, q_stride) = (lab.poisoned(rows * (heads * d + 8) * 2), heads * d + 8);
            let (gq, gk, device_rope, device_cells) =
                (lab.f32(&q_gain), lab.f32(&k_gain), lab.f32(&rope), lab.i32(&cells));
            let device_qkv = lab.f32(&qkv);
            let scales = if fp8 { [0.01, 0.02] } else { [1.0, 1.0] };
            let call = Finish {
                qkv: device_qkv.ptr(),
                qkv_stride: stride,
                plane_stride: plane,
                planes,
                store_q: true,
                rows,
                heads,
                pages,
                writes: kv_heads > 0,
                values_are_keys: !own,
                q_norm: (gq.ptr(), EPS),
                k_norm: (gk.ptr(), EPS),
                v_eps: norm_values.then_some(EPS),
                rope: device_rope.ptr(),
                rope_stride,
                cell: device_cells.ptr(),
                map: DevPtr::NULL,
                pool: pool.ptr(),
                kv_scales: scales,
                q: device_q.ptr(),
                q_stride,
            };
            // SAFETY: the buffers are as large as the call says.
            unsafe { finish(lab.queue(), &call).unwrap() };
            let q = lab.read_bf16(&device_q, rows * q_stride);
            let back = lab.read_f32(&device_qkv, rows * stride);
            let bytes = lab.read(&pool, 4 * pages.page_bytes());
            let what = format!("{heads} + {kv_heads} heads of {d}, {planes} planes, fp8 {fp8}");
            let mut judges = [Judge::new(format!("q {what}")), Judge::new(format!("kv {what}"))];
            let head = |r: usize, h: usize| -> Vec<f64> {
                (0..d)
                    .map(|i| (0..planes).map(|p| f64::from(qkv[p * plane + r * stride + h * d + i])).sum())
                    .collect()
            };
            let rotate = |x: &[f64], r: usize| -> Vec<f64> {
                (0..d)
                    .map(|i| {
                        let (c, s) = (angle(r, i % (d / 2)).cos(), angle(r, i % (d / 2)).sin());
                        if i < d / 2 { x[i] * c - x[i + d / 2] * s } else { x[i] * c + x[i - d / 2] * s }
                    })
                    .collect()
            };
            let mut written = 0;
            for r in 0..rows {
                for h in 0..heads {
                    let expected = rotate(&rms(&head(r, h), Some(&q_gain)), r);
                    for i in 0..d {
                        let v = expected[i];
                        judges[0].see(
                            (r, h, i),
                            q[r * q_stride + h * d + i],
                            v,
                            v.abs() * 2f64.powi(-8) + 1e-5,
                        );
                        let exact = f64::from(back[r * stride + h * d + i]);
                        assert!((exact - v).abs() < 1e-5, "{what} {exact} {v}");
                    }
                }
                if cells[r] < 0 {
                    continue;
                }
                for h in 0..kv_heads {
                    let k = rotate(&rms(&head(r, heads + h), Some(&k_gain)), r);
                    let mut v = head(r, heads + h + if own { kv_heads } else { 0 });
                    if norm_values {
                        v = rms(&v, None);
                    }
                    for (side, expected) in [k, v].iter().enumerate() {
                        for (i, &v) in expected.iter().enumerate() {
                            let at = pages.offset(cells[r] as usize / 32, h, side, cells[r] as usize % 32, i);
                            let (found, allowed) = if fp8 {
                                // Half a step of the mantissa, or of the smallest number.
                                let s = f64::from(scales[side]);
                                (f64::from(e4m3_to_f32(bytes[at])) * s, v.abs() / 16.0 + s * 2f64.powi(-10))
                            } else {
                                let v16 = half::bf16::from_le_bytes([bytes[at], bytes[at + 1]]);
                                (v16.to_f64(), v.abs() * 2f64.powi(-8))
                            };
                            written += pages.value_bytes();
                            judges[1].see((r, h, side, i), found as f32, v, allowed * 1.001 + 1e-5);
                        }
                    }
                }
            }
            let [a, b] = judges;
            a.finish(4e-3);
            if written > 0 {
                b.finish(if fp8 { 4e-2 } else { 4e-3 });
            }
            // Every other byte of the pool is untouched: NaN in both formats, which no written value is.
            let untouched = bytes.iter().filter(|&&b| b == 0xFF).count();
            assert!(untouched >= bytes.len() - written, "{what}: {untouched} of {}", bytes.len());
        }
    }
}

#[test]
fn the_router_picks_the_largest_and_lists_them() {
    let Some(lab) = Lab::new() else { return };
    for (experts, top_k, width, rows) in [
        (128, 8, 2816, 1),
        (128, 8, 2816, 16),
        (128, 8, 704, 5),
        (127, 6, 3588, 3),
        (11, 3, 48, 7),
        (33, 32, 128, 2),
    ] {
        let what = format!("{top_k} of {experts}, {rows} rows of {width}");
        let mut w = random(experts * width, 31);
        // Two equal experts: of equals the lower id is taken first.
        let (a, b) = w.split_at_mut(5 * width);
        b[..width].copy_from_slice(&a[2 * width..3 * width]);
        let stride = width + 4;
        let x: Vec<f32> = random(rows * stride, 32).iter().map(|v| v * 4.0 / (width as f32).sqrt()).collect();
        let scale: Vec<f32> = random(experts, 33).iter().map(|v| 1.0 + 0.5 * v).collect();
        let (device_w, counter) = (lab.f32(&w), lab.i32(&[0]));
        let (device_x, device_scale) = (lab.f32(&x), lab.f32(&scale));
        let logits = lab.poisoned(rows * experts * 4);
        let routes = lab.poisoned(rows * 2 * top_k * 4);
        let (groups, weights) = (lab.poisoned(129 * 4), lab.poisoned(128 * 16 * 4));
        let call = Router {
            weights: device_w.ptr(),
            x: device_x.ptr(),
            x_stride: stride,
            width,
            rows,
            experts,
            top_k,
            expert_scale: device_scale.ptr(),
            logits: logits.ptr(),
            routes: routes.ptr(),
            groups: groups.ptr(),
            group_weight: weights.ptr(),
            counter: counter.ptr(),
        };
        // SAFETY: the buffers are as large as the call says.
        lab.twice(&routes, || unsafe { router(lab.queue(), &call).unwrap() });
        let found_logits = lab.read_f32(&logits, rows * experts);
        let found = lab.read_f32(&routes, rows * 2 * top_k);
        let list = lab.read_i32(&groups, 129);
        let group_weight = lab.read_f32(&weights, 128 * 16);
        let mut judge = Judge::new(&what);
        let mut expected_ids: Vec<i32> = Vec::new();
        for r in 0..rows {
            let x = &x[r * stride..][..width];
            for e in 0..experts {
                let products =
                    w[e * width..][..width].iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let (sum, size) = products.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
                judge.see(
                    (r, e),
                    found_logits[r * experts + e],
                    sum,
                    (width / 32 + 8) as f64 * 2f64.powi(-24) * size,
                );
            }
            // The choice from the logits as found, so that near ties cannot differ.
            let row = &found_logits[r * experts..][..experts];
            let most = row.iter().copied().fold(f32::MIN, f32::max);
            let p: Vec<f64> = row.iter().map(|&v| f64::from(v - most).exp()).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            let total: f64 = order[..top_k].iter().map(|&e| p[e]).sum();
            for (k, &e) in order[..top_k].iter().enumerate() {
                assert_eq!(found[r * 2 * top_k + k], e as f32, "{what} row {r} choice {k}");
                let weight = p[e] / total * f64::from(scale[e]);
                let found_weight = found[r * 2 * top_k + top_k + k];
                assert!(
                    (f64::from(found_weight) - weight).abs() < 2e-6 * weight.abs() + 1e-9,
                    "{what} {found_weight} {weight}"
                );
                expected_ids.push(e as i32);
                let group = list[1..=list[0] as usize].iter().position(|&id| id == e as i32).unwrap();
                assert_eq!(group_weight[group * 16 + r], found_weight);
            }
        }
        judge.finish(2e-6);
        expected_ids.sort_unstable();
        expected_ids.dedup();
        assert_eq!(list[1..=list[0] as usize], expected_ids, "{what}");
        // Rows that did not choose a group have weight 0 in it.
        let given = group_weight[..list[0] as usize * 16].iter().filter(|w| **w != 0.0).count();
        assert_eq!(given, rows * top_k, "{what}");
    }
}

#[test]
fn the_largest_logit_wins_and_what_is_not_finite_is_told() {
    let Some(lab) = Lab::new() else { return };
    let workspace = lab.bytes(&vec![0; argmax_workspace_bytes(7)]);
    for (vocab, rows) in [(262_144, 1), (262_144, 7), (1000, 3), (5, 2)] {
        let stride = vocab + 3;
        let mut logits = random(rows * stride, 41);
        let mut expected = Vec::new();
        for r in 0..rows {
            // Beyond the row lies something larger.
            logits[r * stride + vocab] = 9.0;
            let best = (r * 7919 + 3) % vocab;
            logits[r * stride + best] = 2.0;
            logits[r * stride + vocab - 1] = 2.0;
            if r == 2 {
                logits[r * stride + vocab / 2] = f32::INFINITY;
            }
            expected.push(if r == 2 { -1 } else { best as i32 });
        }
        let (device, out) = (lab.f32(&logits), lab.poisoned(rows * 4));
        let call = Argmax {
            logits: device.ptr(),
            stride,
            vocab,
            rows,
            out: out.ptr(),
            workspace: workspace.ptr(),
            told: None,
        };
        // SAFETY: the buffers are as large as the call says.
        lab.twice(&out, || unsafe { argmax(lab.queue(), &call).unwrap() });
        assert_eq!(lab.read_i32(&out, rows), expected, "{vocab} {rows}");
    }
}
