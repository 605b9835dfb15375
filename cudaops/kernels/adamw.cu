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

// Launch: a block a chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  if (control->skipped) return;
  Chunk c = chunks[blockIdx.x];
  const Tensor t = tensors[c.tensor];
  const Update u = updates[c.tensor];
  float multiplier = control->multiplier, eps = control->eps;
  auto update = [&](float& p, float g, float& m, float& v) {
    g *= multiplier;
    m += u.gain1 * (g - m);
    v = u.beta2 * v + u.gain2 * g * g;
    p = u.keep * p - u.rate * m / (sqrtf(v) / u.root + eps);
  };
  struct Four {
    Pack<float, 4> p, g, m, v;
  };
  forChunk<2>(
      t.size, c.index,
      [&](int64_t i) {
        return Four{load<4>(t.param + i), loadAs(t.grad, t.gradType, i), load<4>(t.first + i), load<4>(t.second + i)};
      },
      [&](int64_t i, Four f) {
#pragma unroll
        for (int j = 0; j < 4; j++) update(f.p.v[j], f.g.v[j], f.m.v[j], f.v.v[j]);
        store(t.param + i, f.p);
        store(t.first + i, f.m);
        store(t.second + i, f.v);
        if (t.copy) storeAs(t.copy, t.copyType, i, f.p);
      },
      [&](int64_t i) {
        update(t.param[i], loadOneAs(t.grad, t.gradType, i), t.first[i], t.second[i]);
        if (t.copy) storeOneAs(t.copy, t.copyType, i, t.param[i]);
      });
}
