// The mixer of a block without a recurrence, forward, in inference. A job has some rows of a map, and goes through them
// a few at a time, so that their projections stay in the cache.
#include "arena.h"
#include "conv.h"
#include "tile.h"

namespace {

constexpr int64_t kCacheFloats = 3 << 15;  // 384 KiB of projections
constexpr int64_t kTokens = 64;            // of a row that the convolution takes at once

struct Strip {
  const BlockPart &b;
  const int64_t columns, rows, C, width, above, beside, begin, end, most;  // most: rows at a time
  const float *const x;                                                    // of the sequence
  float *const out;
  float *normed, *scale, *xz, *y;  // xz: the projections of `most` rows, and of those above and below that taps read
  ConvWeights<float> *weights;     // of each vector of channels

  Strip(const BlockPart &b, int64_t sequence, int64_t strip)
      : b(b), columns(b.conv_grid.columns), rows(b.conv_grid.rows), C(b.channels), width(2 * C),
        above(b.conv_grid.height / 2), beside(b.d_conv / b.conv_grid.height / 2), begin(rows * strip / b.strips),
        end(rows * (strip + 1) / b.strips), most(1 + kCacheFloats / (columns * width)),
        x((const float *)b.x + sequence * b.length * b.dim),
        out((float *)(b.hidden ? b.mid : b.out) + sequence * b.length * b.dim) {}

  bool forward() {
    const bool allocated = scratch.allocate([&](Arena &c) {
      xz = c.next<float>((most + 2 * above) * columns * width), y = c.next<float>(most * columns * C);
      normed = c.next<float>(kTokens * b.dim), scale = c.next<float>(kTokens);
      weights = c.next<ConvWeights<float>>((C + W - 1) / W);
    });
    if (!allocated) return false;
    for (int64_t d = 0; d < C; d += W)
      weights[d / W].load(b.conv_weight, b.conv_bias, 0, b.d_conv, C, d, (int)least(C - d, W));
    int64_t projected = begin - above;  // rows of which xz has the projections, from the one above `first`
    for (int64_t first = begin; first < end; first += most) {
      const int64_t count = least(end - first, most), kept = projected - (first - above);
      if (first > begin) memmove(xz, xz + most * columns * width, sizeof(float) * kept * columns * width);
      for (; projected < first + count + above; projected++)
        if (!project(projected, xz + (projected - (first - above)) * columns * width)) return false;
      for (int64_t row = 0; row < count; row++) b.d_conv == 9 && above == 1 ? convolve<3>(row) : convolve<0>(row);
      Gemm product = b.by_out_proj;
      product.rows = count * columns, product.a = y, product.out = out + first * columns * b.dim;
      product.add = x + first * columns * b.dim;
      if (!VL_JOB(gemm_rows)(product)) return false;
    }
    return true;
  }

  // Norm and in_proj of a row; zeros for one outside of the map.
  bool project(int64_t row, float *to) {
    if (row < 0 || row >= rows) return memset(to, 0, sizeof(float) * columns * width), true;
    for (int64_t c = 0; c < columns; c += kTokens) {
      VlNorm norm = {};
      norm.batch = least(columns - c, kTokens), norm.channels = b.dim, norm.eps = b.eps;
      norm.x = x + (row * columns + c) * b.dim, norm.weight = b.norm_weight, norm.y = normed, norm.scale = scale;
      Gemm product = b.by_in_proj;
      product.out = to + c * width;
      if (!VL_JOB(normed_gemm_rows)(norm, product)) return false;
    }
    return true;
  }

  // y of a row: the convolution with SiLU, times silu(z). SIDE: of the filter, if specialised.
  template <int SIDE> VL_FLATTEN void convolve(int64_t row) {
    V u[kTokens], z[kTokens];
    const float *from = xz + (row + above) * columns * width;
    for (int64_t c = 0; c < columns; c += kTokens)
      for (int64_t d = 0; d < C; d += W) {
        const int lanes = (int)least(C - d, W), count = (int)least(columns - c, kTokens);
        const ConvWeights<float> w = weights[d / W];  // a copy, which stays in registers
        for (int i = 0; i < count; i++) u[i] = sum<SIDE>(w, from + (c + i) * width + d, c + i, lanes);
        silu<float>(u, nullptr, count, [&](int i) { return u[i]; });
        silu<float>(z, nullptr, count, [&](int i) { return load(from + (c + i) * width + C + d, lanes); });
        for (int i = 0; i < count; i++) store(y + (row * columns + c + i) * C + d, u[i] * z[i], lanes);
      }
  }
  // The convolution at a token, whose input is `at`. Rows outside of the map are zeros; columns outside are left out.
  template <int SIDE> VL_FLATTEN V sum(const ConvWeights<float> &w, const float *at, int64_t column, int lanes) const {
    const int64_t across = SIDE ? SIDE : 2 * beside + 1, down = SIDE ? SIDE : 2 * above + 1;
    const float *tap = at - (down / 2 * columns + across / 2) * width;
    const bool inside = column >= across / 2 && column + across / 2 < columns;
    V v = w.bias;
    VL_UNROLL for (int64_t j = 0; j < down; j++, tap += columns * width) {
      VL_UNROLL for (int64_t i = 0; i < across; i++) {
        const int64_t neighbor = column + i - across / 2;
        if (inside || (neighbor >= 0 && neighbor < columns))
          v += w.weight[j * across + i] * load(tap + i * width, lanes);
      }
    }
    return v;
  }
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(gated_conv_job)(const BlockPart &b, int64_t job) {
  return Strip(b, job / b.strips, job % b.strips).forward();
}
}  // namespace vilonghorn
