//! What holds for any bytes: decoding never panics, and a slice decodes as its part of the whole.

mod common;

use common::{Arbitrary, PAIRS, Random, decode};
use lapidary_formats::{Format, TensorView, decode_codes, validate};
use proptest::prelude::*;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #[test]
    fn any_bytes_decode_and_slices_agree(
        pair in 0..PAIRS.len(),
        rows in 1usize..9,
        blocks in 1usize..4,
        cut in any::<(u8, u8)>(),
        seed in 1u64..,
    ) {
        let matrix = Arbitrary::new(PAIRS[pair], rows, blocks, &mut Random(seed));
        check_slice(&matrix.view, cut);
    }

    #[test]
    fn slices_inside_scaled_blocks_agree(rows in 129usize..300, cut in any::<(u8, u8)>(), seed in 1u64..) {
        let matrix = Arbitrary::new((Format::Fp8E4M3, "block128"), rows, 3, &mut Random(seed));
        check_slice(&matrix.view, cut);
    }

    #[test]
    fn any_bytes_of_any_length_validate_without_panic(
        format in 0..Format::ALL.len(),
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
        rows in any::<usize>(),
        cols in any::<usize>(),
        small in any::<bool>(),
    ) {
        let (rows, cols) = if small { (rows % 5, cols % 513) } else { (rows, cols) };
        let matrix = TensorView {
            name: "m".into(), rows, cols, format: Format::ALL[format], bytes: &bytes,
            scales: lapidary_formats::Scales::None,
        };
        if validate(&matrix).is_ok() {
            decode(&matrix);
        }
    }
}

/// A slice of a slice of the view decodes to the same bits as the rows it stands for.
fn check_slice(view: &TensorView, cut: (u8, u8)) {
    let whole = decode(view);
    let first = cut.0 as usize % view.rows;
    let rest = view.slice_rows(first, view.rows - first);
    let second = cut.1 as usize % rest.rows;
    let part = rest.slice_rows(second, rest.rows - second);
    assert_eq!(bits(&decode(&part)), bits(&whole[(first + second) * view.cols..]));
}

#[test]
fn codes_of_a_whole_matrix_decode_at_once() {
    for format in Format::ALL {
        let (len, size) = (format.block_len(), format.block_bytes());
        let bytes = Random(5).bytes(7 * size);
        let mut whole = vec![0.0; 7 * len];
        decode_codes(format, &bytes, &mut whole);
        for (block, want) in bytes.chunks(size).zip(whole.chunks(len)) {
            let mut alone = vec![0.0; len];
            decode_codes(format, block, &mut alone);
            assert_eq!(bits(&alone), bits(want), "{format}");
        }
    }
}
