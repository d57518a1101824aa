// The gated MLP of a block with its norm and residual. A job does all for its rows, whose values between the two
// products stay in its cache; only the gradients of the weights are products over all rows, and dispatch.cpp runs them
// afterwards.
#include "arena.h"
#include "rows.h"
#include "tile.h"

namespace {

// The rows of one job, and its working memory.
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
    VL_JOB(norm_rows)(norm());
    if (!multiply(m.by_in_proj, normed, gv, nullptr)) return false;
    for (int64_t i = 0; i < count; i++) {
      const float drop = drop_scale(i);
      for (int64_t h = 0; h < H; h += kGroup * W) {
        const float *g = gv + i * 2 * H + h;
        V values[kGroup];
        const int vectors = (int)least((H - h + W - 1) / W, kGroup);
        silu<float>(values, nullptr, vectors, [&](int j) { return load(g + j * W, lanes(H - h, j)); });
        for (int j = 0; j < vectors; j++)
          store(y + i * H + h + j * W, values[j] * load(g + H + j * W, lanes(H - h, j)) * drop, lanes(H - h, j));
      }
    }
    return multiply(m.by_out_proj, y, row(m.out, m.dim), row(m.mid, m.dim));
  }

  bool backward(int64_t job) {
    if (!allocate(true)) return false;
    if (!multiply(m.by_out_proj, row(m.dout, m.dim), y, nullptr)) return false;  // the gradient of y
    for (int64_t i = 0; i < count; i++) {
      const float drop = drop_scale(i);
      for (int64_t h = 0; h < H; h += kGroup * W) {
        const float *g = row(m.gv, 2 * H) + i * 2 * H + h;
        float *dgv = gv + i * 2 * H + h, *at = y + i * H + h;
        V values[kGroup], slopes[kGroup];
        const int vectors = (int)least((H - h + W - 1) / W, kGroup);
        silu<float>(values, slopes, vectors, [&](int j) { return load(g + j * W, lanes(H - h, j)); });
        for (int j = 0; j < vectors; j++) {
          const int width = lanes(H - h, j);
          const V v = load(g + H + j * W, width), dy = load(at + j * W, width) * drop;
          store(dgv + j * W, dy * v * slopes[j], width), store(dgv + H + j * W, dy * values[j], width);
          store(at + j * W, values[j] * v * drop, width);
        }
      }
    }
    VL_JOB(norm_rows)(norm());
    if (!multiply(m.by_in_proj, gv, dx, nullptr)) return false;  // the gradient of the norm
    VlNorm n = norm();
    n.dy = dx, n.add = row(m.dout, m.dim), n.dx = row(m.dmid, m.dim), n.dweight = m.dmlp_norm_weight;
    return VL_JOB(norm_rows_backward)(n, job);
  }

 private:
  static constexpr int kGroup = 4;  // vectors of which silu hides the latency
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(mlp_forward_job)(const BlockPart &m, int64_t job) { return Rows(m, job).forward(); }
bool VL_JOB(mlp_backward_job)(const BlockPart &m, int64_t job) { return Rows(m, job).backward(job); }
}  // namespace vilonghorn
