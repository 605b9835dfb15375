// Conversion of rows to float8 with one scale per row, for products that take a scale for every row
// of their operands:
//
//   scale = max|x| / 448,  y = x / scale in E4M3 (at most 448)
//
// A row of zeros has scale 1, and no scale is less than 2⁻¹²⁶, so that its inverse is finite. If
// any x is NaN, the scale is NaN. If any x is infinite, the scale is infinite and that y is NaN, so
// that no product hides it.
#pragma once
#include <cuda_fp8.h>
#include "common.cuh"

using f8 = __nv_fp8_storage_t;  // E4M3

// Largest is the larger argument, or NaN if either is NaN.
struct Largest {
  static constexpr float identity = 0.0f;  // of magnitudes
  __device__ static __forceinline__ float merge(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
  }
};

// Pairs converts two elements at a time between a type and float.
template <class T> struct Pairs {
  using Word = float2;
  __device__ static __forceinline__ float2 floats(float2 w) { return w; }
  __device__ static __forceinline__ float2 magnitudes(float2 w) { return make_float2(fabsf(w.x), fabsf(w.y)); }
  __device__ static __forceinline__ float2 merge(float2 a, float2 b) {
    return make_float2(Largest::merge(a.x, b.x), Largest::merge(a.y, b.y));
  }
};
template <> struct Pairs<bf16> {
  using Word = __nv_bfloat162;
  __device__ static __forceinline__ float2 floats(Word w) {
    uint32_t bits = reinterpret_cast<uint32_t&>(w);
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
  __device__ static __forceinline__ Word magnitudes(Word w) { return __habs2(w); }
  __device__ static __forceinline__ Word merge(Word a, Word b) { return __hmax2_nan(a, b); }
};
template <> struct Pairs<f16> {
  using Word = __half2;
  __device__ static __forceinline__ float2 floats(Word w) { return __half22float2(w); }
  __device__ static __forceinline__ Word magnitudes(Word w) { return __habs2(w); }
  __device__ static __forceinline__ Word merge(Word a, Word b) { return __hmax2_nan(a, b); }
};

template <class T, int N> __device__ __forceinline__ typename Pairs<T>::Word pair(const Pack<T, N>& p, int i) {
  return reinterpret_cast<const typename Pairs<T>::Word*>(&p)[i];
}

// largest returns the largest magnitude among `before` and the elements of a pack.
template <class T, int N> __device__ __forceinline__ float largest(float before, const Pack<T, N>& p) {
  using W = Pairs<T>;
  typename W::Word m = W::magnitudes(pair(p, 0));
#pragma unroll
  for (int i = 1; i < N / 2; i++) m = W::merge(m, W::magnitudes(pair(p, i)));
  float2 two = W::floats(m);
  return Largest::merge(before, Largest::merge(two.x, two.y));
}

// fourE4M3 converts four numbers, the first to the lowest byte. It rounds to nearest even and
// clamps to ±448.
__device__ __forceinline__ uint32_t fourE4M3(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t bytes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
#else
  uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
#endif
}

// Scale is the scale of a row, computed from its largest magnitude.
struct Scale {
  float scale, inverse;
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
    static_assert(N % 4 == 0, "whole words");
    Pack<f8, N> y;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      float2 a = Pairs<T>::floats(pair(p, 2 * i)), b = Pairs<T>::floats(pair(p, 2 * i + 1));
      reinterpret_cast<uint32_t*>(&y)[i] = fourE4M3(a.x * inverse, a.y * inverse, b.x * inverse, b.y * inverse);
    }
    return y;
  }
};
