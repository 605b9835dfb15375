// Products with a narrow matrix, such as a low-rank adapter's, for bf16 and f16. One operand is large and the
// other has few columns, so the time is that of reading the large operand once. The products run on Hopper
// (sm_90a); sum, scale and blocks run on any GPU:
//
//   rows, nt:   y = scale·x·wᵀ with w [columns, depth]
//   rows, nn:   y = scale·x·w with w [depth, columns]
//   columns:    s = xᵀ·v of the rows of a part, [columns, narrow], in float32
//   both:       s and x·w in parts of columns, [rows, narrow], in one pass over x
//   sum:        y = Σ s over the parts, or its transpose, with the rows of s multiplied by their factors
//   scale:      y = x with each row multiplied by its factor
//   blocks:     a block-diagonal matrix of the matrices of several adapters, and back
//
// x is [rows, depth] or [rows, columns], v is [rows, narrow], and y is [rows, columns]. A block of `rows`
// computes 64 rows of y, and 64 columns of a wider one. A block of `columns` computes 256 columns, from
// the rows of one part. The parts are added up in their order, so that the results are deterministic.
//
// In a block, one warp copies the operands, Stages ahead, and one or two warpgroups multiply. Elements
// outside the matrices are zero.
//
// Requirements: the numbers of columns of all matrices in memory are multiples of 8, and matrices are
// aligned to 16 bytes.
#include "barrier.cuh"
#include "registers.cuh"
#include "wgmma.cuh"

// Compiles a kernel's body only for Hopper. Other GPUs never launch these kernels.
#if defined(HOPPER)
#define BODY(...) narrow::__VA_ARGS__
#else
#define BODY(...)
#endif

namespace narrow {

// The launcher fills in Rows and Columns.
struct Rows {
  void *y, *scaled;      // scaled is y with each row multiplied by its factor; may be null
  const float *factors;
  int rows, columns, depth;
  float scale;
};
struct Columns {
  float *parts;
  int rows, columns, narrow;
  int step;  // rows of a part, a multiple of kSide
};

struct Both {
  float *v, *parts;  // x·w in parts of columns, and xᵀ·u in parts of rows
  int rows, columns, narrow;
  int step;  // rows of a part, a multiple of kSide
};

#if defined(HOPPER)
using namespace tile;

constexpr int kSide = 64, kPanel = kSide * kSide * 2;  // a panel of 64 rows and 64 columns
constexpr int kRowsStages = 6, kColumnsStages = 5, kColumnsPanels = 4;

__device__ inline void copyPanel(uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(&map), "r"(barrier), "r"(x), "r"(y)
               : "memory");
}

template <typename T> __device__ inline void storePair(T *to, float a, float b) { *(uint32_t *)to = pack(a, b, T()); }

// Launch: ⌈rows/64⌉ × ⌈columns/64⌉ blocks of 160 threads.
template <typename T, bool TransposeB> __device__ inline void rows(const Rows &p, const TensorMap &x, const TensorMap &w) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = sharedAddress(shared);
  const Ring<kRowsStages> ring{base + kRowsStages * 2 * kPanel};
  const int row = blockIdx.x * kSide, column = blockIdx.y * kSide, steps = (p.depth + kSide - 1) / kSide;
  auto left = [&](int i) { return base + ring.slot(i) * 2 * kPanel; };
  if (threadIdx.x == 0) {
    ring.init(4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
      for (int i = 0; i < steps; i++) {
        const uint32_t barrier = ring.fill(i, 2 * kPanel);
        copyPanel(left(i), x, barrier, i * kSide, row);
        if (TransposeB)
          copyPanel(left(i) + kPanel, w, barrier, column, i * kSide);
        else
          copyPanel(left(i) + kPanel, w, barrier, i * kSide, column);
      }
    return;
  }
  Accumulator<1, kSide> sums;
  sums.clear();
  for (int i = 0; i < steps; i++) {
    ring.wait(i);
    hold(sums);
    productsBegin();
    if constexpr (TransposeB)
      startNN<T, kSide>(sums, left(i), 0, left(i) + kPanel);
    else
      startNT<T, kSide, kSide, kSide, true>(sums, left(i), 0, left(i) + kPanel);
    productsCommit();
    productsWait<0>();
    hold(sums);
    if (threadIdx.x % 32 == 0) ring.release(i);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < kSide / 8; n++) {
    const float(&c)[4] = sums.c[0][n];
    const int at = column + 8 * n + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = row + warp * 16 + half * 8 + lane / 4;
      if (r < p.rows && at < p.columns) {
        const int64_t to = int64_t(r) * p.columns + at;
        const float a = p.scale * c[2 * half], b = p.scale * c[2 * half + 1];
        storePair((T *)p.y + to, a, b);
        if (p.scaled) {
          const float f = __ldg(p.factors + r);
          storePair((T *)p.scaled + to, f * a, f * b);
        }
      }
    }
  }
}

