// Matrix products on Hopper (sm_90a) for depths so short that bringing results to memory would show, for bf16 and f16:
//
//   nt:  y = x·wᵀ + c with w [columns, depth]
//   nn:  y = x·w + c with w [depth, columns]
//
// with x [rows, depth], y and c [rows, columns]; c may be left out. Sums, c among them, are rounded once.
//
// gemm_hopper.cuh says how a block goes about it. The registers that a part of a finished tile has left take c's part of the tile in
// work, which is needed only when that is rounded.
//
// Needs: columns and depth multiples of 8, matrices at multiples of 16 bytes.
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  int rows, columns, depth;
  int section;  // of Schedule
};

#if defined(HOPPER)

constexpr int kColumns = 256, kStages = 4, kParts = kColumns / 64;

using Shared = Memory<kColumns, kStages, 2 * kPanel>;

// A tile leaves 64 columns at a time. c, which comes so too, takes one of the panels, and one slot more: a part is asked for in one slot,
// from when on there are registers for it, and taken in the next.
template <typename T, bool Add> struct Finished : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kSlots = Add ? kParts + 1 : kParts;
  const TensorMap &y, &c;
  uint32_t panels;
  Ring<1> ring;  // of c's panel
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

  // Takes a part of c, the columns from 8·first on.
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

template <typename T, bool TransposeB, bool Add>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &y, const TensorMap &c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<T, TransposeB>(m, Schedule<kColumns>(p.rows, p.columns, p.section), p.depth, x, Right<TransposeB>{w},
                          [&](int warp) { return Finished<T, Add>(p, y, c, m, warp); });
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Memory.
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
