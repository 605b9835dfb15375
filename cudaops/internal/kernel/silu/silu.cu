// The gate of a SiLU MLP, over [rows, f]:
//
//   forward:   h = silu(a) ⊙ b,  silu(a) = a·σ(a)
//   backward:  da = dh ⊙ b ⊙ σ(a)(1 + a(1 − σ(a))),  db = dh ⊙ silu(a),  and optionally h again
//
// The same kernels exist with GELU instead of SiLU.
//
// a and b have the same row stride, as do da and db. If they are stored as [a | b], the stride is
// 2f and b starts f elements after a. h and dh are contiguous. da may be a or dh, and db may be b.
//
// Launch: blocks of 256 threads, each with kUnroll packs that are a block's width apart.
#include "gate.cuh"

constexpr int kThreads = 256, kUnroll = 2;

// forPacks calls body for each of the thread's packs of N elements, with the pack's positions in h
// and in a. f must be a multiple of N, and there must be fewer than 2³¹ packs.
template <int N, class F> __device__ __forceinline__ void forPacks(int64_t rows, int f, int64_t stride, F body) {
  unsigned perRow = f / N;
  int64_t total = rows * perRow;
#pragma unroll
  for (int u = 0; u < kUnroll; u++) {
    unsigned i = (blockIdx.x * kUnroll + u) * kThreads + threadIdx.x;
    if (i < total) body(u, int64_t(i) * N, i / perRow * stride + i % perRow * N);
  }
}

template <class T, int N, bool GELU>
__device__ __forceinline__ void gateForward(T* h, const T* a, const T* b, int64_t rows, int f, int64_t stride) {
  Pack<T, N> va[kUnroll], vb[kUnroll];
  forPacks<N>(rows, f, stride, [&](int u, int64_t, int64_t at) {
    va[u] = load<N>(a + at);
    vb[u] = load<N>(b + at);
  });
  forPacks<N>(rows, f, stride, [&](int u, int64_t i, int64_t) {
#pragma unroll
    for (int j = 0; j < N; j++) va[u].set(j, gateMul<T, GELU>(va[u].get(j), vb[u].get(j)));
    store(h + i, va[u]);
  });
}

template <class T, int N, bool GELU>
__device__ __forceinline__ void gateBackward(T* h, T* da, T* db, const T* dh, const T* a, const T* b, int64_t rows, int f,
                                             int64_t stride, int64_t outStride) {
  Pack<T, N> va[kUnroll], vb[kUnroll], vg[kUnroll];
  forPacks<N>(rows, f, stride, [&](int u, int64_t i, int64_t at) {
    va[u] = load<N>(a + at);
    vb[u] = load<N>(b + at);
    vg[u] = load<N>(dh + i);
  });
  forPacks<N>(rows, f, outStride, [&](int u, int64_t i, int64_t at) {
    Pack<T, N> vh;
#pragma unroll
    for (int j = 0; j < N; j++) {
      GateGradient<T, GELU> to(vg[u].get(j), va[u].get(j), vb[u].get(j));
      vh.set(j, to.h);
      va[u].set(j, to.da);
      vb[u].set(j, to.db);
    }
    store(da + at, va[u]);
    store(db + at, vb[u]);
    if (h) store(h + i, vh);
  });
}

#define DEFINE_GATE(T, gate, GELU, name, N)                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      gate##_mul_##name##_##T(T* h, const T* a, const T* b, int64_t rows, int f, int64_t stride) {            \
    gateForward<T, N, GELU>(h, a, b, rows, f, stride);                                                        \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      gate##_mul_backward_##name##_##T(T* h, T* da, T* db, const T* dh, const T* a, const T* b, int64_t rows, \
                                       int f, int64_t stride, int64_t outStride) {                            \
    gateBackward<T, N, GELU>(h, da, db, dh, a, b, rows, f, stride, outStride);                                \
  }
#define DEFINE_VARIANT(T, name, N)        \
  DEFINE_GATE(T, silu, false, name, N)    \
  DEFINE_GATE(T, gelu, true, name, N)
#define DEFINE(T)                     \
  DEFINE_VARIANT(T, packs, kVec<T>)   \
  DEFINE_VARIANT(T, elements, 1)
FOR_STORAGE_TYPES(DEFINE)