// Launch: ⌈columns/256⌉ × parts × ⌈narrow/64⌉ blocks of 288 threads.
template <typename T> __device__ inline void columns(const Columns &p, const TensorMap &x, const TensorMap &v) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int stageBytes = (kColumnsPanels + 1) * kPanel;
  const uint32_t base = sharedAddress(shared);
  const Ring<kColumnsStages> ring{base + kColumnsStages * stageBytes};
  const int column = blockIdx.x * kColumnsPanels * kSide, first = blockIdx.y * p.step, narrow = blockIdx.z * kSide;
  const int steps = (min(p.step, p.rows - first) + kSide - 1) / kSide;
  auto left = [&](int i) { return base + ring.slot(i) * stageBytes; };
  if (threadIdx.x == 0) {
    ring.init(8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    if (threadIdx.x == 256)
      for (int i = 0; i < steps; i++) {
        const uint32_t barrier = ring.fill(i, stageBytes);
#pragma unroll
        for (int k = 0; k < kColumnsPanels; k++) copyPanel(left(i) + k * kPanel, x, barrier, column + k * kSide, first + i * kSide);
        copyPanel(left(i) + kColumnsPanels * kPanel, v, barrier, narrow, first + i * kSide);
      }
    return;
  }
  constexpr int each = kColumnsPanels / 2;  // panels of a warpgroup
  const int lane = threadIdx.x % 32, worker = uniform(threadIdx.x / 128), warp = threadIdx.x / 32 % 4;
  Accumulator<1, kSide> sums[each];
#pragma unroll
  for (int k = 0; k < each; k++) sums[k].clear();
  for (int i = 0; i < steps; i++) {
    ring.wait(i);
#pragma unroll
    for (int k = 0; k < each; k++) hold(sums[k]);
    productsBegin();
    const Descriptor b(left(i) + kColumnsPanels * kPanel, 16);
#pragma unroll
    for (int k = 0; k < each; k++) {
      const Descriptor a(left(i) + (worker * each + k) * kPanel, 16);
#pragma unroll
      for (int t = 0; t < kSide / 16; t++) addSS<1, 1>(sums[k].c[0], a.plus(t * 2048), b.plus(t * 2048), T());
    }
    productsCommit();
    productsWait<0>();
#pragma unroll
    for (int k = 0; k < each; k++) hold(sums[k]);
    if (lane == 0) ring.release(i);
  }
#pragma unroll
  for (int k = 0; k < each; k++)
#pragma unroll
    for (int n = 0; n < kSide / 8; n++) {
      const float(&c)[4] = sums[k].c[0][n];
      const int at = narrow + 8 * n + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = column + (worker * each + k) * kSide + warp * 16 + half * 8 + lane / 4;
        if (r < p.columns && at < p.narrow)
          *(float2 *)(p.parts + (int64_t(blockIdx.y) * p.columns + r) * p.narrow + at) = {c[2 * half], c[2 * half + 1]};
      }
    }
}

// ---- both ----

#define REGISTERS_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define OUTPUTS_16(m) SIXTEEN(m, 0)
DEFINE_SS(addSS, "+f", 1, 32, 16, "%16", "%17", "%18", "%19, %20", bf16, "bf16")
DEFINE_SS(addSS, "+f", 1, 32, 16, "%16", "%17", "%18", "%19, %20", f16, "f16")
using tile::addSS;

constexpr int kBothStages = 8;
template <int N> constexpr int kBothPanels = 512 / N;  // of a block

