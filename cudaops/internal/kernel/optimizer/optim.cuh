// A launch updates many tensors at once. The host lays out two tables in device memory: the tensors, and
// the chunks into which they are divided. A chunk has at most kChunk elements.
#pragma once
#include "common.cuh"

enum Storage { kF32, kF16, kBF16 };  // the host's gpu.DType

// Tensor is a parameter, its gradient and its optimizer state. Addresses are multiples of 16.
struct Tensor {
  float* param;
  void* copy;         // the parameter in a narrower type, or null
  const void* grad;
  const void* other;  // another rank's contribution, which is added to grad; or null
  void* moments[4];   // in the order of package optim's declarations
  void* direction;    // Muon: the normalized update before the iteration
  const void* result; // and the update after it
  int64_t size;
  double lrScale, shapeScale, decay, beta1, beta2;
  int64_t step;       // number of updates so far
  int copyType, gradType, directionType;
  int firstChunk, chunks;
  bool apart;         // whether the gradient is clipped separately

  template <class T = float> __device__ __forceinline__ T* moment(int i) const { return static_cast<T*>(moments[i]); }
};

// tensorOf returns a tensor of the table. It declares the addresses in it to be in global memory.
// Otherwise the compiler would allow for shared memory as well, which slows AdamW down by 4%.
__device__ __forceinline__ Tensor tensorOf(const Tensor* tensors, int i) {
  const Tensor t = tensors[i];
  __builtin_assume(__isGlobal(t.param)), __builtin_assume(__isGlobal(t.copy)), __builtin_assume(__isGlobal(t.grad));
  __builtin_assume(__isGlobal(t.other));
  __builtin_assume(__isGlobal(t.moments[0])), __builtin_assume(__isGlobal(t.moments[1]));
  __builtin_assume(__isGlobal(t.moments[2])), __builtin_assume(__isGlobal(t.moments[3]));
  __builtin_assume(__isGlobal(t.direction)), __builtin_assume(__isGlobal(t.result));
  return t;
}

// LossScale is the factor of the loss that lets float16 hold its gradients, and the factor's
// history.
struct LossScale {
  float scale;
  int good;     // steps since the last change of the scale
  int skipped;  // steps skipped because of a gradient that was not finite
};

// Control is the control block of a step. The host writes the first part, the kernels the second.
struct Control {
  double lr, eps;
  double maxNorm;      // limit on the gradients' norm; 0 for no clipping
  double gradScale;    // factor of the gradients, in addition to 1/loss scale

  bool skipped;        // whether a gradient was NaN or infinite, so that nothing changed
  float norm;          // of the scaled gradients, before clipping
  float multiplier;    // gradScale / loss scale, times the clipping factor
  LossScale next;      // for the next step
  float apart;         // multiplier of gradients that are clipped separately
};

static_assert(sizeof(Tensor) == 160 && sizeof(Control) == 64, "the host lays them out so");

__device__ __forceinline__ float multiplierOf(const Control* control, const Tensor& t) {
  return t.apart ? control->apart : control->multiplier;
}

// Update is the constants of a tensor for a step: p ← keep·p − rate·..., root = sqrt(1 − β2ᵗ).
struct Update {
  float keep, rate, root, gain1, beta2, gain2;
};

struct Chunk {
  int tensor, index;
};

constexpr int kThreads = 256, kPerAccess = 4, kRounds = 16;
constexpr int kChunk = kThreads * kPerAccess * kRounds;

// Stored is four consecutive numbers in their storage type. Narrow numbers are in the first half.
union Stored {
  Pack<float, 4> f32s;
  Pack<bf16, 4> bf16s;
  Pack<f16, 4> f16s;
};

__device__ __forceinline__ Stored loadStored(const void* p, int type, int64_t i) {
  Stored s;
  if (type == kF32) s.f32s = load<4>(static_cast<const float*>(p) + i);
  else s.bf16s = load<4>(static_cast<const bf16*>(p) + i);
  return s;
}

