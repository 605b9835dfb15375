// The product behind an attention's queries, keys and values on Hopper (sm_90a), for bf16 and f16, which turns the first two as
// rope.cu does:
//
//   s = x·weightsᵀ, rounded to T;  in the heads of the columns before `turned`, for the pairs (i, i + h), h = D/2, of head dimension D
//   y[i] = s[i]·cos − s[i+h]·sin,   y[i+h] = s[i+h]·cos + s[i]·sin;  elsewhere y = s
//
// with x [rows, depth], weights [columns, depth], y [rows, columns], and cosines and sines at [position·h + i] of the tables,
// position = row mod seq. The bits are those of a product whose sums are formed in the same order, and rope.cu behind it.
//
// gemm_hopper.cuh says how a block copies and multiplies. The rounded sums of a tile wait in the multipliers' own registers while
// the products of the next tile run: in each of its first steps a thread turns a part, 16 columns of a head's first half and those
// that they are paired with, both of which are in its registers, and leaves it in a panel of its warp. A few heads go from there to
// memory at once by the copy engine. A thread has registers for the angles of one part: it asks for them before the step's products
// start, and parts of other heads that need the same come next.
//
// Needs: whole heads in a tile; turned a multiple of D, columns and depth of 8, depth above 64·(parts − 1), x, weights and y at
// multiples of 16 bytes, the tables of 8.
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  const float *cosines, *sines;
  int rows, columns, depth, turned, seq;
  int section;  // of Schedule
};

#if defined(HOPPER)

constexpr int kStages = 4, kPartColumns = 32;

// Shared memory: the stages, the panels of each multiplying warp, 16 rows of 64 columns each, then the barriers.
template <int Columns_> struct Shared {
  static constexpr int Columns = Columns_, Panels = Columns == 256 ? 2 : 3;  // for as much as there is room for
  static constexpr int LeftBytes = kRows * kDepth * 2, RightBytes = Columns * kDepth * 2, StageBytes = LeftBytes + RightBytes;
  static constexpr int PanelBytes = 16 * 128, Barriers = kStages * StageBytes + 4 * kWorkers * Panels * PanelBytes;
  uint32_t base;
  Ring<kStages> ring;
  __device__ explicit Shared(uint32_t at) : base(at), ring{at + Barriers} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * StageBytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
  __device__ uint32_t panels(int warp) const { return base + kStages * StageBytes + warp * Panels * PanelBytes; }
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

// The angles of a part: those of columns 8n + lane % 4 · 2 and the next one, of rows lane / 4 and 8 more.
struct Angles {
  float2 cosine[2][2], sine[2][2];

  // at is where the row's begin in the tables, apart what the other row's are away.
  __device__ void load(const Params &p, const int (&at)[2], int column) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        cosine[half][n] = *(const float2 *)(p.cosines + at[half] + column + 8 * n);
        sine[half][n] = *(const float2 *)(p.sines + at[half] + column + 8 * n);
      }
  }
};

// The rounded sums of a warp's 16 rows of a tile, a lane's being those of columns 8n + lane % 4 · 2 and the next one of rows lane / 4
// and 8 more.
template <typename T, int D, class M> struct Held {
  static constexpr int Columns = M::Columns, Parts = Columns / kPartColumns;
  static constexpr int Together = M::Panels * 64 / D, TogetherParts = Together * D / kPartColumns;  // heads that the panels hold
  uint32_t v[Columns / 8][2];
  Angles angles;
  int row, column, at[2];

  __device__ explicit Held(const Params &p) : row(p.rows), column(p.turned), at{0, 0} {  // of no tile
#pragma unroll
    for (int n = 0; n < Columns / 8; n++) v[n][0] = v[n][1] = 0;
  }

  // Says which tile comes next, once the last one is finished, and asks for its first angles.
  __device__ void expect(const Params &p, int row, int column) {
    this->row = row;
    this->column = column;
#pragma unroll
    for (int half = 0; half < 2; half++)
      at[half] = unsigned(row + 8 * half + threadIdx.x % 32 / 4) % unsigned(p.seq) * (D / 2) + threadIdx.x % 4 * 2;
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

  // The heads of a group take turns, so that they use the same angles one after the other.
  static __device__ constexpr int groupOf(int part) { return part / TogetherParts; }
  static __device__ constexpr int headOf(int part) { return part % TogetherParts % Together; }
  static __device__ constexpr int pairsOf(int part) { return part % TogetherParts / Together * 16; }

  __device__ bool turns(const Params &p, int group, int head) const { return column + (group * Together + head) * D < p.turned; }

  __device__ void ask(const Params &p, int part) {
    if (headOf(part) == 0 && turns(p, groupOf(part), 0)) angles.load(p, at, pairsOf(part));
  }

  __device__ void finish(const Params &p, const TensorMap &y, uint32_t panels, int part) {
    const int lane = threadIdx.x % 32, group = groupOf(part), head = headOf(part), pairs = pairsOf(part);
    const int first = (head * D + pairs) / 8, second = first + D / 16, n = group * Together * D / 8;
    if (part % TogetherParts == 0) {
      if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
    }
    uint32_t(&a)[2][2] = *(uint32_t(*)[2][2])&v[n + first], (&b)[2][2] = *(uint32_t(*)[2][2])&v[n + second];
    if (turns(p, group, head))
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 s = unpack(a[j][half], T()), t = unpack(b[j][half], T()), cos = angles.cosine[half][j], sin = angles.sine[half][j];
          a[j][half] = pack(fmaf(s.x, cos.x, -(t.x * sin.x)), fmaf(s.y, cos.y, -(t.y * sin.y)), T());
          b[j][half] = pack(fmaf(t.x, cos.x, s.x * sin.x), fmaf(t.y, cos.y, s.y * sin.y), T());
        }
    leave(panels, first, a);
    leave(panels, second, b);
    if (part % TogetherParts == TogetherParts - 1) {
      fenceAsync();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < M::Panels; i++) storeBox(y, panels + i * M::PanelBytes, column + (group * M::Panels + i) * 64, row, 0);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    if (part < Parts - 1) ask(p, part + 1);
  }

  // Leaves 16 columns in the panels, which begin with chunk 0.
  static __device__ void leave(uint32_t panels, int chunk, const uint32_t (&e)[2][2]) {
    const int lane = threadIdx.x % 32, r = lane % 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     panels + chunk / 8 * M::PanelBytes + r * 128 + ((chunk % 8 + lane / 16) ^ r % 8) * 16),
                 "r"(e[0][0]), "r"(e[0][1]), "r"(e[1][0]), "r"(e[1][1])
                 : "memory");
  }
};

template <typename T, int D, class M> __device__ inline void multiplyTiles(const Params &p, const TensorMap &y, const M &m, int worker) {
  constexpr uint32_t kOffset = 0x3ffff;  // of an address in the block: in front of it is the block's rank
  constexpr int Columns = M::Columns;
  auto schedule = scheduleOf<Columns>(p);
  const int steps = (p.depth + kDepth - 1) / kDepth, warp = uniform(threadIdx.x / 32 % 4);
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
  Tile t;
  for (int i = 0; schedule.take(t);) {
    const int end = i + steps;
    hold(sums);
#pragma unroll
    for (int part = 0; part < before.Parts; part++, i++) {
      start(i, part == 0);
      before.finish(p, y, panels, part);
      if (part > 0) {
        productsWait<1>();
        releaseAll(m.ring, i - 1);
      }
    }
    before.expect(p, t.row + 64 * worker + 16 * warp, t.column);
    for (; i < end; i++) {
      start(i, false);
      productsWait<1>();
      releaseAll(m.ring, i - 1);
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
