// The formulas of a pass. No fast-math forms: the float32 mode is held to a relative error of 5e-5.
#pragma once
#include "args.cuh"

// lapidary_ops::Activation: 0 GeluTanh, 1 Silu.
DEVICE float activate(int f, float u) {
  if (f == 0) {
    const float inner = 0.7978845608028654f * (u + 0.044715f * u * u * u);
    return 0.5f * u * (1.0f + tanhf(inner));
  }
  return u / (1.0f + expf(-u));
}

// cap * tanh(z / cap); 0 for no cap.
DEVICE float soft_cap(float z, float cap) { return cap == 0.0f ? z : cap * tanhf(z / cap); }
