// A product that computes the gradient of an attention's result on Hopper (sm_90a), for bf16 and
// f16, together with the statistics that attention's backward pass needs:
//
//   g = x·w + u·b, rounded to T;  for every row and head, of D columns: h, Σ_d g·y and ρ
//
// exponent.cuh defines h and ρ. All three are stored where statsOf in attention.cuh expects them.
// The kernel also clears the counters of attention_hopper_fused.cuh: one for every 64 rows of a
// head, plus one.
//
// x is [rows, depth], w is [depth, columns], u is [rows, termDepth] and optional, b is [termDepth,
// columns], y and g are [rows, columns], and normalizers are [batch, heads, seq], with rows = batch·seq
// and columns = heads·D. g is bit-identical to the result of gemm_hopper_plain.cu.
//
// gemm_hopper.cuh describes the structure. A tile is stored 64 columns at a time, in two slots. y
// is loaded into one of the warp's panels and, after it has been multiplied by g, replaced by g.
//
// Requirements: seq is a multiple of 128, so that all rows of a warp belong to the same sequence
// and every row has a query. D is 64 or 128, so that tiles hold whole heads. depth is a multiple of
// 8, and matrices are aligned to 16 bytes.
#include "exponent.cuh"
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills in Params.
struct Params {
  const float2 *normalizers;
  float *stats;
  int *counters;
  int rows, columns, depth, termDepth, seq;
  int section;  // see Schedule
};

#if defined(HOPPER)

constexpr int kColumns = 256, kStages = 4, kParts = kColumns / 64;
constexpr int kCounted = 64;  // rows per counter

using Shared = Memory<kColumns, kStages, 2 * kPanel>;

template <typename T, int D> struct WithStatistics : RoundedSums<T, kColumns> {
  using Sums = RoundedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int kSlots = 2 * kParts, kHeadParts = D / 64;
  const Params &p;
  const TensorMap &g, &y;
  uint32_t panels, arrived;
  float2 normalizer;
  float products[2];  // Σ g·y over the lane's columns, for its two rows

  __device__ WithStatistics(const Params &p, const TensorMap &g, const TensorMap &y, const Shared &m, int warp)
      : Sums(p.rows), p(p), g(g), y(y), panels(m.panels(warp)), arrived(m.barriers(warp)), normalizer{0, 0}, products{0, 0} {
    copy(0, row, column);
  }

  __device__ void copy(int part, int row, int column) { bringPart(y, panels, arrived, part, row, column); }

  __device__ void finish(int slot, int nextRow, int nextColumn, bool more) {
    const int part = slot / 2, second = slot % 2, head = part / kHeadParts;
    const uint32_t panel = panels + part % 2 * kPanel;
    if (second == 0) {
      if (part + 1 < kParts)
        copy(part + 1, row, column);
      else if (more)
        copy(0, nextRow, nextColumn);
      if (part % kHeadParts == 0) begin(head);
      barrierWait(arrived + part % 2 * 8, part / 2 % 2);
    }
#pragma unroll
    for (int n = 4 * second; n < 4 * second + 4; n += 2) form(8 * part + n, chunkOf<64>(panel) ^ n * 16);
    if (second) {
      store(g, panel, column + 64 * part, row, 0);
      if (part % kHeadParts == kHeadParts - 1) end(head);
    }
  }

  // Multiplies the sums of the 16 columns from column 8n on by y, which is at `at`, and replaces y
  // with them.
  __device__ void form(int n, uint32_t at) {
    uint32_t w[2][2];
    loadMatrices(w, at);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 a = unpack(v[n + i][r], T()), b = unpack(w[i][r], T());
        products[r] = fmaf(a.x, b.x, fmaf(a.y, b.y, products[r]));
      }
    storeMatrices(at, v[n], v[n + 1]);
  }

  // Place identifies the warp's rows of one of the tile's heads: the index of the head among those
  // of all sequences, or -1 if it does not exist, and the position of the first row.
  struct Place {
    int head, position;
  };
  __device__ Place placeOf(int head) const {
    const int heads = p.columns / D, batch = unsigned(row) / unsigned(p.seq);
    head += column / D;
    return {row < p.rows && head < heads ? batch * heads + head : -1, row - batch * p.seq};
  }

  // Four lanes share a row and the row 8 below it. Two of these lanes store Σ g·y, one per row, and
  // the other two store h and ρ.
  static __device__ int myRow() { return threadIdx.x % 32 / 4 + threadIdx.x % 2 * 8; }
  static __device__ bool hasExponent() { return threadIdx.x & 2; }

  __device__ void begin(int head) {
    products[0] = products[1] = 0;
    const auto [of, position] = placeOf(head);
    if (of >= 0 && hasExponent())  // in flight until the head is done
      normalizer = __ldg(p.normalizers + int64_t(of) * p.seq + position + myRow());
  }

  __device__ void end(int head) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      products[r] += __shfl_xor_sync(kAllLanes, products[r], 1);
      products[r] += __shfl_xor_sync(kAllLanes, products[r], 2);
    }
    const auto [of, position] = placeOf(head);
    if (of < 0) return;
    float *stats = p.stats + int64_t(3 * of) * p.seq + position + myRow();
    if (hasExponent()) {
      const attention::Exponent e(normalizer);
      stats[0] = e.h;
      stats[2 * p.seq] = e.rho;
    } else {
      stats[p.seq] = threadIdx.x % 2 ? products[1] : products[0];
    }
    if (threadIdx.x % 32) return;
    const int tiles = p.seq / kCounted;
    if (position % kCounted == 0) p.counters[int64_t(of) * tiles + position / kCounted] = 0;
    if (of == 0 && position == 0) p.counters[int64_t(p.rows / p.seq * (p.columns / D)) * tiles] = 0;
  }
};

template <typename T, int D>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &g, const TensorMap &y,
                           const TensorMap &u, const TensorMap &b) {
  static_assert(kColumns % D == 0 && D % 64 == 0, "heads lie within tiles, and parts within heads");
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<T, 1>(m, Schedule<kColumns>(p.rows, p.columns, p.section), p.depth, x, Right<1>{w}, Term<Right<1>>{u, {b}, p.termDepth},
                 [&](int warp) { return WithStatistics<T, D>(p, g, y, m, warp); });
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Memory.
#define KERNEL(D, T)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                        \
      gemm_hopper_stats_##D##_##T(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,               \
                                  const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap g,                  \
                                  const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap u,                  \
                                  const __grid_constant__ TensorMap b) {                                                     \
    BODY(run<T, D>(p, x, w, g, y, u, b));                                                                                     \
  }
#define DEFINE(T) KERNEL(64, T) KERNEL(128, T)
DEFINE(bf16)
DEFINE(f16)
