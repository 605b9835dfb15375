// Matrix products on Hopper (sm_90a) of which one knows that they are symmetric, in f16 with sums in float32:
//
//   d = alpha·left·rightᵀ + beta·c + delta·I
//
// with left and right [n, depth] or, in the kernels called tall, stored as [depth, n]; c and d are [n, n], c symmetric. Only
// elements on the diagonal and below are computed, and written to both places, so that d is exactly symmetric.
//
// A block computes 128 rows by 160 or 176 columns, a cluster two of these below each other and, with four blocks, two beside each
// other. The tiles of a cluster share what they read: each block copies half of what it has in common with another one to both.
// The widths are such that the triangle of 2048 rows takes the clusters that an H100 or H200 runs at once: of its 132
// multiprocessors 61 pairs, or 30 fours. In a block
//
//   two warpgroups   multiply 64 rows each;
//   one thread       copies the operands, 64 of the depth at a time, kStages ahead.
//
// Tiles leave through shared memory as they are and transposed, so that both are written in rows.
//
// Needs: n a multiple of 8, and of the stored matrices' rows too; pointers of 16 bytes. d is none of the operands.
#include "gemm_hopper.cuh"
#include "overlap.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  f16 *d;
  const f16 *c;  // null: none
  int n, depth;
  int clusters;  // of a matrix
  float alpha, beta, delta;
};

#if defined(HOPPER)

constexpr int kStages = 5;

#define REGISTERS_80 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, " \
  "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
#define REGISTERS_88 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, " \
  "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87}"
#define OUTPUTS_80(m) OUTPUTS_64(m), SIXTEEN(m, 16)
#define OUTPUTS_88(m) OUTPUTS_80(m), FOUR(m, 20), FOUR(m, 21)

// c (64×N) = or, with add, += A·B; Tall: the product runs over rows of the operands' tiles.
#define DEFINE_SYMMETRIC(N, R, a, b, flag, transpose)                                                                        \
  template <int Tall> __device__ inline void productOf(float (&c)[N / 8][4], uint64_t x, uint64_t y, bool add) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 " REGISTERS_##R ", " a ", " b ", p, 1, 1, "         \
                 transpose ", " transpose ";\n}\n"                                                                          \
                 : OUTPUTS_##R("+f")                                                                                         \
                 : "l"(x), "l"(y), "r"((int)add), "n"(Tall));                                                                \
  }
DEFINE_SYMMETRIC(160, 80, "%80", "%81", "%82", "%83")
DEFINE_SYMMETRIC(176, 88, "%88", "%89", "%90", "%91")

// The block's part of the launch. Rank r of a cluster has the rows of r % 2 and the columns of r / 2.
template <int Blocks> struct Place {
  static constexpr int Across = Blocks / 2, Columns = Across == 1 ? 160 : 176;
  int rank, row, column, matrix;
  __device__ explicit Place(const Params &p) : rank(blockIdx.x % Blocks) {
    int i = blockIdx.x / Blocks;
    matrix = i / p.clusters;
    i %= p.clusters;
    int rows = 0;  // of clusters
    for (int count; i >= (count = clustersIn(p, rows)); rows++) i -= count;
    row = (2 * rows + rank % 2) * kRows;
    column = (i * Across + rank / 2) * Columns;
  }
  // How many clusters it takes to the diagonal.
  __device__ static int clustersIn(const Params &p, int rows) {
    constexpr int width = Across * Columns;
    return (min(2 * kRows * (rows + 1), p.n) + width - 1) / width;
  }
  // The blocks with the same rows, or columns.
  __device__ uint16_t sameRows() const { return 5 << rank % 2 & (1 << Blocks) - 1; }
  __device__ uint16_t sameColumns() const { return 3 << rank / 2 * 2; }
};

template <bool Tall, int Columns> struct Stages {
  static constexpr int LeftBytes = kRows * kDepth * 2;
  static constexpr int RightBytes = Tall ? (Columns + 63) / 64 * kPanelBytes : Columns * kDepth * 2;
  static constexpr int Bytes = LeftBytes + RightBytes;
  uint32_t base;
  Ring<kStages> ring;
  __device__ explicit Stages(uint32_t at) : base(at), ring{at + kStages * Bytes} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * Bytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
};