// A block computes the products of kBothPanels panels of columns with w, whose panels stay in shared memory,
// for one part of the rows. Each of the two multiplying warpgroups takes every other panel; both add their
// sums of a row. Launch: ⌈columns/(64·kBothPanels)⌉ × parts blocks of 384 threads.
template <typename T, int N> __device__ inline void both(const Both &p, const TensorMap &x, const TensorMap &w, const TensorMap &u) {
  constexpr int panels = kBothPanels<N>, each = panels / 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = sharedAddress(shared), right = base + kBothStages * kPanel, us = right + panels * kPanel;
  float *const exchange = (float *)(shared + (kBothStages + panels + 2) * kPanel);  // [N / 8 · 4, 128]
  const uint32_t barriers = us + 2 * kPanel + 64 * N * 4;
  const Ring<kBothStages> ring{barriers};
  const Ring<2> rows{barriers + ring.bytes};
  const uint32_t loaded = rows.barriers + rows.bytes;
  const int column = blockIdx.x * panels * kSide, first = blockIdx.y * p.step;
  const int steps = (min(p.step, p.rows - first) + kSide - 1) / kSide;
  if (threadIdx.x == 0) {
    ring.init(4);
    rows.init(8);
    barrierInit(loaded, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x) return;
    barrierExpect(loaded, panels * kPanel);
#pragma unroll 1
    for (int k = 0; k < panels; k++) copyPanel(right + k * kPanel, w, loaded, 0, column + k * kSide);
#pragma unroll 1
    for (int t = 0; t < steps; t++) {
      copyPanel(us + t % 2 * kPanel, u, rows.fill(t, kPanel), 0, first + t * kSide);
#pragma unroll 1
      for (int k = 0; k < panels; k++) {
        const int i = t * panels + k;
        copyPanel(base + ring.slot(i) * kPanel, x, ring.fill(i, kPanel), column + k * kSide, first + t * kSide);
      }
    }
    return;
  }
  takeRegisters<240>();
  const int lane = threadIdx.x % 32, worker = uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / 32 % 4;
  Accumulator<1, N> sums[each], v;
#pragma unroll
  for (int k = 0; k < each; k++) sums[k].clear();
  barrierWait(loaded, 0);
  for (int t = 0; t < steps; t++) {
    v.clear();
    rows.wait(t);
    const Descriptor ut(us + t % 2 * kPanel, 16);
#pragma unroll
    for (int k = 0; k < each; k++) {
      const int panel = 2 * k + worker, i = t * panels + panel;
      ring.wait(i);
      hold(v);
      hold(sums[k]);
      productsBegin();
      const Descriptor a(base + ring.slot(i) * kPanel, 16), b(right + panel * kPanel, 16);
#pragma unroll
      for (int s = 0; s < kSide / 16; s++) addSS<0, 1>(v.c[0], a.plus(s * 32), b.plus(s * 2048), T());
#pragma unroll
      for (int s = 0; s < kSide / 16; s++) addSS<1, 1>(sums[k].c[0], a.plus(s * 2048), ut.plus(s * 2048), T());
      productsCommit();
      productsWait<0>();
      hold(v);
      hold(sums[k]);
      if (lane == 0) ring.release(i);
    }
    if (lane == 0) rows.release(t);
    float *const mine = exchange + threadIdx.x % 128;
    if (worker)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) mine[(n * 4 + e) * 128] = v.c[0][n][e];
    asm volatile("bar.sync 1, 256;" ::: "memory");
    if (!worker) {
#pragma unroll
      for (int n = 0; n < N / 8; n++) {
        float(&c)[4] = v.c[0][n];
#pragma unroll
        for (int e = 0; e < 4; e++) c[e] += mine[(n * 4 + e) * 128];
        const int at = 8 * n + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int r = first + t * kSide + warp * 16 + half * 8 + lane / 4;
          if (r < p.rows && at < p.narrow)
            *(float2 *)(p.v + (int64_t(blockIdx.x) * p.rows + r) * p.narrow + at) = {c[2 * half], c[2 * half + 1]};
        }
      }
    }
    asm volatile("bar.sync 2, 256;" ::: "memory");
  }
#pragma unroll
  for (int k = 0; k < each; k++)
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      const float(&c)[4] = sums[k].c[0][n];
      const int at = 8 * n + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = column + (2 * k + worker) * kSide + warp * 16 + half * 8 + lane / 4;
        if (r < p.columns && at < p.narrow)
          *(float2 *)(p.parts + (int64_t(blockIdx.y) * p.columns + r) * p.narrow + at) = {c[2 * half], c[2 * half + 1]};
      }
    }
}

#endif  // HOPPER

// Launch: blocks of 256 threads, one thread per element of y.
template <typename T>
__device__ inline void sumRows(T *y, T *scaled, const float *parts, const float *factors, int64_t size, int n, int columns, float scale) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= size) return;
  float s = 0;
#pragma unroll 8  // several loads are in flight
  for (int k = 0; k < n; k++) s += parts[k * size + i];
  s *= scale;
  y[i] = fromFloat<T>(s);
  if (scaled) scaled[i] = fromFloat<T>(s * factors[i / columns]);
}

