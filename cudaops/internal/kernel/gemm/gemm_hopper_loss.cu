// A language model's output layer and its cross-entropy for bf16 on Hopper (sm_90a), with a softmax
// that needs no pass over the logits:
//
//   e[r, i] = exp(x[r]·w[i] − c[r]),  c[r] = x[r]·w[target],  Z[r] = Σ_i e[r, i]
//   loss[r] = log Z[r],  d loss[r] / d logits[r, i] = e[r, i]/Z[r] − [i = target]
//
// x is [rows, depth], w [columns, depth] and e [rows, columns]. The target's own term is 1, so Z is
// at least 1.
//
// Terms are computed as 2^(x·w·log₂e − c·log₂e), with c·log₂e rounded. For large c this scales all
// terms of a row, including the target's, by the same factor, called unit below. It cancels in e/Z,
// and the loss is log(Z/unit). Since bf16 has float32's exponents, terms overflow only if a loss
// exceeds 80, and no maximum is needed.
//
// gemm_hopper.cuh describes how a block copies and multiplies. The sums of a tile, minus c and
// times log₂e, stay in the multiplying threads' registers, rounded to f16, while the products of
// the next tile run. kParts times during its steps, a thread exponentiates 32 columns, adds them
// up, and stores them. f16 has three more bits than bf16 logits would have; values beyond its range
// become terms of 0 or infinity anyway.
//
// A kernel before the product computes c. Another kernel after it adds up Z and prepares e for the
// products of the gradients,
//
//   dx[r] = f[r]·(e'·w)[r],  dw = e'ᵀ·(f ⊙ x),  e'[r, i] = e[r, i] − Z[r]·[i = target],  f[r] = scale/Z[r]
//
// If the loss of a row is too large for this, that kernel recomputes the row as a softmax with a
// maximum.
//
// Requirements: columns and depth are multiples of 8, and x, w and e are aligned to 16 bytes.
#include "exp2.cuh"
#include "gemm_hopper.cuh"
#include "rows.cuh"

namespace gemm {

// The launcher fills in Params.
struct Params {
  const float *shift;  // c
  float *sums;         // row sums of the terms in each tile: [tiles of columns, rows]
  int rows, columns, depth;
  int section;         // see Schedule
};

// Loss holds the parameters of the other kernels; their launchers fill it in.
struct Loss {
  const bf16 *x, *w;
  const int64_t *targets;
  float *shift;
  bf16 *terms;
  const float *sums;
  float *losses, *factors;    // f
  bf16 *scaled;               // f ⊙ x
  const float *scale, *grad;  // scale is scale[0]·grad[0]; grad may be null
  int rows, columns, depth;
};

constexpr int kLossWarps = 8;

#if defined(HOPPER)

constexpr int kLossRows = 32;  // per block

constexpr int kColumns = 256, kStages = 4, kParts = 8, kPartColumns = kColumns / kParts;

using Shared = Memory<kColumns, kStages, kPanel>;  // a panel holds two parts

// Exponents holds the base-2 exponents of a warp's 16 rows of a tile.
struct Exponents : RoundedSums<f16, kColumns> {
  static constexpr int kSlots = kParts;
  const Params &p;
  const TensorMap &terms;
  uint32_t panel;
  float sum[2], shift[2];  // of both rows

  __device__ Exponents(const Params &p, const TensorMap &terms, uint32_t panel)
      : RoundedSums(p.rows), p(p), terms(terms), panel(panel), sum{0, 0} {}

