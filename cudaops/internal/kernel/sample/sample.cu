// Drawing tokens from logits.
//
// sample draws one token for every row, exactly as package internal/cpu/sampling defines it. Weights are
// integers, so that their sums don't depend on the order in which blocks and threads add them.
//
// The blocks of a row divide its vocabulary and keep their part, after penalties and biases, in shared
// memory. They wait for each other after each step:
//
//   1. the largest logit
//   2. with top-k or top-p, a histogram of counts and weights over buckets of similar weights
//   3. for top-k and for top-p, three histograms over 11, 11 and 10 bits of the logits in the bucket that
//      contains the last token to keep; they yield the token's logit and the number of tied tokens to keep
//   4. the weight of the tokens to keep in each block
//
// The block that contains the token then finds it. Tokens are in the order of their ids.
//
// feed replaces ids by tokens of the preceding launch of sample.
#include "common.cuh"

using u64 = unsigned long long;
using u32 = unsigned;

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kBins = 2048, kMostBlocks = 64, kHistograms = 3;
constexpr int kRuleWords = 16, kEntryWords = 2;
constexpr int kLeast = -41, kBuckets = 16;  // weights are 0 below 2^kLeast; buckets per power of two

enum Kind { kNone = -1, kGreedy = 0, kDraw = 1 };

// Rule describes how to draw a row's token. The fields must match Encode in sample.go.
struct Rule {
  int64_t kind;
  u64 uniform;
  int64_t topK;
  u64 topP, minWeight;
  int64_t vocab;
  float scale, repetition, presence, frequency;
  int64_t firstEntry, entries;
  int64_t pending;  // the row of ids with a token that the entries don't count yet, or -1
  int64_t unused[5];
};
static_assert(sizeof(Rule) == 8 * kRuleWords, "the host writes words");

// Entry is a token with a penalty or bias.
struct Entry {
  u32 id, drawn;  // the highest bit of id means that the token has occurred
  float bias;
  u32 unused;
};
static_assert(sizeof(Entry) == 8 * kEntryWords, "the host writes words");

// State is the memory shared by the blocks of a row. All of it except above and ties is zero before and after a
// launch.
struct State {
  u64 best;  // the key of the largest logit, and the complement of the id
  u32 arrived, left, bad, unused;
  u64 above[kMostBlocks];  // the weight of a block's tokens that are certainly kept
  u32 ties[kMostBlocks], unusedToo[kMostBlocks];  // the number of a block's tokens with the last logit
  u64 weights[kHistograms][kBins];
  u32 counts[kHistograms][kBins];
};

// Histogram contains a block's counts and weights, in shared memory.
struct Histogram {
  u64 weights[kBins];
  u32 counts[kBins];
};

// Amount is a number of tokens and their weight.
struct Amount {
  u64 weight;
  u32 count;
};

// Cut keeps the tokens with a larger logit, and the first `ties` tokens with the same logit.
struct Cut {
  bool all;
  float logit;
  u32 ties;
};

// ---- numbers; every operation is rounded, and none are fused ----

__device__ __forceinline__ u64 weightOf(float d, float scale) {
  const float y = __fmul_rn(d, scale);
  if (!(y > float(kLeast))) return 0;
  int n = int(y);
  if (float(n) > y) n--;
  const float f = __fsub_rn(y, float(n));
  float p = 0.0002187005903097338f;
  p = __fadd_rn(__fmul_rn(p, f), 0.001239498692757616f);
  p = __fadd_rn(__fmul_rn(p, f), 0.00968310128987789f);
  p = __fadd_rn(__fmul_rn(p, f), 0.05548165297234183f);
  p = __fadd_rn(__fmul_rn(p, f), 0.24023005134917472f);
  p = __fadd_rn(__fmul_rn(p, f), 0.6931469951055382f);
  p = __fadd_rn(__fmul_rn(p, f), 1.0f);
  return u64(int(__fmul_rn(p, 8388608.0f))) << 17 >> -n;
}

// bucketOf returns the bucket of a token with a positive weight. Larger logits have smaller buckets.
__device__ __forceinline__ int bucketOf(float d, float scale) { return int(__fmul_rn(-__fmul_rn(d, scale), float(kBuckets))); }

