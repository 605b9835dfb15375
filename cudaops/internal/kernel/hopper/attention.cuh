// What the attention kernels share: parameters, the order of work, and the vocabulary of tensor-core tiles.
//
//   y = softmax(scale·q·kᵀ)·v,  lse = log Σ exp(scale·q·kᵀ)
//
// for every sequence b and query head h on its own; query head h reads key-value head h/(heads/kvHeads). Element d of
// head h at position t of sequence b is x[(b·seq + t)·stride + h·headDim + d]; lse is [batch, heads, seq].
#pragma once
#include "common.cuh"

namespace attention {

// The launcher fills it; strides are in elements from one row to the next. Those that a kernel does not name are unused.
struct Params {
  const void *q, *k, *v;
  void *y;
  const void *g;         // gradient of y
  void *dq, *dk, *dv;
  float *lse;
  float *stats;          // lse·log₂e and Σ_d g·y of every query; statsOf finds them
  int64_t qStride, kStride, vStride, yStride, gStride, dqStride, dkStride, dvStride;
  int batch, seq, heads, kvHeads, headDim, causal;
  float scale;
  int section;           // heads whose blocks are scheduled together, so that their keys and values stay in L2
};

constexpr float kLog2e = 1.4426950408889634f;

// Documents that lie one behind the other in a sequence: query i sees the keys from start[i] on, itself the last. start does not
// decrease, and start[i] <= i; end[j] is the first query behind key j that does not see it, seq if all do. The table has start
// of every sequence, then end; attention.cu makes it. Without documents nothing is read and nothing is compiled.
template <bool Packed> struct Documents {
  static constexpr bool packed = Packed;
  const int *table;

  // Rows outside the sequence, of which nothing is kept, have the bounds of its first or last.
  __device__ int start(const Params &p, int batch, int query) const {
    if constexpr (Packed) return table[(int64_t)batch * p.seq + max(min(query, p.seq - 1), 0)];
    return 0;
  }
  __device__ int end(const Params &p, int batch, int key) const {
    if constexpr (Packed) return table[((int64_t)p.batch + batch) * p.seq + min(key, p.seq - 1)];
    return p.seq;
  }
};

// The bounds of the rows of an accumulator of which a lane has parts. They come from far: the lowest and the highest of the warp's
// are found where they are needed, so that nobody waits before.
template <int M> struct Bounds {
  int of[M][2];
  template <class Of> __device__ explicit Bounds(Of bound) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) of[m][half] = bound(16 * m + 8 * half + threadIdx.x % 32 / 4);
  }
  __device__ int lowest() const { return __shfl_sync(kAllLanes, of[0][0], 0); }
  __device__ int highest() const { return __shfl_sync(kAllLanes, of[M - 1][1], 31); }
};
struct NoBounds {};

// Those of a warp's rows from a query or key on.
template <int M, bool Packed>
__device__ inline auto startsOf(const Documents<Packed> &docs, const Params &p, int batch, int query) {
  if constexpr (Packed)
    return Bounds<M>([&](int row) { return docs.start(p, batch, query + row); });
  else
    return NoBounds();
}
template <int M, bool Packed>
__device__ inline auto endsOf(const Documents<Packed> &docs, const Params &p, int batch, int key) {
  if constexpr (Packed)
    return Bounds<M>([&](int row) { return docs.end(p, batch, key + row); });
  else
    return NoBounds();
}

// Work is tile `tile` of head `head` of sequence `batch`, which one thread block does.
struct Work {
  int batch, head, tile;
};

// Work is handed out a section of the heads at a time. Within a section it goes tile by tile; under a causal mask the
// tiles with the longest loops come first, so that no long one is left for the end.
__device__ inline Work schedule(int index, const Params &p, int heads, int tiles, bool lastFirst) {
  int perSection = p.section * tiles, first = index / perSection * p.section, r = index % perSection;
  int n = min(p.section, p.batch * heads - first);
  int tile = r / n, head = first + r % n;
  return {head / heads, head % heads, lastFirst ? tiles - 1 - tile : tile};
}

