// Norm, mixer and residual of a block, forward, one sequence in a job. For a short sequence, the values between the
// products stay in the cache.
#include "arena.h"
#include "rows.h"
#include "tile.h"

namespace {
constexpr int64_t kNormRows = 256;  // that in_proj takes at once
}

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
    VL_JOB(norm_rows)(norm);
    Gemm in = b.by_in_proj;
    in.rows = norm.batch, in.a = normed, in.out = xz + first * width;
    if (!VL_JOB(gemm_rows)(in)) return false;
  }
  if (!VL_JOB(mamba_inner_forward_job)(mamba_inner_of(b, xz, 0, b.y), job)) return false;
  Gemm out = b.by_out_proj;
  out.rows = L, out.a = y, out.out = (float *)(b.hidden ? b.mid : b.out) + job * L * dim, out.add = x;
  return VL_JOB(gemm_rows)(out);
}
}  // namespace vilonghorn