  // Takes a tile's sums, times log₂e and plus the rows' shifts. Columns outside the matrix get
  // terms of 0.
  __device__ void take(const Accumulator<1, kColumns> &sums, int row, int column) {
    constexpr uint32_t kNone = 0xfc00fc00;  // a pair of -inf
    this->row = row;
    this->column = column;
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++) {
      const float(&c)[4] = sums.c[0][n];
      v[n][0] = pack(fmaf(c[0], kLog2e, shift[0]), fmaf(c[1], kLog2e, shift[0]), f16());
      v[n][1] = pack(fmaf(c[2], kLog2e, shift[1]), fmaf(c[3], kLog2e, shift[1]), f16());
    }
    if (column + kColumns > p.columns)
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++)
        if (column + 8 * n >= p.columns) v[n][0] = v[n][1] = kNone;
  }

  // Computes the terms of one part. After every second part, makes the copy engine store the warp's
  // panel of 64 columns.
  __device__ void finish(int part, int nextRow, int, bool more) {
    if (part % 2 == 0) storesRead<0>();
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      uint32_t e[2][2];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 x = __half22float2(*(const __half2 *)&v[4 * part + n + i / 2][i % 2]);
        const float a = exp2Approx(x.x), b = exp2Approx(x.y);
        sum[i % 2] += a + b;
        e[i / 2][i % 2] = pack(a, b, bf16());
      }
      storeMatrices(chunkOf<64>(panel) ^ (part % 2 * 4 + n) * 16, e[0], e[1]);
    }
    if (part % 2) store(terms, panel, column + kPartColumns * (part - 1), row, 0);
    if (part < kParts - 1) return;
    storeSums();
    if (more)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = nextRow + threadIdx.x % 32 / 4 + 8 * half;
        shift[half] = r < p.rows ? -__fmul_rn(kLog2e, p.shift[r]) : 0.0f;
      }
  }

  __device__ void storeSums() const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float s = sum[half] + __shfl_xor_sync(kAllLanes, sum[half], 1);
      s += __shfl_xor_sync(kAllLanes, s, 2);
      const int r = row + threadIdx.x % 32 / 4 + 8 * half;
      if (threadIdx.x % 4 == 0 && r < p.rows) p.sums[(int64_t)(column / kColumns) * p.rows + r] = s;
    }
  }
};

__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &terms) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<bf16, 0>(m, Schedule<kColumns>(p.rows, p.columns, p.section), p.depth, x, Right<0>{w}, NoTerm{},
                    [&](int warp) { return Exponents(p, terms, m.panels(warp)); });
}

// ---- Before and after the product ----

// logitOf returns x[row]·w[column], computed by a warp.
__device__ inline float logitOf(const Loss &p, int row, int column) {
  const bf16 *x = p.x + (int64_t)row * p.depth, *w = p.w + (int64_t)column * p.depth;
  float sum = 0;
#pragma unroll 4
  for (int k = threadIdx.x % kWarp * 8; k < p.depth; k += kWarp * 8) {
    const auto a = load<8>(x + k), b = load<8>(w + k);
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(a.get(j), b.get(j), sum);
  }
  return warpReduce<Sum>(sum);
}

// scaleRow computes y = f·x with a warp; if f is 0, so is y.
__device__ inline void scaleRow(bf16 *y, const bf16 *x, float f, int depth) {
  for (int k = threadIdx.x % kWarp * 8; k < depth; k += kWarp * 8) {
    auto v = load<8>(x + k);
#pragma unroll
    for (int j = 0; j < 8; j++) v.set(j, f == 0 ? 0.0f : f * v.get(j));
    store(y + k, v);
  }
}

// unitExponent returns the base-2 exponent of a row's target term, which is the rounding error of
// c·log₂e. Like all exponents it is rounded to f16.
__device__ inline float unitExponent(float c) { return __half2float(__float2half_rn(fmaf(c, kLog2e, -__fmul_rn(kLog2e, c)))); }

// shift computes c. For a row without a target, the shift makes all terms 0.
__device__ inline void shift(const Loss &p) {
  const int row = blockIdx.x * kLossWarps + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const int64_t target = p.targets[row];
  float c = target < 0 ? INFINITY : NAN;
  if (target >= 0 && target < p.columns) c = logitOf(p, row, target);
  if (threadIdx.x % kWarp == 0) p.shift[row] = c;
}

// again recomputes a row with a block, and returns the row's factor.
__device__ inline float again(const Loss &p, int row, float scale) {
  constexpr int kTogether = 4;
  const int64_t target = p.targets[row];
  bf16 *terms = p.terms + (int64_t)row * p.columns;
  if (target < 0) {
    for (int i = threadIdx.x; i < p.columns; i += blockDim.x) terms[i] = 0.0f;
    return 0;
  }
  auto forLogits = [&](auto f) {
    for (int i = threadIdx.x / kWarp * kTogether; i < p.columns; i += kLossWarps * kTogether) {  // columns is a multiple of kTogether
      float logits[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; j++) logits[j] = logitOf(p, row, i + j);
      if (threadIdx.x % kWarp == 0)
#pragma unroll
        for (int j = 0; j < kTogether; j++) f(i + j, logits[j]);
    }
  };
  RowSum<float> sum;
  forLogits([&](int, float logit) { sum.add(Pack<float, 1>{logit}); });
  sum.reduce();
  forLogits([&](int i, float logit) { terms[i] = expf(logit - sum.max) / sum.sum - (i == target ? 1.0f : 0.0f); });
  if (threadIdx.x == 0) p.losses[row] = sum.max - p.shift[row] + logf(sum.sum);
  return scale;
}

