// Matrix products for bf16 and f16 on Hopper (sm_90a) that store one tile while multiplying the
// next. Several kernels share this code. Since each block of gemm_symmetric.cu computes only one
// tile, it uses just the copies and barriers.
//
// Both operands of float8 products are contiguous along the depth. Everything but the tensor cores
// treats them as 16-bit matrices with half as many elements, each a pair of float8 numbers. Their
// sums must be multiplied by a factor per row and a factor per column (see Factors).
//
// A block owns 128 rows by Columns columns at a time, and a cluster of two blocks owns 256 rows.
// Each block copies its own rows of the left operand and half of the right operand, which both
// blocks receive. Blocks are persistent and take tiles until none are left. In a block,
//
//   one thread       copies the operands, 64 elements of the depth at a time, Stages ahead;
//   two warpgroups   multiply 64 rows each.
//
// The depth is so small in these models that the tensor cores can't afford to wait while a tile is
// stored. The sums are therefore rounded to 16 bits, which takes half as many registers, and are
// stored from there while the products of the next tile run.
#pragma once
#include <type_traits>

#include "barrier.cuh"
#include "registers.cuh"
#include "wgmma.cuh"

// Compiles a kernel's body only for Hopper. Other GPUs never launch these kernels.
#if defined(HOPPER)
#define BODY(...) gemm::__VA_ARGS__
#else
#define BODY(...)
#endif

namespace gemm {

#if defined(HOPPER)
using namespace tile;

constexpr int kRows = 128, kDepth = 64, kWorkers = 2, kCluster = 2;
constexpr int kPanelBytes = 64 * 128;  // 64 rows of 64 columns

constexpr int kPanel = 16 * 128;  // the bytes of a warp's rows of 64 columns

// E4M3; one element is a pair of numbers
struct f8x2 {};

// Memory is the layout of shared memory: the stages, WarpBytes for each multiplying warp, the
// barriers, including two for each of these warps, and the column factors of two tiles.
template <int Columns_, int Stages_, int WarpBytes> struct Memory {
  static constexpr int Columns = Columns_, Stages = Stages_;
  static constexpr int LeftBytes = kRows * kDepth * 2, RightBytes = Columns * kDepth * 2, StageBytes = LeftBytes + RightBytes;
  uint32_t base;
  Ring<Stages> ring;
  __device__ explicit Memory(uint32_t at) : base(at), ring{at + Stages * StageBytes + 4 * kWorkers * WarpBytes} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * StageBytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
  __device__ uint32_t panels(int warp) const { return base + Stages * StageBytes + warp * WarpBytes; }
  __device__ uint32_t barriers(int warp) const { return ring.barriers + ring.bytes + warp * 16; }
  __device__ uint32_t factors(int tile) const { return barriers(4 * kWorkers) + (tile & 1) * 4 * Columns; }
};

__device__ inline void meetCluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Tile is the position of a block's tile. The tiles of a cluster are stacked vertically, in the
// order of the blocks' ranks.
struct Tile {
  int row, column;
};

// Schedule yields the tiles of a cluster, one per turn, each Step columns wide. They run down the
// rows of a section and then move on to the next columns. A section is a number of rows of clusters
// that are processed together so that both operands stay in L2.
template <int Step> struct Schedule {
  int rows, columns, section, rank, next, stride;
  __device__ Schedule(int rows, int columns, int section)
      : rows((rows + kCluster * kRows - 1) / (kCluster * kRows)), columns((columns + Step - 1) / Step), section(section),
        rank(blockIdx.x % kCluster), next(blockIdx.x / kCluster), stride(gridDim.x / kCluster) {}
  __device__ bool take(Tile &t) {
    if (next >= rows * columns) return false;
    const int first = next / (section * columns) * section, r = next % (section * columns), n = min(section, rows - first);
    t = {(kCluster * (first + r % n) + rank) * kRows, r / n * Step};
    next += stride;
    return true;
  }
};

// ---- Copies ----

// copyBox copies a box to this block or, with All, to the same address in every block of the
// cluster. The bytes arrive at the barrier of each receiving block.
template <bool All> __device__ inline void copyBox(uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y, int z) {
  if (All)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((uint16_t)((1 << kCluster) - 1))
        : "memory");
  else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                     to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// storeBox stores a box of the map's size, clipped to the matrix.
__device__ inline void storeBox(const TensorMap &map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(from), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

// ---- Products ----

#define REGISTERS_96                                                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "        \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "         \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "         \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "         \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define REGISTERS_128                                                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "        \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "         \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "         \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "         \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "       \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "       \
  "%119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define OUTPUTS_96(m) OUTPUTS_64(m), SIXTEEN(m, 16), SIXTEEN(m, 20)
#define OUTPUTS_128(m) OUTPUTS_96(m), SIXTEEN(m, 24), SIXTEEN(m, 28)

// product starts c (64×N) = A·B or, with add, c += A·B. With TransposeB, the product runs over rows
// of B's tile.
#define DEFINE_PRODUCT(N, R, a, b, flag, transpose, T, name)                                                             \
  template <int TransposeB>                                                                                              \
  __device__ inline void product(float (&c)[N / 8][4], uint64_t x, uint64_t y, bool add, T) {                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " " REGISTERS_##R                       \
                 ", " a ", " b ", p, 1, 1, 0, " transpose ";\n}\n"                                                       \
                 : OUTPUTS_##R("+f")                                                                                     \
                 : "l"(x), "l"(y), "r"((int)add), "n"(TransposeB));                                                      \
  }
#define DEFINE_ALL(T, name)                                               \
  DEFINE_PRODUCT(192, 96, "%96", "%97", "%98", "%99", T, name)            \
  DEFINE_PRODUCT(256, 128, "%128", "%129", "%130", "%131", T, name)
DEFINE_ALL(bf16, "bf16")
DEFINE_ALL(f16, "f16")

template <int TransposeB> __device__ inline void product(float (&c)[32][4], uint64_t x, uint64_t y, bool add, f8x2) {
  static_assert(!TransposeB, "float8 lies along the depth");
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 " REGISTERS_128 ", %128, %129, p, 1, 1;\n}\n"
      : OUTPUTS_128("+f")
      : "l"(x), "l"(y), "r"((int)add));
}

