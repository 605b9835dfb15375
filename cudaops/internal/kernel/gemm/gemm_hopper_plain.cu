// Matrix products on Hopper (sm_90a) for small depths, where storing results takes a noticeable share of the time.
// bf16 and f16 results are rounded once, after c is added:
//
//   nt:  y = x·wᵀ + u·bᵀ + c with w [columns, depth] and b [columns, termDepth]
//   nn:  y = x·w + u·b + c with w [depth, columns] and b [termDepth, columns]
//
// Sums of float8 products are rounded before they are multiplied by their factors, and y is rounded
// again:
//
//   f8:  y = (rowFactors·columnFactorsᵀ) ⊙ (x·wᵀ) + c
//
// x is [rows, depth], u is [rows, termDepth], and y and c are [rows, columns]; u and c are optional. gemm_hopper.cuh
// describes how the work is divided among blocks and warps.
//
// Requirements: columns and depths are multiples of 8, and matrices are aligned to 16 bytes. For float8, columns and
// depth are multiples of 16, depth exceeds 384, and factors are aligned to 16 bytes.
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills in Params.
struct Params {
  const float *rowFactors, *columnFactors;  // for float8
  int rows, columns, depth, termDepth;
  int section;  // see Schedule
};

#if defined(HOPPER)

constexpr int kColumns = 256, kStages = 4, kParts = kColumns / 64;

using Shared = Memory<kColumns, kStages, 2 * kPanel>;

// Finished stores a tile in parts of 64 columns, one per slot, while the next tile is computed. Adding c takes one of the
// two panels and one more slot: each slot requests a part of the next tile's c, and the following slot loads it into the
// registers of the part that has just been stored.
template <typename T, bool Add> struct Finished : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kSlots = Add ? kParts + 1 : kParts;
  const TensorMap &y, &c;
  uint32_t panels;
  Ring<1> ring;  // for c's panel
  int fill = 0;

  __device__ Finished(const Params &p, const TensorMap &y, const TensorMap &c, const Shared &m, int warp)
      : Sums(p.rows), y(y), c(c), panels(m.panels(warp)), ring{m.barriers(warp)} {}

  static __device__ void init(uint32_t barriers) { Ring<1>{barriers}.init(32); }

  __device__ void finish(int slot, int nextRow, int nextColumn, bool more) {
    if (slot < kParts) {
      const uint32_t panel = panels + (Add ? 0 : slot % 2 * kPanel);
      storesRead<Add ? 0 : 1>();
      leaveColumns(v, 8 * slot, panel);
      store(y, panel, column + 64 * slot, row, 0);
    }
    if (Add && more) {
      if (slot > 0) accept(8 * (slot - 1));
      if (slot < kParts && threadIdx.x % 32 == 0)
        copyBox<false>(panels + kPanel, c, ring.fill(fill, kPanel), nextColumn + 64 * slot, nextRow, 0);
      __syncwarp();
    }
  }

  // Loads 64 columns of c, starting with column 8·first, into registers.
  __device__ void accept(int first) {
    ring.wait(fill);
#pragma unroll
    for (int n = 0; n < 8; n += 2) loadMatrices(*(uint32_t(*)[2][2]) & v[first + n], chunkOf<64>(panels + kPanel) ^ n * 16);
    fenceAsync();
    ring.release(fill++);
  }

  __device__ void take(Accumulator<1, kColumns> &sums, int row, int column) {
    if (Add)
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 add = unpack(v[n][i], T());
          sums.c[0][n][2 * i] += add.x;
          sums.c[0][n][2 * i + 1] += add.y;
        }
    Sums::take(sums, row, column);
  }
};

// Scaled stores a float8 tile 64 columns at a time, in two slots each. c is loaded into a panel,
// and y replaces it.
template <typename T, bool Add> struct Scaled : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kSlots = 2 * kParts;
  const TensorMap &y, &c;
  uint32_t panels, arrived;
  Factors<Shared> factors;

  __device__ Scaled(const Params &p, const TensorMap &y, const TensorMap &c, const Shared &m, int warp)
      : Sums(p.rows), y(y), c(c), panels(m.panels(warp)), arrived(m.barriers(warp)), factors{m, p.rowFactors, p.rows} {
    if (Add) copy(0, row, column);
  }

  __device__ void copy(int part, int row, int column) { bringPart(c, panels, arrived, part, row, column); }

  __device__ void finish(int slot, int nextRow, int nextColumn, bool more) {
    const int part = slot / 2, second = slot % 2;
    const uint32_t panel = panels + part % 2 * kPanel;
    if (second == 0) {
      if (Add) {
        if (part + 1 < kParts)
          copy(part + 1, row, column);
        else if (more)
          copy(0, nextRow, nextColumn);
        barrierWait(arrived + part % 2 * 8, part / 2 % 2);
      } else {
        storesRead<1>();
      }
    }
#pragma unroll
    for (int n = 4 * second; n < 4 * second + 4; n += 2) form(8 * part + n, chunkOf<64>(panel) ^ n * 16);
    if (second) store(y, panel, column + 64 * part, row, 0);
    if (slot == kSlots - 1 && more) factors.next(nextRow);
  }

  // Computes 16 columns, starting with column 8n, and writes them to shared memory at `at`.
  __device__ void form(int n, uint32_t at) {
    uint32_t w[2][2];
    if (Add) {
      loadMatrices(w, at);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float2 s = factors.times(unpack(v[n + i][r], T()), r, n + i);
        if (Add) {
          const float2 add = unpack(w[i][r], T());
          s = {s.x + add.x, s.y + add.y};
        }
        w[i][r] = pack(s.x, s.y, T());
      }
    storeMatrices(at, w[0], w[1]);
  }
};

template <typename T, bool TransposeB, bool Add>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &y, const TensorMap &c,
                           const TensorMap &u, const TensorMap &b) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<T, TransposeB>(m, Schedule<kColumns>(p.rows, p.columns, p.section), p.depth, x, Right<TransposeB>{w},
                          Term<Right<TransposeB>>{u, {b}, p.termDepth},
                          [&](int warp) { return Finished<T, Add>(p, y, c, m, warp); });
}

// The kernel for float8. Its depth counts pairs of elements.
template <typename T, bool Add>
__device__ inline void runScaled(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &y, const TensorMap &c,
                                 const TensorMap &, const TensorMap &) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<f8x2, 0>(m, Schedule<kColumns>(p.rows, p.columns, p.section), p.depth, x, ScaledRight{w, p.columnFactors, p.columns, p.depth}, NoTerm{},
                    [&](int warp) { return Scaled<T, Add>(p, y, c, m, warp); });
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Memory.
#define KERNEL(name, ...)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                        \
      name(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, \
           const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap u,     \
           const __grid_constant__ TensorMap b) {                                                                             \
    BODY(__VA_ARGS__(p, x, w, y, c, u, b));                                                                                         \
  }
#define DEFINE(T)                                        \
  KERNEL(gemm_hopper_plain_nt_##T, run<T, false, false>)      \
  KERNEL(gemm_hopper_plain_nt_add_##T, run<T, false, true>)   \
  KERNEL(gemm_hopper_plain_nn_##T, run<T, true, false>)       \
  KERNEL(gemm_hopper_plain_nn_add_##T, run<T, true, true>)
DEFINE(bf16)
DEFINE(f16)
KERNEL(gemm_hopper_plain_f8_bf16, runScaled<bf16, false>)
KERNEL(gemm_hopper_plain_f8_add_bf16, runScaled<bf16, true>)
