// Functions that are only as accurate as the storage type requires. For 2-byte types they use the
// hardware's approximations, which take several times fewer instructions and have an error of about
// 1/100 of the rounding to bfloat16.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float exp2Approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T> __device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) return __expf(x);
  return expf(x);
}

template <class T> __device__ __forceinline__ float quotient(float a, float b) {
  if constexpr (sizeof(T) == 2) return __fdividef(a, b);
  return a / b;
}

template <class T> __device__ __forceinline__ float sigmoid(float a) {
  return quotient<T>(1.0f, 1.0f + exponential<T>(-a));
}

// Shifted computes exp(x − shift) for many x.
template <class T> struct Shifted {
  static constexpr float kLog2e = 1.44269504f;
  float shift;
  __device__ __forceinline__ explicit Shifted(float s) : shift(sizeof(T) == 2 ? __fmul_rn(s, kLog2e) : s) {}
  __device__ __forceinline__ float exp(float x) const {
    if constexpr (sizeof(T) == 2) return exp2Approximate(fmaf(x, kLog2e, -shift));
    return expf(x - shift);
  }
};