template <typename T>
__device__ inline T *at(const void *base, int64_t stride, int seq, int batch, int row, int column) {
  return (T *)base + ((int64_t)batch * seq + row) * stride + column;
}

// The statistics of a head: statsRows of lse·log₂e, a multiple of 128, then as many of Σ_d g·y; zero where there is no query.
constexpr int kStatsTile = 128;
__device__ inline int statsRows(const Params &p) { return (p.seq + kStatsTile - 1) / kStatsTile * kStatsTile; }
__device__ inline float *statsOf(const Params &p, int batch, int head) {
  return p.stats + ((int64_t)batch * p.heads + head) * 2 * statsRows(p);
}

__device__ inline float exp2Approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline uint32_t pack(float lo, float hi, bf16) {
  __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *(uint32_t *)&v;
}

__device__ inline uint32_t pack(float lo, float hi, f16) {
  __half2 v = __floats2half2_rn(lo, hi);
  return *(uint32_t *)&v;
}

// Tiles in shared memory hold D elements (16-bit) a row, as chunks of 16 bytes; chunk c of row r lies where chunk
// c ^ (r % 8) would: eight rows of one chunk, which is what ldmatrix reads, then fall on different banks.
template <int D> __device__ inline uint32_t chunkAt(uint32_t tile, int row, int chunk) {
  return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

__device__ inline uint32_t sharedAddress(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

template <int Bytes> __device__ inline void copyAsync(uint32_t to, const void *from, bool valid) {
  int n = valid ? Bytes : 0; // the rest is filled with zeros
  if (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(n));
}

__device__ inline void copyCommit() { asm volatile("cp.async.commit_group;"); }

template <int N> __device__ inline void copyWait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// Starts the copy of Rows rows of one head, of which `rows` exist; other rows and columns from headDim on become zero.
template <typename T, int D, int Rows, int Threads>
__device__ inline void loadTile(uint32_t tile, const T *from, int64_t stride, int rows, int headDim) {
  constexpr int chunks = D / 8, step = Threads / chunks;
  static_assert(Threads % chunks == 0 && Rows % step == 0, "every thread copies the same chunk of each of its rows");
  int chunk = threadIdx.x % chunks, first = threadIdx.x / chunks;
  bool column = chunk * 8 < headDim;
#pragma unroll
  for (int i = 0; i < Rows / step; i++) {
    int row = first + i * step;
    bool valid = column && row < rows;
    copyAsync<16>(chunkAt<D>(tile, row, chunk), valid ? from + row * stride + chunk * 8 : from, valid);
  }
}

__device__ inline void loadWords(uint32_t *v, uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address));
}

// One store, where the compiler would make four of an assignment.
__device__ inline void storeWords(void *to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// One warp writes Rows rows of its tile from shared memory: 16 bytes a lane, whole rows at a time.
template <typename T, int D, int Rows>
__device__ inline void storeRows(uint32_t tile, int tileRow, T *to, int64_t stride, int rows, int headDim) {
  constexpr int chunks = D / 8, step = 32 / chunks;
  const int lane = threadIdx.x % 32, chunk = lane % chunks, first = lane / chunks;
  uint32_t v[Rows / step][4];
#pragma unroll
  for (int i = 0; i < Rows / step; i++) loadWords(v[i], chunkAt<D>(tile, tileRow + first + i * step, chunk));
  if (chunk * 8 >= headDim) return;
#pragma unroll
  for (int i = 0; i < Rows / step; i++)
    if (const int row = first + i * step; row < rows) storeWords(to + row * stride + chunk * 8, v[i]);
}

__device__ inline void loadPair(float (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address));
}

