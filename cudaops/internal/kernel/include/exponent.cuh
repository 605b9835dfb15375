// What the backward pass of attention makes of the normalizers that the forward pass leaves.
#pragma once
#include "exp2.cuh"

namespace attention {

using namespace tile;

// With the normalizer (m, log l) of a query, the probability of a key of score s is
//
//   exp(s − m)/l = ρ·2^(s·log₂e − h)
//
// where h is m·log₂e + log₂ l, rounded, and ρ makes up for the rounding. While |h| is below kPlain, ρ
// is taken for 1 and stored as that. The probability is then off by less than 10⁻⁵, far less than by
// its rounding to 16 bits. The last bit of h is set where ρ counts: a kernel that has no time to
// multiply by ρ can do it in a branch that it seldom takes.
struct Exponent {
  static constexpr float kPlain = 128;
  float h, rho;

  __device__ explicit Exponent(float2 normalizer) {
    const float m = normalizer.x, log2l = normalizer.y * kLog2e;
    h = fmaf(m, kLog2e, log2l);
    const bool counts = !(fabsf(h) < kPlain);
    h = __int_as_float((__float_as_int(h) & ~1) | (counts && h - h == 0));
    rho = counts ? exp2f(fmaf(-m, kLog2e, h) - log2l) : 1.0f;
  }
};

}  // namespace attention
