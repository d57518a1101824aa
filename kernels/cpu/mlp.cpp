// A gated MLP with its norm and residual. A job does all for its rows, whose values between the two products stay in
// its cache; only the gradients of the weights are products over all rows, and dispatch.cpp runs them afterwards.
#include "arena.h"
#include "rows.h"
#include "tile.h"

namespace {

// The rows of one job, and its working memory.
struct Rows {
  const Mlp &m;
  const int64_t begin, count, H;
  float *normed, *scale, *gv, *y, *dx;  // forward: a gv of the caller is used if there is one; backward: gv is the
                                        // gradient of gv; y is that of y, and then y itself

  Rows(const Mlp &m, int64_t job)
      : m(m), begin(first_row(m.tokens, job, mlp_jobs(m))), count(first_row(m.tokens, job + 1, mlp_jobs(m)) - begin),
        H(m.hidden) {}

  const float *row(const void *of, int64_t width) const { return (const float *)of + begin * width; }
  float *row(void *of, int64_t width) const { return (float *)of + begin * width; }

  bool allocate(bool backward) {
    return scratch.allocate([&](Arena &c) {
      scale = c.next<float>(count);
      if (backward) {
        normed = row(m.normed, m.dim), gv = row(m.dgv, 2 * H), y = row(m.y, H), dx = c.next<float>(count * m.dim);
        return;
      }
      normed = c.next<float>(count * m.dim), y = c.next<float>(count * H);
      gv = m.gv ? row(m.gv, 2 * H) : c.next<float>(count * 2 * H);
    });
  }

  // out = a b + add, for the rows of this job
  bool multiply(Gemm product, const float *a, float *out, const float *add) const {
    product.rows = count, product.a = a, product.out = out, product.add = add;
    return VL_JOB(gemm_rows)(product);
  }

  VlNorm norm() const {
    VlNorm n = {};
    n.batch = count, n.channels = m.dim, n.eps = m.eps;
    n.x = row(m.x, m.dim), n.weight = m.norm_weight, n.y = normed, n.scale = scale;
    return n;
  }

  bool forward() {
    if (!allocate(false)) return false;
    VL_JOB(norm_rows)(norm());
    if (!multiply(m.by_in_proj, normed, gv, nullptr)) return false;
    for (int64_t i = 0; i < count; i++)
      for (int64_t h = 0; h < H; h += kGroup * W) {
        const float *g = gv + i * 2 * H + h;
        V values[kGroup];
        const int vectors = (int)least((H - h + W - 1) / W, kGroup);
        silu<float>(values, nullptr, vectors, [&](int j) { return load(g + j * W, lanes(H - h, j)); });
        for (int j = 0; j < vectors; j++)
          store(y + i * H + h + j * W, values[j] * load(g + H + j * W, lanes(H - h, j)), lanes(H - h, j));
      }
    return multiply(m.by_out_proj, y, row(m.out, m.dim), m.residual ? row(m.x, m.dim) : nullptr);
  }

  bool backward(int64_t job) {
    if (!allocate(true)) return false;
    if (!multiply(m.by_out_proj, row(m.dout, m.dim), y, nullptr)) return false;  // the gradient of y
    for (int64_t i = 0; i < count; i++)
      for (int64_t h = 0; h < H; h += kGroup * W) {
        const float *g = row(m.gv, 2 * H) + i * 2 * H + h;
        float *dgv = gv + i * 2 * H + h, *at = y + i * H + h;
        V values[kGroup], slopes[kGroup];
        const int vectors = (int)least((H - h + W - 1) / W, kGroup);
        silu<float>(values, slopes, vectors, [&](int j) { return load(g + j * W, lanes(H - h, j)); });
        for (int j = 0; j < vectors; j++) {
          const int width = lanes(H - h, j);
          const V v = load(g + H + j * W, width), dy = load(at + j * W, width);
          store(dgv + j * W, dy * v * slopes[j], width), store(dgv + H + j * W, dy * values[j], width);
          store(at + j * W, values[j] * v, width);
        }
      }
    VL_JOB(norm_rows)(norm());
    if (!multiply(m.by_in_proj, gv, dx, nullptr)) return false;  // the gradient of the norm
    VlNorm n = norm();
    n.dy = dx, n.add = m.residual ? row(m.dout, m.dim) : nullptr, n.dx = row(m.dx, m.dim);
    n.dweight = m.dnorm_weight;
    return VL_JOB(norm_rows_backward)(n, job);
  }

 private:
  static constexpr int kGroup = 4;  // vectors of which silu hides the latency
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(mlp_forward_job)(const Mlp &m, int64_t job) { return Rows(m, job).forward(); }
bool VL_JOB(mlp_backward_job)(const Mlp &m, int64_t job) { return Rows(m, job).backward(job); }
}  // namespace vilonghorn