// releaseAll signals that this warp is done with the slot of fill i. It signals to all blocks of
// the cluster, because they all copy to this block.
template <class R> __device__ inline void releaseAll(const R &ring, int i) {
  const int lane = threadIdx.x % 32;
  if (lane < kCluster)
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(ring.freed(i)),
        "r"(lane)
        : "memory");
}

// ---- From the sums to memory ----

__device__ inline float2 unpack(uint32_t v, bf16) { return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)}; }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

// RoundedSums holds the rounded sums of a warp's 16 rows of a tile. A lane has columns 8n + lane %
// 4 · 2 and 8n + lane % 4 · 2 + 1 of rows lane / 4 and lane / 4 + 8.
template <typename T, int Columns> struct RoundedSums {
  uint32_t v[Columns / 8][2];
  int row, column;

  __device__ explicit RoundedSums(int rows) : row(rows), column(0) {  // no tile yet: row lies outside the matrix
#pragma unroll
    for (int n = 0; n < Columns / 8; n++) v[n][0] = v[n][1] = 0;
  }

  // Initializes the warp's own barriers.
  static __device__ void init(uint32_t barriers) {
    barrierInit(barriers, 1);
    barrierInit(barriers + 8, 1);
  }

  __device__ void take(const Accumulator<1, Columns> &sums, int row, int column) {
    this->row = row;
    this->column = column;
#pragma unroll
    for (int n = 0; n < Columns / 8; n++) {
      const float(&c)[4] = sums.c[0][n];
      v[n][0] = pack(c[0], c[1], T());
      v[n][1] = pack(c[2], c[3], T());
    }
  }
};

// loadMatrices and storeMatrices move 16 rows of 16 columns between a warp's registers and a panel;
// see chunkOf for the address.
__device__ inline void loadMatrices(uint32_t (&v)[2][2], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0][0]), "=r"(v[0][1]), "=r"(v[1][0]), "=r"(v[1][1])
               : "r"(at)
               : "memory");
}

__device__ inline void storeMatrices(uint32_t at, const uint32_t (&a)[2], const uint32_t (&b)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1])
               : "memory");
}

// chunkOf returns the address of a lane's chunk of the first 16 columns, in a panel of 16 rows and
// 64 or 32 columns. For the 16 columns from column c on, XOR it with 2c.
template <int Columns> __device__ inline uint32_t chunkOf(uint32_t panel) {
  const int lane = threadIdx.x % 32, r = lane % 16;
  return panel + r * (2 * Columns) + (lane / 16 ^ (Columns == 64 ? r % 8 : r / 2 % 4)) * 16;
}

// leaveColumns writes the 64 columns from column 8·first on to a panel.
template <int Chunks> __device__ inline void leaveColumns(const uint32_t (&v)[Chunks][2], int first, uint32_t panel) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) storeMatrices(chunkOf<64>(panel) ^ n * 16, v[first + n], v[first + n + 1]);
}

