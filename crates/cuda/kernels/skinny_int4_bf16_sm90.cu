// Skinny GEMM over four-bit weights with a bf16 scale for 32 (INT4). The kernels are in common/skinny.cuh and common/row_bytes.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/row_bytes.cuh"

SKINNY_FORM(int4_bf16, Int4<true>, 4, 4)
SKINNY_TWO_STRIPS(int4_bf16, Int4<true>, 2, 4)
ROW_FORM(int4_bf16, Int4<true>, 4, 4, 4, 2)
ROW_EXPERTS(int4_bf16, Int4<true>, 4, 4)