// keyOf returns a number with the order of the logits.
__device__ __forceinline__ u32 keyOf(float logit) {
  const u32 bits = __float_as_uint(logit);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logitOf(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

__device__ __forceinline__ bool finite(float x) { return __fsub_rn(x, x) == 0; }

__device__ __forceinline__ float adjusted(const Rule& r, float logit, bool occurred, u32 drawn, float bias) {
  if (!finite(logit)) return logit;
  if (occurred && r.repetition != 0 && r.repetition != 1)
    logit = logit > 0 ? __fdiv_rn(logit, r.repetition) : __fmul_rn(logit, r.repetition);
  if (drawn > 0) logit = __fsub_rn(logit, __fadd_rn(__fmul_rn(float(drawn), r.frequency), r.presence));
  return __fadd_rn(logit, bias);
}

__device__ __forceinline__ u64 needed(u64 share, u64 total) {
  const u64 high = total >> 32, low = total & 0xffffffffull;
  return share * high + ((share * low + 0xffffffffull) >> 32);
}

// ---- cooperation ----

__device__ __forceinline__ void arrive(u32* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}

// meet waits until all blocks of the row have called arrive or meet `times` times.
__device__ __forceinline__ void meet(u32* arrived, u32 times) {
  arrive(arrived);
  if (threadIdx.x == 0) {
    u32 n;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(arrived) : "memory");
    while (n < times * gridDim.x);
  }
  __syncthreads();
}

__device__ __forceinline__ u64 sumOfWarp(u64 v) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) v += __shfl_xor_sync(kAllLanes, v, d);
  return v;
}

// Part is a block's part of a row.
struct Part {
  float* logits;  // in shared memory
  int first, count;
  Histogram* histogram;
  State* state;
  Rule rule;
  float largest;
  u32 meetings;
  int passes;  // histograms so far

  __device__ __forceinline__ u64 weight(float logit) const { return weightOf(__fsub_rn(logit, largest), rule.scale); }
  __device__ __forceinline__ int bucket(float logit) const { return bucketOf(__fsub_rn(logit, largest), rule.scale); }

  // tally computes a histogram of the row's tokens with a positive weight: each block counts its part in shared memory
  // and adds that to the histogram in memory, and then waits for the other blocks. binOf returns the bin of a logit, or
  // -1 to leave it out. The histogram remains valid during the next call of tally.
  template <class BinOf> __device__ __forceinline__ void tally(BinOf binOf) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) histogram->weights[i] = 0, histogram->counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const u64 w = weight(logits[i]);
      const int bin = w > 0 ? binOf(logits[i]) : -1;
      if (bin >= 0) {
        atomicAdd(&histogram->weights[bin], w);
        atomicAdd(&histogram->counts[bin], 1u);
      }
    }
    __syncthreads();
    const int to = passes++ % kHistograms;
    for (int i = threadIdx.x; i < kBins; i += kThreads)
      if (histogram->counts[i] > 0) {
        atomicAdd(&state->weights[to][i], histogram->weights[i]);
        atomicAdd(&state->counts[to][i], histogram->counts[i]);
      }
    meet(&state->arrived, ++meetings);
    if (passes > 1) clear(passes - 2);
  }

  // clear sets this block's share of an earlier histogram to zero. All blocks must have read that histogram.
  __device__ __forceinline__ void clear(int pass) {
    const int of = pass % kHistograms;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < kBins; i += gridDim.x * kThreads)
      state->weights[of][i] = 0, state->counts[of][i] = 0;
  }

  // find adds up the bins of the histogram of a pass, in ascending or descending order, until the sum of their counts or
  // weights reaches a target, and returns the bin with which it does. It subtracts the bins before that one from the
  // target, and adds them to passed. The target must not exceed the sum of all bins.
  //
  // A thread has `each` adjacent bins. The sum before them is a prefix sum over the lanes of a warp and over the warps.
  __device__ __forceinline__ int find(int pass, bool descending, bool byCount, u64* target, Amount* passed) {
    __shared__ Amount sums[kWarps], before;
    __shared__ u64 rest;
    __shared__ int found;
    constexpr int each = kBins / kThreads;
    const int of = pass % kHistograms, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    Amount own[each], sum{0, 0};
#pragma unroll
    for (int i = 0; i < each; i++) {
      const int at = threadIdx.x * each + i, bin = descending ? kBins - 1 - at : at;
      own[i] = Amount{__ldcg(&state->weights[of][bin]), __ldcg(&state->counts[of][bin])};
      sum.weight += own[i].weight, sum.count += own[i].count;
    }
    Amount upTo = sum;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const u64 w = __shfl_up_sync(kAllLanes, upTo.weight, d);
      const u32 c = __shfl_up_sync(kAllLanes, upTo.count, d);
      if (lane >= d) upTo.weight += w, upTo.count += c;
    }
    __syncthreads();  // all threads have read the preceding call's results
    if (lane == kWarp - 1) sums[warp] = upTo;
    __syncthreads();
    for (int w = 0; w < warp; w++) upTo.weight += sums[w].weight, upTo.count += sums[w].count;
    Amount at{upTo.weight - sum.weight, upTo.count - sum.count};
