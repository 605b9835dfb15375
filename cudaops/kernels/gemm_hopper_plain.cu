// Matrix products on Hopper (sm_90a) for depths so short that bringing results to memory would show, for bf16 and f16:
//
//   nt:  y = x·wᵀ + c with w [columns, depth]
//   nn:  y = x·w + c with w [depth, columns]
//
// with x [rows, depth], y and c [rows, columns]; c may be left out. Sums, c among them, are rounded once.
//
// gemm_hopper.cuh says how a block copies and multiplies. A finished tile, rounded, is 64 registers of the multipliers themselves,
// which bring an eighth of it to memory in each of the first kParts steps of the next tile, while its products run. So the tensor
// cores wait for nothing but rounding, and shared memory has room for a fourth stage. Registers that an eighth has left take c's
// part of the tile in work, which is needed only when that is rounded.
//
// Needs: columns and depth multiples of 8, depth above 64·(kParts − 1), matrices at multiples of 16 bytes.
#include "gemm_hopper.cuh"
#include "overlap.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  const void *c;  // or null
  int rows, columns, depth;
  int section;    // of Schedule
};

#if defined(HOPPER)

#ifndef LAG
#define LAG 0
#endif
constexpr int kColumns = 256, kStages = 4, kParts = 8, kPartColumns = kColumns / kParts;
constexpr int kWarpPanelBytes = 16 * 128;  // of a warp's rows: two parts

// Shared memory: the stages, a panel of each multiplying warp, then the barriers.
struct Shared {
  static constexpr int LeftBytes = kRows * kDepth * 2, RightBytes = kColumns * kDepth * 2, StageBytes = LeftBytes + RightBytes;
  static constexpr int Panels = kStages * StageBytes, Barriers = Panels + 4 * kWorkers * kWarpPanelBytes;
  uint32_t base;
  Ring<kStages> ring;
  __device__ explicit Shared(uint32_t at) : base(at), ring{at + Barriers} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * StageBytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
  __device__ uint32_t panel(int warp) const { return base + Panels + warp * kWarpPanelBytes; }
};

__device__ inline Schedule<kColumns> scheduleOf(const Params &p) { return {p.rows, p.columns, p.section}; }

// What lies outside the matrices becomes zero.
template <bool TransposeB>
__device__ inline void copyTiles(const Params &p, const TensorMap &x, const TensorMap &w, const Shared &m) {
  auto schedule = scheduleOf(p);
  const int share = schedule.rank * (kColumns / kCluster);
  Tile t;
  for (int i = 0; schedule.take(t);) {
    if (schedule.next >= schedule.rows * schedule.columns) releaseNext();
#pragma unroll 1
    for (int k = 0; k < p.depth; k += kDepth, i++) {
      const uint32_t barrier = m.ring.fill(i, Shared::StageBytes), right = m.right(i) + share * kDepth * 2;
      copyBox<false>(m.left(i), x, barrier, k, t.row, 0);
      if (TransposeB) {
        copyBox<true>(right, w, barrier, t.column + share, k, 0);
        copyBox<true>(right + kPanelBytes, w, barrier, t.column + share + 64, k, 0);
      } else {
        copyBox<true>(right, w, barrier, k, t.column + share, 0);
      }
    }
  }
}

__device__ inline float2 unpack(uint32_t v, bf16) { return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)}; }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

// A warp's 16 rows of a tile, rounded: a lane has columns 8n + lane % 4 · 2 and the next one of rows lane / 4 and 8 more. Before it
// is taken, c.
template <typename T, bool Add> struct Finished {
  uint32_t v[kColumns / 8][2];
  int row, column;

  __device__ explicit Finished(int rows) : row(rows), column(0) {  // of no tile
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++) v[n][0] = v[n][1] = 0;
  }

  __device__ void take(const Accumulator<1, kColumns> &sums, int row, int column) {
    this->row = row;
    this->column = column;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float a = sums.c[0][n][2 * i], b = sums.c[0][n][2 * i + 1];
        const float2 c = Add ? unpack(v[n][i], T()) : float2{0, 0};
        v[n][i] = Add ? pack(a + c.x, b + c.y, T()) : pack(a, b, T());
      }
  }

  // Brings a part to the warp's panel, and has the copy engine store what two parts have left there: 64 columns.
  __device__ void finish(const TensorMap &y, uint32_t panel, int part) {
    const int lane = threadIdx.x % 32, r = lane % 16;
    if (part % 2 == 0) {
      if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
    }
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      const uint32_t at = panel + r * 128 + ((part % 2 * 4 + n + lane / 16) ^ r % 8) * 16;
      const uint32_t(&a)[2] = v[4 * part + n], (&b)[2] = v[4 * part + n + 1];
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a[0]), "r"(a[1]), "r"(b[0]),
                   "r"(b[1])
                   : "memory");
    }
    if (part % 2) {
      fenceAsync();
      __syncwarp();
      if (lane == 0) {
        storeBox(y, panel, column + kPartColumns * (part - 1), row, 0);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
  }

  // Asks for c's part of the tile that begins at this row and column, where the finished one's has left.
  __device__ void expect(const Params &p, int row, int column, int part) {
    const int lane = threadIdx.x % 32;
    const T *c = (const T *)p.c + (int64_t)(row + lane / 4) * p.columns + column + lane % 4 * 2;
#pragma unroll
    for (int n = 4 * part; n < 4 * part + 4; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        v[n][i] = 0;
        if (row + lane / 4 + 8 * i < p.rows && column + 8 * n < p.columns)
          asm volatile("ld.global.b32 %0, [%1];" : "=r"(v[n][i]) : "l"(c + (int64_t)8 * i * p.columns + 8 * n) : "memory");
      }
  }
};

