// What Muon does beside matrix products, for all its matrices in one launch each:
//
//   m ← m + (1−μ)·(g − m),   u = g + μ·(m − g) (Nesterov), or u = m,   direction = u / (‖u‖ + 1e-7)
//   p ← (1 − lr·decay)·p − lr·shapeScale·result
//
// (Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.) Between the two, matrix products turn each
// direction into its result. μ is the tensor's beta1. The gradient is multiplied by the control block's multiplier.
#include "optim.cuh"

// Counts the step and works out what follows from it for each tensor. Launch: a thread a tensor.
extern "C" __global__ void __launch_bounds__(kThreads)
    muon_begin(const Control* control, Update* updates, Tensor* tensors, int count) {
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count || control->skipped) return;
  Tensor& t = tensors[i];
  double lr = control->lr * t.lrScale;
  t.step++;
  updates[i] = {float(1 - lr * t.decay), float(lr * t.shapeScale), 1.0f, float(1 - t.beta1), 0.0f, 0.0f};
}

__device__ __forceinline__ float direction(float m, float g, float mu, int nesterov) {
  return nesterov ? g + mu * (m - g) : m;
}

// m, and squares[chunk] = Σ u². Launch: a block a chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    muon_momentum(float* squares, const Control* control, const Update* updates, const Tensor* tensors,
                  const Chunk* chunks, int nesterov) {
  if (control->skipped) return;
  Chunk c = chunks[blockIdx.x];
  const Tensor t = tensorOf(tensors, c.tensor);
  float gain = updates[c.tensor].gain1, mu = t.beta1, multiplier = multiplierOf(control, t), sum = 0;
  auto update = [&](float& m, float g) {
    g *= multiplier;
    m += gain * (g - m);
    float u = direction(m, g, mu, nesterov);
    sum += u * u;
  };
  struct Two {
    Pack<float, 4> m, g;
  };
  forChunk<2>(
      t.size, c.index, [&](int64_t i) { return Two{load<4>(t.first + i), loadAs(t.grad, t.gradType, i)}; },
      [&](int64_t i, Two v) {
#pragma unroll
        for (int j = 0; j < 4; j++) update(v.m.v[j], v.g.v[j]);
        store(t.first + i, v.m);
      },
      [&](int64_t i) { update(t.first[i], loadOneAs(t.grad, t.gradType, i)); });
  sum = blockReduce<Sum>(sum);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// direction, formed again from m and g, times inverse = 1/(‖u‖ + 1e-7). Launch: a block a chunk; each adds up its tensor's
// squares, in one order.
extern "C" __global__ void __launch_bounds__(kThreads)
    muon_direction(const float* squares, const Control* control, const Tensor* tensors, const Chunk* chunks, int nesterov) {
  if (control->skipped) return;
  Chunk c = chunks[blockIdx.x];
  const Tensor t = tensorOf(tensors, c.tensor);
  float sum = 0;
  for (int i = threadIdx.x; i < t.chunks; i += kThreads) sum += squares[t.firstChunk + i];
  float inverse = 1.0f / (sqrtf(blockReduce<Sum>(sum)) + 1e-7f);
  float mu = t.beta1, multiplier = multiplierOf(control, t);
  struct Two {
    Pack<float, 4> m, g;
  };
  forChunk<2>(
      t.size, c.index, [&](int64_t i) { return Two{load<4>(t.first + i), loadAs(t.grad, t.gradType, i)}; },
      [&](int64_t i, Two v) {
#pragma unroll
        for (int j = 0; j < 4; j++) v.m.v[j] = inverse * direction(v.m.v[j], multiplier * v.g.v[j], mu, nesterov);
        storeAs(t.direction, t.directionType, i, v.m);
      },
      [&](int64_t i) {
        float u = direction(t.first[i], multiplier * loadOneAs(t.grad, t.gradType, i), mu, nesterov);
        storeOneAs(t.direction, t.directionType, i, inverse * u);
      });
}

// p and its copy. Launch: a block a chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    muon_apply(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  if (control->skipped) return;
  Chunk c = chunks[blockIdx.x];
  const Tensor t = tensorOf(tensors, c.tensor);
  const Update u = updates[c.tensor];
  struct Two {
    Pack<float, 4> p, o;
  };
  forChunk<2>(
      t.size, c.index, [&](int64_t i) { return Two{load<4>(t.param + i), loadAs(t.result, t.directionType, i)}; },
      [&](int64_t i, Two v) {
#pragma unroll
        for (int j = 0; j < 4; j++) v.p.v[j] = u.keep * v.p.v[j] - u.rate * v.o.v[j];
        store(t.param + i, v.p);
        if (t.copy) storeAs(t.copy, t.copyType, i, v.p);
      },
      [&](int64_t i) {
        float p = t.param[i] = u.keep * t.param[i] - u.rate * loadOneAs(t.result, t.directionType, i);
        if (t.copy) storeOneAs(t.copy, t.copyType, i, p);
      });
}
