// The jobs of a block, forward its mixer and both ways its gated MLP, each with norm and residual. What lies between
// two products stays in the cache: a job has one sequence of the mixer, or some rows of the MLP. The gradients of the
// MLP's weights are products over all rows, which dispatch.cpp runs afterwards.
#include "arena.h"
#include "tile.h"

namespace {

constexpr int64_t kNormRows = 256;  // that in_proj of the mixer takes at once

// The rows of one job of the MLP, and its working memory.
struct Rows {
  const BlockPart &m;
  const int64_t tokens, begin, count, H;
  float *normed, *scale, *gv, *y, *dx;  // backward: gv is the gradient of gv; y is that of y, and then y itself

  Rows(const BlockPart &m, int64_t job)
      : m(m), tokens(m.batch * m.length), begin(first_row(tokens, job, mlp_jobs(m))),
        count(first_row(tokens, job + 1, mlp_jobs(m)) - begin), H(m.hidden) {}

  const float *row(const void *of, int64_t width) const { return (const float *)of + begin * width; }
  float *row(void *of, int64_t width) const { return (float *)of + begin * width; }
  // The factor of what a row adds to the stream.
  float drop_scale(int64_t i) const {
    return m.drop_scales ? ((const float *)m.drop_scales)[m.batch + (begin + i) / m.length] : 1;
  }

  bool allocate(bool backward) {
    return scratch.allocate([&](Arena &c) {
      scale = c.next<float>(count);
      if (backward) {
        normed = row(m.normed, m.dim), gv = row(m.dgv, 2 * H), y = row(m.y, H), dx = c.next<float>(count * m.dim);
        return;
      }
      normed = c.next<float>(count * m.dim), y = c.next<float>(count * H);
      gv = m.save ? row(m.gv, 2 * H) : c.next<float>(count * 2 * H);
    });
  }

  // out = a b + add, for the rows of this job
  bool multiply(Gemm product, const float *a, float *out, const float *add) const {
    product.rows = count, product.a = a, product.out = out, product.add = add;
    return VL_JOB(gemm_rows)(product);
  }

  VlNorm norm() const {
    VlNorm n = {};
    n.batch = count, n.channels = m.dim, n.eps = m.mlp_eps;
    n.x = row(m.mid, m.dim), n.weight = m.mlp_norm_weight, n.y = normed, n.scale = scale;
    return n;
  }

  bool forward() {
    if (!allocate(false)) return false;
    Gemm in = m.by_in_proj;
    in.out = gv;
    if (!VL_JOB(normed_gemm_rows)(norm(), in)) return false;
    each_gate<false>(gv, [&](int64_t g, int64_t h, int width, V gate, V, float drop)
                             VL_LAMBDA { store(y + h, gate * load(gv + g + H, width) * drop, width); });
    return multiply(m.by_out_proj, y, row(m.out, m.dim), row(m.mid, m.dim));
  }

  bool backward(int64_t job) {
    if (!allocate(true)) return false;
    if (!multiply(m.by_out_proj, row(m.dout, m.dim), y, nullptr)) return false;  // the gradient of y
    const float *given = row(m.gv, 2 * H);
    each_gate<true>(given, [&](int64_t g, int64_t h, int width, V gate, V slope, float drop) VL_LAMBDA {
      const V v = load(given + g + H, width), dy = load(y + h, width) * drop;
      store(gv + g, dy * v * slope, width), store(gv + g + H, dy * gate, width);
      store(y + h, gate * v * drop, width);
    });
    VL_JOB(norm_rows)(norm());
    if (!multiply(m.by_in_proj, gv, dx, nullptr)) return false;  // the gradient of the norm
    VlNorm n = norm();
    n.dy = dx, n.add = row(m.dout, m.dim), n.dx = row(m.dmid, m.dim), n.dweight = m.dmlp_norm_weight;
    return VL_JOB(norm_rows_backward)(n, job);
  }

 private:
  // Calls visit(element of gv, element of y, lanes in use, silu(g), its slope, drop scale) for each vector of the rows.
  template <bool SLOPES, class Visit> VL_FLATTEN void each_gate(const float *gv, Visit visit) const {
    constexpr int kGroup = 4;  // vectors of which silu hides the latency
    for (int64_t i = 0; i < count; i++)
      for (int64_t h = 0; h < H; h += kGroup * W) {
        const float *g = gv + i * 2 * H + h;
        const float drop = drop_scale(i);
        V values[kGroup], slopes[kGroup] = {};
        const int vectors = (int)least((H - h + W - 1) / W, kGroup);
        silu<float>(values, SLOPES ? slopes : nullptr, vectors,
                    [&](int j) { return load(g + j * W, lanes(H - h, j)); });
        for (int j = 0; j < vectors; j++)
          visit(i * 2 * H + h + j * W, i * H + h + j * W, lanes(H - h, j), values[j], slopes[j], drop);
      }
  }
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(mixer_forward_job)(const BlockPart &b, int64_t job) {
  const int64_t L = b.length, dim = b.dim, width = 2 * b.channels;
  const float *x = (const float *)b.x + job * L * dim;
  float *normed, *scale, *xz, *y = b.y + job * L * b.channels;
  const bool allocated = scratch.allocate([&](Arena &c) {
    normed = c.next<float>(kNormRows * dim), scale = c.next<float>(kNormRows);
    xz = b.save ? (float *)b.xz + job * L * width : c.next<float>(L * width);
  });
  if (!allocated) return false;
  for (int64_t first = 0; first < L; first += kNormRows) {
    VlNorm norm = {};
    norm.batch = least(L - first, kNormRows), norm.channels = dim, norm.eps = b.eps;
    norm.x = x + first * dim, norm.weight = b.norm_weight, norm.y = normed, norm.scale = scale;
    Gemm in = b.by_in_proj;
    in.out = xz + first * width;
    if (!VL_JOB(normed_gemm_rows)(norm, in)) return false;
  }
  if (!VL_JOB(mamba_inner_forward_job)(mamba_inner_of(b, xz, 0, b.y), job)) return false;
  Gemm out = b.by_out_proj;
  out.rows = L, out.a = y, out.out = (float *)(b.hidden ? b.mid : b.out) + job * L * dim, out.add = x;
  return VL_JOB(gemm_rows)(out);
}
bool VL_JOB(mlp_forward_job)(const BlockPart &m, int64_t job) { return Rows(m, job).forward(); }
bool VL_JOB(mlp_backward_job)(const BlockPart &m, int64_t job) { return Rows(m, job).backward(job); }
}  // namespace vilonghorn
