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

namespace gemm {

// The launcher fills it.
struct Params {
  int rows, f, depth;
  int section;  // of Schedule
};

#if defined(HOPPER)
constexpr int kColumns = 256, kStages = 4;
constexpr int kPanel = 16 * 128, kWarpBytes = 2 * kPanel;  // a warp's rows of 64 columns, twice

using Shared = WarpMemory<kColumns, kStages, kWarpBytes>;

// What lies outside the matrices becomes zero.
template <bool Forward, class S>
__device__ inline void copyTiles(const Params &p, S schedule, const TensorMap &left, const TensorMap &right, const Shared &m) {
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

// Puts the 64 columns from 8·first on into a panel.
__device__ inline void leaveColumns(const uint32_t (&v)[kColumns / 8][2], int first, uint32_t panel) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) storeMatrices(chunkOf<64>(panel) ^ n * 16, v[first + n], v[first + n + 1]);
}

// Has the copy engine store what the warp has put into a panel, with Halves the second half of it at y = 1.
template <bool Halves = false> __device__ inline void store(const TensorMap &map, uint32_t panel, int x, int y, int z) {
  fenceAsync();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    storeBox(map, panel, x, y, z);
    if constexpr (Halves) storeBox(map, panel + kPanel / 2, x, 1, z);
    storesCommit();
  }
}

// gate, up and h of 64 columns leave, one every two slots, and then those of the other 64; gate and up by one panel, h by the other, in
// which it is formed meanwhile, 16 columns a slot.
template <typename T> struct Forward : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kSlots = 12, kStep = kColumns / 2;
  const TensorMap &ab, &h;
  uint32_t panels;

  __device__ Forward(const Params &p, const TensorMap &ab, const TensorMap &, const TensorMap &h, const Shared &m, int warp)
      : Sums(p.rows), ab(ab), h(h), panels(m.panels(warp)) {}

  __device__ void finish(int slot, int, int, bool) {
    const int half = slot / 6, part = slot % 6;
    if (part == 0 || part == 2) {
      storesRead<0>();
      leaveColumns(v, 8 * half + part / 2 * (kColumns / 16), panels);
      store(ab, panels, column + 64 * half, part / 2, row);
    }
    if (part > 0 && part < 5) form(8 * half + 2 * (part - 1));
    if (part == 4) store(h, panels + kPanel, column + 64 * half, row, 0);
  }

  // Forms the 16 columns from 8n on.
  __device__ void form(int n) {
    uint32_t w[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 gate = unpack(v[n + i][r], T()), up = unpack(v[n + i + kColumns / 16][r], T());
        w[i][r] = pack(gate.x * gateOf(gate.x) * up.x, gate.y * gateOf(gate.y) * up.y, T());
      }
    storeMatrices(chunkOf<64>(panels + kPanel) ^ n % 8 * 16, w[0], w[1]);
  }
};

// The warp has gate and up of 32 columns in one of its panels, and forms dgate and dup in their place and h in the place of dh, in two
// slots, while the other panel's leave and the next come. In the last slots h leaves, 64 columns at a time.
template <typename T> struct Backward : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kParts = 8, kFormed = 2 * kParts, kSlots = kFormed + 4, kStep = kColumns, kPartColumns = kColumns / kParts;
  static constexpr int kUp = kPanel / 2;  // where in a panel up is
  const TensorMap &ab, &dab, &h;
  uint32_t panels, arrived;

  __device__ Backward(const Params &p, const TensorMap &ab, const TensorMap &dab, const TensorMap &h, const Shared &m, int warp)
      : Sums(p.rows), ab(ab), dab(dab), h(h), panels(m.panels(warp)), arrived(m.arrived(warp)) {
    copy(0, row, column);
  }

  __device__ uint32_t panelOf(int part) const { return panels + part % 2 * kPanel; }

  // Has the copy engine bring a part of a tile, as soon as it has read what it is to store from there.
  __device__ void copy(int part, int row, int column) {
    if (threadIdx.x % 32) return;
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    const uint32_t barrier = arrived + part % 2 * 8;
    barrierExpect(barrier, kPanel);
    copyBox<false>(panelOf(part), ab, barrier, column + part * kPartColumns, 0, row);
    copyBox<false>(panelOf(part) + kUp, ab, barrier, column + part * kPartColumns, 1, row);
  }

  __device__ void finish(int slot, int nextRow, int nextColumn, bool more) {
    if (slot < kFormed) {
      const int part = slot / 2, x = column + part * kPartColumns;
      if (slot % 2 == 0) {
        if (part + 1 < kParts) copy(part + 1, row, column);
        barrierWait(arrived + part % 2 * 8, part / 2 % 2);
      }
      form(2 * slot, chunkOf<kPartColumns>(panelOf(part)) ^ slot % 2 * 32);
      if (slot % 2) store<true>(dab, panelOf(part), x, 0, row);
    } else {
      const int part = slot - kFormed;
      if (slot == kSlots - 1 && more) copy(0, nextRow, nextColumn);
      storesRead<1>();
      leaveColumns(v, 8 * part, panelOf(part));
      store(h, panelOf(part), column + 64 * part, row, 0);
    }
  }

  // Forms the 16 columns from 8n on, whose gate is in the chunks at `at`.
  __device__ void form(int n, uint32_t at) {
    uint32_t a[2][2], b[2][2];
    loadMatrices(a, at);
    loadMatrices(b, at + kUp);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 x = unpack(a[i][r], T()), y = unpack(b[i][r], T()), g = unpack(v[n + i][r], T());
        const float2 s = {gateOf(x.x), gateOf(x.y)}, silu = {x.x * s.x, x.y * s.y};
        v[n + i][r] = pack(silu.x * y.x, silu.y * y.y, T());
        b[i][r] = pack(g.x * silu.x, g.y * silu.y, T());
        a[i][r] = pack(g.x * y.x * (s.x + fmaf(-silu.x, s.x, silu.x)), g.y * y.y * (s.y + fmaf(-silu.y, s.y, silu.y)), T());
      }
    storeMatrices(at, a[0], a[1]);
    storeMatrices(at + kUp, b[0], b[1]);
  }
};

template <typename T, class Held>
__device__ inline void run(const Params &p, const TensorMap &left, const TensorMap &right, const TensorMap &ab, const TensorMap &dab,
                           const TensorMap &h) {
  constexpr bool forward = Held::kStep < kColumns;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  beginWarps(m);
  const Schedule<Held::kStep> schedule(p.rows, p.f, p.section);
  if (threadIdx.x < 128) {
    giveRegisters<24>();
    if (threadIdx.x == 0) copyTiles<forward>(p, schedule, left, right, m);
    __syncwarp();
  } else {
    takeRegisters<240>();
    const int warp = uniform(threadIdx.x / 32 - 4);
    Held held(p, ab, dab, h, m, warp);
    multiplyHeld<T, !forward>(m, schedule, p.depth, warp / 4, held);
    storesRead<0>();
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
