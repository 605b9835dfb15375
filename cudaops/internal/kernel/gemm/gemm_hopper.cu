// Matrix products on Hopper (sm_90a) with the gate of a SiLU MLP applied before results are stored,
// for bf16 and f16:
//
//   forward:   [gate | up] = x·weightsᵀ + u·bᵀ,  h = silu(gate) ⊙ up,  silu(a) = a·σ(a)
//   backward:  dh = g·down + u·b,  dgate = dh ⊙ up ⊙ σ(gate)(1 + gate(1 − σ(gate))),  dup = dh ⊙ silu(gate),  and
//              optionally h again
//
// x and g are [rows, depth], weights [2f, depth], down [depth, f], u, which is optional, [rows,
// termDepth], b [2f, termDepth] or [termDepth, f], [gate | up] and [dgate | dup]
// [rows, 2f], and h [rows, f]. gate, up and dh are rounded to T before they are used, as if they
// had been stored; dh never is.
//
// gemm_hopper.cuh describes how a block copies and multiplies. The sums of a tile stay, rounded, in
// 64 registers per multiplying thread while the products of the next tile run. In each of kSlots
// slots, spread evenly over the steps of the next tile, a warp stores part of the tile through its
// panels and the copy engine. In the forward pass half of a tile's 256 columns are gate and half
// are up, so that a lane has both elements of each pair.
//
// Requirements: f and depth are multiples of 8, and pointers are aligned to 16 bytes.
#include "exp2.cuh"
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills in Params.
struct Params {
  int rows, f, depth, termDepth;
  int section;  // see Schedule
};

#if defined(HOPPER)
constexpr int kColumns = 256, kStages = 4;
constexpr int kWarpBytes = 2 * kPanel;

using Shared = Memory<kColumns, kStages, kWarpBytes>;

// Both copies gate and up side by side: one block copies gate, the other up.
struct Both {
  const TensorMap &map;
  __device__ void copy(const Shared &m, int i, uint32_t barrier, int k, const Tile &t, int rank) const {
    copyBox<true>(m.right(i) + rank * (Shared::RightBytes / kCluster), map, barrier, k, t.column, rank);
  }
};

// gateOf returns σ(a), as accurate as T requires. Results below the smallest normal number become
// 0.
__device__ inline float gateOf(float a) {
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + exp2Approx(-kLog2e * a)));
  return s;
}

// Forward stores gate, up and h of 64 columns, one every two slots, and then the same for the other
// 64 columns. gate and up go through one panel; h is computed in the other one, 16 columns per
// slot.
template <typename T> struct Forward : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kSlots = 12;
  const TensorMap &ab, &h;
  uint32_t panels;

  __device__ Forward(const Params &p, const TensorMap &ab, const TensorMap &h, const Shared &m, int warp)
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

  // Computes the 16 columns from column 8n on.
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

// Backward has gate and up of 32 columns in one of the warp's panels. In two slots it replaces them
// with dgate and dup, while the other panel is stored and refilled. If h is wanted, it replaces dh
// in registers and is stored in the last slots, 64 columns at a time.
template <typename T, bool H> struct Backward : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kParts = 8, kFormed = 2 * kParts, kSlots = kFormed + (H ? 4 : 0), kPartColumns = kColumns / kParts;
  static constexpr int kUp = kPanel / 2;  // offset of up in a panel
  const TensorMap &ab, &dab, *h;
  uint32_t panels, arrived;

  __device__ Backward(const Params &p, const TensorMap &ab, const TensorMap &dab, const TensorMap *h, const Shared &m, int warp)
      : Sums(p.rows), ab(ab), dab(dab), h(h), panels(m.panels(warp)), arrived(m.barriers(warp)) {
    copy(0, row, column);
  }

  __device__ uint32_t panelOf(int part) const { return panels + part % 2 * kPanel; }

  // Makes the copy engine load a part of a tile, after it has finished reading earlier results from
  // the panel.
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
        if (part + 1 < kParts)
          copy(part + 1, row, column);
        else if (!H && more)
          copy(0, nextRow, nextColumn);
        barrierWait(arrived + part % 2 * 8, part / 2 % 2);
      }
      form(2 * slot, chunkOf<kPartColumns>(panelOf(part)) ^ slot % 2 * 32);
      if (slot % 2) store<true>(dab, panelOf(part), x, 0, row);
    } else {
      const int part = slot - kFormed;
      if (slot == kSlots - 1 && more) copy(0, nextRow, nextColumn);
      storesRead<1>();
      leaveColumns(v, 8 * part, panelOf(part));
      store(*h, panelOf(part), column + 64 * part, row, 0);
    }
  }

  // Computes the 16 columns from column 8n on; gate is in the chunks at `at`.
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
        if (H) v[n + i][r] = pack(silu.x * y.x, silu.y * y.y, T());
        b[i][r] = pack(g.x * silu.x, g.y * silu.y, T());
        a[i][r] = pack(g.x * y.x * (s.x + fmaf(-silu.x, s.x, silu.x)), g.y * y.y * (s.y + fmaf(-silu.y, s.y, silu.y)), T());
      }
    storeMatrices(at, a[0], a[1]);
    storeMatrices(at + kUp, b[0], b[1]);
  }
};

template <typename T>
__device__ inline void forward(const Params &p, const TensorMap &x, const TensorMap &weights, const TensorMap &ab, const TensorMap &h,
                               const TensorMap &u, const TensorMap &b) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<T, 0>(m, Schedule<kColumns / 2>(p.rows, p.f, p.section), p.depth, x, Both{weights}, Term<Both>{u, {b}, p.termDepth},
                 [&](int warp) { return Forward<T>(p, ab, h, m, warp); });
}

template <typename T, bool H>
__device__ inline void backward(const Params &p, const TensorMap &g, const TensorMap &down, const TensorMap &ab, const TensorMap &dab,
                                const TensorMap *h, const TensorMap &u, const TensorMap &b) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<T, 1>(m, Schedule<kColumns>(p.rows, p.f, p.section), p.depth, g, Right<1>{down}, Term<Right<1>>{u, {b}, p.termDepth},
                 [&](int warp) { return Backward<T, H>(p, ab, dab, h, m, warp); });
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Shared.
#define MAP(name) const __grid_constant__ TensorMap name
#define DEFINE(T)                                                                                                               \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_silu_mul_##T(                                                \
      const __grid_constant__ gemm::Params p, MAP(x), MAP(weights), MAP(ab), MAP(h), MAP(u), MAP(b)) {                          \
    BODY(forward<T>(p, x, weights, ab, h, u, b));                                                                               \
  }                                                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_silu_mul_backward_##T(                                       \
      const __grid_constant__ gemm::Params p, MAP(g), MAP(down), MAP(ab), MAP(dab), MAP(h), MAP(u), MAP(b)) {                   \
    BODY(backward<T, true>(p, g, down, ab, dab, &h, u, b));                                                                     \
  }                                                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_silu_mul_backward_without_h_##T(                             \
      const __grid_constant__ gemm::Params p, MAP(g), MAP(down), MAP(ab), MAP(dab), MAP(u), MAP(b)) {                           \
    BODY(backward<T, false>(p, g, down, ab, dab, nullptr, u, b));                                                               \
  }
DEFINE(bf16)
DEFINE(f16)
