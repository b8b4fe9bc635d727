// Backward pass on the CUDA cores: the gradient of a bias, dS summed over whatever the bias was broadcast over.
//
// A block owns a tile of the bias (attn/bias_grid.cuh) and recomputes dS for every (batch item, query head, query tile,
// key tile) that fell on it, in order; long walks are cut into p.splits runs, which prepost/sum_partials.cu adds in
// order. Nothing is held per element of the score matrix but the bias itself; the same bits every time.
//
//   block     one (owner item, owner head, owner tile, run);  threads as in forward.cu
//   shared    a  kBlockQ x kChunk of q, then of dout;   b  kBlockKV x kChunk of k, then of v;   lse, delta  kBlockQ
//             tile  kBlockQ x kBlockKV: mask and bias; at the end the sums
//
//   tile       | addends, load q k | S += q k^T | .. | P | load dO v | dP += dO v^T | .. | sum += P * (r * dP - delta') |
//   barriers   #                   #            #        #           #              #
#include "attn/bias_grid.cuh"
#include "simt/work.cuh"

using Tile = ScoreTile<true>;
constexpr i32 kQ = Tile::kQ, kK = Tile::kK;

struct SharedStorage {
  Work work;
  Score a[kBlockQ * kRow];
  Score b[kBlockKV * kRow];
  Score tile[kBlockQ * Tile::kStep];
  Score lse[kBlockQ], delta[kBlockQ];      // by slot
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "the launch gives what the kernel uses");

struct Place { i32 row, col; };

// acc = a b^T over a head dim, chunk by chunk.
CF_DEVICE void products(Tile::Scores& acc, SharedStorage& smem, const TensorRows& a, const TensorRows& b, const Place& at,
                        i32 width, Score factor = Score(1)) {
  clear(acc);
  for (i32 chunk = 0; chunk * kChunk < width; ++chunk) {
    block_barrier();                       // the chunk before has been read
    load_queries<Tile>(smem.a, a, smem.work, at.row, chunk, width, factor);
    load_keys<Tile>(smem.b, b, smem.work, at.col, chunk, width);
    block_barrier();                       // the chunk is there
    multiply_by_transposed<kQ, kK, kLanesY * kRow, kLanesX * kRow>(acc, smem.a + lane_y() * kRow,
                                                                   smem.b + lane_x() * kRow, chunk_depth(chunk, width));
  }
}

// Products become weights.
CF_DEVICE void weigh(Tile::Scores& s, SharedStorage& smem, const Place& at) {
  const Work& work = smem.work;
  const bool whole = work.sight.keys_of_all(at.row, at.row + kBlockQ).covers(at.col, at.col + kBlockKV);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    Score unused[kK];
    Tile::shape(q, s[q], unused, work.terms, smem.tile, work.sight, at.row, at.col, whole);
    const Score lse = smem.lse[lane_y() + q * kLanesY];
    CF_UNROLL
    for (int k = 0; k < kK; ++k) s[q][k] = weight_of(s[q][k], lse);
  }
}

// Adds the dS of one tile of one score matrix.
CF_DEVICE void add_tile(Tile::Scores& sum, SharedStorage& smem, const Params& p, const Place& at) {
  const Work& work = smem.work;
  const Interval some = work.sight.keys_of_some(at.row, at.row + kBlockQ);
  if (some.stop <= at.col || at.col + kBlockKV <= some.start) return;
  Tile::Scores weights, dp;
  load_row_numbers<Tile>(smem.lse, smem.delta, work, at.row);
  if constexpr (kMaskOrBias) AddendTile<Tile>::stage(smem.tile, work.addends, work.sight, at.row, at.col);
  products(weights, smem, work.q, work.k, at, p.head_dim, work.terms.scale);
  weigh(weights, smem, at);
  products(dp, smem, work.dout, work.v, at, p.head_dim_v);
  const Tile::Bits kept = kDropout ? Tile::keep_bits(work.dropout, at.row, at.col) : 0;
  const Score scale = kDropout ? dropout_scale<Score>(p) : Score(1);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    const Score delta = smem.delta[lane_y() + q * kLanesY];
    CF_UNROLL
    for (int k = 0; k < kK; ++k) {
      const bool keep = Tile::keeps(kept, q, k);
      sum[q][k] += gradient_of(weights[q][k], keep ? scale * dp[q][k] : Score(0), delta);
    }
  }
}

