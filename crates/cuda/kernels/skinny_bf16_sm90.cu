// Skinny GEMM over bf16. The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/skinny.cuh"

SKINNY_FORM(bf16, Bf16, 1, 5)
SKINNY_TWO_STRIPS(bf16, Bf16, 1, 2)
SKINNY_AFTER(skinny_bf16_after_2, Bf16, 1, 5, 2)
SKINNY_AFTER(skinny_bf16_after_3, Bf16, 1, 5, 3)
