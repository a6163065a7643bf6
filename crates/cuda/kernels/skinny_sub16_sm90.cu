// Skinny GEMM over eight-bit weights with a signed scale for 16 (Q6_K, Q3_K, IQ4_XS). The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/skinny.cuh"

SKINNY_FORM(sub16, Sub16, 1, 2)