// The tile's sums in shared memory; along an axis that the bias lacks, slot 0 gets the sum over all slots, in order.
CF_DEVICE void fold(const Tile::Scores& sum, SharedStorage& smem, const Params& p) {
  block_barrier();                         // the addends have been read
  Tile::store(sum, smem.tile);
  block_barrier();                         // the sums are there
  if (!p.own_rows) {
    for (i32 k = thread_index(); k < kBlockKV; k += kThreads) {
      for (i32 q = 1; q < kBlockQ; ++q) smem.tile[k] += smem.tile[q * Tile::kStep + k];
    }
    block_barrier();                       // row 0 is there
  }
  if (!p.own_cols) {
    for (i32 q = thread_index(); q < kBlockQ; q += kThreads) {
      for (i32 k = 1; k < kBlockKV; ++k) smem.tile[q * Tile::kStep] += smem.tile[q * Tile::kStep + k];
    }
    block_barrier();                       // column 0 is there
  }
}

// The folded tile to the gradient, or to the partial sums of this run.
CF_DEVICE void store(const SharedStorage& smem, const Params& p, const BiasGrid& grid, const TileWork& owner,
                     const Item& item, const Place& at) {
  const i64 first = (i64(owner.own) * grid.heads + owner.head) * grid.rows;
  Score* partials = static_cast<Score*>(p.call.partials) + owner.split * grid.elements(p);
  const i32 rows = p.own_rows ? kBlockQ : 1, cols = p.own_cols ? kBlockKV : 1;
  for (i32 n = thread_index(); n < rows * cols; n += kThreads) {
    const i32 q = n / cols, k = n % cols;
    const i32 row = p.own_rows ? at.row + Tile::Queries::index(q) : 0, col = p.own_cols ? at.col + Tile::Keys::index(k) : 0;
    if (row >= grid.rows || col >= grid.cols) continue;
    const Score x = smem.tile[q * Tile::kStep + k];
    if (p.splits > 1) partials[(first + row) * grid.cols + col] = x;
    else store_bias_gradient(p, item, owner.head, row, col, x);
  }
}

// Where a walk stands: the digits of its number, rows and columns in tiles.
struct Walk {
  u32 loop;
  i32 head, row, col;

  CF_DEVICE Walk(const BiasGrid& grid, i64 number) {
    col = i32(number % grid.walk_cols);
    number /= grid.walk_cols;
    row = i32(number % grid.walk_rows);
    number /= grid.walk_rows;
    head = i32(number % grid.walk_heads);
    loop = u32(number / grid.walk_heads);
  }

  // One step; whether it led to another score matrix.
  CF_DEVICE bool step(const BiasGrid& grid) {
    if (++col < grid.walk_cols) return false;
    col = 0;
    if (++row < grid.walk_rows) return false;
    row = 0;
    if (++head < grid.walk_heads) return true;
    head = 0;
    ++loop;
    return true;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) cupyflash_backward_bias(const Params p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const BiasGrid grid = bias_grid(p, kBlockQ, kBlockKV);
  const TileWork owner = tile_work(block_index(), grid.tile_rows * grid.tile_cols, p.splits, grid.heads, false);
  const Place own{owner.tile / grid.tile_cols * kBlockQ, owner.tile % grid.tile_cols * kBlockKV};
  const i64 start = grid.walk(p) * owner.split / p.splits, stop = grid.walk(p) * (owner.split + 1) / p.splits;
  Walk walk(grid, start);
  Tile::Scores sum;
  clear(sum);
  bool another_matrix = true;
  for (i64 left = stop - start; left > 0; --left) {
    block_barrier();                       // what the tile before kept in shared memory has been read
    if (another_matrix) {
      const i32 head = owner.head + walk.head;
      if (thread_index() == 0) {
        describe_item(smem.work, p, owner.own, walk.loop, head / (p.heads_q / p.heads_kv));
        describe_head(smem.work, p, head);
      }
      block_barrier();                     // the description is there
    }
    add_tile(sum, smem, p, {own.row + walk.row * kBlockQ, own.col + walk.col * kBlockKV});
    another_matrix = walk.step(grid);
  }
  fold(sum, smem, p);
  store(smem, p, grid, owner, item_at(p, owner.own, 0), own);
}
