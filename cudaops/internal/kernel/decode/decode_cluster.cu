// Attention from a single token to itself and the cached keys and values of the tokens before it, like
// decode_attention.cu, for GPUs with clusters and overlapping kernels.
//
// A cluster of kBlocks blocks divides the positions before the token, for up to G query heads that share a key-value
// head. Keys and values are copied to a ring in shared memory, kRounds rounds ahead. Every thread copies what it will
// read itself, so it needs no barrier. Since earlier programs have stored these keys and values, the copies start before
// the preceding kernel has ended.
//
// The last block also handles the token's own key and value, and stores them. At the end, the blocks write their results
// to the shared memory of the first block, which merges them in order.
#include "common.cuh"
#include "decode_attention.cuh"
#include "overlap.cuh"

constexpr int kThreads = 256, kBlocks = 8;

// Shared is the layout of a block's shared memory. L lanes share a key.
template <int L, int G> struct Shared {
  static constexpr int rounds = L == 8 ? 4 : 8, warps = kThreads / kWarp;
  static constexpr int together = G * L > 128 ? 4 : G;  // heads that are merged at the same time
  uint4 keys[rounds][kThreads], values[rounds][kThreads];
  float merged[together][warps][2 + L * kElements];
  float received[kBlocks][G][2 + L * kElements];  // maximum, sum, weighted values
};

template <class T> __device__ __forceinline__ Pack<T, kElements> packOf(const uint4& v) { return reinterpret_cast<const Pack<T, kElements>&>(v); }

// Turner rotates this lane's features for a position. The features of a lane all are in the same half of a head.
template <class T> struct Turner {
  Pack<float, kElements> cosines = {}, sines = {};
  __device__ __forceinline__ void load(const Attention& a, int64_t position, int at) {
    const int half = a.dim / 2;
    const int64_t angle = position * half + (at >= half ? at - half : at);
    if (!a.cosines || at >= a.dim) return;
    cosines = ::load<kElements>(a.cosines + angle), sines = ::load<kElements>(a.sines + angle);
  }
  __device__ __forceinline__ void turn(float (&f)[kElements], const Attention& a, int at, const Pack<T, kElements>& own, const Pack<T, kElements>& other) const {
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      f[i] = element(own, i);
      if (a.cosines) f[i] = f[i] * cosines.v[i] + element(other, i) * (at >= a.dim / 2 ? sines.v[i] : -sines.v[i]);
    }
  }
};

// Launch: kThreads threads, [kBlocks, kvHeads, ⌈heads/kvHeads/G⌉] blocks in clusters of kBlocks. The head's size is a
// multiple of 16.
template <class T, int L, int G> __device__ __forceinline__ void attendInCluster(const Attention& a) {
#if __CUDA_ARCH__ >= 900
  constexpr int workers = kThreads / L, rounds = Shared<L, G>::rounds, together = Shared<L, G>::together, warps = Shared<L, G>::warps;
  constexpr int unroll = 2, size = 2 + L * kElements;
  extern __shared__ __align__(128) char memory[];
  Shared<L, G>& shared = *reinterpret_cast<Shared<L, G>*>(memory);
  const int rank = blockIdx.x, kv = blockIdx.y, dim = a.dim, width = a.kvHeads * dim, group = a.heads / a.kvHeads;
  const int first = kv * group + blockIdx.z * G, here = min(G, group - int(blockIdx.z) * G);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, worker = threadIdx.x / L, at = threadIdx.x % L * kElements;
  const T *keys = static_cast<const T*>(a.keys) + kv * dim + at, *values = static_cast<const T*>(a.values) + kv * dim + at;
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  // The block's share of the positions before the token: [begin, end). In each round, every worker, a group of L lanes,
  // handles one of these positions.
  int64_t position;
  int begin, end;
  Turner<T> turner;
  const auto copy = [&](int round) {
    const int j = begin + round * workers + worker;
    if (at < dim) {  // rows past the end become zeros
      const int64_t row = j < end ? int64_t(j) * width : 0;
      copyAsync(&shared.keys[round % rounds][threadIdx.x], keys + row, j < end);
      copyAsync(&shared.values[round % rounds][threadIdx.x], values + row, j < end);
    }
    commitAsync();
  };
  const auto start = [&] {
    const int from = firstVisible(a, position), each = (int(position) - from + kBlocks - 1) / kBlocks;
    begin = from + rank * each, end = min(begin + each, int(position));
#pragma unroll
    for (int i = 0; i < rounds; i++) copy(i);
    turner.load(a, position, at);
  };
  const auto valid = [&] { return position >= 0 && position < a.capacity; };
  position = a.early ? __ldcg(a.position) : -1;
  if (valid()) start();
  if (a.early) releaseNext();
  awaitPrevious();
  if (!a.early) releaseNext();

  // Start all loads before the first use of any.
  const int opposite = at >= dim / 2 ? -(dim / 2) : dim / 2;
  const bool has = at < dim, owner = rank == kBlocks - 1 && warp == 0;
  Pack<T, kElements> own[G + 2] = {}, other[G + 1] = {};  // of the queries, of the key, and of the value
#pragma unroll
  for (int g = 0; g < G; g++) {
    const T* row = static_cast<const T*>(a.q) + (first + min(g, here - 1)) * dim + at;
    if (has) own[g] = load<kElements>(row);
    if (has && a.cosines) other[g] = load<kElements>(row + opposite);
  }
  if (owner && has) {
    const T* row = static_cast<const T*>(a.k) + kv * dim + at;
    own[G] = load<kElements>(row), own[G + 1] = load<kElements>(static_cast<const T*>(a.v) + kv * dim + at);
    if (a.cosines) other[G] = load<kElements>(row + opposite);
  }
  // A preceding kernel may have changed the position since the copies started. They are then useless, and the copies for
  // the new position start.
  const int64_t now = __ldcg(a.position);
  if (now != position) {
    awaitAsync<0>();
    position = now;
    if (valid()) start();
  }
  if (!valid()) return;  // the host rejects such positions

  float q[G][kElements];
  Softmax s[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    turner.turn(q[g], a, at, own[g], other[g]);
#pragma unroll
    for (int i = 0; i < kElements; i++) q[g][i] *= a.scale * kLog2E;
  }
  // score returns the product of query g and a key in all of the key's lanes.
  const auto score = [&](int g, const Pack<T, kElements>& key) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kElements; i++) sum += q[g][i] * element(key, i);
