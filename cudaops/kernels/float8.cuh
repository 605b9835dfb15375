// Rows as float8 with a scale each, for products that take one for every row of their operands:
//
//   scale = max|x| / 448,  y = x / scale in E4M3, whose largest number is 448
//
// A row of zeros has scale 1, and no scale is below 2⁻¹²⁶, whose inverse is still a number. If any x is NaN so is the scale; if any is
// infinite the scale is too, and y is NaN there, so that no product hides it.
#pragma once
#include <cuda_fp8.h>
#include "common.cuh"

using f8 = __nv_fp8_storage_t;  // E4M3

// Largest is NaN when either side is.
struct Largest {
  static constexpr float identity = 0.0f;  // of magnitudes
  __device__ static __forceinline__ float merge(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
  }
};

// largest is the largest magnitude of a pack and what was seen before.
template <class T, int N> __device__ __forceinline__ float largest(float before, const Pack<T, N>& p) {
#pragma unroll
  for (int j = 0; j < N; j++) before = Largest::merge(before, fabsf(p.get(j)));
  return before;
}

// Scale is a row's.
struct Scale {
  float scale, inverse;
  Scale() = default;
  __device__ __forceinline__ explicit Scale(float largest) {
    constexpr float most = 448, least = 0x1p-126f;
    scale = largest / most;
    if (scale < least) scale = largest == 0 ? 1 : least;
    inverse = 1 / scale;
  }
  __device__ __forceinline__ f8 round(float x) const {
    return __nv_cvt_float_to_fp8(x * inverse, __NV_SATFINITE, __NV_E4M3);
  }
  template <class T, int N> __device__ __forceinline__ Pack<f8, N> round(const Pack<T, N>& p) const {
    Pack<f8, N> y;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      float2 pair = make_float2(p.get(j) * inverse, p.get(j + 1) * inverse);
      reinterpret_cast<__nv_fp8x2_storage_t*>(&y)[j / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
    return y;
  }
};