// Copies a box to the same place of some blocks of the cluster, at whose barriers the bytes arrive.
__device__ inline void copyTo(uint16_t blocks, uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], "
      "[%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

// What lies outside the matrices becomes zero. Blocks that have rows or columns in common share these or, of tall matrices, the depth.
template <bool Tall, int Columns, int Blocks>
__device__ inline void copyStages(const Params &p, const TensorMap &left, const TensorMap &right, const Stages<Tall, Columns> &m,
                                  const Place<Blocks> &at) {
  constexpr int across = Place<Blocks>::Across;
  const int r = at.rank % 2, c = at.rank / 2;
  for (int k = 0, i = 0; k < p.depth; k += kDepth, i++) {
    const uint32_t barrier = m.ring.fill(i, m.Bytes);
    if constexpr (Tall) {
      constexpr int part = kDepth / across, half = kDepth / 2;
#pragma unroll
      for (int panel = 0; panel < kRows / 64; panel++)
        copyTo(at.sameRows(), m.left(i) + panel * kPanelBytes + c * part * 128, left, barrier, at.row + panel * 64, k + c * part, at.matrix);
#pragma unroll
      for (int panel = 0; panel < (Columns + 63) / 64; panel++)
        copyTo(at.sameColumns(), m.right(i) + panel * kPanelBytes + r * half * 128, right, barrier, at.column + panel * 64, k + r * half,
               at.matrix);
    } else {
      constexpr int part = kRows / across, half = Columns / 2;
      copyTo(at.sameRows(), m.left(i) + c * part * 128, left, barrier, k, at.row + c * part, at.matrix);
      copyTo(at.sameColumns(), m.right(i) + r * half * 128, right, barrier, k, at.column + r * half, at.matrix);
    }
  }
}

// Tells the blocks whose copies write there that this warp is done with the slot of fill i.
template <int Blocks> __device__ inline void release(const Ring<kStages> &ring, const Place<Blocks> &at, int i) {
  const int lane = threadIdx.x % 32;
  if (lane < Blocks && (at.sameRows() | at.sameColumns()) >> lane & 1)
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(ring.freed(i)),
        "r"(lane)
        : "memory");
}

template <bool Tall, int Columns, int Blocks>
__device__ inline void multiply(Accumulator<1, Columns> &sums, const Params &p, const Stages<Tall, Columns> &m, const Place<Blocks> &at,
                                int worker) {
  constexpr uint32_t offset = 0x3ffff;  // of an address in the block: in front of it is the block's rank
  constexpr int next = Tall ? 16 * 128 : 32;
  const int steps = (p.depth + kDepth - 1) / kDepth;
  hold(sums);
  for (int i = 0; i < steps; i++) {
    m.ring.wait(i);
    const Descriptor a((m.left(i) & offset) + worker * kPanelBytes, 16), b(m.right(i) & offset, Tall ? kPanelBytes : 16);
    productsBegin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) productOf<Tall>(sums.c[0], a.plus(k * next), b.plus(k * next), k > 0 || i > 0);
    productsCommit();
    if (i > 0) {
      productsWait<1>();
      release(m.ring, at, i - 1);
    }
  }
  productsWait<0>();
  hold(sums);
}

// ---- From the sums to memory ----

// A lane's elements of c: pairs of columns in rows lane / 4 and 8 more of the warp's 16.
template <int Columns> struct Addend {
  uint32_t v[Columns / 8][2];
  __device__ void load(const Params &p, const f16 *c, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Columns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half + lane / 4, at = column + 8 * n + lane % 4 * 2;
        v[n][half] = r < p.n && at < p.n ? *(const uint32_t *)(c + (int64_t)r * p.n + at) : 0;
      }
  }
};

// The tile in shared memory, as it is and transposed; strides that no two of eight rows begin on the same banks.
template <int Columns> struct Images {
  static constexpr int Stride = 2 * Columns + 16, TurnedStride = 2 * kRows + 16;
  uint32_t tile;
  __device__ uint32_t turned() const { return tile + kRows * Stride; }
};

