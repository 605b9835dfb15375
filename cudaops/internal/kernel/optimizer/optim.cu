// The norm of all gradients, and the resulting control block of a step.
//
//   norm = gradScale/S·sqrt(Σ g²),   multiplier = gradScale/S·min(1, maxNorm/(norm + 1e-6))
//
// Gradients that are clipped separately have their own norm and multiplier.
//
// A chunk's sum of squares is a float. If it overflows although the gradients are finite, the negative root
// of the sum takes its place. The sum over all chunks is a double.
//
// S is the loss scale. A step with a gradient that is not finite halves it, down to 1. 2000 steps
// without such a gradient double it. (Micikevicius et al., "Mixed Precision Training", 2018; the
// constants match PyTorch's GradScaler.) It is a power of two, so that scaling rounds nothing.
//
// Everything that changes between steps is in device memory, so that a step can be replayed as a graph.
#include "optim.cuh"

// Returns the root of a chunk's sum of squares. Gradients are divided by the largest one, so that no square
// overflows. The root is not finite if a gradient is not, or if the root itself overflows.
template <bool kTwo>
__device__ __noinline__ float scaledNorm(const Tensor& t, int index) {
  float largest = 0, sum = 0;
  auto forGradients = [&](auto f) {
    forChunk<1>(
        t.size, index, [&](int64_t i) { return Contributions<kTwo>::load(t, i).sum(t.gradType); },
        [&](int64_t, Pack<float, 4> g) {
#pragma unroll
          for (int j = 0; j < 4; j++) f(g.v[j]);
        },
        [&](int64_t i) { f(Contributions<kTwo>::one(t, i)); });
  };
  forGradients([&](float g) { largest = fmaxf(largest, fabsf(g)); });
  largest = blockReduce<Max>(largest);
  if (isinf(largest)) return largest;

  forGradients([&](float g) { sum = __fmaf_rn(g / largest, g / largest, sum); });
  return largest * sqrtf(blockReduce<Sum>(sum));
}

// squares[chunk] = Σ g², of gradients that are one contribution, or the sum of two.
template <bool kTwo>
__device__ __forceinline__ void squaresOf(float* squares, const Tensor* tensors, const Chunk* chunks) {
  Chunk c = chunks[blockIdx.x];
  const Tensor t = tensorOf(tensors, c.tensor);
  float sum = 0;
  forChunk<kTwo ? 4 : 8>(
      t.size, c.index, [&](int64_t i) { return Contributions<kTwo>::load(t, i).sum(t.gradType); },
      [&](int64_t, Pack<float, 4> g) {
#pragma unroll
        for (int j = 0; j < 4; j++) sum = __fmaf_rn(g.v[j], g.v[j], sum);
      },
      [&](int64_t i) {
        float g = Contributions<kTwo>::one(t, i);
        sum = __fmaf_rn(g, g, sum);
      });
  sum = blockReduce<Sum>(sum);
  if (isinf(sum)) sum = -scaledNorm<kTwo>(t, c.index);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// Launch: one block per chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    optim_squares(float* squares, const Tensor* tensors, const Chunk* chunks) {
  squaresOf<false>(squares, tensors, chunks);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    optim_squares_of_two(float* squares, const Tensor* tensors, const Chunk* chunks) {
  squaresOf<true>(squares, tensors, chunks);
}

constexpr int kGrowthInterval = 2000;

__device__ LossScale after(LossScale s, bool skipped) {
  if (skipped) return {fmaxf(1.0f, s.scale / 2), 0, s.skipped + 1};
  if (++s.good < kGrowthInterval) return s;
  return {isinf(2 * s.scale) ? s.scale : 2 * s.scale, 0, s.skipped};
}

// Adds up one number from each of 1024 threads. Only the first thread gets the sum.
__device__ double sumOfBlock(double sum) {
  __shared__ double partial[kWarp];
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0;
  if (threadIdx.x == 0) for (int i = 0; i < kWarp; i++) sum += partial[i];
  return sum;
}

// Returns a chunk's sum of squares, which may be stored as its negative root.
__device__ double squareOf(float x) { return x < 0 ? double(x) * x : x; }

__device__ double clipped(double maxNorm, double norm) {
  return maxNorm > 0 && norm == norm ? fmin(1.0, maxNorm / (norm + 1e-6)) : 1;  // NaN stays visible
}

// Completes the control block and updates the loss scale. scaling is null if the loss is not
// scaled. apart has a flag for each of the squares, set for gradients that are clipped separately,
// or is null if all are clipped together. Without squares the norm is 0. If a step is skipped, the
// norm is the sum of both norms. Launch: one block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
    optim_control(Control* control, const float* squares, int count, LossScale* scaling, const unsigned char* apart) {
  double sum = 0, other = 0;
  if (apart) {
    for (int i = threadIdx.x; i < count; i += 1024) (apart[i] ? other : sum) += squareOf(squares[i]);
    other = sumOfBlock(other);
  } else {
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += 1024) sum += squareOf(squares[i]);
  }
  sum = sumOfBlock(sum);
  if (threadIdx.x != 0) return;
  double scale = control->gradScale / (scaling ? scaling->scale : 1.0f), norm = sqrt(sum) * scale, own = sqrt(other) * scale;
  control->skipped = !(fabsf(float(norm)) < INFINITY && fabsf(float(own)) < INFINITY);
  control->norm = control->skipped ? norm + own : norm;
  control->multiplier = scale * clipped(control->maxNorm, norm);
  control->apart = scale * clipped(control->maxNorm, own);
  if (scaling) control->next = *scaling = after(*scaling, control->skipped);
}
