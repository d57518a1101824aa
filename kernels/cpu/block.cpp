// A residual block in one call: between separate calls, the caller would take time and evict data from the caches.
#include <algorithm>
#include <numeric>

#include "arena.h"
#include "jobs.h"

using namespace vilonghorn;

namespace {

thread_local Scratch workspace, infer_workspace, state_workspace;

class Block {
 public:
  const VlBlock &b;
  const int64_t tokens, width, projected, sequences;  // width: columns of xz; sequences: batch * directions
  float *normed, *scale, *y, *dy, *dxz, *dnormed, *dprojected, *dx, *dmid;

  explicit Block(const VlBlock &b)
      : b(b), tokens(b.batch * b.length), width(2 * b.channels), projected(b.dt_rank + 2 * b.states),
        sequences(b.directions * b.batch) {}

  bool allocate(bool backward) {
    const int64_t wide = b.channels > b.dim ? b.channels : b.dim;
    return workspace.allocate([&](Arena &c) {
      scale = c.next<float>(tokens);
      normed = y = c.next<float>(tokens * wide);  // forward: normed first; backward: y first
      if (!backward) return;
      dy = dnormed = c.next<float>(tokens * wide);  // dy is read before dnormed is written
      dxz = c.next<float>(tokens * width);
      dprojected = c.next<float>(b.channel_splits * sequences * b.length * projected);
      dx = b.channel_splits > 1 ? c.next<float>(sequences * b.length * b.channels) : nullptr;
      dmid = b.hidden ? c.next<float>(tokens * b.dim) : (float *)b.dout;
    });
  }

  // Runs all stages, or only `stage`.
  template <int N> int run(bool (Block::*const (&stages)[N])(int), bool backward, int stage, int isa) {
    if (!allocate(backward)) return 1;
    for (int i = 0; i < N; i++)
      if ((stage < 0 || stage == i) && !(this->*stages[i])(isa)) return 1;
    return 0;
  }

  bool norm_forward(int isa) {
    const VlNorm n = norm();
    return b.in_proj_scale || !vl_norm_forward(&n, isa);
  }
  bool in_proj_forward(int isa) {
    Gemm product = of_norm(norm(), mixer_of(b, isa).by_in_proj);
    product.out = b.xz;
    return !matmul(product, isa);
  }
  bool mamba_inner_forward(int isa) {
    const VlMambaInner m = mamba_inner();
    return !vl_mamba_inner_forward(&m, isa);
  }
  bool out_proj_forward(int isa) {
    return by_weights(mixer_of(b, isa).by_out_proj, b.hidden ? b.mid : b.out, y, b.x, isa);
  }
  bool mlp_forward(int isa) { return !b.hidden || !vilonghorn::mlp_forward(b, isa); }

  bool mlp_backward(int isa) { return !b.hidden || !vilonghorn::mlp_backward(b, dmid, isa); }
  bool out_proj_backward(int isa) {
    return gemm(isa, dy, tokens, b.channels, b.dim, dmid, b.dim, 1, b.out_proj, b.channels, 1);
  }
  bool mamba_inner_backward(int isa) {
    VlMambaInner m = mamba_inner();
    VlScan &s = m.scan;
    s.dy = {dy, 0, b.length * b.channels, b.channels};
    s.dx = dx, s.dz = dxz + b.channels, s.dz_step = width;
    m.dprojected = dprojected, m.dx = dxz;
    m.dconv_weight = b.dconv_weight, m.dconv_bias = b.dconv_bias, m.dx_proj = b.dx_proj, m.ddt_proj = b.ddt_proj;
    s.ddt_bias = b.ddt_bias, s.dD = b.dD, s.dA = b.dA;
    return !vl_mamba_inner_backward(&m, isa);
  }
  bool out_proj_gradient(int isa) {
    return gemm(isa, b.dout_proj, b.dim, b.channels, tokens, dmid, 1, b.dim, y, b.channels, 1);
  }
  bool in_proj_backward(int isa) {
    return gemm(isa, dnormed, tokens, b.dim, width, dxz, width, 1, b.in_proj, b.dim, 1);
  }
  bool norm_backward(int isa) {  // repeats forward, which did not save `scale` and `normed`
    VlNorm n = norm();
    n.dy = dnormed, n.add = dmid, n.dx = b.dx, n.dweight = b.dnorm_weight;
    return !vl_norm_forward(&n, isa) && !vl_norm_backward(&n, isa);
  }
  bool in_proj_gradient(int isa) {
    return gemm(isa, b.din_proj, width, b.dim, tokens, dxz, 1, width, normed, b.dim, 1);
  }

