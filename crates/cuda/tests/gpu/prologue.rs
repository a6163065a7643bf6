//! A gated product with the residual step before it in one kernel, against the two kernels.

use lapidary_cuda::driver::DevPtr;
use lapidary_cuda::kernels::producers::{Branch, NormOut, Residual, residual};
use lapidary_cuda::kernels::prologue::{choice, gated};
use lapidary_cuda::kernels::skinny_gemm::{Gate, Linear, Output, linear};
use lapidary_formats::{Format, Scaling};

use crate::lab::{Lab, Packed, matrix, random};

#[test]
fn a_residual_step_inside_a_product_has_the_bits_of_both_kernels() {
    let Some(lab) = Lab::new() else { return };
    // Outputs of gate and up together and width of E2B and E4B, planes of the branch.
    let sizes = [(12_288, 1536, 2, 1.0), (20_480, 2560, 3, 0.7)];
    for (format, (outputs, width, planes, scalar)) in
        [Format::Bf16, Format::Q4K].into_iter().flat_map(|f| sizes.map(|s| (f, s)))
    {
        let weights = matrix(format, Scaling::Usual, outputs, width, 51);
        let packed = Packed::stack(&lab, &[weights.view("w")]);
        assert!(choice(packed.shape, 132).is_some(), "{format} {outputs} x {width}");
        let (x, y) = (random(width, 1), lab.f32(&random(planes * (width + 8), 2)));
        let gains =
            [3, 4].map(|seed| lab.f32(&random(width, seed).iter().map(|v| 1.2 + v).collect::<Vec<_>>()));
        let [from, to] = [lab.f32(&x), lab.poisoned(width * 4)];
        let normed = lab.poisoned(width * 2);
        let mut runs = Vec::new();
        for one in [false, true] {
            let out = lab.poisoned(outputs);
            lab.poison(&to);
            let before = Residual {
                x: from.ptr(),
                x_out: to.ptr(),
                x_stride: width,
                rows: 1,
                width,
                y: Branch {
                    p: y.ptr(),
                    gain: DevPtr::NULL,
                    plane_stride: (width + 8) as u64,
                    planes: planes as i32,
                    stride: width as i32,
                },
                z: Branch::NONE,
                post: gains[0].ptr(),
                scalar,
                eps: 1e-6,
                outs: [
                    NormOut { p: normed.ptr(), gain: gains[1].ptr(), stride: width as i32, bf16: 1 },
                    NormOut::NONE,
                    NormOut::NONE,
                ],
            };
            let call = Linear {
                weights: packed.weights(),
                x: normed.ptr(),
                x_stride: width,
                rows: 1,
                out: out.ptr(),
                out_stride: outputs / 2,
                output: Output::Gated(Gate::GeluTanh),
                most_planes: 1,
            };
            // SAFETY: the buffers are as large as the calls say.
            unsafe {
                if one {
                    gated(lab.queue(), &before, &call).unwrap();
                } else {
                    residual(lab.queue(), &before).unwrap();
                    linear(lab.queue(), &call).unwrap();
                }
            }
            assert!(lab.read_f32(&from, width) == x, "the residual is read only");
            runs.push((lab.read(&to, width * 4), lab.read(&out, outputs)));
        }
        let values: Vec<_> =
            runs[0].1.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b)).collect();
        assert!(values.iter().all(|v| v.is_finite()) && values.iter().any(|v| v.to_f32() != 0.0));
        assert!(runs[0].0 == runs[1].0, "{format} {outputs} x {width}: residuals differ");
        assert!(runs[0].1 == runs[1].1, "{format} {outputs} x {width}: products differ");
    }
}