__device__ inline void loadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ inline void loadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// c (16×8) += a (16×16) · b (16×8)
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An accumulator of a warp: 16·M rows by N columns. A lane holds, of every 16×8 piece, the columns 2·(lane%4) and the next
// of the rows lane/4 (elements 0 and 1) and lane/4 + 8 (elements 2 and 3).
template <int M, int N> struct Accumulator {
  float c[M][N / 8][4];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[m][n][e] = 0;
  }

  // += A·Bᵀ for A, rows aRow... of a tile, and B, rows bRow... of another; both have D columns.
  template <typename T, int D> __device__ void addNT(uint32_t aTile, int aRow, uint32_t bTile, int bRow) {
    int lane = threadIdx.x % 32;
    int ar = aRow + lane % 16, br = bRow + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t a[M][4];
#pragma unroll
      for (int m = 0; m < M; m++) loadMatrices(a[m], chunkAt<D>(aTile, ar + 16 * m, 2 * k + lane / 16));
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        uint32_t b[4];
        loadMatrices(b, chunkAt<D>(bTile, br + 16 * n, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < M; m++) {
          multiply(c[m][2 * n], a[m], b[0], b[1], T());
          multiply(c[m][2 * n + 1], a[m], b[2], b[3], T());
        }
      }
    }
  }

  // += A·B for A in registers and B, rows bRow... of a tile with N columns; A's accumulator layout is just that of an
  // operand, once rounded.
  template <typename T, int K> __device__ void addNN(const Accumulator<M, K> &a, uint32_t bTile, int bRow) {
    int lane = threadIdx.x % 32;
    int br = bRow + lane % 16;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
      uint32_t ra[M][4];
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          ra[m][i] = pack(a.c[m][2 * k + i / 2][i % 2 * 2], a.c[m][2 * k + i / 2][i % 2 * 2 + 1], T());
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        uint32_t b[4];
        loadMatricesTransposed(b, chunkAt<N>(bTile, br + 16 * k, 2 * n + lane / 16));
#pragma unroll
        for (int m = 0; m < M; m++) {
          multiply(c[m][2 * n], ra[m], b[0], b[1], T());
          multiply(c[m][2 * n + 1], ra[m], b[2], b[3], T());
        }
      }
    }
  }

  // Writes the accumulator times a factor for each row half, f[m][lower], into rows row... of a tile with N columns.
  template <typename T> __device__ void roundTo(uint32_t tile, int row, const float (&f)[M][2]) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
          uint32_t to = chunkAt<N>(tile, row + 16 * m + 8 * half + lane / 4, n) + lane % 4 * 4;
          uint32_t v = pack(c[m][n][2 * half] * f[m][half], c[m][n][2 * half + 1] * f[m][half], T());
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v));
        }
  }
};

// Hides scores of keys that do not exist or come after the query. Row and column are those of the accumulator's corner.
template <int M, int N> __device__ inline void hide(Accumulator<M, N> &s, int query, int key, const Params &p) {
  const int lane = threadIdx.x % 32, first = key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = query + 16 * m + 8 * half + lane / 4;
      const int seen = (p.causal ? min(i + 1, p.seq) : p.seq) - first;  // of the columns from the lane's first on
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e >= seen) s.c[m][n][2 * half + e] = -INFINITY;
    }
}

// Hides scores of keys before the queries' documents; column 0 is that key.
template <int M, int N> __device__ inline void hideBefore(Accumulator<M, N> &s, int key, const Bounds<M> &starts) {
  if (key >= starts.highest()) return;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int before = starts.of[m][half] - key - threadIdx.x % 4 * 2;  // columns from the lane's first on
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e < before) s.c[m][n][2 * half + e] = -INFINITY;
    }
}
template <int M, int N> __device__ inline void hideBefore(Accumulator<M, N> &, int, const NoBounds &) {}

// Makes probabilities zero, rows of which are keys, of queries behind the keys' documents; column 0 is that query.
template <int M, int N> __device__ inline void dropBehind(Accumulator<M, N> &s, int query, const Bounds<M> &ends) {
  if (query + N <= ends.lowest()) return;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int seen = ends.of[m][half] - query - threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e >= seen) s.c[m][n][2 * half + e] = 0;
    }
}
template <int M, int N> __device__ inline void dropBehind(Accumulator<M, N> &, int, const NoBounds &) {}

// What exponentials of a row are taken relative to: its highest score so far. With documents that may be none yet, and the
// exponentials of nothing must be zero.
template <bool Packed> __device__ inline float softmaxBase(float highest) {
  return Packed && highest == -INFINITY ? 0 : highest;
}

}  // namespace attention
