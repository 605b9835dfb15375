// A language model's output layer with its cross-entropy on Hopper (sm_90a), for bf16: softmax without a pass over the logits.
//
//   e[r, i] = exp(x[r]·w[i] − c[r]),  c[r] = x[r]·w[target],  Z[r] = Σ_i e[r, i]
//   loss[r] = log Z[r],  d loss[r] / d logits[r, i] = e[r, i]/Z[r] − [i = target]
//
// with x [rows, depth], w [columns, depth] and e [rows, columns]. The target's own term is 1, so
// that Z is at least that. Terms are formed as 2^(x·w·log₂e − c·log₂e), where c·log₂e is rounded. For
// large c that makes all terms of a row, the target's too, the same factor larger or smaller, which
// is unit below. It cancels in e/Z, and the loss is log(Z/unit). Terms overflow only where a loss is above 80: bf16 has float32's
// exponents. A maximum is not needed.
//
// gemm_hopper.cuh says how a block copies and multiplies. The sums of a tile, less c and times
// log₂e, wait in the multipliers' own registers, rounded to f16. Meanwhile the products of the next
// tile run. kParts times in its steps a thread takes the exponentials of 32 columns, adds them up
// and brings them to memory. f16 has three bits more than logits in bf16 would, and all that it can
// not hold is 0 or infinite as a term.
//
// Before the product a kernel forms c, and behind it one adds up Z and has e ready for the products of the gradients,
//
//   dx[r] = f[r]·(e'·w)[r],  dw = e'ᵀ·(f ⊙ x),  e'[r, i] = e[r, i] − Z[r]·[i = target],  f[r] = scale/Z[r]
//
// where it finds a row whose loss is too large for that, and forms it again as softmax with a maximum.
//
// Needs: columns and depth multiples of 8, x, w and e at multiples of 16 bytes.
#include "exp2.cuh"
#include "gemm_hopper.cuh"
#include "rows.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  const float *shift;  // c
  float *sums;         // of the terms of a row in a tile: [tiles of columns, rows]
  int rows, columns, depth;
  int section;         // of Schedule
};

// What the other kernels work on; their launchers fill it.
struct Loss {
  const bf16 *x, *w;
  const int64_t *targets;
  float *shift;
  bf16 *terms;
  const float *sums;
  float *losses, *factors;    // f
  bf16 *scaled;               // f ⊙ x
  const float *scale, *grad;  // whose product is the scale; grad may be null
  int rows, columns, depth;
};

constexpr int kLossWarps = 8;

#if defined(HOPPER)

constexpr int kLossRows = 32;  // of a block

constexpr int kColumns = 256, kStages = 4, kParts = 8, kPartColumns = kColumns / kParts;

using Shared = Memory<kColumns, kStages, kPanel>;  // of two parts

// The exponents of a warp's 16 rows of a tile, to base 2.
struct Exponents : RoundedSums<f16, kColumns> {
  static constexpr int kSlots = kParts;
  const Params &p;
  const TensorMap &terms;
  uint32_t panel;
  float sum[2], shift[2];  // of both rows

  __device__ Exponents(const Params &p, const TensorMap &terms, uint32_t panel)
      : RoundedSums(p.rows), p(p), terms(terms), panel(panel), sum{0, 0} {}

  // Takes a tile's sums, times log₂e and plus the rows' shifts. The terms of columns that are not there are 0.
  __device__ void take(const Accumulator<1, kColumns> &sums, int row, int column) {
    constexpr uint32_t kNone = 0xfc00fc00;  // twice -inf
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

  // Forms the terms of some columns, and has the copy engine store what two parts have left in the warp's panel: 64 columns.
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
  multiply<bf16, 0>(m, Schedule<kColumns>(p.rows, p.columns, p.section), p.depth, x, Right<0>{w},
                    [&](int warp) { return Exponents(p, terms, m.panels(warp)); });
}

// ---- Before and behind the product ----

// x[row]·w[column], by a warp.
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

// y = f·x, by a warp; 0 where f is.
__device__ inline void scaleRow(bf16 *y, const bf16 *x, float f, int depth) {
  for (int k = threadIdx.x % kWarp * 8; k < depth; k += kWarp * 8) {
    auto v = load<8>(x + k);
#pragma unroll
    for (int j = 0; j < 8; j++) v.set(j, f == 0 ? 0.0f : f * v.get(j));
    store(y + k, v);
  }
}

// The exponent of the target's own term of a row, to base 2: what rounding takes from c·log₂e. It is rounded to f16 as all exponents
// are.
__device__ inline float unitExponent(float c) { return __half2float(__float2half_rn(fmaf(c, kLog2e, -__fmul_rn(kLog2e, c)))); }

// The shift of a row without target makes all its terms 0.
__device__ inline void shift(const Loss &p) {
  const int row = blockIdx.x * kLossWarps + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const int64_t target = p.targets[row];
  float c = target < 0 ? INFINITY : NAN;
  if (target >= 0 && target < p.columns) c = logitOf(p, row, target);
  if (threadIdx.x % kWarp == 0) p.shift[row] = c;
}

// Forms a row again, by a block; returns its factor.
__device__ inline float again(const Loss &p, int row, float scale) {
  constexpr int kTogether = 4;
  const int64_t target = p.targets[row];
  bf16 *terms = p.terms + (int64_t)row * p.columns;
  if (target < 0) {
    for (int i = threadIdx.x; i < p.columns; i += blockDim.x) terms[i] = 0.0f;
    return 0;
  }
  auto forLogits = [&](auto f) {
    for (int i = threadIdx.x / kWarp * kTogether; i < p.columns; i += kLossWarps * kTogether) {  // columns are a multiple of it
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

// kLossRows rows a block.
__device__ inline void finish(const Loss &p) {
  constexpr float kMost = 1e26f;  // of Z: far from where terms overflow
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

// Launch: a warp a row.
extern "C" __global__ void __launch_bounds__(gemm::kLossWarps *kWarp) gemm_hopper_loss_shift(const gemm::Loss p) { BODY(shift(p)); }

// Launch: a block for kLossRows rows.
extern "C" __global__ void __launch_bounds__(gemm::kLossWarps *kWarp) gemm_hopper_loss_finish(const gemm::Loss p) { BODY(finish(p)); }

// x[r] = f[r]·x[r]. Launch: a warp a row.
extern "C" __global__ void __launch_bounds__(gemm::kLossWarps *kWarp)
    gemm_hopper_loss_scale(bf16 *x, const float *factors, int rows, int depth) {
  BODY(scale(x, factors, rows, depth));
}
