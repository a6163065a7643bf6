// What every kernel file includes: integer names, and how kernels take their arguments.
//
// A kernel has one parameter, a struct passed by value as `const __grid_constant__`. Its launcher in
// src/kernels/ holds the same struct with #[repr(C)], field by field in the same order and of the same width:
// pointers are 8 bytes, int is i32, float is f32, no bool. Padding follows the C rules on both sides.
#pragma once
#include <cstdint>

#define DEVICE __device__ __forceinline__
