// Matrix products on Hopper (sm_90a) whose results pass through the gate of a SiLU MLP on their way to memory, for bf16 and f16:
//
//   forward:   [gate | up] = x·weightsᵀ,  h = silu(gate) ⊙ up,  silu(a) = a·σ(a)
//   backward:  dh = g·down,  dgate = dh ⊙ up ⊙ σ(gate)(1 + gate(1 − σ(gate))),  dup = dh ⊙ silu(gate),  and h again
//
// with x and g [rows, depth], weights [2f, depth], down [depth, f], [gate | up] and [dgate | dup] [rows, 2f] and h [rows, f].
// gate, up and dh are rounded to T before they are used, as if they had been in memory; dh never is.
//
// gemm_hopper.cuh says how a block goes about it. Of the 256 columns of its tiles, in the forward pass 128 are of gate and the
// same of up. What the multipliers leave Finishers warps take to memory.
//
// Three finishers do for the forward pass, and for the backward pass of a long depth. With seven there are too many threads for
// products of 256 columns, since the compiler wants room for their registers in every thread: the multipliers then read the left
// operand twice.
//
// Needs: f and depth multiples of 8, pointers of 16 bytes.
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  const void *ab;  // backward: [gate | up]
  void *dab, *h;
  int rows, f, depth;
  int section;     // rows of clusters that are worked on together, so that both operands stay in L2
};

#if defined(HOPPER)
constexpr int kColumns = 256, kStages = 3;

// Rows of gate and up on their way to the finishers of the backward pass, who share them evenly: 512 bytes of each.
constexpr int kGates = 18, kGateBytes = 2 * 512;

using Shared = Memory<kColumns, kStages, kGates * kGateBytes>;

template <int Step> __device__ inline Schedule<Step> scheduleOf(const Params &p) { return {p.rows, p.f, p.section}; }

// What lies outside the matrices becomes zero.
template <bool Forward> __device__ inline void copyTiles(const Params &p, const TensorMap &left, const TensorMap &right, const Shared &m) {
  auto schedule = scheduleOf<Forward ? kColumns / 2 : kColumns>(p);
  Tile t;
  for (int i = 0; schedule.take(t);)
    for (int k = 0; k < p.depth; k += kDepth, i++) {
      const uint32_t barrier = m.ring.fill(i, Shared::StageBytes), half = m.right(i) + schedule.rank * (Shared::RightBytes / kCluster);
      copyBox<false>(m.left(i), left, barrier, k, t.row, 0);
      if (Forward) {  // one block brings gate, the other up
        copyBox<true>(half, right, barrier, k, t.column, schedule.rank);
      } else {
        const int column = t.column + schedule.rank * (kColumns / kCluster);
        copyBox<true>(half, right, barrier, column, k, 0);
        copyBox<true>(half + kPanelBytes, right, barrier, column + 64, k, 0);
      }
    }
}

template <typename T, bool Forward, int Finishers>
__device__ inline void multiplyTiles(const Params &p, const Shared &m, int worker) {
  auto schedule = scheduleOf<Forward ? kColumns / 2 : kColumns>(p);
  Accumulator<1, kColumns> sums;
  sums.clear();
  Tile t;
  for (int turn = 0, i = 0; schedule.take(t); turn++) {
    const int end = i + (p.depth + kDepth - 1) / kDepth;
    i = multiplyTile<T, !Forward, Finishers != 3>(sums, m, worker, i, end, [](int) {});
    barrierWait(m.taken(worker), turn + 1 & 1);
    leaveSums<T>(sums, m.sums(worker));
    if (Forward) fenceAsync();
    arriveOfWarp(m.summed(worker));
  }
}

// ---- From the sums to memory ----

// σ(a), as exact as T shows; what is below the smallest normal number is 0.
__device__ inline float gateOf(float a) {
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + exp2Approx(-kLog2e * a)));
  return s;
}

__device__ inline float2 unpack(uint32_t v, bf16) { return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)}; }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

