// The parameters of attention to pages; see decode_paged.cu.
#pragma once
#include <stdint.h>

#include "overlap.cuh"

struct Paged {
  const void *q, *k, *v;  // rows of heads·dim and kvHeads·dim elements, `strides` apart
  void *y, *keys, *values;  // [rows, heads·dim], [pages, kPageTokens, kvHeads·dim]
  const float *cosines, *sines;  // [capacity, dim/2]; null without RoPE
  const int64_t* table;  // [rows, columns]
  float* parts;  // [rows, heads, slices, dim + 2]
  unsigned* arrived;  // [rows, groups, kvHeads], zero before and after
  int heads, kvHeads, dim, capacity, window, slices;
  float scale;
  int packed, rows, columns, queryStride, keyStride, valueStride;
  int early;  // see Overlap in product.go
};

// await waits for the preceding kernel.
__device__ __forceinline__ void await(const Paged& a) {
  if (a.early) releaseNext();
  awaitPrevious();
  if (!a.early) releaseNext();
}