// Launch: blocks of 256 threads, one thread per element of y.
template <typename Y>
__device__ inline void sum(Y *y, const float *parts, const float *factors, int n, int columns, int narrow, int transposed) {
  const int64_t size = int64_t(columns) * narrow, i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= size) return;
  const int64_t from = transposed ? i % columns * narrow + i / columns : i;
  float s = 0;
#pragma unroll 8  // several loads are in flight
  for (int k = 0; k < n; k++) s += parts[k * size + from];
  if (factors) s *= factors[from / narrow];
  y[i] = fromFloat<Y>(s);
}

// Blocks are the matrices of up to kBlocks adapters, which form a block-diagonal matrix. The launcher fills
// it in.
constexpr int kBlocks = 3;
struct Blocks {
  void *block[kBlocks];  // [rows, ranks]; null for a layer without an adapter, which has rank 0
  int rows[kBlocks], ranks[kBlocks];
  int n, width;  // elements and columns of the whole matrix
};

// Copies blocks to the matrix y, with zeros elsewhere, or, with Back, copies the blocks of y back. Launch:
// blocks of 256 threads, one thread per element of y.
template <typename T, bool Back> __device__ inline void copyBlocks(const Blocks &p, T *y) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= p.n) return;
  int row = i / p.width, column = i % p.width;
  T v = 0;
#pragma unroll
  for (int k = 0; k < kBlocks; k++) {
    if (row >= 0 && row < p.rows[k] && column >= 0 && column < p.ranks[k]) {
      T *at = (T *)p.block[k] + int64_t(row) * p.ranks[k] + column;
      if (Back)
        *at = y[i];
      else
        v = *at;
    }
    row -= p.rows[k];
    column -= p.ranks[k];
  }
  if (!Back) y[i] = v;
}

// Multiplies each row of x by its factor. Launch: blocks of 256 threads, one thread per element.
template <typename T> __device__ inline void scaleRows(T *y, const T *x, const float *factors, int64_t n, int columns) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i < n) y[i] = fromFloat<T>(toFloat(x[i]) * factors[i / columns]);
}

}  // namespace narrow

#define DEFINE(T)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(160, 2) gemm_hopper_narrow_nt_##T(                                          \
      const __grid_constant__ narrow::Rows p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w) {  \
    BODY(rows<T, false>(p, x, w));                                                                                         \
  }                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(160, 2) gemm_hopper_narrow_nn_##T(                                          \
      const __grid_constant__ narrow::Rows p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w) {  \
    BODY(rows<T, true>(p, x, w));                                                                                          \
  }                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(288, 1) gemm_hopper_narrow_columns_##T(                                     \
      const __grid_constant__ narrow::Columns p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap v) { \
    BODY(columns<T>(p, x, v));                                                                                             \
  }
DEFINE(bf16)
DEFINE(f16)
#undef DEFINE
#define DEFINE(T)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) gemm_hopper_narrow_sum_##T(T *y, const float *parts, const float *factors, int n, \
                                                                               int columns, int narrow, int transposed) {   \
    narrow::sum(y, parts, factors, n, columns, narrow, transposed);                                                         \
  }
DEFINE(f32)
DEFINE(bf16)
#undef DEFINE
#define DEFINE(T)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) gemm_hopper_narrow_scale_##T(T *y, const T *x, const float *factors, \
                                                                                 int64_t n, int columns) {           \
    narrow::scaleRows(y, x, factors, n, columns);                                                                    \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#define DEFINE(Bytes, T)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(256) gemm_hopper_narrow_blocks_##Bytes(const narrow::Blocks p, T *y) {   \
    narrow::copyBlocks<T, false>(p, y);                                                                                  \
  }                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256) gemm_hopper_narrow_blocks_back_##Bytes(const narrow::Blocks p, T *y) { \
    narrow::copyBlocks<T, true>(p, y);                                                                                   \
  }
DEFINE(2, uint16_t)
DEFINE(4, uint32_t)
#undef DEFINE
#define DEFINE(N, T)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_narrow_both_##N##_##T(                                  \
      const __grid_constant__ narrow::Both p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,    \
      const __grid_constant__ TensorMap u) {                                                                               \
    BODY(both<T, N>(p, x, w, u));                                                                                          \
  }
DEFINE(32, bf16)
DEFINE(64, bf16)
DEFINE(32, f16)
DEFINE(64, f16)
#undef DEFINE
#define DEFINE(T)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) gemm_hopper_narrow_sum_rows_##T(                                      \
      T *y, T *scaled, const float *parts, const float *factors, int64_t size, int n, int columns, float scale) {         \
    narrow::sumRows(y, scaled, parts, factors, size, n, columns, scale);                                                  \
  }
DEFINE(bf16)
DEFINE(f16)
