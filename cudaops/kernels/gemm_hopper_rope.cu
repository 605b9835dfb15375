// The product behind an attention's queries, keys and values on Hopper (sm_90a), for bf16 and f16, which turns the first two as
// rope.cu does:
//
//   s = x·weightsᵀ, rounded to T;  in the heads of the columns before `turned`, for the pairs (i, i + h), h = D/2, of head dimension D
//   y[i] = s[i]·cos − s[i+h]·sin,   y[i+h] = s[i+h]·cos + s[i]·sin;  elsewhere y = s
//
// with x [rows, depth], weights [columns, depth], y [rows, columns] and the angles of position row mod seq. The bits are those of a
// product whose sums are formed in the same order, and rope.cu behind it. The table holds the cosines of pairs i and i + 1 and their
// sines, i even, for the positions and pairs, eight of each, that a warp asks for at once: [⌈seq/8⌉, h/8, 8 positions, 4, 4].
//
// gemm_hopper.cuh says how a block copies and multiplies. The rounded sums of a tile wait in the multipliers' own registers while
// the products of the next tile run. In some of its steps, as far apart as they can be, a thread turns a part of them, in one of its
// two rows some pairs of a head, both elements of which are its own, and leaves it in a panel of its warp; the copy engine takes a
// row's parts to memory together. There are registers for the angles of one part. All heads of a tile need the same, so the parts
// that share them come one behind the other, and a thread asks for each angle once a tile, a part ahead.
//
// Needs: whole heads in a tile; turned a multiple of D, columns and depth of 8, depth above 64·(parts − 1), all arrays at multiples
// of 16 bytes, and seq·D at most 2³⁰.
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  const float4 *angles;
  int rows, columns, depth, turned, seq;
  int section;  // of Schedule
};

#if defined(HOPPER)

constexpr int kPanelRows = 8;

// Shared memory: the stages, the panels of each multiplying warp, kPanelRows rows of 64 columns each, then the barriers.
template <int Columns_> struct Shared {
  static constexpr int Columns = Columns_, Stages = Columns == 256 ? 4 : 5, Panels = Columns / 64;
  static constexpr int LeftBytes = kRows * kDepth * 2, RightBytes = Columns * kDepth * 2, StageBytes = LeftBytes + RightBytes;
  static constexpr int PanelBytes = kPanelRows * 128, Barriers = Stages * StageBytes + 4 * kWorkers * Panels * PanelBytes;
  uint32_t base;
  Ring<Stages> ring;
  __device__ explicit Shared(uint32_t at) : base(at), ring{at + Barriers} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * StageBytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
  __device__ uint32_t panels(int warp) const { return base + Stages * StageBytes + warp * Panels * PanelBytes; }
};

template <int Columns> __device__ inline Schedule<Columns> scheduleOf(const Params &p) { return {p.rows, p.columns, p.section}; }

// What lies outside the matrices becomes zero.
template <class M> __device__ inline void copyTiles(const Params &p, const TensorMap &x, const TensorMap &weights, const M &m) {
  constexpr int half = M::Columns / kCluster;
  auto schedule = scheduleOf<M::Columns>(p);
  Tile t;
  for (int i = 0; schedule.take(t);)
#pragma unroll 1  // for the lack of registers
    for (int k = 0; k < p.depth; k += kDepth, i++) {
      const uint32_t barrier = m.ring.fill(i, M::StageBytes);
      copyBox<false>(m.left(i), x, barrier, k, t.row, 0);
      copyBox<true>(m.right(i) + schedule.rank * half * kDepth * 2, weights, barrier, k, t.column + schedule.rank * half, 0);
    }
}

__device__ inline float2 unpack(uint32_t v, bf16) { return __bfloat1622float2(*(__nv_bfloat162 *)&v); }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

