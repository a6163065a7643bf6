// Skinny GEMM over Q4_K. The kernels are in common/skinny.cuh and common/row_bytes.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/row_bytes.cuh"

SKINNY_FORM(q4_k, Q4K, 1, 4)
SKINNY_TWO_STRIPS(q4_k, Q4K, 1, 2)
ROW_FORM(q4_k, Q4K, 1, 4, 1, 2)
ROW_EXPERTS(q4_k, Q4K, 1, 4)
ROW_AFTER(skinny_q4_k_after_2, Q4K, 1, 4, 2)
ROW_AFTER(skinny_q4_k_after_3, Q4K, 1, 4, 3)
