// Flash attention in float32 arithmetic, for any head dimension, stride and alignment, and the
// statistics that the backward passes read. attention.cuh has the formulas and attention_mma.cu the
// formulas of the gradients.
//
// This is the reference implementation on the GPU. It is also the only variant for float32 inputs,
// since tensor cores would round the operands.
//
// A block of 256 threads (16×16) owns 64 rows and loops over the other operand 64 rows at a time.
// The columns of the result are divided into chunks of 128, each computed by a separate block.
// These blocks all recompute the scores, so the head dimension is unlimited.
#include "attention.cuh"

namespace attention {

constexpr int kTile = 64, kSlice = 32, kChunk = 128, kThreads = 256;

// Rows of one head: row r starts at from + r·stride and has headDim elements. Rows from `rows` on
// read as zeros.
template <class T> struct Rows {
  const T *from;
  int64_t stride;
  int rows, headDim;
  __device__ __forceinline__ float get(int row, int d) const {
    return row < rows && d < headDim ? toFloat(from[row * stride + d]) : 0;
  }
};

template <class T>
__device__ Rows<T> rowsOf(const void *base, int64_t stride, const Params &p, int batch, int row, int head) {
  return {at<const T>(base, stride, p.seq, batch, row, head * p.headDim), stride, p.seq - row, p.headDim};
}

struct Shared {
  union {
    struct { float a[kSlice][kTile + 1], b[kSlice][kTile + 1]; };
    float c[kSlice][kChunk];
  };
  float p[kTile][kTile + 1];
};

// A thread's share of a 64×64 product: rows ty + 16i, columns tx + 16j.
struct Scores { float v[4][4]; };
// A thread's share of a 64×128 result: rows ty + 16i, columns tx + 16j.
struct Result { float v[4][8]; };

// multiplyNT returns A·Bᵀ for 64 rows of each.
template <class T> __device__ Scores multiplyNT(Shared &s, const Rows<T> &a, const Rows<T> &b) {
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  Scores r = {};
  for (int d0 = 0; d0 < a.headDim; d0 += kSlice) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * kSlice; i += kThreads) {
      int row = i / kSlice, d = i % kSlice;
      s.a[d][row] = a.get(row, d0 + d);
      s.b[d][row] = b.get(row, d0 + d);
    }
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < kSlice; d++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) r.v[i][j] = fmaf(s.a[d][ty + 16 * i], s.b[d][tx + 16 * j], r.v[i][j]);
  }
  return r;
}

// addNN computes r += x·B, for the 64×64 matrix x and columns [chunk, chunk + kChunk) of 64 rows of
// B.
template <class T> __device__ void addNN(Result &r, Shared &s, const Scores &x, const Rows<T> &b, int chunk) {
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) s.p[ty + 16 * i][tx + 16 * j] = x.v[i][j];
  for (int k0 = 0; k0 < kTile && k0 < b.rows; k0 += kSlice) {
    __syncthreads();
    for (int i = threadIdx.x; i < kSlice * kChunk; i += kThreads)
      s.c[i / kChunk][i % kChunk] = b.get(k0 + i / kChunk, chunk + i % kChunk);
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kSlice; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) r.v[i][j] = fmaf(s.p[ty + 16 * i][k0 + k], s.c[k][tx + 16 * j], r.v[i][j]);
  }
}

// write stores a result, times a factor per row, in columns from `chunk` on of the rows from `row`
// on of a head.
template <class T>
__device__ void write(void *base, int64_t stride, const Params &p, int batch, int row, int head, int chunk, const Result &r,
                      const float (&f)[4]) {
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  T *to = at<T>(base, stride, p.seq, batch, row, head * p.headDim);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int t = ty + 16 * i, d = chunk + tx + 16 * j;
      if (row + t < p.seq && d < p.headDim) to[t * stride + d] = fromFloat<T>(r.v[i][j] * f[i]);
    }
}

