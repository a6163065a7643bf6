//! Attention of decoding and of prompts.

use lapidary_cuda::driver::DevPtr;
use lapidary_cuda::kernels::attn_decode::{AttnDecode, KvColumns, PageShape, attn_decode, workspace_bytes};
use lapidary_cuda::kernels::attn_prefill::attn_prefill;

use crate::bench::{Bench, POOL, ROTATION, launches};

impl Bench {
    pub fn attention(&self) {
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
                        if live * rows * pages.page_bytes() > POOL || (window.is_some() && context > 2048) {
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
                        let workspace = self.lab.bytes(&vec![0; workspace_bytes(rows, heads, pages, 132)]);
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

    /// Attention of a prompt, causal.
    pub fn prefill_attention(&self) {
        for (name, heads, kv_heads, head_dim, window) in [
            ("31B sliding", 32usize, 16usize, 256usize, Some(1024)),
            ("31B full", 32, 4, 512, None),
            ("E2B full", 8, 1, 512, None),
        ] {
            for rows in [64usize, 512, 2048] {
                let pages = PageShape { kv_heads, head_dim, fp8: false };
                let column = |f: &dyn Fn(usize) -> i32| self.lab.i32(&(0..rows).map(f).collect::<Vec<_>>());
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
}
