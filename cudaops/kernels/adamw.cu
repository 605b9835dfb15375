// AdamW over all parameters in one launch.
//
//   m ← β1·m + (1−β1)·g,   v ← β2·v + (1−β2)·g²
//   p ← (1 − lr·decay)·p − lr/(1−β1ᵗ) · m / (sqrt(v)/sqrt(1−β2ᵗ) + ε)
//
// (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; the order of operations is PyTorch's.) Parameters
// and moments are float32; a narrower copy of the parameter is written in the same pass. The gradient is multiplied by the
// control block's multiplier, which clips it, on its way.
#include "optim.cuh"

// Counts the step and works out what follows from it for each tensor, in float64: 1 − β2ᵗ loses its digits otherwise.
// Launch: a thread a tensor.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw_begin(const Control* control, Update* updates, Tensor* tensors, int count) {
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count || control->skipped) return;
  Tensor& t = tensors[i];
  double lr = control->lr * t.lrScale, step = ++t.step;
  updates[i] = {float(1 - lr * t.decay), float(lr / (1 - pow(t.beta1, step))), float(sqrt(1 - pow(t.beta2, step))),
                float(1 - t.beta1), float(t.beta2), float(1 - t.beta2)};
}

// Launch: kRounds blocks a chunk, one for each of its rounds: many small blocks, swept in order, move more than fewer that go on
// for longer.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  Chunk c = chunks[blockIdx.x / kRounds];
  if (control->skipped) return;
  const Tensor t = tensorOf(tensors, c.tensor);
  const Update u = updates[c.tensor];
  float multiplier = control->multiplier, eps = control->eps;
  float *param = t.param, *first = t.first, *second = t.second;
  const void* grad = t.grad;
  void* copy = t.copy;
  int gradType = t.gradType, copyType = t.copyType;
  int64_t size = t.size, round = int64_t(c.index) * kRounds + blockIdx.x % kRounds;
  int64_t i = (round * kThreads + threadIdx.x) * kPerAccess;

  auto update = [&](float& p, float g, float& m, float& v) {
    g *= multiplier;
    m += u.gain1 * (g - m);
    v = u.beta2 * v + u.gain2 * g * g;
    p = u.keep * p - u.rate * m / (sqrtf(v) / u.root + eps);
  };
  if (i + kPerAccess <= size) {
    auto p = load<4>(param + i), g = loadAs(grad, gradType, i), m = load<4>(first + i), v = load<4>(second + i);
#pragma unroll
    for (int j = 0; j < kPerAccess; j++) update(p.v[j], g.v[j], m.v[j], v.v[j]);
    store(param + i, p);
    store(first + i, m);
    store(second + i, v);
    if (copy) storeAs(copy, copyType, i, p);
    return;
  }
  for (; i < size; i++) {
    update(param[i], loadOneAs(grad, gradType, i), first[i], second[i]);
    if (copy) storeOneAs(copy, copyType, i, param[i]);
  }
}
