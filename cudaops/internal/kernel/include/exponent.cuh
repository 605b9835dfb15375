// Conversion of the forward pass's normalizers for attention's backward pass.
#pragma once
#include "exp2.cuh"

namespace attention {

using namespace tile;

// Exponent represents a query's normalizer (m, log l) so that the probability of a key with score s
// is
//
//   exp(s − m)/l = ρ·2^(s·log₂e − h)
//
// where h is m·log₂e + log₂ l, rounded, and ρ corrects for the rounding. If |h| < kPlain, ρ is
// stored as 1; the error in the probability is then below 10⁻⁵, much less than the error of
// rounding it to 16 bits.
//
// The last bit of h is set if ρ matters. A kernel with no time to multiply by ρ can then do so in a
// branch that is rarely taken.
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
