// AdamW with 8-bit moments, over all parameters in one launch.
//
//   m ← β1·m + (1−β1)·g,   v ← β2·v + (1−β2)·g²
//   p ← (1 − lr·decay)·p − lr/(1−β1ᵗ) · m / (sqrt(v)/sqrt(1−β2ᵗ) + ε)
//
// The arithmetic is the same as in adamw.cu. The moments are stored as codes for numbers relative
// to a scale, the largest magnitude in a block of 256 elements. The parameter is updated with the
// new moments before these are rounded to codes. (Dettmers et al., "8-bit Optimizers via Block-wise
// Quantization", 2022. Codes and scales match bitsandbytes.)
//
// The moments of a tensor are the codes and the scales of m, and the codes and the scales of v. If
// both v and the gradient are 0, m counts as 0, since m/ε could be a step of any size.
#include "optim.cuh"

constexpr float kLargestGradient = 0x1p63f;
constexpr int kCodes = 256, kBlock = 256, kBlockThreads = kBlock / kPerAccess, kBlockWarps = kBlockThreads / kWarp;
static_assert(kBlockWarps == 2, "a block's magnitude is that of two warps");

// The numbers represented by the codes, in ascending order.
__device__ const float kSigned[kCodes] = {
    -0x1.fc6666p-1f, -0x1.f53334p-1f, -0x1.eep-1f, -0x1.e6ccccp-1f, -0x1.df999ap-1f, -0x1.d86666p-1f, -0x1.d13334p-1f,
    -0x1.cap-1f, -0x1.c2ccccp-1f, -0x1.bb999ap-1f, -0x1.b46666p-1f, -0x1.ad3334p-1f, -0x1.a6p-1f, -0x1.9eccccp-1f,
    -0x1.97999ap-1f, -0x1.906666p-1f, -0x1.893334p-1f, -0x1.82p-1f, -0x1.7accccp-1f, -0x1.73999ap-1f, -0x1.6c6668p-1f,
    -0x1.653334p-1f, -0x1.5ep-1f, -0x1.56ccccp-1f, -0x1.4f999ap-1f, -0x1.486668p-1f, -0x1.413334p-1f, -0x1.3ap-1f,
    -0x1.32ccccp-1f, -0x1.2b999ap-1f, -0x1.246668p-1f, -0x1.1d3334p-1f, -0x1.16p-1f, -0x1.0eccccp-1f, -0x1.079998p-1f,
    -0x1.006666p-1f, -0x1.f26664p-2f, -0x1.e4p-2f, -0x1.d59998p-2f, -0x1.c73334p-2f, -0x1.b8ccccp-2f, -0x1.aa6666p-2f,
    -0x1.9cp-2f, -0x1.8d9998p-2f, -0x1.7f3334p-2f, -0x1.70ccccp-2f, -0x1.626666p-2f, -0x1.54p-2f, -0x1.459998p-2f,
    -0x1.373334p-2f, -0x1.28ccccp-2f, -0x1.1a6668p-2f, -0x1.0cp-2f, -0x1.fb3332p-3f, -0x1.de6666p-3f, -0x1.c1999ap-3f,
    -0x1.a4ccccp-3f, -0x1.88p-3f, -0x1.6b3334p-3f, -0x1.4e6666p-3f, -0x1.31999ap-3f, -0x1.14ccccp-3f, -0x1.fp-4f,
    -0x1.b66668p-4f, -0x1.93d70ap-4f, -0x1.8851eep-4f, -0x1.7ccccep-4f, -0x1.7147aep-4f, -0x1.65c29p-4f, -0x1.5a3d7p-4f,
    -0x1.4eb854p-4f, -0x1.433334p-4f, -0x1.37ae14p-4f, -0x1.2c28f6p-4f, -0x1.20a3d6p-4f, -0x1.151ebap-4f, -0x1.09999ap-4f,
    -0x1.fc28f6p-5f, -0x1.e51ebap-5f, -0x1.ce147ap-5f, -0x1.b70a3ep-5f, -0x1.ap-5f, -0x1.88f5c2p-5f, -0x1.71eb86p-5f,
    -0x1.5ae146p-5f, -0x1.43d70ap-5f, -0x1.2ccccep-5f, -0x1.15c29p-5f, -0x1.fd70a4p-6f, -0x1.cf5c2ap-6f, -0x1.a147aep-6f,
    -0x1.733334p-6f, -0x1.451ebap-6f, -0x1.170a3ep-6f, -0x1.d1eb86p-7f, -0x1.75c29p-7f, -0x1.3e76c8p-7f, -0x1.2c083p-7f,
    -0x1.19999ap-7f, -0x1.072b02p-7f, -0x1.e978d4p-8f, -0x1.c49ba6p-8f, -0x1.9fbe76p-8f, -0x1.7ae148p-8f, -0x1.56041ap-8f,
    -0x1.3126e8p-8f, -0x1.0c49bap-8f, -0x1.ced914p-9f, -0x1.851eb8p-9f, -0x1.3b645ap-9f, -0x1.e353f8p-10f, -0x1.4fdf3ap-10f,
    -0x1.eecbfep-11f, -0x1.b3d07cp-11f, -0x1.78d5p-11f, -0x1.3dd982p-11f, -0x1.02de02p-11f, -0x1.8fc506p-12f,
    -0x1.19ce0ap-12f, -0x1.47ae16p-13f, -0x1.743e96p-14f, -0x1.15df66p-14f, -0x1.6f0068p-15f, -0x1.64840cp-16f,
    -0x1.040bfep-17f, -0x1.b43528p-19f, -0x1.27476ep-21f, 0.0f, 0x1.27476ep-21f, 0x1.b43528p-19f, 0x1.040bfep-17f,
    0x1.64840cp-16f, 0x1.6f0068p-15f, 0x1.15df66p-14f, 0x1.743e96p-14f, 0x1.47ae16p-13f, 0x1.19ce0ap-12f, 0x1.8fc506p-12f,
    0x1.02de02p-11f, 0x1.3dd982p-11f, 0x1.78d5p-11f, 0x1.b3d07cp-11f, 0x1.eecbfep-11f, 0x1.4fdf3ap-10f, 0x1.e353f8p-10f,
    0x1.3b645ap-9f, 0x1.851eb8p-9f, 0x1.ced914p-9f, 0x1.0c49bap-8f, 0x1.3126e8p-8f, 0x1.56041ap-8f, 0x1.7ae148p-8f,
    0x1.9fbe76p-8f, 0x1.c49ba6p-8f, 0x1.e978d4p-8f, 0x1.072b02p-7f, 0x1.19999ap-7f, 0x1.2c083p-7f, 0x1.3e76c8p-7f,
    0x1.75c29p-7f, 0x1.d1eb86p-7f, 0x1.170a3ep-6f, 0x1.451ebap-6f, 0x1.733334p-6f, 0x1.a147aep-6f, 0x1.cf5c2ap-6f,
    0x1.fd70a4p-6f, 0x1.15c29p-5f, 0x1.2ccccep-5f, 0x1.43d70ap-5f, 0x1.5ae146p-5f, 0x1.71eb86p-5f, 0x1.88f5c2p-5f, 0x1.ap-5f,
    0x1.b70a3ep-5f, 0x1.ce147ap-5f, 0x1.e51ebap-5f, 0x1.fc28f6p-5f, 0x1.09999ap-4f, 0x1.151ebap-4f, 0x1.20a3d6p-4f,
    0x1.2c28f6p-4f, 0x1.37ae14p-4f, 0x1.433334p-4f, 0x1.4eb854p-4f, 0x1.5a3d7p-4f, 0x1.65c29p-4f, 0x1.7147aep-4f,
    0x1.7ccccep-4f, 0x1.8851eep-4f, 0x1.93d70ap-4f, 0x1.b66668p-4f, 0x1.fp-4f, 0x1.14ccccp-3f, 0x1.31999ap-3f, 0x1.4e6666p-3f,
    0x1.6b3334p-3f, 0x1.88p-3f, 0x1.a4ccccp-3f, 0x1.c1999ap-3f, 0x1.de6666p-3f, 0x1.fb3332p-3f, 0x1.0cp-2f, 0x1.1a6668p-2f,
    0x1.28ccccp-2f, 0x1.373334p-2f, 0x1.459998p-2f, 0x1.54p-2f, 0x1.626666p-2f, 0x1.70ccccp-2f, 0x1.7f3334p-2f,
    0x1.8d9998p-2f, 0x1.9cp-2f, 0x1.aa6666p-2f, 0x1.b8ccccp-2f, 0x1.c73334p-2f, 0x1.d59998p-2f, 0x1.e4p-2f, 0x1.f26664p-2f,
    0x1.006666p-1f, 0x1.079998p-1f, 0x1.0eccccp-1f, 0x1.16p-1f, 0x1.1d3334p-1f, 0x1.246668p-1f, 0x1.2b999ap-1f,
    0x1.32ccccp-1f, 0x1.3ap-1f, 0x1.413334p-1f, 0x1.486668p-1f, 0x1.4f999ap-1f, 0x1.56ccccp-1f, 0x1.5ep-1f, 0x1.653334p-1f,
    0x1.6c6668p-1f, 0x1.73999ap-1f, 0x1.7accccp-1f, 0x1.82p-1f, 0x1.893334p-1f, 0x1.906666p-1f, 0x1.97999ap-1f,
    0x1.9eccccp-1f, 0x1.a6p-1f, 0x1.ad3334p-1f, 0x1.b46666p-1f, 0x1.bb999ap-1f, 0x1.c2ccccp-1f, 0x1.cap-1f, 0x1.d13334p-1f,
    0x1.d86666p-1f, 0x1.df999ap-1f, 0x1.e6ccccp-1f, 0x1.eep-1f, 0x1.f53334p-1f, 0x1.fc6666p-1f, 0x1p0f,
};
__device__ const float kUnsigned[kCodes] = {
    0.0f, 0x1.5cf754p-22f, 0x1.a0133p-21f, 0x1.1d367p-19f, 0x1.2599ecp-18f, 0x1.bc98a2p-18f, 0x1.29cbaap-17f, 0x1.0624dcp-16f,
    0x1.c2e34p-16f, 0x1.3fd0dp-15f, 0x1.9e3p-15f, 0x1.fc8f34p-15f, 0x1.2d7732p-14f, 0x1.5ca6c8p-14f, 0x1.8bd662p-14f,
    0x1.0cb296p-13f, 0x1.82a994p-13f, 0x1.f8a092p-13f, 0x1.374bc8p-12f, 0x1.724744p-12f, 0x1.ad42c6p-12f, 0x1.e83e44p-12f,
    0x1.119ce2p-11f, 0x1.2f1aap-11f, 0x1.4c986p-11f, 0x1.6a162p-11f, 0x1.8793dep-11f, 0x1.a511ap-11f, 0x1.c28f5ep-11f,
    0x1.e00d1cp-11f, 0x1.fd8adcp-11f, 0x1.2b020cp-10f, 0x1.74bc6ap-10f, 0x1.be76c8p-10f, 0x1.041894p-9f, 0x1.28f5c2p-9f,
    0x1.4dd2fp-9f, 0x1.72b02p-9f, 0x1.978d4ep-9f, 0x1.bc6a8p-9f, 0x1.e147aep-9f, 0x1.03126ep-8f, 0x1.158104p-8f,
    0x1.27ef9ep-8f, 0x1.3a5e34p-8f, 0x1.4cccccp-8f, 0x1.5f3b64p-8f, 0x1.71a9fap-8f, 0x1.841894p-8f, 0x1.96872ap-8f,
    0x1.a8f5c2p-8f, 0x1.bb645cp-8f, 0x1.cdd2fp-8f, 0x1.e0418ap-8f, 0x1.f2b01ep-8f, 0x1.028f5cp-7f, 0x1.0bc6a8p-7f,
    0x1.14fdf2p-7f, 0x1.1e354p-7f, 0x1.276c8ap-7f, 0x1.30a3d6p-7f, 0x1.39db24p-7f, 0x1.43126ep-7f, 0x1.5eb854p-7f,
    0x1.8ccccep-7f, 0x1.bae146p-7f, 0x1.e8f5c4p-7f, 0x1.0b851ep-6f, 0x1.228f5ep-6f, 0x1.39999ap-6f, 0x1.50a3d6p-6f,
    0x1.67ae16p-6f, 0x1.7eb852p-6f, 0x1.95c28ep-6f, 0x1.accccep-6f, 0x1.c3d70ep-6f, 0x1.dae146p-6f, 0x1.f1eb86p-6f,
    0x1.047aep-5f, 0x1.1p-5f, 0x1.1b851ep-5f, 0x1.270a3ep-5f, 0x1.328f5ep-5f, 0x1.3e147ap-5f, 0x1.49999ap-5f, 0x1.551eb8p-5f,
    0x1.60a3d6p-5f, 0x1.6c28f6p-5f, 0x1.77ae14p-5f, 0x1.833334p-5f, 0x1.8eb85p-5f, 0x1.9a3d7p-5f, 0x1.a5c28ep-5f,
    0x1.b147aep-5f, 0x1.bccccep-5f, 0x1.c851eep-5f, 0x1.d3d70ep-5f, 0x1.df5c2ap-5f, 0x1.eae146p-5f, 0x1.f66666p-5f,
    0x1.00f5c4p-4f, 0x1.06b854p-4f, 0x1.0c7ae2p-4f, 0x1.123d7p-4f, 0x1.18p-4f, 0x1.1dc29p-4f, 0x1.23852p-4f, 0x1.2947aep-4f,
    0x1.2f0a3ep-4f, 0x1.34cccep-4f, 0x1.3a8f5ep-4f, 0x1.4051ecp-4f, 0x1.46147cp-4f, 0x1.4bd70ap-4f, 0x1.51999ap-4f,
    0x1.575c2ap-4f, 0x1.5d1eb8p-4f, 0x1.62e148p-4f, 0x1.68a3d6p-4f, 0x1.6e6666p-4f, 0x1.7428f6p-4f, 0x1.79eb86p-4f,
    0x1.7fae16p-4f, 0x1.8570a4p-4f, 0x1.8b3334p-4f, 0x1.90f5c4p-4f, 0x1.96b852p-4f, 0x1.a8p-4f, 0x1.c4ccccp-4f,
    0x1.e1999ap-4f, 0x1.fe6666p-4f, 0x1.0d9998p-3f, 0x1.1cp-3f, 0x1.2a6668p-3f, 0x1.38ccccp-3f, 0x1.473334p-3f,
    0x1.559998p-3f, 0x1.64p-3f, 0x1.726668p-3f, 0x1.80ccccp-3f, 0x1.8f3334p-3f, 0x1.9d9998p-3f, 0x1.acp-3f, 0x1.ba6668p-3f,
    0x1.c8ccccp-3f, 0x1.d73334p-3f, 0x1.e59998p-3f, 0x1.f4p-3f, 0x1.013332p-2f, 0x1.086666p-2f, 0x1.0f999ap-2f,
    0x1.16ccccp-2f, 0x1.1ep-2f, 0x1.253334p-2f, 0x1.2c6666p-2f, 0x1.339998p-2f, 0x1.3accccp-2f, 0x1.42p-2f, 0x1.493334p-2f,
    0x1.506666p-2f, 0x1.579998p-2f, 0x1.5eccccp-2f, 0x1.66p-2f, 0x1.6d3334p-2f, 0x1.746666p-2f, 0x1.7b9998p-2f,
    0x1.82ccccp-2f, 0x1.8ap-2f, 0x1.913334p-2f, 0x1.986666p-2f, 0x1.9f9998p-2f, 0x1.a6ccccp-2f, 0x1.aep-2f, 0x1.b53334p-2f,
    0x1.bc6666p-2f, 0x1.c39998p-2f, 0x1.caccccp-2f, 0x1.d2p-2f, 0x1.d93334p-2f, 0x1.e06666p-2f, 0x1.e79998p-2f,
    0x1.eeccccp-2f, 0x1.f6p-2f, 0x1.fd3332p-2f, 0x1.023334p-1f, 0x1.05ccccp-1f, 0x1.096666p-1f, 0x1.0dp-1f, 0x1.109998p-1f,
    0x1.143334p-1f, 0x1.17ccccp-1f, 0x1.1b6668p-1f, 0x1.1fp-1f, 0x1.22999ap-1f, 0x1.263334p-1f, 0x1.29ccccp-1f,
    0x1.2d6668p-1f, 0x1.31p-1f, 0x1.34999ap-1f, 0x1.383334p-1f, 0x1.3bccccp-1f, 0x1.3f6668p-1f, 0x1.43p-1f, 0x1.46999ap-1f,
    0x1.4a3334p-1f, 0x1.4dccccp-1f, 0x1.516668p-1f, 0x1.55p-1f, 0x1.58999ap-1f, 0x1.5c3334p-1f, 0x1.5fccccp-1f,
    0x1.636668p-1f, 0x1.67p-1f, 0x1.6a999ap-1f, 0x1.6e3334p-1f, 0x1.71ccccp-1f, 0x1.756668p-1f, 0x1.79p-1f, 0x1.7c999ap-1f,
    0x1.803334p-1f, 0x1.83ccccp-1f, 0x1.876668p-1f, 0x1.8bp-1f, 0x1.8e9998p-1f, 0x1.923334p-1f, 0x1.95ccccp-1f,
    0x1.996668p-1f, 0x1.9dp-1f, 0x1.a09998p-1f, 0x1.a43334p-1f, 0x1.a7ccccp-1f, 0x1.ab6668p-1f, 0x1.afp-1f, 0x1.b29998p-1f,
    0x1.b63334p-1f, 0x1.b9ccccp-1f, 0x1.bd6668p-1f, 0x1.c1p-1f, 0x1.c49998p-1f, 0x1.c83334p-1f, 0x1.cbccccp-1f,
    0x1.cf6668p-1f, 0x1.d3p-1f, 0x1.d69998p-1f, 0x1.da3334p-1f, 0x1.ddccccp-1f, 0x1.e16668p-1f, 0x1.e5p-1f, 0x1.e89998p-1f,
    0x1.ec3334p-1f, 0x1.efccccp-1f, 0x1.f36668p-1f, 0x1.f7p-1f, 0x1.fa9998p-1f, 0x1.fe3334p-1f, 0x1p0f,
};