// widened waits for the loaded numbers. All loads should be issued before the first call.
__device__ __forceinline__ Pack<float, 4> widened(const Stored& s, int type) {
  if (type == kF32) return s.f32s;
  Pack<float, 4> r;
#pragma unroll
  for (int j = 0; j < 4; j++) r.v[j] = type == kBF16 ? s.bf16s.get(j) : s.f16s.get(j);
  return r;
}

__device__ __forceinline__ Pack<float, 4> loadAs(const void* p, int type, int64_t i) { return widened(loadStored(p, type, i), type); }

__device__ __forceinline__ float loadOneAs(const void* p, int type, int64_t i) {
  if (type == kF32) return static_cast<const float*>(p)[i];
  if (type == kBF16) return toFloat(static_cast<const bf16*>(p)[i]);
  return toFloat(static_cast<const f16*>(p)[i]);
}

// Contributions is four elements of a gradient as stored: one contribution, or two, with the sum
// rounded to float32.
template <bool kTwo> struct Contributions {
  Stored own, other;

  __device__ __forceinline__ static Contributions load(const Tensor& t, int64_t i) {
    Contributions c;
    c.own = loadStored(t.grad, t.gradType, i);
    if constexpr (kTwo) c.other = loadStored(t.other, t.gradType, i);
    return c;
  }
  __device__ __forceinline__ Pack<float, 4> sum(int type) const {
    Pack<float, 4> g = widened(own, type);
    if constexpr (kTwo) {
      const Pack<float, 4> more = widened(other, type);
#pragma unroll
      for (int j = 0; j < 4; j++) g.v[j] = __fadd_rn(g.v[j], more.v[j]);
    }
    return g;
  }
  // one returns a single element.
  __device__ __forceinline__ static float one(const Tensor& t, int64_t i) {
    const float g = loadOneAs(t.grad, t.gradType, i);
    return kTwo ? __fadd_rn(g, loadOneAs(t.other, t.gradType, i)) : g;
  }
};

template <class T> __device__ __forceinline__ void storeNarrow(void* p, int64_t i, const Pack<float, 4>& v) {
  Pack<T, 4> r;
#pragma unroll
  for (int j = 0; j < 4; j++) r.set(j, v.v[j]);
  store(static_cast<T*>(p) + i, r);
}

__device__ __forceinline__ void storeAs(void* p, int type, int64_t i, const Pack<float, 4>& v) {
  if (type == kF32) store(static_cast<float*>(p) + i, v);
  if (type == kBF16) storeNarrow<bf16>(p, i, v);
  if (type == kF16) storeNarrow<f16>(p, i, v);
}

__device__ __forceinline__ void storeOneAs(void* p, int type, int64_t i, float v) {
  if (type == kF32) static_cast<float*>(p)[i] = v;
  if (type == kBF16) static_cast<bf16*>(p)[i] = fromFloat<bf16>(v);
  if (type == kF16) static_cast<f16*>(p)[i] = fromFloat<f16>(v);
}

// forChunk iterates over a chunk. It calls got = read(i) for U times four elements of the thread, and then
// write(i, got). For each element of a ragged end it calls one(i).
template <int U, class Read, class Write, class One>
__device__ __forceinline__ void forChunk(int64_t size, int index, Read read, Write write, One one) {
  constexpr int step = kThreads * kPerAccess;
  int64_t base = int64_t(index) * kChunk, i = base + threadIdx.x * kPerAccess;
  if (base + kChunk <= size) {
#pragma unroll 1
    for (int round = 0; round < kRounds; round += U, i += U * step) {
      decltype(read(i)) got[U];
#pragma unroll
      for (int u = 0; u < U; u++) got[u] = read(i + u * step);
#pragma unroll
      for (int u = 0; u < U; u++) write(i + u * step, got[u]);
    }
    return;
  }
  int64_t whole = size / kPerAccess * kPerAccess;
  for (; i < whole; i += step) write(i, read(i));
  if (whole + threadIdx.x < size) one(whole + threadIdx.x);
}
