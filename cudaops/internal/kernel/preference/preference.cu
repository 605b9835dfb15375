// The loss of preference pairs, from the log-probabilities of tokens. With the log-probability of an answer minus
// its log-probability under the reference as its ratio, and the answer's number of tokens:
//
//   ratio[a] = Σ logProbs[r] − reference[r] over the rows r with answers[r] = a
//   loss = mean over pairs i of f(ratio[2i], ratio[2i+1], tokens[2i], tokens[2i+1])
//   dx[r] = g / pairs · ∂f/∂ratio[answers[r]], or 0 for a row with a negative answer
//
// op.Preference has the formulas f. A pair exists if any row belongs to it. Other pairs are ignored.
//
// Sums of rows are integers, in units of 2⁻³² nats, so that the order in which threads add their rows does not
// matter. A row that is not finite or exceeds 2³⁰ nats makes its pair's loss NaN.
//
// A single block does everything but dx: the rows of a batch are few, and the loss of a pair even cheaper.
#include "common.cuh"

constexpr int kPairThreads = 1024, kPairWarps = kPairThreads / kWarp;
constexpr double kUnits = 4294967296.0, kLargest = 1073741824.0;  // 2³² and 2³⁰
constexpr unsigned kNotFinite = 1u << 31;

// The kinds of losses, as in internal/cpu/preference.
enum Kind { kSigmoid, kHinge, kIPO, kRobust };

__device__ __forceinline__ double softplus(double x) { return fmax(x, 0.0) + log1p(exp(-fabs(x))); }
__device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }

struct PairLoss {
  double loss, chosen, rejected;  // the loss and its derivatives with respect to both ratios
};

__device__ PairLoss pairLoss(const double (&ratio)[2], const unsigned (&tokens)[2], int kind, double beta, double e) {
  if (kind == kIPO) {
    const double chosen = max(1u, tokens[0]), rejected = max(1u, tokens[1]);
    const double d = ratio[0] / chosen - ratio[1] / rejected - 1 / (2 * beta);
    return {d * d, 2 * d / chosen, -2 * d / rejected};
  }
  const double z = beta * (ratio[0] - ratio[1]);
  double loss, slope;
  if (z != z) {
    loss = slope = z;  // fmax would hide it
  } else if (kind == kHinge) {
    loss = z < 1 ? 1 - z : 0, slope = z < 1 ? -1 : 0;
  } else if (kind == kRobust) {
    loss = ((1 - e) * softplus(-z) - e * softplus(z)) / (1 - 2 * e);
    slope = (-(1 - e) * sigmoid(-z) - e * sigmoid(z)) / (1 - 2 * e);
  } else {
    loss = (1 - e) * softplus(-z) + e * softplus(z);
    slope = -(1 - e) * sigmoid(-z) + e * sigmoid(z);
  }
  return {loss, beta * slope, -beta * slope};
}

// warpTotal returns the sum over a warp in every lane, always in the same order.
template <class T> __device__ __forceinline__ T warpTotal(T v) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) v += __shfl_xor_sync(kAllLanes, v, d);
  return v;
}

// addRows adds the rows of the answers to sums and tokens, which are zero before. A row of an answer that does not
// exist is left out. The rows of a warp usually belong to one answer, which then takes one addition.
__device__ __forceinline__ void addRows(unsigned long long* sums, unsigned* tokens, const float* logProbs, const float* reference,
                                        const int64_t* answers, int rows) {
  for (int first = threadIdx.x / kWarp * kWarp; first < rows; first += kPairThreads) {
    const int row = first + threadIdx.x % kWarp;
    const int64_t given = row < rows ? answers[row] : -1;
    const int answer = given >= 0 && given < 2 * int64_t(rows) ? int(given) : -1;
    const double d = answer < 0 ? 0.0 : double(logProbs[row]) - double(reference[row]);
    const bool finite = fabs(d) <= kLargest;  // false for NaN
    long long sum = finite ? __double2ll_rn(d * kUnits) : 0;
    const bool same = __all_sync(kAllLanes, answer == __shfl_sync(kAllLanes, answer, 0));
    unsigned count = 1;
    bool adds = answer >= 0, whole = finite;
    if (same) {
      sum = warpTotal(sum);
      whole = __all_sync(kAllLanes, finite);
      count = kWarp;
      adds = adds && threadIdx.x % kWarp == 0;
    }
    if (adds) {
      atomicAdd(sums + answer, (unsigned long long)sum);
      atomicAdd(tokens + answer, count);
      if (!whole) atomicOr(tokens + answer, kNotFinite);
    }
  }
}