// finish processes kLossRows rows with a block.
__device__ inline void finish(const Loss &p) {
  constexpr float kMost = 1e26f;  // limit on Z, well below the overflow of terms
  __shared__ float parts[kLossWarps][kLossRows], factors[kLossRows];
  __shared__ unsigned hard;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, first = blockIdx.x * kLossRows, row = first + lane;
  const int tiles = (p.columns + kColumns - 1) / kColumns;
  const float scale = p.scale[0] * (p.grad ? p.grad[0] : 1.0f);
  float part = 0;
  if (row < p.rows)
#pragma unroll 8
    for (int tile = warp; tile < tiles; tile += kLossWarps) part += p.sums[(int64_t)tile * p.rows + row];
  parts[warp][lane] = part;
  __syncthreads();
  if (warp == 0) {
    float z = 0;
#pragma unroll
    for (int w = 0; w < kLossWarps; w++) z += parts[w][lane];
    bool repair = false;
    if (row < p.rows) {
      const int64_t target = p.targets[row];
      if (target < 0) {
        repair = !(z == 0);
        p.losses[row] = factors[lane] = 0;
      } else {
        const float c = p.shift[row], exponent = unitExponent(c), unit = exp2f(exponent);
        z = z < unit ? unit : z;
        repair = c == -INFINITY || (c - c == 0 && z > kMost);
        if (!(c - c == 0)) z = NAN;
        p.losses[row] = logf(z) - exponent / kLog2e;
        factors[lane] = scale / z;
        if (target < p.columns) p.terms[(int64_t)row * p.columns + target] = unit - z;
      }
    }
    const unsigned repairs = __ballot_sync(kAllLanes, repair);
    if (lane == 0) hard = repairs;
  }
  __syncthreads();
  for (unsigned rest = hard; rest; rest &= rest - 1) {
    const int r = __ffs(rest) - 1;
    const float f = again(p, first + r, scale);
    if (threadIdx.x == 0) factors[r] = f;
  }
  __syncthreads();
  for (int r = warp; r < min(kLossRows, p.rows - first); r += kLossWarps) {
    const float f = factors[r];
    if (lane == 0) p.factors[first + r] = f;
    scaleRow(p.scaled + (int64_t)(first + r) * p.depth, p.x + (int64_t)(first + r) * p.depth, f, p.depth);
  }
}

// x[r] = f[r]·x[r].
__device__ inline void scale(bf16 *x, const float *factors, int rows, int depth) {
  const int row = blockIdx.x * kLossWarps + threadIdx.x / kWarp;
  if (row < rows) scaleRow(x + (int64_t)row * depth, x + (int64_t)row * depth, factors[row], depth);
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, as many as run at once. Dynamic shared memory: see Shared.
extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_hopper_loss_bf16(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                          const __grid_constant__ TensorMap terms) {
  BODY(run(p, x, w, terms));
}

// Launch: one warp per row.
extern "C" __global__ void __launch_bounds__(gemm::kLossWarps *kWarp) gemm_hopper_loss_shift(const gemm::Loss p) { BODY(shift(p)); }

// Launch: one block for kLossRows rows.
extern "C" __global__ void __launch_bounds__(gemm::kLossWarps *kWarp) gemm_hopper_loss_finish(const gemm::Loss p) { BODY(finish(p)); }

// x[r] = f[r]·x[r]. Launch: one warp per row.
extern "C" __global__ void __launch_bounds__(gemm::kLossWarps *kWarp)
    gemm_hopper_loss_scale(bf16 *x, const float *factors, int rows, int depth) {
  BODY(scale(x, factors, rows, depth));
}
