// A SiLU gate, for a single element.
#pragma once
#include "math.cuh"

template <class T> __device__ __forceinline__ float siluMul(float a, float b) { return a * sigmoid<T>(a) * b; }

// SiLUGradient computes h, and the gradients of a and b from dh, the gradient of h.
template <class T> struct SiLUGradient {
  float h, da, db;
  __device__ __forceinline__ SiLUGradient(float dh, float a, float b) {
    float s = sigmoid<T>(a), silu = a * s;
    h = silu * b;
    da = dh * b * (s * fmaf(a, 1.0f - s, 1.0f));
    db = dh * silu;
  }
};
