// Lion over all parameters in one launch.
//
//   c = β1·m + (1−β1)·g
//   p ← (1 − lr·decay)·p − lr·sign(c)
//   m ← β2·m + (1−β2)·g
//
// (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.) Parameters and moments are
// float32. The same pass writes a narrower copy of the parameter, and multiplies the gradient by
// the control block's multiplier, which clips it.
//
// The gradient is limited to ±2¹²⁶, so that m stays finite. Products are rounded before they are
// added, as on the CPU, so that both compute the same signs.
#include "optim.cuh"

constexpr float kLargestGradient = 0x1p126f;

// Counts the step and computes each tensor's constants. Launch: a thread per tensor.
extern "C" __global__ void __launch_bounds__(kThreads)
    lion_begin(const Control* control, Update* updates, Tensor* tensors, int count) {
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count || control->skipped) return;
  Tensor& t = tensors[i];
  double lr = control->lr * t.lrScale;
  t.step++;
  updates[i] = {float(1 - lr * t.decay), float(lr), 1.0f, float(1 - t.beta1), float(t.beta2), float(1 - t.beta2)};
}

// Step is a tensor and its constants for a step. The gradient is one contribution or the sum of
// two.
template <bool kTwo> struct Step {
  Tensor t;
  Update u;
  float multiplier, beta1;

  __device__ __forceinline__ Step(const Control* control, const Update* updates, const Tensor* tensors, int tensor)
      : t(tensorOf(tensors, tensor)), u(updates[tensor]), multiplier(multiplierOf(control, t)), beta1(float(t.beta1)) {}

  __device__ __forceinline__ void update(float& p, float g, float& m) const {
    g = __fmul_rn(g, multiplier);
    if (fabsf(g) > kLargestGradient) g = copysignf(kLargestGradient, g);  // NaN stays
    const float c = __fadd_rn(__fmul_rn(beta1, m), __fmul_rn(u.gain1, g));
    const float move = c > 0 ? u.rate : c < 0 ? -u.rate : 0.0f;
    p = __fsub_rn(__fmul_rn(u.keep, p), move);
    m = __fadd_rn(__fmul_rn(u.beta2, m), __fmul_rn(u.gain2, g));
  }

  // Updates an element of a ragged end.
  __device__ __forceinline__ void one(int64_t i) const {
    update(t.param[i], Contributions<kTwo>::one(t, i), t.moment(0)[i]);
    if (t.copy) storeOneAs(t.copy, t.copyType, i, t.param[i]);
  }

  // Updates four elements.
  __device__ __forceinline__ void four(int64_t i) const {
    Pack<float, 4> p = load<4>(t.param + i), m = load<4>(t.moment(0) + i);
    const Pack<float, 4> g = Contributions<kTwo>::load(t, i).sum(t.gradType);
#pragma unroll
    for (int j = 0; j < kPerAccess; j++) update(p.v[j], g.v[j], m.v[j]);
    store(t.param + i, p);
    store(t.moment(0) + i, m);
    if (t.copy) storeAs(t.copy, t.copyType, i, p);
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
    step.four(i);
  } else {
    for (; i < size; i++) step.one(i);
  }
}

// Launch: kRounds blocks per chunk, one for each of its rounds, as for AdamW.
extern "C" __global__ void __launch_bounds__(kThreads)
    lion(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  updateRound<false>(control, updates, tensors, chunks);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    lion_of_two(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  updateRound<true>(control, updates, tensors, chunks);
}