 private:
  bool by_weights(Gemm product, void *out, const void *rows, const void *add, int isa) {
    product.rows = tokens, product.a = rows, product.out = out, product.add = add;
    return !matmul(product, isa);
  }
  bool gemm(int isa, void *out, int64_t rows, int64_t columns, int64_t depth, const void *p, int64_t p_row,
            int64_t p_depth, const void *q, int64_t q_depth, int64_t q_column) {
    if (!out) return true;  // the caller does not want this gradient
    const VlGemm m = {rows,    columns, depth,    b.threads, p,   q,       p_row,
                      p_depth, q_depth, q_column, nullptr,   out, nullptr, b.bf16_parts};
    return !vl_matmul(&m, isa);
  }
  VlNorm norm() const {
    VlNorm n = {};
    n.batch = tokens, n.channels = b.dim, n.eps = b.eps, n.threads = b.threads;
    n.x = b.x, n.weight = b.norm_weight, n.y = normed, n.scale = scale;
    return n;
  }
  VlMambaInner mamba_inner() const { return mamba_inner_of(b, (float *)b.xz, b.length * width, y); }
};

typedef bool (Block::*const Stage)(int);
Stage forward_stages[] = {&Block::norm_forward, &Block::in_proj_forward, &Block::mamba_inner_forward,
                          &Block::out_proj_forward, &Block::mlp_forward};
Stage backward_stages[] = {&Block::mlp_backward,      &Block::out_proj_backward, &Block::mamba_inner_backward,
                           &Block::out_proj_gradient, &Block::in_proj_backward,  &Block::norm_backward,
                           &Block::in_proj_gradient};

// A job may process a whole sequence. Otherwise all jobs run one stage after the other: where they share the channels,
// and for a single stage.
bool is_of_sequences(const VlBlock &b, int stage) { return stage < 0 && b.channel_splits == 1; }

// The parts of each sequence that give all threads equal work; 1 where there are many sequences.
int64_t num_parts(int64_t sequences, int64_t threads) {
  return sequences >= 4 * threads ? 1 : threads / std::gcd(sequences, threads);
}

// The jobs that share the rows of a sequence, for a gated convolution on a grid in inference; 0 for other blocks.
int64_t num_strips(const VlBlock &b, int stage) {
  constexpr int64_t kRows = 4;  // fewer would project too many rows above and below
  const bool gated = b.rule == VL_NONE && b.directions == 1 && b.conv_grid.rows * b.conv_grid.columns == b.length;
  if (stage >= 0 || !gated || b.save || b.drop_scales) return 0;
  const int64_t strips = num_parts(b.batch, b.threads);
  return strips == 1 || b.conv_grid.rows >= kRows * strips ? strips : 0;
}

// Rows of the map that a block with a scan takes at once, in inference of one direction: what lies between two products
// then stays in the cache. 0 for other blocks, and for small maps.
int64_t num_rows(const VlBlock &b) {
  constexpr int64_t kTokens = 2048;
  const VlConvGrid &grid = b.conv_grid;
  if (b.rule == VL_NONE || b.directions > 1 || b.drop_scales || !grid.rows || grid.rows * grid.columns != b.length)
    return 0;
  const int64_t rows = std::max(kTokens / grid.columns, 2 * (grid.height / 2));
  return 2 * rows < grid.rows ? rows : 0;
}

// The block of `rows` rows at a time. The rows beside them are projected, too, for the convolution; the states go on.
int infer_in_strips(const VlBlock &b, int64_t rows, int isa) {
  const int64_t beside = b.conv_grid.height / 2, columns = b.conv_grid.columns, map = b.conv_grid.rows;
  const int64_t strips = (map + rows - 1) / rows;
  float *const states = (float *)state_workspace.reserve(sizeof(float) * b.states * b.channels);
  if (!states) return 1;
  for (int64_t i = 0; i < b.batch * strips; i++) {
    const int64_t strip = b.reverse[0] ? strips - 1 - i % strips : i % strips;
    const int64_t begin = strip * rows, end = std::min(begin + rows, map);
    const int64_t above = std::min(begin, beside), below = std::min(map - end, beside);
    const auto tokens = [&](const void *of, int64_t row) {
      return (float *)of + (i / strips * map + row) * columns * b.dim;
    };
    VlBlock all = b, own = b;  // with the rows beside it, and without
    all.batch = own.batch = 1, all.conv_grid.rows = above + end - begin + below, own.length = (end - begin) * columns;
    all.length = all.conv_grid.rows * columns, all.x = tokens(b.x, begin - above);
    Block block(all);
    if (!block.allocate(false) || !block.norm_forward(isa) || !block.in_proj_forward(isa)) return 1;
    Gemm out = mixer_of(own, isa).by_out_proj;
    Mixer scan = mamba_inner_of(all, (float *)b.xz, 0, block.y);
    scan.begin = above * columns, scan.count = own.length;
    scan.scan.initial_state = i % strips ? states : nullptr, scan.scan.final_state = states;
    out.rows = own.length, out.a = block.y + scan.begin * b.channels, out.add = tokens(b.x, begin);
    own.out = tokens(b.out, begin), out.out = b.hidden ? b.mid : own.out;
    if (mamba_inner_forward(scan, isa) || matmul(out, isa) || (b.hidden && mlp_forward(own, isa))) return 1;
  }
  return 0;
}

constexpr int64_t kChunk = 64, kLanes = 16;  // as in vilonghorn/ops/backends/cpu.py

// Threads share the sequences, and where these are few also parts of their channels.
int64_t num_channel_splits(int64_t sequences, int64_t channels, int64_t threads) {
  return std::max<int64_t>(1, std::min(num_parts(sequences, threads), (channels + kLanes - 1) / kLanes));
}

}  // namespace

