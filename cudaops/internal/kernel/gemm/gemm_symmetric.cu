// Matrix products on Hopper (sm_90a) that are known to be symmetric, for f16 with float32 sums:
//
//   d = alpha·left·rightᵀ + beta·c + delta·I
//
// left and right are [n, depth] or, in the kernels called tall, stored as [depth, n]; c and d are
// [n, n], and c is symmetric. Only elements on and below the diagonal are computed. They are
// written to both places, so d is exactly symmetric.
//
// A block computes 128 rows by 160 columns, and a cluster consists of two such blocks stacked
// vertically. Each block copies half of the right operand to both. The width is chosen so that the
// triangle of 2048 rows takes 61 clusters, of the 66 that an H100 or H200 can run at once. In a
// block,
//
//   two warpgroups   multiply 64 rows each;
//   one thread       copies the operands, 64 elements of the depth at a time, kStages ahead.
//
// Tiles are stored by way of shared memory both as they are and transposed, so that both are
// written row by row.
//
// Requirements: n and the rows of the stored matrices are multiples of 8, and pointers are
// aligned to 16 bytes. d must not overlap an operand.
#include "gemm_hopper.cuh"
#include "overlap.cuh"

namespace gemm {

// The launcher fills in Params.
struct Params {
  f16 *d;
  const f16 *c;  // may be null
  int n, depth;
  int clusters;  // per matrix
  float alpha, beta, delta;
};

#if defined(HOPPER)

constexpr int kColumns = 160, kStages = 5;

#define REGISTERS_80 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, " \
  "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
#define OUTPUTS_80(m) OUTPUTS_64(m), SIXTEEN(m, 16)

// product160 starts c (64×160) = A·B or, with add, c += A·B. With Tall, the product runs over rows
// of the operands' tiles.
template <int Tall> __device__ inline void product160(float (&c)[kColumns / 8][4], uint64_t x, uint64_t y, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 " REGISTERS_80 ", %80, %81, p, 1, 1, %83, %83;\n}\n"
               : OUTPUTS_80("+f")
               : "l"(x), "l"(y), "r"((int)add), "n"(Tall));
}

// Place is the position of the block's tile, in one of the matrices.
struct Place {
  int rank, row, column, matrix;
  __device__ explicit Place(const Params &p) : rank(blockIdx.x % kCluster) {
    int i = blockIdx.x / kCluster;
    matrix = i / p.clusters;
    i %= p.clusters;
    int rows = 0;  // of clusters
    for (int count; i >= (count = clustersIn(p, rows)); rows++) i -= count;
    row = (kCluster * rows + rank) * kRows;
    column = i * kColumns;
  }
  // clustersIn returns the number of clusters up to the diagonal in a row of clusters.
  __device__ static int clustersIn(const Params &p, int rows) {
    return (min(kCluster * kRows * (rows + 1), p.n) + kColumns - 1) / kColumns;
  }
};

template <bool Tall> struct Stages {
  static constexpr int LeftBytes = kRows * kDepth * 2;
  static constexpr int RightBytes = Tall ? (kColumns + 63) / 64 * kPanelBytes : kColumns * kDepth * 2;
  static constexpr int Bytes = LeftBytes + RightBytes;
  uint32_t base;
  Ring<kStages> ring;
  __device__ explicit Stages(uint32_t at) : base(at), ring{at + kStages * Bytes} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * Bytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
};

// Copies the operands; elements outside the matrices become zero. Each block copies half of the
// right operand's columns or, if Tall, half of its depth.
template <bool Tall>
__device__ inline void copyStages(const Params &p, const TensorMap &left, const TensorMap &right, const Stages<Tall> &m, const Place &at) {
  constexpr int half = (Tall ? kDepth : kColumns) / kCluster;
  for (int k = 0, i = 0; k < p.depth; k += kDepth, i++) {
    const uint32_t barrier = m.ring.fill(i, m.Bytes), to = m.right(i) + at.rank * half * 128;
    if constexpr (Tall) {
#pragma unroll
      for (int panel = 0; panel < kRows / 64; panel++)
        copyBox<false>(m.left(i) + panel * kPanelBytes, left, barrier, at.row + panel * 64, k, at.matrix);
#pragma unroll
      for (int panel = 0; panel < (kColumns + 63) / 64; panel++)
        copyBox<true>(to + panel * kPanelBytes, right, barrier, at.column + panel * 64, k + at.rank * half, at.matrix);
    } else {
      copyBox<false>(m.left(i), left, barrier, k, at.row, at.matrix);
      copyBox<true>(to, right, barrier, k, at.column + at.rank * half, at.matrix);
    }
  }
}