// Eight columns of a row, packed.
struct Chunk {
  uint32_t v[4];
};

__device__ inline Chunk loadSums(uint32_t panels, int row, int chunk) {
  Chunk c;
  loadWords(c.v, panels + chunk / 8 * kPanelBytes + row * 128 + (chunk ^ row) % 8 * 16);
  return c;
}

template <typename T> __device__ inline void storeChunk(T *to, const Chunk &c) {
  *(uint4 *)to = {c.v[0], c.v[1], c.v[2], c.v[3]};
}

// gate and up leave through the copy engine while h is formed, two rows at a time.
template <typename T, int Finishers>
__device__ inline void finishForward(const Params &p, const TensorMap &ab, const Shared &m, int warp) {
  const int lane = threadIdx.x % 32, chunk = lane % 16;
  auto schedule = scheduleOf<kColumns / 2>(p);
  Tile t;
  for (int turn = 0; schedule.take(t); turn++)
    for (int worker = 0; worker < kWorkers; worker++) {
      const uint32_t panels = m.sums(worker);
      const int first = t.row + 64 * worker, column = t.column + 8 * chunk;
      barrierWait(m.summed(worker), turn & 1);
      if (warp == 0 && lane == 0) {
#pragma unroll
        for (int panel = 0; panel < 4; panel++)
          storeBox(ab, panels + panel * kPanelBytes, t.column + panel % 2 * 64, panel / 2, first);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
#pragma unroll 2
      for (int r = 2 * warp + lane / 16; r < 64; r += 2 * Finishers) {
        const Chunk a = loadSums(panels, r, chunk), b = loadSums(panels, r, chunk + 16);
        Chunk h;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 gate = unpack(a.v[j], T()), up = unpack(b.v[j], T());
          h.v[j] = pack(gate.x * gateOf(gate.x) * up.x, gate.y * gateOf(gate.y) * up.y, T());
        }
        if (first + r < p.rows && column < p.f) storeChunk((T *)p.h + (int64_t)(first + r) * p.f + column, h);
      }
      if (warp == 0 && lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      arriveOfWarp(m.taken(worker));
    }
}

// Asks for the tile's gate and up in L2, 128 bytes at a time.
template <typename T, int Finishers> __device__ inline void expect(const Params &p, const Tile &t, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int r = warp * 4 + lane / 8; r < kRows; r += 4 * Finishers) {
    const int row = t.row + r, column = t.column + lane % 4 * 64;
    if (row < p.rows && column < p.f)
      asm volatile("prefetch.global.L2 [%0];" ::"l"((const T *)p.ab + ((int64_t)row * 2 + lane / 4 % 2) * p.f + column));
  }
}

// The rows that a warp finishes, of one tile after the other.
template <int Finishers> struct Rows {
  Schedule<kColumns> schedule;
  int warp, row;
  bool more;
  Tile t;
  __device__ Rows(const Params &p, int warp) : schedule(scheduleOf<kColumns>(p)), warp(warp), row(warp), more(schedule.take(t)) {}
  // Reports whether the next row is of another tile.
  __device__ bool next() {
    row += Finishers;
    if (row < kRows) return false;
    row = warp;
    more = schedule.take(t);
    return true;
  }
};