VL_EXPORT int vl_block_forward(const VlBlock *b, int stage, int isa) {
  if (const int error = check(*b)) return error;
  const int64_t strips = num_strips(*b, stage);
  if (!strips && !is_of_sequences(*b, stage)) return Block(*b).run(forward_stages, false, stage, isa);
  const bool failed = strips ? mixer_of_rows(*b, strips, isa) : mixer_of_sequences(*b, isa);
  return failed || (b->hidden && mlp_forward(*b, isa));
}
VL_EXPORT int vl_block_backward(const VlBlock *b, int stage, int isa) {
  const int error = check(*b);
  return error ? error : Block(*b).run(backward_stages, true, stage, isa);
}
VL_EXPORT int vl_scan_infer(const VlScan *given, int isa) {
  VlScan s = *given;
  s.chunk = kChunk, s.channel_splits = num_channel_splits(s.batch, s.channels, s.threads);
  return vl_scan_forward(&s, isa);
}
VL_EXPORT int vl_block_infer(const VlBlock *given, int isa) {
  VlBlock b = *given;
  const int64_t chunks = round_up(std::max<int64_t>(b.length, 1), kChunk * b.threads) / kChunk;  // for all threads
  b.chunk = std::max<int64_t>(1, (b.length + chunks - 1) / chunks);
  b.channel_splits = num_channel_splits(b.batch, b.channels, b.threads), b.save = 0;
  if (const int error = check(b)) return error;
  const int64_t rows = num_rows(b);
  if (rows) b.channel_splits = num_channel_splits(1, b.channels, b.threads);
  const int64_t tokens = rows ? (rows + 2 * (b.conv_grid.height / 2)) * b.conv_grid.columns : b.batch * b.length;
  if (!infer_workspace.allocate([&](Arena &a) {
        b.xz =
            !rows && (num_strips(b, -1) || is_of_sequences(b, -1)) ? nullptr : a.next<float>(tokens * 2 * b.channels);
        b.projected = a.next<float>(b.directions * tokens * (b.dt_rank + 2 * b.states));
        b.mid = b.hidden ? a.next<float>(tokens * b.dim) : nullptr;
      }))
    return 1;
  return rows ? infer_in_strips(b, rows, isa) : vl_block_forward(&b, -1, isa);
}
