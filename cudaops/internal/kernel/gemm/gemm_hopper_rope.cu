// The product that computes an attention's queries, keys and values on Hopper (sm_90a), for bf16
// and f16, with RoPE applied to the queries and keys as in rope.cu:
//
//   s = x·weightsᵀ + u·bᵀ, rounded to T
//   y[i] = s[i]·cos − s[i+h]·sin,   y[i+h] = s[i+h]·cos + s[i]·sin
//
// The rotation applies to the pairs (i, i + h), h = D/2, of the heads in the columns before
// `turned`, where D is the head dimension; elsewhere y = s. x is [rows, depth], weights is [columns,
// depth], u is [rows, termDepth] and optional, b is [columns, termDepth], and y is [rows, columns].
// The position of a row is row mod seq. The results are bit-identical to those of a product that sums
// in the same order, followed by rope.cu.
//
// The table of angles holds the cosines of pairs i and i + 1 and then their sines, for even i. It
// is arranged by the eight positions and eight pairs that a warp reads at once: [⌈seq/8⌉, h/8, 8
// positions, 4, 4].
//
// gemm_hopper.cuh describes the structure. A thread rotates one part of the rounded sums at a time:
// some pairs of a head, in one of its two rows. It has both elements of each pair. It writes the
// part to a panel of its warp, and the copy engine stores all parts of a row together. There are
// registers for the angles of only one part. All heads of a tile need the same angles, so the parts
// that share them are consecutive, and a thread loads each angle once per tile, one part ahead.
//
// In float8, x and weights have a factor for each row. s is multiplied by the factors before the
// rotation, without being rounded again. This is limited to heads of 64 and 128.
//
// Requirements: a tile holds whole heads. turned is a multiple of D, columns and depth are
// multiples of 8, all arrays are aligned to 16 bytes, and seq·D is at most 2³⁰. In float8,
// columns and depth are multiples of 16, and depth exceeds 384.
#include "gemm_hopper.cuh"

namespace gemm {

// The launcher fills in Params.
struct Params {
  const float4 *angles;
  const float *rowFactors, *columnFactors;  // for float8
  int rows, columns, depth, termDepth, turned, seq;
  int section;  // see Schedule
};

#if defined(HOPPER)

constexpr int kPanelRows = 8, kRowsBytes = kPanelRows * 128;

template <int Columns> using Shared = Memory<Columns, Columns == 256 ? 4 : 5, Columns / 64 * kRowsBytes>;

// Turned rotates and stores a tile in parts of 8 rows of Pairs columns from the first half of a
// head, together with the columns they are paired with.
template <typename T, int D, int Columns, bool Scaled> struct Turned : RoundedSums<T, Columns> {
  using Sums = RoundedSums<T, Columns>;
  using Sums::v, Sums::row, Sums::column;
  static constexpr int Pairs = D % 64 ? D / 2 : 32, Chunks = Pairs / 8;
  static constexpr int Heads = Columns / D, RowParts = Columns / Pairs / 2, kSlots = 2 * RowParts;
  const Params &p;
  const TensorMap &y;
  uint32_t panels;
  float4 angles[Chunks];
  int at[2];  // index of the first angle of each of the lane's rows
  Factors<Shared<Columns>> factors;

  __device__ Turned(const Params &p, const TensorMap &y, const Shared<Columns> &m, int warp)
      : Sums(p.rows), p(p), y(y), panels(m.panels(warp)), at{0, 0}, factors{m, p.rowFactors, p.rows} {
    column = p.turned;  // so that nothing is rotated
  }

  // Loads the factors and the first angles of the tile at row and column.
  __device__ void expect(int row, int column) {
    if (Scaled) factors.next(row);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int position = unsigned(row + 8 * half + threadIdx.x % 32 / 4) % unsigned(p.seq);
      at[half] = position / 8 * (D * 2) + position % 8 * 4 + threadIdx.x % 4;
    }
    ask(0, column);
  }

  static __device__ constexpr int halfOf(int part) { return part / RowParts; }
  static __device__ constexpr int pairsOf(int part) { return part % RowParts / Heads * Pairs; }
  static __device__ constexpr int headOf(int part) { return part % Heads; }

  // Loads the angles of a part, unless the preceding part has the same angles.
  __device__ void ask(int part, int column) {
    if (headOf(part) > 0 || column >= p.turned) return;
    const float4 *from = p.angles + at[halfOf(part)];
#pragma unroll
    for (int n = 0; n < Chunks; n++) angles[n] = from[pairsOf(part) * 4 + 32 * n];
  }

