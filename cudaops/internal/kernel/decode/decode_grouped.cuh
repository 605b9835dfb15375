// Division of the rows of a batch between two kernels for attention to pages: decode_chunk.cu computes the tokens of
// prompts, many at a time, and decode_grouped.cu computes all other rows. Both are launched with the same arguments, and
// each skips the rows of the other, because only the table in device memory tells which rows belong together.
#pragma once
#include "decode_attention.cuh"
#include "decode_paged.cuh"

struct Grouped {
  Paged paged;
  int tokens;  // rows of a chunk, a divisor of the number of rows of a tile; 0 if decode_grouped.cu computes all rows
};

// Chunk is the chunk to which a row belongs: `tokens` rows of the table, starting at a multiple of `tokens`. decode_chunk.cu
// computes it if it is whole, which means that its first rows are consecutive tokens of one sequence, and any rows after
// them have no sequence.
struct Chunk {
  int first, count;  // its first row and the number of its tokens, which is 0 if the chunk is not whole

  // All lanes of a warp must call the constructor. Each lane checks every kWarp-th row.
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
      // The next row belongs to the same sequence if its page for this token is the same: no other sequence has the page
      // to which this token's own key was just added.
      whole = whole && valid && next[0] == own[0] + 1 && next[0] < a.capacity && next[1 + own[0] / kPageTokens] == own[1 + own[0] / kPageTokens];
    }
    for (int d = kWarp / 2; d > 0; d /= 2) count += __shfl_xor_sync(kAllLanes, count, d);
    if (!__all_sync(kAllLanes, whole)) count = 0;
  }
};