// store makes the copy engine store a panel that the warp has written. With Halves, the second half
// of the panel goes to y = 1.
template <bool Halves = false> __device__ inline void store(const TensorMap &map, uint32_t panel, int x, int y, int z) {
  fenceAsync();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    storeBox(map, panel, x, y, z);
    if constexpr (Halves) storeBox(map, panel + kPanel / 2, x, 1, z);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

// storesRead waits until the copy engine has read all but the latest Pending of the panels that it
// was told to store.
template <int Pending> __device__ inline void storesRead() {
  if (threadIdx.x % 32 == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
  __syncwarp();
}

// bringPart makes the copy engine load 64 columns of a matrix, one part of a tile, into one of a
// warp's two panels, after it has finished reading earlier results from there.
__device__ inline void bringPart(const TensorMap &map, uint32_t panels, uint32_t arrived, int part, int row, int column) {
  if (threadIdx.x % 32) return;
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  const uint32_t barrier = arrived + part % 2 * 8;
  barrierExpect(barrier, kPanel);
  copyBox<false>(panels + part % 2 * kPanel, map, barrier, column + 64 * part, row, 0);
}

// ---- The threads of a block ----

// Right is the right operand; each block copies half of a tile's columns. The operand's rows are
// the product's columns or, with TransposeB, the depth.
template <int TransposeB> struct Right {
  const TensorMap &map;
  template <class M> __device__ void copy(const M &m, int i, uint32_t barrier, int k, const Tile &t, int rank) const {
    constexpr int half = M::Columns / kCluster;
    const uint32_t to = m.right(i) + rank * half * kDepth * 2;
    const int column = t.column + rank * half;
    if constexpr (TransposeB) {
      static_assert(half % 64 == 0, "whole panels");
#pragma unroll
      for (int panel = 0; panel < half / 64; panel++) copyBox<true>(to + panel * kPanelBytes, map, barrier, column + 64 * panel, k, 0);
    } else {
      copyBox<true>(to, map, barrier, k, column, 0);
    }
  }
};

// ScaledRight is a float8 right operand with the factors of its rows, the product's columns. The
// factors arrive with a tile's last operands rather than its first, because the factors of the
// second-to-last tile may still be read during the last steps of a tile.
struct ScaledRight {
  const TensorMap &map;
  const float *factors;
  int columns, depth, tile = 0;
  template <class M> __device__ void copy(const M &m, int i, uint32_t barrier, int k, const Tile &t, int rank) {
    if (k + kDepth >= depth) {
      const int bytes = 4 * min(M::Columns, columns - t.column);
      asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
      copyBytes(m.factors(tile++), factors + t.column, bytes, barrier);
    }
    Right<0>{map}.copy(m, i, barrier, k, t, rank);
  }
};

// Factors scales sums of float8 products by the factors of a lane's two rows, and by the factors of
// a tile's columns in shared memory.
template <class M> struct Factors {
  const M &m;
  const float *ofRows;
  int rows, tile = -1;
  float row[2] = {0, 0};

  // Moves on to the next tile, with the warp's rows from `first` on.
  __device__ void next(int first) {
    tile++;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = first + 8 * half + threadIdx.x % 32 / 4;
      row[half] = r < rows ? __ldg(ofRows + r) : 0;
    }
  }

  // Scales the two adjacent sums that a lane has, in one of its rows, of the eight columns from
  // column 8n on.
  __device__ float2 times(float2 sums, int half, int n) const {
    float2 f;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(f.x), "=f"(f.y)
                 : "r"(m.factors(tile) + n * 32 + threadIdx.x % 4 * 8)
                 : "memory");
    return {sums.x * (row[half] * f.x), sums.y * (row[half] * f.y)};
  }
};

// Term is a second product, of a depth of its own, that is added to the first one. Its steps follow
// those of the first product in every tile.
template <class Right> struct Term {
  const TensorMap &left;
  Right right;
  int depth;  // may be 0
};

// NoTerm takes the place of a term in kernels that add none.
struct NoTerm {
  static constexpr int depth = 0;
};

__device__ inline int stepsOf(int depth) { return (depth + kDepth - 1) / kDepth; }