template <bool Tall>
__device__ inline void multiply(Accumulator<1, kColumns> &sums, const Params &p, const Stages<Tall> &m, int worker) {
  constexpr uint32_t offset = 0x3ffff;  // an address within the block; the bits above are the block's rank
  constexpr int next = Tall ? 16 * 128 : 32;
  const int steps = (p.depth + kDepth - 1) / kDepth;
  hold(sums);
  for (int i = 0; i < steps; i++) {
    m.ring.wait(i);
    const Descriptor a((m.left(i) & offset) + worker * kPanelBytes, 16), b(m.right(i) & offset, Tall ? kPanelBytes : 16);
    productsBegin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) product160<Tall>(sums.c[0], a.plus(k * next), b.plus(k * next), k > 0 || i > 0);
    productsCommit();
    if (i > 0) {
      productsWait<1>();
      releaseAll(m.ring, i - 1);
    }
  }
  productsWait<0>();
  hold(sums);
}

// ---- From the sums to memory ----

// Addend holds a lane's elements of c: pairs of columns in rows lane / 4 and lane / 4 + 8 of the
// warp's 16.
struct Addend {
  uint32_t v[kColumns / 8][2];
  __device__ void load(const Params &p, const f16 *c, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half + lane / 4, at = column + 8 * n + lane % 4 * 2;
        v[n][half] = r < p.n && at < p.n ? *(const uint32_t *)(c + (int64_t)r * p.n + at) : 0;
      }
  }
};

// Images is the tile in shared memory, both as it is and transposed. With these strides, any eight
// consecutive rows start on different banks.
struct Images {
  static constexpr int Stride = 2 * kColumns + 16, TurnedStride = 2 * kRows + 16;
  uint32_t tile;
  __device__ uint32_t turned() const { return tile + kRows * Stride; }
};

// finish turns the sums into alpha·sums + beta·c + delta·I. Most products omit a term or two.
__device__ inline void finish(Accumulator<1, kColumns> &sums, const Params &p, const Addend &addend, int row, int column) {
  const int lane = threadIdx.x % 32;
  if (p.alpha != 1 || p.c) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 c = __half22float2(*(const __half2 *)&addend.v[n][half]);
        float *s = sums.c[0][n] + 2 * half;
        s[0] = p.alpha * s[0] + p.beta * c.x;
        s[1] = p.alpha * s[1] + p.beta * c.y;
      }
  }
  if (p.delta == 0 || row + 15 < column || row >= column + kColumns) return;
#pragma unroll
  for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (row + e / 2 * 8 + lane / 4 == column + 8 * n + lane % 4 * 2 + e % 2) sums.c[0][n][e] += p.delta;
}

// Rounds a warp's 16 rows, from `row` of the tile on, to both images.
__device__ inline void leaveBoth(const Accumulator<1, kColumns> &sums, const Images &m, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2) {
    const float(&a)[4] = sums.c[0][n], (&b)[4] = sums.c[0][n + 1];
    const uint32_t v[4] = {pack(a[0], a[1], f16()), pack(a[2], a[3], f16()), pack(b[0], b[1], f16()), pack(b[2], b[3], f16())};
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     m.tile + (row + lane % 16) * m.Stride + (n + lane / 16) * 16),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     m.turned() + ((n + lane / 16) * 8 + lane % 8) * m.TurnedStride + (row + lane / 8 % 2 * 8) * 2),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }
}

