// What the kernels of decode_grouped.cu and decode_chunk.cu share: one block decides which of them computes a row.
#pragma once
#include "decode_attention.cuh"
#include "decode_paged.cuh"

struct Grouped {
  Paged paged;
  int tokens;  // rows of a chunk; 0 without chunks
};

// Chunk is a range of `tokens` rows, starting at a multiple of it. It is whole if its rows are consecutive tokens of one
// sequence, perhaps followed by rows without a sequence. decode_chunk.cu computes the rows of whole chunks, and
// decode_grouped.cu computes all others.
struct Chunk {
  int first, count;  // rows; count is 0 if the chunk is not whole

  // All lanes of a warp must take part.
  __device__ __forceinline__ Chunk(const Paged& a, int row, int tokens) : first(row / tokens * tokens), count(0) {
    const int lane = threadIdx.x % kWarp;
    bool whole = true;
    for (int i = lane; i < tokens; i += kWarp) {
      const int r = first + i;
      const int64_t *own = a.table + int64_t(r) * a.columns, *next = own + a.columns;
      const bool valid = r < a.rows && own[0] >= 0 && own[0] < a.capacity;
      count += valid;
      if (i == 0) whole = whole && valid;
      if (i == tokens - 1 || r + 1 >= a.rows || next[0] < 0) continue;
      // The page of the row's own key belongs to no other sequence.
      whole = whole && valid && next[0] == own[0] + 1 && next[0] < a.capacity && next[1 + own[0] / kPageTokens] == own[1 + own[0] / kPageTokens];
    }
    for (int d = kWarp / 2; d > 0; d /= 2) count += __shfl_xor_sync(kAllLanes, count, d);
    if (!__all_sync(kAllLanes, whole)) count = 0;
  }
};
