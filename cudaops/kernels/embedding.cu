// Rows of a table by number, and the gradient of the table.
//
//   forward:   y[r] = table[ids[r]]                  a row of NaN where the id is not in [0, vocab)
//   backward:  dt[v] = Σ_{r: ids[r] = v} g[r]        in the order of r, in float32
//
// Backward first groups the rows by id: count the rows of each id, sum the counts up to where each id's group starts, put
// each row into its group in any order, and move it to the place that the number of smaller rows in the group gives. Only
// whole numbers are added atomically, so the groups are the same on every run. Then a block adds up each id's rows.
#include "common.cuh"

__device__ __forceinline__ int64_t idOf(const void* ids, int bytes, int64_t r) {
  return bytes == 8 ? static_cast<const int64_t*>(ids)[r] : static_cast<const int32_t*>(ids)[r];
}

// ---- Forward ----

// N elements an access, d a multiple of N. Launch: a warp a row, blockDim.y rows a block.
template <class Y, class X, int N>
__device__ __forceinline__ void gather(Y* y, const void* ids, int idBytes, const X* table, int64_t rows, int64_t vocab,
                                       int d) {
  int64_t r = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= rows) return;
  int64_t id = idOf(ids, idBytes, r);
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
      embedding_packs_##Y##_##X(Y* y, const void* ids, int idBytes, const X* table, int64_t rows,             \
                                int64_t vocab, int d) {                                                       \
    gather<Y, X, 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y))>(y, ids, idBytes, table, rows, vocab, d); \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      embedding_elements_##Y##_##X(Y* y, const void* ids, int idBytes, const X* table, int64_t rows,          \
                                   int64_t vocab, int d) {                                                    \
    gather<Y, X, 1>(y, ids, idBytes, table, rows, vocab, d);                                                  \
  }
DEFINE(f32, f32)
DEFINE(bf16, bf16)
DEFINE(bf16, f32)
DEFINE(f16, f16)
DEFINE(f16, f32)
#undef DEFINE

// ---- Groups ----

// counts[id]++ for all rows; counts is zero before. Launch: a thread a row.
extern "C" __global__ void __launch_bounds__(256)
    embedding_count(int* counts, const void* ids, int idBytes, int rows, int64_t vocab) {
  int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  int64_t id = idOf(ids, idBytes, r);
  if (id >= 0 && id < vocab) atomicAdd(counts + id, 1);
}

// starts[v] = Σ_{u < v} counts[u] for v ≤ vocab, and cursors[v] = starts[v]. Launch: one block of 1024 threads, each of which
// takes a stretch of ids.
extern "C" __global__ void __launch_bounds__(1024)
    embedding_starts(int* starts, int* cursors, const int* counts, int vocab) {
  __shared__ int warpSums[kWarp];
  int stretch = (vocab + 1023) / 1024, lo = min(vocab, int(threadIdx.x) * stretch), hi = min(vocab, lo + stretch);
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int own = 0;
  for (int v = lo; v < hi; v++) own += counts[v];
  auto inclusive = [&](int x) {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      int y = __shfl_up_sync(kAllLanes, x, d);
      if (lane >= d) x += y;
    }
    return x;
  };
  int upTo = inclusive(own);
  if (lane == kWarp - 1) warpSums[warp] = upTo;
  __syncthreads();
  if (warp == 0) warpSums[lane] = inclusive(warpSums[lane]);
  __syncthreads();
  int at = upTo - own + (warp > 0 ? warpSums[warp - 1] : 0);
  for (int v = lo; v < hi; v++) {
    int n = counts[v];  // cursors may be the memory of counts
    starts[v] = cursors[v] = at;
    at += n;
  }
  if (threadIdx.x == 1023) starts[vocab] = at;
}

// Each row goes somewhere into its id's group of members. Launch: a thread a row.
extern "C" __global__ void __launch_bounds__(256)
    embedding_fill(int* members, int* cursors, const void* ids, int idBytes, int rows, int64_t vocab) {
  int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  int64_t id = idOf(ids, idBytes, r);
  if (id >= 0 && id < vocab) members[atomicAdd(cursors + id, 1)] = r;
}

// sorted is members with every group in ascending order. Launch: a thread a member; those past the last one idle.
extern "C" __global__ void __launch_bounds__(256)
    embedding_sort(int* sorted, const int* members, const int* starts, const void* ids, int idBytes, int64_t vocab) {
  int p = blockIdx.x * blockDim.x + threadIdx.x;
  if (p >= starts[vocab]) return;
  int r = members[p];
  int64_t id = idOf(ids, idBytes, r);
  int lo = starts[id], hi = starts[id + 1], smaller = 0;
  for (int q = lo; q < hi; q++) smaller += members[q] < r;
  sorted[lo + smaller] = r;
}

// ---- Backward ----

// dt[v] = Σ g over the group, or dt[v] += with accumulate, for which ids that do not occur cost nothing. Launch: a block an id;
// blockDim.x threads, each with N columns, take turns at the columns, and blockDim.y ≤ 8 of them share the rows.
// Dynamic shared memory: blockDim.y·blockDim.x·N floats.
template <class Y, class X, int N>
__device__ __forceinline__ void sumGroups(Y* dt, const X* g, const int* sorted, const int* starts, int d, int accumulate) {
  extern __shared__ float sums[];
  int64_t v = blockIdx.x;
  int lo = starts[v], hi = starts[v + 1];
  if (lo == hi && accumulate) return;
  for (int base = 0; base < d; base += blockDim.x * N) {
    int col = base + threadIdx.x * N;
    float sum[N] = {};
    if (col < d) {
#pragma unroll 4
      for (int p = lo + threadIdx.y; p < hi; p += blockDim.y) {
        Pack<X, N> in = load<N>(g + int64_t(sorted[p]) * d + col);
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] += in.get(j);
      }
    }
    if (hi - lo > 1 && blockDim.y > 1) {  // the same for the whole block
      __syncthreads();
#pragma unroll
      for (int j = 0; j < N; j++) sums[(threadIdx.y * blockDim.x + threadIdx.x) * N + j] = sum[j];
      __syncthreads();
      if (threadIdx.y == 0)
        for (int y = 1; y < blockDim.y; y++)
#pragma unroll
          for (int j = 0; j < N; j++) sum[j] += sums[(y * blockDim.x + threadIdx.x) * N + j];
    }
    if (threadIdx.y == 0 && col < d) {
      Pack<Y, N> out;
      if (accumulate) out = load<N>(dt + v * d + col);
#pragma unroll
      for (int j = 0; j < N; j++) out.set(j, accumulate ? out.get(j) + sum[j] : sum[j]);
      store(dt + v * d + col, out);
    }
  }
}

#define DEFINE(Y, X)                                                                                          \
  extern "C" __global__ void __launch_bounds__(1024)                                                          \
      embedding_backward_packs_##Y##_##X(Y* dt, const X* g, const int* sorted, const int* starts, int d,      \
                                         int accumulate) {                                                    \
    sumGroups<Y, X, 4>(dt, g, sorted, starts, d, accumulate);                                                 \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(1024)                                                          \
      embedding_backward_elements_##Y##_##X(Y* dt, const X* g, const int* sorted, const int* starts, int d,   \
                                            int accumulate) {                                                 \
    sumGroups<Y, X, 1>(dt, g, sorted, starts, d, accumulate);                                                 \
  }
DEFINE(f32, f32)
DEFINE(f32, bf16)
DEFINE(f32, f16)
DEFINE(bf16, bf16)
DEFINE(f16, f16)
