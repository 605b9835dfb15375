// Loops over long rows, one block per row, and sums for the softmax.
#pragma once
#include "math.cuh"

// The largest number of threads in a block of these kernels. A launch uses one block per row, with
// no more threads than the row can occupy. Two such blocks fit on a multiprocessor, so one can read
// while the other reduces, and the rows of all running blocks fit in L2.
constexpr int kThreads = 512;

// forRow calls f(i, pack) for the packs of a row of v elements. A pack is a single element unless
// the row is aligned for more. A thread's accesses are a block's width apart, with U accesses in
// flight.
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

// fetch and put move a pack, in one access if the address allows it.
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

// RowSum holds the largest of the numbers seen so far and the sum of their exponentials relative to
// it, as computed by Shifted<T>.
template <class T> struct RowSum {
  float max = -INFINITY, sum = 0;

  // The maximum ignores NaN, but the sum does not.
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

  // reduce combines the sums of all threads of the block, and leaves the result in each thread.
  __device__ __forceinline__ void reduce() {
    float all = blockReduce<Max>(max);
    sum = blockReduce<Sum>(max == -INFINITY ? sum : sum * ratio(max, all));
    max = all;
  }

  // Returns log Σ exp(x − max). The sum itself differs slightly, because Shifted rounds the product
  // of the maximum and log₂e.
  __device__ __forceinline__ float log() const {
    constexpr float kLn2 = 0.693147181f;
    float moved = 0;
    if constexpr (sizeof(T) == 2) moved = kLn2 * fmaf(max, Shifted<T>::kLog2e, -Shifted<T>(max).shift);
    return logf(sum) - moved;
  }

 private:
  // ratio returns the factor that converts a sum relative to one maximum into a sum relative to
  // another. It uses the rounded shifts, since only exponentials with the same shift can be added.
  __device__ __forceinline__ static float ratio(float from, float to) {
    const float d = Shifted<T>(from).shift - Shifted<T>(to).shift;
    if constexpr (sizeof(T) == 2) return exp2Approximate(d);
    return expf(d);
  }
};