#pragma unroll
    for (int i = 0; i < each; i++) {
      const u64 from = byCount ? at.count : at.weight, size = byCount ? own[i].count : own[i].weight;
      if (from < *target && *target <= from + size) {
        const int bin = threadIdx.x * each + i;
        found = descending ? kBins - 1 - bin : bin, rest = *target - from, before = at;
      }
      at.weight += own[i].weight, at.count += own[i].count;
    }
    __syncthreads();
    *target = rest;
    passed->weight += before.weight, passed->count += before.count;
    return found;
  }

  // cut keeps as few of the most probable tokens as have a total count or weight of at least the target, and sets kept to
  // their weight. Pass bucketPass must be the histogram of buckets. cut finds the bucket in which the target is reached,
  // and then the logit in this bucket, 11, 11 and 10 bits at a time.
  __device__ __forceinline__ Cut cut(bool byCount, u64 target, int bucketPass, u64* kept) {
    Amount passed{0, 0};
    const int b = find(bucketPass, false, byCount, &target, &passed);
    const int shifts[] = {21, 10, 0}, masks[] = {2047, 2047, 1023};
    u32 key = 0;
#pragma unroll 1
    for (int level = 0; level < 3; level++) {
      const int shift = shifts[level], mask = masks[level];
      const u32 high = key;
      const int above = level == 0 ? 32 : shifts[level - 1];
      tally([&](float logit) {
        const u32 k = keyOf(logit);
        const bool same = above == 32 || k >> above == high >> above;
        return same && bucket(logit) == b ? int(k >> shift & mask) : -1;
      });
      key |= u32(find(passes - 1, true, byCount, &target, &passed)) << shift;
    }
    Cut c{false, logitOf(key), 0};
    const u64 w = weight(c.logit);
    c.ties = byCount ? u32(target) : u32((target + w - 1) / w);
    *kept = passed.weight + c.ties * w;
    return c;
  }

  // sumOf returns the weight and the number of all tokens in the histogram of a pass.
  __device__ __forceinline__ Amount sumOf(int pass) {
    __shared__ Amount sums[kWarps];
    const int of = pass % kHistograms;
    Amount own{0, 0};
    for (int i = threadIdx.x; i < kBins; i += kThreads)
      own.weight += __ldcg(&state->weights[of][i]), own.count += __ldcg(&state->counts[of][i]);
    own.weight = sumOfWarp(own.weight), own.count = u32(sumOfWarp(own.count));
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = own;
    __syncthreads();
    Amount all{0, 0};
    for (int w = 0; w < kWarps; w++) all.weight += sums[w].weight, all.count += sums[w].count;
    __syncthreads();
    return all;
  }

  // certain returns the weight of a token that is kept whatever happens to tied tokens, and 0 for all others. For a tied
  // token, it adds 1 to *ties.
  __device__ __forceinline__ u64 certain(const Cut& c, float logit, u32* ties) const {
    if (!c.all && logit == c.logit) {
      ++*ties;
      return 0;
    }
    const u64 w = c.all || logit > c.logit ? weight(logit) : 0;
    return w >= rule.minWeight ? w : 0;
  }

  // pick draws a token from those that the cut keeps. All blocks of the row compute which of them has it, and that block
  // finds it in its part and stores it.
  __device__ __forceinline__ void pick(const Cut& c, int64_t* token) {
    __shared__ u64 above[kMostBlocks > kWarps ? kMostBlocks : kWarps];
    __shared__ u32 ties[kMostBlocks > kWarps ? kMostBlocks : kWarps];
    __shared__ u64 rest;
    __shared__ u32 quota;
    __shared__ int owner;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    // Each warp has a range of consecutive ids, so that the sums of the warps before it are those of all smaller ids.
    const int each = (count + kWarps * kWarp - 1) / (kWarps * kWarp) * kWarp;
    const int from = min(warp * each, count), to = min(from + each, count);
    u64 own = 0;
    u32 tied = 0;
    for (int i = from + lane; i < to; i += kWarp) own += certain(c, logits[i], &tied);
    own = sumOfWarp(own), tied = u32(sumOfWarp(tied));
    if (lane == 0) above[warp] = own, ties[warp] = tied;
    __syncthreads();
    const u64 tieWeight = c.all || weight(c.logit) < rule.minWeight ? 0 : weight(c.logit);
    u64 sum = 0;
    u32 sumOfTies = 0;
    if (threadIdx.x == 0) {
      for (int w = 0; w < kWarps; w++) sum += above[w], sumOfTies += ties[w];
      state->above[blockIdx.x] = sum, state->ties[blockIdx.x] = sumOfTies;
    }
    const u64 ownAbove = threadIdx.x < kWarps ? above[threadIdx.x] : 0;  // of warp threadIdx.x
    const u32 ownTies = threadIdx.x < kWarps ? ties[threadIdx.x] : 0;
    meet(&state->arrived, ++meetings);
    if (passes > 0) clear(passes - 1);

    if (threadIdx.x < gridDim.x) {
      above[threadIdx.x] = __ldcg(&state->above[threadIdx.x]);
      ties[threadIdx.x] = __ldcg(&state->ties[threadIdx.x]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 left = c.ties;
      u64 total = 0;
      for (int b = 0; b < gridDim.x; b++) {
        const u32 n = min(left, ties[b]);
        total += above[b] + n * tieWeight, left -= n;
      }
      u64 at = __umul64hi(rule.uniform, total);
      left = c.ties, owner = -1;
      for (int b = 0; b < gridDim.x; b++) {
        const u32 n = min(left, ties[b]);
        const u64 here = above[b] + n * tieWeight;
        if (at < here) {
          owner = b, rest = at, quota = left;
          break;
        }
        at -= here, left -= n;
      }
    }
    __syncthreads();
    if (owner != blockIdx.x) return;

    // Find the warp that has the token in the same way as the block.
    if (threadIdx.x < kWarps) above[threadIdx.x] = ownAbove, ties[threadIdx.x] = ownTies;
    __syncthreads();
    if (threadIdx.x == 0) {
      owner = -1;
      for (int w = 0; w < kWarps; w++) {
        const u32 n = min(quota, ties[w]);
        const u64 here = above[w] + n * tieWeight;
        if (rest < here) {
          owner = w;
          break;
        }
        rest -= here, quota -= n;
      }
    }
    __syncthreads();
    if (owner != warp) return;

    u64 at = rest;
    u32 left = quota;
    for (int i0 = from; i0 < to; i0 += kWarp) {
      const int i = i0 + lane;
      u32 tie = 0;
      u64 w = i < to ? certain(c, logits[i], &tie) : 0;
      const u32 tiesHere = __ballot_sync(kAllLanes, tie);
      if (tie && __popc(tiesHere & ((1u << lane) - 1)) < left) w = tieWeight;
      u64 upTo = w;
#pragma unroll
      for (int d = 1; d < kWarp; d *= 2) {
        const u64 v = __shfl_up_sync(kAllLanes, upTo, d);
        if (lane >= d) upTo += v;
      }
      const u32 reached = __ballot_sync(kAllLanes, at < upTo);
      if (reached) {
        if (lane == __ffs(reached) - 1) *token = first + i;
        return;
      }
      at -= __shfl_sync(kAllLanes, upTo, kWarp - 1);
      left -= min(left, u32(__popc(tiesHere)));
    }
  }
};

