// Building blocks of decode_stream.cu and decode_stream_packed.cu, which multiply a matrix w by a single row x. Each
// element of w is used once, so reading w limits the speed.
//
// There is one block per multiprocessor. A block computes an equal share of the results, one tile of kRows rows of w at a
// time. The columns of w are divided into pieces, each 128 bytes wide, which the warps take in turn: warp i has pieces i,
// i + kStreamWarps, and so on, of every tile.
//
// Each warp copies its pieces with cp.async into a ring of its own in shared memory, and multiplies them on the tensor
// cores (mma.m16n8k16). No other warp reads the ring, so __syncwarp is enough before a slot is reused, and no warp waits
// for the copies of another. The warps' sums are added up once per batch of tiles.
//
// Weights do not depend on the preceding kernel, so a block fills its rings before it waits for that kernel, which
// computes x. The blocks of two consecutive kernels fit on a multiprocessor together: while one still multiplies, the
// next already copies, and the memory does not fall idle between them.
//
// Operand A of mma holds rows of w, and operand B holds x in one of its eight columns. The other columns are zero, except
// that one can hold the part of x that rounding to 16 bits loses. Most of the tensor cores' work is wasted, but it costs
// nothing: other units would take too long to multiply the full rings once x arrives.
//
// Any order of k gives the same product, as long as it is the same for w and x. A lane therefore loads 16 consecutive
// bytes of a row, and the matching elements of x, instead of the scattered elements that ldmatrix would give it. As in
// mma, `group` is lane/4, a row of w or a column of x, and `quarter` is lane%4, which selects the elements of k.
//
// Dynamic shared memory, after what a kernel puts first (stream.go and packed_stream.go compute the sizes):
//
//   rings    [kStreamWarps][stages][kRows][128] bytes, and perhaps more per stage
//   sums     float [batch][kStreamWarps][kRows]: the warps' sums of a batch of tiles
//   squares  float [kWarp]: the warps' sums of x², of which there are kStreamWarps
//   x        the columns of x, 16 bits per element; before that, the norm's factors, in float32
//
// The row of a ring has eight chunks of 16 bytes, and odd rows have their halves swapped: chunk c of row r is at position
// c ^ (r%2·4). Eight lanes that load 16 bytes each read chunks 0 to 3, or 4 to 7, of two adjacent rows, which therefore lie
// in different banks.
#pragma once
#include "mma.cuh"

constexpr int kStreamWarps = 8, kThreads = kStreamWarps * kWarp;
constexpr int kRows = 16;  // rows of a tile of w; in a gated product, 8 rows of the gate and the matching 8 of up

// kPerTile is the number of results in a tile.
template <bool Gated> constexpr int kPerTile = Gated ? kRows / 2 : kRows;

// To normalize x, a thread keeps kPacks packs of 8 of its elements in registers, so x has at most 8·kPacks·kThreads
// elements. Without a norm, x can have any number of elements, and a thread loads kCopied packs at the same time.
constexpr int kPacks = 2, kCopied = 8;

// loadRow loads the thread's packs of a row: pack i starts at element 8·(i·kThreads + threadIdx.x).
template <class T> __device__ __forceinline__ void loadRow(Pack<T, 8> (&v)[kPacks], const T* row, int depth) {
#pragma unroll
  for (int i = 0; i < kPacks; i++)
    if (const int at = (i * kThreads + threadIdx.x) * 8; at < depth) v[i] = load<8>(row + at);
}

// storeSquares stores the warp's sum of x² in squares[warp]. v has the thread's packs of x.
template <class T> __device__ __forceinline__ void storeSquares(float* squares, const Pack<T, 8> (&v)[kPacks], int depth) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPacks; i++)
    if ((i * kThreads + threadIdx.x) * 8 < depth)
#pragma unroll
      for (int e = 0; e < 8; e++) sum += v[i].get(e) * v[i].get(e);
  sum = warpReduce<Sum>(sum);
  if (threadIdx.x % kWarp == 0) squares[threadIdx.x / kWarp] = sum;
}

// normScale returns 1/sqrt(Σ_j x[j]²/depth + eps), given the sums that all warps have stored.
__device__ __forceinline__ float normScale(const float* squares, int depth, float eps) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kStreamWarps; i++) sum += squares[i];
  return rsqrtf(sum / depth + eps);
}

// splitRounded sets high to v rounded to the storage type, and low to the rounded difference.
template <class T> __device__ __forceinline__ void splitRounded(float v, T& high, T& low) {
  high = fromFloat<T>(v);
  low = fromFloat<T>(v - toFloat(high));
}

// addWarps adds up the warps' sums for one result, in the order of the warps. Thread i has the i-th result of the batch.
// In a gated product, v becomes the gate's argument and up its factor; otherwise up remains 0.
template <bool Gated> __device__ __forceinline__ void addWarps(const float* sums, float& v, float& up) {
  constexpr int perTile = kPerTile<Gated>;
  const float* at = sums + threadIdx.x / perTile * kStreamWarps * kRows + threadIdx.x % perTile;
  v = up = 0;
#pragma unroll
  for (int i = 0; i < kStreamWarps; i++) {
    v += at[i * kRows];
    if constexpr (Gated) up += at[i * kRows + perTile];
  }
}
