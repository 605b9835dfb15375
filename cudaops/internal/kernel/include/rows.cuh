// Going over long rows with a block each, and the softmax's sum.
#pragma once
#include "math.cuh"

// Launch of kernels over rows: a block a row, of as many threads as the row is worth, at most kThreads. Two such blocks fit on
// a multiprocessor: while one reduces the other reads, and the rows of all of them fit in L2.
constexpr int kThreads = 512;

// forRow calls f(i, pack) for the packs of a row of v elements, one element a pack unless the row is aligned for more.
// The thread's accesses lie a block's width apart, U of them in flight.
template <class T, class F> __device__ __forceinline__ void forRow(const T* row, int v, F f) {
  constexpr int N = kVec<T>, U = 4;
  int done = 0;
  if (aligned16(row)) {
    int i = threadIdx.x * N, apart = blockDim.x * N;
    for (; i + (U - 1) * apart + N <= v; i += U * apart) {
      Pack<T, N> p[U];
#pragma unroll
      for (int u = 0; u < U; u++) p[u] = load<N>(row + i + u * apart);
#pragma unroll
      for (int u = 0; u < U; u++) f(i + u * apart, p[u]);
    }
#pragma unroll 1
    for (; i + N <= v; i += apart) f(i, load<N>(row + i));
    done = v / N * N;
  }
#pragma unroll 1
  for (int i = done + threadIdx.x; i < v; i += blockDim.x) f(i, load<1>(row + i));
}

// fetch and put move a pack, at once where the address allows it.
template <int N, class T> __device__ __forceinline__ Pack<T, N> fetch(const T* x, bool together) {
  if (together || N == 1) return load<N>(x);
  Pack<T, N> p;
#pragma unroll
  for (int j = 0; j < N; j++) p.v[j] = x[j];
  return p;
}

template <class T, int N> __device__ __forceinline__ void put(T* y, const Pack<T, N>& p, bool together) {
  if (together || N == 1)
    store(y, p);
  else
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = p.v[j];
}

// RowSum is the largest of the numbers seen so far and the sum of their exponentials, relative to it as Shifted<T> forms them.
template <class T> struct RowSum {
  float max = -INFINITY, sum = 0;

  // The maximum passes NaN over, the sum does not.
  template <int N> __device__ __forceinline__ void add(const Pack<T, N>& p) {
    float m = p.get(0);
#pragma unroll
    for (int j = 1; j < N; j++) m = fmaxf(m, p.get(j));
    if (m > max) {
      sum *= ratio(max, m);
      max = m;
    }
    Shifted<T> e(max == -INFINITY ? 0.0f : max);
#pragma unroll
    for (int j = 0; j < N; j++) sum += e.exp(p.get(j));
  }

  // Gives all threads of the block the sum over all of them.
  __device__ __forceinline__ void reduce() {
    float all = blockReduce<Max>(max);
    sum = blockReduce<Sum>(max == -INFINITY ? sum : sum * ratio(max, all));
    max = all;
  }

  // log Σ exp(x − max). The sum is not quite that where Shifted rounds the maximum times log₂e.
  __device__ __forceinline__ float log() const {
    constexpr float kLn2 = 0.693147181f;
    float moved = 0;
    if constexpr (sizeof(T) == 2) moved = kLn2 * fmaf(max, Shifted<T>::kLog2e, -Shifted<T>(max).shift);
    return logf(sum) - moved;
  }

 private:
  // What brings a sum relative to one maximum to another. It goes by the shifts as they are rounded: exponentials with different
  // shifts could otherwise not be added up.
  __device__ __forceinline__ static float ratio(float from, float to) {
    const float d = Shifted<T>(from).shift - Shifted<T>(to).shift;
    if constexpr (sizeof(T) == 2) return exp2Approximate(d);
    return expf(d);
  }
};