// reduceRow reduces over the 16 threads that share rows.
template <class Op> __device__ float reduceRow(float v) {
#pragma unroll
  for (int d = 8; d > 0; d /= 2) v = Op::merge(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

// Place is the part of the output that a block computes: a chunk of columns, a tile of rows, and a
// head. Blocks for the chunks of one tile are adjacent.
struct Place {
  int chunk, row, head, batch;
};

__device__ Place place(const Params &p, int heads) {
  int chunks = (p.headDim + kChunk - 1) / kChunk, tiles = (p.seq + kTile - 1) / kTile, i = blockIdx.x;
  return {i % chunks * kChunk, i / chunks % tiles * kTile, i / chunks / tiles % heads, i / chunks / tiles / heads};
}

// Launch: batch·heads·⌈seq/64⌉·⌈headDim/128⌉ blocks of 256 threads.
template <class T, class Docs> __device__ __forceinline__ void forward(const Params &p, const Docs &docs) {
  __shared__ Shared s;
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  Place at = place(p, p.heads);
  int kvHead = at.head / (p.heads / p.kvHeads);
  Rows<T> q = rowsOf<T>(p.q, p.qStride, p, at.batch, at.row, at.head);
  int keys = p.causal ? min(p.seq, at.row + kTile) : p.seq;
  float top[4], sum[4];
  int start[4];
  for (int i = 0; i < 4; i++) top[i] = -INFINITY, sum[i] = 0, start[i] = docs.start(p, at.batch, at.row + ty + 16 * i);
  Result y = {};
  for (int j0 = docs.start(p, at.batch, at.row) / kTile * kTile; j0 < keys; j0 += kTile) {
    Scores x = multiplyNT(s, q, rowsOf<T>(p.k, p.kStride, p, at.batch, j0, kvHead));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float highest = top[i];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int query = at.row + ty + 16 * i, key = j0 + tx + 16 * j;
        bool hidden = key >= p.seq || (p.causal && key > query) || key < start[i];
        x.v[i][j] = hidden ? -INFINITY : __fmul_rn(x.v[i][j], p.scale);  // rounded exactly as in the backward pass
        highest = Max::merge(x.v[i][j], highest);
      }
      highest = reduceRow<Max>(highest);
      const float base = softmaxBase<Docs::packed>(highest);
      float shrink = expf(top[i] - base), total = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) total += x.v[i][j] = expf(x.v[i][j] - base);
      top[i] = highest;
      sum[i] = sum[i] * shrink + total;
#pragma unroll
      for (int j = 0; j < 8; j++) y.v[i][j] *= shrink;
    }
    addNN(y, s, x, rowsOf<T>(p.v, p.vStride, p, at.batch, j0, kvHead), at.chunk);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[i] = reduceRow<Sum>(sum[i]);
    int query = at.row + ty + 16 * i;
    if (tx == 0 && at.chunk == 0 && query < p.seq)
      normalizerOf(p, at.batch, at.head, query) = {top[i], logf(sum[i])};
    sum[i] = 1 / sum[i];
  }
  write<T>(p.y, p.yStride, p, at.batch, at.row, at.head, at.chunk, y, sum);
}

// dq. Launch: as forward.
template <class T, class Docs> __device__ __forceinline__ void backwardQ(const Params &p, const Docs &docs) {
  __shared__ Shared s;
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  Place at = place(p, p.heads);
  int kvHead = at.head / (p.heads / p.kvHeads);
  Rows<T> q = rowsOf<T>(p.q, p.qStride, p, at.batch, at.row, at.head);
  Rows<T> g = rowsOf<T>(p.g, p.gStride, p, at.batch, at.row, at.head);
  int keys = p.causal ? min(p.seq, at.row + kTile) : p.seq;
  float top[4], inverse[4], delta[4], scale[4];
  int start[4];
  for (int i = 0; i < 4; i++) {
    int query = min(at.row + ty + 16 * i, p.seq - 1);
    const float2 n = normalizerOf(p, at.batch, at.head, query);
    top[i] = n.x, inverse[i] = expf(-n.y);
    delta[i] = statsOf(p, at.batch, at.head)[statsRows(p) + query], scale[i] = p.scale;
    start[i] = docs.start(p, at.batch, query);
  }
  Result dq = {};
  for (int j0 = docs.start(p, at.batch, at.row) / kTile * kTile; j0 < keys; j0 += kTile) {
    Rows<T> k = rowsOf<T>(p.k, p.kStride, p, at.batch, j0, kvHead);
    Scores x = multiplyNT(s, q, k);
    Scores ds = multiplyNT(s, g, rowsOf<T>(p.v, p.vStride, p, at.batch, j0, kvHead));
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int query = at.row + ty + 16 * i, key = j0 + tx + 16 * j;
        bool hidden = key >= p.seq || (p.causal && key > query) || key < start[i];
        ds.v[i][j] = hidden ? 0 : expf(__fmul_rn(x.v[i][j], p.scale) - top[i]) * inverse[i] * (ds.v[i][j] - delta[i]);
      }
    addNN(dq, s, ds, k, at.chunk);
  }
  write<T>(p.dq, p.dqStride, p, at.batch, at.row, at.head, at.chunk, dq, scale);
}