// Counts the step and computes each tensor's constants, as adamw_begin does. Launch: a thread per tensor.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw8bit_begin(const Control* control, Update* updates, Tensor* tensors, int count) {
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count || control->skipped) return;
  Tensor& t = tensors[i];
  double lr = control->lr * t.lrScale, step = ++t.step;
  updates[i] = {float(1 - lr * t.decay), float(lr / (1 - pow(t.beta1, step))), float(sqrt(1 - pow(t.beta2, step))),
                float(1 - t.beta1), float(t.beta2), float(1 - t.beta2)};
}

// Codebook holds the values of one kind of code, and the midpoints between them, in shared memory.
struct Codebook {
  float values[kCodes], middles[kCodes];  // the last midpoint is infinite

  __device__ __forceinline__ void load(const float* from) {
    const int c = threadIdx.x;
    values[c] = from[c];
    middles[c] = c + 1 < kCodes ? 0.5f * __fadd_rn(from[c], from[c + 1]) : INFINITY;
  }

  // Returns the code of the number nearest to x, or the even code if two are equally near.
  __device__ __forceinline__ int code(float x) const {
    int c = 0;
#pragma unroll
    for (int step = kCodes / 2; step > 0; step /= 2) {
      if (x > middles[c + step - 1]) c += step;
    }
    return x == middles[c] ? c + (c & 1) : c;
  }

