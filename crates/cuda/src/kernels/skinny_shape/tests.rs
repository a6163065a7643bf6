//! Shapes of known products, and that every shape fits.

use super::*;

fn choice(form: Form, rows: usize, cols: usize, n: usize, planes: usize) -> (usize, usize, usize) {
    let c = Choice::of(PackedShape { form, rows, cols }, n, false, planes, 132);
    (1 << c.lwm, c.planes, c.blocks)
}

#[test]
fn small_matrices_get_one_unit_a_block() {
    // As the sweep in docs/cuda-prototypes.md found best, and for the first whole steps.
    assert_eq!(choice(Form::Nvfp4, 2816, 4096, 1, 3), (2, 2, 88));
    assert_eq!(choice(Form::Bf16, 1536, 6144, 1, 3), (1, 2, 96));
    assert_eq!(choice(Form::Fp8, 2816, 2112, 1, 3), (2, 3, 44));
}

#[test]
fn what_is_faster_in_a_step_is_taken_for_one_row() {
    for &(form, rows, cols, code) in IN_A_STEP {
        let gated = MEASURED.iter().any(|m| (m.0, m.1, m.2) == (rows, cols, true));
        let choice = Choice::of(PackedShape { form, rows, cols }, 1, gated, 3, 132);
        assert_eq!(choice.code(), code, "{form:?} {rows} x {cols}");
    }
}

#[test]
fn shared_memory_always_fits() {
    for form in Form::ALL {
        for cols in [256, 768, 1536, 2816, 5376, 8192, 21504, 22528] {
            for rows in [16, 1536, 2816, 5376, 8192, 43008, 262144] {
                for n in 1..=16 {
                    let shape = PackedShape { form, rows, cols };
                    let c = Choice::of(shape, n, false, 3, 132);
                    assert!(c.shared(shape, n) <= SHARED_OF_TWO, "{form:?} {rows} x {cols}, {n} rows");
                }
            }
        }
    }
}