// A lane has eight columns. It starts copies of gate and up some rows before it needs them.
template <typename T, int Finishers> __device__ inline void finishBackward(const Params &p, const Shared &m, int warp) {
  constexpr int slots = kGates / Finishers;
  const int lane = threadIdx.x % 32;
  const uint32_t gates = m.extra() + warp * slots * kGateBytes + lane * 16;
  Rows<Finishers> now(p, warp), ahead = now;
  if (now.more) expect<T, Finishers>(p, now.t, warp);
  auto copy = [&](uint32_t to) {
    if (ahead.more) {
      const int row = ahead.t.row + ahead.row, column = ahead.t.column + 8 * lane;
      const bool there = row < p.rows && column < p.f;
      const T *from = (const T *)p.ab + (there ? (int64_t)row * 2 * p.f + column : 0);
      copyAsync<16>(to, from, there);
      copyAsync<16>(to + 512, from + p.f, there);
      if (ahead.next() && ahead.more) expect<T, Finishers>(p, ahead.t, warp);
    }
    copyCommit();
  };
  for (int slot = 0; slot < slots; slot++) copy(gates + slot * kGateBytes);
  int worker = -1;
#pragma unroll 1
  for (int turn = 0, slot = 0; now.more; slot = slot == slots - 1 ? 0 : slot + 1) {
    if (now.row / 64 > worker) {
      if (worker >= 0) arriveOfWarp(m.taken(worker));
      barrierWait(m.summed(++worker), turn & 1);
    }
    copyWait<slots - 1>();
    Chunk a, b, h, da, db;
    const Chunk dh = loadSums(m.sums(worker), now.row % 64, lane);
    loadWords(a.v, gates + slot * kGateBytes);
    loadWords(b.v, gates + slot * kGateBytes + 512);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 x = unpack(a.v[j], T()), y = unpack(b.v[j], T()), g = unpack(dh.v[j], T());
      const float2 s = {gateOf(x.x), gateOf(x.y)}, silu = {x.x * s.x, x.y * s.y};
      h.v[j] = pack(silu.x * y.x, silu.y * y.y, T());
      db.v[j] = pack(g.x * silu.x, g.y * silu.y, T());
      da.v[j] = pack(g.x * y.x * (s.x + fmaf(-silu.x, s.x, silu.x)), g.y * y.y * (s.y + fmaf(-silu.y, s.y, silu.y)), T());
    }
    const int row = now.t.row + now.row, column = now.t.column + 8 * lane;
    if (row < p.rows && column < p.f) {
      T *to = (T *)p.dab + (int64_t)row * 2 * p.f + column;
      storeChunk(to, da);
      storeChunk(to + p.f, db);
      storeChunk((T *)p.h + (int64_t)row * p.f + column, h);
    }
    copy(gates + slot * kGateBytes);
    if (now.next()) {
      arriveOfWarp(m.taken(worker));
      worker = -1;
      turn++;
    }
  }
}

template <typename T, bool Forward, int Finishers>
__device__ inline void run(const Params &p, const TensorMap &left, const TensorMap &right, const TensorMap &ab) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  begin(m, Finishers);
  constexpr int others = Finishers == 3 ? 128 : 256;
  if (threadIdx.x < others) {
    giveRegisters<Finishers == 3 ? 152 : 80>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp > 0 && warp <= Finishers) {
      if constexpr (Forward)
        finishForward<T, Finishers>(p, ab, m, warp - 1);
      else
        finishBackward<T, Finishers>(p, m, warp - 1);
    } else if (threadIdx.x == 0) {
      copyTiles<Forward>(p, left, right, m);
    }
    __syncwarp();
  } else {
    takeRegisters<176>();
    multiplyTiles<T, Forward, Finishers>(p, m, uniform((threadIdx.x - others) / 128));
  }
  meetCluster();  // the other block may still write here
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, of 512 with seven finishers; as many as run at once. Dynamic shared memory:
// see Memory.
#define FORWARD(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_silu_mul_3_##T(                             \
      const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,                             \
      const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap ab) {                       \
    BODY(run<T, true, 3>(p, x, weights, ab));                                                                  \
  }
#define BACKWARD(T, finishers, threads)                                                                        \
  extern "C" __global__ void __launch_bounds__(threads, 1) gemm_hopper_silu_mul_backward_##finishers##_##T(    \
      const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap g,                             \
      const __grid_constant__ TensorMap down) {                                                                \
    BODY(run<T, false, finishers>(p, g, down, down));                                                          \
  }
#define DEFINE(T) FORWARD(T) BACKWARD(T, 3, 384) BACKWARD(T, 7, 512)
DEFINE(bf16)
DEFINE(f16)
