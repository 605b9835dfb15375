// The product behind an attention's queries, keys and values on Hopper (sm_90a), for bf16 and f16, which turns the first two as
// rope.cu does:
//
//   y = x·weightsᵀ;  in the heads of the columns before `turned`, for the pairs (i, i + h), h = D/2, of head dimension D
//   y[i] = s[i]·cos − s[i+h]·sin,   y[i+h] = s[i+h]·cos + s[i]·sin
//
// with x [rows, depth], weights [columns, depth], y [rows, columns], and cosines and sines at [position·h + i] of the tables,
// position = row mod seq. Sums s are turned in the registers that products leave them in, and rounded to T once.
//
// gemm_hopper.cuh says how a block goes about it. Both elements of a pair are in the same lane, which asks for its angles, the
// same for all heads of a tile, before the last products start. Multipliers have the registers for that, since the copy engine
// takes what they leave to memory, which one thread starts.
//
// Needs: whole heads in a tile; turned a multiple of D, columns and depth of 8, x, weights and y at multiples of 16 bytes, the
// tables of 8.
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  const float *cosines, *sines;
  int rows, columns, depth, turned, seq;
  int section;  // of Schedule
};

#if defined(HOPPER)

template <int Columns> using Shared = Memory<Columns, Columns == 256 ? 3 : 4>;

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

// The cosines and sines of the pairs that a lane has in a head: columns 8x + lane % 4 · 2 and the next one of rows lane / 4 and
// 8 more of a warp's 16.
template <int D> struct Turn {
  float2 cosine[2][D / 16], sine[2][D / 16];

  __device__ void load(const Params &p, int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned position = unsigned(row + 8 * half + lane / 4) % unsigned(p.seq);
      const int64_t at = int64_t(position) * (D / 2) + lane % 4 * 2;
#pragma unroll
      for (int x = 0; x < D / 16; x++) {
        cosine[half][x] = *(const float2 *)(p.cosines + at + 8 * x);
        sine[half][x] = *(const float2 *)(p.sines + at + 8 * x);
      }
    }
  }

  // Turns the head that begins at the sums c.
  __device__ void head(float (*c)[4]) const {
#pragma unroll
    for (int x = 0; x < D / 16; x++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 cos = cosine[half][x], sin = sine[half][x];
        float *a = c[x] + 2 * half, *b = c[x + D / 16] + 2 * half;
        const float a0 = a[0], a1 = a[1];
        a[0] = a0 * cos.x - b[0] * sin.x;
        a[1] = a1 * cos.y - b[1] * sin.y;
        b[0] = b[0] * cos.x + a0 * sin.x;
        b[1] = b[1] * cos.y + a1 * sin.y;
      }
  }
};

template <typename T, int D, class M> __device__ inline void multiplyTiles(const Params &p, const M &m, int worker) {
  constexpr int Columns = M::Columns;
  auto schedule = scheduleOf<Columns>(p);
  const int steps = (p.depth + kDepth - 1) / kDepth;
  Accumulator<1, Columns> sums;
  sums.clear();
  Turn<D> turn;
  Tile t;
  for (int tile = 0, i = 0; schedule.take(t); tile++) {
    const int end = i + steps, heads = (p.turned - t.column) / D;
    i = multiplyTile<T, 0, false>(sums, m, worker, i, end, [&](int i) {
      if (i == end - 1 && heads > 0) turn.load(p, t.row + 64 * worker + threadIdx.x / 32 % 4 * 16);
    });
#pragma unroll
    for (int h = 0; h < Columns / D; h++)
      if (h < heads) turn.head(sums.c[0] + h * (D / 8));
    barrierWait(m.taken(worker), tile + 1 & 1);
    leaveSums<T>(sums, m.sums(worker));
    fenceAsync();
    arriveOfWarp(m.summed(worker));
  }
}

// One thread has the copy engine store what the multipliers leave.
template <class M> __device__ inline void storeTiles(const Params &p, const TensorMap &y, const M &m) {
  auto schedule = scheduleOf<M::Columns>(p);
  Tile t;
  for (int tile = 0; schedule.take(t); tile++)
    for (int worker = 0; worker < kWorkers; worker++) {
      barrierWait(m.summed(worker), tile & 1);
#pragma unroll
      for (int panel = 0; panel < M::Columns / 64; panel++)
        storeBox(y, m.sums(worker) + panel * kPanelBytes, t.column + panel * 64, t.row + 64 * worker, 0);
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      barrierArrive(m.taken(worker));
    }
}

template <typename T, int D, int Columns>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &weights, const TensorMap &y) {
  static_assert(Columns % D == 0, "heads lie within tiles");
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared<Columns> m(sharedAddress(shared));
  begin(m, 1);
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x == 0) copyTiles(p, x, weights, m);
    if (threadIdx.x == 32) storeTiles(p, y, m);
    __syncwarp();
  } else {
    takeRegisters<240>();
    multiplyTiles<T, D>(p, m, uniform(threadIdx.x / 128) - 1);
  }
  meetCluster();  // the other block may still write here
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Memory.
#define DEFINE_SHAPE(T, D, columns)                                                                                         \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                      \
      gemm_hopper_rope_##D##_##T(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,               \
                                 const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap y) {          \
    BODY(run<T, D, columns>(p, x, weights, y));                                                                             \
  }
#define DEFINE(T)           \
  DEFINE_SHAPE(T, 64, 192)  \
  DEFINE_SHAPE(T, 96, 192)  \
  DEFINE_SHAPE(T, 128, 256)
DEFINE(bf16)
DEFINE(f16)