// The rounded sums of a warp's 16 rows of a tile, a lane's being those of columns 8n + lane % 4 · 2 and the next one of rows lane / 4
// and 8 more. A part is 8 rows of Pairs columns of a head's first half, and those that they are paired with.
template <typename T, int D, class M> struct Held {
  static constexpr int Columns = M::Columns, Pairs = D % 64 ? D / 2 : 32, Chunks = Pairs / 8;
  static constexpr int Heads = Columns / D, RowParts = Columns / Pairs / 2, Parts = 2 * RowParts;
  uint32_t v[Columns / 8][2];
  float4 angles[Chunks];
  int row, column, at[2];  // of the table, where the angles of the lane's rows begin

  __device__ explicit Held(const Params &p) : row(p.rows), column(p.turned), at{0, 0} {  // of no tile
#pragma unroll
    for (int n = 0; n < Columns / 8; n++) v[n][0] = v[n][1] = 0;
  }

  // Says which tile comes next, once the last one is finished, and asks for its first angles.
  __device__ void expect(const Params &p, int row, int column) {
    this->row = row;
    this->column = column;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int position = unsigned(row + 8 * half + threadIdx.x % 32 / 4) % unsigned(p.seq);
      at[half] = position / 8 * (D * 2) + position % 8 * 4 + threadIdx.x % 4;
    }
    ask(p, 0);
  }

  __device__ void take(const Accumulator<1, Columns> &sums) {
#pragma unroll
    for (int n = 0; n < Columns / 8; n++) {
      const float(&c)[4] = sums.c[0][n];
      v[n][0] = pack(c[0], c[1], T());
      v[n][1] = pack(c[2], c[3], T());
    }
  }

  static __device__ constexpr int halfOf(int part) { return part / RowParts; }
  static __device__ constexpr int pairsOf(int part) { return part % RowParts / Heads * Pairs; }
  static __device__ constexpr int headOf(int part) { return part % Heads; }

  // Asks for the angles of a part, unless the one before has the same.
  __device__ void ask(const Params &p, int part) {
    if (headOf(part) > 0 || column >= p.turned) return;
    const float4 *from = p.angles + at[halfOf(part)];
#pragma unroll
    for (int n = 0; n < Chunks; n++) angles[n] = from[pairsOf(part) * 4 + 32 * n];
  }

  __device__ void finish(const Params &p, const TensorMap &y, uint32_t panels, int part) {
    const int lane = threadIdx.x % 32, half = halfOf(part), head = headOf(part);
    const int first = (head * D + pairsOf(part)) / 8, second = first + D / 16;
    if (part % RowParts == 0) {
      if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
    }
    uint32_t e[2 * Chunks];
#pragma unroll
    for (int n = 0; n < Chunks; n++) {
      e[n] = v[first + n][half];
      e[Chunks + n] = v[second + n][half];
    }
    if (column + head * D < p.turned)
#pragma unroll
      for (int n = 0; n < Chunks; n++) {
        const float2 a = unpack(e[n], T()), b = unpack(e[Chunks + n], T());
        const auto [cos0, cos1, sin0, sin1] = angles[n];
        e[n] = pack(fmaf(a.x, cos0, -(b.x * sin0)), fmaf(a.y, cos1, -(b.y * sin1)), T());
        e[Chunks + n] = pack(fmaf(b.x, cos0, a.x * sin0), fmaf(b.y, cos1, a.y * sin1), T());
      }
#pragma unroll
    for (int n = 0; n < 2 * Chunks; n += 4) {
      const int mine = n + lane / 8, chunk = mine < Chunks ? first + mine : second + mine - Chunks, r = lane % 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       panels + chunk / 8 * M::PanelBytes + r * 128 + (chunk % 8 ^ r) * 16),
                   "r"(e[n]), "r"(e[n + 1]), "r"(e[n + 2]), "r"(e[n + 3])
                   : "memory");
    }
    if (part % RowParts == RowParts - 1) {
      fenceAsync();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < M::Panels; i++) storeBox(y, panels + i * M::PanelBytes, column + 64 * i, row + 8 * half, 0);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    if (part < Parts - 1) ask(p, part + 1);
  }
};

template <typename T, int D, class M> __device__ inline void multiplyTiles(const Params &p, const TensorMap &y, const M &m, int worker) {
  constexpr uint32_t kOffset = 0x3ffff;  // of an address in the block: in front of it is the block's rank
  constexpr int Columns = M::Columns;
  auto schedule = scheduleOf<Columns>(p);
  // All at once, the parts would take the bandwidth of shared memory that products and copies need.
  const int steps = (p.depth + kDepth - 1) / kDepth, apart = steps / Held<T, D, M>::Parts, warp = uniform(threadIdx.x / 32 % 4);
  const uint32_t panels = m.panels(4 * worker + warp);
  Accumulator<1, Columns> sums;
  sums.clear();
  Held<T, D, M> before(p);
  auto start = [&](int i, bool first) {
    m.ring.wait(i);
    const Descriptor a((m.left(i) & kOffset) + worker * kPanelBytes, 16), b(m.right(i) & kOffset, 16);
    productsBegin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) product<0>(sums.c[0], a.plus(k * 32), b.plus(k * 32), k > 0 || !first, T());
    productsCommit();
  };
  auto release = [&](int i) {
    productsWait<1>();
    releaseAll(m.ring, i - 1);
  };
  Tile t;
  for (int i = 0; schedule.take(t);) {
    const int end = i + steps;
    hold(sums);
#pragma unroll
    for (int part = 0; part < before.Parts; part++) {
      start(i, part == 0);
      before.finish(p, y, panels, part);
      if (part > 0) release(i);
      i++;
      if (part < before.Parts - 1)
#pragma unroll 1
        for (int more = apart; more > 1; more--, i++) {
          start(i, false);
          release(i);
        }
    }
    before.expect(p, t.row + 64 * worker + 16 * warp, t.column);
    for (; i < end; i++) {
      start(i, false);
      release(i);
    }
    productsWait<0>();
    hold(sums);
    releaseAll(m.ring, i - 1);
    before.take(sums);
  }
#pragma unroll
  for (int part = 0; part < before.Parts; part++) before.finish(p, y, panels, part);
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

template <typename T, int D, int Columns>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &weights, const TensorMap &y) {
  static_assert(Columns % D == 0, "heads lie within tiles");
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared<Columns> m(sharedAddress(shared));
  if (threadIdx.x == 0) {
    m.ring.init(4 * kCluster * kWorkers);  // one of every warp
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  meetCluster();
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x == 0) copyTiles(p, x, weights, m);
    __syncwarp();
  } else {
    takeRegisters<240>();
    multiplyTiles<T, D>(p, y, m, uniform(threadIdx.x / 128) - 1);
  }
  meetCluster();  // the other block may still write here
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Shared.
#define DEFINE_SHAPE(T, D, columns)                                                                                         \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                      \
      gemm_hopper_rope_##D##_##T(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,               \
                                 const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap y) {          \
    BODY(run<T, D, columns>(p, x, weights, y));                                                                             \
  }
#define DEFINE(T)           \
  DEFINE_SHAPE(T, 64, 256)  \
  DEFINE_SHAPE(T, 96, 192)  \
  DEFINE_SHAPE(T, 128, 256)
DEFINE(bf16)
DEFINE(f16)
