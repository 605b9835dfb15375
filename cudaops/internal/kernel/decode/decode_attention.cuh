// Attention from a single token to itself and the cached keys and values of the tokens before it:
//
//   keys[position] = rotate(k),   values[position] = v
//   y = Σ_j p[j]·values[j],   p = softmax_j(scale · rotate(q)·keys[j]),   position − window < j ≤ position
//
// Query head h reads key-value head h/(heads/kvHeads). rotate applies RoPE for the given position,
// or is the identity without tables.
//
// A block handles one slice of the positions for up to G query heads that share a key-value head,
// so it reads each key only once. L lanes share a key, and each lane holds kElements of its
// features. A warp therefore handles 32/L keys at a time. Each group of L lanes runs its own
// softmax; these are merged at the end.
//
// The last block of a head to finish merges the slices in a fixed order, so results are bitwise
// reproducible. The number of slices depends only on the position, which the kernel reads from
// memory. A single captured launch can therefore be replayed for every position.
#pragma once
#include "common.cuh"
#include "element.cuh"

constexpr int kElements = 8, kTogether = 2;
constexpr int kLeastKeys = 64;  // per slice
constexpr int kMostSlices = 64;
constexpr int kPageTokens = 64;
constexpr float kLog2E = 1.4426950408889634f;

struct Attention {
  const void *q, *k, *v;  // [heads·dim], [kvHeads·dim]
  void *y, *keys, *values;  // [heads·dim], [capacity, kvHeads·dim]
  const float *cosines, *sines;  // [capacity, dim/2]; null without RoPE
  const int64_t* position;
  float* parts;  // [heads, slices, dim + 2]: maximum, sum, weighted values
  unsigned* arrived;  // [gridDim.z, kvHeads], zero before and after
  int heads, kvHeads, dim, capacity, window, slices;
  float scale;
  int packed;  // whether queries, keys and values can be read 16 bytes at a time
  int early;  // the next kernel may start before the preceding one has ended
};

// features returns the lane's features of a head's row, with zeros past the end of the row.
template <class T> __device__ __forceinline__ Pack<T, kElements> features(const T* row, int at, int dim, bool packed) {
  Pack<T, kElements> r;
  if (packed && at < dim) return load<kElements>(row + at);
#pragma unroll
  for (int i = 0; i < kElements; i++) r.v[i] = at + i < dim ? row[at + i] : fromFloat<T>(0);
  return r;
}

// turned returns feature i of a head's row after the rotation for the token's position.
template <class T> __device__ __forceinline__ float turned(const T* row, int i, int dim, const float* cosines, const float* sines) {
  if (!cosines) return toFloat(row[i]);
  const int half = dim / 2;
  const bool second = i >= half;
  const int angle = second ? i - half : i;
  const float other = toFloat(row[second ? i - half : i + half]);
  return toFloat(row[i]) * cosines[angle] + other * (second ? sines[angle] : -sines[angle]);
}