// Copies the operands of one product for a tile, from fill i on.
template <class M, class Right>
__device__ inline void copyProduct(const M &m, int &i, int depth, const TensorMap &left, Right &right, const Tile &t, int rank) {
#pragma unroll 1  // saves registers
  for (int k = 0; k < depth; k += kDepth, i++) {
    const uint32_t barrier = m.ring.fill(i, M::StageBytes);
    copyBox<false>(m.left(i), left, barrier, k, t.row, 0);
    right.copy(m, i, barrier, k, t, rank);
  }
}

// Copies the operands of all tiles. Elements outside the matrices become zero.
template <class M, class Schedule, class Right, class Term>
__device__ inline void copyTiles(const M &m, Schedule schedule, int depth, const TensorMap &left, Right right, Term term) {
  Tile t;
  for (int i = 0; schedule.take(t);) {
    copyProduct(m, i, depth, left, right, t, schedule.rank);
    if constexpr (!std::is_same_v<Term, NoTerm>) copyProduct(m, i, term.depth, term.left, term.right, t, schedule.rank);
  }
}

// multiplyHeld multiplies a worker's tiles. Held stores the sums of a warp's 16 rows of a tile in
// kSlots slots, while the next tile is multiplied:
//
//   take(sums, row, column)           takes new sums, of 16 rows from `row` and `column` on, after all slots are done
//   finish(slot, row, column, more)   does a slot; if `more`, the next sums to take start at row and column
//
// The slots are spread evenly over the steps of a tile. If a whole tile were stored in the first
// steps, the operands of all blocks would be delayed. A slot's work follows the start of a step's
// products.
template <typename T, int TransposeB, class M, class Schedule, class Held>
__device__ inline void multiplyHeld(const M &m, Schedule schedule, int steps, int worker, Held &held) {
  constexpr uint32_t kOffset = 0x3ffff;  // an address within the block; the bits above are the block's rank
  constexpr int across = TransposeB ? kPanelBytes : 16, next = TransposeB ? 16 * 128 : 32;  // step of the right operand for 16 elements of the depth
  const int first = 64 * worker + uniform(threadIdx.x / 32 % 4) * 16;
  Accumulator<1, M::Columns> sums;
  sums.clear();
  auto start = [&](int i, bool clear) {
    m.ring.wait(i);
    const Descriptor a((m.left(i) & kOffset) + worker * kPanelBytes, 16), b(m.right(i) & kOffset, across);
    productsBegin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) product<TransposeB>(sums.c[0], a.plus(k * 32), b.plus(k * next), k > 0 || !clear, T());
    productsCommit();
  };
  Tile t;
  for (int i = 0; schedule.take(t);) {
    int due = 0;  // steps, times kSlots
    hold(sums);
#pragma unroll
    for (int slot = 0; slot < Held::kSlots; slot++) {
      due += steps;
      const bool starts = slot == 0 || due > 0;
      if (starts) {
        start(i++, slot == 0);
        due -= Held::kSlots;
      }
      held.finish(slot, t.row + first, t.column, true);
      if (slot > 0 && starts) {
        productsWait<1>();
        releaseAll(m.ring, i - 2);
      }
#pragma unroll 1
      for (; due > 0; due -= Held::kSlots) {
        start(i++, false);
        productsWait<1>();
        releaseAll(m.ring, i - 2);
      }
    }
    productsWait<0>();
    hold(sums);
    releaseAll(m.ring, i - 1);
    held.take(sums, t.row + first, t.column);
  }
#pragma unroll
  for (int slot = 0; slot < Held::kSlots; slot++) held.finish(slot, 0, 0, false);
  storesRead<0>();
}

// multiply is the work of all threads of a block. hold(warp) returns the Held of a multiplying
// warp.
template <typename T, int TransposeB, class M, class Schedule, class Right, class Term, class Hold>
__device__ inline void multiply(const M &m, const Schedule &schedule, int depth, const TensorMap &left, const Right &right, const Term &term,
                                Hold hold) {
  if (threadIdx.x == 0) {
    m.ring.init(4 * kCluster * kWorkers);  // one arrival per warp
    for (int warp = 0; warp < 4 * kWorkers; warp++) decltype(hold(warp))::init(m.barriers(warp));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  meetCluster();
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x == 0) copyTiles(m, schedule, depth, left, right, term);
    __syncwarp();
  } else {
    takeRegisters<240>();
    const int warp = uniform(threadIdx.x / 32 - 4);
    auto held = hold(warp);
    multiplyHeld<T, TransposeB>(m, schedule, stepsOf(depth) + stepsOf(term.depth), warp / 4, held);
  }
  meetCluster();  // the other block may still write to this block's memory
}

#endif  // HOPPER
}  // namespace gemm
