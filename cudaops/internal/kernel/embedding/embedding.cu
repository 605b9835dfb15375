// Rows of a table by ID, and the gradient of the table.
//
//   forward:   y[r] = table[ids[r]]                  a row of NaN if the ID is not in [0, vocab)
//   backward:  dt[v] = Σ_{r: ids[r] = v} g[r]        in the order of r, in float32
//
// The backward pass first groups the rows by ID. It counts the rows of each ID, computes the start
// of each group by a prefix sum, and puts the rows in their groups in arbitrary order. Then each
// row moves to the position given by the number of smaller rows in its group. Atomic additions are
// used only for integers, so the groups are the same on every run.
//
// The groups, stored consecutively, are then divided into tiles of kTile rows, which blocks add up.
// For a group that spans several tiles, each tile produces a partial sum, and a last kernel adds
// these up. A group of any length is therefore spread over the GPU.
#include "common.cuh"

// ---- Forward ----

// N elements per access, where d is a multiple of N. Launch: one warp per row, blockDim.y rows per
// block.
template <class Y, class X, int N>
__device__ __forceinline__ void gather(Y* y, const int64_t* ids, const X* table, int64_t rows, int64_t vocab,
                                       int d) {
  int64_t r = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= rows) return;
  int64_t id = ids[r];
  bool known = id >= 0 && id < vocab;
#pragma unroll 4
  for (int i = threadIdx.x * N; i < d; i += kWarp * N) {
    Pack<Y, N> out;
    if (known) {
      Pack<X, N> in = load<N>(table + id * d + i);
#pragma unroll
      for (int j = 0; j < N; j++) out.set(j, in.get(j));
    } else {
#pragma unroll
      for (int j = 0; j < N; j++) out.set(j, NAN);
    }
    store(y + r * d + i, out);
  }
}

#define DEFINE(Y, X)                                                                                          \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      embedding_packs_##Y##_##X(Y* y, const int64_t* ids, const X* table, int64_t rows,                       \
                                int64_t vocab, int d) {                                                       \
    gather<Y, X, 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y))>(y, ids, table, rows, vocab, d);        \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      embedding_elements_##Y##_##X(Y* y, const int64_t* ids, const X* table, int64_t rows,                    \
                                   int64_t vocab, int d) {                                                    \
    gather<Y, X, 1>(y, ids, table, rows, vocab, d);                                                           \
  }
DEFINE(f32, f32)
DEFINE(bf16, bf16)
DEFINE(bf16, f32)
DEFINE(f16, f16)
DEFINE(f16, f32)
#undef DEFINE

// ---- Groups ----

// counts[id]++ for all rows; counts must be zero. Launch: one thread per row.
extern "C" __global__ void __launch_bounds__(256)
    embedding_count(int* counts, const int64_t* ids, int rows, int64_t vocab) {
  int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  int64_t id = ids[r];
  if (id >= 0 && id < vocab) atomicAdd(counts + id, 1);
}

// starts[v] = Σ_{u < v} counts[u] for v ≤ vocab, and counts is set to the same for v < vocab. Both
// have room up to a multiple of four above vocab, where counts is zero. Launch: one block of 1024
// threads, with a range of IDs for each warp.
extern "C" __global__ void __launch_bounds__(1024) embedding_starts(int* starts, int* counts, int vocab) {
  __shared__ int stretchSums[kWarp];
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int quads = vocab / 4 + 1, stretch = (quads + kWarp * kWarp - 1) / (kWarp * kWarp) * kWarp;
  int lo = min(quads, warp * stretch), hi = min(quads, lo + stretch);
  int4* quad = reinterpret_cast<int4*>(counts);
  auto inclusive = [&](int x) {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      int y = __shfl_up_sync(kAllLanes, x, d);
      if (lane >= d) x += y;
    }
    return x;
  };
  int own = 0;
#pragma unroll 8
  for (int i = lo + lane; i < hi; i += kWarp) own += quad[i].x + quad[i].y + quad[i].z + quad[i].w;
  int upTo = inclusive(own);
  if (lane == kWarp - 1) stretchSums[warp] = upTo;
  __syncthreads();
  int before = stretchSums[lane];
  before = __shfl_sync(kAllLanes, inclusive(before) - before, warp);  // the sum of the preceding ranges
#pragma unroll 4
  for (int i = lo; i < hi; i += kWarp) {
    int4 n = i + lane < hi ? quad[i + lane] : int4{};
    int sum = n.x + n.y + n.z + n.w, to = inclusive(sum), at = before + to - sum;
    before += __shfl_sync(kAllLanes, to, kWarp - 1);
    int4 s = {at, at + n.x, at + n.x + n.y, at + n.x + n.y + n.z};
    if (i + lane < hi) quad[i + lane] = reinterpret_cast<int4*>(starts)[i + lane] = s;
  }
}

// Puts each row somewhere in the group of its ID. Launch: one thread per row.
extern "C" __global__ void __launch_bounds__(256)
    embedding_fill(int* members, int* cursors, const int64_t* ids, int rows, int64_t vocab) {
  int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  int64_t id = ids[r];
  if (id >= 0 && id < vocab) members[atomicAdd(cursors + id, 1)] = r;
}

