// Matrix products on Hopper (sm_90a) whose results pass through the gate of a SiLU MLP on their way to memory, for bf16 and f16:
//
//   forward:   [gate | up] = x·weightsᵀ,  h = silu(gate) ⊙ up,  silu(a) = a·σ(a)
//   backward:  dh = g·down,  dgate = dh ⊙ up ⊙ σ(gate)(1 + gate(1 − σ(gate))),  dup = dh ⊙ silu(gate),  and h again
//
// with x and g [rows, depth], weights [2f, depth], down [depth, f], [gate | up] and [dgate | dup] [rows, 2f] and h [rows, f].
// gate, up and dh are rounded to T before they are used, as if they had been in memory; dh never is.
//
// gemm_hopper.cuh says how a block copies and multiplies. The sums of a tile wait, rounded, in 64 of their multipliers' own registers
// while the products of the next tile run: a warp takes some of them to memory in each of the first kSlots steps of that, through
// panels of its own and the copy engine. Of the 256 columns of a tile, in the forward pass 128 are of gate and the same of up, so
// that a lane has both of a pair.
//
// Needs: f and depth multiples of 8, depth above 64·(kSlots − 1), pointers of 16 bytes.
#include "gemm_hopper.cuh"
#include "overlap.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  int rows, f, depth;
  int section;  // of Schedule
};

#if defined(HOPPER)
constexpr int kColumns = 256, kStages = 4;
constexpr int kWarpBytes = 2 * 16 * 128;  // of a warp's rows: 64 columns, twice

// Shared memory: the stages, two panels of each multiplying warp, then the barriers.
struct Shared {
  static constexpr int LeftBytes = kRows * kDepth * 2, RightBytes = kColumns * kDepth * 2, StageBytes = LeftBytes + RightBytes;
  static constexpr int Barriers = kStages * StageBytes + 4 * kWorkers * kWarpBytes;
  uint32_t base;
  Ring<kStages> ring;
  __device__ explicit Shared(uint32_t at) : base(at), ring{at + Barriers} {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * StageBytes; }
  __device__ uint32_t right(int i) const { return left(i) + LeftBytes; }
  __device__ uint32_t panels(int warp) const { return base + kStages * StageBytes + warp * kWarpBytes; }
  __device__ uint32_t arrived(int warp) const { return ring.barriers + ring.bytes + warp * 16; }  // of each panel
};

template <int Step> __device__ inline Schedule<Step> scheduleOf(const Params &p) { return {p.rows, p.f, p.section}; }

// What lies outside the matrices becomes zero.
template <bool Forward> __device__ inline void copyTiles(const Params &p, const TensorMap &left, const TensorMap &right, const Shared &m) {
  auto schedule = scheduleOf<Forward ? kColumns / 2 : kColumns>(p);
  Tile t;
  for (int i = 0; schedule.take(t);)
#pragma unroll 1  // for the lack of registers
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

// ---- From the sums to memory ----

// σ(a), as exact as T shows; what is below the smallest normal number is 0.
__device__ inline float gateOf(float a) {
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + exp2Approx(-kLog2e * a)));
  return s;
}

__device__ inline float2 unpack(uint32_t v, bf16) { return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)}; }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

__device__ inline void loadMatrices(uint32_t (&v)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}

__device__ inline void storeMatrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Where a lane's chunk of the first 16 columns lies, in a panel of 16 rows of Columns; those of column c, a multiple of 16, are where
// bits 4 to 6 differ by c / 8.
template <int Columns> __device__ inline uint32_t chunkOf(uint32_t panel) {
  const int lane = threadIdx.x % 32, r = lane % 16;
  return panel + r * (2 * Columns) + (lane / 16 ^ (Columns == 64 ? r % 8 : r / 2 % 4)) * 16;
}

// Waits until the copy engine has read all but the latest Pending of what this lane had it store.
template <int Pending> __device__ inline void storesRead() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory"); }
__device__ inline void storesCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// The rounded sums of a warp's 16 rows of a tile: a lane has columns 8n + lane % 4 · 2 and the next one of rows lane / 4 and
// 8 more.
template <typename T> struct Held {
  uint32_t v[kColumns / 8][2];
  int row, column;

  __device__ explicit Held(int rows) : row(rows), column(0) {  // of no tile
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++) v[n][0] = v[n][1] = 0;
  }

  __device__ void take(const Accumulator<1, kColumns> &sums, int row, int column) {
    this->row = row;
    this->column = column;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++) {
      const float(&c)[4] = sums.c[0][n];
      v[n][0] = pack(c[0], c[1], T());
      v[n][1] = pack(c[2], c[3], T());
    }
  }

  __device__ void store16(uint32_t at, int n) const { storeMatrices(at, v[n][0], v[n][1], v[n + 1][0], v[n + 1][1]); }
};