#pragma unroll
    for (int d = L / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    return sum;
  };
  if (owner) {
    float turned[kElements];
    turner.turn(turned, a, at, own[G], other[G]);
    Pack<T, kElements> key[1], value[1] = {own[G + 1]};
#pragma unroll
    for (int i = 0; i < kElements; i++) key[0].set(i, turned[i]);
    if (worker == 0 && has && blockIdx.z == 0) {
      store(const_cast<T*>(keys) + position * width, key[0]);
      store(const_cast<T*>(values) + position * width, value[0]);
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
      const float of[1] = {score(g, key[0])};
      if (worker == 0) s[g].add(of, value);
    }
  }

  for (int r = 0; begin + r * workers < end; r += unroll) {
    awaitAsync<rounds - unroll>();
    Pack<T, kElements> key[unroll], value[unroll];
#pragma unroll
    for (int u = 0; u < unroll; u++) {
      key[u] = value[u] = {};
      if (has) {
        key[u] = packOf<T>(shared.keys[(r + u) % rounds][threadIdx.x]);
        value[u] = packOf<T>(shared.values[(r + u) % rounds][threadIdx.x]);
      }
    }
    const int j = begin + r * workers + worker;
#pragma unroll
    for (int g = 0; g < G; g++) {
      float of[unroll];
#pragma unroll
      for (int u = 0; u < unroll; u++) {
        of[u] = score(g, key[u]);
        if (j + u * workers >= end) of[u] = -INFINITY;
      }
      if (j < end) s[g].add(of, value);
    }
#pragma unroll
    for (int u = 0; u < unroll; u++) copy(r + u + rounds);
  }

  // Merge the softmaxes of the workers of a warp, then those of the warps of a block, and then those of the blocks.
#pragma unroll
  for (int g = 0; g < G; g++)
#pragma unroll
    for (int d = L; d < kWarp; d *= 2) s[g].merge(d);
  uint32_t received;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(received) : "r"(uint32_t(__cvta_generic_to_shared(shared.received[rank]))));
#pragma unroll
  for (int g0 = 0; g0 < G; g0 += together) {
    if (g0 > 0) __syncthreads();
    if (lane < L)
#pragma unroll
      for (int g = 0; g < together; g++) {
        float* to = shared.merged[g][warp];
        if (lane == 0) to[0] = s[g0 + g].maximum, to[1] = s[g0 + g].sum;
#pragma unroll
        for (int i = 0; i < kElements; i += 2)
          *reinterpret_cast<float2*>(to + 2 + at + i) = make_float2(s[g0 + g].weighted[i], s[g0 + g].weighted[i + 1]);
      }
    __syncthreads();
    if (g0 == 0) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the first block has started
    for (int e = threadIdx.x; e < min(together, here - g0) * dim; e += kThreads) {
      const int g = e / dim, i = e % dim;
      const Merged all = mergeAll<warps>(shared.merged[g][0], size, i);
      const uint32_t to = received + ((g0 + g) * size + 2 + i) * sizeof(float);
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(all.weighted) : "memory");
      if (i == 0) asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to - 8), "f"(all.maximum), "f"(all.sum) : "memory");
    }
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (rank != 0) return;
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  for (int e = threadIdx.x; e < here * dim; e += kThreads) {
    const int g = e / dim, i = e % dim;
    const Merged all = mergeAll<kBlocks>(shared.received[0][g], G * size, i);
    static_cast<T*>(a.y)[(first + g) * dim + i] = fromFloat<T>(all.weighted / all.sum);
  }
#endif
}

#define DEFINE_HEADS(T, L, G) \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_cluster_##L##_##G##_##T(Attention a) { attendInCluster<T, L, G>(a); }
#define DEFINE_LANES(T, L) DEFINE_HEADS(T, L, 1) DEFINE_HEADS(T, L, 4) DEFINE_HEADS(T, L, 8)
#define DEFINE(T) DEFINE_LANES(T, 8) DEFINE_LANES(T, 16) DEFINE_LANES(T, 32)
DEFINE(bf16)
DEFINE(f16)
