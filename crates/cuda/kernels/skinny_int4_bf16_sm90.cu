// Skinny GEMM over four-bit weights with a bf16 scale for 32 (INT4). The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_gemm.rs.
#include "common/skinny.cuh"

SKINNY_FORM(int4_bf16, Int4<true>, 4, 4)
SKINNY_TWO_STRIPS(int4_bf16, Int4<true>, 2, 4)
