// Gates of both kinds, for a single element. The tanh approximation of GELU is a SiLU of a
// polynomial, since (1 + tanh u)/2 = σ(2u):  gelu(a) = a·σ(z),  z = k·a(1 + c·a²),  k = 2√(2/π).
#pragma once
#include "silu.cuh"

constexpr float kGeluScale = 1.5957691216f, kGeluCubic = 0.044715f;

template <class T> __device__ __forceinline__ float geluMul(float a, float b) {
  return a * sigmoid<T>(kGeluScale * a * fmaf(kGeluCubic * a, a, 1.0f)) * b;
}

// GELUGradient computes h, and the gradients of a and b from dh, the gradient of h: gelu' = σ(z)(1
// + a(1 − σ(z))·k(1 + 3c·a²)).
template <class T> struct GELUGradient {
  float h, da, db;
  __device__ __forceinline__ GELUGradient(float dh, float a, float b) {
    float q = kGeluCubic * a * a, s = sigmoid<T>(kGeluScale * a * (1.0f + q)), gelu = a * s;
    h = gelu * b;
    da = dh * b * (s * fmaf(a * kGeluScale * fmaf(3.0f, q, 1.0f), 1.0f - s, 1.0f));
    db = dh * gelu;
  }
};

// gateMul and GateGradient select the kind of gate at compile time.
template <class T, bool GELU> __device__ __forceinline__ float gateMul(float a, float b) {
  return GELU ? geluMul<T>(a, b) : siluMul<T>(a, b);
}
template <class T, bool GELU> struct GateGradient : SiLUGradient<T> {
  using SiLUGradient<T>::SiLUGradient;
};
template <class T> struct GateGradient<T, true> : GELUGradient<T> {
  using GELUGradient<T>::GELUGradient;
};