// storeImage stores a warpgroup's part of an image, Rows by Columns, at d[row, column]: the
// elements on and below the diagonal or, with Above, those above it from the transposed image.
template <int Rows, int Columns, bool Above>
__device__ inline void storeImage(const Params &p, f16 *d, uint32_t image, int stride, int row, int column) {
  constexpr int chunks = Columns / 8, count = Rows * chunks / 128;
  const int thread = threadIdx.x % 128;
  uint32_t v[count][4];
#pragma unroll
  for (int i = 0; i < count; i++) {
    const int at = thread + i * 128;
    loadWords(v[i], image + at / chunks * stride + at % chunks * 16);
  }
  const bool whole = (Above ? row + Rows <= column : column + Columns <= row) && max(row + Rows, column + Columns) <= p.n;
#pragma unroll
  for (int i = 0; i < count; i++) {
    const int at = thread + i * 128, r = row + at / chunks, c = column + at % chunks * 8;
    f16 *to = d + (int64_t)r * p.n + c;
    if (whole) {
      storeWords(to, v[i]);
      continue;
    }
    // The elements from `first` to before `last` are on the wanted side.
    const int first = Above ? max(0, r + 1 - c) : 0, last = Above ? 8 : min(8, r + 1 - c);
    if (r >= p.n || c >= p.n || first >= last) continue;
    if (last - first == 8) {
      storeWords(to, v[i]);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (e >= first && e < last) to[e] = ((const f16 *)v[i])[e];
  }
}

// meetWorkers waits for both warpgroups, meetWarps for the threads of one.
__device__ inline void meetWorkers() { asm volatile("bar.sync 1, %0;" ::"n"(128 * kWorkers) : "memory"); }
__device__ inline void meetWarps(int worker) { asm volatile("bar.sync %0, 128;" ::"r"(2 + worker) : "memory"); }

template <bool Tall> __device__ inline void work(const Params &p, const Stages<Tall> &m, const Place &at) {
  const int worker = uniform(threadIdx.x / 128) - 1, first = 64 * worker, row = first + threadIdx.x / 32 % 4 * 16;
  f16 *const d = p.d + (int64_t)at.matrix * p.n * p.n;
  Addend addend = {};
  if (p.c) addend.load(p, p.c + (d - p.d), at.row + row, at.column);
  Accumulator<1, kColumns> sums;
  sums.clear();
  multiply(sums, p, m, worker);
  const bool above = at.column > at.row + first + 63;  // entirely above the diagonal
  if (!above) finish(sums, p, addend, at.row + row, at.column);
  meetWorkers();  // both warpgroups are done with the stages
  if (above) return;
  const Images images{m.base};
  leaveBoth(sums, images, row);
  meetWarps(worker);
  storeImage<64, kColumns, false>(p, d, images.tile + first * images.Stride, images.Stride, at.row + first, at.column);
  storeImage<kColumns, 64, true>(p, d, images.turned() + first * 2, images.TurnedStride, at.column, at.row + first);
}

template <bool Tall> __device__ inline void run(const Params &p, const TensorMap &left, const TensorMap &right) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Place at(p);
  const Stages<Tall> m(sharedAddress(shared));
  if (threadIdx.x == 0) {
    m.ring.init(4 * kCluster * kWorkers);  // one arrival per warp
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];\nprefetch.tensormap [%1];" ::"l"(&left), "l"(&right) : "memory");
  }
  __syncwarp();
  meetCluster();
  awaitPrevious();
  releaseNext();
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x == 0) copyStages(p, left, right, m, at);
    __syncwarp();
  } else {
    takeRegisters<240>();
    work(p, m, at);
  }
  meetCluster();  // the other block may still arrive at this block's barriers
}

#endif  // HOPPER
}  // namespace gemm

// Launch: the clusters of Place for every matrix, with 384 threads per block. Dynamic shared
// memory: see Stages.
#define DEFINE(name, tall)                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                 \
      name(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap left,                             \
           const __grid_constant__ TensorMap right) {                                                                  \
    BODY(run<tall>(p, left, right));                                                                                   \
  }
DEFINE(gemm_symmetric, false)
DEFINE(gemm_symmetric_tall, true)