// turnedFeatures gives the lane's features of a head's row after the rotation for the token's position,
// with zeros past the end of the row.
template <class T>
__device__ __forceinline__ void turnedFeatures(float (&f)[kElements], const T* row, int at, int dim, const float* cosines,
                                               const float* sines, bool packed) {
  const int half = dim / 2;
  if (packed && cosines && at < dim && half % kElements == 0) {
    const bool second = at >= half;
    const int angle = second ? at - half : at;
    const auto own = load<kElements>(row + at), other = load<kElements>(row + (second ? at - half : at + half));
    const auto c = load<kElements>(cosines + angle), s = load<kElements>(sines + angle);
#pragma unroll
    for (int i = 0; i < kElements; i++) f[i] = own.get(i) * c.v[i] + other.get(i) * (second ? s.v[i] : -s.v[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kElements; i++) f[i] = at + i < dim ? turned(row, at + i, dim, cosines, sines) : 0.0f;
}

// Softmax accumulates a softmax one key at a time. weighted / sum is the result; both are relative
// to the maximum score, in powers of two.
struct Softmax {
  float maximum, sum, weighted[kElements];
  __device__ __forceinline__ Softmax() : maximum(-INFINITY), sum(0) {
#pragma unroll
    for (int i = 0; i < kElements; i++) weighted[i] = 0;
  }
  // add adds N keys with their scores, which are −∞ for keys that don't count. The first one counts.
  template <class T, int N> __device__ __forceinline__ void add(const float (&score)[N], const Pack<T, kElements> (&value)[N]) {
    float m = maximum;
#pragma unroll
    for (int u = 0; u < N; u++) m = fmaxf(m, score[u]);
    const float keep = exp2f(maximum - m);
    maximum = m, sum *= keep;
#pragma unroll
    for (int i = 0; i < kElements; i++) weighted[i] *= keep;
#pragma unroll
    for (int u = 0; u < N; u++) {
      const float p = exp2f(score[u] - m);
      sum += p;
#pragma unroll
      for (int i = 0; i < kElements; i++) weighted[i] += p * element(value[u], i);
    }
  }
  // merge combines this lane's softmax with the one in lane ^ apart.
  __device__ __forceinline__ void merge(int apart) {
    const float theirs = __shfl_xor_sync(kAllLanes, maximum, apart), m = fmaxf(maximum, theirs);
    const float keep = share(maximum, m), take = share(theirs, m);
    maximum = m, sum = sum * keep + __shfl_xor_sync(kAllLanes, sum, apart) * take;
#pragma unroll
    for (int i = 0; i < kElements; i++)
      weighted[i] = weighted[i] * keep + __shfl_xor_sync(kAllLanes, weighted[i], apart) * take;
  }
  // share returns the factor that rescales sums from the maximum `own` to the larger maximum `all`.
  // An empty softmax, with a maximum of −∞, contributes nothing.
  __device__ static __forceinline__ float share(float own, float all) { return own == -INFINITY ? 0.0f : exp2f(own - all); }
};

// Merged is a feature of the result of several softmaxes. weighted / sum is the result.
struct Merged {
  float maximum = -INFINITY, sum = 0, weighted = 0;
};

// mergeAll merges feature i of n softmaxes. Each of them consists of its maximum, sum and weighted values; they are
// `apart` elements apart.
template <int n> __device__ __forceinline__ Merged mergeAll(const float* softmaxes, int apart, int i) {
  Merged r;
#pragma unroll
  for (int k = 0; k < n; k++) r.maximum = fmaxf(r.maximum, softmaxes[k * apart]);
#pragma unroll
  for (int k = 0; k < n; k++) {
    const float share = Softmax::share(softmaxes[k * apart], r.maximum);
    r.sum += softmaxes[k * apart + 1] * share, r.weighted += softmaxes[k * apart + 2 + i] * share;
  }
  return r;
}

// slicesOf returns the number of slices for n positions and stores the number of keys per slice in
// *keys.
__device__ __forceinline__ int slicesOf(int n, int most, int* keys) {
  *keys = max(kLeastKeys, (n + most - 1) / most);
  return (n + *keys - 1) / *keys;
}

// firstVisible returns the first position that the token at the given position attends to.
__device__ __forceinline__ int firstVisible(const Attention& a, int64_t position) {
  return a.window > 0 ? max(0, int(position) + 1 - a.window) : 0;
}

// Merging is the shared memory in which a block merges the slices of up to G heads.
template <int G> struct Merging {
  float shares[G][kMostSlices], sums[G];
  bool last;
};

// mergeSlices merges the slices of the given number of heads, if this block is the last one to arrive, and stores the
// results at y. parts has room for `most` slices of a head, each with its maximum, sum and weighted values. All threads
// must have written their parts, and all threads must call it.
template <class T, int Threads, int G>
__device__ __forceinline__ void mergeSlices(Merging<G>& shared, const float* parts, unsigned* arrived, int heads, int dim, int most,
                                            int slices, T* y) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = dim + 2;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = atomicAdd(arrived, 1) == unsigned(slices) - 1;
    if (shared.last) *arrived = 0;
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  for (int g = warp; g < heads; g += Threads / kWarp) {  // the weights of the slices of a head
    const float* of = parts + int64_t(g) * most * part;
    float m = -INFINITY, sum = 0;
    for (int p = lane; p < slices; p += kWarp) m = fmaxf(m, __ldcg(of + p * part));
    m = warpReduce<Max>(m);
    for (int p = lane; p < slices; p += kWarp) {
      const float share = exp2f(__ldcg(of + p * part) - m);
      shared.shares[g][p] = share, sum += share * __ldcg(of + p * part + 1);
    }
    sum = warpReduce<Sum>(sum);
    if (lane == 0) shared.sums[g] = sum;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < heads * dim; e += Threads) {
    const int g = e / dim, i = e % dim;
    const float* of = parts + int64_t(g) * most * part + 2 + i;
    float x = 0;
#pragma unroll 8
    for (int p = 0; p < slices; p++) x += shared.shares[g][p] * __ldcg(of + p * part);
    y[e] = fromFloat<T>(x / shared.sums[g]);
  }
}

// SharedOf is the shared memory in which `Threads` threads merge the softmaxes of up to G query heads, R
// heads at a time.
template <int L, int G, int R, int Threads> struct SharedOf {
  static constexpr int heads = G, round = R, threads = Threads, lanes = L;
  float merged[R][Threads / kWarp][L * kElements + 2];
  Merging<G> merging;
};

// Rows maps a position to the row of its key and value in the cache.
struct Rows {
  static constexpr bool appends = true;  // attend stores the token's own key and value
  __device__ __forceinline__ explicit Rows(const int64_t* = nullptr) {}
  __device__ __forceinline__ int64_t operator()(int position) const { return position; }
};

// PagedRows is Rows for a cache of pages.
template <bool Appends> struct PagedRows {
  static constexpr bool appends = Appends;
  const int64_t* pages;
  __device__ __forceinline__ explicit PagedRows(const int64_t* pages) : pages(pages) {}
  __device__ __forceinline__ int64_t operator()(int position) const {
    return pages[position / kPageTokens] * kPageTokens + position % kPageTokens;
  }
};

// fetchSlice starts fetching the cached keys and values of a slice into the L2 cache, all at once. The threads
// that attend hold only a few of them at a time, too few to keep the memory busy.
template <class T, int threads, class RowOf>
__device__ __forceinline__ void fetchSlice(const Attention& a, int64_t position, int kv, int slice, int keys, RowOf rowOf) {
  constexpr int kLine = 128;
  const int from = firstVisible(a, position), begin = from + slice * keys, end = min(begin + keys, int(position));
  const int bytes = a.dim * sizeof(T), lines = (bytes + kLine - 1) / kLine;
  for (int i = threadIdx.x; i < (end - begin) * lines; i += threads) {
    const int64_t at = (rowOf(begin + i / lines) * a.kvHeads + kv) * bytes + i % lines * kLine;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(a.keys) + at));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(a.values) + at));
  }
}