// loadPart reads the block's part of the logits, and applies penalties and biases.
template <class T>
__device__ __forceinline__ void loadPart(Part& p, const T* logits, const Entry* entries, const int64_t* ids) {
  __shared__ int listed;
  for (int i = threadIdx.x; i < p.count; i += kThreads) p.logits[i] = toFloat(logits[p.first + i]);
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  const Rule& r = p.rule;
  const int64_t pending = r.pending >= 0 ? ids[r.pending] : -1;
  for (int64_t i = threadIdx.x; i < r.entries; i += kThreads) {
    const Entry e = entries[r.firstEntry + i];
    const int64_t id = e.id & 0x7fffffffu;
    if (id < p.first || id >= p.first + p.count) continue;
    const bool again = id == pending;
    if (again) listed = 1;
    float& x = p.logits[id - p.first];
    x = adjusted(r, x, e.id >> 31 || again, e.drawn + again, e.bias);
  }
  __syncthreads();
  if (threadIdx.x == 0 && !listed && pending >= p.first && pending < p.first + p.count) {
    float& x = p.logits[pending - p.first];
    x = adjusted(r, x, true, 1, 0.0f);
  }
  __syncthreads();
}

// Launch: a cooperative grid of [blocks of a row, rows at the same time], with shared memory for `most` logits and
// a Histogram.
template <class T>
__device__ __forceinline__ void sample(int64_t* tokens, const T* logits, const int64_t* ids, const Rule* rules,
                                       const Entry* entries, State* states, int rows, int n, int most) {
  extern __shared__ __align__(16) char memory[];
  __shared__ u64 best[kWarps];
  __shared__ int bad;
  Part p;
  p.histogram = reinterpret_cast<Histogram*>(memory);
  p.logits = reinterpret_cast<float*>(memory + sizeof(Histogram));
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    p.rule = rules[row];
    p.state = states + row;
    p.meetings = 0, p.passes = 0;
    if (p.rule.kind == kNone) {
      if (blockIdx.x == 0 && threadIdx.x == 0) tokens[row] = -1;
      continue;
    }
    const int vocab = p.rule.vocab > 0 && p.rule.vocab < n ? int(p.rule.vocab) : n;
    p.first = min(int(blockIdx.x) * most, vocab), p.count = min(most, vocab - p.first);
    __syncthreads();  // all threads are done with the preceding row
    if (threadIdx.x == 0) bad = 0;
    loadPart(p, logits + int64_t(row) * n, entries, ids);

    u64 own = 0;
    for (int i = threadIdx.x; i < p.count; i += kThreads) {
      float x = p.logits[i];
      if (x == 0) p.logits[i] = x = 0;  // −0 equals 0
      if (x != x || x == INFINITY) bad = 1;
      if (x > -INFINITY) {
        const u64 key = u64(keyOf(x)) << 32 | (0xffffffffu - u32(p.first + i));
        own = key > own ? key : own;
      }
    }
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) {
      const u64 other = __shfl_xor_sync(kAllLanes, own, d);
      own = other > own ? other : own;
    }
    if (threadIdx.x % kWarp == 0) best[threadIdx.x / kWarp] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; w++) own = best[w] > own ? best[w] : own;
      if (own > 0) atomicMax(&p.state->best, own);
      if (bad) atomicOr(&p.state->bad, 1u);
    }

    if (p.rule.kind == kGreedy && blockIdx.x > 0) {
      arrive(&p.state->arrived);
    } else {
      meet(&p.state->arrived, ++p.meetings);
      const u64 winner = __ldcg(&p.state->best);
      const bool none = winner == 0 || __ldcg(&p.state->bad);
      if (none || p.rule.kind == kGreedy) {
        if (blockIdx.x == 0 && threadIdx.x == 0) tokens[row] = none ? -1 : int64_t(0xffffffffu - u32(winner));
      } else {
        p.largest = logitOf(u32(winner >> 32));
        Cut c{true, 0, 0};
        u64 kept = 0;
        if (p.rule.topK > 0 || p.rule.topP > 0) {
          const auto buckets = [&](float logit) { return p.bucket(logit); };
          p.tally(buckets);
          const Amount all = p.sumOf(p.passes - 1);
          kept = all.weight;
          if (p.rule.topK > 0 && p.rule.topK < all.count) {
            c = p.cut(true, p.rule.topK, p.passes - 1, &kept);
            if (p.rule.topP > 0) p.tally(buckets);
          }
          if (p.rule.topP > 0) {
            const u64 enough = needed(p.rule.topP, kept);
            if (enough < all.weight) c = p.cut(false, enough, p.passes - 1, &kept);
          }
        }
        p.pick(c, tokens + row);
      }
    }

    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      if (atomicAdd(&p.state->left, 1u) == gridDim.x - 1) {
        p.state->best = 0;
        p.state->arrived = 0, p.state->left = 0, p.state->bad = 0;
      }
    }
  }
}

#define DEFINE(T)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                           \
      sample_##T(int64_t* tokens, const T* logits, const int64_t* ids, const Rule* rules, const Entry* entries,    \
                 State* states, int rows, int n, int most) {                                                       \
    sample<T>(tokens, logits, ids, rules, entries, states, rows, n, most);                                         \
  }
FOR_STORAGE_TYPES(DEFINE)

// Launch: one block. from[i] is a row of tokens, or -1.
extern "C" __global__ void __launch_bounds__(kThreads)
    sample_feed(int64_t* ids, const int64_t* from, const int64_t* tokens, int rows) {
  for (int i = threadIdx.x; i < rows; i += kThreads)
    if (from[i] >= 0) {
      const int64_t token = tokens[from[i]];
      ids[i] = token < 0 ? 0 : token;  // the host ignores later results of a row without a token
    }
}
