// Muon's work other than matrix products, for all of its matrices in one launch per step:
//
//   m ← m + (1−μ)·(g − m),   u = g + μ·(m − g) (Nesterov), or u = m,   direction = u / (‖u‖ + 1e-7)
//   p ← (1 − lr·decay)·p − lr·shapeScale·result
//
// (Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.) In between,
// matrix products compute each result from its direction. μ is the tensor's beta1. The gradient is
// multiplied by the control block's multiplier.
//
// The gradient is limited to ±2¹²⁶, so that m and u stay finite. If a chunk's Σ u² overflows
// nevertheless, the negative root of the sum takes its place.
#include "optim.cuh"

// Counts the step and computes each tensor's constants. Launch: a thread per tensor.
extern "C" __global__ void __launch_bounds__(kThreads)
    muon_begin(const Control* control, Update* updates, Tensor* tensors, int count) {
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count || control->skipped) return;
  Tensor& t = tensors[i];
  double lr = control->lr * t.lrScale;
  t.step++;
  updates[i] = {float(1 - lr * t.decay), float(lr * t.shapeScale), 1.0f, float(1 - t.beta1), 0.0f, 0.0f};
}

constexpr float kLargestGradient = 0x1p126f;

__device__ __forceinline__ float scaled(float g, float multiplier) {
  g *= multiplier;
  return fabsf(g) > kLargestGradient ? copysignf(kLargestGradient, g) : g;  // NaN stays
}

__device__ __forceinline__ float direction(float m, float g, float mu, int nesterov) {
  return nesterov ? g + mu * (m - g) : m;
}

// Returns the root of a chunk's Σ u², computed from the updated momenta. Every u is divided by the
// largest one, so that no square overflows.
__device__ __noinline__ float scaledNorm(const Tensor& t, int index, float mu, float multiplier, int nesterov) {
  float largest = 0, sum = 0;
  auto forDirections = [&](auto f) {
    auto one = [&](int64_t i) { f(direction(t.moment(0)[i], scaled(loadOneAs(t.grad, t.gradType, i), multiplier), mu, nesterov)); };
    forChunk<1>(
        t.size, index, [](int64_t i) { return i; },
        [&](int64_t, int64_t i) {
          for (int j = 0; j < kPerAccess; j++) one(i + j);
        },
        one);
  };
  forDirections([&](float u) { largest = fmaxf(largest, fabsf(u)); });
  largest = blockReduce<Max>(largest);

  forDirections([&](float u) { sum += u / largest * (u / largest); });
  return largest * sqrtf(blockReduce<Sum>(sum));
}

// Updates m, and computes squares[chunk] = Σ u². Launch: one block per chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    muon_momentum(float* squares, const Control* control, const Update* updates, const Tensor* tensors,
                  const Chunk* chunks, int nesterov) {
  if (control->skipped) return;
  Chunk c = chunks[blockIdx.x];
  const Tensor t = tensorOf(tensors, c.tensor);
  float gain = updates[c.tensor].gain1, mu = t.beta1, multiplier = multiplierOf(control, t), sum = 0;
  auto update = [&](float& m, float g) {
    g = scaled(g, multiplier);
    m += gain * (g - m);
    float u = direction(m, g, mu, nesterov);
    sum += u * u;
  };
  struct Two {
    Pack<float, 4> m, g;
  };
  forChunk<2>(
      t.size, c.index, [&](int64_t i) { return Two{load<4>(t.moment(0) + i), loadAs(t.grad, t.gradType, i)}; },
      [&](int64_t i, Two v) {
#pragma unroll
        for (int j = 0; j < 4; j++) update(v.m.v[j], v.g.v[j]);
        store(t.moment(0) + i, v.m);
      },
      [&](int64_t i) { update(t.moment(0)[i], loadOneAs(t.grad, t.gradType, i)); });
  sum = blockReduce<Sum>(sum);
  if (isinf(sum)) sum = -scaledNorm(t, c.index, mu, multiplier, nesterov);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr float kDown = 0x1p-70f;  // scales down roots greater than 2⁶⁴ so that their squares can be added up

// Computes direction from m and g, times inverse = 1/(‖u‖ + 1e-7). Each block adds up the squares
// of its tensor in the same order. Launch: one block per chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    muon_direction(const float* squares, const Control* control, const Tensor* tensors, const Chunk* chunks, int nesterov) {
  if (control->skipped) return;
  Chunk c = chunks[blockIdx.x];
  const Tensor t = tensorOf(tensors, c.tensor);
  float sum = 0, huge = 0;  // for chunks with a sum, and for chunks with a root, scaled down
  for (int i = threadIdx.x; i < t.chunks; i += kThreads) {
    const float square = squares[t.firstChunk + i], root = square * kDown;
    (square < 0 ? huge : sum) += square < 0 ? root * root : square;
  }
  sum = blockReduce<Sum>(sum), huge = blockReduce<Sum>(huge);
  float norm = sqrtf(sum);
  if (huge > 0 || isinf(sum)) norm = sqrtf(huge + fminf(sum, kLargestFloat) * kDown * kDown) / kDown;
  float inverse = 1.0f / (norm + 1e-7f);
  float mu = t.beta1, multiplier = multiplierOf(control, t);
  struct Two {
    Pack<float, 4> m, g;
  };
  forChunk<2>(
      t.size, c.index, [&](int64_t i) { return Two{load<4>(t.moment(0) + i), loadAs(t.grad, t.gradType, i)}; },
      [&](int64_t i, Two v) {
#pragma unroll
        for (int j = 0; j < 4; j++) v.m.v[j] = inverse * direction(v.m.v[j], scaled(v.g.v[j], multiplier), mu, nesterov);
        storeAs(t.direction, t.directionType, i, v.m);
      },
      [&](int64_t i) {
        float u = direction(t.moment(0)[i], scaled(loadOneAs(t.grad, t.gradType, i), multiplier), mu, nesterov);
        storeOneAs(t.direction, t.directionType, i, inverse * u);
      });
}

// Updates p and its copy. Launch: one block per chunk.
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