// attend computes one slice of the `slices` slices of `keys` positions each, for the query heads of
// group z of a key-value head, and merges all slices if it is the last of them to finish. All threads of
// the block must call it.
template <class T, class Shared, class RowOf = Rows>
__device__ __forceinline__ void attend(const Attention& a, Shared& shared, int64_t position, int kv, int z, int slice,
                                       int slices, int keys, RowOf rowOf = RowOf()) {
  constexpr int L = Shared::lanes, G = Shared::heads, round = Shared::round;
  constexpr int workers = Shared::threads / L, warps = Shared::threads / kWarp;
  const int dim = a.dim, width = a.kvHeads * dim, group = a.heads / a.kvHeads;
  const int first = kv * group + z * G, here = min(G, group - z * G);
  const int from = firstVisible(a, position);
  const int begin = from + slice * keys, end = min(begin + keys, int(position) + 1);
  const float *cosines = a.cosines, *sines = a.sines;
  if (cosines) cosines += position * (dim / 2), sines += position * (dim / 2);
  T *keyRows = static_cast<T*>(a.keys) + kv * dim, *valueRows = static_cast<T*>(a.values) + kv * dim;
  if (RowOf::appends && end == position + 1) {
    const T *k = static_cast<const T*>(a.k) + kv * dim, *v = static_cast<const T*>(a.v) + kv * dim;
    for (int i = threadIdx.x; i < dim; i += Shared::threads) {
      const int64_t own = rowOf(position) * width + i;
      keyRows[own] = fromFloat<T>(turned(k, i, dim, cosines, sines));
      valueRows[own] = v[i];
    }
    __syncthreads();
  }

  const int at = threadIdx.x % L * kElements;
  float q[G][kElements];
  Softmax s[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    const T* row = static_cast<const T*>(a.q) + (first + min(g, here - 1)) * dim;
    turnedFeatures(q[g], row, at, dim, cosines, sines, a.packed);
#pragma unroll
    for (int i = 0; i < kElements; i++) q[g][i] *= a.scale * kLog2E;
  }
  for (int j0 = begin + threadIdx.x / L; j0 - int(threadIdx.x / L) < end; j0 += kTogether * workers) {
    Pack<T, kElements> key[kTogether], value[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      const int64_t row = rowOf(min(j0 + u * workers, end - 1)) * width;
      key[u] = features(keyRows + row, at, dim, a.packed);
      value[u] = features(valueRows + row, at, dim, a.packed);
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
      float score[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; u++) {
        score[u] = 0;
#pragma unroll
        for (int i = 0; i < kElements; i++) score[u] += q[g][i] * element(key[u], i);
#pragma unroll
        for (int d = L / 2; d > 0; d /= 2) score[u] += __shfl_xor_sync(kAllLanes, score[u], d);
        if (j0 + u * workers >= end) score[u] = -INFINITY;
      }
      if (j0 < end) s[g].add(score, value);
    }
  }

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int g = 0; g < G; g++)
#pragma unroll
    for (int d = L; d < kWarp; d *= 2) s[g].merge(d);
  const int64_t part = dim + 2;
#pragma unroll
  for (int g0 = 0; g0 < G; g0 += round) {
    if (g0 > 0) __syncthreads();
    if (lane < L)
#pragma unroll
      for (int g = 0; g < round; g++) {
        float* to = shared.merged[g][warp];
        if (lane == 0) to[0] = s[g0 + g].maximum, to[1] = s[g0 + g].sum;
#pragma unroll
        for (int i = 0; i < kElements; i++) to[2 + at + i] = s[g0 + g].weighted[i];
      }
    __syncthreads();
    for (int e = threadIdx.x; e < min(round, here - g0) * dim; e += Shared::threads) {
      const int g = e / dim, i = e % dim;
      const Merged all = mergeAll<warps>(shared.merged[g][0], L * kElements + 2, i);
      float* to = a.parts + (int64_t(first + g0 + g) * a.slices + slice) * part;
      if (i == 0) to[0] = all.maximum, to[1] = all.sum;
      to[2 + i] = all.weighted;
    }
  }

  mergeSlices<T, Shared::threads>(shared.merging, a.parts + int64_t(first) * a.slices * part, a.arrived + z * a.kvHeads + kv, here, dim,
                                  a.slices, slices, static_cast<T*>(a.y) + first * dim);
}
