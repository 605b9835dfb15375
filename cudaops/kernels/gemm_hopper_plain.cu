// Matrix products on Hopper (sm_90a) for depths so short that bringing results to memory would show, for bf16 and f16:
//
//   nt:  y = x·wᵀ + c with w [columns, depth]
//   nn:  y = x·w + c with w [depth, columns]
//
// with x [rows, depth], y and c [rows, columns]; c may be left out. Sums, c among them, are rounded once.
//
// gemm_hopper.cuh says how a block copies and multiplies. A finished tile, rounded, is 64 registers of the multipliers themselves,
// which bring it to memory in kParts parts while the next tile's products run. So the tensor cores wait for nothing but rounding, and
// shared memory has room for a fourth stage. The registers that a part has left take c's part of the tile in work, which is needed
// only when that is rounded.
//
// Needs: columns and depth multiples of 8, matrices at multiples of 16 bytes.
#include "gemm_hopper.cuh"
#include "overlap.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  int rows, columns, depth;
  int section;  // of Schedule
};

#if defined(HOPPER)

constexpr int kColumns = 256, kStages = 4, kParts = kColumns / 64;
constexpr int kWarpPanelBytes = 16 * 128;  // of a warp's rows: a part

// Shared memory: the stages, two panels of each multiplying warp, then the barriers.
struct Shared {
  static constexpr int LeftBytes = kRows * kDepth * 2, RightBytes = kColumns * kDepth * 2, StageBytes = LeftBytes + RightBytes;
  static constexpr int Panels = kStages * StageBytes, Barriers = Panels + 4 * kWorkers * 2 * kWarpPanelBytes;
  uint32_t base;
  Ring<kStages> ring;
  __device__ explicit Shared(uint32_t at) : base(at), ring{at + Barriers} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * StageBytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
  __device__ uint32_t panels(int warp) const { return base + Panels + warp * 2 * kWarpPanelBytes; }
  __device__ Ring<1> added(int warp) const { return {ring.barriers + ring.bytes + warp * Ring<1>::bytes}; }  // of its second panel
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

  // What a lane does in a slot, of which there are one more with c, as a part of that comes while another one is taken.
  static constexpr int kSlots = Add ? kParts + 1 : kParts;

  // Brings a part, 64 columns, to a panel of the warp, from which the copy engine stores it. c takes the other panel.
  __device__ void finish(const TensorMap &y, uint32_t panels, int part) {
    const int lane = threadIdx.x % 32;
    const uint32_t panel = panels + (Add ? 0 : part % 2 * kWarpPanelBytes);
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Add ? 0 : 1) : "memory");
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const uint32_t(&a)[2] = v[8 * part + n], (&b)[2] = v[8 * part + n + 1];
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(chunkOf(panel, n)), "r"(a[0]), "r"(a[1]),
                   "r"(b[0]), "r"(b[1])
                   : "memory");
    }
    fenceAsync();
    __syncwarp();
    if (lane == 0) {
      storeBox(y, panel, column + 64 * part, row, 0);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }

  // Where a lane's chunk of column 8n of a part and of the next one lies.
  static __device__ uint32_t chunkOf(uint32_t panel, int n) {
    const int lane = threadIdx.x % 32, r = lane % 16;
    return panel + r * 128 + ((n + lane / 16) ^ r % 8) * 16;
  }

  // Takes a part of c, the i-th in all that comes to the warp's panel, into the registers that a part of the tile has left.
  __device__ void takeAdded(uint32_t panel, const Ring<1> &ring, int i, int part) {
    ring.wait(i);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t(&a)[2] = v[8 * part + n], (&b)[2] = v[8 * part + n + 1];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a[0]), "=r"(a[1]), "=r"(b[0]), "=r"(b[1])
                   : "r"(chunkOf(panel, n))
                   : "memory");
    }
    fenceAsync();
    ring.release(i);
  }
};

template <typename T, bool TransposeB, bool Add>
__device__ inline void multiplyTiles(const Params &p, const TensorMap &y, const TensorMap &c, const Shared &m, int worker) {
  constexpr uint32_t kOffset = 0x3ffff;  // of an address in the block: in front of it is the block's rank
  constexpr int across = TransposeB ? kPanelBytes : 16, next = TransposeB ? 16 * 128 : 32;  // of the right operand, for 16 of the depth
  auto schedule = scheduleOf(p);
  const int steps = (p.depth + kDepth - 1) / kDepth, warp = uniform(threadIdx.x / 32 % 4);
  const uint32_t panels = m.panels(4 * worker + warp), panel = panels + kWarpPanelBytes;
  const Ring<1> added = m.added(4 * worker + warp);
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
  for (int i = 0, turn = 0; schedule.take(t); turn++) {
    const int row = t.row + 64 * worker + 16 * warp;
    int due = 0;  // steps, times kSlots
    hold(sums);
#pragma unroll
    for (int slot = 0; slot < before.kSlots; slot++) {
      due += steps;
      const bool starts = slot == 0 || due > 0;
      if (starts) {
        start(i++, slot == 0);
        due -= before.kSlots;
      }
      if (slot < kParts) before.finish(y, panels, slot);
      if (Add) {
        const int fill = turn * kParts + slot;
        if (slot > 0) before.takeAdded(panel, added, fill - 1, slot - 1);
        if (slot < kParts && threadIdx.x % 32 == 0)
          copyBox<false>(panel, c, added.fill(fill, kWarpPanelBytes), t.column + 64 * slot, row, 0);
        __syncwarp();
      }
      if (slot > 0 && starts) {
        productsWait<1>();
        releaseAll(m.ring, i - 2);
      }
#pragma unroll 1
      for (; due > 0; due -= before.kSlots) {
        start(i++, false);
        productsWait<1>();
        releaseAll(m.ring, i - 2);
      }
    }
    productsWait<0>();
    hold(sums);
    releaseAll(m.ring, i - 1);
    before.take(sums, row, t.column);
  }
#pragma unroll
  for (int part = 0; part < kParts; part++) before.finish(y, panels, part);
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

template <typename T, bool TransposeB, bool Add>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &y,
                           const TensorMap &c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  if (threadIdx.x == 0) {
    m.ring.init(4 * kCluster * kWorkers);  // one of every warp
    for (int warp = 0; warp < 4 * kWorkers; warp++) m.added(warp).init(32);
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
    multiplyTiles<T, TransposeB, Add>(p, y, c, m, uniform(threadIdx.x / 128) - 1);
  }
  meetCluster();  // the other block may still write here
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Shared.
#define KERNEL(name, T, transpose, add)                                                                                       \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                        \
      name(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, \
           const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap c) {                                       \
    BODY(run<T, transpose, add>(p, x, w, y, c));                                                                              \
  }
#define DEFINE(T)                                        \
  KERNEL(gemm_hopper_plain_nt_##T, T, false, false)      \
  KERNEL(gemm_hopper_plain_nt_add_##T, T, false, true)   \
  KERNEL(gemm_hopper_plain_nn_##T, T, true, false)       \
  KERNEL(gemm_hopper_plain_nn_add_##T, T, true, true)
DEFINE(bf16)
DEFINE(f16)