// gate, h and up leave 64 columns at a time; h takes two slots.
template <typename T> struct Forward {
  static constexpr int kSlots = 8, Step = kColumns / 2;
  Held<T> held;
  const TensorMap &ab, &h;
  uint32_t panels;

  __device__ Forward(const Params &p, const TensorMap &ab, const TensorMap &, const TensorMap &h, const Shared &m, int warp)
      : held(p.rows), ab(ab), h(h), panels(m.panels(warp)) {}
  __device__ void begin() {}

  __device__ void finish(int slot, int, int, bool) {
    const int lane = threadIdx.x % 32, half = slot / 4, part = slot % 4, first = half * 8;
    const bool gated = part == 1 || part == 2;
    const uint32_t panel = panels + (gated != (half == 1)) * (kWarpBytes / 2);  // they take turns
    if (part != 2) {
      if (lane == 0) storesRead<1>();
      __syncwarp();
    }
    const uint32_t chunk = chunkOf<64>(panel);
    if (!gated) {
      const int from = first + (part == 3) * (kColumns / 16);
#pragma unroll
      for (int n = 0; n < 8; n += 2) held.store16(chunk ^ n * 16, from + n);
    } else {
#pragma unroll
      for (int n = part == 1 ? 0 : 4; n < (part == 1 ? 4 : 8); n += 2) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = first + n + i / 2;
          const float2 gate = unpack(held.v[at][i % 2], T()), up = unpack(held.v[at + kColumns / 16][i % 2], T());
          w[i] = pack(gate.x * gateOf(gate.x) * up.x, gate.y * gateOf(gate.y) * up.y, T());
        }
        storeMatrices(chunk ^ n * 16, w[0], w[1], w[2], w[3]);
      }
    }
    if (part == 1) return;
    fenceAsync();
    __syncwarp();
    if (lane == 0) {
      if (gated)
        storeBox(h, panel, held.column + 64 * half, held.row, 0);
      else
        storeBox(ab, panel, held.column + 64 * half, part == 3, held.row);
      storesCommit();
    }
  }
};

// In the first eight slots the warp has gate and up of 32 columns in one of its panels, forms dgate and dup in their place and h in
// the place of dh, while the other panel's leave and the next come. In the last four h leaves, 64 columns at a time.
template <typename T> struct Backward {
  static constexpr int kParts = 8, kSlots = 12, Step = kColumns, kPartColumns = kColumns / kParts;
  static constexpr int Panel = kWarpBytes / 2, Up = Panel / 2;  // of a panel, up's half
  Held<T> held;
  const TensorMap &ab, &dab, &h;
  uint32_t panels, arrived;

  __device__ Backward(const Params &p, const TensorMap &ab, const TensorMap &dab, const TensorMap &h, const Shared &m, int warp)
      : held(p.rows), ab(ab), dab(dab), h(h), panels(m.panels(warp)), arrived(m.arrived(warp)) {}

  __device__ void copy(int part, int row, int column) {  // by one lane
    const uint32_t panel = panels + part % 2 * Panel, barrier = arrived + part % 2 * 8;
    barrierExpect(barrier, Panel);
    copyBox<false>(panel, ab, barrier, column + part * kPartColumns, 0, row);
    copyBox<false>(panel + Up, ab, barrier, column + part * kPartColumns, 1, row);
  }
  __device__ void begin() {
    if (threadIdx.x % 32 == 0) copy(0, held.row, held.column);
  }

  // Next is the tile that is being multiplied, if there is one.
  __device__ void finish(int slot, int nextRow, int nextColumn, bool more) {
    const int lane = threadIdx.x % 32;
    const uint32_t panel = panels + slot % 2 * Panel;
    if (lane == 0) {
      storesRead<0>();
      if (slot + 1 < kParts) copy(slot + 1, held.row, held.column);
      if (slot + 1 == kSlots && more) copy(0, nextRow, nextColumn);
    }
    if (slot < kParts) {
      barrierWait(arrived + slot % 2 * 8, slot / 2 % 2);
      const uint32_t chunk = chunkOf<kPartColumns>(panel);
#pragma unroll
      for (int n = 0; n < kPartColumns / 8; n += 2) {
        const uint32_t at = chunk ^ n * 16;
        uint32_t a[4], b[4];
        loadMatrices(a, at);
        loadMatrices(b, at + Up);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint32_t &d = held.v[slot * (kPartColumns / 8) + n + i / 2][i % 2];
          const float2 x = unpack(a[i], T()), y = unpack(b[i], T()), g = unpack(d, T());
          const float2 s = {gateOf(x.x), gateOf(x.y)}, silu = {x.x * s.x, x.y * s.y};
          d = pack(silu.x * y.x, silu.y * y.y, T());
          if (slot >= 6) d = __shfl_sync(kAllLanes, d, lane);  // else it is formed where it is used, of numbers that go to local memory
          b[i] = pack(g.x * silu.x, g.y * silu.y, T());
          a[i] = pack(g.x * y.x * (s.x + fmaf(-silu.x, s.x, silu.x)), g.y * y.y * (s.y + fmaf(-silu.y, s.y, silu.y)), T());
        }
        storeMatrices(at, a[0], a[1], a[2], a[3]);
        storeMatrices(at + Up, b[0], b[1], b[2], b[3]);
      }
    } else {
      __syncwarp();
      const uint32_t chunk = chunkOf<64>(panel);
#pragma unroll
      for (int n = 0; n < 8; n += 2) held.store16(chunk ^ n * 16, (kSlots - 1 - slot) * 8 + n);
    }
    fenceAsync();
    __syncwarp();
    if (lane == 0) {
      if (slot < kParts) {
        storeBox(dab, panel, held.column + slot * kPartColumns, 0, held.row);
        storeBox(dab, panel + Up, held.column + slot * kPartColumns, 1, held.row);
      } else {
        storeBox(h, panel, held.column + (kSlots - 1 - slot) * 64, held.row, 0);
      }
      storesCommit();
    }
  }
};

