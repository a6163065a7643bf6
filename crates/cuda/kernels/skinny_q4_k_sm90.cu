// Skinny GEMM over Q4_K. The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_gemm.rs.
#include "common/skinny.cuh"

SKINNY_FORM(q4_k, Q4K, 1, 4)
SKINNY_TWO_STRIPS(q4_k, Q4K, 1, 2)