  // Returns the code of an element of a block. A negative element never becomes 0.
  __device__ __forceinline__ int encode(float x, float scale) const {
    if (scale == 0) return code(0);
    const int c = code(__fdiv_rn(x, scale));
    return x < 0 && values[c] >= 0 ? c - 1 : c;
  }
};

// Four codes as stored.
union Codes {
  uint32_t word;
  uint8_t each[kPerAccess];
};

__device__ __forceinline__ Codes loadCodes(const uint8_t* p, int64_t i, int n) {
  Codes c = {0};
  if (n == kPerAccess) c.word = *reinterpret_cast<const uint32_t*>(p + i);
  else for (int j = 0; j < n; j++) c.each[j] = p[i + j];
  return c;
}

__device__ __forceinline__ void storeCodes(uint8_t* p, int64_t i, int n, Codes c) {
  if (n == kPerAccess) *reinterpret_cast<uint32_t*>(p + i) = c.word;
  else for (int j = 0; j < n; j++) p[i + j] = c.each[j];
}

__device__ __forceinline__ float largestOfWarp(float x) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
  return x;
}

template <bool kTwo>
__device__ __forceinline__ void updateRound(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  if (control->skipped) return;
  __shared__ Codebook first, second;
  __shared__ float largest[2][kThreads / kWarp];
  first.load(kSigned), second.load(kUnsigned);
  __syncthreads();

  const Chunk c = chunks[blockIdx.x / kRounds];
  const Tensor t = tensorOf(tensors, c.tensor);
  const Update u = updates[c.tensor];
  const float multiplier = multiplierOf(control, t), eps = control->eps;

  // This thread's n elements, and their block.
  const int64_t round = int64_t(c.index) * kRounds + blockIdx.x % kRounds;
  const int64_t i = (round * kThreads + threadIdx.x) * kPerAccess, block = i / kBlock;
  const int n = int(max(int64_t(0), min(int64_t(kPerAccess), t.size - i)));

  float m[kPerAccess] = {}, v[kPerAccess] = {}, p[kPerAccess], mLargest = 0, vLargest = 0;
  if (n > 0) {
    Codes mCodes = loadCodes(t.moment<uint8_t>(0), i, n), vCodes = loadCodes(t.moment<uint8_t>(2), i, n);
    const float mScale = t.moment(1)[block], vScale = t.moment(3)[block];
    Pack<float, 4> g;
    if (n == kPerAccess) {
      g = Contributions<kTwo>::load(t, i).sum(t.gradType);
    } else {
      for (int j = 0; j < n; j++) g.v[j] = Contributions<kTwo>::one(t, i + j);
    }
#pragma unroll
    for (int j = 0; j < kPerAccess; j++) {
      if (j >= n) break;
      float x = __fmul_rn(g.v[j], multiplier);
      if (fabsf(x) > kLargestGradient) x = copysignf(kLargestGradient, x);  // NaN stays
      m[j] = __fmul_rn(first.values[mCodes.each[j]], mScale);
      v[j] = __fmul_rn(second.values[vCodes.each[j]], vScale);
      if (v[j] == 0 && x == 0) m[j] = 0;
      m[j] = __fmaf_rn(u.gain1, x - m[j], m[j]);
      v[j] = __fmaf_rn(__fmul_rn(u.gain2, x), x, __fmul_rn(u.beta2, v[j]));
      p[j] = __fsub_rn(__fmul_rn(u.keep, t.param[i + j]), __fmul_rn(u.rate, m[j]) / (sqrtf(v[j]) / u.root + eps));
      mLargest = fmaxf(mLargest, fabsf(m[j])), vLargest = fmaxf(vLargest, v[j]);
    }
  }

  // The scales of the blocks, once all threads have read the old ones.
  const int warp = threadIdx.x / kWarp;
  mLargest = largestOfWarp(mLargest), vLargest = largestOfWarp(vLargest);
  if (threadIdx.x % kWarp == 0) largest[0][warp] = mLargest, largest[1][warp] = vLargest;
  __syncthreads();
  const float mScale = fmaxf(largest[0][warp], largest[0][warp ^ 1]), vScale = fmaxf(largest[1][warp], largest[1][warp ^ 1]);
  if (n <= 0) return;
  if (threadIdx.x % kBlockThreads == 0) t.moment(1)[block] = mScale, t.moment(3)[block] = vScale;

  Codes mCodes = {0}, vCodes = {0};
#pragma unroll
  for (int j = 0; j < kPerAccess; j++) {
    if (j >= n) break;
    mCodes.each[j] = first.encode(m[j], mScale), vCodes.each[j] = second.encode(v[j], vScale);
    t.param[i + j] = p[j];
    if (t.copy) storeOneAs(t.copy, t.copyType, i + j, p[j]);
  }
  storeCodes(t.moment<uint8_t>(0), i, n, mCodes), storeCodes(t.moment<uint8_t>(2), i, n, vCodes);
}

// Launch: kRounds blocks per chunk, one for each of its rounds, as for AdamW.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw8bit(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  updateRound<false>(control, updates, tensors, chunks);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw8bit_of_two(const Control* control, const Update* updates, const Tensor* tensors, const Chunk* chunks) {
  updateRound<true>(control, updates, tensors, chunks);
}