// Writes members to sorted, with every group in ascending order. Launch: one warp per member, eight
// per block; warps past the last member are idle.
extern "C" __global__ void __launch_bounds__(256)
    embedding_sort(int* sorted, const int* members, const int* starts, const int64_t* ids, int64_t vocab) {
  int p = blockIdx.x * 8 + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (p >= starts[vocab]) return;
  int r = members[p];
  int64_t id = ids[r];
  int lo = starts[id], hi = starts[id + 1], smaller = 0;
#pragma unroll 4
  for (int q = lo + lane; q < hi; q += kWarp) smaller += members[q] < r;
  smaller = __reduce_add_sync(kAllLanes, smaller);
  if (lane == 0) sorted[lo + smaller] = r;
}

// ---- Backward ----

constexpr int kTile = 32, kAhead = 8;  // rows per tile, and rows loaded at once

// Launch of both kernels: one thread for each N columns, with blockIdx.x as the tile. dt is set or
// added to; rows of IDs that don't occur are left unchanged. heads and tails [tiles, d] are the
// partial sums of groups that continue from a preceding tile, and of groups that start in a tile
// and continue in the next.
template <class Y, int N>
__device__ __forceinline__ void put(Y* dt, int64_t at, const float (&sum)[N], int accumulate) {
  Pack<Y, N> out;
  if (accumulate) out = load<N>(dt + at);
#pragma unroll
  for (int j = 0; j < N; j++) out.set(j, accumulate ? out.get(j) + sum[j] : sum[j]);
  store(dt + at, out);
}

template <class Y, class X, int N>
__device__ __forceinline__ void sumTiles(Y* dt, float* heads, float* tails, const X* g, const int* sorted, const int* starts,
                                         const int64_t* ids, int64_t vocab, int d, int accumulate) {
  __shared__ int rows[kTile], begins[kTile], ends[kTile];
  __shared__ int64_t groups[kTile];
  int lo = blockIdx.x * kTile, n = min(kTile, starts[vocab] - lo), hi = lo + n;
  if (n <= 0) return;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    rows[i] = sorted[lo + i];
    int64_t id = groups[i] = ids[rows[i]];
    begins[i] = starts[id], ends[i] = starts[id + 1];
  }
  __syncthreads();
  int col = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (col >= d) return;

  float sum[N] = {};
  auto finish = [&](int i) {  // ends the group of the tile's row i, at least within this tile
    if (begins[i] < lo || ends[i] > hi) {
      Pack<float, N> out;
#pragma unroll
      for (int j = 0; j < N; j++) out.v[j] = sum[j];
      store((begins[i] < lo ? heads : tails) + int64_t(blockIdx.x) * d + col, out);
    } else {
      put(dt, groups[i] * d + col, sum, accumulate);
    }
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = 0;
  };
  for (int base = 0; base < n; base += kAhead) {
    Pack<X, N> v[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; u++)
      if (base + u < n) v[u] = load<N>(g + int64_t(rows[base + u]) * d + col);
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      int i = base + u;
      if (i >= n) break;
      if (i > 0 && groups[i] != groups[i - 1]) finish(i - 1);
#pragma unroll
      for (int j = 0; j < N; j++) sum[j] += v[u].get(j);
    }
  }
  finish(n - 1);
}

template <class Y, int N>
__device__ __forceinline__ void joinTiles(Y* dt, const float* heads, const float* tails, const int* sorted, const int* starts,
                                          const int64_t* ids, int64_t vocab, int d, int accumulate) {
  int lo = blockIdx.x * kTile, hi = min(lo + kTile, starts[vocab]);
  if (lo >= hi) return;
  int64_t id = ids[sorted[hi - 1]];
  int begin = starts[id], end = starts[id + 1];
  int col = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (begin < lo || end <= hi || col >= d) return;  // only for a group that starts here and continues
  float sum[N];
  Pack<float, N> tail = load<N>(tails + int64_t(blockIdx.x) * d + col);
#pragma unroll
  for (int j = 0; j < N; j++) sum[j] = tail.v[j];
#pragma unroll 8
  for (int tile = blockIdx.x + 1; tile <= (end - 1) / kTile; tile++) {
    Pack<float, N> head = load<N>(heads + int64_t(tile) * d + col);
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] += head.v[j];
  }
  put(dt, id * d + col, sum, accumulate);
}

#define DEFINE_VARIANT(Y, X, name, N)                                                                         \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      embedding_tiles_##name##_##Y##_##X(Y* dt, float* heads, float* tails, const X* g, const int* sorted,    \
                                         const int* starts, const int64_t* ids, int64_t vocab,                \
                                         int d, int accumulate) {                                             \
    sumTiles<Y, X, N>(dt, heads, tails, g, sorted, starts, ids, vocab, d, accumulate);                        \
  }
#define DEFINE_JOIN(Y, name, N)                                                                               \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      embedding_join_##name##_##Y(Y* dt, const float* heads, const float* tails, const int* sorted,           \
                                  const int* starts, const int64_t* ids, int64_t vocab, int d,                \
                                  int accumulate) {                                                           \
    joinTiles<Y, N>(dt, heads, tails, sorted, starts, ids, vocab, d, accumulate);                             \
  }
#define DEFINE(Y, X)                       \
  DEFINE_VARIANT(Y, X, packs, 4)           \
  DEFINE_VARIANT(Y, X, elements, 1)
DEFINE(f32, f32)
DEFINE(f32, bf16)
DEFINE(f32, f16)
#undef DEFINE
DEFINE_JOIN(f32, packs, 4)
DEFINE_JOIN(f32, elements, 1)