template <int Columns>
__device__ inline void finish(Accumulator<1, Columns> &sums, const Params &p, const Addend<Columns> &addend, int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Columns / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 c = __half22float2(*(const __half2 *)&addend.v[n][half]);
      const int r = row + 8 * half + lane / 4, at = column + 8 * n + lane % 4 * 2;
      float *s = sums.c[0][n] + 2 * half;
      s[0] = p.alpha * s[0] + p.beta * c.x + (r == at ? p.delta : 0);
      s[1] = p.alpha * s[1] + p.beta * c.y + (r == at + 1 ? p.delta : 0);
    }
}

// Rounds a warp's 16 rows, from `row` of the tile on, into both images.
template <int Columns> __device__ inline void leaveBoth(const Accumulator<1, Columns> &sums, const Images<Columns> &m, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Columns / 8; n += 2) {
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

// Writes the elements of an image of Rows by Columns that are below the diagonal or, of the transposed one, above it; its first
// one is d[row, column]. The diagonal goes with those below.
template <int Rows, int Columns, bool Above>
__device__ inline void storeImage(const Params &p, f16 *d, uint32_t image, int stride, int row, int column) {
  constexpr int chunks = Columns / 8, threads = 128 * kWorkers;
  for (int i = threadIdx.x % threads; i < Rows * chunks; i += threads) {
    const int r = row + i / chunks, c = column + i % chunks * 8;
    // Of eight elements, those from `first` to before `last` are on the side wanted.
    const int first = Above ? max(0, r + 1 - c) : 0, last = Above ? 8 : min(8, r + 1 - c);
    if (r >= p.n || c >= p.n || first >= last) continue;
    union {
      uint32_t words[4];
      f16 each[8];
    } v;
    loadWords(v.words, image + i / chunks * stride + i % chunks * 16);
    f16 *to = d + (int64_t)r * p.n + c;
    if (last - first == 8) {
      *(uint4 *)to = {v.words[0], v.words[1], v.words[2], v.words[3]};
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (e >= first && e < last) to[e] = v.each[e];
    }
  }
}

__device__ inline void meetWorkers() { asm volatile("bar.sync 1, %0;" ::"n"(128 * kWorkers) : "memory"); }

template <bool Tall, int Columns, int Blocks>
__device__ inline void work(const Params &p, const Stages<Tall, Columns> &m, const Place<Blocks> &at) {
  const int worker = uniform(threadIdx.x / 128) - 1, row = 64 * worker + threadIdx.x / 32 % 4 * 16;
  const int64_t before = (int64_t)at.matrix * p.n * p.n;
  Addend<Columns> addend = {};
  if (p.c) addend.load(p, p.c + before, at.row + row, at.column);
  Accumulator<1, Columns> sums;
  sums.clear();
  multiply(sums, p, m, at, worker);
  finish(sums, p, addend, at.row + row, at.column);
  meetWorkers();  // both are done with the stages
  const Images<Columns> images{m.base};
  leaveBoth(sums, images, row);
  meetWorkers();
  storeImage<kRows, Columns, false>(p, p.d + before, images.tile, images.Stride, at.row, at.column);
  storeImage<Columns, kRows, true>(p, p.d + before, images.turned(), images.TurnedStride, at.column, at.row);
}

template <bool Tall, int Blocks> __device__ inline void run(const Params &p, const TensorMap &left, const TensorMap &right) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Place<Blocks> at(p);
  const Stages<Tall, at.Columns> m(sharedAddress(shared));
  if (threadIdx.x == 0) {
    m.ring.init(4 * kWorkers * (1 + Blocks / 2));  // one of every warp
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
  meetCluster();  // the other blocks may still tell this one's barriers
}

#endif  // HOPPER
}  // namespace gemm

// Launch: for every matrix the clusters of Place, of 384 threads a block. Dynamic shared memory: see Stages.
#define DEFINE(name, tall, blocks)                                                                                              \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                          \
      gemm_symmetric_##name##blocks(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap left,             \
                                    const __grid_constant__ TensorMap right) {                                                  \
    BODY(run<tall, blocks>(p, left, right));                                                                                    \
  }
DEFINE(, false, 2)
DEFINE(, false, 4)
DEFINE(tall_, true, 2)
DEFINE(tall_, true, 4)
