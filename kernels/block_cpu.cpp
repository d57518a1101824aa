// A residual block in one call: its caller's language and allocator would take their time between any two of its kernels,
// and the more so in caches that a kernel has just filled.
#include "scan.h"
#include "scratch.h"

namespace {

thread_local Scratch workspace;

class Block {
 public:
  const VlBlock &b;
  const int64_t tokens, width, projected, sequences;  // width: of xz; sequences: in all directions
  float *normed, *scale, *y, *dy, *dxz, *dnormed, *dprojected, *dx;

  explicit Block(const VlBlock &b)
      : b(b), tokens(b.batch * b.length), width(2 * b.channels), projected(b.rank + 2 * b.states), sequences(b.groups * b.batch) {}

  bool take(bool backward) {
    const int64_t wide = b.channels > b.dim ? b.channels : b.dim;
    return workspace.carve([&](Carver &c) {
      scale = c.next<float>(tokens);
      normed = y = c.next<float>(tokens * wide);  // normed is read before y is written, or written after y is read
      if (!backward) return;
      dy = dnormed = c.next<float>(tokens * wide);  // in this order
      dxz = c.next<float>(tokens * width);
      dprojected = c.next<float>(b.parts * sequences * b.length * projected);
      dx = b.parts > 1 ? c.next<float>(sequences * b.length * b.channels) : nullptr;
    });
  }

  // All stages, or the one asked for.
  template <int STAGES> int run(bool (Block::*const (&stages)[STAGES])(int), bool backward, int stage, int level) {
    if (!take(backward)) return 1;
    for (int i = 0; i < STAGES; i++)
      if ((stage < 0 || stage == i) && !(this->*stages[i])(level)) return 1;
    return 0;
  }

  bool norm_forward(int level) {
    const VlNorm n = norm();
    return !vl_norm_forward(&n, level);
  }
  bool in_proj_forward(int level) { return multiply(level, b.xz, tokens, width, b.dim, normed, b.dim, 1, b.in_proj, 1, b.dim); }
  bool mix_forward(int level) {
    const VlMix m = mix();
    return !vl_mix_forward(&m, level);
  }
  bool out_proj_forward(int level) {
    const void *add = b.residual ? b.x : nullptr;
    return multiply(level, b.out, tokens, b.dim, b.channels, y, b.channels, 1, b.out_proj, 1, b.channels, add);
  }

  bool out_proj_backward(int level) {
    return multiply(level, dy, tokens, b.channels, b.dim, b.dout, b.dim, 1, b.out_proj, b.channels, 1);
  }
  bool mix_backward(int level) {
    VlMix m = mix();
    VlScan &s = m.scan;
    s.dy = {dy, 0, b.length * b.channels, b.channels};
    s.dx = dx, s.dz = dxz + b.channels, s.dz_step = width;
    m.dprojected = dprojected, m.dx = dxz;
    m.dconv_weight = b.dconv_weight, m.dconv_bias = b.dconv_bias, m.dx_proj = b.dx_proj, m.ddt_proj = b.ddt_proj;
    s.ddt_bias = b.ddt_bias, s.dD = b.dD, s.dA = b.dA;
    return !vl_mix_backward(&m, level);
  }
  bool out_proj_gradient(int level) {
    return multiply(level, b.dout_proj, b.dim, b.channels, tokens, b.dout, 1, b.dim, y, b.channels, 1);
  }
  bool in_proj_backward(int level) { return multiply(level, dnormed, tokens, b.dim, width, dxz, width, 1, b.in_proj, b.dim, 1); }
  bool norm_backward(int level) {  // whose factors of rows, and results, forward did not keep
    VlNorm n = norm();
    n.dy = dnormed, n.add = b.residual ? b.dout : nullptr, n.dx = b.dx, n.dweight = b.dnorm_weight;
    return !vl_norm_forward(&n, level) && !vl_norm_backward(&n, level);
  }
  bool in_proj_gradient(int level) { return multiply(level, b.din_proj, width, b.dim, tokens, dxz, 1, width, normed, b.dim, 1); }

 private:
  bool multiply(int level, void *out, int64_t rows, int64_t columns, int64_t depth, const void *p, int64_t p_row, int64_t p_depth,
                const void *q, int64_t q_depth, int64_t q_column, const void *add = nullptr) {
    if (!out) return true;  // a gradient that is not wanted
    const VlMatmul m = {rows, columns, depth, b.threads, p, q, p_row, p_depth, q_depth, q_column, add, out};
    return !vl_matmul(&m, level);
  }
  VlNorm norm() const {
    VlNorm n = {};
    n.batch = tokens, n.channels = b.dim, n.eps = b.eps, n.threads = b.threads;
    n.x = b.x, n.weight = b.norm_weight, n.y = normed, n.scale = scale;
    return n;
  }
  VlMix mix() const {
    VlMix m = {};
    VlScan &s = m.scan;
    s.groups = b.groups, s.batch = b.batch, s.length = b.length, s.channels = b.channels, s.states = b.states;
    s.chunk = b.chunk, s.parts = b.parts, s.rule = b.rule, s.mean = 1, s.threads = b.threads, s.reverse = b.reverse;
    s.x = {b.xz, 0, b.length * width, width}, s.z = {(float *)b.xz + b.channels, 0, b.length * width, width};
    s.A = b.A, s.D = b.D, s.dt_bias = b.dt_bias, s.y = y, s.checkpoints = b.checkpoints;
    m.taps = b.taps, m.rank = b.rank, m.projected = b.projected;
    m.conv_weight = b.conv_weight, m.conv_bias = b.conv_bias, m.x_proj = b.x_proj, m.dt_proj = b.dt_proj;
    return m;
  }
};

typedef bool (Block::*const Stage)(int);
Stage forward_stages[] = {&Block::norm_forward, &Block::in_proj_forward, &Block::mix_forward, &Block::out_proj_forward};
Stage backward_stages[] = {&Block::out_proj_backward, &Block::mix_backward,  &Block::out_proj_gradient,
                           &Block::in_proj_backward,  &Block::norm_backward, &Block::in_proj_gradient};

}  // namespace

VL_EXPORT int vl_block_forward(const VlBlock *b, int stage, int level) { return Block(*b).run(forward_stages, false, stage, level); }
VL_EXPORT int vl_block_backward(const VlBlock *b, int stage, int level) { return Block(*b).run(backward_stages, true, stage, level); }
