// The norm of all gradients, and what follows from it for a step.
//
//   norm = gradScale·sqrt(Σ g²),   multiplier = gradScale·min(1, maxNorm/(norm + 1e-6))
//
// Everything that differs from step to step is in device memory, so that a step can be replayed as a graph.
#include "optim.cuh"

// squares[chunk] = Σ g². Launch: a block a chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    optim_squares(float* squares, const Tensor* tensors, const Chunk* chunks) {
  Chunk c = chunks[blockIdx.x];
  const Tensor& t = tensors[c.tensor];
  const void* grad = t.grad;
  int type = t.gradType;
  float sum = 0;
  forChunk<8>(
      t.size, c.index, [&](int64_t i) { return loadAs(grad, type, i); },
      [&](int64_t, Pack<float, 4> g) {
#pragma unroll
        for (int j = 0; j < 4; j++) sum += g.v[j] * g.v[j];
      },
      [&](int64_t i) {
        float g = loadOneAs(grad, type, i);
        sum += g * g;
      });
  sum = blockReduce<Sum>(sum);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// Fills in the control block's second part. Without squares the norm is 0. Launch: one block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) optim_control(Control* control, const float* squares, int count) {
  __shared__ double partial[kWarp];
  double sum = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += 1024) sum += squares[i];
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int i = 0; i < kWarp; i++) sum += partial[i];
  double norm = sqrt(sum) * control->gradScale, clip = 1;
  if (control->maxNorm > 0 && norm == norm) clip = fmin(1.0, control->maxNorm / (norm + 1e-6));  // NaN stays visible
  control->skipped = control->skipNonFinite && !(norm - norm == 0);
  control->norm = norm;
  control->multiplier = control->gradScale * clip;
}