// dk and dv. Launch: batch·kvHeads·⌈seq/64⌉·⌈headDim/128⌉ blocks of 256 threads.
template <class T, class Docs> __device__ __forceinline__ void backwardKV(const Params &p, const Docs &docs) {
  __shared__ Shared s;
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  Place at = place(p, p.kvHeads);
  Rows<T> k = rowsOf<T>(p.k, p.kStride, p, at.batch, at.row, at.head);
  Rows<T> v = rowsOf<T>(p.v, p.vStride, p, at.batch, at.row, at.head);
  Result dk = {}, dv = {};
  int group = p.heads / p.kvHeads, queries = docs.end(p, at.batch, at.row + kTile - 1), end[4];
  for (int i = 0; i < 4; i++) end[i] = docs.end(p, at.batch, at.row + ty + 16 * i);
  for (int head = at.head * group; head < (at.head + 1) * group; head++)
    for (int i0 = p.causal ? at.row : 0; i0 < queries; i0 += kTile) {
      Rows<T> q = rowsOf<T>(p.q, p.qStride, p, at.batch, i0, head), g = rowsOf<T>(p.g, p.gStride, p, at.batch, i0, head);
      Scores x = multiplyNT(s, k, q);  // transposed: rows are keys, columns are queries
      float delta[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int query = i0 + tx + 16 * j, there = min(query, p.seq - 1);
        const float2 n = normalizerOf(p, at.batch, head, there);
        const float inverse = expf(-n.y);
        delta[j] = statsOf(p, at.batch, head)[statsRows(p) + there];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int key = at.row + ty + 16 * i;
          bool hidden = query >= end[i] || key >= p.seq || (p.causal && key > query);
          x.v[i][j] = hidden ? 0 : expf(__fmul_rn(x.v[i][j], p.scale) - n.x) * inverse;
        }
      }
      addNN(dv, s, x, g, at.chunk);
      Scores ds = multiplyNT(s, v, g);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) ds.v[i][j] = x.v[i][j] * (ds.v[i][j] - delta[j]);
      addNN(dk, s, ds, q, at.chunk);
    }
  const float one[4] = {1, 1, 1, 1}, scale[4] = {p.scale, p.scale, p.scale, p.scale};
  write<T>(p.dk, p.dkStride, p, at.batch, at.row, at.head, at.chunk, dk, scale);
  write<T>(p.dv, p.dvStride, p, at.batch, at.row, at.head, at.chunk, dv, one);
}

// The statistics. A block handles 128 positions of a head, with eight lanes per position, each of
// which handles four positions. It also sets the first n counters to zero. The backward kernels use
// at most two counters per block of this kernel, plus one.
//
// Launch: batch·⌈seq/128⌉·heads blocks of 256 threads. Adjacent blocks handle the heads of the same
// positions, since these are adjacent in memory.
template <class T> __device__ __forceinline__ void statistics(const Params &p, int *counters, int n) {
  if (const unsigned i = blockIdx.x * kThreads + threadIdx.x; i < unsigned(n)) counters[i] = 0;
  constexpr int V = kVec<T>, positions = kStatsTile / (kThreads / 8);
  const int rows = statsRows(p), tiles = rows / kStatsTile;
  const int head = blockIdx.x % p.heads, tile = blockIdx.x / p.heads % tiles, batch = blockIdx.x / p.heads / tiles;
  const int lane = threadIdx.x % 8, first = tile * kStatsTile + threadIdx.x / 8;
  const Rows<T> y = rowsOf<T>(p.y, p.yStride, p, batch, 0, head), g = rowsOf<T>(p.g, p.gStride, p, batch, 0, head);
  // Among the eight lanes of a position, lane i writes the results of the i-th of its four
  // positions.
  const int mine = first + lane * (kThreads / 8);
  const bool writes = lane < positions, exists = writes && mine < p.seq;
  float2 norm = {0, 0};
  if (exists) norm = normalizerOf(p, batch, head, mine);
  float sum[positions] = {};
  if (p.headDim % V == 0 && p.yStride % V == 0 && p.gStride % V == 0 && aligned16(p.y, p.g)) {
    for (int d = lane * V; d < p.headDim; d += 8 * V) {
      Pack<T, V> a[positions], b[positions];
#pragma unroll
      for (int i = 0; i < positions; i++) {
        const int64_t t = min(first + i * kThreads / 8, p.seq - 1);
        a[i] = load<V>(y.from + t * y.stride + d), b[i] = load<V>(g.from + t * g.stride + d);
      }
#pragma unroll
      for (int i = 0; i < positions; i++)
#pragma unroll
        for (int e = 0; e < V; e++) sum[i] = fmaf(a[i].get(e), b[i].get(e), sum[i]);
    }
  } else {
    for (int d = lane; d < p.headDim; d += 8)
#pragma unroll
      for (int i = 0; i < positions; i++)
        sum[i] = fmaf(y.get(first + i * kThreads / 8, d), g.get(first + i * kThreads / 8, d), sum[i]);
  }
  float own = 0;
#pragma unroll
  for (int i = 0; i < positions; i++) {
#pragma unroll
    for (int d = 4; d > 0; d /= 2) sum[i] += __shfl_xor_sync(kAllLanes, sum[i], d);
    if (lane == i) own = sum[i];
  }
  if (!writes) return;
  float *stats = statsOf(p, batch, head);
  const Exponent e(norm);
  stats[mine] = e.h;
  stats[rows + mine] = exists ? own : 0;
  stats[2 * rows + mine] = e.rho;
}