template <typename T, bool TransposeB, bool Add>
__device__ inline void multiplyTiles(const Params &p, const TensorMap &y, const Shared &m, int worker) {
  constexpr uint32_t kOffset = 0x3ffff;  // of an address in the block: in front of it is the block's rank
  constexpr int across = TransposeB ? kPanelBytes : 16, next = TransposeB ? 16 * 128 : 32;  // of the right operand, for 16 of the depth
  auto schedule = scheduleOf(p);
  const int steps = (p.depth + kDepth - 1) / kDepth, warp = uniform(threadIdx.x / 32 % 4);
  const uint32_t panel = m.panel(4 * worker + warp);
  Accumulator<1, kColumns> sums;
  sums.clear();
  Finished<T, Add> before(p.rows);
  auto start = [&](int i, bool first) {
    m.ring.wait(i);
    const Descriptor a((m.left(i) & kOffset) + worker * kPanelBytes, 16), b(m.right(i) & kOffset, across);
    productsBegin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) product<TransposeB>(sums.c[0], a.plus(k * 32), b.plus(k * next), k > 0 || !first, T());
    productsCommit();
  };
  Tile t;
  for (int i = 0; schedule.take(t);) {
    const int end = i + steps, row = t.row + 64 * worker + 16 * warp;
    hold(sums);
    if (LAG && worker == 1) asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
    for (int part = 0; part < kParts; part++, i++) {
      start(i, part == 0);
      before.finish(y, panel, part);
      if (Add) before.expect(p, row, t.column, part);
      if (part > 0) {
        productsWait<1>();
        releaseAll(m.ring, i - 1);
        if (LAG && part == LAG && worker == 0) asm volatile("bar.arrive 1, 256;" ::: "memory");
      }
    }
    for (; i < end; i++) {
      start(i, false);
      productsWait<1>();
      releaseAll(m.ring, i - 1);
    }
    productsWait<0>();
    hold(sums);
    releaseAll(m.ring, i - 1);
    before.take(sums, row, t.column);
  }
#pragma unroll
  for (int part = 0; part < kParts; part++) before.finish(y, panel, part);
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

template <typename T, bool TransposeB, bool Add>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &y) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  if (threadIdx.x == 0) {
    m.ring.init(4 * kCluster * kWorkers);  // one of every warp
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  meetCluster();
  awaitPrevious();
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x == 0) copyTiles<TransposeB>(p, x, w, m);
    __syncwarp();
  } else {
    takeRegisters<240>();
    multiplyTiles<T, TransposeB, Add>(p, y, m, uniform(threadIdx.x / 128) - 1);
  }
  meetCluster();  // the other block may still write here
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Shared.
#define KERNEL(name, T, transpose, add)                                                                                       \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                        \
      name(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, \
           const __grid_constant__ TensorMap y) {                                                                             \
    BODY(run<T, transpose, add>(p, x, w, y));                                                                                 \
  }
#define DEFINE(T)                                        \
  KERNEL(gemm_hopper_plain_nt_##T, T, false, false)      \
  KERNEL(gemm_hopper_plain_nt_add_##T, T, false, true)   \
  KERNEL(gemm_hopper_plain_nn_##T, T, true, false)       \
  KERNEL(gemm_hopper_plain_nn_add_##T, T, true, true)
DEFINE(bf16)
DEFINE(f16)
