//! The small kernels between products.

use lapidary_cuda::driver::DevPtr;
use lapidary_cuda::kernels::attn_decode::PageShape;
use lapidary_cuda::kernels::producers::{
    Argmax, Branch, Finish, NormOut, Residual, Router, argmax, argmax_workspace_bytes, finish, residual,
    router,
};

use crate::bench::Bench;

impl Bench {
    pub fn producers(&self) {
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
                    x_out: self.out.ptr(),
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
        let counter = self.lab.i32(&[0]);
        for rows in [1usize, 4, 16] {
            let call = Router {
                weights: self.pool.ptr(),
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
                counter: counter.ptr(),
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
            stage(&format!("argmax {rows} rows"), &|| unsafe { argmax(self.lab.queue(), &call).unwrap() });
        }
    }
}
