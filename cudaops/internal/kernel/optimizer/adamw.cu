// AdamW over all parameters in one launch.
//
//   m ← β1·m + (1−β1)·g,   v ← β2·v + (1−β2)·g²
//   p ← (1 − lr·decay)·p − lr/(1−β1ᵗ) · m / (sqrt(v)/sqrt(1−β2ᵗ) + ε)
//
// (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; the order of operations is
// PyTorch's.) Parameters and moments are float32. The same pass writes a narrower copy of the parameter,
// and multiplies the gradient by the control block's multiplier, which clips it.
//
// The gradient is limited to ±2⁶³, the largest power of two for which float32 holds the square with
// room to spare. The second moment then stays finite and can decay. Without the limit a single
// gradient of 10²⁰ could make it infinite for good, and the parameter would never move again.
#include "optim.cuh"

constexpr float kLargestGradient = 0x1p63f;

// Counts the step and computes each tensor's constants, in float64 since 1 − β2ᵗ loses its digits otherwise.
// Launch: a thread per tensor.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw_begin(const Control* control, Update* updates, Tensor* tensors, int count) {
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count || control->skipped) return;
  Tensor& t = tensors[i];
  double lr = control->lr * t.lrScale, step = ++t.step;
  updates[i] = {float(1 - lr * t.decay), float(lr / (1 - pow(t.beta1, step))), float(sqrt(1 - pow(t.beta2, step))),
                float(1 - t.beta1), float(t.beta2), float(1 - t.beta2)};
}

// Step is a tensor and its constants for a step. The gradient is one contribution or the sum of two.
template <bool kTwo> struct Step {
  Tensor t;
  Update u;
  float multiplier, eps;

  __device__ __forceinline__ Step(const Control* control, const Update* updates, const Tensor* tensors, int tensor)
      : t(tensorOf(tensors, tensor)), u(updates[tensor]), multiplier(multiplierOf(control, t)), eps(control->eps) {}

  // Intrinsics determine which products are rounded before they are added, so that every compiler
  // produces bit-identical results. Square root and division are correctly rounded already; __fsqrt_rn and
  // __fdiv_rn would slow AdamW down by 0.7%.
  __device__ __forceinline__ void update(float& p, float g, float& m, float& v) const {
    g = __fmul_rn(g, multiplier);
    if (fabsf(g) > kLargestGradient) g = copysignf(kLargestGradient, g);  // NaN stays
    m = __fmaf_rn(u.gain1, g - m, m);
    v = __fmaf_rn(__fmul_rn(u.gain2, g), g, __fmul_rn(u.beta2, v));
    p = __fsub_rn(__fmul_rn(u.keep, p), __fmul_rn(u.rate, m) / (sqrtf(v) / u.root + eps));
  }

  // Updates an element of a ragged end.
  __device__ __forceinline__ void one(int64_t i) const {
    const float g = Contributions<kTwo>::one(t, i);
    update(t.param[i], g, t.moment(0)[i], t.moment(1)[i]);
    if (t.copy) storeOneAs(t.copy, t.copyType, i, t.param[i]);
  }

  // Four elements: load, then finish.
  struct Four {
    Pack<float, 4> p, m, v;
    Contributions<kTwo> g;
  };
  __device__ __forceinline__ Four load(int64_t i) const {
    return {::load<4>(t.param + i), ::load<4>(t.moment(0) + i), ::load<4>(t.moment(1) + i),
            Contributions<kTwo>::load(t, i)};
  }
  __device__ __forceinline__ void finish(int64_t i, Four& x) const {
    const Pack<float, 4> g = x.g.sum(t.gradType);
#pragma unroll
    for (int j = 0; j < kPerAccess; j++) update(x.p.v[j], g.v[j], x.m.v[j], x.v.v[j]);
    store(t.param + i, x.p);
    store(t.moment(0) + i, x.m);
    store(t.moment(1) + i, x.v);
    if (t.copy) storeAs(t.copy, t.copyType, i, x.p);
  }
};

template <bool kTwo>
__device__ __forceinline__ void updateRound(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  if (control->skipped) return;
  Chunk c = chunks[blockIdx.x / kRounds];
  const Step<kTwo> step(control, updates, tensors, c.tensor);
  int64_t size = step.t.size, round = int64_t(c.index) * kRounds + blockIdx.x % kRounds;
  int64_t i = (round * kThreads + threadIdx.x) * kPerAccess;
  if (i + kPerAccess <= size) {
    auto x = step.load(i);
    step.finish(i, x);
  } else {
    for (; i < size; i++) step.one(i);
  }
}

// Launch: kRounds blocks per chunk, one for each of its rounds. Many small blocks, swept in order, move more
// bytes per second than fewer blocks that run longer.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  updateRound<false>(control, updates, tensors, chunks);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw_of_two(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  updateRound<true>(control, updates, tensors, chunks);
}