  __device__ void finish(int part, int nextRow, int nextColumn, bool more) {
    const int lane = threadIdx.x % 32, half = halfOf(part), head = headOf(part);
    const int first = (head * D + pairsOf(part)) / 8, second = first + D / 16;
    if (part % RowParts == 0) storesRead<0>();
    uint32_t e[Chunks][2];  // in the order of columns
    auto word = [&](int n) -> uint32_t & { return e[n / 2][n % 2]; };
#pragma unroll
    for (int n = 0; n < Chunks; n++) {
      word(n) = v[first + n][half];
      word(Chunks + n) = v[second + n][half];
    }
    const bool turns = column + head * D < p.turned;
    if (Scaled || turns)
#pragma unroll
      for (int n = 0; n < Chunks; n++) {
        float2 a = unpack(word(n), T()), b = unpack(word(Chunks + n), T());
        if (Scaled) {
          a = factors.times(a, half, first + n);
          b = factors.times(b, half, second + n);
        }
        if (turns) {
          const auto [cos0, cos1, sin0, sin1] = angles[n];
          const float2 c = a;
          a = {fmaf(c.x, cos0, -(b.x * sin0)), fmaf(c.y, cos1, -(b.y * sin1))};
          b = {fmaf(b.x, cos0, c.x * sin0), fmaf(b.y, cos1, c.y * sin1)};
        }
        word(n) = pack(a.x, a.y, T());
        word(Chunks + n) = pack(b.x, b.y, T());
      }
#pragma unroll
    for (int n = 0; n < 2 * Chunks; n += 4) {
      const int mine = n + lane / 8, chunk = mine < Chunks ? first + mine : second + mine - Chunks, r = lane % 8;
      storeMatrices(panels + chunk / 8 * kRowsBytes + r * 128 + (chunk % 8 ^ r) * 16, e[n / 2], e[n / 2 + 1]);
    }
    if (part % RowParts == RowParts - 1) {
      fenceAsync();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < Columns / 64; i++) storeBox(y, panels + i * kRowsBytes, column + 64 * i, row + 8 * half, 0);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    if (part < kSlots - 1)
      ask(part + 1, column);
    else if (more)
      expect(nextRow, nextColumn);
  }
};

template <typename T, int D, int Columns>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &weights, const TensorMap &y, const TensorMap &u,
                           const TensorMap &b) {
  static_assert(Columns % D == 0, "heads lie within tiles");
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared<Columns> m(sharedAddress(shared));
  multiply<T, 0>(m, Schedule<Columns>(p.rows, p.columns, p.section), p.depth, x, Right<0>{weights}, Term<Right<0>>{u, {b}, p.termDepth},
                 [&](int warp) { return Turned<T, D, Columns, false>(p, y, m, warp); });
}

// For float8, where depth counts pairs of elements.
template <typename T, int D>
__device__ inline void runScaled(const Params &p, const TensorMap &x, const TensorMap &weights, const TensorMap &y, const TensorMap &,
                                 const TensorMap &) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared<256> m(sharedAddress(shared));
  multiply<f8x2, 0>(m, Schedule<256>(p.rows, p.columns, p.section), p.depth, x, ScaledRight{weights, p.columnFactors, p.columns, p.depth}, NoTerm{},
                    [&](int warp) { return Turned<T, D, 256, true>(p, y, m, warp); });
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Memory.
#define KERNEL(name, ...)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                      \
      name(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,                                     \
           const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap y,                                  \
           const __grid_constant__ TensorMap u, const __grid_constant__ TensorMap b) {                                      \
    BODY(__VA_ARGS__(p, x, weights, y, u, b));                                                                              \
  }
#define DEFINE(T)                                        \
  KERNEL(gemm_hopper_rope_64_##T, run<T, 64, 256>)       \
  KERNEL(gemm_hopper_rope_96_##T, run<T, 96, 192>)       \
  KERNEL(gemm_hopper_rope_128_##T, run<T, 128, 256>)
DEFINE(bf16)
DEFINE(f16)
KERNEL(gemm_hopper_rope_f8_64_bf16, runScaled<bf16, 64>)
KERNEL(gemm_hopper_rope_f8_128_bf16, runScaled<bf16, 128>)