// figures receives the number of pairs, the number of pairs whose chosen answer has the higher ratio, and the sums of
// beta times the ratios of the chosen and of the rejected answers. gradients[a] receives ∂f/∂ratio[a] for the answers
// of all pairs. Launch: one block of kPairThreads threads.
extern "C" __global__ void __launch_bounds__(kPairThreads)
    preference_loss(float* loss, float* figures, float* gradients, unsigned long long* sums, unsigned* tokens, const float* logProbs,
                    const float* reference, const int64_t* answers, int rows, int kind, float beta, float smoothing) {
  for (int a = threadIdx.x; a < 2 * rows; a += kPairThreads) sums[a] = 0, tokens[a] = 0;
  __syncthreads();
  addRows(sums, tokens, logProbs, reference, answers, rows);
  __syncthreads();

  double total = 0, reward[2] = {0, 0};
  int pairs = 0, right = 0;
  for (int pair = threadIdx.x; pair < rows; pair += kPairThreads) {
    double ratio[2];
    unsigned count[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // The atomic additions were made in L2.
      const unsigned n = __ldcg(tokens + 2 * pair + i);
      count[i] = n & ~kNotFinite;
      ratio[i] = n & kNotFinite ? double(NAN) : double((long long)__ldcg(sums + 2 * pair + i)) / kUnits;
    }
    if (count[0] + count[1] == 0) continue;
    const PairLoss l = pairLoss(ratio, count, kind, beta, smoothing);
    gradients[2 * pair] = float(l.chosen), gradients[2 * pair + 1] = float(l.rejected);
    total += l.loss, reward[0] += beta * ratio[0], reward[1] += beta * ratio[1];
    pairs++, right += ratio[0] > ratio[1];
  }

  __shared__ double totals[3][kPairWarps];
  __shared__ int counts[2][kPairWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  total = warpTotal(total), reward[0] = warpTotal(reward[0]), reward[1] = warpTotal(reward[1]);
  pairs = warpTotal(pairs), right = warpTotal(right);
  if (lane == 0) {
    totals[0][warp] = total, totals[1][warp] = reward[0], totals[2][warp] = reward[1];
    counts[0][warp] = pairs, counts[1][warp] = right;
  }
  __syncthreads();
  if (warp) return;
  static_assert(kPairWarps == kWarp, "a lane for each warp");
  total = warpTotal(totals[0][lane]), reward[0] = warpTotal(totals[1][lane]), reward[1] = warpTotal(totals[2][lane]);
  pairs = warpTotal(counts[0][lane]), right = warpTotal(counts[1][lane]);
  if (lane) return;
  loss[0] = float(total / pairs);
  figures[0] = float(pairs), figures[1] = float(right), figures[2] = float(reward[0]), figures[3] = float(reward[1]);
}

// dx from the gradients of answers and the number of pairs, figures[0]. Launch: 256 threads, one for each row.
extern "C" __global__ void __launch_bounds__(256)
    preference_loss_gradient(float* dx, const float* gradients, const float* figures, const float* g, const int64_t* answers, int rows) {
  const int row = blockIdx.x * 256 + threadIdx.x;
  if (row >= rows) return;
  const int64_t answer = answers[row];
  const bool exists = answer >= 0 && answer < 2 * int64_t(rows);
  dx[row] = exists ? g[0] / figures[0] * gradients[answer] : 0.0f;
}
