// RMSNorm of a few rows, for graphs that continue several texts:
//
//   y[r, k] = x[r, k]·w[k] / sqrt(Σ_j x[r, j]²/depth + eps)
//
// A block computes a row. Unlike the kernels of package norm, this one overlaps with the kernels around it.
#include "common.cuh"
#include "overlap.cuh"

constexpr int kThreads = 256;

struct Args {
  void* y;
  const void* x;
  const float* w;
  int depth;
  float eps;
  int early;  // see Overlap in product.go
};

template <class T, int N> __device__ __forceinline__ void normalize(const Args& a) {
  if (a.early) releaseNext();
  awaitPrevious();
  if (!a.early) releaseNext();
  const int64_t start = int64_t(blockIdx.x) * a.depth;
  const T* x = static_cast<const T*>(a.x) + start;
  T* y = static_cast<T*>(a.y) + start;
  float squares = 0;
  for (int at = threadIdx.x * N; at < a.depth; at += kThreads * N) {
    const Pack<T, N> v = load<N>(x + at);
#pragma unroll
    for (int i = 0; i < N; i++) squares += v.get(i) * v.get(i);
  }
  const float scale = rsqrtf(blockReduce<Sum>(squares) / a.depth + a.eps);
  for (int at = threadIdx.x * N; at < a.depth; at += kThreads * N) {
    const Pack<T, N> v = load<N>(x + at);
    const Pack<float, N> w = load<N>(a.w + at);
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < N; i++) out.set(i, v.get(i) * scale * w.v[i]);
    store(y + at, out);
  }
}

#define DEFINE(T)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_norm_packs_##T(Args a) { normalize<T, kVec<T>>(a); } \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_norm_elements_##T(Args a) { normalize<T, 1>(a); }
FOR_STORAGE_TYPES(DEFINE)
