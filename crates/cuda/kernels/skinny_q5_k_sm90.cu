// Skinny GEMM over Q5_K with codes as bytes. The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/skinny.cuh"

SKINNY_FORM(q5_k, Q5K, 1, 2)