template <typename T, class Finish>
__device__ inline void multiplyTiles(const Params &p, const TensorMap &ab, const TensorMap &dab, const TensorMap &h, const Shared &m,
                                     int worker) {
  constexpr uint32_t kOffset = 0x3ffff;  // of an address in the block: in front of it is the block's rank
  constexpr bool down = Finish::Step == kColumns;  // the right operand's rows are the depth
  constexpr int across = down ? kPanelBytes : 16, next = down ? 16 * 128 : 32;
  auto schedule = scheduleOf<Finish::Step>(p);
  const int steps = (p.depth + kDepth - 1) / kDepth, warp = uniform(threadIdx.x / 32 % 4);
  Accumulator<1, kColumns> sums;
  sums.clear();
  Finish before(p, ab, dab, h, m, 4 * worker + warp);
  before.begin();
  auto start = [&](int i, bool first) {
    m.ring.wait(i);
    const Descriptor a((m.left(i) & kOffset) + worker * kPanelBytes, 16), b(m.right(i) & kOffset, across);
    productsBegin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) product<down>(sums.c[0], a.plus(k * 32), b.plus(k * next), k > 0 || !first, T());
    productsCommit();
  };
  Tile t;
  for (int i = 0; schedule.take(t);) {
    const int end = i + steps, row = t.row + 64 * worker + 16 * warp;
    hold(sums);
#pragma unroll
    for (int slot = 0; slot < Finish::kSlots; slot++, i++) {
      start(i, slot == 0);
      before.finish(slot, row, t.column, true);
      if (slot > 0) {
        productsWait<1>();
        releaseAll(m.ring, i - 1);
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
    before.held.take(sums, row, t.column);
  }
#pragma unroll
  for (int slot = 0; slot < Finish::kSlots; slot++) before.finish(slot, 0, 0, false);
  storesRead<0>();
}

template <typename T, class Finish>
__device__ inline void run(const Params &p, const TensorMap &left, const TensorMap &right, const TensorMap &ab, const TensorMap &dab,
                           const TensorMap &h) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  if (threadIdx.x == 0) {
    m.ring.init(4 * kCluster * kWorkers);  // one of every warp
    for (int warp = 0; warp < 4 * kWorkers; warp++) {
      barrierInit(m.arrived(warp), 1);
      barrierInit(m.arrived(warp) + 8, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  meetCluster();
  releaseNext();
  awaitPrevious();
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x == 0) copyTiles<Finish::Step != kColumns>(p, left, right, m);
    __syncwarp();
  } else {
    takeRegisters<240>();
    multiplyTiles<T, Finish>(p, ab, dab, h, m, uniform(threadIdx.x / 128) - 1);
  }
  meetCluster();  // the other block may still write here
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Shared.
#define DEFINE(T)                                                                                                               \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_silu_mul_##T(                                                \
      const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weights,   \
      const __grid_constant__ TensorMap ab, const __grid_constant__ TensorMap h) {                                              \
    BODY(run<T, gemm::Forward<T>>(p, x, weights, ab, ab, h));                                                                   \
  }                                                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_silu_mul_backward_##T(                                       \
      const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap g, const __grid_constant__ TensorMap down,      \
      const __grid_constant__ TensorMap ab, const __grid_constant__ TensorMap dab, const __grid_constant__ TensorMap h) {       \
    BODY(run<T, gemm::Backward<T>>(p, g, down, ab, dab, h));                                                                    \
  }
DEFINE(bf16)
DEFINE(f16)
