//! What the test files share: oracle files and a reproducible stream of numbers.

#![allow(dead_code, reason = "every test file uses its own part")]

use std::path::Path;

use half::bf16;
use lapidary_formats::{Format, Scales, TensorView};

/// One file that `fixtures/make_oracle.py` wrote.
pub struct Oracle {
    pub rows: usize,
    pub cols: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub values: Vec<f32>,
}

impl Oracle {
    pub fn read(name: &str) -> Oracle {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/{name}.bin"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (head, rest) = bytes.split_at(16);
        let [rows, cols, codes, scales] =
            std::array::from_fn(|i| u32::from_le_bytes(head[4 * i..][..4].try_into().unwrap()) as usize);
        let (codes, rest) = rest.split_at(codes);
        let (scales, values) = rest.split_at(scales);
        let values = f32s(values);
        assert_eq!(values.len(), rows * cols, "{name}");
        Oracle { rows, cols, codes: codes.to_vec(), scales: scales.to_vec(), values }
    }
}

pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// A small xorshift generator: the same numbers on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.next() >> 32) as u8).collect()
    }

    /// In -1 .. 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Roughly normal with deviation `sigma`.
    pub fn normal(&mut self, sigma: f32) -> f32 {
        (0..6).map(|_| self.unit()).sum::<f32>() * sigma * 0.7
    }
}

/// Every pair of a format and a kind of scales that it takes.
pub const PAIRS: [(Format, &str); 23] = [
    (Format::F32, "none"),
    (Format::F16, "none"),
    (Format::Bf16, "none"),
    (Format::Fp8E4M3, "tensor"),
    (Format::Fp8E4M3, "row"),
    (Format::Fp8E4M3, "block128"),
    (Format::Nvfp4, "nvfp4"),
    (Format::Int4G32, "group32"),
    (Format::Q4_0, "none"),
    (Format::Q4_1, "none"),
    (Format::Q5_0, "none"),
    (Format::Q5_1, "none"),
    (Format::Q8_0, "none"),
    (Format::Q2K, "none"),
    (Format::Q3K, "none"),
    (Format::Q4K, "none"),
    (Format::Q5K, "none"),
    (Format::Q6K, "none"),
    (Format::Iq4Nl, "none"),
    (Format::Iq4Xs, "none"),
    (Format::Mxfp4, "none"),
    (Format::GgufNvfp4, "none"),
    (Format::GgufNvfp4, "tensor"),
];

/// A matrix of arbitrary bytes with scales of the named kind, also arbitrary.
pub struct Arbitrary {
    pub view: TensorView<'static>,
}

impl Arbitrary {
    pub fn new(pair: (Format, &str), rows: usize, blocks: usize, random: &mut Random) -> Arbitrary {
        let (format, kind) = pair;
        // FP8 has no blocks; make its rows wide enough that a block scale's edge falls inside.
        let cols = if kind == "block128" { blocks * 61 } else { blocks * format.block_len() };
        let leak = |bytes: Vec<u8>| -> &'static [u8] { bytes.leak() };
        let bytes = leak(random.bytes(rows * format.row_bytes(cols).unwrap()));
        let scales = match kind {
            "none" => Scales::None,
            "tensor" => Scales::Tensor(random.unit()),
            "row" => Scales::Row((0..rows).map(|_| random.unit()).collect()),
            "block128" => {
                let n = rows.div_ceil(128) * cols.div_ceil(128);
                Scales::Block128 { values: (0..n).map(|_| random.unit()).collect(), first_row: 0 }
            }
            "nvfp4" => Scales::Nvfp4 { blocks: leak(random.bytes(rows * cols / 16)), tensor: random.unit() },
            "group32" => {
                let n = rows * cols / 32;
                let scales = (0..n).flat_map(|_| bf16::from_f32(random.unit()).to_le_bytes()).collect();
                Scales::Group32Bf16(leak(scales))
            }
            other => unreachable!("{other}"),
        };
        Arbitrary { view: TensorView { name: "arbitrary".into(), rows, cols, format, bytes, scales } }
    }
}

/// All rows of a view.
pub fn decode(view: &TensorView) -> Vec<f32> {
    let mut out = vec![0.0; view.rows * view.cols];
    for (row, out) in out.chunks_mut(view.cols).enumerate() {
        lapidary_formats::decode_row(view, row, out);
    }
    out
}
