// A matrix product on Hopper (sm_90a) with the residual that is added to it and the RMSNorm of the sum, for bf16 and f16:
//
//   s = x·wᵀ + c,  rstd = 1/sqrt(mean(s²) + eps) of its rows,  y = s·rstd ⊙ g
//
// with w [columns, depth], x [rows, depth], g [columns] in float32, and s, c and y [rows, columns]. Sums, c among them, are rounded once,
// and what is rounded is normalised.
//
// gemm_hopper.cuh says how a block goes about it. A norm needs whole rows, and a tile has 256 columns of them. But all tiles of a row are
// worked on at once, each by another cluster, and what they must know of one another is a number a row: the sum of its squares in that
// tile. So a warp leaves those of its 16 rows in memory as soon as it can, stores s while the others do the same, then reads theirs and
// adds them up in the order of the columns; and of the rounded sums, which its registers still hold, makes y. Nothing is read again.
//
// A number lies there with a tag, 8 bytes that are written and read at once, and a number with another tag has not come yet: no order
// of accesses is asked for. Tags count the launches that the memory has served; the last cluster to end counts on.
//
// Warps wait for others, which must not wait for them. A tile's squares are there when its cluster has begun its next turn (Order), and
// warps wait only for tiles of the turn before the one in which they wait, so that nobody waits in a circle, whatever the order in which
// clusters come to run. All must get to run, as they do: there are no more than fit, and kernels beside them end by themselves.
//
// Needs: columns and depth multiples of 8, matrices at multiples of 16 bytes.
#include "gemm_hopper.cuh"

namespace gemm {

// What tiles know of one another, behind one another in memory: this, and for each 16 rows and each column of tiles a Tagged for each row.
// It is to be zeros at first, and to be kept from launch to launch; launches that share it follow one another.
struct Launches {
  unsigned ended;  // clusters
  unsigned before;
};
struct Tagged {
  float v;
  unsigned tag;
};

// The launcher fills it.
struct Params {
  Launches *launches;
  float *rstd;
  const float *g;
  int rows, columns, depth;
  int down;  // of Order
  float eps;
};

#if defined(HOPPER)

constexpr int kColumns = 256, kStages = 4, kParts = kColumns / 64;

using Shared = Memory<kColumns, kStages, 2 * kPanel>;

// The tiles of a cluster: it keeps to one column of tiles, `down` clusters to each, which go down it together. So the tiles of a row are all
// of one turn.
struct Order {
  int rows, down, rank, column, next;
  __device__ explicit Order(const Params &p)
      : rows((p.rows + kCluster * kRows - 1) / (kCluster * kRows)), down(p.down), rank(blockIdx.x % kCluster),
        column(blockIdx.x / kCluster / p.down * kColumns), next(blockIdx.x / kCluster % p.down) {}
  __device__ bool take(Tile &t) {
    if (next >= rows) return false;
    t = {(kCluster * next + rank) * kRows, column};
    next += down;
    return true;
  }
};

// Where the weights of the norm for a block's columns lie in shared memory: those which a lane needs for 16 columns, 4 of them, are
// neighbours.
__device__ inline int weightAt(int column) { return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2; }

__device__ inline void put(Tagged *to, float v, unsigned tag) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(v)), "r"(tag) : "memory");
}

__device__ inline Tagged get(const Tagged *from) {
  uint32_t v, tag;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(v), "=r"(tag) : "l"(from) : "memory");
  return {__uint_as_float(v), tag};
}

__device__ inline unsigned launchesBefore(const Launches *l) {
  unsigned n;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(&l->before) : "memory");
  return n;
}

// The sum over the four lanes that have columns of the same rows.
__device__ inline float quadSum(float v) {
  v += __shfl_xor_sync(kAllLanes, v, 1);
  return v + __shfl_xor_sync(kAllLanes, v, 2);
}