// documentTable writes the table of Documents. from[i] is the position where token i's document
// should start; null means one document per sequence. A start that is less than its predecessor is
// raised to it, and a start after its own token is lowered to that token. Whatever the input, no
// kernel then reads out of bounds or waits for a block that never comes.
//
// If window is not 0, a query sees at most that many keys.
//
// Launch: a block of 1024 threads per sequence.
__device__ __forceinline__ void documentTable(int *table, const int64_t *from, int seq, int window) {
  __shared__ int ofWarps[kWarp];
  int *start = table + (int64_t)blockIdx.x * seq, *end = start + (int64_t)gridDim.x * seq;
  if (from) from += (int64_t)blockIdx.x * seq;
  auto begin = [&](int i) {
    const int document = from ? (int)min(max(from[i], int64_t(0)), int64_t(seq)) : 0;
    return window > 0 ? max(document, i - window + 1) : document;
  };
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto maxBefore = [&](int v) {  // inclusive prefix maximum over the lanes
    for (int d = 1; d < kWarp; d *= 2) {
      const int other = __shfl_up_sync(kAllLanes, v, d);
      if (lane >= d) v = max(v, other);
    }
    return v;
  };
  int largest = 0;
  for (int i0 = 0; i0 < seq; i0 += blockDim.x) {
    const int i = i0 + threadIdx.x;
    int v = maxBefore(i < seq ? begin(i) : 0);
    __syncthreads();  // all threads have read the previous iteration's ofWarps
    if (lane == kWarp - 1) ofWarps[warp] = v;
    __syncthreads();
    const int warps = maxBefore(ofWarps[lane]), before = __shfl_sync(kAllLanes, warps, max(warp - 1, 0));
    v = max(v, max(largest, warp > 0 ? before : 0));
    largest = max(largest, __shfl_sync(kAllLanes, warps, kWarp - 1));
    if (i < seq) start[i] = min(v, i);
  }
  __syncthreads();
  for (int j = threadIdx.x; j < seq; j += blockDim.x) {
    int seen = j, unseen = seq;  // the last query known to see j, the first known not to
    while (seen + 1 < unseen) {
      const int i = (seen + unseen) / 2;
      (start[i] <= j ? seen : unseen) = i;
    }
    end[j] = unseen;
  }
}

}  // namespace attention

extern "C" __global__ void __launch_bounds__(1024) attention_document_table_i64(int *table, const int64_t *from, int seq,
                                                                                       int window) {
  attention::documentTable(table, from, seq, window);
}

#define KERNEL(name, body, T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(attention::kThreads) name##_##T(const __grid_constant__ attention::Params p) { \
    attention::body<T>(p, attention::Documents<false>());                                                                 \
  }                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(attention::kThreads) name##_documents_##T(                                 \
      const __grid_constant__ attention::Params p, const int *table) {                                                    \
    attention::body<T>(p, attention::Documents<true>{table});                                                             \
  }
#define STATISTICS(T)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(attention::kThreads) attention_stats_##T(                                  \
      const __grid_constant__ attention::Params p, int *counters, int n) {                                                \
    attention::statistics<T>(p, counters, n);                                                                             \
  }
#define KERNELS(T)                                 \
  KERNEL(attention_plain_forward, forward, T)      \
  KERNEL(attention_plain_backward_q, backwardQ, T) \
  KERNEL(attention_plain_backward_kv, backwardKV, T) \
  STATISTICS(T)
FOR_STORAGE_TYPES(KERNELS)