// A tile leaves 64 columns of s at a time, then 64 columns of y at a time, behind which c comes.
template <typename T> struct Normed : AddedSums<T, kColumns> {
  using Sums = AddedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column, Sums::panels;
  static constexpr int kSlots = 2 * kParts + 1;
  const Params &p;
  const TensorMap &s, &c, &y;
  const int across;  // tiles of a row
  const unsigned tag;
  const uint32_t weights;
  Tagged asked[2][2];  // tiles, rows
  float rstd[2];

  __device__ Normed(const Params &p, const TensorMap &s, const TensorMap &c, const TensorMap &y, const Shared &m, int warp)
      : Sums(p.rows, m.panels(warp), m.barriers(warp)), p(p), s(s), c(c), y(y), across((p.columns + kColumns - 1) / kColumns),
        tag(launchesBefore(p.launches) + 1), weights(m.factors(0) + threadIdx.x % 4 * 16) {}

  // Where this lane's first row lies, in a column of tiles; the other one is 8 further on.
  __device__ Tagged *squares(int tile) const {
    return (Tagged *)(p.launches + 1) + (row / 16 * across + tile) * 16 + threadIdx.x % 32 / 4;
  }

  __device__ void leaveSquares() const {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 f = unpack(v[n][half], T());
        sum[half] = fmaf(f.x, f.x, sum[half]);
        sum[half] = fmaf(f.y, f.y, sum[half]);
      }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] = quadSum(sum[half]);
      if (threadIdx.x % 4 == 0) put(squares(column / kColumns) + 8 * half, sum[half], tag);
    }
  }

  // Asks for the squares of this lane's next two tiles, which may be one, or none.
  __device__ void askSquares(int tile) {
    if (tile >= across) return;
    const Tagged *one = squares(tile), *other = tile + 4 < across ? squares(tile + 4) : one;
#pragma unroll
    for (int half = 0; half < 2; half++) asked[0][half] = get(one + 8 * half), asked[1][half] = get(other + 8 * half);
  }

  // Waits for the squares of all tiles, of which the first have been asked for.
  __device__ void addSquares() {
    float sum[2] = {};
#pragma unroll 1
    for (int tile = threadIdx.x % 4; tile < across;) {
      while (asked[0][0].tag != tag || asked[0][1].tag != tag || asked[1][0].tag != tag || asked[1][1].tag != tag) askSquares(tile);
#pragma unroll
      for (int half = 0; half < 2; half++) sum[half] += tile + 4 < across ? asked[0][half].v + asked[1][half].v : asked[0][half].v;
      tile += 8;
      askSquares(tile);
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rstd[half] = rsqrtf(quadSum(sum[half]) / p.columns + p.eps);
      const int r = row + threadIdx.x % 32 / 4 + 8 * half;
      if (column == 0 && threadIdx.x % 4 == 0 && r < p.rows) p.rstd[r] = rstd[half];
    }
  }

  // Puts 64 columns of y into a panel.
  __device__ void leaveNormed(int part, uint32_t panel) const {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      float g[2][2];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(g[0][0]), "=f"(g[0][1]), "=f"(g[1][0]), "=f"(g[1][1])
                   : "r"(weights + (8 * part + n) * 32)
                   : "memory");
      uint32_t w[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 f = unpack(v[8 * part + n + i][half], T());
          w[i][half] = pack(f.x * rstd[half] * g[i][0], f.y * rstd[half] * g[i][1], T());
        }
      storeMatrices(chunkOf<64>(panel) ^ n * 16, w[0], w[1]);
    }
    store(y, panel, column + 64 * part, row, 0);
  }

  __device__ void finish(int slot, int nextRow, int nextColumn, bool more) {
    const bool some = row < p.rows;
    if (slot == 0 && some) leaveSquares();
    if (slot < kParts) {
      const uint32_t panel = panels + slot % 2 * kPanel;
      storesRead<1>();
      leaveColumns(v, 8 * slot, panel);
      store(s, panel, column + 64 * slot, row, 0);
      if (slot == kParts - 1 && some) askSquares(threadIdx.x % 4);
    } else if (slot < 2 * kParts && some) {
      if (slot == kParts) addSquares();
      storesRead<0>();
      leaveNormed(slot - kParts, panels);
    }
    if (more) {
      if (slot > kParts) this->accept(slot - kParts - 1);
      if (slot >= kParts && slot < 2 * kParts) this->ask(c, slot - kParts, nextRow, nextColumn);
      __syncwarp();
    }
  }

  __device__ void take(Accumulator<1, kColumns> &sums, int row, int column) {
    this->add(sums);
    Sums::take(sums, row, column);
  }
};

template <typename T>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &s, const TensorMap &c,
                           const TensorMap &y) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  const Order order(p);
  if (threadIdx.x < kColumns) {
    const int column = order.column + threadIdx.x;
    storeWord(m.factors(0) + 4 * weightAt(threadIdx.x), column < p.columns ? __float_as_uint(p.g[column]) : 0);
  }
  multiply<T, 0>(m, order, p.depth, x, Right<0>{w},
                 [&](int warp) { return Normed<T>(p, s, c, y, m, warp); });
  if (threadIdx.x == 0 && blockIdx.x % kCluster == 0 && atomicInc(&p.launches->ended, gridDim.x / kCluster - 1) == gridDim.x / kCluster - 1)
    p.launches->before++;  // all have read it
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, `down` for each column of tiles and no more than run at once. Dynamic shared memory:
// see Memory, with room for the factors of a tile.
#define DEFINE(T)                                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                        \
      gemm_hopper_norm_##T(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,                       \
                           const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap s,                          \
                           const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap y) {                        \
    BODY(run<T>(p, x, w, s, c, y));                                                                                           \
  }
DEFINE(bf16)
DEFINE(f16)
